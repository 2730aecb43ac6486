"""Compare the kernels of moedraft.kernels with other installed ones; write the times as JSON and as a plot.

On a CUDA device it measures, for every case, the time between two events, the time inside a CUDA graph (which
holds no time of Python's), the time until Python has the call behind it, the bandwidth as a share of a plain
copy's (counting the fewest bytes that the operation must move), the peak of extra memory, and the error
against float64. The caches are cold. Without a CUDA device it measures the PyTorch references alone.

Our own kernels come first: in the cases that have a target, then in the others; peers follow, and last what
torch.compile makes. Peers are looked for on the path and in `.peers/` of this repository.

The file is written before and after every contender, and a later run goes on where it stopped, as long as the
code, the device and the packages are the same. A contender that was begun and did not return (it hung, or
ended the process) is named and not begun again. After a failure on a CUDA device, such as a graph that cannot
be made, the process begins again and goes on from that file, since nothing that runs on the device later
could be trusted. After `--minutes` no contender is begun. `--tune` also tries other block sizes for the
divergences.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from kernel_case import BEGUN, OURS, PASSES, Case, failed, run_case, settle, settle_case, waits
from kernel_cases import cases, tuned
from kernel_tables import has_target
from kernel_timing import Bench, copy_bandwidth, cpu_bench, cuda_bench
from peer_folder import find_peers

import moedraft.kernels
import moedraft.sampling

PEERS = ("torch", "triton", "flashinfer", "sglang", "sgl_kernel", "vllm", "liger_kernel", "speculators")
SAME = ("device", "quick", "code", "versions", "bench")  # a file that agrees in these is gone on with
START = 0.25  # minutes that a new process takes until it measures
Report = dict[str, Any]


def versions() -> dict[str, str]:
    """Of each package that takes part, as it was installed. None is imported."""
    homes, found = importlib.metadata.packages_distributions(), {}
    for name in PEERS:
        if importlib.util.find_spec(name) is None:
            found[name] = "not installed"
        else:
            found[name] = importlib.metadata.version(homes[name][0]) if name in homes else "unknown version"
    return found


def code() -> str:
    """A digest of everything whose change makes an older measurement worthless."""
    measured = [Path(moedraft.sampling.__file__), *Path(moedraft.kernels.__file__).parent.glob("*.py")]
    measured += [
        path for path in Path(__file__).parent.glob("kernel_*.py") if path.name != "kernel_tables.py"
    ]
    digest = hashlib.sha256()
    for path in sorted(measured, key=lambda path: path.name):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def begin(bench: Bench, quick: bool) -> Report:
    return {
        "device": torch.cuda.get_device_name() if bench.cuda else "CPU",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": quick,
        "code": code(),
        "versions": versions(),
        "bench": {**asdict(bench), "dtype": str(bench.dtype)},
        "threads": torch.get_num_threads(),
        "cases": [],
    }


def resumed(fresh: Report, paths: list[Path]) -> Report:
    """The first file that was measured in the same way, else the fresh report."""
    fresh = json.loads(json.dumps(fresh))
    for path in paths:
        if path.exists():
            old: Report = json.loads(path.read_text())
            if all(old.get(key) == fresh[key] for key in SAME):
                for case in old["cases"]:
                    settle_case(case)
                for entry in old.get("tuning", []):
                    settle(entry)
                return old
    return fresh


def save(report: Report, path: Path) -> None:
    """Under another name first, so that a run that is killed leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)


def show(case: dict[str, Any], shown: dict[str, Any]) -> None:
    """What was found of a case beyond the contenders that were shown before."""
    print(case["operation"], case["shape"])
    print(f"  at least {case['floor_bytes'] / 1e6:,.1f} MB; launches: {case['launches']};", end=" ")
    print(f"replaces: {case['replaces']}; called by: {case['called_by']}", flush=True)
    for name in [name for name in case["contenders"] if name not in shown]:
        print(f"  {name:44}", json.dumps(case["contenders"][name]), flush=True)


def begin_again(until: float) -> NoReturn:
    """The same command in a new process, which goes on from the file that was written."""
    sys.stdout.flush()
    minutes = (until - time.monotonic()) / 60 - START
    rest = [] if math.isinf(minutes) else ["--minutes", f"{minutes:.3f}"]  # the last of an option counts
    os.execv(sys.executable, [*sys.orig_argv, *rest])


def planned(found: list[Case]) -> list[tuple[int, Case]]:
    """In which order what is measured: passes and cases, those of most value first."""
    ours = sorted(found, key=lambda case: not has_target(case))
    return [(number, case) for number in PASSES for case in (ours if number == OURS else found)]


def measure(bench: Bench, report: Report, path: Path, until: float) -> int:
    """Run what the report lacks, saving before and after every contender. Returns how many cases are left."""
    if bench.cuda and "copy_bytes_per_second" not in report:
        report["copy_bytes_per_second"] = copy_bandwidth(bench)
    known: dict[str, Any] = {case["key"]: case for case in report["cases"]}
    every = cases(bench)
    for number, case in planned(every):
        if not waits(known.get(case.key), number):
            continue
        if time.monotonic() > until:
            break
        if bench.cuda:
            torch.cuda.empty_cache()
        start, before = time.monotonic(), known.get(case.key, {"contenders": {}, "seconds": 0.0})
        for found in run_case(case, bench, report.get("copy_bytes_per_second"), number, known.get(case.key)):
            seconds = round(before["seconds"] + time.monotonic() - start, 1)
            known[case.key] = {"key": case.key, **found, "seconds": seconds}
            report["cases"] = list(known.values())
            save(report, path)
            if time.monotonic() > until and not begun(found):
                break
        show(known[case.key], before["contenders"])
        if known[case.key]["broken"]:
            begin_again(until)
    return sum(known.get(case.key, {"left": 1})["left"] > 0 for case in every)


def begun(case: dict[str, Any]) -> bool:
    """Whether one of its contenders is at work."""
    return any(entry.get("status") == BEGUN for entry in case["contenders"].values())


def tune(bench: Bench, report: Report, path: Path, until: float) -> None:
    """Try the block sizes that the report lacks, saving before and after each."""
    known = report.setdefault("tuning", [])
    for entry in tuned(bench, {(one["loss"], one["block"], one["warps"], one["stages"]) for one in known}):
        if known and known[-1].get("status") == BEGUN:
            known.pop()
        known.append(entry)
        save(report, path)
        if entry.get("status") == BEGUN:
            continue
        if failed(entry) and bench.cuda:
            begin_again(until)
        if time.monotonic() > until:
            return


def plot(report: Report, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot")
        return
    pyplot = importlib.import_module("matplotlib.pyplot")
    found = report["cases"]
    figure, axes = pyplot.subplots(
        math.ceil(len(found) / 2), 2, figsize=(13, 1.6 * len(found) + 1), squeeze=False
    )
    for axis, case in zip(axes.flat, found, strict=False):
        bars = {name: entry["us"] for name, entry in case["contenders"].items() if "us" in entry}
        axis.barh(list(bars)[::-1], list(bars.values())[::-1])
        title = ", ".join(str(value) for value in case["shape"].values())
        axis.set_title(f"{case['operation']} {title}", fontsize=8)
        axis.set_xlabel("µs")
    figure.suptitle(f"{report['device']}, {report['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, less time each")
    parser.add_argument("--tune", action="store_true", help="also try other block sizes (CUDA)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no contender after so long")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument(
        "--resume", type=Path, default=Path("results"), help="another folder to go on from, where it fits"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, bench: Bench | None = None) -> Path:
    options = parse(arguments)
    find_peers()
    until = time.monotonic() + 60 * options.minutes
    if bench is None:
        bench = cuda_bench(options.quick) if torch.cuda.is_available() else cpu_bench(options.quick)
    if not bench.cuda:
        print("No CUDA device here: the references alone are measured.")
    fresh = begin(bench, options.quick)
    name = f"kernels-{fresh['device'].lower().replace(' ', '-')}{'-quick' if options.quick else ''}.json"
    path: Path = options.out / name
    report = resumed(fresh, [path, options.resume / name])
    left = measure(bench, report, path, until)
    if options.tune and bench.cuda and not left and time.monotonic() <= until:
        tune(bench, report, path, until)
    save(report, path)
    plot(report, path.with_suffix(".png"))
    print("written:", path, f"({left} cases are left: run it again to go on)" if left else "(complete)")
    return path


if __name__ == "__main__":
    main()
