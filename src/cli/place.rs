//! `place`: buffers whose lives are known.

use super::args::{duration, size};
use super::{line, print};
use crate::error::{Error, Result};
use crate::file;
use crate::plan::check;
use crate::plan::place::{self, Effort};
use crate::report::{self, Table};
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Args)]
pub(super) struct Place {
    /// CSV files with the columns id, lower, upper, size and perhaps alignment, or a folder of them.
    #[arg(required = true)]
    instances: Vec<PathBuf>,
    /// Stop at a peak within this size; exit code 2 when none is found.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    capacity: Option<u64>,
    /// A power of two that divides all offsets; sizes are rounded up to it.
    #[arg(long, value_name = "N", default_value_t = 1)]
    align: u64,
    /// Stop after this time (10ms, 1s, 2m ...) instead of a number of steps. The best placement so far is always there.
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "steps")]
    deadline: Option<Duration>,
    /// Stop after so many steps of one or two nanoseconds: the same result on every machine.
    #[arg(long, value_name = "N", default_value_t = 2_000_000_000)]
    steps: u64,
    /// Write the instance with a column of offsets.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Place {
    pub(super) fn run(&self, json: bool) -> Result<String> {
        let files = self.files()?;
        if self.output.is_some() && files.len() > 1 {
            return Err(Error::Usage(format!("--output takes one instance, found {}", files.len())));
        }
        let mut table = Table::new("<>");
        table.row(["instance", "buffers", "bound", "peak", "gap", "CPU s"]);
        let (mut records, mut misfit) = (Vec::new(), None);
        for file in &files {
            let start = Instant::now();
            let mut instance = place::Table::read(file, self.align)?;
            instance.problem.capacity = self.capacity;
            let until = |time| start.checked_add(time).map(Effort::Until);
            let effort = self.deadline.map_or(Some(Effort::Steps(self.steps)), until);
            let effort = effort.ok_or_else(|| Error::Usage("--deadline: later than the clock can tell".into()))?;
            let (wall, cpu) = (Instant::now(), cpu_time());
            let solution = place::place(&instance.problem, effort);
            let seconds = match (cpu, cpu_time()) {
                (Some(before), Some(after)) => after.saturating_sub(before),
                _ => wall.elapsed(),
            };
            let seconds = seconds.as_secs_f64();
            let bound = check::placement(&instance.problem, &solution).map_err(|e| e.in_file(file))?;
            if let Some(path) = &self.output {
                let text = instance.to_csv(Some(&solution));
                file::write_whole(path, "write the placement", |out| out.write_all(text.as_bytes()))?;
            }
            let peak = solution.peak;
            let gap = if bound == 0 { 0.0 } else { (peak - bound) as f64 / bound as f64 * 100.0 };
            let (name, buffers) = (file.display().to_string(), instance.ids.len());
            let mut record = json!({
                "instance": name, "buffers": buffers, "lower_bound": bound, "peak": peak, "gap_percent": gap, "cpu_seconds": seconds,
            });
            if let Some(capacity) = self.capacity {
                record["capacity"] = json!(capacity);
                record["fits"] = json!(peak <= capacity);
                record["deficit"] = json!(peak.saturating_sub(capacity));
                if peak > capacity {
                    let what = format!("{name}: a placement (lower bound {bound}, found {peak})");
                    misfit.get_or_insert(Error::Fit { what, needed: peak, limit: capacity });
                }
            }
            records.push(record);
            let cells = [report::grouped(buffers as u64), report::grouped(bound), report::grouped(peak)];
            let cells = cells.into_iter().chain([format!("{gap:.3} %"), format!("{seconds:.3}")]);
            table.row(std::iter::once(name).chain(cells));
        }
        let single = records.len() == 1 && !self.instances[0].is_dir();
        let text = match json {
            true if single => line(&records.remove(0)),
            true => line(&json!(records)),
            false => table.to_string(),
        };
        match misfit {
            None => Ok(text),
            Some(error) => print(&text).and(Err(error)),
        }
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
                    if found.is_empty() {
                        return Err(Error::Usage("the folder has no .csv file".into()).in_file(path));
                    }
                    files.append(&mut found);
                }
                Err(_) => files.push(path.clone()),
            }
        }
        Ok(files)
    }
}

/// CPU time of this thread, where the system tells.
fn cpu_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    stat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}
