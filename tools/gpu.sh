#!/usr/bin/env bash
# What only a GPU can show, in two calls; docs/gpu-results.md says how to make them, and what was found.
#   bash tools/gpu.sh 1    kernels, and the runtime over the proof engine: torch, Triton and cuda-bindings suffice
#   bash tools/gpu.sh 2    engines of BACKEND (ort-cuda); build/wheels holds what tools/gpu_pack.py made
# A call ends after MINUTES (8); made again, it goes on where it ended. ONLY=verify,steps-ort-cuda runs these parts alone.
# Results come into SPECEXPORT_GPU_OUT (build/gpu) as they are found; models and bundles stay in SPECEXPORT_GPU_WORK.
set -uo pipefail
cd "$(dirname "$0")/.."
call=${1:?say which call, 1 or 2} python=${PYTHON:-python3} backend=${BACKEND:-ort-cuda}
end=$((SECONDS + 60 * ${MINUTES:-8})) failed=0
out=${SPECEXPORT_GPU_OUT:-$PWD/build/gpu} work=${SPECEXPORT_GPU_WORK:-$PWD/build/gpu-work}
mkdir -p "$out/done" "$work"
[ ! -d build/wheels ] || "$python" tools/gpu_pack.py --install build/wheels "$work/site"

# The CUDA libraries that came with torch: packages that lie elsewhere do not look there.
libraries=$("$python" -c '
import importlib.util, pathlib
spec = importlib.util.find_spec("nvidia")
print(*(lib for root in (spec.submodule_search_locations if spec else ()) for lib in pathlib.Path(root).glob("*/lib")), sep=":")')
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" PYTHONUNBUFFERED=1
export PYTHONPATH="$work/site:$PWD:$PWD/runtime${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false SPECEXPORT_CACHE_DIR="$work/cache" TRITON_CACHE_DIR="$work/triton"
export SPECEXPORT_GPU_OUT="$out" SPECEXPORT_GPU_WORK="$work"
[ "$call" = 1 ] && export SPECEXPORT_GPU_KINDS=proof || export SPECEXPORT_GPU_KINDS="$backend"

part() { # NAME SECONDS COMMAND…: a process that ends in time, and is not run again if an earlier call has ended it
    local name=$1 seconds=$2 left=$((end - SECONDS)) began=$SECONDS status=0
    shift 2
    [ -z "${SPECEXPORT_GPU_TINY:-}" ] || seconds=3600 # limits are those of a GPU
    [ ! -e "$out/done/$name" ] && [[ -z "${ONLY:-}" || ",$ONLY," = *",$name,"* ]] || return 0
    if [ "$left" -lt 10 ]; then failed=1 && echo "$name: no time is left" && return; fi
    timeout --kill-after=5 "$((seconds < left ? seconds : left))" "$@" >>"$out/log.txt" 2>&1 || status=$?
    [[ "$status" = 124 || "$status" = 137 ]] && [ "$seconds" -gt "$left" ] || touch "$out/done/$name"
    [ "$status" = 0 ] || failed=1
    echo "$name: exit status $status after $((SECONDS - began)) s" | tee -a "$out/parts.txt"
}
# The tests stand alone, for the machine lacks what the others' settings and fixtures need.
settings=(-c /dev/null --rootdir=tests/gpu --confcutdir=tests/gpu --import-mode=importlib -p no:cacheprovider)
tests() { part "$1-$SPECEXPORT_GPU_KINDS" "$2" "$python" -m pytest "${settings[@]}" -qrs --show-capture=no "tests/gpu/test_$1.py"; }
specexport=("$python" -c 'from specexport.cli import main; main()')
size() { [ -z "${SPECEXPORT_GPU_TINY:-}" ] && echo "$1" || echo tiny; }
bench() { # RATE SECONDS K…: tokens a second of a model of 1.1 B; its draft is right so often
    local bundle="$work/bundles/$(size "large-$1")-$backend"
    part "bundle-$1" 150 "$python" -m tools.proof.bundles "$work" "$(size "large-$1")" "$backend"
    part "bench-$1" "$2" "${specexport[@]}" bench "$bundle" --prompts "$bundle.jsonl" --contexts 128 --methods draft-model \
        --batch-size 1,2,4,8 --num-speculative-tokens "$3" --max-tokens 96 --ignore-eos --repeats 1 \
        --json "$out/bench-$1.json" --markdown "$out/bench-$1.md"
}

nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total,clocks.max.sm,clocks.max.mem --format=csv >"$out/gpu.txt" 2>&1
"$python" -m pip list 2>&1 | grep -iE '^(torch|triton|transformers|onnx|cuda-b|tensorrt|numpy|tokenizers)' >>"$out/gpu.txt"
part "doctor-$call" 60 "${specexport[@]}" doctor
if [ "$call" = 1 ]; then
    tests kernels 160
    tests loop 120
    tests graphs 90
    tests draws 90
    tests steps 150
else
    tests outputs 180
    tests graphs 90
    tests draws 90
    bundle="$work/bundles/$(size small)-$backend"
    part verify 90 "${specexport[@]}" verify "$bundle" --prompts "$bundle.jsonl" --require-checkpoint --max-tokens 48 \
        --num-samples 1000 --no-record --report "$out/verify.json"
    tests steps 200
    bench 0.8 150 1,2,3,4,5,6,7,8
    bench 0.6 90 1,2,3,4,6,8
    bench 0.95 90 1,2,3,4,6,8
    # The other tests that need a GPU, with all the settings of this repository.
    part others 120 "$python" -m pytest -m gpu tests --ignore=tests/gpu -o addopts=--import-mode=importlib -W default -qrs
fi
exit "$failed"
