#!/usr/bin/env bash
# Builds the library of the page that `plimsoll web` writes: target/plimsoll.wasm, where the command looks for it.
# A program that is built with PLIMSOLL_WASM=FILE holds that file, and needs none beside it. PROFILE=dev builds it faster, and larger.
# Needs the target: rustup target add wasm32-unknown-unknown
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${CARGO_TARGET_DIR:-target}
profile=${PROFILE:-web}
cargo rustc --lib --crate-type cdylib --profile "$profile" --target wasm32-unknown-unknown --no-default-features --features web
mkdir -p "$folder"
cp "$folder/wasm32-unknown-unknown/${profile/#dev/debug}/plimsoll.wasm" "$folder/plimsoll.wasm"
wc -c "$folder/plimsoll.wasm"
