//! Draws a scene as a static picture for a README, 800 units wide, in light and dark colours.

use super::picture::{ARENA, About, Item, Kind, Part, Scene, Space, escape, scenes, title};
use super::{count, grouped, human};
use crate::plan::{BufferIdx, Class, Plan};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const WIDTH: f64 = 800.0;
/// The left end of the plots.
const LEFT: f64 = 84.0;
/// The right end of the plots.
const RIGHT: f64 = 784.0;
const EDGE: f64 = 16.0;
/// An upper estimate of a letter's width, in units of the font's size. Real widths are not known here, and no label may be cut.
const LETTER: f64 = 0.6;

/// The colour of pale rectangles in the legend.
const PALE: &str = "#77aadd4d";

/// Stripes, for bytes that are there and in no use.
const UNUSED: &str = "url(#u)";
const STRIPES: &str = "<defs><pattern id=\"u\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
<path class=\"s\" d=\"M0 0V5\"/></pattern></defs>";

const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
.t{font-size:15px;font-weight:600}.m{fill:#59636e}.e{text-anchor:end}.c{text-anchor:middle}.b{font-weight:600}
.i{font-size:11px;fill:#14171a}.bg{fill:#ffffff;stroke:#d1d9e0}.a{fill:#f2f4f7}.s{stroke:#d3d9e0}.g{stroke:#d8dee4}.r{stroke:#ffffff}
.l{fill:#d3d9e0}.k{stroke:#1f2328;fill:none}.w{fill:#1f2328;fill-opacity:.08}.d{stroke-dasharray:4 3}.o{stroke-dasharray:2 4;stroke-opacity:.6}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.m{fill:#9198a1}.i{fill:#14171a}.bg{fill:#0d1117;stroke:#3d444d}.a{fill:#161b22}.s{stroke:#30363d}
.g{stroke:#2a313c}.r{stroke:#0d1117}.l{fill:#3a424d}.k{stroke:#e6edf3}.w{fill:#e6edf3;fill-opacity:.1}}
";

/// The picture of a plan: its programs, one below another.
pub fn svg(plan: &Plan, about: &About) -> String {
    let whose = if about.trained.is_some() { "Training of " } else { "" };
    let mut scenes = scenes(plan, about);
    let several = scenes.len() > 1;
    for scene in &mut scenes {
        let program = if several { format!(", {}", scene.name) } else { String::new() };
        scene.name = format!("{whose}{}{program}", about.subject);
    }
    draw(&scenes)
}

fn draw(scenes: &[Scene]) -> String {
    let mut top = 0.0;
    let mut body = String::new();
    for (number, scene) in scenes.iter().enumerate() {
        let (own, height) = sketch(scene, number == 0);
        body += &if number == 0 {
            own
        } else {
            format!("<g transform=\"translate(0 {})\">\n{own}</g>\n", self::number(top))
        };
        top += height;
    }
    let height = top + 14.0;
    let label = scenes
        .first()
        .map_or(String::new(), |scene| escape(&format!("{} on {}: memory over steps", scene.name, scene.target)));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {h}\" width=\"{WIDTH}\" height=\"{h}\" role=\"img\" aria-label=\"{label}\">\n\
         <style>{STYLE}</style>\n{STRIPES}\n<rect class=\"bg\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n{}</svg>\n",
        WIDTH - 1.0,
        self::number(height - 1.0),
        body,
        h = self::number(height),
    )
}

/// The drawing of a scene, and its height. Programs of a plan share all segments: the first has the bar of them.
fn sketch(scene: &Scene, is_first: bool) -> (String, f64) {
    let mut sketch = Sketch { scene, body: String::new(), y: 30.0 };
    sketch.head();
    if is_first {
        sketch.totals();
    }
    if !scene.steps.is_empty() {
        sketch.curve();
        sketch.arena();
        sketch.parts();
        sketch.steps();
        sketch.lasting();
        sketch.legend();
        sketch.holders();
    }
    (sketch.body, sketch.y)
}

/// The picture so far, which ends at `y`.
struct Sketch<'a> {
    scene: &'a Scene,
    body: String,
    y: f64,
}

impl Sketch<'_> {
    fn put(&mut self, element: std::fmt::Arguments) {
        self.body.write_fmt(element).and_then(|()| self.body.write_char('\n')).expect("text can always grow");
    }

    fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        self.put(format_args!(
            "<text class=\"{class}\" x=\"{}\" y=\"{}\">{}</text>",
            number(x),
            number(y),
            escape(text)
        ));
    }

    /// A rectangle with a tooltip.
    fn rect(&mut self, style: &str, [x0, x1, y0, y1]: [f64; 4], tip: &str) {
        let (x, y, w, h) = (number(x0), number(y0), number(x1 - x0), number(y1 - y0));
        let place = format!("x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\"");
        match tip {
            "" => self.put(format_args!("<rect {style} {place}/>")),
            tip => self.put(format_args!("<rect {style} {place}><title>{}</title></rect>", escape(tip))),
        }
    }

    fn line(&mut self, class: &str, [x0, x1, y0, y1]: [f64; 4]) {
        let [x0, x1, y0, y1] = [x0, x1, y0, y1].map(number);
        self.put(format_args!("<path class=\"{class}\" d=\"M{x0} {y0}L{x1} {y1}\"/>"));
    }

    fn x(&self, half: usize) -> f64 {
        LEFT + (RIGHT - LEFT) * half as f64 / (2 * self.scene.steps.len()) as f64
    }

    fn head(&mut self) {
        let scene = self.scene;
        let right = format!("{} planned", human(scene.planned));
        self.text("t e", RIGHT, self.y, &right);
        let title = format!("{} on {}, {}", scene.name, scene.target, count(scene.steps.len() as u64, "step"));
        let room = RIGHT - EDGE - width(&right, 15.0) - 16.0;
        self.text("t", EDGE, self.y, &fit(&title, room, 15.0).unwrap_or_default());
        self.y += 14.0;
    }

    /// All segments as one bar, with its legend.
    fn totals(&mut self) {
        let scene = self.scene;
        let whole = scene.planned.max(scene.limit.unwrap_or(0)).max(1) as f64;
        let (top, bottom) = (self.y, self.y + 12.0);
        let mut x = EDGE;
        let mut entries = Vec::new();
        for (title, bytes, fill) in scene.holdings() {
            let to = x + (RIGHT - EDGE) * bytes as f64 / whole;
            let tip = format!("{title}: {}", super::bytes(bytes));
            self.rect(&format!("class=\"r\" fill=\"{fill}\""), [x, to, top, bottom], &tip);
            x = to;
            entries.push((fill, format!("{title} {}", human(bytes))));
        }
        if let Some(limit) = scene.limit {
            let at = EDGE + (RIGHT - EDGE) * limit as f64 / whole;
            self.line("k", [at, at, top - 3.0, bottom + 3.0]);
            entries.push(("", format!("limit {}", human(limit))));
        }
        self.y = bottom + 8.0;
        self.entries(&entries, EDGE);
    }

    /// Coloured squares with words, wrapped into lines.
    fn entries(&mut self, entries: &[(&str, String)], left: f64) {
        let mut x = left;
        self.y += 10.0;
        for (fill, words) in entries {
            let wide = 15.0 + width(words, 12.0) + 10.0;
            if x + wide > RIGHT && x > left {
                x = left;
                self.y += 18.0;
            }
            match *fill {
                "" => self.line("k", [x + 5.0, x + 5.0, self.y - 10.0, self.y]),
                fill => {
                    let style = format!("fill=\"{fill}\"");
                    self.rect(&style, [x, x + 10.0, self.y - 9.0, self.y + 1.0], "");
                }
            }
            self.text("m", x + 15.0, self.y, words);
            x += wide;
        }
        self.y += 8.0;
    }

    /// Live bytes over the steps, with the bound.
    fn curve(&mut self) {
        let scene = self.scene;
        let (top, bottom) = (self.y + 24.0, self.y + 72.0);
        let high = scene.arena.max(1) as f64;
        let y = |bytes: u64| bottom - (bottom - top) * bytes as f64 / high;
        self.text("m e", LEFT - 8.0, bottom, "0");
        self.text("m e", LEFT - 8.0, bottom - 22.0, "live bytes");
        let mut area = format!("M{} {}", number(LEFT), number(bottom));
        for (s, &live) in scene.live.iter().enumerate() {
            area += &format!("V{}H{}", number(y(live)), number(self.x(2 * s + 2)));
        }
        area += &format!("V{}Z", number(bottom));
        self.put(format_args!("<path class=\"l\" d=\"{area}\"/>"));
        self.line("g", [LEFT, RIGHT, bottom, bottom]);
        self.line("k d", [LEFT, RIGHT, y(scene.bound), y(scene.bound)]);
        if let Some(peak) = &scene.peak {
            let half = 2 * peak.step.index();
            let x = (self.x(half) + self.x(half + 2)) / 2.0;
            let words = format!("peak: {} live at step {}", human(peak.bytes), peak.step);
            let bound = match scene.arena.saturating_sub(scene.bound) {
                0 => format!("lower bound {}, reached", human(scene.bound)),
                over => format!("lower bound {}, arena {} over", human(scene.bound), human(over)),
            };
            // The peak's label is above the peak; the bound's label is where there is room for it.
            let (wide, other) = (width(&words, 12.0), width(&bound, 12.0));
            let middle = x.clamp(LEFT + wide / 2.0, RIGHT - wide / 2.0);
            self.text("b c", middle, top - 8.0, &words);
            if RIGHT - other > middle + wide / 2.0 + 12.0 {
                self.text("m e", RIGHT, top - 8.0, &bound);
            } else if LEFT + other < middle - wide / 2.0 - 12.0 {
                self.text("m", LEFT, top - 8.0, &bound);
            }
        }
        self.y = bottom + 12.0;
    }

    fn arena(&mut self) {
        let scene = self.scene;
        let spaces = || scene.spaces.iter().filter(|s| s.class == Some(Class::Activation));
        let all = spaces().map(|s| s.bytes).sum::<u64>().max(1) as f64;
        let top = self.y;
        let mut labels = String::new();
        for space in spaces() {
            labels += &self.space(space, (260.0 * space.bytes as f64 / all).max(24.0));
        }
        if let Some(peak) = &scene.peak {
            let half = 2 * peak.step.index();
            let (x0, x1) = (self.x(half), self.x(half + 2));
            let (x0, x1) = if x1 - x0 < 2.0 { (x0 - 0.5, x0 + 1.5) } else { (x0, x1) };
            let (from, to) = (top - 60.0, self.y - 8.0);
            self.rect("class=\"w\" pointer-events=\"none\"", [x0, x1, from, to], "");
            for x in [x0, x1] {
                self.line("k", [x, x, from, top]);
                self.line("k o", [x, x, top, to]);
            }
        }
        self.body += &labels;
    }

    /// A segment of the arena. Returns the labels, which are drawn last, above everything else.
    fn space(&mut self, space: &Space, height: f64) -> String {
        let scene = self.scene;
        let mut labels = Sketch { scene, body: String::new(), y: 0.0 };
        let (top, bottom) = (self.y, self.y + height);
        let high = space.bytes.max(1);
        let y = |bytes: u64| bottom - height * bytes as f64 / high as f64;
        self.rect("class=\"a\"", [LEFT, RIGHT, top, bottom], "");
        if !space.rects.is_empty() {
            self.rect(&format!("fill=\"{UNUSED}\""), [LEFT, RIGHT, top, bottom], "");
        }
        let step = (high / ((height / 40.0) as u64).max(1)).max(1).next_power_of_two();
        for tick in (0..=high / step).map(|n| n * step) {
            self.line("g", [LEFT, RIGHT, y(tick), y(tick)]);
            self.text("m e", LEFT - 8.0, y(tick) + 4.0, &short(tick));
        }
        for rect in &space.rects {
            let item = &scene.buffers[rect.buffer];
            let fill = item.kind.fill();
            let [y0, y1] = [y(rect.bytes.1), y(rect.bytes.0)];
            if rect.held != rect.time {
                let style = format!("fill=\"{fill}\" fill-opacity=\".3\"");
                self.rect(&style, [self.x(rect.held.0), self.x(rect.held.1), y0, y1], "");
            }
            let (x0, x1) = (self.x(rect.time.0), self.x(rect.time.1));
            let style = if (x1 - x0).min(y1 - y0) > 2.0 {
                format!("class=\"r\" fill=\"{fill}\"")
            } else {
                format!("fill=\"{fill}\"")
            };
            self.rect(&style, [x0, x1, y0, y1], &scene.tip(rect.buffer));
            labels.label(item, [x0, x1, y0, y1]);
        }
        self.y = bottom + 8.0;
        labels.body
    }

    /// A buffer's name and size in its rectangle: upwards if that is tall and its width has no room for the name.
    fn label(&mut self, item: &Item, [x0, x1, y0, y1]: [f64; 4]) {
        const SIZE: f64 = 11.0;
        const EDGES: f64 = 10.0;
        let name = item.shown();
        let turned = y1 - y0 > x1 - x0 && width(&name, SIZE) > x1 - x0 - EDGES;
        let (length, height) = if turned { (y1 - y0, x1 - x0) } else { (x1 - x0, y1 - y0) };
        let (room, size) = (length - EDGES, human(item.bytes));
        let sized = [format!("{size} {}", item.ty), size].into_iter().find(|s| width(s, SIZE) <= room);
        let lines: Vec<_> = [fit(&name, room, SIZE), sized].into_iter().flatten().collect();
        let lines = &lines[..lines.len().min(if height >= 30.0 { 2 } else { usize::from(height >= 15.0) })];
        for (i, line) in lines.iter().enumerate() {
            let across = 4.0 + 14.0 * (i as f64 - (lines.len() as f64 - 1.0) / 2.0);
            if turned {
                let (x, y) = (number((x0 + x1) / 2.0 + across), number(y1 - 6.0));
                let place = format!("transform=\"translate({x} {y})rotate(-90)\"");
                self.put(format_args!("<text class=\"i\" {place}>{}</text>", escape(line)));
            } else {
                self.text("i", x0 + 6.0, (y0 + y1) / 2.0 + across, line);
            }
        }
    }

    /// Of a training, a row of the parts of an update above the steps.
    fn parts(&mut self) {
        let parts = self.scene.parts();
        if parts.is_empty() {
            return;
        }
        let (top, bottom) = (self.y, self.y + 16.0);
        for (part, first, end) in parts {
            let (x0, x1) = (self.x(2 * first), self.x(2 * end));
            let tip = format!("{}: {}", part.label(), steps_told(first, end));
            self.rect(&format!("fill=\"{}\"", part.fill()), [x0, x1, top, bottom], &tip);
            if width(part.label(), 11.0) < x1 - x0 - 10.0 {
                self.text("i", x0 + 5.0, bottom - 4.0, part.label());
            }
        }
        self.text("m e", LEFT - 8.0, bottom - 4.0, "part");
        self.y = bottom + 4.0;
    }

    /// One cell per step, with a row per stream, and names or numbers below the cells.
    fn steps(&mut self) {
        let scene = self.scene;
        let streams = f64::from(scene.streams());
        for (s, step) in scene.steps.iter().enumerate() {
            let top = self.y + 10.0 * f64::from(step.stream);
            let style = format!("fill=\"{}\"", step.kind.fill());
            let (x0, x1) = (self.x(2 * s), self.x(2 * s + 2));
            let gap = if x1 - x0 > 4.0 { 0.5 } else { 0.0 };
            let tip = format!("step {s}: {} '{}'", step.operator, step.name);
            self.rect(&style, [x0 + gap, x1 - gap, top, top + 8.0], &tip);
        }
        self.text("m e", LEFT - 8.0, self.y + 8.0, if streams > 1.0 { "streams" } else { "steps" });
        self.y += 10.0 * streams + 12.0;
        let wide = (RIGHT - LEFT) / scene.steps.len() as f64;
        let middle = |sketch: &Sketch, s: usize| (sketch.x(2 * s) + sketch.x(2 * s + 2)) / 2.0;
        if scene.steps.iter().all(|s| width(s.kernel, 12.0) < wide - 4.0) {
            for (s, step) in scene.steps.iter().enumerate() {
                let x = middle(self, s);
                self.text("m c", x, self.y, &format!("{s}"));
                self.text("m c", x, self.y + 15.0, step.kernel);
            }
            self.y += 15.0;
        } else {
            let every = round_up(width(&format!("{}", scene.steps.len()), 12.0) * 2.5 / wide);
            for s in (0..scene.steps.len()).step_by(every) {
                let x = middle(self, s);
                self.text("m c", x, self.y, &format!("{s}"));
            }
        }
        self.y += 14.0;
    }

    /// A strip per segment of named buffers outside the arena: constants and states. Their bytes go from left to right.
    fn lasting(&mut self) {
        const HEIGHT: f64 = 18.0;
        let scene = self.scene;
        let named =
            |space: &&Space| matches!(space.class, Some(Class::Constant | Class::State)) && !space.rects.is_empty();
        for space in scene.spaces.iter().filter(named) {
            let (top, bottom) = (self.y, self.y + HEIGHT);
            let x = |byte: u64| LEFT + (RIGHT - LEFT) * byte as f64 / space.bytes.max(1) as f64;
            let mut labels = Sketch { scene, body: String::new(), y: 0.0 };
            // A state and its update have the same bytes.
            let mut drawn = BTreeSet::new();
            for rect in space.rects.iter().filter(|rect| drawn.insert(rect.bytes.0)) {
                let item = &scene.buffers[rect.buffer];
                let area = [x(rect.bytes.0), x(rect.bytes.1), top, bottom];
                let class = if area[1] - area[0] > 2.0 { "class=\"r\" " } else { "" };
                self.rect(&format!("{class}fill=\"{}\"", item.kind.fill()), area, &scene.tip(rect.buffer));
                labels.label(item, area);
            }
            self.body += &labels.body;
            self.text("m e", LEFT - 8.0, bottom - 5.0, &space.title);
            self.y = bottom + 6.0;
        }
        self.y += 4.0;
    }

    fn legend(&mut self) {
        let scene = self.scene;
        let kinds = |kind: &Kind| {
            scene.steps.iter().any(|s| s.kind == *kind) || *kind == Kind::Workspace && scene.kinds().contains(kind)
        };
        let mut entries: Vec<_> = Kind::all().filter(kinds).map(|k| (k.fill(), k.label().to_owned())).collect();
        let parts = Part::all().filter(|part| scene.steps.iter().any(|s| s.part == Some(*part)));
        entries.extend(parts.map(|part| (part.fill(), part.label().to_owned())));
        if scene.spaces.iter().flat_map(|s| &s.rects).any(|r| r.held != r.time) {
            entries.push((PALE, "pale: held, but not in use".to_owned()));
        }
        if scene.spaces.iter().any(|s| s.class == Some(Class::Activation) && !s.rects.is_empty()) {
            entries.push((UNUSED, "not in use".to_owned()));
        }
        self.entries(&entries, LEFT);
    }

    /// The largest buffers that are live at the peak, in a few lines.
    fn holders(&mut self) {
        const MOST: usize = 4;
        let Some(peak) = &self.scene.peak else { return };
        self.y += 14.0;
        self.text("b", EDGE, self.y, "at the peak");
        for &b in peak.buffers.iter().take(MOST) {
            let item = &self.scene.buffers[b];
            let words = format!("{} {}", item.shown(), item.ty);
            self.text("e", LEFT + 98.0, self.y, &human(item.bytes));
            self.text("m", LEFT + 108.0, self.y, &fit(&words, RIGHT - LEFT - 108.0, 12.0).unwrap_or_default());
            self.y += 17.0;
        }
        let rest = peak.buffers.get(MOST..).unwrap_or_default();
        if !rest.is_empty() {
            let bytes = rest.iter().map(|&b| self.scene.buffers[b].bytes).sum();
            self.text("e", LEFT + 98.0, self.y, &human(bytes));
            let words = format!("in {} more {}", rest.len(), if rest.len() == 1 { "buffer" } else { "buffers" });
            self.text("m", LEFT + 108.0, self.y, &words);
            self.y += 17.0;
        }
        self.y -= 14.0;
    }
}

impl Scene {
    /// What its bytes hold, the arena first: words, bytes and colour. Of a training, weights and what its optimizer keeps are no mere states.
    fn holdings(&self) -> Vec<(&'static str, u64, &'static str)> {
        let mut all = Vec::new();
        let others = Class::ALL.into_iter().filter(|&c| c != Class::Activation);
        for class in std::iter::once(Class::Activation).chain(others) {
            let mut bytes: u64 = self.spaces.iter().filter(|s| s.class == Some(class)).map(|s| s.bytes).sum();
            if class == Class::State {
                for kind in [Kind::Weight, Kind::Optimizer] {
                    let own = self.states(kind);
                    bytes -= own;
                    all.push((kind.label(), own, kind.fill()));
                }
            }
            all.push((title(class), bytes, fill(class)));
        }
        all.retain(|(_, bytes, _)| *bytes > 0);
        all
    }

    /// The bytes of the states of a kind. A state and its update have the same.
    fn states(&self, kind: Kind) -> u64 {
        let states = self.buffers.iter().filter(|b| b.kind == kind);
        let places: BTreeMap<_, _> = states.map(|b| ((b.segment, b.offset), b.bytes)).collect();
        places.values().sum()
    }

    /// The tooltip of a buffer.
    fn tip(&self, buffer: BufferIdx) -> String {
        let item = &self.buffers[buffer];
        let mut tip = format!("{}\n{}, {}", item.shown(), item.ty, super::bytes(item.bytes));
        if let Some((first, last)) = item.uses {
            let step = &self.steps[first];
            tip += &format!("\nsteps {first} to {last}, from {} '{}'", step.operator, step.name);
        }
        tip + &format!("\nat byte {}", grouped(item.offset))
    }
}

/// Steps in words: the first, and one after the last.
fn steps_told(first: usize, end: usize) -> String {
    if end - first == 1 { format!("step {first}") } else { format!("steps {first} to {}", end - 1) }
}

/// The colour of a class in the bar of totals.
fn fill(class: Class) -> &'static str {
    Kind::resident(class).map_or(ARENA, Kind::fill)
}

/// A coordinate, to a hundredth.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The smallest of 1, 2, 5, 10, 20 ... that is at least `least`.
fn round_up(least: f64) -> usize {
    let tens = std::iter::successors(Some(1usize), |n| n.checked_mul(10));
    tens.flat_map(|ten| [1, 2, 5].map(|n| ten.saturating_mul(n))).find(|&n| n as f64 >= least).unwrap_or(usize::MAX)
}

/// Bytes on an axis, without trailing zeros.
fn short(bytes: u64) -> String {
    let text = human(bytes);
    match text.split_once(' ') {
        Some((digits, unit)) if digits.contains('.') => {
            format!("{} {unit}", digits.trim_end_matches('0').trim_end_matches('.'))
        }
        _ if bytes == 0 => "0".into(),
        _ => text,
    }
}

fn width(text: &str, size: f64) -> f64 {
    let letter = |c: char| if c.is_ascii() { LETTER } else { 1.0 };
    size * text.chars().map(letter).sum::<f64>()
}

/// A name with its middle left out if it is too long, or `None` if too little of it would be left. A path's beginning and end tell most.
fn fit(text: &str, room: f64, size: f64) -> Option<String> {
    const LEAST: usize = 12;
    if width(text, size) <= room {
        return Some(text.to_owned());
    }
    let chars: Vec<char> = text.chars().collect();
    // No letter is narrower.
    let most = (room / (LETTER * size)).max(0.0) as usize;
    (LEAST..=most.min(chars.len())).rev().find_map(|kept| {
        let head = kept / 3;
        let ends = chars[..head].iter().chain(&['…']).chain(&chars[chars.len() - kept + head..]);
        let cut: String = ends.collect();
        (width(&cut, size) <= room).then_some(cut)
    })
}
