//! Reports: what tables, sizes and blocks of text look like.

use plimsoll::internals::eager::compare::{Column, Comparison, Measured, Outcome};
use plimsoll::internals::plan::{self, Plan, Program, Segment, Summary};
use plimsoll::internals::report::{Table, bytes, comparison, grouped, memory, plain};
use plimsoll::{Class, Memory, Target, Usage};

#[test]
fn bytes_are_readable_and_exact() {
    assert_eq!(bytes(0), "0 B (0 bytes)");
    assert_eq!(bytes(1023), "1023 B (1,023 bytes)");
    assert_eq!(bytes(1_572_864), "1.50 MiB (1,572,864 bytes)");
    assert_eq!(bytes(u64::MAX), "16.00 EiB (18,446,744,073,709,551,615 bytes)");
    assert_eq!(["12", "123", "1,234", "12,345,678"], [12, 123, 1234, 12345678].map(grouped));
}

#[test]
fn control_characters_are_escaped() {
    let name = "\u{1b}]0;title\u{7}\u{9b}2J\r";
    assert_eq!(plain(name), "\\u{1b}]0;title\\u{7}\\u{9b}2J\\r");
    assert_eq!(plain("größer\n\ta\n"), "größer\n\ta\n");
    let mut table = Table::new("<");
    table.row(["a\nb\u{1b}[2J", "c"]);
    assert_eq!(table.to_string(), "a\\nb\\u{1b}[2J  c\n");
}

#[test]
fn cells_line_up() {
    let mut table = Table::new("<>");
    table.row(["", "a", "größer"]);
    table.row(["name", "1000", "2"]);
    table.row(["x"]);
    assert_eq!(table.to_string(), "         a  größer\nname  1000       2\nx\n");
    let mut table = Table::new("><");
    table.row(["1", "word", "word"]);
    table.row(["10", "x", ""]);
    assert_eq!(table.to_string(), " 1  word  word\n10  x\n");
}

#[test]
fn the_memory_block_adds_up() {
    let segment = |class, bytes| Segment { class, memory: Memory::Device, bytes };
    let mut plan = Plan {
        version: plan::VERSION,
        target: Target::cpu(1),
        tuned: None,
        runs: 1,
        origin: None,
        mesh: None,
        stage: 0,
        choices: Vec::new(),
        segments: vec![segment(Class::Activation, 2048), segment(Class::Constant, 2048)],
        programs: vec![Program {
            name: "m".into(),
            graph: None,
            dims: Vec::new(),
            measured: 0,
            recompute: None,
            shards: Vec::new(),
            summary: Summary { lower_bound: 2000, unshared_bytes: 4096, ..Summary::default() },
            buffers: Vec::new(),
            constants: Vec::new(),
            state: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            kernels: Vec::new(),
            steps: Vec::new(),
        }],
    };
    let block = memory(plan.first(), Some(Usage { bytes: 4000, pinned: 0, allocations: 4, overhead: Some(100) }));
    let expected = "\
planned                4.00 KiB  4,096 bytes
allocated              3.91 KiB  4,000 bytes  96 fewer than planned
  constants            2.00 KiB  2,048 bytes                 50.0 %
  arena                2.00 KiB  2,048 bytes                 50.0 %
arena's lower bound    1.96 KiB  2,000 bytes  the arena is 2.4 % over
arena without sharing  4.00 KiB  4,096 bytes  the arena is 50.0 %
beside the plan           100 B    100 bytes  the driver's
";
    let squeeze = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(squeeze(&block), squeeze(expected), "{block}");
    plan.programs[0].summary.lower_bound = 2048;
    let block = memory(plan.first(), Some(Usage { bytes: 4096, pinned: 0, allocations: 4, overhead: Some(0) }));
    assert!(block.contains("as planned") && block.contains("reached"), "{block}");
    assert!(!block.contains("beside"), "{block}");
    let block = memory(plan.first(), Some(Usage { bytes: 4096, pinned: 0, allocations: 4, overhead: None }));
    assert!(block.contains("beside the plan  not known"), "{block}");
    assert!(!memory(plan.first(), None).contains("allocated"));
}

#[test]
fn a_column_that_does_not_fit_says_why() {
    let measured = Measured {
        peak_live_bytes: 1000,
        peak_reserved_bytes: 2048,
        fragmentation: 0.5,
        driver_calls_first: 3,
        driver_calls_last: 0,
        median_ms: 0.25,
        agreement: None,
    };
    let refused = Outcome::Refused { does_not_fit: "too large".into() };
    let column = |name: &str, outcome| Column {
        name: name.into(),
        exact: true,
        launches: 7,
        staging_bytes: 0,
        smallest_device_bytes: 1 << 21,
        outcome,
    };
    let text = comparison(
        "mlp.onnx (batch=8)",
        &Comparison {
            model: "m".into(),
            target: "cpu".into(),
            memory_limit: Some(4096),
            runs: 21,
            reference: Some("planned".into()),
            columns: vec![column("eager bfc", refused), column("planned", Outcome::Ran(measured))],
        },
    );
    let expected = "\
mlp.onnx (batch=8) on cpu, 21 runs each, at most 4.00 KiB (4,096 bytes)

                                 eager bfc    planned
kernel launches                          7          7
peak live                                -     1000 B
  bytes                                  -      1,000
peak reserved                            -   2.00 KiB
  bytes                                  -      2,048
smallest device that fits         2.00 MiB   2.00 MiB
  bytes                          2,097,152  2,097,152
fragmentation                            -     50.0 %
driver calls, load and run 1             -          3
driver calls, run 21                     -          0
median run                               -   0.250 ms
results                       does not fit  reference
";
    assert_eq!(&text[..expected.len()], expected);
    assert!(text.ends_with("eager bfc: too large\n"), "{text}");
}

/// A name from a file may be longer than any line, and a table has it in one row alone.
#[test]
fn a_cell_beyond_any_page_widens_no_other() {
    let mut table = plimsoll::internals::report::Table::new("<>");
    table.row(["n".repeat(100_000), "1".into()]);
    table.row(["m".to_owned(), "2".to_owned()]);
    let text = table.to_string();
    let lengths: Vec<_> = text.lines().map(str::len).collect();
    assert_eq!(lengths, [100_003, 203]);
}
