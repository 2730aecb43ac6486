#!/usr/bin/env bash
# Everything that needs a CUDA device, in one command and under nine minutes: the kernel tests, the kernel benchmark
# and, where it exists, the engine benchmark. Needs python3 with torch, triton and pytest; installs and fetches nothing.
#
#   scripts/gpu_check.sh [--out results/]
#
# Writes JSON into the folder. Ends with a status other than 0 if a test failed or a benchmark broke off.
set -uo pipefail

out=results
while [ $# -gt 0 ]; do
    case "$1" in
        --out) out="$2"; shift 2 ;;
        --out=*) out="${1#--out=}"; shift ;;
        *) echo "usage: scripts/gpu_check.sh [--out results/]" >&2; exit 2 ;;
    esac
done
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

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "No CUDA device here: kernel tests run in the interpreter, benchmarks measure the references." >&2
fi

failed=0
step() { # name, seconds, command …
    local name="$1" seconds="$2"
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2>&1 | tail -n 60
    local status="${PIPESTATUS[0]}"
    if [ "$status" -ne 0 ]; then
        echo "== $name: failed with status $status"
        failed=1
    fi
}

step "kernel tests" 250 env PYTHONSAFEPATH=1 "$python" -m pytest tests/kernels -q -o addopts= -o filterwarnings=default \
    -p no:cacheprovider --junitxml "$packages/tests.xml"
"$python" - "$packages/tests.xml" "$out/kernel-tests.json" <<'PYTHON'
import datetime, json, pathlib, sys
import xml.etree.ElementTree as tree

import torch

source, target = map(pathlib.Path, sys.argv[1:])
report = {
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    "torch": torch.__version__,
    "finished": source.exists(),
}
if source.exists():
    suite = tree.parse(source).getroot().find("testsuite")
    report |= {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    report["seconds"] = float(suite.get("time"))
    report["failed"] = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
target.write_text(json.dumps(report, indent=1) + "\n")
print(json.dumps(report))
PYTHON
step "kernel benchmark" 200 "$python" scripts/bench_kernels.py --out "$out"
if [ -f scripts/bench_engine.py ]; then
    step "engine benchmark" 80 "$python" scripts/bench_engine.py --quick --out "$out"
fi
exit "$failed"
