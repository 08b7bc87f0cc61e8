#!/usr/bin/env bash
# Builds the library with AddressSanitizer and UBSan in a folder of its own and runs the operator tests with it.
# Usage: tools/sanitize.sh VENV [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath "$1")
shift
target=$PWD/build/sanitize
mkdir -p "$target"

PATH="$venv/bin:$PATH" MOE_OPS_SANITIZE=address,undefined \
  python setup.py -q build --build-base "$target/base" --build-lib "$target/lib"

# Python itself is not instrumented, so the runtime has to come first. Leaks are not looked for: the interpreter keeps memory.
# A small quarantine, since one test watches that memory stays flat.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:quarantine_size_mb=8 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  PYTHONPATH="$target/lib" OMP_NUM_THREADS=1 \
  "$venv/bin/python" -m pytest tests/ops -n 2 "$@"
