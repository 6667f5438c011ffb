//! The page that `web` writes, in a headless Chromium: it plans as the command does, and runs on the CPU and on WebGPU.

use crate::common::Folder;
use crate::picture::chromium::Chromium;
use plimsoll::internals::npy;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library of the page: `PLIMSOLL_WASM`, or what src/web/build.sh has built.
fn library() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os("PLIMSOLL_WASM") {
        return Some(given.into());
    }
    let program = Path::new(env!("CARGO_BIN_EXE_plimsoll"));
    let built = program.ancestors().nth(2).expect("it is in a folder of the target").join("plimsoll.wasm");
    if !built.is_file() {
        eprintln!("SKIPPED: no library for pages; src/web/build.sh builds it, PLIMSOLL_WASM names one");
    }
    Some(built).filter(|path| path.is_file())
}

fn command(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args).current_dir(folder).env_remove("RUST_LOG").output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A browser with the page.
fn opened(name: &str) -> Option<(Chromium, Folder)> {
    let library = library()?;
    let mut browser = Chromium::start_with(name, &["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"])?;
    let folder = Folder::new(name);
    let page = folder.path("page.html");
    let library = library.to_str().expect("a path of text");
    let written = command(Path::new("."), &["web", "-o", &page, "--wasm", library]);
    assert!(written.status.success(), "{}", text(&written.stderr));
    browser.open(Path::new(&page));
    browser.eval("$('files').onchange = null, 0");
    Some((browser, folder))
}

/// Gives the page files as a user does who chooses them. Returns the plan, or the error.
#[track_caller]
fn drop(browser: &mut Chromium, files: &[&str]) -> Result<Value, String> {
    let field = browser.call("Runtime.evaluate", json!({"expression": "$('files')"}));
    let object = &field["result"]["objectId"];
    browser.call("DOM.setFileInputFiles", json!({"files": files, "objectId": object}));
    planned(browser, "drop($('files').files)")
}

#[track_caller]
fn planned(browser: &mut Chromium, call: &str) -> Result<Value, String> {
    let found = browser.eval(&format!(
        "{call}.then(plan => plan && {{bytes: plan.bytes, memory: plan.memory, error: plan.error, advice: plan.advice, table: plan.table}})"
    ));
    let error = browser.eval("$('error').textContent");
    match error.as_str() {
        Some("") => Ok(found),
        error => Err(error.unwrap_or_default().to_owned()),
    }
}

/// Checks that nothing was asked of anybody but files and the page itself.
fn asks_nobody(browser: &Chromium) {
    for event in browser.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent") {
        let url = event["params"]["request"]["url"].as_str().unwrap_or_default();
        assert!(["file:", "blob:", "data:"].iter().any(|own| url.starts_with(own)), "{url}");
    }
}

/// Each graph takes the bytes that the command says, or is refused in the same words.
#[test]
fn the_page_plans_as_the_command_does() {
    let Some((mut browser, folder)) = opened("web-plan") else { return };
    let graphs = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs");
    let mut files: Vec<_> =
        graphs.read_dir().expect("it is there").map(|entry| entry.expect("a file").path()).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "onnx" || kind == "onnxtxt"));
    files.sort();
    let digits = std::fs::read(graphs.join("digits.onnx")).expect("it is there");
    let noise: Vec<u8> = (0..100_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for (name, bytes) in [("broken.onnx", &digits[..digits.len() / 2]), ("noise.onnx", &noise), ("empty.onnx", &[])] {
        files.push(folder.file(name, bytes).into());
    }
    for file in files {
        let name = file.file_name().and_then(|name| name.to_str()).expect("a name");
        let first = drop(&mut browser, &[file.to_str().expect("a path of text")]);
        for target in ["cpu", "wgpu", "cuda"] {
            let found = match &first {
                Ok(_) => planned(&mut browser, &format!("$('target').value = '{target}', plan()")),
                Err(error) => Err(error.clone()),
            };
            let ran = command(file.parent().expect("a folder"), &["plan", name, "--target", target, "--json", "-q"]);
            let told: Value = serde_json::from_slice(&ran.stdout).expect("it prints JSON");
            match found {
                Ok(plan) => assert_eq!(plan["bytes"], told["planned_bytes"], "{name} {target}"),
                Err(error) => assert_eq!(json!(error), told["error"], "{name} {target}"),
            }
        }
    }
    asks_nobody(&browser);
}

/// A limit that does not suffice is answered with what would help.
#[test]
fn a_limit_is_held() {
    let Some((mut browser, _folder)) = opened("web-limit") else { return };
    let mlp = concat!(env!("CARGO_MANIFEST_DIR"), "/graphs/mlp.onnxtxt");
    drop(&mut browser, &[mlp]).expect("it is planned");
    browser.eval("$('dims').querySelector('input').value = 64, $('limit').value = '900KiB', 0");
    let error = planned(&mut browser, "plan()").expect_err("it does not fit");
    assert!(error.contains("921,600"), "{error}");
    let advice = browser.eval("$('advice').textContent");
    assert!(advice.as_str().is_some_and(|text| text.contains("does not fit")), "{advice}");
    browser.eval("$('limit').value = '6GiB', 0");
    planned(&mut browser, "plan()").expect("it fits");
}

/// Outputs are the command's, on the CPU and on WebGPU.
#[test]
fn the_page_runs_models() {
    let Some((mut browser, folder)) = opened("web-run") else { return };
    let graphs = Path::new(env!("CARGO_MANIFEST_DIR")).join("graphs");
    let images = graphs.join("digits-images.npy");
    let cases =
        ["digits.onnx", "mlp.onnxtxt", "attention.onnxtxt", "unet.onnxtxt", "experts.onnxtxt", "residual.onnxtxt"];
    for name in cases {
        let model = graphs.join(name);
        let model = model.to_str().expect("a path of text");
        let of_command = folder.path(name);
        let mut args = vec!["run", model, "--backend", "cpu", "--seed", "3", "--output-dir", &of_command, "-q"];
        let inputs = browser.eval("0");
        assert_eq!(inputs, json!(0));
        let planned = drop(&mut browser, &[model]).expect("it is planned");
        let batch = format!("image={}", images.display());
        let is_digits = name == "digits.onnx";
        if is_digits {
            args.extend(["--input", &batch]);
        }
        let ran = command(Path::new("."), &args);
        assert!(ran.status.success(), "{name}: {}", text(&ran.stderr));
        if is_digits {
            give_images(&mut browser, &images);
        }
        assert!(planned["bytes"].as_u64().is_some_and(|bytes| bytes > 0));
        for device in ["cpu", "webgpu"] {
            browser.eval(&format!("$('on').value = '{device}', $('seed').value = 3, 0"));
            let found = browser.eval(
                "run().then(ran => ran && ({device: ran.device, outputs: ran.outputs.map(o => ({name: o.name, npy: [...o.npy]}))}))",
            );
            let error = browser.eval("$('error').textContent + $('failed').textContent");
            assert_eq!(error, json!(""), "{name} on {device}");
            let told = found["device"].as_str().unwrap_or_default();
            assert!(told.starts_with(if device == "cpu" { "CPU" } else { "WebGPU" }), "{told}");
            for output in found["outputs"].as_array().expect("outputs") {
                let bytes: Vec<u8> = serde_json::from_value(output["npy"].clone()).expect("bytes");
                let length = bytes.len() as u64;
                let found = npy::read_from(&mut &bytes[..], length).expect("an array");
                let output = output["name"].as_str().expect("a name");
                let expected = npy::read(&Path::new(&of_command).join(format!("{output}.npy"))).expect("an array");
                crate::common::agrees(&found, &expected, 1e-4)
                    .unwrap_or_else(|e| panic!("{name} on {device}: {output}: {e}"));
            }
        }
    }
    asks_nobody(&browser);
}

/// Gives the images as a user does who drops them: the rows set the batch.
fn give_images(browser: &mut Chromium, images: &Path) {
    let (_, shape, _) = npy::map(images).expect("an array");
    browser.eval(&format!("$('dims').querySelectorAll('input').forEach(field => field.value = {}), 0", shape[0]));
    planned(browser, "plan()").expect("it is planned");
    drop(browser, &[images.to_str().expect("a path of text")]).expect("it is planned");
}

/// A message of protobuf with one field of bytes.
fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(number << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 128 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A file of 5 GB, of which the page reads what is no weight.
#[test]
fn a_file_of_5_gb_is_planned_in_little_memory() {
    const ROWS: u64 = 1 << 10;
    let Some((mut browser, folder)) = opened("web-large") else { return };
    // Products of one input with weights of different widths.
    let widths: Vec<u64> = (0..8).map(|n| (160 + n) << 10).collect();
    let value = |name: &str, shape: &[u64]| {
        let dims: Vec<u8> = shape.iter().flat_map(|&d| field(1, &[varint(1 << 3), varint(d)].concat())).collect();
        let tensor = [varint(1 << 3), varint(1), field(2, &dims)].concat();
        [field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat()
    };
    let mut small = field(2, b"large");
    small.extend(field(11, &value("x", &[1, ROWS])));
    let mut heads = Vec::new();
    for (n, &width) in widths.iter().enumerate() {
        let (w, y) = (format!("w{n}"), format!("y{n}"));
        let node = [field(1, b"x"), field(1, w.as_bytes()), field(2, y.as_bytes()), field(4, b"MatMul")].concat();
        small.extend(field(1, &node));
        small.extend(field(12, &value(&y, &[1, width])));
        let bytes = ROWS * width * 4;
        let dims = [varint(1 << 3), varint(ROWS), varint(1 << 3), varint(width), varint(2 << 3), varint(1)].concat();
        let head = [dims, field(8, w.as_bytes()), varint(9 << 3 | 2), varint(bytes)].concat();
        heads.push(([varint(5 << 3 | 2), varint(head.len() as u64 + bytes), head].concat(), bytes));
    }
    let graph = small.len() as u64 + heads.iter().map(|(head, bytes)| head.len() as u64 + bytes).sum::<u64>();
    let opset = field(8, &[varint(2 << 3), varint(17)].concat());
    let start = [varint(1 << 3), varint(8), opset, varint(7 << 3 | 2), varint(graph), small].concat();
    let path = folder.path("large.onnx");
    let mut file = File::create(&path).expect("it is made");
    file.write_all(&start).expect("it is written");
    for (head, bytes) in &heads {
        file.write_all(head).expect("it is written");
        file.seek(SeekFrom::Current(*bytes as i64)).expect("a hole");
    }
    let length = file.stream_position().expect("a place");
    file.set_len(length).expect("a sparse file");
    assert!(length > 5_000_000_000, "{length}");
    let plan = drop(&mut browser, &[&path]).expect("it is planned");
    let ran = command(Path::new("."), &["plan", &path, "--json", "-q"]);
    let told: Value = serde_json::from_slice(&ran.stdout).expect("it prints JSON");
    assert_eq!(plan["bytes"], told["planned_bytes"], "{told}");
    let memory = plan["memory"].as_u64().expect("it says so");
    assert!(memory < 200 << 20, "the library took {memory} bytes");
    let peak = browser.largest_process();
    eprintln!("{length} bytes: the library took {memory}, the largest process of the browser {peak}");
}
