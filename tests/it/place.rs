//! Placement: the result alone, against brute force, against its quality bars, and from the command line.

use crate::common;
use plimsoll::Error;
use plimsoll::internals::place::{Effort, Item, Problem, Solution, Table, place, place_below};
use plimsoll::internals::plan::check::placement;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}

fn random_problem(random: &mut Random, most: u64, aligned: bool) -> Problem {
    let (count, times, sizes) = (random.below(most + 1), 1 + random.below(12), 1 + random.below(40));
    let items = (0..count).map(|_| {
        let lower = random.below(times);
        let align = if aligned { 1 << random.below(5) } else { 1 };
        Item { lower, upper: lower + 1 + random.below(times), size: random.below(sizes), align }
    });
    let items = items.collect();
    let align = if aligned { 1 << random.below(4) } else { 1 };
    Problem::new(items, align).expect("it is sound")
}

/// The lowest peak, by trying every order: in one of them, each item is as low as possible above the earlier ones.
fn optimum(problem: &Problem) -> u64 {
    fn go(items: &[Item], open: &mut Vec<usize>, placed: &mut Vec<(usize, u64)>, peak: u64, best: &mut u64) {
        if peak >= *best {
            return;
        }
        if open.is_empty() {
            *best = peak;
        }
        for at in 0..open.len() {
            let index = open.swap_remove(at);
            let item = items[index];
            // Items that were placed before are below this one wherever they overlap in time.
            let meets = |other: &Item| other.lower < item.upper && item.lower < other.upper;
            let below = placed.iter().filter(|(other, _)| meets(&items[*other]));
            let offset = below.map(|(other, offset)| offset + items[*other].size).max().unwrap_or(0);
            placed.push((index, offset));
            go(items, open, placed, peak.max(offset + item.size), best);
            placed.pop();
            open.push(index);
            let last = open.len() - 1;
            open.swap(at, last);
        }
    }
    let mut best = u64::MAX;
    go(problem.items(), &mut (0..problem.items().len()).collect(), &mut Vec::new(), 0, &mut best);
    best
}

#[test]
fn a_hundred_thousand_random_instances() {
    let mut random = Random(1);
    for round in 0..100_000 {
        let problem = random_problem(&mut random, 14, round % 2 == 0);
        let solution = place(&problem, Effort::Steps(if round % 10 == 0 { 300_000 } else { 20_000 }));
        let bound = placement(&problem, &solution).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
        assert!(bound <= solution.peak && bound == problem.lower_bound(), "{problem:?}");
        assert!(bound <= solution.proved && solution.proved <= solution.peak, "{problem:?} {solution:?}");
    }
}

/// The largest sizes and times: refused, or placed without an overflow.
#[test]
fn giant_instances_are_refused_or_placed() {
    let mut random = Random(4);
    let (mut refused, mut placed) = (0, 0);
    for _ in 0..3000 {
        let count = 1 + random.below(12);
        let most = u64::MAX / count;
        let items = (0..count).map(|_| {
            let (a, b) = (random.below(u64::MAX), random.below(u64::MAX));
            let (more, bits) = (random.below(16), 1 + random.below(60));
            let size = most.saturating_add(more).saturating_sub(random.below(1 << bits));
            Item { lower: a.min(b), upper: a.max(b).saturating_add(1), size, align: 1 << random.below(64) }
        });
        let items = items.collect();
        let Ok(problem) = Problem::new(items, 1 << random.below(20)) else {
            refused += 1;
            continue;
        };
        let solution = place(&problem, Effort::Steps(20_000));
        let bound = placement(&problem, &solution).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
        assert!(bound <= solution.peak);
        placed += 1;
    }
    assert!(refused > 300 && placed > 300, "{refused} {placed}");
}

#[test]
fn small_instances_are_placed_at_their_optimum() {
    // With eight items or more, the optimum can be above the lower bound, which is 4 here.
    let gap = [(3, 6, 2), (2, 4, 1), (6, 7, 2), (1, 3, 1), (0, 2, 2), (1, 4, 1), (4, 6, 2), (0, 1, 2)];
    let gap = gap.map(|(lower, upper, size)| Item { lower, upper, size, align: 1 });
    let gap = Problem::new(gap.to_vec(), 1).expect("it is sound");
    let solution = place(&gap, Effort::Steps(1_000_000));
    assert_eq!((gap.lower_bound(), optimum(&gap), solution.peak, solution.proved), (4, 5, 5, 5));
    let mut random = Random(2);
    for _ in 0..5000 {
        let problem = random_problem(&mut random, 6, false);
        let solution = place(&problem, Effort::Steps(1_000_000));
        assert!(solution.peak == optimum(&problem) && solution.is_optimal(), "{problem:?} {solution:?}");
    }
}

/// Mutates a good placement: each mutant is rejected, or is still a placement by definition.
#[test]
fn mutants_are_rejected_or_still_right() {
    let is_right = |problem: &Problem, solution: &Solution| {
        let (items, offsets) = (problem.items(), &solution.offsets);
        let end = |i: usize| offsets[i] + items[i].size.next_multiple_of(problem.align());
        let some = |i: usize| items[i].size > 0;
        let apart = |i: usize, j: usize| {
            let (a, b) = (items[i], items[j]);
            a.upper <= b.lower || b.upper <= a.lower || end(i) <= offsets[j] || end(j) <= offsets[i]
        };
        (0..items.len()).all(|i| offsets[i] % items[i].align.max(problem.align()) == 0)
            && (0..items.len()).all(|i| (0..i).all(|j| !some(i) || !some(j) || apart(i, j)))
            && (0..items.len()).filter(|&i| some(i)).map(end).max().unwrap_or(0) == solution.peak
    };
    let mut random = Random(3);
    let (mut rejected, mut right) = (0, 0);
    for _ in 0..20_000 {
        let problem = random_problem(&mut random, 12, true);
        if problem.items().len() < 2 {
            continue;
        }
        let mut solution = place(&problem, Effort::Steps(20_000));
        let (a, b) = (random.below(solution.offsets.len() as u64), random.below(solution.offsets.len() as u64));
        match random.below(5) {
            0 => solution.offsets[a as usize] += 1 << random.below(6),
            1 => solution.offsets[a as usize] = random.below(solution.peak + 1),
            2 => solution.offsets.swap(a as usize, b as usize),
            3 => solution.peak = (solution.peak + random.below(3)).saturating_sub(1),
            _ => {
                solution.offsets.pop();
            }
        }
        let verdict = placement(&problem, &solution);
        let complete = solution.offsets.len() == problem.items().len();
        assert_eq!(verdict.is_ok(), complete && is_right(&problem, &solution), "{problem:?} {solution:?} {verdict:?}");
        *(if verdict.is_ok() { &mut right } else { &mut rejected }) += 1;
    }
    assert!(rejected > 5000 && right > 500, "{rejected} {right}");
}

/// A rectangle of 1024 x 1024 units cut into blocks: it can be placed without a gap, and the first fits are far from it.
fn cut(random: &mut Random, count: usize) -> Problem {
    let mut blocks = vec![(0, 1024, 0, 1024)];
    while blocks.len() < count {
        let largest = (0..blocks.len()).max_by_key(|&i| {
            let (t0, t1, a0, a1): (u64, u64, u64, u64) = blocks[i];
            ((t1 - t0) * (a1 - a0), i)
        });
        let (t0, t1, a0, a1) = blocks.swap_remove(largest.expect("there is one"));
        let by_time = if random.below(2) == 0 { t1 - t0 > 4 } else { a1 - a0 <= 4 };
        if by_time {
            let at = t0 + 1 + random.below(t1 - t0 - 1);
            blocks.extend([(t0, at, a0, a1), (at, t1, a0, a1)]);
        } else {
            let at = a0 + 1 + random.below(a1 - a0 - 1);
            blocks.extend([(t0, t1, a0, at), (t0, t1, at, a1)]);
        }
    }
    let item =
        |(lower, upper, from, to): (u64, u64, u64, u64)| Item { lower, upper, size: (to - from) << 10, align: 1 };
    let mut items: Vec<Item> = blocks.into_iter().map(item).collect();
    items.sort_by_key(|item| (item.size ^ item.lower, item.upper));
    Problem::new(items, 1).expect("it is sound")
}

#[test]
fn what_was_cut_from_a_rectangle_fits_into_it() {
    for seed in 0..8 {
        let problem = cut(&mut Random(seed), 60 + 10 * seed as usize);
        assert_eq!(problem.lower_bound(), 1 << 20);
        let solution = place(&problem, Effort::Steps(200_000_000));
        assert_eq!(placement(&problem, &solution).expect("it is sound"), 1 << 20);
        assert_eq!(solution.peak, 1 << 20, "seed {seed}");
    }
}

/// Large enough for the search to take only a part of the items at once, and for windows.
#[test]
fn large_instances_are_placed_soundly() {
    let mut random = Random(7);
    for (life, most) in [(30, 1.02), (400, 1.05), (3000, 1.05)] {
        let items = (0..4000).map(|at| {
            let skew = 1 + random.below(20) * random.below(20);
            Item {
                lower: at,
                upper: at + 1 + random.below(life) / skew,
                size: 256 * (1 + random.below(4000)),
                align: 1,
            }
        });
        let problem = Problem::new(items.collect(), 1).expect("it is sound");
        let greedy = place(&problem, Effort::Steps(0));
        let solution = place(&problem, Effort::Steps(150_000_000));
        let bound = placement(&problem, &solution).unwrap_or_else(|error| panic!("life {life}: {error}"));
        assert!(
            solution.peak <= greedy.peak && solution.peak as f64 <= most * bound as f64,
            "{life}: {}",
            solution.peak
        );
    }
}

/// The best peak of a greedy allocator: items in one of several orders, each put into the lowest gap or the smallest.
fn portfolio(problem: &Problem) -> u64 {
    let items = problem.items();
    let area = |item: &Item| u128::from(item.size) * u128::from(item.upper - item.lower);
    let keys: [&dyn Fn(&Item) -> (u128, u64); 5] = [
        &|item| (u128::from(u64::MAX - item.lower), item.size),
        &|item| (u128::from(item.size), item.upper - item.lower),
        &|item| (area(item), item.size),
        &|item| (u128::from(item.upper - item.lower), item.size),
        &|item| (u128::from(item.upper), item.size),
    ];
    let lay = |key: &dyn Fn(&Item) -> (u128, u64), smallest: bool| {
        let mut order: Vec<&Item> = items.iter().collect();
        order.sort_by_key(|item| std::cmp::Reverse(key(item)));
        let mut placed: Vec<(u64, &Item)> = Vec::new();
        for item in order {
            let meets = |other: &&(u64, &Item)| other.1.lower < item.upper && item.lower < other.1.upper;
            let (mut end, mut rooms) = (0, Vec::new());
            for (offset, other) in placed.iter().filter(meets) {
                if end + item.size <= *offset {
                    rooms.push((offset - end, end));
                }
                end = end.max(offset + other.size);
            }
            let room = if smallest { rooms.iter().min() } else { rooms.first() };
            let offset = room.map_or(end, |room| room.1);
            placed.insert(placed.partition_point(|other| other.0 < offset), (offset, item));
        }
        placed.iter().map(|(offset, item)| offset + item.size).max().unwrap_or(0)
    };
    keys.iter().flat_map(|key| [lay(key, false), lay(key, true)]).min().unwrap_or(0)
}

/// Layers whose results are kept until their gradients are made, last first; between them temporaries of the same few sizes.
fn training(random: &mut Random, layers: u64) -> Problem {
    let sizes = [256, 4096, 1 << 18, 1 << 20, 3 << 20];
    let mut items = Vec::new();
    for layer in 0..layers {
        let (forward, backward) = (10 * layer, 20 * (2 * layers - layer));
        let mut add = |lower, upper, size| items.push(Item { lower, upper, size, align: 1 });
        add(0, 40 * layers, sizes[random.below(4) as usize]);
        for _ in 0..6 {
            add(forward + random.below(10), backward + random.below(20), sizes[random.below(5) as usize]);
        }
        for (from, most) in [(forward, 3), (forward, 5), (backward, 4), (backward, 30)] {
            let lower = from + random.below(10);
            add(lower, lower + 1 + random.below(most), sizes[random.below(5) as usize] + 512 * random.below(9));
        }
    }
    Problem::new(items, 1).expect("it is sound")
}

/// The effort takes about a tenth of a second.
#[test]
fn a_short_search_comes_near_the_greedy_portfolio() {
    let mut random = Random(11);
    let stream = |random: &mut Random, count: u64, life: u64| {
        let item =
            |at| Item { lower: at, upper: at + 1 + random.below(life), size: 1 + random.below(1 << 20), align: 1 };
        Problem::new((0..count).map(item).collect(), 1).expect("it is sound")
    };
    let problems = [
        cut(&mut Random(31), 150),
        cut(&mut Random(32), 450),
        training(&mut random, 30),
        training(&mut random, 200),
        stream(&mut random, 3000, 40),
        stream(&mut random, 3000, 400),
    ];
    for problem in problems {
        let solution = place(&problem, Effort::Steps(50_000_000));
        let greedy = portfolio(&problem);
        assert!(solution.peak as f64 <= 1.05 * greedy as f64, "{} for {greedy}", solution.peak);
    }
}

#[test]
fn steps_decide_and_more_are_never_worse() {
    for seed in 10..14 {
        let problem = cut(&mut Random(seed), 120);
        let peaks = [0, 100_000, 1_000_000, 10_000_000, 30_000_000].map(|steps| {
            let [first, second] = [(); 2].map(|()| place(&problem, Effort::Steps(steps)));
            assert_eq!(first, second, "{steps} steps");
            first.peak
        });
        assert!(peaks.is_sorted_by(|a, b| a >= b), "{peaks:?}");
    }
}

/// A deadline in the past leaves the first placement. A deadline in the future ends a search that would go on.
#[test]
fn a_deadline_is_kept() {
    let mut random = Random(5);
    let items = (0..20_000).map(|at| {
        let lower = at + random.below(50);
        Item { lower, upper: lower + 1 + random.below(300), size: 1 + random.below(1 << 20), align: 64 }
    });
    let problem = Problem::new(items.collect(), 64).expect("it is sound");
    let first = place(&problem, Effort::Steps(0));
    assert_eq!(place(&problem, Effort::Until(Instant::now())), first);
    let mut last = first;
    for time in [Duration::from_millis(10), Duration::from_millis(400)] {
        let solution = place(&problem, Effort::Until(Instant::now() + time));
        placement(&problem, &solution).expect("it is sound");
        assert!(solution.peak <= last.peak, "{} after {}", solution.peak, last.peak);
        last = solution;
    }
    let ended = common::core_seconds(|| drop(place(&problem, Effort::Until(Instant::now()))));
    let whole = common::core_seconds(|| drop(place(&problem, Effort::Steps(300_000_000))));
    assert!(2.0 * ended < whole, "{ended} s until now, {whole} s for 300 million steps");
}

#[test]
fn a_bar_is_undercut_or_the_first_pass_is_all() {
    let problem = cut(&mut Random(21), 80);
    let free = place(&problem, Effort::Steps(0));
    assert!(free.peak > 1 << 20);
    let below = place_below(&problem, free.peak, Effort::Steps(100_000_000));
    assert!(below.peak < free.peak && placement(&problem, &below).is_ok());
    assert_eq!(place_below(&problem, 1 << 20, Effort::Steps(1_000_000)), free);
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("it can be made");
    folder
}

fn run(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll")).args(args).output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("it is text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_places_a_table() {
    let folder = folder("place");
    let [input, output] = ["in.csv", "out.csv"].map(|name| folder.join(name));
    let [input, output] = [&input, &output].map(|path| path.to_str().expect("it is text"));
    // The first two do not overlap in time, and the third overlaps both.
    std::fs::write(input, "id,lower,upper,size\na,0,2,4\nb,2,5,6\nc,1,3,10\n").expect("it can be written");
    let (code, out, err) = run(&["place", input, "-o", output, "--json"]);
    assert_eq!(code, Some(0), "{err}");
    let found = common::printed(&["place"], &out);
    assert_eq!((&found["peak"], &found["lower_bound"]), (&16.into(), &16.into()));
    assert_eq!((&found["gap_percent"], &found["buffers"]), (&0.0.into(), &3.into()));
    let table = Table::read(Path::new(output), 1).expect("it is a table");
    let text = std::fs::read_to_string(output).expect("it is there");
    let offsets = text.lines().skip(1).map(|line| line.rsplit(',').next().expect("a field").parse().expect("a number"));
    placement(&table.problem, &Solution { offsets: offsets.collect(), peak: 16, proved: 0 }).expect("it is sound");

    let (code, out, err) = run(&["place", input, "--capacity", "10", "--json"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("6 over"), "{err}");
    let found = common::printed(&["place"], &out);
    assert_eq!((&found["fits"], &found["deficit"]), (&false.into(), &6.into()));
    assert_eq!(run(&["place", input, "--capacity", "16"]).0, Some(0));
    let (code, out, _) = run(&["place", input, "--align", "8", "--deadline", "10ms"]);
    assert!(code == Some(0) && out.contains("24"), "{out}");

    std::fs::write(input, "id,lower,upper,size\na,0,2,4\na,2,1,6\n").expect("it can be written");
    let (code, _, err) = run(&["place", input]);
    assert!(code == Some(1) && err.contains("in.csv:3"), "{err}");
    let bad = [
        &["--deadline", "soon"][..],
        &["--deadline", "9999999999999999999s"],
        &["--align", "3"],
        &["--capacity", "-1"],
    ];
    std::fs::write(input, "id,lower,upper,size\na,0,2,4\n").expect("it can be written");
    for flags in bad {
        assert_eq!(run(&[&["place", input][..], flags].concat()).0, Some(1), "{flags:?}");
    }
}

#[test]
fn a_bad_file_does_not_stop_the_others() {
    let folder = folder("place-folder");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("it can be written");
    write("a.csv", "id,lower,upper,size\na,0,2,4\n");
    write("b.csv", "id,lower,upper\na,0,2\n");
    write("c.csv", "id,lower,upper,size\na,0,2,4\nb,1,3,5\n");
    let path = folder.to_str().expect("it is text");
    let (code, out, err) = run(&["place", path]);
    assert_eq!(code, Some(1));
    assert!(err.contains("b.csv:1:1: missing column 'size'"), "{err}");
    assert!(out.contains("a.csv") && out.contains("c.csv") && !out.contains("b.csv"), "{out}");
    assert_eq!(out.matches("optimal").count(), 2, "{out}");
    let (_, out, _) = run(&["place", path, "--capacity", "4", "--json"]);
    let found = common::printed(&["place"], &out);
    assert_eq!(
        (&found[0]["fits"], &found[0]["optimal"], &found[2]["deficit"]),
        (&true.into(), &true.into(), &5.into())
    );
    assert!(found[1]["error"].as_str().is_some_and(|error| error.contains("b.csv")), "{found}");
}

#[test]
fn names_are_unique() {
    let error = Table::parse(Path::new("x.csv"), "id,lower,upper,size\na,0,2,4\nb,0,2,4\na,2,3,6\n", 1).unwrap_err();
    assert!(matches!(error, Error::Syntax { line: 4, .. }), "{error}");
    assert!(error.to_string().contains("line 2"), "{error}");
}
