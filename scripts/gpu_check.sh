#!/usr/bin/env bash
# Everything that needs a CUDA device, in three slices: the first takes less than eight minutes, the first two less
# than ten together, all three less than fourteen. Needs python3
# with torch, triton and pytest, and for the engine benchmark numpy, safetensors, scikit-learn, threadpoolctl and
# transformers; installs and fetches nothing. All other benchmarks (learning, verification, serving …) need the
# installed package with its database and settings libraries, and are not for such a machine.
#
#   scripts/gpu_check.sh kernels     what only a GPU shows of the kernels, then their benchmark: what has a target first,
#                                    then our own kernels in all other cases, then peers
#   scripts/gpu_check.sh tests       all other tests of the kernels; those of the scripts need no GPU
#   scripts/gpu_check.sh rest        the rest of the kernel benchmark, then the engine benchmark
#   scripts/gpu_check.sh             all three, one after another
#
#   --out FOLDER     where the JSON files go (results/)
#   WORKERS=N        environment: in how many processes tests run on a GPU (as many as there are cores, at most 12)
#
# Peers to compare with may lie in .peers/ of this repository, or in a folder that PYTHONPATH names; see
# docs/benchmarks.md.
#
# The kernel benchmark writes its file before and after every contender, and a later slice or run goes on where it
# stopped; what was begun and did not return is not begun again. It looks in the folder above and in results/. Tests are
# noted one by one (FOLDER/NAME.jsonl) and summed up in FOLDER/NAME.json, also where a slice's time ends before they do.
# What each step prints is in FOLDER/SLICE-NAME.log, its last lines are shown when it has ended.
# Ends with a status other than 0 if a test failed or a benchmark broke off.
set -uo pipefail

out=results
slices=()
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out="$2"; shift 2 ;;
        --out=*) out="${1#--out=}"; shift ;;
        kernels|tests|rest) slices+=("$1"); shift ;;
        *) echo "usage: scripts/gpu_check.sh [kernels] [tests] [rest] [--out results/]" >&2; exit 2 ;;
    esac
done
[ "${#slices[@]}" -gt 0 ] || slices=(kernels tests rest)
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"

# The package as an installation would lay it out: kernels/ and data/ are moedraft.kernels and moedraft.data.
# PYTHONSAFEPATH below keeps the repository root, whose moedraft/ lacks these two, out of the way.
packages="$(mktemp -d)"
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/moedraft"
for part in moedraft/* kernels data; do
    ln -s "$PWD/$part" "$packages/moedraft/$(basename "$part")"
done
export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 TRITON_DEFAULT_FP_FUSION=1

# Tests run in several processes on a GPU, since each waits for the compiler most of the time.
workers="${WORKERS:-$(nproc)}"
[ "$workers" -le 12 ] || workers=12
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device here: kernel tests run in the interpreter, benchmarks measure the references." >&2
    workers=1
fi

failed=0
step() { # name, seconds, command …
    local name="$1" seconds="$2"
    shift 2
    local log="$out/$slice-${name// /-}.log"
    echo "== $name"
    # Not into a pipe: a process that is left behind would keep it open.
    timeout -k 10 "$seconds" "$@" > "$log" 2>&1
    local status=$?
    tail -n 60 "$log"
    if [ "$status" -ne 0 ]; then
        echo "== $name: failed with status $status"
        failed=1
    fi
}

tests() { # name of the report, seconds, tests …
    local report="$1" seconds="$2" lines="$out/$1.jsonl"
    shift 2
    rm -f "$lines"
    step "$report" "$seconds" env PYTHONSAFEPATH=1 PYTHONPATH="$PWD/scripts:$PYTHONPATH" \
        "$python" -m gpu_workers "$workers" "$lines" "$@" -q -o addopts= -o filterwarnings=default -p no:cacheprovider
    "$python" scripts/gpu_tests.py "$lines" "$out/$report.json" && rm -f "$lines" || failed=1
}

# The limits of a slice, ten seconds each for what does not end when it is told to, and twenty for what runs outside of
# them, add up to 440, 140 and 240 seconds.
# The kernel benchmark begins no contender in its last minute.
for slice in "${slices[@]}"; do
    case "$slice" in
        kernels)
            tests kernel-tests-gpu 100 tests/kernels/test_kernels_gpu.py
            step "kernel benchmark" 300 "$python" scripts/bench_kernels.py --out "$out" --minutes 4
            ;;
        tests)
            # What a GPU alone shows is in the slice before. The rest was tested elsewhere: what is compiled without
            # a GPU, and the scripts.
            tests kernel-tests 110 tests/kernels --ignore tests/kernels/test_kernels_gpu.py \
                --ignore tests/kernels/test_kernels_compile.py --ignore tests/kernels/test_sum_layouts.py \
                --ignore tests/kernels/test_warm_up.py --ignore tests/kernels/test_callers.py \
                --ignore-glob '*/test_peer*' --ignore-glob '*/test_bench_*' --ignore-glob '*/test_gpu_check*'
            ;;
        rest)
            step "kernel benchmark" 120 "$python" scripts/bench_kernels.py --out "$out" --minutes 1 --tune
            step "engine benchmark" 80 "$python" scripts/bench_engine.py --quick --out "$out"
            ;;
    esac
done
exit "$failed"
