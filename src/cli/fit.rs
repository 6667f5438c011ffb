//! `fit`: finds the fewest cards on which a model fits, and the best meshes of more.

use super::args::{self, Model};
use super::method::Trained;
use super::programs::More;
use super::{Failure, line};
use crate::error::{Error, Result, ensure};
use crate::file;
use crate::fit::{Asked, Cluster, Found, Tried, fit, plans_of};
use crate::pass::shard::{DATA, Kept, TENSOR};
use crate::plan::Job;
use crate::report::picture::stages_page;
use crate::report::{Table, count, human};
use clap::Args;
use serde_json::json;
use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
fit
  ..subject
  target text
  limit_bytes int
  fewest mesh|null
  best [mesh]
  refused mesh|null
  plans int
mesh
  cards int
  mesh text
  shard_states int
  card_bytes int
  fits bool
  sent_bytes int
  exchanges int
  exchange_ms number
";

/// The most cards that are tried.
const MOST_CARDS: usize = 4096;

#[derive(Args)]
#[command(after_help = args::targets())]
pub(super) struct Fit {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    more: More,
    #[command(flatten)]
    trained: Trained,
    /// The target to plan for: one of those below.
    #[arg(long, default_value = "cuda")]
    target: String,
    /// The numbers of cards to try, such as 1..64.
    #[arg(long, value_name = "N..N", default_value = "1..8", value_parser = cards)]
    cards: RangeInclusive<usize>,
    /// The links between the cards, for the estimate of time: a file with {"gb_per_second": .., "latency_us": ..}. Default: NVLink within a host.
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Draw the plan of a card of the fewest, a lane for each stage and program, as one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// A range of numbers of cards.
fn cards(text: &str) -> Result<RangeInclusive<usize>, String> {
    let parsed = || {
        let (from, to) = text.split_once("..").unwrap_or((text, text));
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    let found: Option<(usize, usize)> = parsed();
    let range = found.filter(|(from, to)| *from > 0 && from <= to && *to <= MOST_CARDS);
    range
        .map(|(from, to)| from..=to)
        .ok_or_else(|| format!("expected numbers of cards such as 1..64, at most {MOST_CARDS}, found '{text}'"))
}

impl Fit {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let files = self.html.iter().map(|path| ("--html", path.as_path()));
        args::outputs(files, self.model.read().chain(self.more.read()).chain(self.cluster.clone()))?;
        let several = &self.model.several;
        ensure(several.mesh.is_none(), || {
            Error::usage("--mesh: fit finds the mesh; --cards says how many cards".into())
        })?;
        ensure(!self.model.is_folder(), || {
            Error::usage("fit: a folder with a decoder runs on one card; name its graph".into())
        })?;
        if let Some(rule) = several.shards.iter().find(|rule| ![DATA, TENSOR].contains(&&rule.axis[..])) {
            let what =
                format!("--shard '{}': fit has the axes {DATA} and {TENSOR}, found '{}'", rule.pattern, rule.axis);
            return Err(Error::usage(what).into());
        }
        let limit = self.model.memory_limit.ok_or_else(|| {
            Error::usage("fit: expected --memory-limit SIZE, the memory of a card for the plan".into())
        })?;
        let target = self.model.target(&self.target)?;
        let more = self.more.or_training(self.trained.method().map(|method| method.on(&target)));
        let flags = self.trained.with_batch(&self.model);
        let asked = more.asked(&flags, &[])?;
        let cluster = self.cluster.as_deref().map(|path| {
            let text = fs::read_to_string(path).map_err(|e| Error::file(path, "read the links", e))?;
            Cluster::parse(&text).map_err(|e| e.in_file(path))
        });
        // An update runs its middle part once for each further micro-batch.
        let parts = self.trained.method().map_or(1, |method| method.accumulate);
        let times = |name: &str| match name {
            "next" => parts.saturating_sub(2),
            "evaluate" => 0,
            _ => 1,
        };
        let programs = || {
            let all = asked.programs.iter();
            Ok(all.map(|(name, graphs)| (name.clone(), graphs.clone(), times(name))).collect())
        };
        let job = Job { recipe: flags.recipe(), ..Job::new(Vec::<(String, crate::plan::Graphs)>::new(), &target) };
        let cluster = cluster.transpose()?.unwrap_or_default();
        let (by, cards) = (several.shards.clone(), self.cards.clone());
        let is_trained = self.trained.method().is_some();
        if let (Some(level), false) = (several.states, is_trained) {
            let what = format!("--shard-states {level}: expected --train, as a model alone has no such states");
            return Err(Error::usage(what).into());
        }
        let kept = match several.states {
            Some(_) => vec![several.kept()],
            None => Kept::LEVELS.into_iter().filter(|&kept| is_trained || kept == Kept::Whole).collect(),
        };
        let first = |of: &Tried| {
            let (number, each) = (count(of.cards as u64, "card"), human(of.card_bytes));
            eprintln!("fits on {number}: {}, {each} each; others are tried ..", named(of));
        };
        let first: &dyn Fn(&Tried) = if json { &|_| () } else { &first };
        let wanted = Asked { programs: &programs, job, limit, cards, by, kept, cluster, first };
        let found = fit(&wanted).map_err(|e| asked.in_file(&flags, e))?;
        if let (Some(path), Some(fewest)) = (&self.html, &found.fewest) {
            let plans = plans_of(&wanted, fewest).map_err(|e| asked.in_file(&flags, e))?;
            let page = stages_page(&asked.subject.heading(), &named(fewest), &plans, limit);
            file::write_whole(path, "draw the plan", |out| out.write_all(page.as_bytes()))?;
        }
        let mut record = json!({
            "target": target.name, "limit_bytes": limit, "fewest": found.fewest, "best": found.best, "refused": found.refused,
            "plans": found.plans,
        });
        asked.subject.name_in(&mut record);
        let Some(least) = found.refused.as_ref().filter(|_| found.fewest.is_none()) else {
            let text = format!(
                "{} on cards of {}, {}\n\n{}",
                asked.subject.heading(),
                human(limit),
                target.name,
                told(&found, limit)
            );
            return Ok(if json { line(&record) } else { text });
        };
        let what =
            format!("the plan of a card, on {} at most ({})", count(*self.cards.end() as u64, "card"), named(least));
        let error = Error::Fit { what, needed: least.card_bytes, limit, file: None };
        Err(Failure::explained(asked.in_file(&flags, error), json, record, String::new()))
    }
}

/// A mesh, and the states that its ranks share out.
fn named(of: &Tried) -> String {
    match of.shard_states {
        0 => of.mesh.clone(),
        level => format!("{} --shard-states {level}", of.mesh),
    }
}

/// The answer, its proof, and the meshes.
fn told(found: &Found, limit: u64) -> String {
    let mut text = String::new();
    if let Some(fewest) = &found.fewest {
        let (mesh, Tried { cards, card_bytes, .. }) = (named(fewest), fewest);
        text += &format!("fits on {}: {mesh}, {} each\n", count(*cards as u64, "card"), human(*card_bytes));
    }
    if let Some(refused @ Tried { cards, card_bytes, .. }) = &found.refused {
        let mesh = named(refused);
        let (needed, over) = (human(*card_bytes), human(card_bytes.saturating_sub(limit)));
        text += &format!(
            "not on {}: {mesh} takes the least, {needed} each, {over} too much\n",
            count(*cards as u64, "card")
        );
    }
    let mut table = Table::new("><>>>>");
    table.row(["cards", "mesh", "a card", "of the limit", "a card sends", "links, about"]);
    for of in &found.best {
        let share = format!("{:.1} %", 100.0 * of.card_bytes as f64 / limit as f64);
        let ms = format!("{:.2} ms", of.exchange_ms);
        table.row([of.cards.to_string(), named(of), human(of.card_bytes), share, human(of.sent_bytes), ms]);
    }
    text + &format!(
        "\n{table}\nlinks: an estimate, if nothing is computed meanwhile; bytes are those of plans ({} tried): with NCCL's reserve, without what MPI takes\n",
        found.plans
    )
}
