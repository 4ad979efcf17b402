#!/bin/sh
# Runs the native CPU library's tests on builds with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#     tools/sanitize_native.sh [--quick] [pytest options]
#
# Builds the portable library and the best one for this processor, and drives them through the same tests as the real ones.
# --quick: only the best one, with one example of each randomised test.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
profile=sanitize
if [ "${1:-}" = --quick ]; then
    profile=sanitize-quick
    shift
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

$python - "$out" $profile <<'PY'
import sys
from pathlib import Path

sys.path.insert(0, ".")
from tools.build_native import build
from vllm.ops.cpu.library import processor_flags, supported_instruction_sets

names = supported_instruction_sets(processor_flags())
chosen = {names[0]} if sys.argv[2] == "sanitize-quick" else {names[0], names[-1]}
build(Path(sys.argv[1]), sanitize=True, only=sorted(chosen))
PY

compiler=${CXX:-c++}
# Python is not instrumented: the runtimes come first, and its own leaks are none of ours.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    $python -m pytest -q -x -p no:cacheprovider tests/ops/test_native.py tests/ops/cpu --native-dir "$out" \
    --hypothesis-profile=$profile "$@"
