//! Pictures of plans agree with the plan, in a real browser too.

pub mod chromium;

use crate::common;
use crate::graphs;
use crate::graphs::GRAPHS;
use chromium::Chromium;
use plimsoll::internals::onnx;
use plimsoll::internals::onnx::proto::StringStringEntryProto;
use plimsoll::internals::plan::tell::timeline::Timeline;
use plimsoll::internals::plan::{self, BufferIdx, Class, Limits, Plan};
use plimsoll::internals::report::picture::{About, Kind, Part, Scene, page, timed_page};
use plimsoll::internals::report::{grouped, human, svg};
use plimsoll::internals::target::Target;
use plimsoll::internals::trace::Trace;
use plimsoll::{DType, Graph, Recipe};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn plimsoll(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).current_dir(root()).output();
    let output = output.expect("the program starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the output is text")
}

/// A folder that is removed with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("picture-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary folder");
        Folder(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A temporary folder that cannot be removed does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn planned(graph: Graph, target: &str, fuse: bool) -> (Plan, Graph) {
    let target = Target::preset(target).expect("a preset");
    let graph = Recipe { fuse, ..Recipe::default() }.whole(graph, &target).expect("passes run");
    let plan = plan::planned(&graph, &target, &Limits { memory: None }).expect("it is planned");
    (plan, graph.graph)
}

// ---- What is drawn

/// Every buffer is drawn once, inside its segment. No two have a byte at the same time. The live bytes are the rectangles' sum.
#[test]
fn rectangles_are_the_plan() {
    let files = GRAPHS.iter().map(|(file, dims)| (*file, graphs::import(file, dims)));
    let mut streams = 1;
    for (file, graph) in files {
        for (target, fuse) in [("cpu", true), ("cpu", false), ("cuda", true), ("cuda", false)] {
            let (plan, graph) = planned(graph.clone(), target, fuse);
            let scene = Scene::of(plan.first(), Some(&graph), None);
            let what = format!("{file} on {target}");
            let mut seen = vec![0u32; plan.programs[0].buffers.len()];
            let mut sums = vec![0; 2 * plan.programs[0].steps.len()];
            for space in &scene.spaces {
                for (i, rect) in space.rects.iter().enumerate() {
                    seen[rect.buffer] += 1;
                    let buffer = &plan.programs[0].buffers[rect.buffer];
                    assert_eq!(rect.bytes, (buffer.offset, buffer.offset + buffer.bytes), "{what}");
                    assert!(rect.bytes.1 <= space.bytes, "{what}");
                    assert_eq!(Some(plan.segments[buffer.segment].class), space.class, "{what}");
                    assert!(rect.held.0 <= rect.time.0 && rect.time.0 < rect.time.1 && rect.time.1 <= rect.held.1);
                    for other in &space.rects[..i] {
                        let apart = rect.held.1 <= other.held.0
                            || other.held.1 <= rect.held.0
                            || rect.bytes.1 <= other.bytes.0
                            || other.bytes.1 <= rect.bytes.0;
                        assert!(apart, "{what}: {rect:?} and {other:?}");
                    }
                    if space.title == "arena" {
                        let bytes = buffer.bytes.next_multiple_of(plan.target.alignment);
                        sums[rect.held.0..rect.held.1].iter_mut().for_each(|sum| *sum += bytes);
                    }
                }
            }
            assert!(seen.iter().all(|&n| n == 1), "{what}: {seen:?}");
            // The end of the last buffer is not rounded up.
            let arena = plan.class_bytes(Class::Activation);
            let live: Vec<u64> = sums.chunks(2).map(|halves| halves[0].max(halves[1]).min(arena)).collect();
            assert_eq!(scene.live, live, "{what}");
            let peak = scene.peak.as_ref().expect("there are steps");
            assert_eq!(live.iter().max(), Some(&peak.bytes), "{what}");
            streams = streams.max(scene.streams());
            assert_eq!(peak.bytes, scene.bound, "{what}");
            let at = |b: &BufferIdx| plan.programs[0].buffers[*b].bytes.next_multiple_of(plan.target.alignment);
            assert_eq!(peak.buffers.iter().map(at).sum::<u64>().min(arena), peak.bytes, "{what}");
            assert_eq!(Timeline::of(plan.first()).peak(), Some(peak.step), "{what}");
        }
    }
    assert!(streams > 1, "some steps run side by side");
}

/// `BLESS=1 cargo test --test it picture::` draws them anew.
#[test]
fn pictures_in_the_pages_are_what_the_tool_draws() {
    let folder = Folder::new("readme");
    let page = |name: &str| std::fs::read_to_string(root().join(name)).expect("the page is there");
    let shown = page("README.md") + &page("src/guide.md");
    for (picture, args) in [
        ("graphs/digits.svg", &["graphs/digits.onnx", "--set", "batch=360"][..]),
        ("graphs/attention.svg", &["graphs/attention.onnxtxt", "--set", "batch=8", "--set", "sequence=128"]),
    ] {
        assert!(shown.contains(picture), "neither README nor guide names {picture}");
        let drawn = folder.path("picture.svg");
        plimsoll(&[&["plan"], args, &["--svg", drawn.to_str().expect("the path is text")]].concat());
        let drawn = std::fs::read_to_string(drawn).expect("it is drawn");
        let path = root().join(picture);
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &drawn).expect("it is written");
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == drawn, "{picture} is not what the tool draws; BLESS=1 draws it anew");
    }
}

/// Each kind of bytes has a colour of its own.
#[test]
fn no_two_kinds_have_one_colour() {
    let mut fills: Vec<_> = Kind::all().map(Kind::fill).collect();
    let kinds = fills.len();
    fills.sort_unstable();
    fills.dedup();
    assert!(fills.len() == kinds && kinds > 10, "{fills:?}");
}

/// A plan that does not fit is drawn, but still refused.
#[test]
fn what_does_not_fit_is_drawn() {
    let folder = Folder::new("misfit");
    let [html, svg] = ["misfit.html", "misfit.svg"].map(|name| folder.path(name));
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(["plan", "graphs/digits.onnx", "--set", "batch=360", "--memory-limit", "4MiB", "--html"]);
    let output = command.arg(&html).arg("--svg").arg(&svg).current_dir(root()).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    let svg = std::fs::read_to_string(svg).expect("it is drawn");
    assert!(svg.contains("limit 4.00 MiB") && svg.contains("4.78 MiB planned"), "{svg}");
    assert!(std::fs::read_to_string(html).expect("it is drawn").contains("\"limit\":4194304"));
}

// ---- In a browser

/// A buffer's lifetime in half steps, from the steps in a plan's JSON alone.
fn lifetime(plan: &Value, buffer: usize) -> (f64, f64) {
    let arena = |b: usize| {
        plan["segments"][plan["programs"][0]["buffers"][b]["segment"].as_u64().expect("a number") as usize]["class"]
            == "activation"
    };
    let steps = plan["programs"][0]["steps"].as_array().expect("a list");
    let end = steps.len() as f64;
    if !arena(buffer) {
        return (0.0, end);
    }
    let uses = |b: usize| {
        let names = |step: &Value, list: &str| step[list].as_array().expect("a list").contains(&json!(b));
        let uses: Vec<_> =
            (0..steps.len()).filter(|&s| names(&steps[s], "reads") || names(&steps[s], "writes")).collect();
        (uses[0], uses[uses.len() - 1])
    };
    let range = |b: usize| {
        let of = &plan["programs"][0]["buffers"][b];
        let offset = of["offset"].as_u64().expect("a number");
        (of["segment"].as_u64().expect("a number"), offset, offset + of["bytes"].as_u64().expect("a number"))
    };
    let (first, last) = uses(buffer);
    let (mut from, mut to) = (first as f64, last as f64 + 1.0);
    for other in
        (0..plan["programs"][0]["buffers"].as_array().expect("a list").len()).filter(|&b| b != buffer && arena(b))
    {
        let ((a, a0, a1), (b, b0, b1)) = (range(buffer), range(other));
        if a == b && a0 < b1 && b0 < a1 {
            let (other_first, other_last) = uses(other);
            if other_last == first {
                from = first as f64 + 0.5;
            }
            if other_first == last {
                to = last as f64 + 0.5;
            }
        }
    }
    (from, to)
}

/// All boxes that the page shows, by buffer, and the position of the canvas.
fn boxes(browser: &mut Chromium) -> (Vec<Value>, (f64, f64)) {
    let found = browser.eval(
        "plimsoll.boxes().map(b => ({k: b.k, buffer: b.buffer, x: b.x, y: b.y, w: b.w, h: b.h,
            panel: {kind: b.panel.kind, x: b.panel.x, y: b.panel.y, w: b.panel.w, h: b.panel.h, bytes: b.panel.space.bytes}}))",
    );
    let at = browser.eval("(r => [r.left, r.top])(document.getElementById('canvas').getBoundingClientRect())");
    let number = |v: &Value| v.as_f64().expect("a number");
    (found.as_array().expect("a list").clone(), (number(&at[0]), number(&at[1])))
}

fn field(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or_else(|| panic!("{name} in {value}"))
}

fn text(browser: &mut Chromium, id: &str) -> String {
    browser.eval(&format!("document.getElementById('{id}').innerText")).as_str().expect("text").to_owned()
}

/// The texts on the canvas.
fn written(browser: &mut Chromium) -> Vec<String> {
    let told = browser.eval(
        "(() => {
            const told = [], pen = CanvasRenderingContext2D.prototype, own = pen.fillText;
            pen.fillText = (text) => told.push(text);
            plimsoll.draw();
            pen.fillText = own;
            plimsoll.draw();
            return told;
        })()",
    );
    serde_json::from_value(told).expect("texts")
}

/// Changes a choice below the picture. False if it is not offered.
fn tick(browser: &mut Chromium, choice: &str) -> bool {
    let found =
        format!("[...document.querySelectorAll('#choices label')].find(l => l.innerText.trim() === '{choice}')");
    let ticked = browser.eval(&format!("(l => {{ if (l) l.firstChild.click(); return !!l; }})({found})"));
    browser.settle();
    ticked == json!(true)
}

fn pixel(browser: &mut Chromium, x: f64, y: f64) -> String {
    // Read a copy: the browser warns that reading the canvas itself slows the page down.
    let read = format!(
        "(() => {{
            const pen = new OffscreenCanvas(1, 1).getContext('2d', {{willReadFrequently: true}});
            pen.drawImage(document.getElementById('canvas'), -{x}, -{y});
            return '#' + [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v.toString(16).padStart(2, '0')).join('');
        }})()",
        x = x.floor(),
        y = y.floor()
    );
    browser.eval(&read).as_str().expect("a colour").to_owned()
}

#[test]
fn a_plan_is_a_page_that_answers() {
    let Some(mut browser) = Chromium::start("plan") else { return };
    let folder = Folder::new("plan");
    let file = folder.path("report.html");
    let args = ["plan", "graphs/digits.onnx", "--set", "batch=360", "--no-fuse", "--memory-limit", "8MiB", "--json"];
    let plan = plimsoll(&[&args[..], &["--html", file.to_str().expect("the path is text")]].concat());
    let plan = common::printed(&args, &plan);
    browser.open(&file);

    // Each rectangle is where the plan has it.
    let (found, corner) = boxes(&mut browser);
    let buffers = plan["programs"][0]["buffers"].as_array().expect("buffers");
    assert_eq!(found.len(), buffers.len());
    let steps = plan["programs"][0]["steps"].as_array().expect("steps").len() as f64;
    let mut halved = 0;
    for one in &found {
        let b = field(one, "buffer") as usize;
        let (from, to) = lifetime(&plan, b);
        halved += usize::from(from.fract() != 0.0);
        let panel = &one["panel"];
        let segment = &plan["segments"][buffers[b]["segment"].as_u64().expect("a number") as usize];
        assert_eq!(panel["bytes"], segment["bytes"]);
        let (offset, bytes) = (field(&buffers[b], "offset"), field(&buffers[b], "bytes"));
        let x = |step: f64| field(panel, "x") + field(panel, "w") * step / steps;
        let y = |byte: f64| field(panel, "y") + field(panel, "h") * (1.0 - byte / field(panel, "bytes"));
        // The bytes of constants go from left to right.
        let along = |byte: f64| field(panel, "x") + field(panel, "w") * byte / field(panel, "bytes");
        let (across, down) = match panel["kind"].as_str() {
            Some("main") => ([x(from), x(to)], [y(offset + bytes), y(offset)]),
            _ => ([along(offset), along(offset + bytes)], [field(panel, "y"), field(panel, "y") + field(panel, "h")]),
        };
        for (name, expected) in
            [("x", across[0]), ("w", across[1] - across[0]), ("y", down[0]), ("h", down[1] - down[0])]
        {
            let found = field(one, name);
            assert!((found - expected).abs() < 0.01, "buffer {b}: {name}: expected {expected}, found {found}");
        }
    }
    assert!(halved > 0, "some results replace an operand");

    // The pixels agree with the boxes.
    let peak = browser.eval("plimsoll.data.scenes[0].peak.step").as_f64().expect("a step");
    let mut painted = 0;
    for one in found.iter().filter(|b| field(b, "w") > 24.0 && field(b, "h") > 12.0) {
        let b = field(one, "buffer") as usize;
        let (from, to) = lifetime(&plan, b);
        if from < peak + 1.0 && peak < to {
            continue;
        }
        let expected = browser
            .eval(&format!("(d => d.palette.find(p => p.kind === d.scenes[0].buffers[{b}].kind).fill)(plimsoll.data)"));
        let colour = pixel(&mut browser, field(one, "x") + field(one, "w") - 4.0, field(one, "y") + 2.0);
        assert_eq!(json!(colour), expected, "buffer {b}");
        painted += 1;
    }
    assert!(painted > 3, "{painted}");

    // The texts: the head, the peak, the limit, and the buffers that are live at the peak.
    let arena = plan["programs"][0]["summary"]["arena_bytes"].as_u64().expect("a number");
    let totals = text(&mut browser, "totals");
    let planned = plan["programs"][0]["summary"]["planned_bytes"].as_u64().expect("a number");
    for words in [
        human(planned),
        grouped(planned),
        format!("arena {}", human(arena)),
        "limit 8.00 MiB".into(),
        "the backend's own".into(),
    ] {
        assert!(totals.contains(&words), "{words} in {totals}");
    }
    let live = text(&mut browser, "peak");
    assert!(live.contains(&format!("Live at the peak: {}", human(arena))), "{live}");

    // The largest constant, by its name: in a list, and where its bytes are.
    let constants = buffers.iter().enumerate().filter(|(_, b)| b["class"] == "constant");
    let (weight, of) = constants.max_by_key(|(_, b)| b["bytes"].as_u64()).expect("there are constants");
    let name = of["name"].as_str().expect("a name");
    assert!(text(&mut browser, "largest").contains(name), "{name}");
    assert!(written(&mut browser).iter().any(|told| told == name), "{name} is written on its rectangle");
    let at = found.iter().find(|one| field(one, "buffer") as usize == weight).expect("it is drawn");
    let middle = [field(at, "x") + field(at, "w") / 2.0, field(at, "y") + field(at, "h") / 2.0];
    assert_eq!(browser.eval(&format!("plimsoll.hit({}, {}).buffer", middle[0], middle[1])), json!(weight));

    // All orders that were tried.
    let orders = text(&mut browser, "orders");
    let tried = plan["programs"][0]["summary"]["orders"].as_array().expect("orders");
    for order in tried.iter().filter(|_| tried.len() > 1) {
        let name = order["name"].as_str().expect("a name");
        assert!(orders.contains(name), "{name} in {orders}");
    }

    // Hovering shows name, operator, type, bytes and lifetime.
    let large = found.iter().max_by(|a, b| (field(a, "w") * field(a, "h")).total_cmp(&(field(b, "w") * field(b, "h"))));
    let large = large.expect("there are boxes");
    let b = field(large, "buffer") as usize;
    let middle = (field(large, "x") + field(large, "w") / 2.0, field(large, "y") + field(large, "h") / 2.0);
    let at = (corner.0 + middle.0, corner.1 + middle.1);
    browser.mouse("mouseMoved", at, json!({}));
    browser.settle();
    let tip = text(&mut browser, "tip");
    let item = browser.eval(&format!("plimsoll.data.scenes[0].buffers[{b}]"));
    let uses = &item["uses"];
    let step = browser.eval(&format!("plimsoll.data.scenes[0].steps[{}]", uses[0]));
    let bytes = buffers[b]["bytes"].as_u64().expect("a number");
    for words in [
        buffers[b]["name"].as_str().expect("a name").to_owned(),
        format!("{} ({} bytes)", human(bytes), grouped(bytes)),
        item["type"].as_str().expect("a type").to_owned(),
        format!("steps {} to {}", uses[0], uses[1]),
        step["operator"].as_str().expect("an operator").to_owned(),
        step["name"].as_str().expect("a name").to_owned(),
    ] {
        assert!(tip.contains(&words), "{words} in {tip}");
    }
    assert_eq!(browser.eval("plimsoll.hovered().buffer"), json!(b));

    // The wheel zooms around the mouse, in both axes.
    let shown = |browser: &mut Chromium| {
        let view = browser.eval("plimsoll.view");
        ["x0", "x1", "y0", "y1"].map(|name| field(&view, name))
    };
    let [x0, x1, y0, y1] = shown(&mut browser);
    assert_eq!([x0, x1, y0, y1], [0.0, 2.0 * steps, 0.0, 1.0]);
    browser.mouse("mouseWheel", at, json!({"deltaX": 0, "deltaY": -400}));
    browser.settle();
    let [a0, a1, b0, b1] = shown(&mut browser);
    assert!(a1 - a0 < 0.7 * (x1 - x0) && b1 - b0 < 0.7 * (y1 - y0), "{a0} {a1} {b0} {b1}");
    assert_eq!(browser.eval(&format!("plimsoll.hit({}, {}).buffer", middle.0, middle.1)), json!(b));
    let wider = browser.eval(&format!("plimsoll.boxes().find(x => x.buffer === {b}).w"));
    assert!(wider.as_f64() > large["w"].as_f64());
    for count in 1..=2 {
        for kind in ["mousePressed", "mouseReleased"] {
            browser.mouse(kind, at, json!({"button": "left", "clickCount": count}));
        }
    }
    browser.settle();
    assert_eq!(shown(&mut browser), [x0, x1, y0, y1]);

    // So does dragging a box.
    let (left, right) = (corner.0 + field(large, "x") + 1.0, corner.0 + field(large, "x") + field(large, "w") - 1.0);
    let (top, bottom) = (corner.1 + field(large, "y") + 1.0, corner.1 + field(large, "y") + field(large, "h") - 1.0);
    browser.mouse("mousePressed", (left, top), json!({"button": "left", "clickCount": 1}));
    browser.mouse("mouseMoved", ((left + right) / 2.0, (top + bottom) / 2.0), json!({"button": "left", "buttons": 1}));
    browser.mouse("mouseMoved", (right, bottom), json!({"button": "left", "buttons": 1}));
    browser.mouse("mouseReleased", (right, bottom), json!({"button": "left", "clickCount": 1}));
    browser.settle();
    let [a0, a1, ..] = shown(&mut browser);
    let (from, to) = lifetime(&plan, b);
    assert!((a0 - 2.0 * from).abs() < 0.2 && (a1 - 2.0 * to).abs() < 0.2, "{a0} {a1}, not {from} {to}");
    browser.eval("document.getElementById('canvas').focus()");
    browser.key("0", "0");
    assert_eq!(shown(&mut browser), [x0, x1, y0, y1]);

    // A click pins a buffer. The keyboard moves on from there, and releases it.
    browser.mouse("mousePressed", at, json!({"button": "left", "clickCount": 1}));
    browser.mouse("mouseReleased", at, json!({"button": "left", "clickCount": 1}));
    browser.settle();
    assert_eq!(browser.eval("plimsoll.pinned().buffer"), json!(b));
    let details = text(&mut browser, "pinned");
    for words in ["written by", "read by", buffers[b]["name"].as_str().expect("a name")] {
        assert!(details.contains(words), "{words} in {details}");
    }
    browser.key("ArrowRight", "");
    let next = browser.eval("plimsoll.pinned().buffer");
    assert!(next.is_number() && next != json!(b), "{next}");
    browser.key("Escape", "");
    assert_eq!(browser.eval("plimsoll.pinned()"), Value::Null);

    // Search by name, from the keyboard. The table lists the results.
    browser.key("/", "/");
    browser.call("Input.insertText", json!({"text": "RELU"}));
    browser.eval("document.getElementById('all').open = true");
    browser.settle();
    let matching = |b: &&Value| b["name"].as_str().is_some_and(|name| name.to_lowercase().contains("relu"));
    let count = buffers.iter().filter(matching).count();
    assert!(count > 0 && count < buffers.len());
    assert_eq!(browser.eval("plimsoll.matches().size"), json!(count));
    assert_eq!(text(&mut browser, "found"), format!("{count} of {}", buffers.len()));
    assert_eq!(browser.eval("document.querySelectorAll('#rows tr').length"), json!(count + 1));
    browser.key("Enter", "\r");
    let pinned = browser.eval("plimsoll.pinned().buffer").as_u64().expect("a match is pinned") as usize;
    assert!(matching(&&buffers[pinned]));

    // The view is on what was found, and goes back to what it was before.
    let shown_all = "plimsoll.boxes().filter(b => plimsoll.matches().has(`${b.k}:${b.buffer}`)).length";
    assert_eq!(browser.eval(shown_all), json!(count));
    let find = |browser: &mut Chromium, term: &str| {
        browser.eval(&format!(
            "(f => {{ f.value = '{term}'; f.dispatchEvent(new Event('input')); }})(document.getElementById('find'))"
        ));
        browser.settle();
        let view = browser.eval("plimsoll.view");
        ["x0", "x1", "y0", "y1"].map(|name| field(&view, name))
    };
    let whole = [x0, x1, y0, y1];
    let output = plan["programs"][0]["outputs"][0]["buffer"].as_u64().expect("a buffer") as usize;
    let (from, to) = lifetime(&plan, output);
    let [a0, a1, b0, b1] = find(&mut browser, "logits");
    assert!(x0 < a0 && a0 <= 2.0 * from && 2.0 * to <= a1 && a1 <= x1, "{a0} {a1}, of {from} {to}");
    let (offset, bytes) = (field(&buffers[output], "offset") / arena as f64, field(&buffers[output], "bytes"));
    assert!(b0 <= offset && offset + bytes / arena as f64 <= b1 && b1 - b0 < 0.5, "{b0} {b1}, of {offset}");
    assert_eq!(find(&mut browser, "no such name"), whole);
    find(&mut browser, "logits");
    assert_eq!(find(&mut browser, ""), whole);

    // Light and dark.
    let ground = "getComputedStyle(document.body).backgroundColor";
    let light = browser.eval(ground);
    let dark = json!({"features": [{"name": "prefers-color-scheme", "value": "dark"}]});
    browser.call("Emulation.setEmulatedMedia", dark);
    browser.settle();
    assert_eq!((light, browser.eval(ground)), (json!("rgb(255, 255, 255)"), json!("rgb(13, 17, 23)")));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Below the steps, each has a bar of the time that it takes; the slowest fills its panel.
#[test]
fn measured_steps_have_bars() {
    let Some(mut browser) = Chromium::start("timed") else { return };
    let folder = Folder::new("timed");
    let file = folder.path("timed.html");
    let path = file.to_str().expect("the path is text");
    let run =
        ["bench", "graphs/digits.onnx", "--set", "batch=64", "--iters", "2", "--backend", "cpu", "--threads", "1"];
    plimsoll(&[&run[..], &["--html", path]].concat());
    browser.open(&file);
    let slowest = browser.eval(
        "(() => { const p = plimsoll.panels().find(p => p.kind === 'time'), t = p.scene.times, s = t.indexOf(Math.max(...t)); \
         return { x: p.x + p.w * (s + .5) / t.length, y: p.y + 3, step: s, kind: p.scene.steps[s].kind }; })()",
    );
    let [x, y] = ["x", "y"].map(|name| field(&slowest, name));
    let fill = browser.eval(&format!("plimsoll.data.palette.find(p => p.kind === {}).fill", slowest["kind"]));
    assert_eq!(json!(pixel(&mut browser, x, y)), fill);
    assert_eq!(browser.eval(&format!("plimsoll.hit({x}, {y}).step")), slowest["step"]);
    assert!(text(&mut browser, "totals").contains("the backend's own"));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn streams_staging_and_several_ways_are_drawn() {
    let Some(mut browser) = Chromium::start("ways") else { return };
    let folder = Folder::new("ways");
    let file = folder.path("streams.html");
    let files = GRAPHS.iter().flat_map(|(file, dims)| [true, false].map(|fuse| (graphs::import(file, dims), fuse)));
    let mut plans = files.map(|(graph, fuse)| planned(graph, "cuda", fuse));
    let wide = plans.find(|(plan, _)| plan.programs[0].steps.iter().any(|s| s.stream > 0));
    let (plan, graph) = wide.expect("some steps run side by side");
    std::fs::write(&file, page("streams", plan.first(), Some(&graph), None)).expect("it is written");
    browser.open(&file);
    let streams = browser.eval("plimsoll.data.scenes[0].streams").as_f64().expect("a number");
    let strip = browser.eval("plimsoll.panels().find(p => p.kind === 'strip').h").as_f64().expect("a number");
    assert!(streams > 1.0 && strip >= 10.0 * streams, "{streams} streams, {strip} high");
    assert!(text(&mut browser, "totals").contains("staging"));

    let file = folder.path("compare.html");
    let path = file.to_str().expect("the path is text");
    let run =
        ["compare", "graphs/digits.onnx", "--set", "batch=64", "--iters", "1", "--backend", "cpu", "--threads", "1"];
    let found = plimsoll(&[&run[..], &["--json", "--html", path]].concat());
    let found = common::printed(&run, &found);
    browser.open(&file);
    let columns = found["columns"].as_array().expect("columns");
    assert_eq!(
        browser.eval("plimsoll.data.scenes.map(s => s.name)"),
        json!(columns.iter().map(|c| &c["name"]).collect::<Vec<_>>())
    );
    for (k, column) in columns.iter().enumerate() {
        let name = &column["name"];
        // One run after the load. Without dynamic shapes, no later run takes more.
        let most = |what: &str| format!("Math.max(...plimsoll.data.scenes[{k}].{what})");
        assert_eq!(browser.eval(&most("live")), column["peak_live_bytes"], "{name}");
        assert_eq!(browser.eval(&most("reserved")), column["peak_reserved_bytes"], "{name}");
        // Blocks are within reserved bytes, and no two have a byte at the same time.
        let sound = browser.eval(&format!(
            "(s => s.rects.every((r, i) =>
                s.areas.some(a => a.time[0] <= r.time[0] && r.time[1] <= a.time[1] && a.bytes[0] <= r.bytes[0] && r.bytes[1] <= a.bytes[1])
                && s.rects.every((o, j) => i === j || o.time[1] <= r.time[0] || r.time[1] <= o.time[0]
                    || o.bytes[1] <= r.bytes[0] || r.bytes[1] <= o.bytes[0])))(plimsoll.data.scenes[{k}].spaces[0])"
        ));
        assert_eq!(sound, json!(true), "{name}");
        let drawn = browser.eval(&format!("plimsoll.boxes().filter(b => b.k === {k}).length"));
        assert_eq!(drawn, browser.eval(&format!("plimsoll.data.scenes[{k}].spaces[0].rects.length")), "{name}");
    }
    // The same scale of time and of bytes.
    let scales = browser.eval("plimsoll.panels().filter(p => p.kind === 'main').map(p => [p.w, p.h, p.extent])");
    let scales = scales.as_array().expect("a list");
    assert!(scales.iter().all(|scale| scale == &scales[0]), "{scales:?}");

    // On request each has its own.
    assert!(tick(&mut browser, "a scale for each"));
    let own = "plimsoll.panels().filter(p => p.kind === 'main').map(p => p.extent)";
    let tallest = "plimsoll.data.scenes.map(s => s.spaces[0].bytes)";
    assert_eq!(browser.eval(own), browser.eval(tallest));
    tick(&mut browser, "a scale for each");
    let again = browser.eval("plimsoll.panels().filter(p => p.kind === 'main').map(p => [p.w, p.h, p.extent])");
    assert_eq!(again.as_array(), Some(scales));

    // On request without constants: what is left keeps its size and its order, and no two have a byte at the same time.
    let arenas = "plimsoll.boxes().map(b => ({ k: b.k, buffer: b.buffer, time: b.rect.time, bytes: b.rect.bytes }))";
    let before = browser.eval(arenas);
    assert!(tick(&mut browser, "without constants"));
    let after = browser.eval(arenas);
    let constant = |b: &&Value| {
        let of = format!("plimsoll.data.scenes[{}].buffers[{}].class", b["k"], b["buffer"]);
        browser.eval(&of) == json!("constant")
    };
    let before = before.as_array().expect("a list");
    let constants = before.iter().filter(constant).count();
    let after = after.as_array().expect("a list");
    assert!(constants > 0 && after.len() + constants == before.len(), "{constants} of {}", before.len());
    let of = |b: &Value| [0, 1].map(|end| b["bytes"][end].as_u64().expect("a byte"));
    for (i, now) in after.iter().enumerate() {
        let same = |b: &&Value| ["k", "buffer", "time"].iter().all(|field| b[field] == now[field]);
        let then = before.iter().find(same).expect("it was there");
        let ([from, to], [old_from, old_to]) = (of(now), of(then));
        assert!(to - from == old_to - old_from && from <= old_from, "{then} is now {now}");
        let apart = |other: &Value| {
            let ([a, b], times) = (of(other), |v: &Value, end: usize| v["time"][end].as_u64());
            times(other, 1) <= times(now, 0) || times(now, 1) <= times(other, 0) || b <= from || to <= a
        };
        assert!(after[..i].iter().all(|other| other["k"] != now["k"] || apart(other)), "{now}");
    }
    tick(&mut browser, "without constants");
    assert_eq!(browser.eval(arenas).as_array(), Some(before));

    // Bytes that are reserved and in no use have stripes.
    let legend = text(&mut browser, "legend");
    assert!(legend.contains("reserved, not in use"), "{legend}");
    let free = "(() => {
        const all = plimsoll.boxes(), apart = 8;
        for (const panel of plimsoll.panels().filter(p => p.kind === 'main')) {
            const x = half => panel.x + panel.w * half / plimsoll.view.x1, y = byte => panel.y + panel.h * (1 - byte / panel.extent);
            for (const { time, bytes } of panel.space.areas) {
                for (let left = x(time[0]) + 2; left < x(time[1]) - apart; left += 3) {
                    for (let top = y(bytes[1]) + 2; top < y(bytes[0]) - apart; top += 3) {
                        const near = b => b.x < left + apart && left < b.x + b.w && b.y < top + apart && top < b.y + b.h;
                        if (!all.some(near)) return [left, top];
                    }
                }
            }
        }
    })()";
    let [x, y]: [f64; 2] = serde_json::from_value(browser.eval(free)).expect("a point of nothing");
    let colours: std::collections::BTreeSet<_> =
        (0..36).map(|i| pixel(&mut browser, x + f64::from(i % 6), y + f64::from(i / 6))).collect();
    assert!(colours.len() > 1, "{colours:?} at {x}, {y}");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Beside one column that takes far more, each has a scale of its own.
#[test]
fn an_outlier_makes_no_column_flat() {
    let Some(mut browser) = Chromium::start("outlier") else { return };
    let folder = Folder::new("outlier");
    let plans = [1, 64].map(|batch| planned(graphs::import("digits.onnx", &[("batch", batch)]), "cpu", true));
    let plans = plans.map(|(plan, _)| plan);
    let columns: Vec<_> = plans.iter().map(|plan| (plan.title(), plan.first(), Vec::new())).collect();
    let file = folder.path("outlier.html");
    std::fs::write(&file, timed_page("two", &columns, "cpu")).expect("it is written");
    browser.open(&file);
    let found = browser.eval("plimsoll.panels().filter(p => p.kind === 'main').map(p => p.extent)");
    let arenas: Vec<_> = plans.iter().map(|plan| plan.class_bytes(Class::Activation)).collect();
    assert!(arenas[0] * 16 < arenas[1]);
    assert_eq!(found, json!(arenas));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Steps can be as wide as they took.
#[test]
fn measured_time_is_an_axis() {
    let Some(mut browser) = Chromium::start("timed") else { return };
    let folder = Folder::new("timed");
    let (plan, graph) = planned(graphs::import("digits.onnx", &[("batch", 8)]), "cpu", false);
    let file = folder.path("timed.html");
    std::fs::write(&file, page("digits", plan.first(), Some(&graph), None)).expect("it is written");
    browser.open(&file);
    assert!(!tick(&mut browser, "measured time"));

    // Microseconds.
    let times: Vec<f64> = (0..plan.programs[0].steps.len()).map(|step| 250.0 * (step + 1) as f64).collect();
    let ends: Vec<f64> = (0..=plan.programs[0].steps.len()).map(|step| times[..step].iter().sum()).collect();
    let total = ends[plan.programs[0].steps.len()];
    let html = page("digits", plan.first(), Some(&graph), None);
    let timed = html.replacen("\"times\":[]", &format!("\"times\":{}", json!(times)), 1);
    assert_ne!(html, timed);
    std::fs::write(&file, timed).expect("it is written");
    browser.open(&file);
    assert!(tick(&mut browser, "measured time"));
    let rects =
        browser.eval("plimsoll.boxes().filter(b => b.panel.kind === 'main').map(b => [...b.rect.time, (b.x - b.panel.x) / b.panel.w, b.w / b.panel.w])");
    let rects: Vec<[f64; 4]> = serde_json::from_value(rects).expect("numbers");
    let arena = |b: &&plan::Buffer| plan.segments[b.segment].class == Class::Activation;
    assert_eq!(rects.len(), plan.programs[0].buffers.iter().filter(arena).count());
    let at = |half: f64| {
        let step = (half / 2.0) as usize;
        ends[step] + if half % 2.0 == 1.0 { times[step] / 2.0 } else { 0.0 }
    };
    for [from, to, x, w] in rects {
        let expected = [at(from) / total, (at(to) - at(from)) / total];
        assert!((x - expected[0]).abs() < 1e-6 && (w - expected[1]).abs() < 1e-6, "{from} {to}: {x} {w}, {expected:?}");
    }
    // A point of the strip leads to the step that ran then.
    let strip = browser.eval("(p => [p.x, p.y + 4, p.w])(plimsoll.panels().find(p => p.kind === 'strip'))");
    let [x, y, w]: [f64; 3] = serde_json::from_value(strip).expect("numbers");
    for (step, time) in times.iter().enumerate() {
        let middle = x + w * (ends[step] + time / 2.0) / total;
        assert_eq!(browser.eval(&format!("plimsoll.hit({middle}, {y}).step")), json!(step));
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Labels are turned where a box is tall and too narrow for a name. Long names lose their middle.
#[test]
fn labels_are_turned_and_cut_in_the_middle() {
    let first = "encoder/layers/first/attention/with/a/name/that/no/box/has/room/for/even/if/it/is/turned/and/as/tall/as/the/arena/first_input";
    let trace = Trace::new("labels");
    let mut x = trace.input(first, DType::F32, [256, 256]);
    for _ in 0..30 {
        x = x.matmul(x);
    }
    trace.output("short", x);
    let (plan, graph) = planned(trace.finish().expect("a graph"), "cpu", true);
    let drawn = svg(&plan, &About { subject: "labels", graphs: std::slice::from_ref(&graph), ..About::default() });
    let turned: Vec<_> = drawn.lines().filter(|line| line.contains("rotate(-90)")).collect();
    let cut = |line: &&&str| line.contains(">enc") && line.contains('…') && line.contains("first_input<");
    assert!(turned.len() > 3 && turned.iter().any(|line| cut(&line)), "{turned:?}");

    let Some(mut browser) = Chromium::start("labels") else { return };
    let folder = Folder::new("labels");
    let file = folder.path("labels.html");
    std::fs::write(&file, page("labels", plan.first(), Some(&graph), None)).expect("it is written");
    browser.open(&file);
    let told = browser.eval(
        "(() => {
            const told = [], pen = CanvasRenderingContext2D.prototype, own = pen.fillText;
            pen.fillText = function (text, x, y) {
                const at = this.getTransform();
                if (at.b) told.push([text, at.e, at.f, this.measureText(text).width]);
            };
            plimsoll.draw();
            pen.fillText = own;
            return told;
        })()",
    );
    let told: Vec<(String, f64, f64, f64)> = serde_json::from_value(told).expect("texts and places");
    assert!(told.len() > 3, "{told:?}");
    let (found, _) = boxes(&mut browser);
    for (text, x, y, length) in &told {
        let inside = |one: &Value| {
            let (left, top) = (field(one, "x"), field(one, "y"));
            left < *x && *x < left + field(one, "w") && top < y - length && *y < top + field(one, "h")
        };
        assert!(found.iter().any(inside), "'{text}' leaves its box");
    }
    let cut = |text: &str| text.starts_with("enc") && text.contains('…') && text.ends_with("first_input");
    assert!(told.iter().any(|(text, ..)| cut(text)), "{told:?}");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

#[test]
fn the_losses_of_a_training_are_drawn_beside_its_memory() {
    let folder = Folder::new("training");
    let [page, log] = ["training.html", "log.jsonl"].map(|name| folder.path(name));
    let [images, labels] = ["images", "labels"].map(|name| format!("graphs/digits-train-{name}.npy"));
    let args = ["train", "graphs/digits-fresh.onnx", "--data", &images, "--labels", &labels, "--json"];
    let method = ["--loss", "cross_entropy", "--lr", "0.01", "--batch", "180", "--epochs", "3", "--backend", "cpu"];
    let valid = ["--valid", "graphs/digits-images.npy", "--valid-labels", "graphs/digits-labels.npy"];
    let files = ["--html", page.to_str().expect("text"), "--log", log.to_str().expect("text")];
    let found = plimsoll(&[&args[..], &method, &valid, &files].concat());
    let found = common::printed(&args, &found);
    let log = std::fs::read_to_string(&log).expect("there is a log");
    let losses: Vec<f64> =
        log.lines().map(|line| field(&serde_json::from_str(line).expect("a step"), "loss")).collect();
    assert_eq!(losses.len(), 21);

    let Some(mut browser) = Chromium::start("training") else { return };
    browser.open(&page);
    // From left to right, and a larger loss is above a smaller one.
    let drawn =
        "[...document.querySelectorAll('#losses polyline.loss')].flatMap(l => [...l.points].map(p => [p.x, p.y]))";
    let drawn = browser.eval(drawn);
    let drawn: Vec<[f64; 2]> = serde_json::from_value(drawn).expect("points");
    assert_eq!(drawn.len(), losses.len());
    assert!(drawn.windows(2).all(|pair| pair[0][0] < pair[1][0]), "{drawn:?}");
    for (one, other) in (0..21).flat_map(|i| (0..21).map(move |j| (i, j))) {
        let above = drawn[one][1] <= drawn[other][1];
        assert!(losses[one] < losses[other] || above, "{losses:?} are drawn as {drawn:?}");
    }
    // Ticks are round, and where they say.
    let marks = "[...document.querySelectorAll('#losses text.loss')].map(t => [Number(t.textContent), t.y.baseVal[0].value - 4])";
    let marks: Vec<[f64; 2]> = serde_json::from_value(browser.eval(marks)).expect("ticks");
    assert!(marks.len() > 2, "{marks:?}");
    for [value, y] in &marks {
        let digits = format!("{value:e}");
        assert!(digits.split('e').next().is_some_and(|digits| digits.len() <= 3), "{value} is not round");
        for (loss, [_, drawn]) in losses.iter().zip(&drawn) {
            assert!((loss < value) == (drawn > y) || (drawn - y).abs() < 0.2, "{loss} beside {value}");
        }
    }
    let steps = browser.eval("[...document.querySelectorAll('#losses text.step')].map(t => t.textContent)");
    assert_eq!(steps, json!(["0", "5", "10", "15", "20"]));
    assert_eq!(browser.eval("document.querySelectorAll('#losses circle').length"), json!(3));
    let legend = text(&mut browser, "losses");
    let accuracy = format!("accuracy {:.2} %", 100.0 * field(&found, "valid_accuracy"));
    assert!(legend.contains(&accuracy), "{accuracy} in {legend}");
    let bytes = text(&mut browser, "bytes");
    for words in ["planned", "weights", "optimizer", "kept for backward", &human(field(&found, "planned_bytes") as u64)]
    {
        assert!(bytes.contains(words), "{words} in {bytes}");
    }
    assert_eq!(browser.eval("plimsoll.data.scenes.map(s => s.name)"), json!(["step", "evaluate"]));
    let title = "Training of graphs/digits-fresh.onnx (batch 180, adam, cross_entropy) on cpu";
    assert!(text(&mut browser, "title").starts_with(title));
    // A fall of five powers of ten.
    let html = std::fs::read_to_string(&page).expect("it is drawn");
    let (head, rest) = html.split_once("\"points\":[").expect("it has losses");
    let (_, rest) = rest.split_once(']').expect("the losses end");
    let steep = folder.path("steep.html");
    std::fs::write(&steep, format!("{head}\"points\":[1.52,0.03,0.0000126]{rest}")).expect("it is written");
    browser.open(&steep);
    let marks = browser.eval("[...document.querySelectorAll('#losses text.loss')].map(t => t.textContent)");
    assert_eq!(marks, json!(["0.0001", "0.001", "0.01", "0.1", "1"]));
    assert!(text(&mut browser, "losses").contains("on a logarithmic scale"));
    browser.open(&page);
    // The pointer shows the step below it.
    let middle = "(b => [b.left + b.width / 2, b.top + b.height / 2])(document.querySelector('#losses svg').getBoundingClientRect())";
    let [x, y]: [f64; 2] = serde_json::from_value(browser.eval(middle)).expect("a point");
    browser.mouse("mouseMoved", (x, y), json!({}));
    browser.settle();
    let shown = text(&mut browser, "losses");
    let near = [9, 10, 11].map(|step| (format!("step {step}: loss "), losses[step]));
    let right = near.iter().any(|(words, loss)| {
        let told = shown.split_once(words).and_then(|(_, rest)| rest.split(';').next()?.trim().parse::<f64>().ok());
        told.is_some_and(|told| (told - loss).abs() < 1e-3)
    });
    assert!(right, "{shown}");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// A training that has not run: what its bytes hold, the parts of its steps, and what each state is.
#[test]
fn a_planned_training_is_drawn_as_a_training() {
    let folder = Folder::new("planned-training");
    let [html, svg] = ["step.html", "step.svg"].map(|name| folder.path(name));
    let args = ["plan", "--train", "graphs/digits-fresh.onnx", "--loss", "cross_entropy", "--batch", "30", "--json"];
    let files = ["--html", html.to_str().expect("text"), "--svg", svg.to_str().expect("text")];
    let plan = common::printed(&args, &plimsoll(&[&args[..], &files].concat()));
    let planned = plan["planned_bytes"].as_u64().expect("a number");

    let drawn = std::fs::read_to_string(&svg).expect("it is drawn");
    let title = "Training of graphs/digits-fresh.onnx (batch 30, adam, cross_entropy)";
    let label = format!("aria-label=\"{title}, step on cpu: ");
    for words in [&label, ", evaluate on cpu, ", &format!("{} planned", human(planned))] {
        assert!(drawn.contains(words), "{words} in the picture");
    }
    // The bar of all bytes.
    for kind in [Kind::Weight, Kind::Optimizer] {
        assert_eq!(drawn.matches(&format!(">{} ", kind.label())).count(), 1, "{kind:?}");
    }
    let bands = |part: Part| drawn.matches(&format!("fill=\"{}\"", part.fill())).count();
    for part in [Part::Forward, Part::Backward, Part::Update] {
        assert!(bands(part) > 1 && drawn.contains(&format!(">{}<", part.label())), "{part:?} and its legend");
    }

    let Some(mut browser) = Chromium::start("planned-training") else { return };
    browser.open(&html);
    assert_eq!(text(&mut browser, "title"), format!("{title} on cpu"));
    let totals = text(&mut browser, "totals");
    for words in [format!("{} planned", human(planned)), "weights".into(), "optimizer".into(), "arena".into()] {
        assert!(totals.contains(&words), "{words} in {totals}");
    }
    // No table is a heading alone, and no loss is drawn.
    let bare = "[...document.querySelectorAll('table')].filter(t => !t.querySelector('td')).length";
    assert_eq!(browser.eval(bare), json!(0));
    assert_eq!(browser.eval("document.getElementById('losses').offsetHeight"), json!(0));
    // The bar has all bytes.
    let widths =
        "[...document.querySelectorAll('#totals .bar i')].reduce((sum, i) => sum + parseFloat(i.style.width), 0)";
    let widths = browser.eval(widths).as_f64().expect("a number");
    assert!((widths - 100.0).abs() < 0.01, "{widths} %");
    // Forward comes before backward, and that before the update of the first layer.
    let parts = browser.eval("plimsoll.data.scenes[0].steps.map(s => s.part)");
    let parts = parts.as_array().expect("a list");
    let first = |part: &str| parts.iter().position(|p| p == part).unwrap_or_else(|| panic!("no {part} in {parts:?}"));
    assert!(first("forward") < first("backward") && first("backward") < first("update"), "{parts:?}");
    assert!(browser.eval("plimsoll.data.scenes[1].steps.every(s => s.part === 'forward')") == json!(true));
    let band = browser.eval("(p => [p.x + 2, p.y + 2])(plimsoll.panels().find(p => p.kind === 'part'))");
    let [x, y]: [f64; 2] = serde_json::from_value(band).expect("a point");
    assert_eq!(pixel(&mut browser, x, y), Part::Forward.fill());
    assert_eq!(browser.eval(&format!("plimsoll.hit({x}, {y}).step")), json!(0));
    // Both programs share the weights: each is drawn once, with its name.
    let names = plan["trained"].as_array().expect("a list");
    let lasting = "plimsoll.boxes().filter(b => b.panel.kind === 'band').map(b => plimsoll.data.scenes[b.k].buffers[b.buffer].name)";
    let lasting: Vec<String> = serde_json::from_value(browser.eval(lasting)).expect("names");
    for name in names.iter().map(|name| name.as_str().expect("a name")) {
        assert_eq!(lasting.iter().filter(|drawn| *drawn == name).count(), 1, "{name} in {lasting:?}");
    }
    // The states: six weights, and two of Adam's for each.
    let of = |kind: &str| {
        format!("new Set(plimsoll.data.scenes[0].buffers.filter(b => b.kind === '{kind}').map(b => b.offset)).size")
    };
    let trained = plan["trained"].as_array().expect("a list").len();
    assert_eq!(browser.eval(&of("weight")), json!(trained));
    assert!(browser.eval(&of("optimizer")).as_u64() >= Some(2 * trained as u64));
    let legend = text(&mut browser, "legend");
    for words in ["forward", "backward", "update", "weights", "optimizer"] {
        assert!(legend.contains(words), "{words} in {legend}");
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// The modules that PyTorch's exporter writes beside each node lead the names, and a colour can tell them apart.
#[test]
fn modules_of_the_file_are_names_and_colours() {
    let folder = Folder::new("modules");
    let [model, html, svg] = ["model.onnx", "plan.html", "plan.svg"].map(|name| folder.path(name));
    let mut proto = onnx::load(&root().join("graphs/digits.onnx")).expect("it is read").proto;
    let nodes = &mut proto.graph.as_mut().expect("it has a graph").node;
    let half = nodes.len() / 2;
    for (n, node) in nodes.iter_mut().enumerate() {
        let block = if n < half { "encoder" } else { "head" };
        let value = format!("['', '{block}', '{block}.{n}', 'node_{n}']");
        node.metadata_props.push(StringStringEntryProto { key: "pkg.torch.onnx.name_scopes".into(), value });
    }
    onnx::write(proto, &model, None).expect("it is written");
    let paths = [&model, &html, &svg].map(|path| path.to_str().expect("the path is text"));
    let plan = ["plan", paths[0], "--batch", "360"];
    plimsoll(&[&plan[..], &["--html", paths[1], "--svg", paths[2]]].concat());
    let drawn = std::fs::read_to_string(&svg).expect("it is drawn");
    assert!(drawn.contains("<title>encoder.") && drawn.contains(">head."), "modules in {drawn}");

    let Some(mut browser) = Chromium::start("modules") else { return };
    browser.open(&html);
    let steps = browser.eval("plimsoll.data.scenes[0].steps.map(s => s.module)");
    let steps: Vec<String> = serde_json::from_value(steps).expect("each step has a module");
    assert!(steps[0].starts_with("encoder.") && steps[steps.len() - 1].starts_with("head."), "{steps:?}");
    let told = written(&mut browser);
    assert!(told.iter().any(|text| text.starts_with("encoder.")), "{told:?}");

    // By layer, steps have one colour where their module is one.
    assert!(tick(&mut browser, "colour by layer"));
    let strip = browser.eval("(p => [p.x, p.y + 4, p.w])(plimsoll.panels().find(p => p.kind === 'strip'))");
    let [x, y, w]: [f64; 3] = serde_json::from_value(strip).expect("numbers");
    let count = steps.len() as f64;
    let colours: Vec<_> =
        (0..steps.len()).map(|step| pixel(&mut browser, x + w * (step as f64 + 0.5) / count, y)).collect();
    for (one, other) in (0..steps.len()).flat_map(|i| (0..i).map(move |j| (i, j))) {
        assert_eq!(steps[one] == steps[other], colours[one] == colours[other], "{steps:?} are {colours:?}");
    }
    let legend = text(&mut browser, "legend");
    assert!(steps.iter().all(|module| legend.contains(module)), "{steps:?} in {legend}");
    assert!(tick(&mut browser, "colour by layer"));
    assert!(text(&mut browser, "legend").contains("convolution"));

    // So do trainings, whose gradients have the modules of what they are of.
    let train = ["plan", "--train", paths[0], "--loss", "cross_entropy", "--batch", "8"];
    plimsoll(&[&train[..], &["--html", paths[1]]].concat());
    browser.open(&html);
    let backward = "plimsoll.data.scenes[0].steps.filter(s => s.part === 'backward' && s.module).length";
    assert!(browser.eval(backward).as_u64() > Some(2));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Names come from files. All of them must end up as text.
#[test]
fn names_are_text() {
    const NAMES: [&str; 7] = [
        "</script><script>window.hacked = 1</script>",
        "<!-- <script>",
        "\" onload=\"window.hacked = 1\" x='",
        "<img src=x onerror='window.hacked = 1'>",
        "{{js}}{{data}}${window.hacked = 1}",
        "größe \u{1f422} \u{202e}\u{2028} ]]>",
        "a\u{0}b\u{1b}\\u003c&amp;\n",
    ];
    let trace = Trace::new(NAMES[0]);
    for name in NAMES {
        let x = trace.input(name, DType::F32, [64, 64]);
        trace.output(&format!("{name}out"), x.exp().matmul(x).relu());
    }
    let (plan, graph) = planned(trace.finish().expect("a graph"), "cpu", false);
    let html = page(NAMES[0], plan.first(), Some(&graph), None);
    assert_eq!(html, page(NAMES[0], plan.first(), Some(&graph), None));
    let drawn = svg(&plan, &About { subject: NAMES[0], graphs: std::slice::from_ref(&graph), ..About::default() });
    for text in [&html, &drawn] {
        assert!(!text.contains("<script>window") && !text.contains("<img"), "a name is markup");
    }
    let Some(mut browser) = Chromium::start("names") else { return };
    let folder = Folder::new("names");
    let (file, picture) = (folder.path("names.html"), folder.path("names.svg"));
    std::fs::write(&file, &html).expect("it is written");
    std::fs::write(&picture, &drawn).expect("it is written");
    browser.open(&file);
    browser.eval("document.getElementById('all').open = true");
    browser.settle();
    let shown = browser.eval("[...document.querySelectorAll('#rows button')].map(b => b.textContent)");
    let shown = shown.as_array().expect("a list");
    for name in NAMES {
        assert!(shown.contains(&json!(name)), "{name:?} in {shown:?}");
    }
    for b in 0..plan.programs[0].buffers.len() {
        browser.eval(&format!("plimsoll.hit(1, 1); plimsoll.draw(); {b}"));
    }
    assert_eq!(browser.eval("document.title"), json!(format!("{} on cpu", NAMES[0])));
    assert_eq!(browser.eval("typeof window.hacked"), json!("undefined"));
    assert_eq!(browser.eval("document.scripts.length"), json!(2));
    // The picture is XML, which is stricter than HTML.
    browser.open(&picture);
    assert_eq!(browser.eval("document.documentElement.tagName"), json!("svg"));
    assert_eq!(browser.eval("document.querySelectorAll('parsererror, script').length"), json!(0));
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Each round makes two buffers. In every hundredth round, the first one lives to the end.
fn exponentials(turns: usize) -> (Plan, Graph) {
    let trace = Trace::new("large");
    let mut x = trace.input("x", DType::F32, [16, 16]);
    let mut kept = Vec::new();
    for n in 0..turns {
        let y = x.exp();
        x = y + x;
        if n % 100 == 0 {
            kept.push(y);
        }
    }
    let y = kept.into_iter().fold(x, |sum, y| sum + y);
    trace.output("y", y);
    planned(trace.finish().expect("a graph"), "cpu", false)
}

/// The work of a page that is drawn, hit and searched: how often each block of its code ran, and the elements that methods of arrays went
/// through.
fn work(browser: &mut Chromium) -> f64 {
    browser.eval(
        "(() => {
            window.elements = 0;
            const linear = ['concat', 'every', 'filter', 'find', 'findIndex', 'flat', 'flatMap', 'forEach', 'includes', 'indexOf', 'join',
                'lastIndexOf', 'map', 'reduce', 'reverse', 'shift', 'slice', 'some', 'sort', 'splice', 'unshift', Symbol.iterator];
            for (const name of linear) {
                const own = Array.prototype[name];
                Array.prototype[name] = function () { window.elements += this.length; return own.apply(this, arguments); };
            }
        })()",
    );
    // It counts anew from here.
    browser.call("Profiler.takePreciseCoverage", json!({}));
    browser.eval(
        "(() => {
            plimsoll.draw();
            plimsoll.hit(300, 300);
            const find = document.getElementById('find');
            find.value = 'exp';
            find.dispatchEvent(new Event('input'));
            plimsoll.draw();
        })()",
    );
    let covered = browser.call("Profiler.takePreciseCoverage", json!({}));
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let scripts =
        list(&covered["result"]).into_iter().filter(|s| s["url"].as_str().is_some_and(|u| u.starts_with("file:")));
    let functions = scripts.flat_map(|script| list(&script["functions"]));
    let blocks: f64 =
        functions.flat_map(|function| list(&function["ranges"])).map(|range| field(&range, "count")).sum();
    blocks + browser.eval("window.elements").as_f64().expect("a number")
}

/// Sixteen times the buffers take about sixteen times the work: that of 256 would be buffers compared with one another.
#[test]
fn drawing_grows_with_the_buffers_and_not_with_their_square() {
    let Some(mut browser) = Chromium::start("large") else { return };
    // Blocks are counted in code that is compiled from now on.
    browser.call("Profiler.enable", json!({}));
    browser.call("Profiler.startPreciseCoverage", json!({"callCount": true, "detailed": true}));
    let folder = Folder::new("large");
    let [few, many] = [320, 5120].map(|turns| {
        let (plan, graph) = exponentials(turns);
        assert!(plan.programs[0].buffers.len() >= 2 * turns, "{}", plan.programs[0].buffers.len());
        let file = folder.path(&format!("{turns}.html"));
        std::fs::write(&file, page("exponentials", plan.first(), Some(&graph), None)).expect("it is written");
        browser.open(&file);
        assert_eq!(browser.eval("plimsoll.boxes().length"), json!(plan.programs[0].buffers.len()));
        let work = work(&mut browser);
        assert!(
            work > 4.0 * plan.programs[0].buffers.len() as f64,
            "{work} for {} buffers",
            plan.programs[0].buffers.len()
        );
        work
    });
    assert!(many < 24.0 * few, "{few} blocks and elements for 640 buffers, {many} for 10,240");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}
