//! Arrays that commands read: archives, folders of files, and damaged ones.

use crate::cli::{fails, ok, ok_json};
use crate::common::Folder;
use miniz_oxide::deflate::compress_to_vec;
use std::fs;

const DIGITS: &[&str] = &["train", "graphs/digits.onnx", "--loss", "cross_entropy", "--lr", "0.001", "--batch", "12"];
const CPU: &[&str] = &["--backend", "cpu", "--threads", "1"];
const IMAGES: &str = "graphs/digits-images.npy";
const LABELS: &str = "graphs/digits-labels.npy";

fn file(path: &str) -> Vec<u8> {
    fs::read(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).expect("it is there")
}

/// CRC-32, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

fn words(numbers: &[(u64, usize)]) -> Vec<u8> {
    numbers.iter().flat_map(|&(number, bytes)| number.to_le_bytes()[..bytes].to_vec()).collect()
}

/// A zip file, as `numpy.savez` and `savez_compressed` write it. With `long`, its numbers have 64 bits.
fn zip(members: &[(&str, &[u8])], deflated: bool, long: bool) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in members {
        let at = out.len() as u64;
        let (packed, method) = if deflated { (compress_to_vec(bytes, 6), 8) } else { (bytes.to_vec(), 0) };
        let crc = u64::from(crc32(bytes));
        let [size, less] = [bytes.len() as u64, packed.len() as u64];
        let shown = |number: u64| if long { 0xffff_ffff } else { number };
        let extra = |numbers: &[(u64, usize)]| if long { words(numbers) } else { Vec::new() };
        let local = extra(&[(1, 2), (16, 2), (size, 8), (less, 8)]);
        let mut numbers = vec![(20, 2), (0, 2), (method, 2), (0, 4), (crc, 4), (shown(less), 4), (shown(size), 4)];
        out.extend(words(&[(0x0403_4b50, 4)]));
        out.extend(words(&numbers));
        out.extend(words(&[(name.len() as u64, 2), (local.len() as u64, 2)]));
        out.extend([name.as_bytes(), &local, &packed].concat());
        let extra = extra(&[(7, 2), (2, 2), (0, 2), (1, 2), (24, 2), (size, 8), (less, 8), (at, 8)]);
        numbers.insert(0, (20, 2));
        directory.extend(words(&[(0x0201_4b50, 4)]));
        directory.extend(words(&numbers));
        directory.extend(words(&[(name.len() as u64, 2), (extra.len() as u64, 2), (0, 8), (0, 2), (shown(at), 4)]));
        directory.extend([name.as_bytes(), &extra].concat());
    }
    let (start, size, count) = (out.len() as u64, directory.len() as u64, members.len() as u64);
    out.extend(directory);
    if long {
        let end = out.len() as u64;
        let sizes = [(44, 8), (45, 2), (45, 2), (0, 8), (count, 8), (count, 8), (size, 8), (start, 8)];
        out.extend(words(&[(0x0606_4b50, 4)]));
        out.extend(words(&sizes));
        out.extend(words(&[(0x0706_4b50, 4), (0, 4), (end, 8), (1, 4)]));
        out.extend(words(&[(0x0605_4b50, 4), (0, 4), (0xffff, 2), (0xffff, 2), (0xffff_ffff, 4), (0xffff_ffff, 4)]));
        out.extend(words(&[(0, 2)]));
    } else {
        out.extend(words(&[(0x0605_4b50, 4), (0, 4), (count, 2), (count, 2), (size, 4), (start, 4), (0, 2)]));
    }
    out
}

/// An array of bytes, of so many rows of three.
fn array(rows: usize, first: u8) -> Vec<u8> {
    let text = format!("{:117}\n", format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({rows}, 3), }}"));
    [b"\x93NUMPY\x01\x00\x76\x00", text.as_bytes(), &(first..first + 3 * rows as u8).collect::<Vec<u8>>()].concat()
}

#[test]
fn a_training_reads_archives() {
    let folder = Folder::new("data-archives");
    let (images, labels) = (file(IMAGES), file(LABELS));
    let out = folder.path("trained.onnx");
    let end: &[&str] = &["--steps", "4", "--output", &out];
    let trained = |data: &str, labels: &str| {
        ok(&[DIGITS, CPU, end, &["--data", data, "--labels", labels, "--valid", data, "--valid-labels", labels]]);
        fs::read(&out).expect("it was written")
    };
    let expected = trained(IMAGES, LABELS);
    for long in [false, true] {
        let both = folder.file("both.npz", zip(&[("x.npy", &images), ("y.npy", &labels)], false, long));
        assert!(trained(&format!("{both}:x"), &format!("{both}:y.npy")) == expected, "zip64: {long}");
        let one = folder.file("one.npz", zip(&[("arr_0.npy", &images)], false, long));
        assert!(trained(&one, &format!("{both}:y")) == expected, "zip64: {long}");
    }
    let packed = folder.file("packed.npz", zip(&[("x.npy", &images)], true, false));
    let refused =
        |data: &str, words: &[&str]| fails(1, &[DIGITS, CPU, end, &["--data", data, "--labels", LABELS]], words);
    refused(&packed, &["packed.npz: cannot read its member 'x': it is deflated", "np.savez instead of"]);
    let both = folder.path("both.npz");
    refused(&both, &["both.npz: expected an archive of one array, found 2", "FILE.npz:NAME; its members: 'x', 'y'"]);
    refused(&format!("{both}:z"), &["both.npz: it has no member 'z'; its members: 'x', 'y'"]);
}

#[test]
fn tensors_are_given_as_archives() {
    let folder = Folder::new("data-tensors");
    let images = file(IMAGES);
    let run = |input: &str| {
        let record = ok_json(&[&["run", "graphs/digits.onnx", "--input", &format!("image={input}")], CPU]);
        record["outputs"].clone()
    };
    let expected = run(IMAGES);
    for (deflated, long) in [(false, false), (true, false), (false, true), (true, true)] {
        let path = folder.file("x.npz", zip(&[("a.npy", b"other"), ("image.npy", &images)], deflated, long));
        assert_eq!(run(&format!("{path}:image")), expected, "deflated: {deflated}, zip64: {long}");
    }
}

/// Each archive is cut at every byte, and each byte is changed: it is read as it was written, or refused.
#[test]
fn damaged_archives_are_refused() {
    use plimsoll::internals::npz;
    let folder = Folder::new("data-damaged");
    let members = [array(2, 1), array(1, 50)];
    let members = [("a.npy", &members[0][..]), ("b.npy", &members[1][..])];
    let path = folder.path("x.npz");
    let named = std::path::PathBuf::from(format!("{path}:a"));
    for (deflated, long) in [(false, false), (true, false), (false, true), (true, true)] {
        let whole = zip(&members, deflated, long);
        fs::write(&path, &whole).expect("it can be written");
        let expected = npz::read(&named).expect("it is whole").to_f64();
        assert_eq!(expected, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(npz::map(&named).is_ok(), !deflated);
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).expect("it can be written");
            assert!(npz::read(&named).is_err() && npz::map(&named).is_err(), "cut at {cut}");
        }
        for at in 0..whole.len() {
            for bits in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= bits;
                fs::write(&path, &bytes).expect("it can be written");
                if let Ok(found) = npz::read(&named) {
                    assert_eq!(found.to_f64(), expected, "byte {at} changed by {bits:#x}");
                }
                // The checksum of what is mapped would take a pass over all of it.
                let _ = npz::map(&named);
            }
        }
    }
}

/// Sizes that no file can have, or that its bytes cannot become.
#[test]
fn sizes_that_lie_take_no_memory() {
    let folder = Folder::new("data-lies");
    let text = format!("{:117}\n", "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 3), }");
    let huge = [b"\x93NUMPY\x01\x00\x76\x00", text.as_bytes(), &[1; 6]].concat();
    let refused = |bytes: &[u8], words: &[&str]| {
        let path = folder.file("x.npz", bytes);
        fails(1, &[&["run", "graphs/digits.onnx", "--input", &format!("image={path}")], CPU], words);
        fails(1, &[DIGITS, CPU, &["--steps", "1", "--data", &path, "--labels", LABELS]], &["x.npz"]);
    };
    for deflated in [false, true] {
        refused(&zip(&[("x.npy", &huge)], deflated, true), &["member 'x'", "u8[1000000000000,3]", "134 bytes"]);
        // The size behind the line's extra field: the last of such fields begins before the directory's end.
        let array = array(2, 1);
        let mut bytes = zip(&[("x.npy", &array)], deflated, true);
        let size = (array.len() as u64).to_le_bytes();
        let places: Vec<usize> = (0..bytes.len() - 8).filter(|&at| bytes[at..at + 8] == size).collect();
        for &at in &places {
            bytes[at..at + 8].copy_from_slice(&(1u64 << 50).to_le_bytes());
        }
        refused(&bytes, &["x.npz", "the archive is damaged"]);
    }
    refused(b"not a zip file, but as long as one must be", &["x.npz", "it is no archive (.npz), or is cut off"]);
}

/// The bytes of an array's rows, and its header with another number of rows.
fn cut(whole: &[u8], rows: usize, from: usize, to: usize) -> Vec<u8> {
    let header = 10 + usize::from(u16::from_le_bytes([whole[8], whole[9]]));
    let text = std::str::from_utf8(&whole[10..header]).expect("it is text");
    let (old, new) = (format!("({rows},"), format!("({},", to - from));
    assert!(text.contains(&old), "{text}");
    let text = format!("{:width$}\n", text.trim_end().replace(&old, &new), width = header - 11);
    let row = (whole.len() - header) / rows;
    [&whole[..10], text.as_bytes(), &whole[header + from * row..header + to * row]].concat()
}

#[test]
fn a_folder_of_files_is_one_array() {
    let folder = Folder::new("data-shards");
    let (images, labels) = (file(IMAGES), file(LABELS));
    let [x, y] = ["x", "y"].map(|name| folder.path(name));
    for path in [&x, &y] {
        fs::create_dir(path).expect("it can be made");
    }
    // 360 rows, in files whose numbers have one digit or two. The labels are cut elsewhere.
    for (name, from, to) in [("part2.npy", 0, 100), ("part9.npz", 100, 101), ("part10.npy", 101, 360)] {
        let part = cut(&images, 360, from, to);
        let part = if name.ends_with("npz") { zip(&[("arr_0.npy", &part)], false, false) } else { part };
        folder.file(&format!("x/{name}"), part);
    }
    for (name, from, to) in [("1.npy", 0, 350), ("2.npy", 350, 360)] {
        folder.file(&format!("y/{name}"), cut(&labels, 360, from, to));
    }
    folder.file("x/notes.txt", "no array");
    folder.file("x/.part3.npy", "no array");
    let out = folder.path("trained.onnx");
    let log = folder.path("log");
    let run = |data: &str, labels: &str, more: &[&str]| {
        let steps: &[&str] = &["--steps", "60", "--output", &out, "--log", &log];
        ok(&[DIGITS, CPU, steps, &["--data", data, "--labels", labels], more]);
        let losses = fs::read_to_string(&log).expect("it was written");
        let losses = losses.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        (losses.map(|record| record["loss"].to_string()).collect::<Vec<_>>(), fs::read(&out).expect("it was written"))
    };
    for more in [&[][..], &["--no-shuffle"]] {
        let (expected, found) = (run(IMAGES, LABELS, more), run(&x, &y, more));
        assert_eq!(expected.0.len(), 60);
        assert_eq!(expected.0, found.0, "{more:?}");
        assert!(expected.1 == found.1, "{more:?}: other weights");
    }
    let refused = |data: &str, words: &[&str]| {
        fails(1, &[DIGITS, CPU, &["--steps", "1", "--data", data, "--labels", &y]], words);
    };
    folder.file("x/part11.npy", array(2, 0));
    refused(&x, &["part11.npy: expected rows of f32[1,8,8], as in ", "part2.npy, found u8[3]"]);
    folder.file("x/part11.npy", cut(&images, 360, 0, 1));
    refused(&x, &["/y: expected 361 labels, one per row, found 360"]);
    // An element that is not finite is named by its own file.
    let mut bad = cut(&images, 360, 0, 1);
    let end = bad.len();
    bad[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::remove_file(folder.path("x/part11.npy")).expect("it is there");
    folder.file("x/part9.npz", zip(&[("arr_0.npy", &bad)], false, false));
    fails(
        1,
        &[DIGITS, CPU, &["--epochs", "1", "--data", &x, "--labels", &y]],
        &["part9.npz: row 0: element 63 is not a finite number"],
    );
    refused(&folder.path("none"), &["none"]);
    fs::create_dir(folder.path("none")).expect("it can be made");
    refused(&folder.path("none"), &["none: expected a folder with .npy or .npz files, found none in it"]);
}

const LINEAR: &[&str] = &["train", "graphs/linear.onnxtxt", "--loss", "mse", "--optimizer", "sgd", "--batch", "8"];
const ROWS: &[&str] = &["--data", "graphs/linear-x.npy", "--labels", "graphs/linear-y.npy"];

/// The elements of a weight of a file.
fn weight(path: &str, name: &str) -> Vec<f64> {
    use plimsoll::internals::onnx;
    let graph = onnx::import(&onnx::load(path.as_ref()).expect("it is a model"), &[("batch".into(), 8)]);
    let graph = graph.expect("it is a graph");
    let values = graph.order().expect("it has no cycle").into_iter();
    let mut values = values.map(|node| node.output(0));
    let constant = values.find_map(|value| graph.as_constant(value).filter(|c| c.name == name));
    constant.expect("it has the weight").value().expect("it has elements").to_f64()
}

/// At a rate of 0 the trained model is the drawn one.
#[test]
fn drawn_weights_follow_their_seed_and_their_layer() {
    let folder = Folder::new("data-drawn");
    let out = folder.path("out.onnx");
    let drawn = |more: &[&str]| {
        ok(&[LINEAR, ROWS, CPU, &["--lr", "0", "--steps", "1", "--init", "--output", &out], more]);
        [weight(&out, "w"), weight(&out, "b")]
    };
    let [w, b] = drawn(&[]);
    let bound = 1.0 / 10f64.sqrt();
    assert_eq!((w.len(), b.len()), (10, 1));
    assert!(w.iter().chain(&b).all(|x| *x != 0.0 && x.abs() <= bound), "{w:?} {b:?}");
    assert!(w.iter().any(|x| *x > 0.1) && w.iter().any(|x| *x < -0.1), "{w:?}");
    assert_eq!(drawn(&["--ema", "0.5"]), [w.clone(), b.clone()]);
    let other = drawn(&["--seed", "1"]);
    assert!(other[0].iter().zip(&w).all(|(a, b)| a != b) && other[1] != b, "{other:?}");
    assert_eq!(drawn(&["--freeze", "w"]), [vec![0.0; 10], b]);
}

/// What is drawn is not drawn again.
#[test]
fn a_resumed_training_draws_nothing() {
    let folder = Folder::new("data-resumed");
    let (whole, parts) = (folder.path("whole.onnx"), folder.path("parts.onnx"));
    let points = folder.path("points");
    let method: &[&str] = &["--lr", "0.01", "--init"];
    ok(&[LINEAR, ROWS, CPU, method, &["--steps", "6", "--output", &whole]]);
    for steps in ["3", "6"] {
        let resume: &[&str] = &["--steps", steps, "--output", &parts, "--checkpoint", &points, "--resume"];
        ok(&[LINEAR, ROWS, CPU, method, resume]);
    }
    assert!(fs::read(&whole).expect("it was written") == fs::read(&parts).expect("it was written"), "other weights");
}

#[test]
fn each_layer_has_its_rule() {
    use plimsoll::internals::train::init::{Rule, rules};
    use plimsoll::internals::train::{Loss, Optimizer, Rate, Training};
    use plimsoll::internals::{onnx, onnx::Model};
    const LAYERS: &str = r#"<ir_version: 10, opset_import: ["" : 20]>
        layers (int64[2, 16] tokens, float[2, 3, 8, 8] image) => (float[2, 5] y, float[2, 4, 8, 8] z)
        <float[7, 16] table, float[16, 6] a, float[6] a_bias, float[5, 6] g, float[5] g_bias, float[4, 3, 3, 3] c, float[4] c_bias,
         float[4] scale, float[4] shift, float[4] mean, float[4] var, float[16] position, int64[1] first = {1}>
        {
            rows = Gather (table, tokens)
            placed = Mul (rows, position)
            mean_row = ReduceMean <keepdims = 0> (placed, first)
            product = MatMul (mean_row, a)
            hidden = Add (a_bias, product)
            y = Gemm <transB = 1> (hidden, g, g_bias)
            seen = Conv <pads = [1, 1, 1, 1]> (image, c, c_bias)
            z = BatchNormalization (seen, scale, shift, mean, var)
        }"#;
    let zeros = |text: &str| {
        let mut text = text.to_owned();
        for (name, count) in [
            ("[7, 16] table", 112),
            ("[16, 6] a", 96),
            ("[6] a_bias", 6),
            ("[5, 6] g", 30),
            ("[5] g_bias", 5),
            ("[4, 3, 3, 3] c", 108),
            ("[4] c_bias", 4),
            ("[4] scale", 4),
            ("[4] shift", 4),
            ("[4] mean", 4),
            ("[4] var", 4),
            ("[16] position", 16),
        ] {
            let elements = vec!["0"; count].join(", ");
            text = text.replacen(&format!("float{name},"), &format!("float{name} = {{{elements}}},"), 1);
        }
        text
    };
    let folder = Folder::new("data-rules");
    let path = folder.file("layers.onnxtxt", zeros(LAYERS));
    let model: Model = onnx::load(path.as_ref()).expect("it is a model").with_weights();
    let graph = onnx::import(&model, &[]).expect("it is a graph");
    let training = Training {
        freeze: vec!["c_*".into()],
        ..Training::new(Loss::Mse, Optimizer::Sgd { momentum: 0.0, nesterov: false }, Rate::constant(0.1))
    };
    let init = rules(&graph, &model.weights(), &training).expect("it has no cycle");
    let mut found: Vec<_> = init.drawn.iter().map(|drawn| (&drawn.name[..], drawn.rule)).collect();
    found.sort_by_key(|(name, _)| *name);
    let even = |count: f64| Rule::Even(1.0 / count.sqrt());
    let expected = [
        ("a", even(16.0)),
        ("a_bias", even(16.0)),
        ("c", even(27.0)),
        ("g", even(6.0)),
        ("g_bias", even(6.0)),
        ("mean", Rule::Equal(0.0)),
        ("scale", Rule::Equal(1.0)),
        ("shift", Rule::Equal(0.0)),
        ("table", Rule::Normal),
        ("var", Rule::Equal(1.0)),
    ];
    assert_eq!(found, expected);
    assert_eq!(init.unknown, [("position".to_owned(), "Mul")]);
    let table = init.drawn.iter().find(|drawn| drawn.name == "table").expect("it is drawn");
    let numbers = table.tensor(3).expect("it is small").to_f64();
    let mean = numbers.iter().sum::<f64>() / 112.0;
    let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 111.0;
    assert!(mean.abs() < 0.4 && (variance - 1.0).abs() < 0.5, "{mean} {variance}");
}

/// An archive alone gives an input, or an expected output, per member.
#[test]
fn an_archive_gives_a_tensor_per_member() {
    let folder = Folder::new("members");
    let source = "<ir_version: 8, opset_import: [\"\" : 17]>
        g (uint8[n, 3] a, uint8[n, 3] b) => (uint8[n, 3] y, uint8[n, 3] z) { y = Add (a, b)\n z = Identity (b) }";
    let model = folder.file("m.onnxtxt", source);
    let arrays = [array(2, 1), array(2, 7), array(2, 4)];
    let mut sum = arrays[0].clone();
    let values = 128..sum.len();
    sum[values.clone()].iter_mut().zip(&arrays[1][values]).for_each(|(to, from)| *to += from);
    for (deflated, long) in [(false, false), (true, true)] {
        let given = folder.file("x.npz", zip(&[("a.npy", &arrays[0]), ("b.npy", &arrays[1])], deflated, long));
        let right = folder.file("y.npz", zip(&[("y.npy", &sum), ("z.npy", &arrays[1])], deflated, long));
        let wrong = folder.file("z.npz", zip(&[("z.npy", &arrays[2])], deflated, long));
        for flag in ["--input", "--inputs"] {
            let found = ok_json(&[&["run", &model, flag, &given, "--expect", &right], CPU]);
            assert_eq!(found["expected"].as_array().map(Vec::len), Some(2), "{found}");
            assert_eq!(found["binding"]["n"], 2, "{found}");
            fails(3, &[&["run", &model, flag, &given, "--expect", &wrong], CPU], &["output 'z'"]);
        }
        ok(&[&["bench", &model, "--inputs", &given, "--iters", "1"], CPU]);
        ok(&[&["compare", &model, "--inputs", &given, "--iters", "1"], CPU]);
        ok(&[&["plan", &model, "--inputs", &given]]);
        ok(&[&["run", &model, "--input", &format!("b={given}:a"), "--input", &format!("a={given}:b")], CPU]);
        let twice = ["--inputs", &given, "--input", "a=2x3xu8=1"];
        fails(1, &[&["run", &model], CPU, &twice], &["'a'", "twice"]);
        let both = [&["run", &model, "--inputs", &right][..], CPU].concat();
        fails(1, &[&both], &["--input y: not an input of the graph; its inputs: a, b"]);
    }
    let damaged = |text: &str, bytes: Vec<u8>| {
        let file = folder.file("damaged.npz", bytes);
        fails(1, &[&["run", &model, "--inputs", &file], CPU], &["damaged.npz", text]);
    };
    let whole = zip(&[("a.npy", &arrays[0]), ("b.npy", &arrays[1])], false, false);
    damaged("it is no archive", whole[..whole.len() - 1].to_vec());
    damaged("several members 'a'", zip(&[("a.npy", &arrays[0]), ("a.npy", &arrays[1])], false, false));
    // Of two directories' lines for one member, both have its bytes.
    let large = vec![0; 200 << 20];
    damaged("are inflated in memory", zip(&[("a.npy", &large), ("b.npy", &large)], true, false));
}
