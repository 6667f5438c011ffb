#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, on a machine that has one and no Rust:
#
#     bash tests/gpu.sh FOLDER [MODELS]
#
# FOLDER holds the built binaries, as in target/release: plimsoll, and below it or in deps/ the integration tests, it-*
# (cargo build --release && cargo test --release --no-run --test it). MODELS is a folder of exported models
# (tests/compare/export_models.py); without it, those of graphs/ serve. Prints one summary, and writes it to $OUT/gpu-summary.md
# if OUT is set. Exit code 1 if anything failed.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:?usage: tests/gpu.sh FOLDER [MODELS]}
models=${2:-}
# Seconds that a test may take, and further flags of gpu_compare.py.
limit=${LIMIT:-600}
read -ra compare <<<"${COMPARE:-}"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
failed=0

plimsoll=$folder/plimsoll
chmod +x "$plimsoll" 2>/dev/null

# The newest binary of the integration tests.
tests=$(find "$folder" -maxdepth 2 -type f -name 'it-*' ! -name '*.*' -printf '%T@ %p\n' 2>/dev/null | sort -rn | head -1 | cut -d' ' -f2-)
[[ -n $tests ]] && chmod +x "$tests" 2>/dev/null

# step NAME COMMAND...: runs it, keeps its log, notes how it went.
step() {
    local name=$1 start=$SECONDS log
    shift
    log=$logs/$(tr -c 'a-z0-9\n' _ <<<"${name,,}")
    echo "== $name"
    if "$@" >"$log" 2>&1; then
        summary+=("| $name | ok | $((SECONDS - start)) s |")
    else
        summary+=("| $name | **failed** ($?) | $((SECONDS - start)) s |")
        failed=1
        tail -40 "$log"
    fi
    [[ -n ${OUT:-} ]] && cp "$log" "$OUT/"
    return 0
}

skip() {
    echo "== $1: not run: $2"
    summary+=("| $1 | not run: $2 | |")
}

# tested NAME ARGUMENTS...: tests as a step, if they were built.
tested() {
    local name=$1
    shift
    if [[ -n $tests ]]; then step "$name" env "${with[@]}" timeout "$limit" "$tests" "$@"; else skip "$name" "no binary"; fi
}

# What a command that ran beside others printed, and how it ended.
ended() {
    cat "$2"
    return "$1"
}

# The graphs here, each held against what the CPU made of it; what follows the backend goes to plimsoll run.
graphs=(digits.onnx:batch=64 mlp.onnxtxt:batch=8 attention.onnxtxt:batch=2,sequence=64 residual.onnxtxt:batch=2,height=8,width=8
    decode.onnxtxt:batch=2,past=100 experts.onnxtxt:tokens=16 unet.onnxtxt:batch=1,height=16,width=16)

run_graphs() {
    local backend=$1 model
    shift
    for model in "${graphs[@]}"; do
        local flags=() dim
        for dim in $(tr , ' ' <<<"${model#*:}"); do flags+=(--set "$dim"); done
        local file=$root/graphs/${model%%:*} out=$logs/${model%%:*}
        "$plimsoll" run "$file" "${flags[@]}" --backend cpu --output-dir "$out" >/dev/null || return 1
        local expect=() array
        for array in "$out"/*.npy; do expect+=(--expect "$(basename "$array" .npy)=$array"); done
        echo "# $model on $backend"
        "$plimsoll" run "$file" "${flags[@]}" --backend "$backend" "${expect[@]}" --rtol 1e-4 --atol 1e-4 "$@" || return 1
    done
}

# One plan for a range of shapes: its bindings in turn, and the bytes that it keeps.
ranges() {
    local turn=32,16,64,1,32
    "$plimsoll" bench "$root/graphs/digits.onnx" --set batch=1..64 --at batch=$turn --iters 1000 --backend "$1" &&
        "$plimsoll" bench "$root/graphs/attention.onnxtxt" --set batch=2 --set sequence=1..64 --at sequence=$turn --iters 1000 --backend "$1"
}

digits() {
    "$plimsoll" run "$root/graphs/digits.onnx" --backend "$1" --input "image=$root/graphs/digits-images.npy" \
        --labels "$root/graphs/digits-labels.npy"
}

bench() {
    local backend
    for backend in cuda wgpu cpu; do
        "$plimsoll" bench "$root/graphs/digits.onnx" --set batch=256 --backend "$backend" --iters 50 | head -7
    done
    "$plimsoll" compare "$root/graphs/digits.onnx" --set batch=256 --backend cuda
}

# First with an empty cache of kernels, then with what that left.
start_up() {
    local cache=$logs/cache
    for _ in cold warm; do
        local begin=$EPOCHREALTIME
        PLIMSOLL_CACHE_DIR=$cache "$plimsoll" run "$root/graphs/digits.onnx" --set batch=64 --backend cuda >/dev/null || return 1
        awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.3f s from start to result\n", b - a }'
    done
}

card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)
echo "card and driver: ${card:-none}"
step devices "$plimsoll" devices
cat "$logs/devices"

# Of the backends, only the one in question; and it must be there.
with=(PLIMSOLL_BACKENDS=cuda PLIMSOLL_REQUIRE_CUDA=1)
step "graphs on CUDA" run_graphs cuda --placement
step "graphs on CUDA, dead memory spoilt" run_graphs cuda --poison
step "ranges on CUDA" ranges cuda
step "digits on CUDA" digits cuda
# These start the program where cargo built it, which is on another machine, and ask for the CPU.
built_here=(--skip every_sample_is_of_a_type_that_the_table_lists --skip rows_without_a_softmax_are_found)
tested "op table on CUDA" ops:: "${built_here[@]}" --test-threads=1
tested "op table on CUDA, its tests side by side" ops:: "${built_here[@]}"
tested "kernel cases on CUDA" backend::every_case_agrees_on_cuda
tested "attention of cuDNN" backend::attention_of_the_library
tested "ranks of two cards" cuda::ranks::cards --nocapture
tested "a training on two cards" cuda::ranks::a_training --nocapture
tested "memory audit" cuda::audit --nocapture
# Side by side: they take long, and nothing is timed.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
names=() pids=()
# sanitized NAME PROGRAM ARGUMENTS...: by each of the sanitizer's tools.
sanitized() {
    local of=$1 tool name
    shift
    for tool in memcheck racecheck initcheck synccheck; do
        name="$tool of $of"
        if [[ -z $sanitizer || -z $1 ]]; then
            skip "$name" "compute-sanitizer or the test is missing"
            continue
        fi
        env "${with[@]}" timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" >"$logs/${name// /_}.found" 2>&1 &
        names+=("$name") pids+=($!)
    done
}
sanitized "the op table in f32" "$tests" ops::every_row_agrees_with_the_reference_on_every_backend
sanitized "the op table in halves" "$tests" ops::every_row_agrees_with_the_reference_in_halves
sanitized "the kernel cases" "$tests" backend::every_case_agrees_on_cuda
sanitized "a decoder's step" "$plimsoll" run "$root/graphs/decode.onnxtxt" --set batch=1 --set past=2000 --backend cuda
for i in "${!names[@]}"; do
    wait "${pids[$i]}"
    step "${names[$i]}" ended $? "$logs/${names[$i]// /_}.found"
done
with=(PLIMSOLL_BACKENDS=wgpu PLIMSOLL_REQUIRE_WGPU=1)
step "graphs on wgpu" run_graphs wgpu --placement
step "graphs on wgpu, dead memory spoilt" run_graphs wgpu --poison
step "ranges on wgpu" ranges wgpu
tested "op table on wgpu" ops:: "${built_here[@]}"
tested "kernel cases on wgpu" backend::wgpu::
step "start-up" start_up
step "bench" bench
if [[ -n $models ]] && python3 -c 'import numpy, onnxruntime' 2>/dev/null; then
    step "exported models" python3 "$root/tests/compare/compare_models.py" "$models" --backend cuda --plimsoll "$plimsoll"
else
    skip "exported models" "no folder of models, or no onnxruntime"
fi
if [[ -n $models ]] && python3 -c 'import torch, transformers' 2>/dev/null; then
    step "against PyTorch" python3 "$root/tests/compare/gpu_compare.py" "$models" --plimsoll "$plimsoll" "${compare[@]}"
else
    skip "against PyTorch" "no folder of models, or no PyTorch"
fi

report() {
    echo "# plimsoll on ${card:-no NVIDIA GPU}, $(date -u +%F)"
    echo
    echo "| what | result | time |"
    echo "|---|---|---|"
    printf '%s\n' "${summary[@]}"
    local name
    for name in devices memory_audit ranges_on_cuda ranges_on_wgpu start_up bench against_pytorch; do
        [[ -s $logs/$name ]] && printf '\n## %s\n```\n%s\n```\n' "$name" "$(cat "$logs/$name")"
    done
}
report
[[ -n ${OUT:-} ]] && report >"$OUT/gpu-summary.md"
exit "$failed"
