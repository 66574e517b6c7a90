#!/usr/bin/env bash
# The native core under AddressSanitizer: products, norms, gates and attention of random shapes at
# each set of instructions, in buffers of exactly the size that they are said to have. Takes about
# a minute; no output of the sanitizer and "good" is what should come.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
sources="$here/../../lightserve/kernels/cpu/csrc"
made="$(mktemp -d)"
trap 'rm -rf "$made"' EXIT
"${CXX:-c++}" -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
    -fno-sanitize=alignment -Wno-psabi -pthread -I "$sources" \
    "$here/core_fuzz.cpp" "$sources"/*.cpp -o "$made/fuzz"
"$made/fuzz" "${1:-300}"
