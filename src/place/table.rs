//! Reads and writes problems as CSV files in minimalloc's format.

use super::{Item, Problem, Solution};
use plimsoll_core::error::{Error, Result};
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::num::IntErrorKind;
use std::path::Path;

/// A problem from a CSV file with the columns `id`, `lower`, `upper`, `size` and perhaps `alignment`.
#[derive(Debug, Clone)]
pub struct Table {
    /// The names of the items.
    pub ids: Vec<String>,
    /// The items, in the order of the lines.
    pub problem: Problem,
}

impl Table {
    /// Reads a file. Its columns may be in any order; an `offset` column is ignored.
    ///
    /// # Errors
    /// The file cannot be read, or breaks a rule of the format or of [`Problem::new`]. The error names file, line and column.
    pub fn read(path: &Path, align: u64) -> Result<Table> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::file(path, "read", error))?;
        Table::parse(path, &text, align)
    }

    /// Reads a text as [`Table::read`] reads a file. `path` is for messages only.
    pub fn parse(path: &Path, text: &str, align: u64) -> Result<Table> {
        let fault =
            |line: usize, column: usize, what: String| Error::Syntax { path: path.to_owned(), line, column, what };
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let (line, header) = lines.next().ok_or_else(|| fault(1, 1, format!("expected the columns {COLUMNS}")))?;
        let header = header.trim_start_matches('\u{feff}');
        let names: Vec<&str> = fields(header).map(|(_, name)| name).collect();
        for (from, name) in fields(header) {
            if !matches!(name, "id" | "lower" | "upper" | "size" | "alignment" | "offset") {
                return Err(fault(line, column(header, from), format!("unknown column '{name}': expected {COLUMNS}")));
            }
            if names.iter().filter(|&&other| other == name).count() > 1 {
                return Err(fault(line, column(header, from), format!("column '{name}' appears twice")));
            }
        }
        let position = |name: &str| names.iter().position(|&other| other == name);
        let required = |name: &str| {
            position(name).ok_or_else(|| fault(line, 1, format!("missing column '{name}': expected {COLUMNS}")))
        };
        let (id, lower, upper, size) = (required("id")?, required("lower")?, required("upper")?, required("size")?);
        let alignment = position("alignment");

        let (mut ids, mut items, mut origins) = (Vec::new(), Vec::new(), Vec::new());
        let mut found: Vec<(usize, &str)> = Vec::new();
        for (line, text) in lines {
            found.clear();
            found.extend(fields(text));
            if found.len() != names.len() {
                return Err(fault(line, 1, format!("expected {} fields, found {}", names.len(), found.len())));
            }
            let number = |at: usize| {
                let (from, digits) = found[at];
                digits.parse::<u64>().map_err(|error| {
                    let why = match error.kind() {
                        IntErrorKind::PosOverflow => "does not fit in 64 bits",
                        _ if digits.starts_with('-') => "is negative",
                        _ => "is not a whole number",
                    };
                    fault(line, column(text, from), format!("{} '{digits}' {why}", names[at]))
                })
            };
            let align = alignment.map_or(Ok(1), number)?;
            items.push(Item { lower: number(lower)?, upper: number(upper)?, size: number(size)?, align });
            ids.push(found[id].1.to_owned());
            origins.push(line);
        }
        if let Some([first, second]) = twice(&ids) {
            let (line, name) = (origins[second], &ids[second]);
            let row = text.lines().nth(line - 1).expect("it was read");
            let (from, _) = fields(row).nth(id).expect("it has all fields");
            let what = format!("id '{name}' appears on line {} already", origins[first]);
            return Err(fault(line, column(row, from), what));
        }
        let problem = Problem::checked(items, align).map_err(|(index, what)| match index {
            Some(index) => fault(origins[index], 1, what),
            None => Error::usage(what),
        })?;
        Ok(Table { ids, problem })
    }

    /// The table as text, with an `offset` column.
    pub fn to_csv(&self, solution: &Solution) -> String {
        let aligned = self.problem.items.iter().any(|item| item.align > 1);
        let mut text = String::from("id,lower,upper,size");
        text += if aligned { ",alignment,offset\n" } else { ",offset\n" };
        for ((id, item), offset) in self.ids.iter().zip(&self.problem.items).zip(&solution.offsets) {
            let alignment = if aligned { format!(",{}", item.align) } else { String::new() };
            writeln!(text, "{id},{},{},{}{alignment},{offset}", item.lower, item.upper, item.size)
                .expect("writing to a string cannot fail");
        }
        text
    }
}

const COLUMNS: &str = "id, lower, upper, size and perhaps alignment";

/// The fields of a line, each with the index of its first byte.
fn fields(line: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut from = 0;
    line.split(',').map(move |field| {
        let at = from;
        from += field.len() + 1;
        (at, field.trim())
    })
}

/// The 1-based column of a byte of a line.
fn column(line: &str, byte: usize) -> usize {
    1 + line[..byte].chars().count()
}

/// The first name that repeats an earlier one, as the indices of both. Sorting hashes is faster than a table of a million names.
fn twice(names: &[String]) -> Option<[usize; 2]> {
    let state = RandomState::new();
    let hash = |(index, name): (usize, &String)| (state.hash_one(name), index);
    let mut hashes: Vec<(u64, usize)> = names.iter().enumerate().map(hash).collect();
    hashes.sort_unstable();
    let equal = hashes.chunk_by(|a, b| a.0 == b.0).filter(|equal| equal.len() > 1);
    let pairs = equal.flat_map(|equal| {
        let pair = |at: usize| {
            let (_, second) = equal[at];
            let first = equal[..at].iter().find(|&&(_, first)| names[first] == names[second])?;
            Some([first.1, second])
        };
        (1..equal.len()).find_map(pair)
    });
    pairs.min_by_key(|&[_, second]| second)
}
