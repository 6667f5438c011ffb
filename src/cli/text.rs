//! `run FOLDER`: generates tokens with a decoder.

use super::args::{Measured, Model, On};
use super::programs::More;
use super::{Failure, line};
use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::figures::{count, grouped};
use crate::report::{Table, human};
use clap::Args;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

/// What a decoder goes on with.
#[derive(Args)]
pub(super) struct Text {
    /// Of a folder with a decoder: the tokens of a prompt, such as 1,15,99. It generates greedily: each token is the one of the highest score.
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', allow_hyphen_values = true, conflicts_with_all = OTHERS)]
    ids: Vec<i64>,
    /// Of a folder with a decoder that has a tokenizer.json: the text of a prompt. What is generated is a text, too. A build with the feature `text`
    /// has it.
    #[arg(long, value_name = "TEXT", conflicts_with = "ids", conflicts_with_all = OTHERS)]
    text: Option<String>,
    /// Generate N tokens, or fewer if the model ends the text or the context is full. Default: 100.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with_all = OTHERS)]
    tokens: Option<u32>,
}

/// Flags of runs that are not for a decoder.
const OTHERS: [&str; 16] = [
    "batch",
    "of",
    "seed",
    "inputs",
    "iters",
    "program",
    "load_states",
    "save_states",
    "output_dir",
    "expect",
    "rtol",
    "atol",
    "labels",
    "trace",
    "poison",
    "placement",
];

/// Tokens that are generated unless it is said.
const TOKENS: usize = 100;

impl Text {
    /// Refuses what a graph alone has no use for.
    pub(super) fn refuse(&self) -> Result<()> {
        let flags =
            [("--ids", !self.ids.is_empty()), ("--text", self.text.is_some()), ("--tokens", self.tokens.is_some())];
        match flags.into_iter().find(|(_, given)| *given) {
            Some((flag, _)) => {
                Err(Error::usage(format!("{flag}: expected a folder with a genai_config.json, found none")))
            }
            None => Ok(()),
        }
    }

    /// Generates tokens, and says how fast and in how many bytes.
    pub(super) fn run(
        &self,
        model: &Model,
        more: &More,
        on: &On,
        measured: &Measured,
        json: bool,
    ) -> Result<String, Failure> {
        let files = model.decoder()?.expect("the model is a folder");
        let words = self.text.as_deref().map(|text| Prompt::new(&model.model, text)).transpose()?;
        let ids = words.as_ref().map_or(&self.ids, |words| &words.ids);
        if ids.is_empty() {
            let what = "run: expected --ids N,N,.., the tokens of a prompt, or --text TEXT";
            return Err(Error::usage(what.into()).into());
        }
        let (session, subject) = more.session(model, on, measured, &[], json)?;
        let decoder = Decoder::of(files, session, &model.dims())?;
        let (start, mut first) = (Instant::now(), None);
        let tokens = self.tokens.map_or(TOKENS, |tokens| tokens as usize);
        let found = decoder.generate(ids, tokens, &mut |_| {
            first.get_or_insert_with(|| (start.elapsed().as_secs_f64(), decoder.session().usage().bytes));
        })?;
        let seconds = start.elapsed().as_secs_f64();
        let (prefill, bytes) = first.unwrap_or((seconds, decoder.session().usage().bytes));
        let decode = seconds - prefill;
        let rate = (found.len() > 1).then(|| (found.len() - 1) as f64 / decode);
        let (last, planned) = (decoder.session().usage().bytes, decoder.session().plan().bytes());
        if json {
            let mut value = json!({
                "device": decoder.session().device(),
                "prompt": ids,
                "tokens": found,
                "first_token_seconds": first.map(|(seconds, _)| seconds),
                "decode_seconds": decode,
                "tokens_per_second": rate,
                "allocated_bytes_first": bytes,
                "allocated_bytes_last": last,
                "planned_bytes": planned,
            });
            if let Some(words) = &words {
                value["text"] = json!(words.of(&found)?);
            }
            subject.name_in(&mut value);
            return Ok(line(&value));
        }
        let text = match &words {
            Some(words) => words.of(&found)?,
            None => found.iter().map(i64::to_string).collect::<Vec<_>>().join(","),
        };
        let mut table = Table::new("<<");
        let prompt = count(ids.len() as u64, "token");
        table.row(["prompt".into(), format!("{prompt}, {prefill:.3} s to the first new one")]);
        let rate = rate.map_or(String::new(), |rate| format!(", {rate:.1} per second"));
        let why = match found.len() < tokens {
            true if decoder.is_full(ids.len() + found.len()) => format!(" of {tokens}: the context is full"),
            true => format!(" of {tokens}: the model ended the text"),
            false => String::new(),
        };
        table.row(["generated".into(), format!("{}{why}{rate}", count(found.len() as u64, "token"))]);
        table.row(["planned".into(), format!("{}  {} bytes", human(planned), grouped(planned))]);
        table.row(["allocated at token 1".into(), format!("{}  {} bytes", human(bytes), grouped(bytes))]);
        table.row([format!("allocated at token {}", found.len()), format!("{}  {} bytes", human(last), grouped(last))]);
        let heading = format!("{} on {}", subject.heading(), decoder.session().device());
        Ok(format!("{heading}\n\n{text}\n\n{table}"))
    }
}

/// A text as tokens.
struct Prompt {
    ids: Vec<i64>,
    #[cfg(feature = "text")]
    tokenizer: tokenizers::Tokenizer,
}

#[cfg(feature = "text")]
impl Prompt {
    fn new(folder: &Path, text: &str) -> Result<Prompt> {
        let path = folder.join("tokenizer.json");
        let refuse = |what: String| Error::File { path: path.clone(), what, source: None };
        let tokenizer = tokenizers::Tokenizer::from_file(&path);
        let tokenizer = tokenizer.map_err(|e| refuse(format!("expected a tokenizer, for --text: {e}")))?;
        let encoded = tokenizer.encode(text, true).map_err(|e| refuse(format!("it does not encode the text: {e}")))?;
        Ok(Prompt { ids: encoded.get_ids().iter().map(|&id| id.into()).collect(), tokenizer })
    }

    /// The text of tokens.
    fn of(&self, tokens: &[i64]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().filter_map(|&id| id.try_into().ok()).collect();
        self.tokenizer
            .decode(&ids, true)
            .map_err(|e| Error::usage(format!("the tokenizer has no text for tokens: {e}")))
    }
}

#[cfg(not(feature = "text"))]
impl Prompt {
    fn new(_: &Path, _: &str) -> Result<Prompt> {
        let what = "--text: this build has no tokenizers: build it with --features text, or give --ids";
        Err(Error::usage(what.into()))
    }

    fn of(&self, _: &[i64]) -> Result<String> {
        unreachable!("without tokenizers, no text was taken")
    }
}
