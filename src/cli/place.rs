//! `place`: places buffers whose live ranges are given.

use super::args::duration;
use super::{Failure, line, print, tell};
use crate::error::{Error, Result, ensure};
use crate::figures::size;
use crate::file;
use crate::place::{self, Effort};
use crate::plan::check;
use crate::report::{self, Table};
use clap::Args;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The records of `--json`, as `schema.rs` reads them.
pub(super) const SCHEMA: &str = "
place = placement|[placement|fault]
placement
  instance text
  buffers int
  lower_bound int
  peak int
  gap_percent number
  optimal bool
  cpu_seconds number
  capacity? int
  fits? bool
  deficit? int
fault
  instance text
  error text
";

#[derive(Args)]
pub(super) struct Place {
    /// CSV files with the columns id, lower, upper, size and, optionally, alignment; or a folder of such files.
    #[arg(required = true)]
    instances: Vec<PathBuf>,
    /// Stop when the peak is within this size. Exit code 2 if no such placement is found.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    capacity: Option<u64>,
    /// Alignment of all offsets, a power of two. Sizes are rounded up to it.
    #[arg(long, value_name = "N", default_value_t = 1)]
    align: u64,
    /// Stop after this time (10ms, 1s, 2m ...) instead of a number of steps, with the best placement so far.
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "steps")]
    deadline: Option<Duration>,
    /// Stop after this many steps, each of which takes one or two nanoseconds. The result is the same on every machine.
    #[arg(long, value_name = "N", default_value_t = 2_000_000_000)]
    steps: u64,
    /// Write the instance as CSV, with a column of offsets.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// An instance and the result of its placement.
struct Placed {
    name: String,
    buffers: usize,
    bound: u64,
    peak: u64,
    /// True if no placement has a lower peak.
    optimal: bool,
    seconds: f64,
}

impl Place {
    pub(super) fn run(&self, json: bool) -> Result<String, Failure> {
        let files = self.files()?;
        if self.output.is_some() && files.len() > 1 {
            return Err(Error::usage(format!("--output takes one instance, found {}", files.len())).into());
        }
        super::args::outputs(self.output.as_deref().map(|path| ("--output", path)), &files)?;
        let mut table = Table::new("<>>>><>");
        table.row(["instance", "buffers", "bound", "peak", "gap", "", "CPU s"]);
        let (mut records, mut faults, mut misfits) = (Vec::new(), Vec::new(), Vec::new());
        for file in &files {
            match self.place(file) {
                Ok(placed) => {
                    records.push(self.record(&placed));
                    table.row(placed.cells());
                    let Placed { name, bound, peak, .. } = placed;
                    if let Some(limit) = self.capacity.filter(|&capacity| peak > capacity) {
                        let what = format!("{name}: a placement (lower bound {bound}, found {peak})");
                        misfits.push(Error::Fit { what, needed: peak, limit, file: None });
                    }
                }
                Err(error) => {
                    records.push(json!({"instance": file.display().to_string(), "error": error.to_string()}));
                    faults.push(error);
                }
            }
        }
        let single = files.len() == 1 && !self.instances[0].is_dir();
        if single && let Some(fault) = faults.pop() {
            return Err(fault.into());
        }
        let record = if single { records.remove(0) } else { json!(records) };
        let text = if json { line(&record) } else { table.to_string() };
        // Bad input counts more than what does not fit. The last error is the command's.
        misfits.append(&mut faults);
        let Some(last) = misfits.pop() else { return Ok(text) };
        misfits.iter().for_each(tell);
        if json {
            return Err(Failure::with(last, record));
        }
        print(&text)?;
        Err(last.into())
    }

    fn place(&self, file: &Path) -> Result<Placed> {
        let start = Instant::now();
        let mut instance = place::Table::read(file, self.align)?;
        instance.problem.capacity = self.capacity;
        let until = |time| start.checked_add(time).map(Effort::Until);
        let effort = self.deadline.map_or(Some(Effort::Steps(self.steps)), until);
        let effort = effort.ok_or_else(|| Error::usage("--deadline: later than the clock can tell".into()))?;
        let (wall, cpu) = (Instant::now(), cpu_time());
        let solution = place::place(&instance.problem, effort);
        let seconds = match (cpu, cpu_time()) {
            (Some(before), Some(after)) => after.saturating_sub(before),
            _ => wall.elapsed(),
        };
        let bound = check::placement(&instance.problem, &solution).map_err(|e| e.in_file(file))?;
        if let Some(path) = &self.output {
            let text = instance.to_csv(&solution);
            file::write_whole(path, "write the placement", |out| out.write_all(text.as_bytes()))?;
        }
        Ok(Placed {
            name: file.display().to_string(),
            buffers: instance.ids.len(),
            bound,
            peak: solution.peak,
            optimal: solution.peak == bound || solution.is_optimal(),
            seconds: seconds.as_secs_f64(),
        })
    }

    fn record(&self, placed: &Placed) -> Value {
        let Placed { name, buffers, bound, peak, optimal, seconds } = placed;
        let mut record = json!({
            "instance": name, "buffers": buffers, "lower_bound": bound, "peak": peak, "gap_percent": placed.gap(),
            "optimal": optimal, "cpu_seconds": seconds,
        });
        if let Some(capacity) = self.capacity {
            record["capacity"] = json!(capacity);
            record["fits"] = json!(*peak <= capacity);
            record["deficit"] = json!(peak.saturating_sub(capacity));
        }
        record
    }

    /// The instances: files as they are given, the CSV files of folders by name.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for path in &self.instances {
            match std::fs::read_dir(path) {
                Ok(folder) => {
                    let found = folder.filter_map(|entry| Some(entry.ok()?.path()));
                    let mut found: Vec<_> = found.filter(|file| file.extension().is_some_and(|e| e == "csv")).collect();
                    found.sort();
                    ensure(!found.is_empty(), || Error::usage("the folder has no .csv file".into()).in_file(path))?;
                    files.append(&mut found);
                }
                Err(_) => files.push(path.clone()),
            }
        }
        Ok(files)
    }
}

impl Placed {
    /// The distance of the peak from the bound, in percent of the bound.
    fn gap(&self) -> f64 {
        if self.bound == 0 { 0.0 } else { (self.peak - self.bound) as f64 / self.bound as f64 * 100.0 }
    }

    fn cells(&self) -> [String; 7] {
        let [buffers, bound, peak] = [self.buffers as u64, self.bound, self.peak].map(report::grouped);
        let optimal = if self.optimal { "optimal" } else { "" };
        let (gap, seconds) = (format!("{:.3} %", self.gap()), format!("{:.2}", self.seconds));
        [self.name.clone(), buffers, bound, peak, gap, optimal.into(), seconds]
    }
}

/// CPU time of this process and of its threads that ended, in hundredths of a second. `None` if the system does not tell.
fn cpu_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // Behind the name, which may hold anything: the state is field 3, user and system time are 14 and 15.
    let mut times = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: u64 = times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?;
    Some(Duration::from_millis(10 * ticks))
}
