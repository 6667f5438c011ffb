//! Writes scenes as an HTML page: one file without references to others.

use super::super::{TimedStep, human, training};
use super::{ARENA, About, Kind, Part, Scene, scenes};
use crate::eager::compare::{Comparison, Outcome};
use crate::graph::Graph;
use crate::plan::{Plan, View};
use crate::train::classes::{Classes, States};
use crate::train::losses::Losses;
use serde_json::{Value, json};

/// The page of the ways to run programs: one scene per column that ran, those of a program all on one scale of time and of bytes.
pub fn comparison_page(subject: &str, compared: Vec<(&Comparison, Vec<Scene>)>) -> String {
    let mut all = Vec::new();
    let mut notes = vec![
        "Memory from the load to the end of the first run. Segments of eager runs are drawn as low as they fit: their real addresses are not known.".to_owned(),
    ];
    let target = compared.first().map_or("", |(comparison, _)| &comparison.target).to_owned();
    let several = compared.len() > 1;
    for (comparison, mut scenes) in compared {
        let named = |column: &str| if several { format!("{}: {column}", comparison.model) } else { column.to_owned() };
        for column in &comparison.columns {
            let measured = match &column.outcome {
                Outcome::Ran(measured) => measured,
                Outcome::Refused { does_not_fit } => {
                    notes.push(format!("{}: {does_not_fit}", named(&column.name)));
                    continue;
                }
            };
            let figures = [
                ("peak reserved", human(measured.peak_reserved_bytes)),
                ("peak live", human(measured.peak_live_bytes)),
                ("fragmentation", format!("{:.1} %", 100.0 * measured.fragmentation)),
                ("smallest device that fits", human(column.smallest_device_bytes)),
                ("driver calls, load and run 1", measured.driver_calls_first.to_string()),
                ("median run", format!("{:.3} ms", measured.median_ms)),
            ];
            for scene in scenes.iter_mut().filter(|scene| scene.name == column.name) {
                scene.figures = figures.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect();
                scene.target.clone_from(&comparison.target);
                scene.limit = comparison.memory_limit;
            }
        }
        scenes.iter_mut().for_each(|scene| scene.name = named(&scene.name));
        all.extend(scenes);
    }
    let title = format!("{subject} on {target}: eager and planned");
    document(&json!({"title": title, "scenes": all, "notes": notes}))
}

/// The page of a subject's plan: one file without references to others. Its data is the scene's JSON.
pub fn page(subject: &str, plan: View, graph: Option<&Graph>, limit: Option<u64>) -> String {
    single(subject, plan, vec![Scene::of(plan, graph, limit)])
}

fn single(subject: &str, plan: View, mut scenes: Vec<Scene>) -> String {
    scenes.iter_mut().for_each(|scene| subject.clone_into(&mut scene.name));
    let title = format!("{subject} on {}", plan.target.name);
    document(&json!({"title": title, "scenes": scenes, "summary": plan.summary}))
}

/// The page of what was timed, each with its name: programs or bindings, with the time that each of their steps takes on a device by itself.
pub fn timed_page(subject: &str, timed: &[(String, View, Vec<TimedStep>)], device: &str) -> String {
    let scene = |(name, program, steps): &(String, View, Vec<TimedStep>)| {
        let times = steps.iter().map(|step| step.median_us).collect();
        Scene { name: name.clone(), times, ..Scene::of(*program, None, None) }
    };
    let scenes: Vec<_> = timed.iter().map(scene).collect();
    let mut data = json!({"title": format!("{subject} on {device}"), "scenes": scenes});
    if let [(_, program, _)] = timed {
        data["summary"] = json!(program.summary);
    }
    document(&data)
}

/// The page of a plan: of one program, of several, or of a training.
pub fn plan_page(plan: &Plan, about: &About) -> String {
    let About { subject, graphs, trained, .. } = *about;
    match (graphs, trained) {
        (_, Some(trained)) => training_page(plan, about, trained, None),
        ([_], None) => single(subject, plan.first(), scenes(plan, about)),
        (_, None) => {
            let names: Vec<_> = plan.programs.iter().map(|program| &program.name[..]).collect();
            let title = format!("{subject}: {} on {}", names.join(", "), plan.target.name);
            document(&programs(&title, plan, about))
        }
    }
}

/// The page of the plans of a mesh's stages: a scene for each program of each.
pub fn stages_page(subject: &str, mesh: &str, plans: &[Plan], limit: u64) -> String {
    let several = plans.len() > 1;
    let of = |plan: &Plan| {
        let about = About { subject, limit: Some(limit), ..About::default() };
        let mut scenes = scenes(plan, &about);
        let stage = if several { format!("stage {}: ", plan.stage) } else { String::new() };
        scenes.iter_mut().for_each(|scene| scene.name = format!("{stage}{}", scene.name));
        scenes
    };
    let target = plans.first().map_or("", |plan| &plan.target.name);
    let all: Vec<Scene> = plans.iter().flat_map(of).collect();
    let note = "Each rank of a stage has its plan. Programs of a plan run one at a time, in the same segments.";
    document(
        &json!({"title": format!("{subject}: {mesh} on {target}"), "scenes": all, "notes": [note], "shared": true}),
    )
}

/// The page of a training: the losses of its steps, if it has run, the bytes by what they hold, and the scenes of its programs.
pub fn training_page(plan: &Plan, about: &About, trained: &[String], losses: Option<&Losses>) -> String {
    let title = format!("Training of {} on {}", about.subject, plan.target.name);
    let mut data = programs(&title, plan, &About { trained: Some(trained), ..*about });
    let bytes = training::rows(&Classes::of(plan), &States::of(plan, trained));
    data["training"] = json!({"losses": losses, "bytes": bytes});
    document(&data)
}

/// Programs of one plan.
fn programs(title: &str, plan: &Plan, about: &About) -> Value {
    let note = "Programs run one at a time, in the same segments. Each is drawn with what it uses of them.";
    json!({"title": title, "scenes": scenes(plan, about), "notes": [note], "shared": true})
}

/// A page of scenes. `data` has a `title` and `scenes`; page.js reads the rest.
fn document(data: &Value) -> String {
    let palette: Vec<_> = Kind::all().map(|k| json!({"kind": k, "label": k.label(), "fill": k.fill()})).collect();
    let title = escape(data["title"].as_str().unwrap_or_default());
    let mut data = data.clone();
    data["palette"] = json!(palette);
    let parts = Part::all().map(|part| json!({"part": part, "label": part.label(), "fill": part.fill()}));
    data["parts"] = parts.collect();
    data["arena"] = json!(ARENA);
    // In JSON, '<' occurs in strings only. Escaped, no string can end the script or begin a comment.
    let data = data.to_string().replace('<', "\\u003c");
    let (css, js) = (include_str!("../page.css"), include_str!("../page.js"));
    let mut rest = include_str!("../page.html");
    let mut page = String::with_capacity(rest.len() + css.len() + data.len() + js.len());
    // The parts are in the template's order, so text that was filled in is not searched for marks.
    for (mark, text) in [("{{title}}", &*title), ("{{css}}", css), ("{{data}}", &*data), ("{{js}}", js)] {
        let (before, after) = rest.split_once(mark).expect("the page has a place for each part");
        page += before;
        page += text;
        rest = after;
    }
    page + rest
}

/// Escapes text for XML and HTML, as content and in quotes. Characters that XML does not allow are replaced.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            '\t' | '\n' | '\r' => out.push(' '),
            '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
