//! Figures as text: bytes in their unit, digits in groups, nouns with their number, the first of many names.

/// A number of bytes in the largest unit that it reaches: `1.50 MiB`. It is rounded up, so that a plan fits its own size as a limit.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let hundredths = |power: usize| (u128::from(bytes) * 100).div_ceil(1 << (10 * power));
    let mut power = (bytes.max(1).ilog2() / 10) as usize;
    // Rounding up may reach the next unit.
    if power > 0 && power < UNITS.len() && hundredths(power) == 1024 * 100 {
        power += 1;
    }
    match power.checked_sub(1) {
        None => format!("{bytes} B"),
        Some(unit) => format!("{}.{:02} {}", hundredths(power) / 100, hundredths(power) % 100, UNITS[unit]),
    }
}

/// A whole number with its digits in groups of three: `1,572,864`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (k, digit) in digits.chars().enumerate() {
        if k > 0 && (digits.len() - k).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of bytes, readable and exact: `1.50 MiB (1,572,864 bytes)`.
pub fn bytes(bytes: u64) -> String {
    format!("{} ({})", human(bytes), count(bytes, "byte"))
}

/// The first eight of some names, and how many more there are.
pub fn listed(names: impl ExactSizeIterator<Item = impl AsRef<str>>) -> String {
    const MOST: usize = 8;
    let more = names.len().saturating_sub(MOST);
    let mut text = String::new();
    for name in names.take(MOST) {
        text += if text.is_empty() { "" } else { ", " };
        text += name.as_ref();
    }
    if more > 0 { format!("{text} and {more} more") } else { text }
}

/// A number and its noun: `1 step`, `2 steps`.
pub fn count(number: u64, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(number))
}

/// Reads a number of bytes, with a unit behind it if there is one: `6GiB`, `1.5 GB`, `4,096`.
///
/// # Errors
/// Expected and found.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != ',').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number = &ungrouped(number).ok_or_else(|| format!("expected a size such as 512MiB, found '{text}'"))?;
    let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" | "bytes" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "p" | "pib" => 1 << 50,
        "e" | "eib" => 1 << 60,
        other => {
            return Err(format!(
                "unknown unit '{other}'; use B, KB, MB, GB or TB (powers of 1000), or K, M, G, T, KiB .. EiB (of 1024)"
            ));
        }
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("'{text}' is more than 64 bits can count"));
    }
    let value: f64 = number.parse().map_err(|_| format!("expected a size such as 512MiB, found '{text}'"))?;
    if scale == 1 {
        return Err(format!("expected whole bytes, or a unit such as GB behind a fraction, found '{text}'"));
    }
    let bytes = value * scale as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(format!("'{text}' is more than 64 bits can count")) }
}

/// A number without the commas between groups of three digits; none if it is empty or a comma is elsewhere.
fn ungrouped(number: &str) -> Option<String> {
    let (whole, fraction) = number.find('.').map_or((number, ""), |at| number.split_at(at));
    let mut groups = whole.split(',');
    let first = groups.next().unwrap_or_default();
    let is_grouped = !whole.contains(',') || (1..=3).contains(&first.len()) && groups.all(|group| group.len() == 3);
    (!number.is_empty() && is_grouped && !fraction.contains(',')).then(|| whole.replace(',', "") + fraction)
}
