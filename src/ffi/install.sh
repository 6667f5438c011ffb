#!/bin/sh
# Builds the library for C and C++, and installs it: src/ffi/install.sh PREFIX [FEATURES]. FEATURES are those of Cargo.toml, by default
# "cuda,wgpu"; "" is the processor alone. DESTDIR, if it is set, stands before PREFIX where files are copied to.
set -eu
prefix=${1:?"expected the folder to install in: src/ffi/install.sh PREFIX [FEATURES]"}
more=${2-cuda,wgpu}
features=ffi${more:+,$more}
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
cd "$(dirname "$0")/../.."
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
abi=$(sed -n 's/^#define PLIMSOLL_ABI_VERSION //p' src/ffi/plimsoll.h)
target=${CARGO_TARGET_DIR:-target}
to=${DESTDIR:-}$prefix
major=${version%%.*}
case $(uname) in Darwin) shared=libplimsoll.dylib named=-Wl,-install_name,$prefix/lib/$shared ;;
*) shared=libplimsoll.so named=-Wl,-soname,libplimsoll.so.$major ;;
esac

cargo rustc --release --lib --no-default-features --features "$features" --crate-type staticlib,cdylib -- -C "link-arg=$named"

mkdir -p "$to/include" "$to/lib/pkgconfig" "$to/lib/cmake/plimsoll"
cp src/ffi/plimsoll.h src/ffi/plimsoll.hpp "$to/include/"
cp "$target/release/libplimsoll.a" "$to/lib/"
if [ "$shared" = libplimsoll.so ]; then
    cp "$target/release/$shared" "$to/lib/$shared.$version"
    ln -sf "$shared.$version" "$to/lib/$shared.$major"
    ln -sf "$shared.$major" "$to/lib/$shared"
else
    cp "$target/release/$shared" "$to/lib/"
fi

# What the static library needs of the system.
system="-lpthread -ldl -lm"
cat > "$to/lib/pkgconfig/plimsoll.pc" <<END
prefix=$prefix

Name: plimsoll
Description: Plans the memory of ONNX models, and runs them in exactly those bytes
Version: $version
Cflags: -I\${prefix}/include
Libs: -L\${prefix}/lib -lplimsoll
Libs.private: $system
END
cat > "$to/lib/cmake/plimsoll/plimsoll-config.cmake" <<END
# plimsoll::plimsoll is the shared library, plimsoll::static the other one.
get_filename_component(_plimsoll "\${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET plimsoll::plimsoll)
  add_library(plimsoll::plimsoll SHARED IMPORTED)
  set_target_properties(plimsoll::plimsoll PROPERTIES
    IMPORTED_LOCATION "\${_plimsoll}/lib/$shared"
    INTERFACE_INCLUDE_DIRECTORIES "\${_plimsoll}/include")
  add_library(plimsoll::static STATIC IMPORTED)
  set_target_properties(plimsoll::static PROPERTIES
    IMPORTED_LOCATION "\${_plimsoll}/lib/libplimsoll.a"
    INTERFACE_INCLUDE_DIRECTORIES "\${_plimsoll}/include"
    INTERFACE_LINK_LIBRARIES "pthread;dl;m")
endif()
set(plimsoll_ABI_VERSION $abi)
END
cat > "$to/lib/cmake/plimsoll/plimsoll-config-version.cmake" <<END
set(PACKAGE_VERSION $version)
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
# Before version 1, a minor version may differ in anything.
if(NOT PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION AND
    "\${PACKAGE_FIND_VERSION_MAJOR}.\${PACKAGE_FIND_VERSION_MINOR}" VERSION_EQUAL "${version%.*}")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
END
echo "plimsoll $version is in $to"
