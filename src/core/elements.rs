//! Sets of elements of a buffer. They show if two accesses are disjoint, and if some accesses cover another.
//!
//! A set is `low` plus every sum of `i * stride` over its axes. Sets are compared as boxes. Strides of which each divides the next
//! make a mixed radix, and in it a set is the product of one range of digits per stride.
//!
//! ```text
//! rows of 6, columns 2..5 of rows 1..3     strides 6, 1     digits [1, 3) x [2, 5)
//! the same from element 4 on: 4 5 | 6      two boxes        [0, 2) x [4, 6)  and  [1, 3) x [0, 1)
//! ```
//!
//! The cost depends on the number of sets, not on their size. The answer `true` is always right. A comparison that needs too many
//! boxes answers `false`.

use crate::shape::Access;

/// The most boxes of a comparison.
const MOST: usize = 1 << 12;

/// Elements of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// The lowest element.
    low: u64,
    /// The highest element.
    high: u64,
    /// Extents (above 1) and strides (above 0), by ascending stride. Axes that are one run together have been joined.
    axes: Vec<(u64, u64)>,
}

impl Set {
    /// The first `len` elements.
    pub fn first(len: u64) -> Option<Set> {
        let axes = if len > 1 { vec![(len, 1)] } else { Vec::new() };
        (len > 0).then(|| Set { low: 0, high: len - 1, axes })
    }

    /// The elements of an access that is shifted along further axes, given as extents and strides. `None` if it has no elements.
    ///
    /// # Errors
    /// The lowest element is below 0, or the highest exceeds 63 bits.
    pub fn new(access: &Access, further: impl Iterator<Item = (usize, isize)>) -> Result<Option<Set>, String> {
        let all = access.shape.iter().copied().zip(access.strides.iter().copied()).chain(further);
        let (mut low, mut high) = (access.offset as i128, access.offset as i128);
        let mut axes: Vec<(u64, u64)> = Vec::new();
        let mut empty = false;
        for (extent, stride) in all {
            empty |= extent == 0;
            if extent < 2 || stride == 0 {
                continue;
            }
            let reach = (extent as i128 - 1).checked_mul(stride as i128).filter(|r| r.abs() < 1 << 64);
            let reach = reach.ok_or_else(|| format!("an axis of {extent} elements {stride} apart"))?;
            if reach < 0 {
                low += reach
            } else {
                high += reach
            }
            axes.push((extent as u64, stride.unsigned_abs() as u64));
        }
        if empty {
            return Ok(None);
        }
        let (Ok(low), Ok(high)) = (u64::try_from(low), i64::try_from(high)) else {
            return Err(format!("elements {low} to {high}"));
        };
        axes.sort_unstable_by_key(|&(_, stride)| stride);
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(axes.len());
        for (extent, stride) in axes {
            match joined.last_mut() {
                // The runs of the finer axis touch or overlap, so together they are one run.
                Some((fine, step)) if stride % *step == 0 && stride / *step <= *fine => {
                    *fine += (extent - 1) * (stride / *step);
                }
                _ => joined.push((extent, stride)),
            }
        }
        Ok(Some(Set { low, high: high as u64, axes: joined }))
    }

    /// The same elements, counted from `by` elements earlier.
    pub fn shifted(&self, by: u64) -> Set {
        Set { low: self.low + by, high: self.high + by, axes: self.axes.clone() }
    }

    /// The highest element.
    pub fn high(&self) -> u64 {
        self.high
    }

    /// An upper bound of the number of elements.
    pub fn most_elements(&self) -> u64 {
        self.axes.iter().fold(1, |n, &(extent, _)| n.saturating_mul(extent))
    }

    /// True if no element is in both sets.
    pub fn is_disjoint(&self, other: &Set) -> bool {
        if self.high < other.low || other.high < self.low {
            return true;
        }
        let radix = Radix::new([self, other].into_iter());
        let (Some(ours), Some(theirs)) = (radix.boxes(self), radix.boxes(other)) else { return false };
        ours.len() * theirs.len() <= MOST * MOST && ours.iter().all(|a| theirs.iter().all(|b| !meet(a, b)))
    }

    /// True if every element is in one of `parts`.
    pub fn is_covered(&self, parts: &[Set]) -> bool {
        if parts.contains(self) {
            return true;
        }
        let touching = || parts.iter().filter(|p| p.low <= self.high && self.low <= p.high);
        let radix = Radix::new(touching().chain([self]));
        let Some(mut rest) = radix.boxes(self) else { return false };
        for part in touching() {
            let Some(cuts) = radix.boxes(part) else { continue };
            for cut in &cuts {
                let mut left = Vec::with_capacity(rest.len());
                rest.into_iter().for_each(|piece| subtract(piece, cut, &mut left));
                rest = left;
                if rest.len() > MOST {
                    return false;
                }
            }
        }
        rest.is_empty()
    }
}

/// True if nested strides prove that no two indices of an access share an element: each stride exceeds the reach of all finer
/// axes.
pub fn is_injective(access: &Access) -> bool {
    if access.shape.contains(&0) {
        return true;
    }
    let moving = access.shape.iter().zip(&access.strides).filter(|&(&extent, _)| extent > 1);
    let mut axes: Vec<_> = moving.map(|(&extent, &stride)| (stride.unsigned_abs() as u128, extent as u128)).collect();
    axes.sort_unstable();
    let mut reach = 0u128;
    axes.into_iter().all(|(stride, extent)| {
        let clear = stride > reach;
        reach = stride.saturating_mul(extent - 1).saturating_add(reach);
        clear
    })
}

/// A range of digits per stride.
type Digits = Vec<(u64, u64)>;

/// Strides from 1 on, of which each divides the next.
struct Radix(Vec<u64>);

impl Radix {
    /// A radix of strides of the sets. A stride that does not fit to the others is left out.
    fn new<'a>(sets: impl Iterator<Item = &'a Set>) -> Radix {
        let mut chain = vec![1];
        for &(_, stride) in sets.flat_map(|s| &s.axes) {
            let at = chain.partition_point(|&s| s <= stride);
            let next = chain.get(at);
            if chain[at - 1] != stride && stride % chain[at - 1] == 0 && next.is_none_or(|n| n % stride == 0) {
                chain.insert(at, stride);
            }
        }
        Radix(chain)
    }

    /// The set's elements as boxes, or `None` if they are too many.
    fn boxes(&self, set: &Set) -> Option<Vec<Digits>> {
        let Radix(chain) = self;
        let mut extents = vec![1u64; chain.len()];
        // An axis whose stride is not in the radix is split into its elements.
        let mut lows = vec![set.low];
        for &(extent, stride) in &set.axes {
            match chain.binary_search(&stride) {
                Ok(digit) => extents[digit] = extent,
                Err(_) => {
                    if (lows.len() as u64).saturating_mul(extent) > MOST as u64 {
                        return None;
                    }
                    lows = lows.iter().flat_map(|low| (0..extent).map(move |i| low + i * stride)).collect();
                }
            }
        }
        // Go through the digits from the lowest. A range beyond the end of a digit is carried into the next.
        let mut open: Vec<(Digits, u64, u64)> = lows.into_iter().map(|low| (Vec::new(), low, extents[0])).collect();
        for digit in 0..chain.len() {
            let radix = chain.get(digit + 1).map(|next| next / chain[digit]);
            let above = extents.get(digit + 1).copied().unwrap_or(1);
            let mut done = Vec::with_capacity(open.len());
            for (digits, from, extent) in open {
                let mut push = |range, from, extent| {
                    let mut digits = digits.clone();
                    digits.push(range);
                    done.push((digits, from, extent));
                };
                let Some(radix) = radix else {
                    push((from, from + extent), 0, 1);
                    continue;
                };
                let (start, next) = (from % radix, from / radix);
                let end = start + extent;
                if end <= radix {
                    push((start, end), next, above);
                    continue;
                }
                let (first, last) = (u64::from(start > 0), end / radix);
                if start > 0 {
                    push((start, radix), next, above);
                }
                if first < last {
                    push((0, radix), next + first, above + (last - first - 1));
                }
                if end % radix > 0 {
                    push((0, end % radix), next + last, above);
                }
            }
            if done.len() > MOST {
                return None;
            }
            open = done;
        }
        Some(open.into_iter().map(|(digits, ..)| digits).collect())
    }
}

fn meet(a: &Digits, b: &Digits) -> bool {
    a.iter().zip(b).all(|(a, b)| a.0 < b.1 && b.0 < a.1)
}

/// Adds the part of `piece` that is not in `cut` to `left`.
fn subtract(mut piece: Digits, cut: &Digits, left: &mut Vec<Digits>) {
    if !meet(&piece, cut) {
        left.push(piece);
        return;
    }
    for digit in 0..piece.len() {
        let ((low, high), (from, to)) = (piece[digit], cut[digit]);
        let mut keep = |range| {
            let mut rest = piece.clone();
            rest[digit] = range;
            left.push(rest);
        };
        if low < from {
            keep((low, from));
        }
        if to < high {
            keep((to, high));
        }
        piece[digit] = (low.max(from), high.min(to));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::splitmix;
    use std::collections::HashSet;

    /// Small, so that sets often meet.
    fn access(mut random: impl FnMut() -> u64) -> Access {
        let mut below = |n| (random() % n) as usize;
        let shape: Vec<_> = (0..below(4)).map(|_| [0, 1, 1, 2, 2, 3, 3, 4, 5, 7][below(10)]).collect();
        let strides = shape.iter().map(|_| [0, 1, 1, 2, 3, 4, 6, 12, 24, -1, -6, 5][below(12)]).collect();
        Access { strides, shape: shape.into(), offset: 40 + below(30) as isize }
    }

    fn elements(access: &Access) -> Vec<u64> {
        access.elements().map(|element| element as u64).collect()
    }

    fn set(access: &Access) -> Result<Option<Set>, String> {
        Set::new(access, std::iter::empty())
    }

    #[test]
    fn sets_agree_with_enumeration() {
        let mut random = splitmix(1);
        let (mut disjoint, mut covered, mut injective) = (0, 0, 0);
        for _ in 0..30_000 {
            let accesses: Vec<_> = (0..4).map(|_| access(&mut random)).collect();
            let all: Vec<_> = accesses.iter().map(elements).collect();
            let Ok(sets) = accesses.iter().map(set).collect::<Result<Vec<_>, _>>() else {
                assert!(accesses.iter().any(|a| a.span().is_some_and(|(low, _)| low < 0)));
                continue;
            };
            if is_injective(&accesses[0]) {
                injective += 1;
                assert_eq!(all[0].iter().collect::<HashSet<_>>().len(), all[0].len(), "{:?}", accesses[0]);
            }
            let Some(first) = &sets[0] else {
                assert!(all[0].is_empty());
                continue;
            };
            assert_eq!((first.low, first.high), (*all[0].iter().min().unwrap(), *all[0].iter().max().unwrap()));
            let parts: Vec<_> = sets[1..].iter().flatten().cloned().collect();
            let union: HashSet<_> = all[1..].iter().flatten().collect();
            let (cover, meets) = (all[0].iter().all(|e| union.contains(e)), all[0].iter().any(|e| union.contains(e)));
            assert_eq!(first.is_covered(&parts), cover, "{accesses:?}");
            assert_eq!(parts.iter().all(|p| first.is_disjoint(p) && p.is_disjoint(first)), !meets, "{accesses:?}");
            disjoint += usize::from(!meets);
            covered += usize::from(cover);
        }
        assert!(disjoint > 1000 && covered > 300 && injective > 1000, "{disjoint} {covered} {injective}");
    }

    #[test]
    fn size_does_not_matter() {
        let whole = Access::contiguous([1 << 20, 1 << 20, 2].into());
        let pairs = [0, 1].map(|i| set(&whole.slice(2, i, 1, 1)).unwrap().unwrap());
        let all = set(&whole).unwrap().unwrap();
        assert_eq!(Some(&all), Set::first(1 << 41).as_ref());
        assert!(all.is_covered(&pairs) && !all.is_covered(&pairs[..1]) && pairs[0].is_disjoint(&pairs[1]));
        for absurd in [[usize::MAX, 2, 1], [1, usize::MAX, usize::MAX]] {
            let access = Access { shape: absurd.to_vec().into(), strides: vec![isize::MIN, isize::MAX, 1], offset: 3 };
            assert!(set(&access).is_err());
        }
    }
}
