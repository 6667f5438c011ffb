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
