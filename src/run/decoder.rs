//! Decoders of language models, in folders as `onnxruntime-genai` keeps them: a graph, its weights, and a `genai_config.json` that says which
//! inputs are tokens and which are caches.
//!
//! The caches become states, with room for a context that is planned once. Two programs share them and the weights: `decode` takes one token and
//! gives the scores of the next, `prefill` takes several tokens of a prompt at a time and gives nothing.
//!
//! ```text
//! prompt  a b c d e f g h i j      prefill: [a b c d] [e f g h] [i - - -], then the length is 9
//!                                  decode:  j -> k, k -> l, ...
//! ```

use crate::dtype::DType;
use crate::error::{Error, Result, ensure};
use crate::graph::Graph;
use crate::onnx;
use crate::ops::COSINES;
use crate::plan::{Graphs, Port};
use crate::session::{self, Options, Session};
use crate::shape::{Extent, Shape};
use crate::tensor::Tensor;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The file of a folder that says what its graph is.
const CONFIG: &str = "genai_config.json";

/// The dim that is the room of the caches.
pub const CONTEXT: &str = "context";

/// The dim that is the number of tokens that `prefill` takes at a time.
pub const PREFILL: &str = "prefill";

/// The least room of caches. Graphs of a few lengths are compared, and one of no tokens may be another.
const LEAST: usize = 3;

/// Tokens that `prefill` takes at a time, unless it is said.
const PREFILL_ROWS: usize = 64;

/// A decoder in a folder.
///
/// ```no_run
/// use plimsoll::{Choice, Decoder, Options};
/// let decoder = Decoder::open("phi-4-mini", &Options::default().on(Choice::Cpu).set("context", 2048))?;
/// println!("{} bytes", decoder.session().plan().bytes());
/// decoder.generate(&[1, 15, 99], 20, &mut |token| println!("{token}"))?;
/// # Ok::<(), plimsoll::Error>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    files: Files,
    session: Session,
    /// Room of the caches, and tokens that `prefill` takes at a time.
    context: usize,
    prefill: usize,
}

/// What the configuration says of the graph.
#[derive(Clone, Debug)]
pub struct Files {
    folder: PathBuf,
    config: ModelConfig,
}

#[derive(Clone, Debug, Deserialize)]
struct Config {
    model: ModelConfig,
}

#[derive(Clone, Debug, Deserialize)]
struct ModelConfig {
    context_length: usize,
    vocab_size: usize,
    #[serde(default)]
    eos_token_id: Ends,
    decoder: DecoderConfig,
    /// Parts of models that read more than text.
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

/// The tokens that end a text.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(untagged)]
enum Ends {
    #[default]
    None,
    One(i64),
    Several(Vec<i64>),
}

#[derive(Clone, Debug, Deserialize)]
struct DecoderConfig {
    filename: String,
    #[serde(default)]
    head_size: Option<usize>,
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    #[serde(default)]
    inputs: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    outputs: BTreeMap<String, serde_json::Value>,
}

impl DecoderConfig {
    fn input<'a>(&'a self, role: &'a str) -> &'a str {
        self.inputs.get(role).and_then(|name| name.as_str()).unwrap_or(role)
    }

    /// The scores' name.
    fn logits(&self) -> &str {
        self.outputs.get("logits").and_then(|name| name.as_str()).unwrap_or("logits")
    }
}

impl Files {
    /// True if a folder has the configuration of a decoder.
    pub fn are_in(folder: &Path) -> bool {
        folder.join(CONFIG).is_file()
    }

    /// Reads the configuration of a folder.
    ///
    /// # Errors
    /// When it is not there, or not of a decoder of tokens alone.
    pub fn read(folder: &Path) -> Result<Files> {
        let path = folder.join(CONFIG);
        let text = std::fs::read(&path).map_err(|e| Error::file(&path, "read the configuration of a decoder", e))?;
        let refuse = |what: String| Error::File { path: path.clone(), what, source: None };
        let config: Config = serde_json::from_slice(&text).map_err(|e| {
            refuse(format!("expected the configuration of a decoder, as onnxruntime-genai has it: {e}"))
        })?;
        let config = config.model;
        for part in ["encoder", "vision", "speech", "embedding"] {
            ensure(!config.others.contains_key(part), || {
                refuse(format!("expected a decoder of tokens alone, found a part '{part}', too"))
            })?;
        }
        ensure(config.context_length >= LEAST && config.vocab_size > 0, || {
            let (context, tokens) = (config.context_length, config.vocab_size);
            refuse(format!(
                "expected a context_length of at least {LEAST} and a vocab_size above 0, found {context} and {tokens}"
            ))
        })?;
        let files = Files { folder: folder.to_owned(), config };
        ensure(files.path().is_file(), || refuse(format!("its graph, {}, is not there", files.path().display())))?;
        let DecoderConfig { inputs, outputs, .. } = &files.config.decoder;
        let lacks = |role: &&String| {
            let present = role.strip_prefix("past_").filter(|role| role.ends_with("names"));
            present.is_some_and(|role| !outputs.contains_key(&format!("present_{role}")))
        };
        if let Some(role) = inputs.keys().find(lacks) {
            let present = role.replacen("past", "present", 1);
            return Err(refuse(format!("its inputs have {role}: expected outputs of {present}, too")));
        }
        ensure(!files.states().is_empty(), || {
            refuse("expected names of caches, such as past_key_names and present_key_names, found none".into())
        })?;
        Ok(files)
    }

    /// The most tokens that the model was made for.
    pub fn most_context(&self) -> usize {
        self.config.context_length
    }

    /// The graph's file.
    pub fn path(&self) -> PathBuf {
        self.folder.join(&self.config.decoder.filename)
    }

    /// The caches: patterns of inputs, and of the outputs that update them.
    pub fn states(&self) -> Vec<(String, String)> {
        let DecoderConfig { inputs, outputs, .. } = &self.config.decoder;
        let pattern = |name: &serde_json::Value| Some(name.as_str()?.replacen("%d", "*", 1));
        let pair = |(role, input): (&String, &serde_json::Value)| {
            let role = role.strip_prefix("past_").filter(|role| role.ends_with("names"))?;
            Some((pattern(input)?, pattern(outputs.get(&format!("present_{role}"))?)?))
        };
        inputs.iter().filter_map(pair).collect()
    }

    /// A program's name, the dims that may be set, and its inputs as the file declares them.
    ///
    /// # Errors
    /// When the graph cannot be read.
    pub fn open_dims(&self) -> Result<(String, Vec<String>, String)> {
        let dims = [CONTEXT, PREFILL].map(str::to_owned).to_vec();
        Ok(("decode".to_owned(), dims, onnx::load(&self.path())?.declared_inputs()))
    }

    /// The programs. Of `dims`, `context` is the room of the caches, and `prefill` the tokens of a prompt that are taken at a time. The dims of the
    /// file follow from these: one text, and the width of a head.
    ///
    /// # Errors
    /// When the graph is not one of a decoder, or a dim is out of range.
    pub fn programs(&self, dims: &[(String, Extent)], weights: Option<&Path>) -> Result<Vec<(String, Graphs)>> {
        self.made(dims, weights).map_err(|e| e.in_file(&self.path()))
    }

    fn made(&self, dims: &[(String, Extent)], weights: Option<&Path>) -> Result<Vec<(String, Graphs)>> {
        let Sizes { context, prefill } = Sizes::of(self, dims)?;
        let model = onnx::load_weighed(&self.path(), weights)?.with_state(&self.states());
        self.check_inputs(&model)?;
        let model = self.tied(model);
        let program = |name: &str, rows: usize, model: onnx::Model| {
            let dims = self.bound(&model, rows, context)?;
            let (model, dims) = model.grow(dims)?;
            let fixed = |(name, extent): (String, Extent)| {
                let one = extent.fixed().map(|extent| (name.clone(), extent));
                one.ok_or_else(|| Error::usage(format!("dim '{name}', {extent}: expected one extent")))
            };
            let dims = dims.into_iter().map(fixed).collect::<Result<Vec<_>>>()?;
            let graph = onnx::import(&model, &dims)?;
            self.check_graph(&graph, rows, context)?;
            Ok::<_, Error>((name.to_owned(), Graphs::from(graph)))
        };
        // A prompt's scores are not needed but for those of its last token, which `decode` gives: caches alone are computed.
        let scores = [self.config.decoder.logits().to_owned()];
        Ok(vec![
            program("decode", 1, model.clone().with_outputs(&scores))?,
            program("prefill", prefill, model.without_outputs())?,
        ])
    }

    /// The inputs that a run gives: tokens, which of them are seen, and their places.
    fn given(&self) -> [&str; 3] {
        ["input_ids", "attention_mask", "position_ids"].map(|role| self.config.decoder.input(role))
    }

    /// Refuses a graph with inputs of which the configuration says nothing.
    fn check_inputs(&self, model: &onnx::Model) -> Result<()> {
        let (caches, given) = (model.state_inputs(), self.given());
        let tokens = given[0];
        ensure(model.takes(tokens), || {
            Error::usage(format!("expected an input '{tokens}' of tokens; its inputs: {}", model.declared_inputs()))
        })?;
        let names = model.input_names();
        match names.iter().find(|name| !caches.contains(name) && !given.contains(&&name[..])) {
            None => Ok(()),
            Some(name) => {
                let what = format!("expected {} or a cache that {CONFIG} names", given.join(", "));
                Err(Error::usage(format!("input '{name}': {what}, found another input")))
            }
        }
    }

    /// Refuses a graph that does not take one text, or that cannot place so many tokens.
    fn check_graph(&self, graph: &Graph, rows: usize, context: usize) -> Result<()> {
        let given = self.given();
        for &input in graph.inputs() {
            let (name, fact) = (graph.value_name(input), graph.fact(input));
            let fits = name != given[0] || fact.shape[..] == [1, rows];
            ensure(fits && fact.dtype.is_int(), || {
                let expected = if name == given[0] { format!("integers [1, {rows}]") } else { "integers".to_owned() };
                Error::usage(format!("input '{name}': expected {expected}, found {fact}"))
            })?;
        }
        // A prompt's last run is filled up. What it writes behind the length is never read; a state without a length would keep it.
        for state in graph.states().iter().filter(|state| state.count.is_none()) {
            let (name, fact) = (graph.value_name(state.value), graph.fact(state.value));
            ensure(fact.shape.get(2) == Some(&context), || {
                Error::usage(format!("state '{name}': expected a cache that grows along its third axis, found {fact}"))
            })?;
        }
        for id in graph.order()? {
            let table = match graph.node(id).op_name() {
                "RotaryEmbedding" => 1,
                "com.microsoft.RotaryEmbedding" => 2,
                "GroupQueryAttention" => COSINES,
                _ => continue,
            };
            let table = graph.operands(id).get(table).copied().flatten().map(|table| graph.fact(table).shape.clone());
            if let Some(&[places, _]) = table.as_ref().map(|shape| &shape[..])
                && places < context
            {
                let what = format!(
                    "expected a table of at least {context} places, found {places}: give a context of {places}"
                );
                return Err(graph.node(id).error(what));
            }
        }
        Ok(())
    }

    /// The model, in which the length of a mask is the sum of the tokens before and the new ones, where these are dims.
    fn tied(&self, model: onnx::Model) -> onnx::Model {
        let [ids, mask, _] = self.given();
        let new = axis(&model, ids, 1).unwrap_or_else(|| "1".to_owned());
        match (axis(&model, mask, 1), self.past(&model)) {
            (Some(all), Some(past)) if all != past && all != new => {
                model.clone().with_tie(&all, &format!("{past} + {new}")).unwrap_or(model)
            }
            _ => model,
        }
    }

    /// The dim along which caches grow.
    fn past(&self, model: &onnx::Model) -> Option<String> {
        model.state_inputs().iter().find_map(|cache| axis(model, cache, 2))
    }

    /// The extents of all dims, where a run adds `rows` tokens.
    fn bound(&self, model: &onnx::Model, rows: usize, context: usize) -> Result<Vec<(String, Extent)>> {
        let [ids, mask, _] = self.given();
        let past = self.past(model).ok_or_else(|| {
            let inputs = model.declared_inputs();
            Error::usage(format!(
                "expected caches [batch, heads, past, width] whose length is a dim; its inputs: {inputs}"
            ))
        })?;
        let (new, all) = (axis(model, ids, 1), axis(model, mask, 1));
        let along = |at: usize| -> Vec<String> {
            model.state_inputs().iter().filter_map(|cache| axis(model, cache, at)).collect()
        };
        let (heads, widths) = (along(1), along(3));
        let inputs = self.given().map(|input| axis(model, input, 0));
        let batch = [along(0), inputs.into_iter().flatten().collect()].concat();
        let config = &self.config.decoder;
        let known = |name: &str, role: &str, size: Option<usize>| {
            let what =
                || Error::usage(format!("dim '{name}' is not known: expected {role} of the decoder in {CONFIG}"));
            size.map(Extent::from).ok_or_else(what)
        };
        let extent = |name: String| {
            let own = Some(&name);
            let extent = if name == past {
                (0..=context).into()
            } else if own == new.as_ref() {
                rows.into()
            } else if own == all.as_ref() {
                // As many as there are after a run.
                (0..=context).into()
            } else if widths.contains(&name) {
                known(&name, "head_size", config.head_size)?
            } else if heads.contains(&name) {
                known(&name, "num_key_value_heads", config.num_key_value_heads)?
            } else if batch.contains(&name) {
                1.into()
            } else {
                return Err(Error::usage(format!(
                    "dim '{name}': expected a batch, a length, or heads of a cache and their width"
                )));
            };
            Ok((name, extent))
        };
        model.open_dims()?.into_iter().map(extent).collect()
    }
}

/// The dim that an axis of an input is, if it is one alone.
fn axis(model: &onnx::Model, input: &str, axis: usize) -> Option<String> {
    // Extents that say which axis is which.
    (1..=4).find_map(|rank| {
        let axes: Shape = (0..rank).collect();
        model.dims_of(input, &axes).into_iter().find(|(_, at)| *at == axis).map(|(name, _)| name)
    })
}

/// Sizes that a decoder is planned for.
struct Sizes {
    context: usize,
    prefill: usize,
}

impl Files {
    /// The dims that were given; defaults for the others.
    ///
    /// # Errors
    /// When a dim is out of range.
    pub fn dims(&self, dims: &[(String, Extent)]) -> Result<Vec<(String, Extent)>> {
        let Sizes { context, prefill } = Sizes::of(self, dims)?;
        Ok(vec![(CONTEXT.to_owned(), context.into()), (PREFILL.to_owned(), prefill.into())])
    }
}

impl Sizes {
    fn of(files: &Files, dims: &[(String, Extent)]) -> Result<Sizes> {
        let most = files.config.context_length;
        if let Some((name, extent)) = dims.iter().find(|(name, _)| name != CONTEXT && name != PREFILL) {
            let what = format!("the dims of a decoder follow from {CONTEXT} and {PREFILL}: expected one of these");
            return Err(Error::usage(format!("{name}={extent}: {what}")));
        }
        let one = |name: &str| {
            let mut all = dims.iter().filter(|(dim, _)| dim == name).map(|(_, extent)| *extent);
            let Some(first) = all.next() else { return Ok(None) };
            ensure(all.all(|other| other == first), || {
                Error::usage(format!("dim '{name}' is set twice, to different values"))
            })?;
            let extent = first.fixed();
            extent.map(Some).ok_or_else(|| Error::usage(format!("{name}={first}: expected one extent")))
        };
        let context = one(CONTEXT)?.unwrap_or(most);
        ensure((LEAST..=most).contains(&context), || {
            let what = format!("expected {LEAST} to {most} tokens, the context_length of {CONFIG}");
            Error::usage(format!("{CONTEXT}={context}: {what}"))
        })?;
        let prefill = one(PREFILL)?.unwrap_or(PREFILL_ROWS.min(context / 2));
        let room = context + 1 - LEAST;
        ensure((1..=room).contains(&prefill), || {
            Error::usage(format!("{PREFILL}={prefill}: expected 1 to {room} tokens, for a context of {context}"))
        })?;
        Ok(Sizes { context, prefill })
    }
}

impl Decoder {
    /// Plans the decoder of a folder, and loads it. Of the dims of the options, `context` is the room of its caches, in tokens, which is the
    /// model's own if it is not given; `prefill` is the number of tokens of a prompt that are taken at a time.
    ///
    /// # Errors
    /// When the folder has no decoder, the plan exceeds the limit, or the device is not there.
    pub fn open(folder: impl AsRef<Path>, options: &Options) -> Result<Decoder> {
        let files = Files::read(folder.as_ref())?;
        let programs = files.programs(&options.dims, options.weights.as_deref())?;
        let device = session::open(options)?;
        tracing::info!("backend: {}", device.described());
        let session =
            Session::new(options.job(programs, &device), device, &|_, _| {}).map_err(|e| e.in_file(&files.path()))?;
        Decoder::of(files, session, &options.dims)
    }

    /// The decoder of a session of its programs.
    ///
    /// # Errors
    /// When a dim is out of range.
    #[doc(hidden)]
    pub fn of(files: Files, session: Session, dims: &[(String, Extent)]) -> Result<Decoder> {
        let Sizes { context, prefill } = Sizes::of(&files, dims)?;
        Ok(Decoder { files, session, context, prefill })
    }

    /// The session: its programs are `decode` and `prefill`.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Generates tokens behind a prompt, each the one of the highest score (the first of equal ones). `each` gets every token when it is known.
    /// It ends with `tokens` tokens, with a token that ends a text, or where the context is full. The caches begin empty.
    ///
    /// # Errors
    /// When a token of the prompt is none of the model's, the prompt has more tokens than the context, or the device fails.
    pub fn generate(&self, prompt: &[i64], tokens: usize, each: &mut dyn FnMut(i64)) -> Result<Vec<i64>> {
        let known = i64::try_from(self.files.config.vocab_size).unwrap_or(i64::MAX);
        let room = self.context;
        let Some((&last, before)) = prompt.split_last() else {
            return Err(Error::usage("the prompt: expected at least one token".into()));
        };
        if let Some(token) = prompt.iter().find(|token| !(0..known).contains(token)) {
            return Err(Error::usage(format!("the prompt: expected tokens from 0 to {}, found {token}", known - 1)));
        }
        ensure(prompt.len() <= room, || {
            let found = prompt.len();
            Error::usage(format!(
                "the prompt: expected at most {room} tokens, as the context has room for, found {found}"
            ))
        })?;
        self.session.reset_state()?;
        let mut length = 0;
        while length < before.len() {
            // A run writes as many rows as it was planned for. Those behind the prompt are none of the length, and never read.
            let rows = if length + self.prefill <= room { self.prefill } else { 1 };
            let program = if rows == self.prefill { "prefill" } else { "decode" };
            let ids: Vec<i64> = before[length..].iter().copied().take(rows).collect();
            self.run(program, &ids, length, rows)?;
            length += ids.len();
            if ids.len() < rows {
                self.set_length(length)?;
            }
        }
        let ends = |token: &i64| match &self.files.config.eos_token_id {
            Ends::None => false,
            Ends::One(end) => token == end,
            Ends::Several(ends) => ends.contains(token),
        };
        let (mut token, mut found) = (last, Vec::new());
        while found.len() < tokens && length < room && !found.last().is_some_and(ends) {
            let outputs = self.run("decode", &[token], length, 1)?;
            length += 1;
            token = best(&outputs[0].1)?;
            each(token);
            found.push(token);
        }
        Ok(found)
    }

    /// True if a text of so many tokens, the last of which no run has taken, fills the context.
    pub fn is_full(&self, tokens: usize) -> bool {
        tokens > self.context
    }

    /// Runs a program on tokens that stand behind `length` others.
    fn run(&self, program: &str, ids: &[i64], length: usize, rows: usize) -> Result<Vec<(String, Tensor)>> {
        let program = self.session.program(program)?;
        let [tokens, mask, _] = self.files.given();
        let input = |port: &Port| {
            let shape = port.shape.clone();
            let value = |at: usize| match &port.name[..] {
                // What stands behind the tokens is never read.
                name if name == tokens => ids.get(at).copied().unwrap_or(ids[0]),
                // All tokens are seen. The plan knows where they end.
                name if name == mask => 1,
                _ => (length + at % rows) as i64,
            };
            let values: Vec<f64> = (0..shape.numel()).map(|at| value(at) as f64).collect();
            Tensor::from_f64(port.dtype, shape, &values)
        };
        let inputs = program.plan().program.inputs.iter().map(|port| (&port.name[..], input(port)));
        program.run(&inputs.collect::<Vec<_>>())
    }

    /// Gives the caches another length.
    fn set_length(&self, length: usize) -> Result<()> {
        let mut states = self.session.plan().programs.iter().flat_map(|program| &program.state);
        let state = states.find(|state| state.count.is_some());
        let name = &state.expect("caches that grow have a length").port.name;
        self.session.set_state(name, &Tensor::from_f64(DType::I64, [], &[length as f64]))
    }
}

/// The place of the highest score of the last row, the first of equal ones.
fn best(scores: &Tensor) -> Result<i64> {
    let row = scores.shape().last().copied().unwrap_or(0);
    let scores = scores.to_f64();
    let scores = &scores[scores.len() - row..];
    let mut best = 0;
    for (at, score) in scores.iter().enumerate() {
        if score.is_nan() {
            return Err(Error::usage("its scores are not numbers".into()));
        }
        if *score > scores[best] {
            best = at;
        }
    }
    Ok(best as i64)
}
