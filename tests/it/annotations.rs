//! Files that say how they are split on several devices: what a mesh makes of that, what it refuses, and that it is written.

use crate::cli::ok;
use crate::common::Folder;
use plimsoll::internals::mesh::Mesh;
use plimsoll::internals::onnx::proto::ModelProto;
use plimsoll::internals::onnx::{Model, annotate, import, shard, text};
use plimsoll::internals::plan::{self, Job, Rule, Sharding};
use plimsoll::{Error, Graph, Plan, Target};
use prost::Message;
use std::path::Path;

/// A product of two weights, with annotations of a file.
pub fn file(configuration: &str, first: &str, second: &str) -> String {
    let zeros = |count: usize| vec!["0"; count].join(", ");
    format!(
        r#"<ir_version: 11, opset_import: ["" : 20], configuration: [{configuration}]>
        net (float[8, 16] x) => (float[8, 12] y)
        <float[16, 24] up = {{{}}}, float[24, 12] down = {{{}}}>
        {{
          [wide] h = MatMul (x, up) {first}
          [bent] r = Relu (h)
          [narrow] y = MatMul (r, down) {second}
        }}"#,
        zeros(384),
        zeros(288)
    )
}

fn graph(text: &str) -> Graph {
    import(&Model::new(text::parse(text, Path::new("m")).expect("a model")), &[]).expect("it is imported")
}

fn sharding(mesh: &str, by: &[(&str, usize, &str)]) -> Sharding {
    let by = by.iter().map(|&(name, dim, axis)| Rule { pattern: name.into(), dim, axis: axis.into() });
    Sharding { mesh: Mesh::parse(mesh).expect("it is a mesh"), by: by.collect(), ..Sharding::default() }
}

fn planned(graph: &Graph, sharding: Sharding) -> Result<Plan, Error> {
    let job = Job { sharding: Some(sharding), ..Job::of(graph.clone(), &Target::cpu(1)) };
    plan::plan(&job).map(|planned| planned.plan)
}

/// What is split, as the command line says it.
fn split(text: &str, sharding: Sharding) -> Result<Vec<String>, String> {
    let mut shards: Vec<_> = planned(&graph(text), sharding)
        .map_err(|e| e.to_string())?
        .programs
        .remove(0)
        .shards
        .into_iter()
        .map(|shard| format!("{}={}:{}", shard.name, shard.dim, shard.axis))
        .collect();
    shards.sort();
    Ok(shards)
}

const UP: &str = r#"@ "cards" [up <1: [2 of 24]> (0, 1)]"#;

#[test]
fn a_mesh_takes_what_the_file_says() {
    let two = r#""cards" : 2"#;
    let both = file(two, UP, r#"@ "cards" [down <-2: [2]> (0, 1), y <0: [1]> (0, 1)]"#);
    assert_eq!(split(&both, sharding("tensor=2", &[])), Ok(vec!["down=0:tensor".into(), "up=1:tensor".into()]));
    // The axis is found by its ranks, whatever it is called, and devices say which it is of several. The other weight follows.
    let found = |text: &str, sharding| split(text, sharding).expect("it is planned").join(" ");
    assert_eq!(found(&file(two, UP, ""), sharding("cards=2", &[])), "down=0:cards up=1:cards");
    assert_eq!(found(&file(two, UP, ""), sharding("data=2,tensor=2", &[])), "down=0:tensor up=1:tensor x=0:data");
    let groups = file(r#""cards" : 4"#, r#"@ "cards" [up <1: [2]> (-1, -2) [-1: (0, 1), -2: (2, 3)]]"#, "");
    assert_eq!(found(&groups, sharding("m=2,n=2", &[("x", 0, "n")])), "down=0:m up=1:m x=0:n");
    // By hand is first, for its name alone.
    let by = [("up", 0, "tensor")];
    assert_eq!(split(&both, sharding("tensor=2", &by)), Ok(vec!["down=0:tensor".into(), "up=0:tensor".into()]));
    // One device has no use for it.
    assert_eq!(split(&both, sharding("tensor=1", &[])), Ok(Vec::new()));
    let alone = plan::plan(&Job::of(graph(&both), &Target::cpu(1))).expect("it is planned").plan;
    let plain = plan::plan(&Job::of(graph(&file("", "", "")), &Target::cpu(1))).expect("it is planned").plan;
    assert_eq!(alone.to_json(), plain.to_json());
}

#[test]
fn what_is_not_of_the_mesh_is_refused_with_both_sides() {
    let two = r#""cards" : 2"#;
    let of = |spec: &str| format!(r#"@ "cards" [{spec}]"#);
    let on = |spec: &str| file(two, &of(spec), "");
    for (text, mesh, what) in [
        (file(two, UP, ""), "tensor=3", "has 3 ranks, but the file is annotated for 'cards' of 2 devices"),
        (file(r#""a" : 2, "b" : 2"#, UP, ""), "tensor=2", "several configurations: 'a' of 2 devices, 'b' of 2 devices"),
        (file(r#""other" : 2"#, UP, ""), "tensor=2", "expected a configuration of 'other' of 2 devices, found 'cards'"),
        (on("up <1: [3]> (0, 1, 2)"), "tensor=2", "into 3 shards, but mesh 'tensor=2' has no axes of as many ranks"),
        (
            on("up <1: [2]> (1, 0)"),
            "tensor=2",
            "shards on devices [1, 0], but ranks of mesh 'tensor=2' have them as [0, 1]",
        ),
        (
            on("up <1: [2]> ()"),
            "m=2,n=2",
            "names no devices, but several axes of mesh 'm=2,n=2' have as many ranks: m, n",
        ),
        (
            on("up <1: [2]> (-1, 1) [-1: (0, 1)]"),
            "tensor=2",
            "its shards on devices [(0, 1), 1], but ranks of mesh 'tensor=2' have them as [0, 1]",
        ),
        (on("up <1: [2, 2]> (0, 1)"), "tensor=2", "axis 1: expected one number of shards, found 2"),
        (on("up <1: [0]> (0, 1)"), "tensor=2", "axis 1: expected a number of shards above 0, found 0"),
        (on("up <2: [2]> (0, 1)"), "tensor=2", "splits axis 2, but it is [16,24], which has 2 axes"),
        (on("up <1: [2 of 8]> (0, 1)"), "tensor=2", "axis 1: the file splits an extent of 8, but it is 24"),
        (
            file(r#""cards" : 5"#, &of("up <1: [5]> (0, 1, 2, 3, 4)"), ""),
            "tensor=5",
            "into 5 shards, which do not divide its 24",
        ),
        (
            file(two, UP, &of("up <0: [2]> (0, 1)")),
            "tensor=2",
            "split by 0:tensor, and by 1:tensor at node MatMul 'wide'",
        ),
        (
            file(two, r#"@ "cards" : 1 []"#, ""),
            "tensor=2",
            "in pipeline stage 1, but on mesh 'tensor=2' stages are found",
        ),
        (
            file(two, r#"@ "cards" : 0 []"#, ""),
            "stage=2",
            "in pipeline stage 0, but on mesh 'stage=2' stages are found",
        ),
    ] {
        let error = split(&text, sharding(mesh, &[])).expect_err(what);
        assert!(error.contains(what), "{error}");
        assert!(error.contains("node MatMul '") || error.contains("mesh '"), "{error}");
    }
    // What is folded away, and what stands in a function, is told.
    let negated = file(two, "", "").replace("h = MatMul (x, up)", &format!("n = Neg (up) {UP} h = MatMul (x, n)"));
    let inner = "<domain: \"own\", opset_import: [\"\" : 20]> bend (a) => (b) { b = Relu (a) @ \"cards\" [] }";
    for (text, what) in [
        (negated, "node Neg 'wide', tensor 'up': it becomes constant 'n' before anything is split"),
        (
            format!("{}\n{inner}", file(two, "", "")),
            "node Relu 'b': it has annotations for several devices, which are read at nodes",
        ),
    ] {
        let error = split(&text, sharding("tensor=2", &[])).expect_err(what);
        assert!(error.contains(what), "{error}");
    }
    // Nobody needs the file's configuration where all is decided by hand.
    let found = split(&file(two, UP, ""), sharding("tensor=3", &[("up", 1, "tensor")]));
    assert_eq!(found, Ok(vec!["down=0:tensor".into(), "up=1:tensor".into()]));
}

/// The text and the protobuf of annotations are the same messages.
#[test]
fn annotations_survive_both_forms() {
    let first = r#"@ "cards" : 3 [up <1: [2 of "n", 4 of 24], -1: [1]> (-1, 2) [-1: (0, 1)], "x y" <> ()] @ "b" []"#;
    let model =
        text::parse(&file(r#""cards" : 4, "b" : 2 ("left", "right")"#, first, UP), Path::new("m")).expect("a model");
    let graph = model.graph.as_ref().expect("it has a graph");
    let placed = &graph.node[0].device_configurations;
    assert_eq!((placed.len(), placed[0].pipeline_stage, placed[1].pipeline_stage), (2, Some(3), None));
    assert_eq!(placed[0].sharding_spec[0].index_to_device_group_map[0].value, [0, 1]);
    assert_eq!(text::parse(&text::print(&model), Path::new("m")).expect("it is read"), model);
    assert_eq!(ModelProto::decode(&model.encode_to_vec()[..]).expect("it is read"), model);
    for (wrong, what) in [
        (r#"@ cards []"#, "expected the name of a configuration as a string"),
        (r#"@ "cards" : x []"#, "expected a stage"),
        (r#"@ "cards" [up (0)]"#, "expected '<' and the axes that are split"),
        (r#"@ "cards" [up <0: 2> (0)]"#, "expected '[' and a number of shards"),
        (r#"@ "cards" [up <0: [2 of m]> (0)]"#, "expected an extent, or the name of a dim as a string"),
        (r#"@ "cards" [up <0: [2]>]"#, "expected '(' and devices"),
    ] {
        let error = text::parse(&file("", wrong, ""), Path::new("m")).expect_err(what).to_string();
        assert!(error.contains(what), "{error}");
    }
}

/// What a mesh splits is written to the file, and planned from there without a word of --shard.
#[test]
fn what_is_split_is_written_and_read_back() {
    let folder = Folder::new("annotations");
    for (mesh, by) in [
        ("tensor=2", &[][..]),
        ("tensor=4", &["--shard", "up=1:tensor", "--shard", "down=0:tensor"]),
        ("data=2,tensor=2", &[]),
        ("tensor=2,data=4", &["--shard", "up=1:tensor"]),
        ("m=2,n=3", &["--shard", "up=1:n", "--shard", "x=0:m"]),
    ] {
        let model = folder.file("model.onnxtxt", file("", "", ""));
        let told = ok(&[&["emit", &model, "onnxtxt", "--mesh", mesh], by]);
        assert!(told.contains(&format!("configuration: [\"{mesh}\" : ")), "{told}");
        let text = folder.file("annotated.onnxtxt", &told);
        let binary = folder.path("annotated.onnx");
        ok(&[&["emit", &model, "onnx", "--mesh", mesh, "--save", &binary], by]);
        let plan = |model: &str, by: &[&str]| {
            let saved = folder.path("plan.json");
            ok(&[&["plan", model, "--target", "cpu", "--mesh", mesh, "--save", &saved], by]);
            let plan = std::fs::read_to_string(saved).expect("it is written");
            let mut plan: serde_json::Value = serde_json::from_str(&plan).expect("it is JSON");
            plan.as_object_mut().expect("a plan").remove("origin");
            plan
        };
        let expected = plan(&model, by);
        assert!(expected["programs"][0]["shards"].as_array().is_some_and(|shards| !shards.is_empty()));
        assert_eq!(plan(&text, &[]), expected, "{mesh}");
        assert_eq!(plan(&binary, &[]), expected, "{mesh}");
        let inspected = ok(&[&["inspect", &binary]]);
        assert!(inspected.contains(&format!("sharding  '{mesh}': ")) && inspected.contains(" split"), "{inspected}");
        // What is written again is the same.
        assert_eq!(ok(&[&["emit", &text, "onnxtxt", "--mesh", mesh]]), told);
    }
}

#[test]
fn what_has_no_written_form_is_refused() {
    let text = file("", "", "");
    let written = |mesh: &str, by: &[(&str, usize, &str)]| {
        let mut model = text::parse(&text, Path::new("m")).expect("a model");
        let sharding = sharding(mesh, by);
        let shards = shard(&mut graph(&text), &sharding)?;
        annotate(&mut model, &shards, &sharding.mesh).map(|()| model)
    };
    let by = [("up", 1, "tensor")];
    assert_eq!(written("tensor=2", &by).expect("it is written").ir_version, 11);
    let error = written("stage=2,tensor=2", &by).expect_err("it has stages").to_string();
    assert!(error.contains("the stages of an axis 'stage' are found, and not written"), "{error}");
    let error = written("m=2,n=2", &[("up", 1, "m"), ("up", 1, "n")]).expect_err("one dim, two axes").to_string();
    assert!(error.contains("dim 1 of 'up' is split along two axes"), "{error}");
}
