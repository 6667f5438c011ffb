//! `--format github`: annotations for GitHub's workflows, a line each on stdout.
//!
//! Syntax: <https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions>.

use crate::error::Error;
use crate::plan::tell::diff::Diff;
use crate::report;

/// The annotation of a command's error. `detail` is its explanation.
pub(super) fn of_error(error: &Error, text: &str, detail: &str) -> String {
    let title = match error.exit_code() {
        2 => "Memory does not fit",
        3 => "Results differ",
        _ => "plimsoll",
    };
    let mut properties = format!("title={}", property(title));
    if let Some(file) = error.path() {
        properties = format!("file={},{properties}", property(&file.display().to_string()));
    }
    annotation("error", &properties, &format!("{text}\n{detail}"))
}

/// The annotation of a difference: a warning if the second plan takes more bytes.
pub(super) fn of_diff(file: &str, diff: &Diff) -> String {
    let [before, after] = diff.planned_bytes;
    let level = if after > before { "warning" } else { "notice" };
    let title = match after.cmp(&before) {
        std::cmp::Ordering::Greater => format!("Memory: {} more", report::human(after - before)),
        std::cmp::Ordering::Less => format!("Memory: {} less", report::human(before - after)),
        std::cmp::Ordering::Equal => "Memory: as before".to_owned(),
    };
    annotation(level, &format!("file={},title={}", property(file), property(&title)), &report::diff(diff))
}

/// A workflow command, on one line.
fn annotation(level: &str, properties: &str, message: &str) -> String {
    format!("::{level} {properties}::{}\n", escaped(message.trim_end(), ""))
}

fn property(text: &str) -> String {
    escaped(text, ":,")
}

/// A text without line ends and without further characters, each of which is written as its number. The rest is as a terminal may show it.
fn escaped(text: &str, further: &str) -> String {
    let encoded = |c: char| match c {
        '%' | '\r' | '\n' => format!("%{:02X}", c as u32),
        c if further.contains(c) => format!("%{:02X}", c as u32),
        c => c.to_string(),
    };
    report::plain(text).chars().map(encoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn no_name_ends_an_annotation() {
        let error = Error::usage("50 %\n::error::no".to_owned()).in_file(Path::new("a,b:c\n.onnx"));
        let line = of_error(&error, &error.to_string(), "more\n");
        let expected = "::error file=a%2Cb%3Ac%0A.onnx,title=plimsoll::a,b:c%0A.onnx: 50 %25%0A::error::no%0Amore\n";
        assert_eq!(line, expected);
    }
}
