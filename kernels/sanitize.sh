#!/usr/bin/env bash
# Runs all kernels on the CPU under the address and undefined-behaviour sanitizers: they must be
# clean, and an access past the end that is planted must be found, or the sanitizers see nothing.
# Exits 0 when both hold, 1 when one does not, 77 when no compiler here has the sanitizers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
compiler="${CXX:-c++}"
# Looking for leaks needs ptrace, which containers may not have, and there is nothing to leak.
export ASAN_OPTIONS="detect_leaks=0"
# -O1 keeps the accesses; the rest is as build.rs has it.
flags=(-std=c++17 -g -O1 -x c++ -ffp-contract=off -fno-exceptions -fno-rtti
    -fno-strict-aliasing -fno-omit-frame-pointer
    -fsanitize=address,undefined -fno-sanitize-recover=all)

printf 'int main() { return 0; }\n' >"$folder/probe.cpp"
if ! "$compiler" "${flags[@]}" "$folder/probe.cpp" -o "$folder/probe" 2>"$folder/why" ||
    ! "$folder/probe" 2>>"$folder/why"; then
    echo "SKIPPED: $compiler cannot build or run with -fsanitize=address,undefined:"
    head -n 3 "$folder/why"
    exit 77
fi

"$compiler" "${flags[@]}" cuda/sanitize_main.cpp -o "$folder/clean"
if ! "$folder/clean" >"$folder/clean.log" 2>&1; then
    echo "FAILED: the kernels are not clean under the sanitizers"
    cat "$folder/clean.log"
    exit 1
fi
echo "clean: $(cat "$folder/clean.log")"

"$compiler" "${flags[@]}" -DKV_PLANT_OVERRUN cuda/sanitize_main.cpp -o "$folder/planted"
if "$folder/planted" >"$folder/planted.log" 2>&1; then
    echo "FAILED: an access past the end was planted and the sanitizers did not find it"
    exit 1
fi
if ! grep -q "heap-buffer-overflow" "$folder/planted.log" ||
    ! grep -q "copy_run.*kvtide.cu:" "$folder/planted.log"; then
    echo "FAILED: the planted run ended by something else than the planted access:"
    head -n 20 "$folder/planted.log"
    exit 1
fi
echo "planted: found at $(grep -o 'copy_run.*' "$folder/planted.log" | head -n 1)"
