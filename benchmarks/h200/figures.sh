#!/usr/bin/env bash
# The figures of this project on one GPU, one after the other, each with a limit of its own and a log in OUT.
#
#     benchmarks/h200/figures.sh OLD OUT [STEP ...]      # all steps take about 15 minutes on an H200
#
# OLD is an earlier tree, with which steps and prompts are compared in turns (`git archive COMMIT | tar -x -C OLD`).
# Steps: see the table at the end; without any, all of them. Ends with 1 if a step has failed.
set -uo pipefail
cd "$(dirname "$0")/../.."

old="$1" out="$2"
shift 2
models="${MODELS:-/tmp/models}" python="${PYTHON:-python3}" failed=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
[ -d "$models" ] || "$python" -m benchmarks.h200.models "$models" >/dev/null
wanted=" $* "

# step NAME SECONDS COMMAND...
step() {
    local name="$1" limit="$2" begun=$SECONDS
    shift 2
    [ "$wanted" = "  " ] || [[ "$wanted" == *" $name "* ]] || return 0
    timeout -k 5 "$limit" "$python" "$@" >"$out/$name.log" 2>&1
    local status=$?
    [ "$status" = 0 ] || failed=1
    echo "$name: status $status, $((SECONDS - begun)) s"
}

ab=(benchmarks/ab.py --old "$old" --new . --names old "$(git rev-parse --short HEAD 2>/dev/null || echo new)" --models "$models")
shape=qwen3-0.6b
step ab-0.6b 120 "${ab[@]}" --pairs 14 --cases "decode $shape" "tokens $shape" --json "$out/ab-0.6b.json"
step ab-0.6b-prompts 420 "${ab[@]}" --rounds 9 --pairs 12 --cases "prefill $shape" --json "$out/ab-0.6b-prompts.json"
shape=llama-3.1-8b
step ab-8b 300 "${ab[@]}" --pairs 10 --cases "decode $shape" "prefill $shape" "tokens $shape" --json "$out/ab-8b.json"
step structured 80 -m benchmarks.h200.structured_output "$models" --rounds 9
step lora 90 -m benchmarks.h200.lora --model "$models/llama-3.1-8b" --out "$out/lora.json"
step events 75 -m benchmarks.stream_events --shape qwen3-0.6b --folder "$models" --out "$out/events.json"
step tests-engine 180 -m pytest -q -rf tests/gpu/test_engine_core.py tests/gpu/test_backends.py tests/gpu/test_decode_graphs.py
step tests-tenants 300 -m pytest -q -rf tests/gpu/test_tenants.py tests/gpu/test_own_models.py tests/gpu/test_pipeline_parallel.py
step tests-lora 420 -m pytest -q -rf tests/gpu/test_lora.py
step tests-kernels 420 -m pytest -q -rf tests/gpu --ignore tests/gpu/test_engine_core.py --ignore tests/gpu/test_backends.py \
    --ignore tests/gpu/test_decode_graphs.py --ignore tests/gpu/test_tenants.py --ignore tests/gpu/test_own_models.py \
    --ignore tests/gpu/test_pipeline_parallel.py --ignore tests/gpu/test_lora.py
exit "$failed"
