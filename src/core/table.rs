//! Aligned plain text, the same on a terminal and in a pipe.

/// Rows of cells in columns.
#[derive(Clone, Debug)]
pub struct Table {
    align: &'static str,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows. Each character of `align` is for one column: `<` aligns words, `>` numbers. The last one is for all
    /// further columns, too.
    pub fn new(align: &'static str) -> Table {
        Table { align, rows: Vec::new() }
    }

    /// Adds a row. Rows may differ in length. Control characters, including line ends, are [escaped](plain).
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        let clean = |cell: String| if cell.contains(char::is_control) { escaped(&cell, &[]) } else { cell };
        self.rows.push(cells.into_iter().map(|cell| clean(cell.into())).collect());
    }
}

impl std::fmt::Display for Table {
    /// One line per row, two spaces between columns, none at the end.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let cells = |k: usize| self.rows.iter().filter_map(move |row| row.get(k));
        // Names come from files. A cell beyond any page moves its own row, and widens no other.
        const MOST: usize = 200;
        let width = |k: usize| cells(k).map(|c| c.chars().count()).max().unwrap_or(0).min(MOST);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (k, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = if k == 0 { "" } else { "  " };
                let right = self.align.chars().nth(k).or(self.align.chars().last()) == Some('>');
                line += &if right { format!("{gap}{cell:>width$}") } else { format!("{gap}{cell:width$}") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Makes a text safe for a terminal: escapes control characters except line ends and tabs.
///
/// Names come from files. Their control characters could move the terminal's cursor or change its title.
pub fn plain(text: &str) -> std::borrow::Cow<'_, str> {
    const LAYOUT: [char; 2] = ['\n', '\t'];
    let is_safe = !text.contains(|c: char| c.is_control() && !LAYOUT.contains(&c));
    if is_safe { text.into() } else { escaped(text, &LAYOUT).into() }
}

fn escaped(text: &str, kept: &[char]) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !kept.contains(&c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// A share, in percent.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}
