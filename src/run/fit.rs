//! How many cards a model needs, and in which mesh: each answer is a plan of each stage.

use crate::advise::bare;
use crate::error::{Error, Result, ensure};
use crate::log::silent;
use crate::mesh::{Mesh, STAGE};
use crate::pass::shard::{DATA, Kept, Rule, Sharding, TENSOR};
use crate::plan::tell::ranks::part;
use crate::plan::{self, Class, Graphs, Job, Plan};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// The most stages that are tried.
const MOST_STAGES: usize = 16;

/// The links between cards, for estimates of time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// What a card sends in a second, in GB.
    pub gb_per_second: f64,
    /// Microseconds that an exchange takes at least.
    pub latency_us: f64,
}

impl Default for Cluster {
    /// Cards of one host over NVLink: 329 GB/s is the bus bandwidth of an all reduce of 1 GiB on two H100, 10 us the least in a CUDA graph.
    fn default() -> Cluster {
        Cluster { gb_per_second: 329.0, latency_us: 10.0 }
    }
}

/// A mesh, and what its plan says.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The number of cards.
    pub cards: usize,
    /// The mesh.
    pub mesh: String,
    /// The level at which ranks share out the states of a training; 0 where each has them all.
    pub shard_states: usize,
    /// Its ranks along `data`, `tensor` and `stage`.
    #[serde(skip)]
    shape: [usize; 3],
    /// Bytes of the largest plan of a card.
    pub card_bytes: u64,
    /// True if they are within the limit.
    pub fits: bool,
    /// Bytes that a card sends in a run, or in an update of a training: of stages, the one that sends the most.
    pub sent_bytes: u64,
    /// The exchanges of a run.
    pub exchanges: usize,
    /// An estimate of the milliseconds that they take, if nothing else is done meanwhile.
    pub exchange_ms: f64,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Found {
    /// The fewest cards on which it fits, if it does on any number.
    pub fewest: Option<Tried>,
    /// The meshes that fit, none of which is worse than another in cards, bytes of a card and bytes that it sends; among equals, the lowest level.
    pub best: Vec<Tried>,
    /// Of the largest number of cards that cannot hold it, below the fewest: the mesh that takes the least.
    pub refused: Option<Tried>,
    /// The plans of the meshes that were tried, one for each stage.
    pub plans: usize,
}

/// What is asked.
pub struct Asked<'a> {
    /// The programs, as one device runs them. Each is as often in an update as it says.
    pub programs: &'a dyn Fn() -> Result<Vec<(String, Graphs, u64)>>,
    /// The job, without programs and mesh.
    pub job: Job,
    /// Bytes of a card.
    pub limit: u64,
    /// The numbers of cards to try.
    pub cards: RangeInclusive<usize>,
    /// What is split by hand.
    pub by: Vec<Rule>,
    /// The states that ranks may share out: a training is tried with each of these.
    pub kept: Vec<Kept>,
    /// The links.
    pub cluster: Cluster,
    /// Is told the first mesh that fits, while others are tried.
    pub first: &'a dyn Fn(&Tried),
}

/// What was tried so far.
struct Search<'a> {
    asked: &'a Asked<'a>,
    programs: &'a [(String, Graphs, u64)],
    tried: Vec<Tried>,
    /// Why a mesh was refused.
    last: Option<Error>,
    /// The plans of the meshes that were tried.
    plans: usize,
    /// Ranks of data and tensor that do not divide the model. Their multiples do not, either, so that few plans are made.
    none: Vec<[usize; 2]>,
}

impl Search<'_> {
    fn fits(&self) -> bool {
        self.tried.iter().any(|of| of.fits)
    }

    /// Tries all meshes of so many cards in so many stages, with each of these levels of states that are shared out.
    fn try_all(&mut self, cards: usize, stages: usize, levels: &[Kept]) {
        let each = cards / stages;
        for tensor in (1..=each).filter(|tensor| each.is_multiple_of(*tensor)) {
            let data = each / tensor;
            if self.none.iter().any(|&[d, t]| data.is_multiple_of(d) && tensor.is_multiple_of(t)) {
                continue;
            }
            // Ranks without an axis data have all states, whatever the level.
            let levels = if data > 1 { levels } else { &levels[..levels.len().min(1)] };
            for &kept in levels {
                match try_mesh(self.asked, self.programs, [data, tensor, stages], kept) {
                    Ok(found) => {
                        self.plans += stages;
                        if found.fits && !self.fits() {
                            (self.asked.first)(&found);
                        }
                        self.tried.push(found);
                    }
                    Err(error) => {
                        if stages == 1 {
                            self.none.push([data, tensor]);
                        }
                        self.last = Some(error);
                        break;
                    }
                }
            }
        }
    }
}

/// Finds the meshes on which a model fits, of axes `data` and `tensor`; and `stage`, on as many cards as hold it in no other way.
///
/// # Errors
/// When the model cannot be planned at all, or no number of cards divides it.
pub fn fit(asked: &Asked) -> Result<Found> {
    let programs = (asked.programs)()?;
    let mut search = Search { asked, programs: &programs, tried: Vec::new(), last: None, plans: 0, none: Vec::new() };
    for cards in asked.cards.clone() {
        search.try_all(cards, 1, &asked.kept);
        // Stages compute one after another: they are tried where nothing else fits, nor fewer cards. What takes the least is shared out then.
        if !search.fits() {
            let least = &asked.kept[asked.kept.len().saturating_sub(1)..];
            for stages in (2..=cards.min(MOST_STAGES)).filter(|stages| cards % stages == 0) {
                search.try_all(cards, stages, least);
            }
        }
    }
    let Search { tried, last, plans, .. } = search;
    let Some(fewest) = tried.iter().filter(|t| t.fits).min_by_key(|t| (t.cards, t.sent_bytes)).cloned() else {
        let refused = tried.iter().min_by_key(|t| t.card_bytes).cloned();
        return match (refused, last) {
            (None, Some(error)) => Err(error),
            (refused, _) => Ok(Found { fewest: None, best: Vec::new(), refused, plans }),
        };
    };
    let below = tried.iter().filter(|t| t.cards < fewest.cards);
    let most = below.clone().map(|t| t.cards).max();
    let refused = below.filter(|t| Some(t.cards) == most).min_by_key(|t| t.card_bytes).cloned();
    let figures = |t: &Tried| [t.cards as u64, t.card_bytes, t.sent_bytes];
    let beats = |a: &Tried, b: &Tried| {
        let no_worse = figures(a).iter().zip(figures(b)).all(|(a, b)| *a <= b);
        no_worse && (figures(a) != figures(b) || a.shard_states < b.shard_states)
    };
    let fitting: Vec<Tried> = tried.into_iter().filter(|t| t.fits).collect();
    let best = fitting.iter().filter(|t| !fitting.iter().any(|other| beats(other, t))).cloned().collect();
    Ok(Found { fewest: Some(fewest), best, refused, plans })
}

/// The plans of a mesh that was tried, a stage each.
///
/// # Errors
/// As [`fit`].
pub fn plans_of(asked: &Asked, tried: &Tried) -> Result<Vec<Plan>> {
    Ok(plans(asked, &(asked.programs)()?, tried.shape, Kept::LEVELS[tried.shard_states])?.1)
}

/// Plans the ranks of a mesh.
fn plans(
    asked: &Asked,
    programs: &[(String, Graphs, u64)],
    [data, tensor, stages]: [usize; 3],
    kept: Kept,
) -> Result<(Mesh, Vec<Plan>)> {
    let axes = [(STAGE, stages), (DATA, data), (TENSOR, tensor)].into_iter().filter(|(_, ranks)| *ranks > 1);
    let axes: Vec<_> = axes.map(|(name, ranks)| (name.to_owned(), ranks)).collect();
    let mesh = if axes.is_empty() { Mesh::new([(DATA, 1)])? } else { Mesh::new(axes)? };
    let by = asked.by.iter().filter(|rule| mesh.axis(&rule.axis).is_ok()).cloned().collect();
    let own = programs.iter().map(|(name, graphs, _)| (name.clone(), bare(graphs))).collect();
    let sharding = (mesh.ranks() > 1).then(|| Sharding { mesh: mesh.clone(), by, kept, ..Sharding::default() });
    let target = asked.job.target.among(mesh.ranks());
    let job = Job { programs: own, target, sharding, limit: None, ..asked.job.clone() };
    let planned = |job: &Job| -> Result<Vec<Plan>> {
        Ok(silent(|| plan::of_all_ranks(job))?.into_iter().map(|(planned, _)| planned.plan).collect())
    };
    let all = planned(&job)?;
    // What lasts and what NCCL takes is as it is.
    let lasting =
        |plan: &Plan| [Class::Constant, Class::State, Class::Reserve].map(|class| plan.class_bytes(class)).iter().sum();
    let hopeless = all.iter().map(lasting).max().unwrap_or(0u64) > asked.limit;
    // A limit changes the plan, where less memory costs time.
    let all = match most(&all) > asked.limit && !hopeless {
        true => match planned(&job.within(asked.limit)) {
            Ok(fitting) => fitting,
            Err(Error::Fit { .. }) => all,
            Err(error) => return Err(error),
        },
        false => all,
    };
    Ok((mesh, all))
}

/// The bytes of the largest of some plans.
fn most(plans: &[Plan]) -> u64 {
    plans.iter().map(Plan::bytes).max().unwrap_or(0)
}

/// Tries a mesh.
fn try_mesh(asked: &Asked, programs: &[(String, Graphs, u64)], shape: [usize; 3], kept: Kept) -> Result<Tried> {
    // One card has all states.
    let kept = if shape[0] > 1 { kept } else { Kept::Whole };
    let (mesh, all) = plans(asked, programs, shape, kept)?;
    let times = |program: &str| programs.iter().find(|(name, ..)| name == program).map_or(1, |(.., times)| *times);
    let sent = |plan: &Plan| {
        let traffic = part(plan).map(|part| part.traffic).unwrap_or_default();
        let sent = traffic.iter().map(|of| of.sent_bytes * times(&of.program)).sum::<u64>();
        (sent, traffic.iter().map(|of| of.collectives * times(&of.program) as usize).sum::<usize>())
    };
    let (sent_bytes, exchanges) = all.iter().map(sent).max().unwrap_or((0, 0));
    let card_bytes = most(&all);
    let Cluster { gb_per_second, latency_us } = asked.cluster;
    Ok(Tried {
        cards: mesh.ranks(),
        mesh: if mesh.ranks() > 1 { mesh.to_string() } else { "one card".into() },
        shard_states: kept as usize,
        shape,
        card_bytes,
        fits: card_bytes <= asked.limit,
        sent_bytes,
        exchanges,
        exchange_ms: sent_bytes as f64 / gb_per_second / 1e6 + exchanges as f64 * latency_us / 1e3,
    })
}

impl Cluster {
    /// The links that a file tells: `{"gb_per_second": 50, "latency_us": 20}`.
    ///
    /// # Errors
    /// When it is something else, the bandwidth is not above 0, or the latency is below it.
    pub fn parse(text: &str) -> Result<Cluster> {
        let cluster: Cluster = serde_json::from_str(text).map_err(|e| {
            Error::usage(format!("expected links such as {{\"gb_per_second\": 50, \"latency_us\": 20}}: {e}"))
        })?;
        ensure(cluster.gb_per_second > 0.0 && cluster.latency_us >= 0.0, || {
            Error::usage("expected links with a bandwidth above 0 and a latency of at least 0".into())
        })?;
        Ok(cluster)
    }
}
