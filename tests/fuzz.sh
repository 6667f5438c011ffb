#!/usr/bin/env bash
# Searches for files that end a reader in a panic, or make it take memory out of proportion: bash tests/fuzz.sh [SECONDS [READER...]]
#
# Each reader is searched for SECONDS (default: 60) by libFuzzer, which keeps mutants that reach code that none reached before. Needs a C++
# compiler, and no nightly Rust. What is found goes below target/fuzz: move it to tests/corpus/READER, where the tests read it from then on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-60}
shift || true
readers=("$@")
[[ ${#readers[@]} -gt 0 ]] || readers=($(sed -n 's/^    Reader { name: "\([a-z]*\)".*/\1/p' tests/fuzz/readers.rs))

host=$(rustc -vV | sed -n 's/^host: //p')
target=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
mkdir -p "$target"
# Each mutant is a file for a moment, in memory where there is some.
FOLDER=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
export FOLDER
trap 'rm -rf "$FOLDER"' EXIT

# Counts which edges run, and shows libFuzzer what is compared with what. A target is named so that build scripts run without.
flags=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares)
RUSTFLAGS="${flags[*]}" cargo build --quiet --release --manifest-path tests/fuzz/Cargo.toml --target "$host" --target-dir "$target"

failed=0
for reader in "${readers[@]}"; do
    found=$target/$reader
    mkdir -p "$found/corpus"
    echo "fuzz.sh: $reader for $seconds s" >&2
    # The first start writes the seeds, which the second one reads.
    READER=$reader SEEDS=$found/corpus "$target/$host/release/fuzz" -runs=0 >"$found/seeds.log" 2>&1 || {
        cat "$found/seeds.log" >&2
        exit 1
    }
    READER=$reader "$target/$host/release/fuzz" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=65536 -print_final_stats=1 \
        -verbosity=0 -artifact_prefix="$found/" "$found/corpus" || failed=1
done
exit "$failed"
