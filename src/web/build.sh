#!/usr/bin/env bash
# Builds the library of the page that `plimsoll web` writes: target/plimsoll.wasm, where the command looks for it.
# A program that is built with PLIMSOLL_WASM=FILE holds that file, and needs none beside it.
# Needs the target: rustup target add wasm32-unknown-unknown
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${CARGO_TARGET_DIR:-target}
cargo rustc --lib --crate-type cdylib --profile web --target wasm32-unknown-unknown --no-default-features --features web
mkdir -p "$folder"
cp "$folder/wasm32-unknown-unknown/web/plimsoll.wasm" "$folder/plimsoll.wasm"
wc -c "$folder/plimsoll.wasm"
