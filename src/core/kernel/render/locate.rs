//! Index arithmetic: where accesses read, in terms of a template's variables.

use crate::kernel::space::{Piece, Space};
use crate::shape::Access;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The coordinates of such axes as variables `p2` .. and the condition that all are within.
pub(super) fn within(
    beyond: &BTreeMap<usize, (bool, bool)>,
    coordinates: &BTreeMap<usize, String>,
    shape: &[usize],
    statements: &mut Vec<String>,
) -> String {
    let mut conditions = Vec::new();
    for (axis, (front, behind)) in beyond {
        statements.push(format!("let p{axis} = {};", coordinates[axis]));
        conditions.extend(front.then(|| format!("p{axis} >= 0")));
        conditions.extend(behind.then(|| format!("p{axis} < {}", shape[*axis])));
    }
    conditions.join(" && ")
}

/// How accesses read at a point of a space: statements, an address per access, the coordinate of every axis asked for.
pub(super) struct Located {
    pub(super) statements: Vec<String>,
    pub(super) addresses: Vec<String>,
    pub(super) coordinates: BTreeMap<usize, String>,
}

/// Coordinates within row-major `extents` of an index, as statements and expressions. Only what is `wanted` is computed.
pub(super) fn split(var: &str, extents: &[usize], wanted: &[bool], statements: &mut Vec<String>) -> Vec<String> {
    let mut coordinates = vec!["0".to_owned(); extents.len()];
    let mut inner = 1usize;
    let outermost = extents.iter().position(|&d| d != 1);
    for k in (0..extents.len()).rev() {
        if wanted[k] && extents[k] != 1 {
            let mut value = if inner > 1 { format!("u32({var}) / {inner}u") } else { format!("u32({var})") };
            if outermost != Some(k) {
                value = format!("{value} % {}u", extents[k]);
            }
            coordinates[k] = if value == format!("u32({var})") {
                var.to_owned()
            } else {
                statements.push(format!("let {var}_{k} = i32({value});"));
                format!("{var}_{k}")
            };
        }
        inner *= extents[k].max(1);
    }
    coordinates
}

/// `offset + sum(coordinate * stride)` as an expression.
pub(super) fn sum(offset: isize, terms: &[(&str, isize)]) -> String {
    let mut out = String::new();
    for &(coordinate, stride) in terms {
        if stride == 0 || coordinate == "0" {
            continue;
        }
        let sign = match (out.is_empty(), stride < 0) {
            (true, false) => "",
            (true, true) => "-",
            (false, false) => " + ",
            (false, true) => " - ",
        };
        out += sign;
        out += coordinate;
        if stride.unsigned_abs() != 1 {
            write!(out, " * {}", stride.unsigned_abs()).expect("writing to a string");
        }
    }
    match (out.is_empty(), offset) {
        (true, _) => out = offset.to_string(),
        (false, 0) => {}
        (false, o) if o < 0 => write!(out, " - {}", -o).expect("writing to a string"),
        (false, o) => write!(out, " + {o}").expect("writing to a string"),
    }
    out
}

/// Where each access reads, in terms of the space's variables. Neighbouring pieces that every access walks as one, and
/// whose coordinates nobody asks for, are merged.
pub(super) fn locate(space: &Space, accesses: &[&Access], asked: &BTreeSet<usize>) -> Located {
    let mut located = Located { statements: Vec::new(), addresses: Vec::new(), coordinates: BTreeMap::new() };
    let mut terms: Vec<Vec<(String, isize)>> = vec![Vec::new(); accesses.len()];
    let mut axes: BTreeMap<usize, Vec<(String, isize)>> = asked.iter().map(|&a| (a, Vec::new())).collect();
    // An operand of a row's result has no strides for the axes of the row.
    let along = |a: &Access, p: &Piece| a.strides.get(p.axis).copied().unwrap_or(0);
    let mut offsets: Vec<isize> = accesses.iter().map(|a| a.offset).collect();
    let mut origins: BTreeMap<usize, isize> = BTreeMap::new();
    for piece in space.iter().flat_map(|var| &var.pieces).filter(|p| p.start != 0) {
        offsets.iter_mut().zip(accesses).for_each(|(offset, a)| *offset += along(a, piece) * piece.start);
        *origins.entry(piece.axis).or_default() += piece.start;
    }
    let stride = |a: &Access, p: &Piece| along(a, p) * p.step;
    for var in space {
        // Per merged piece: extent, stride of every access, the one original piece if its coordinate is asked for.
        let mut merged: Vec<(usize, Vec<isize>, Option<Piece>)> = Vec::new();
        for piece in var.pieces.iter().filter(|p| p.extent != 1) {
            let strides: Vec<isize> = accesses.iter().map(|a| stride(a, piece)).collect();
            let named = (piece.step != 0 && asked.contains(&piece.axis)).then_some(*piece);
            match merged.last_mut() {
                Some((extent, outer, None))
                    if named.is_none() && outer.iter().zip(&strides).all(|(o, s)| *o == s * piece.extent as isize) =>
                {
                    *extent *= piece.extent;
                    *outer = strides;
                }
                _ => merged.push((piece.extent, strides, named)),
            }
        }
        let extents: Vec<usize> = merged.iter().map(|m| m.0).collect();
        // An access that is dense over the whole variable needs no coordinates.
        let dense = |a: usize| merged.windows(2).all(|w| w[0].1[a] == w[1].1[a] * w[1].0 as isize);
        let wanted: Vec<bool> = merged
            .iter()
            .map(|(_, strides, named)| named.is_some() || (0..accesses.len()).any(|a| strides[a] != 0 && !dense(a)))
            .collect();
        let coordinates = split(var.name, &extents, &wanted, &mut located.statements);
        for (a, terms) in terms.iter_mut().enumerate() {
            if dense(a) {
                terms.extend(merged.last().map(|m| (var.name.to_owned(), m.1[a])));
            } else {
                terms.extend(coordinates.iter().zip(&merged).map(|(c, m)| (c.clone(), m.1[a])));
            }
        }
        for (c, (_, _, named)) in coordinates.iter().zip(&merged) {
            if let Some(piece) = named {
                let axis = axes.get_mut(&piece.axis).expect("named because it was asked for");
                axis.push((c.clone(), piece.step));
            }
        }
    }
    let text = |offset, terms: &[(String, isize)]| {
        sum(offset, &terms.iter().map(|(c, s)| (c.as_str(), *s)).collect::<Vec<_>>())
    };
    located.addresses = offsets.iter().zip(&terms).map(|(offset, t)| text(*offset, t)).collect();
    let origin = |axis: usize| origins.get(&axis).copied().unwrap_or(0);
    located.coordinates = axes.into_iter().map(|(axis, t)| (axis, text(origin(axis), &t))).collect();
    located
}
