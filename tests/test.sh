#!/usr/bin/env bash
# Runs the tests: bash tests/test.sh [cargo test's arguments]
#
# The wgpu tests need a Vulkan driver, those of pages a Chromium. On Linux, where there is none, this installs Mesa's software driver and
# Debian's Chromium (Debian and its kin); where it may not, these tests say that they were skipped. CUDA's kernels are compiled by NVRTC,
# which is installed as a Python wheel below the target folder. With CI=true tests fail instead of being skipped. Long searches run in part
# unless PLIMSOLL_LONG=1 is set. PLIMSOLL_AARCH64=part or =all also runs tests of the CPU's kernels for 64-bit Arm,
# under qemu; PLIMSOLL_PAGE=1 builds the page's library, which its tests open in Chromium.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

vulkan=(mesa-vulkan-drivers libvulkan1)

has_vulkan() {
    /sbin/ldconfig -p | grep -F libvulkan.so.1 >/dev/null || return 1
    [[ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ]] && return 0
    compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null
}

has_chromium() {
    [[ -n "${PLIMSOLL_CHROMIUM:-}" ]] || command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null
}

# install WHAT PACKAGE ...
install() {
    local root=() what=$1
    shift
    command -v apt-get >/dev/null || return 1
    if [[ $(id -u) != 0 ]]; then
        # A password can only be asked for on a terminal.
        command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; } || return 1
        root=(sudo)
    fi
    echo "test.sh: no $what; installing $*" >&2
    "${root[@]}" apt-get update -qq &&
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

if [[ $(uname -s) == Linux ]] && ! has_vulkan && ! install "Vulkan driver" "${vulkan[@]}"; then
    echo "test.sh: no Vulkan driver and no way to install one: the wgpu tests cannot run." >&2
    echo "test.sh: to run them: apt-get install ${vulkan[*]}" >&2
fi

if [[ $(uname -s) == Linux ]] && ! has_chromium && ! install Chromium chromium; then
    echo "test.sh: no Chromium and no way to install it: pages are not opened in a browser." >&2
    echo "test.sh: to open them: apt-get install chromium" >&2
fi

# Mesa complains on every start where this is not set.
if [[ -z "${XDG_RUNTIME_DIR:-}" ]]; then
    XDG_RUNTIME_DIR=$(mktemp -d)
    export XDG_RUNTIME_DIR
    trap 'rm -rf "$XDG_RUNTIME_DIR"' EXIT
fi

# NVRTC compiles the CUDA kernels, and needs no GPU. Its wheels are a zip each.
# nvrtc FOLDER PACKAGE: installs it there, unless it is, and prints the folder of the library.
nvrtc() {
    local folder=${CARGO_TARGET_DIR:-target}/$1 found
    compgen -G "$folder/nvidia/*/lib/libnvrtc.so.*" >/dev/null || {
        echo "test.sh: installing $2 to $folder" >&2
        python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "$2" >&2 || return 1
    }
    found=$(compgen -G "$folder/nvidia/*/lib/libnvrtc.so.*" | head -n 1) && dirname "$(realpath "$found")"
}

if [[ $(uname -s) == Linux ]]; then
    # One of the places where the program itself looks for it, and the oldest version that it takes.
    if { /sbin/ldconfig -p | grep -F libnvrtc.so >/dev/null || [[ -n "${CUDA_PATH:-}" ]] ||
        { found=$(nvrtc nvrtc nvidia-cuda-nvrtc) && CUDA_PATH=$(dirname "$found") && export CUDA_PATH; }; } &&
        PLIMSOLL_OLDEST_NVRTC=$(nvrtc nvrtc-oldest 'nvidia-cuda-nvrtc-cu12==12.0.*'); then
        export PLIMSOLL_OLDEST_NVRTC
    else
        echo "test.sh: no NVRTC and no way to install it: the CUDA kernels are not compiled." >&2
        echo "test.sh: to compile them: python3 -m pip install nvidia-cuda-nvrtc" >&2
    fi
fi

# Ranks are processes of MPI, which is a wheel, too.
mpich=$PWD/${CARGO_TARGET_DIR:-target}/mpich
[[ ${CARGO_TARGET_DIR:-} != /* ]] || mpich=$CARGO_TARGET_DIR/mpich
if [[ $(uname -s) == Linux && -z "${PLIMSOLL_MPIRUN:-}" ]]; then
    [[ -x $mpich/bin/mpirun ]] || {
        echo "test.sh: installing mpich to $mpich" >&2
        python3 -m pip install --quiet --disable-pip-version-check --no-deps --prefix "$mpich" mpich >&2 || true
    }
    if [[ -x $mpich/bin/mpirun ]]; then
        export PLIMSOLL_MPIRUN=$mpich/bin/mpirun PATH=$mpich/bin:$PATH
    else
        echo "test.sh: no MPI and no way to install it: ranks run as threads alone." >&2
    fi
fi

# The module of Python is tried in an environment of its own.
python=$PWD/${CARGO_TARGET_DIR:-target}/python
[[ ${CARGO_TARGET_DIR:-} != /* ]] || python=$CARGO_TARGET_DIR/python
if [[ -z "${PLIMSOLL_PYTHON:-}" ]]; then
    [[ -x $python/bin/python ]] && "$python/bin/python" -c 'import ipykernel, nbclient, numpy' 2>/dev/null || {
        echo "test.sh: installing NumPy and nbclient to $python" >&2
        { python3 -m venv "$python" &&
            "$python/bin/python" -m pip install --quiet --disable-pip-version-check numpy nbclient ipykernel; } >&2 || true
    }
    if [[ -x $python/bin/python ]]; then
        export PLIMSOLL_PYTHON=$python/bin/python
    else
        echo "test.sh: no Python with venv and no way to install NumPy: the module of Python is not tried." >&2
    fi
fi

# The library of the page takes some minutes.
if [[ -n "${PLIMSOLL_PAGE:-}" ]]; then
    rustup target add wasm32-unknown-unknown >/dev/null 2>&1 || true
    PROFILE=dev bash src/web/build.sh
fi

if [[ "${CI:-}" == true ]]; then
    if [[ -n "${PLIMSOLL_PYTHON:-}" ]]; then export PLIMSOLL_REQUIRE_PYTHON=1; fi
    if [[ -n "${PLIMSOLL_MPIRUN:-}" ]]; then export PLIMSOLL_REQUIRE_MPI=1; fi
    export PLIMSOLL_REQUIRE_WGPU=1 PLIMSOLL_REQUIRE_NVRTC=1
    # Where it is neither there nor to be had, its tests say that they were skipped.
    if has_chromium; then export PLIMSOLL_REQUIRE_CHROMIUM=1; fi
fi

# The processors of 64-bit Arm have vectors of their own, which qemu computes. In part: the tests of values and of the processor's kernels.
arm() {
    local target=aarch64-unknown-linux-gnu
    command -v qemu-aarch64 >/dev/null && command -v aarch64-linux-gnu-gcc >/dev/null ||
        install "qemu or no compiler for aarch64" qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross || return 2
    [[ -d $(rustc --print target-libdir --target $target) ]] || rustup target add $target || return 2
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
    cargo test --target $target -p plimsoll-core -p plimsoll-cpu --lib || return 1
    [[ $1 == part ]] || cargo test --target $target -p plimsoll --no-default-features --features cli --test it -- \
        cpu:: ops:: rows:: counted:: || return 1
}

cargo test "$@"
if [[ $(uname -s) == Linux && -n "${PLIMSOLL_AARCH64:-}" ]]; then
    code=0
    arm "$PLIMSOLL_AARCH64" || code=$?
    if [[ $code == 2 ]]; then
        echo "test.sh: no qemu, compiler or library for aarch64, and no way to install it: its kernels do not run." >&2
        echo "test.sh: to run them: apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross" >&2
        [[ "${CI:-}" != true ]] || exit 1
    elif [[ $code != 0 ]]; then
        exit $code
    fi
fi
[[ -n "${PLIMSOLL_LONG:-}" ]] || echo "test.sh: long searches ran in part: PLIMSOLL_LONG=1 bash tests/test.sh runs them in full" >&2
