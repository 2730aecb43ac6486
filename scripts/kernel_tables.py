"""Make the tables of kernel measurements, in Markdown, from the files that bench_kernels.py wrote.

`scripts/tables.py` puts them into docs/benchmarks.md. A target that was not measured says "not yet measured".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kernel_case import ABOUT, Case
from kernel_cases import cases
from kernel_timing import cuda_bench

V = 151_936
DEVICE = "H200"  # what the targets are for
# Of an H200: bytes per second of its memory, operations per second in bfloat16 (dense), bytes of its cache.
BANDWIDTH, OPERATIONS, H200_CACHE = 4.8e12, 989e12, 60 * 2**20
VERIFY = {"operation": "verify_chain", "vocab": V, "draft_lse": True}
LOSS = {"vocab": V, "rows": 8192}
AS_IT_IS = {"upstream": "1"}  # what the gradient is multiplied by in the backward pass


class Target(NamedTuple):
    """What our own contender may take in one case: microseconds of a CUDA graph, or MiB beyond its arguments.

    Between two events the time until Python has begun a call would count as the device's.
    """

    name: str
    case: dict[str, Any]  # to look up: operation and shape
    limit: float | None  # None: nothing was promised
    second: float | None = None  # to reach after the first
    memory: bool = False


FILTER = {"operation": "find_cuts", "batch": 64, "top_p": 0.95, "top_k": 0}
TARGETS = [
    Target(
        "top-k-teacher loss, forward + backward",
        {"operation": "topk divergence", "kind": "fkl", **LOSS, **AS_IT_IS},
        1500,
    ),
    Target("verify, B = 1", {"batch": 1, **VERIFY}, 10),
    Target("verify, B = 64", {"batch": 64, **VERIFY}, 34),
    Target("verify, B = 256", {"batch": 256, **VERIFY}, 200),
    Target("top-p filter, B = 64", FILTER, 150),
    Target("top-p filter, B = 64, extra memory", FILTER, 1, memory=True),
    *[
        Target(f"{name}, B = {batch}", {"operation": rule, "batch": batch, "vocab": V}, None)
        for name, rule in (("verify by block", "verify_block"), ("verify coupled", "verify_coupled"))
        for batch in (1, 64)
    ],
    *[
        Target(
            f"{kind}, forward + backward",
            {"operation": "divergence", "kind": kind, **LOSS, **AS_IT_IS},
            limit,
            second,
        )
        for kind, limit, second in (
            ("fkl", 3000, 2300),
            ("rkl", 3400, None),
            ("jsd", 4800, None),
            ("tvd", 4800, None),
        )
    ],
    Target(
        "linear and divergence, 8192 × 4096, extra memory",
        {"operation": "linear and divergence", "width": 4096, **LOSS},
        2e9 / 2**20,
        memory=True,
    ),
]


def has_target(case: Case) -> bool:
    """Whether one of the targets is about it."""
    said = {"operation": case.operation, **case.shape}
    return any(target.case.items() <= said.items() for target in TARGETS)


def load(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Reports of CUDA devices and of CPUs, newest first."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("kernels-*.json"))]
    reports.sort(key=lambda report: str(report["date"]), reverse=True)
    return [r for r in reports if r["device"] != "CPU"], [r for r in reports if r["device"] == "CPU"]


def find(report: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any] | None:
    for case in report["cases"]:
        if wanted.items() <= {"operation": case["operation"], **case["shape"]}.items():
            return dict(case["contenders"])
    return None


def measured(report: dict[str, Any] | None, target: Target) -> float | None:
    """What our own contender took there."""
    value: Any = find(report, target.case) if report else None
    for key in ("moedraft", *(("extra_mib",) if target.memory else ("graph", "us"))):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if value is not None else None


def microseconds(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.1f} µs"


def memory(mib: float) -> str:
    return f"{mib * 2**20 / 1e9:.2f} GB" if mib >= 1000 else f"{mib:.1f} MiB"


def target_table(report: dict[str, Any] | None) -> list[str]:
    where = f"{report['device']}, {report['date']}" if report else f"no {DEVICE} yet"
    lines = [
        f"Targets on one {DEVICE}, times in a CUDA graph, V = 151 936, bf16 ({where}):",
        "",
        "| operation | target | measured |",
        "|---|---|---|",
    ]
    for one in TARGETS:
        value, shown = measured(report, one), memory if one.memory else microseconds
        found = "not yet measured" if value is None else shown(value)
        target = "none" if one.limit is None else shown(one.limit)
        target += f", then {shown(one.second)}" if one.second else ""
        lines.append(f"| {one.name} | {target} | {found} |")
    return lines


def timings(entry: dict[str, Any]) -> list[str]:
    """Time, in a graph, on the host, share of a copy's bandwidth, extra memory; empty where not measured."""
    if "us" not in entry:
        return [entry["status"].split(":")[0], "", "", "", ""]
    graph = entry.get("graph", {})
    share = graph.get("share_of_copy", entry.get("share_of_copy"))
    return [
        microseconds(entry["us"]),
        microseconds(graph["us"]) if "us" in graph else "",
        microseconds(entry["host_us"]) if "host_us" in entry else "",
        f"{share:.0%}" if share is not None else "",
        memory(entry["extra_mib"]) if "extra_mib" in entry else "",
    ]


def contender_table(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['device']}, {report['date']}, median time:",
        "",
        "| operation | shape | contender | time | in a graph | on the host | of copy bandwidth | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        shape = ", ".join(f"{key} {value}" for key, value in case["shape"].items())
        for name, entry in case["contenders"].items():
            cells = " | ".join(timings(entry))
            lines.append(f"| {case['operation']} | {shape} | {name} | {cells} |")
    return lines


def facts() -> str:
    """Of each operation, at the size of its first case on a GPU: what must move, and who calls it."""
    first: dict[str, Case] = {}
    for case in cases(cuda_bench(quick=False, cache=H200_CACHE)):
        first.setdefault(case.operation, case)
    lines = [
        "| operation | shape | fewest bytes | floor | launches | replaces | called by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in first.items():
        said = ABOUT[name]
        shape = ", ".join(f"{key} {value}" for key, value in case.shape.items())
        seconds = max(case.floor_bytes / BANDWIDTH, case.floor_operations / OPERATIONS)
        least = microseconds(seconds * 1e6)
        size, launched = f"{case.floor_bytes / 1e6:,.1f} MB", said.launches
        who = f"`{said.called_by}`: {said.when}"
        lines.append(f"| {name} | {shape} | {size} | {least} | {launched} | {said.replaces} | {who} |")
    return "\n".join(lines)


def tables(folder: Path) -> str:
    devices, processors = load(folder)
    full = [report for report in devices if not report["quick"] and DEVICE in report["device"]]
    parts = [target_table(full[0] if full else None)]
    parts += [contender_table(report) for report in (*devices[:1], *processors[:1])]
    return "\n\n".join("\n".join(part) for part in parts)
