"""Make the tables of kernel measurements, in Markdown, from the files that bench_kernels.py wrote.

`scripts/tables.py` puts them into docs/benchmarks.md. A target that was not measured says "not yet measured".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernel_case import ABOUT, Case
from kernel_cases import cases
from kernel_timing import cuda_bench

V = 151_936
# Of an H200: bytes per second of its memory, operations per second in bfloat16 (dense), bytes of its cache.
BANDWIDTH, OPERATIONS, H200_CACHE = 4.8e12, 989e12, 60 * 2**20
VERIFY = {"operation": "verify_chain", "vocab": V, "draft_lse": True}
LOSS = {"vocab": V, "rows": 8192}
# name, case to look up (operation and shape), target in microseconds; None: nothing was promised. All are of
# a CUDA graph: between two events the time until Python has begun a call would count as the device's.
TARGETS: list[tuple[str, dict[str, Any], float | None]] = [
    (
        "top-k-teacher loss, forward + backward",
        {"operation": "topk divergence", "kind": "fkl", **LOSS},
        1500.0,
    ),
    ("verify, B = 1", {"batch": 1, **VERIFY}, 10),
    ("verify, B = 64", {"batch": 64, **VERIFY}, 34),
    ("verify, B = 256", {"batch": 256, **VERIFY}, 200),
    ("top-p filter, B = 64", {"operation": "find_cuts", "batch": 64, "top_k": 0}, 150),
    *[
        (f"{name}, B = {batch}", {"operation": rule, "batch": batch, "vocab": V}, None)
        for name, rule in (("verify by block", "verify_block"), ("verify coupled", "verify_coupled"))
        for batch in (1, 64)
    ],
    *[
        (f"{kind}, forward + backward", {"operation": "divergence", "kind": kind, **LOSS}, limit)
        for kind, limit in (("fkl", 3000.0), ("rkl", 3400.0), ("jsd", 4800.0), ("tvd", 4800.0))
    ],
]


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


def measured(report: dict[str, Any] | None, wanted: dict[str, Any]) -> float | None:
    """Microseconds of our own contender in a graph."""
    value: Any = find(report, wanted) if report else None
    for key in ("moedraft", "graph", "us"):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if value is not None else None


def microseconds(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.1f} µs"


def target_table(report: dict[str, Any] | None) -> list[str]:
    where = f"{report['device']}, {report['date']}" if report else "no CUDA device yet"
    lines = [
        f"Targets on one H200 in a CUDA graph, V = 151 936, bf16 ({where}):",
        "",
        "| operation | target | measured |",
        "|---|---|---|",
    ]
    for name, wanted, limit in TARGETS:
        value = measured(report, wanted)
        found = "not yet measured" if value is None else microseconds(value)
        target = "none" if limit is None else microseconds(limit)
        lines.append(f"| {name} | {target} | {found} |")
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
        f"{entry['extra_mib']:.1f} MiB" if "extra_mib" in entry else "",
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
    full = [report for report in devices if not report["quick"]]
    parts = [target_table(full[0] if full else None)]
    parts += [contender_table(report) for report in (*devices[:1], *processors[:1])]
    return "\n\n".join("\n".join(part) for part in parts)
