"""Make the tables of kernel measurements, in Markdown, from the files that bench_kernels.py wrote.

`scripts/tables.py` puts them into docs/benchmarks.md. A target that was not measured says "not yet measured".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# name, case to look up, contender, where its microseconds stand, target in microseconds (one H200)
TARGETS: list[tuple[str, dict[str, Any], str, tuple[str, ...], float]] = [
    ("verify, B = 1, in a CUDA graph", {"batch": 1, "draft_lse": True}, "moedraft", ("graph", "us"), 15),
    ("verify, B = 64, with draft_lse", {"batch": 64, "draft_lse": True}, "moedraft", ("us",), 36),
    ("verify, B = 256, with draft_lse", {"batch": 256, "draft_lse": True}, "moedraft", ("us",), 200),
    *[
        (f"{kind}, forward + backward", {"kind": kind, "rows": 8192}, "moedraft", ("us",), limit)
        for kind, limit in (("fkl", 3400.0), ("rkl", 3400.0), ("jsd", 4800.0), ("tvd", 4800.0))
    ],
]


def load(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Reports of CUDA devices and of CPUs, newest first."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("kernels-*.json"))]
    reports.sort(key=lambda report: str(report["date"]), reverse=True)
    return [r for r in reports if r["device"] != "CPU"], [r for r in reports if r["device"] == "CPU"]


def find(report: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any] | None:
    for case in report["cases"]:
        if shape.items() <= case["shape"].items():
            return dict(case["contenders"])
    return None


def measured(
    report: dict[str, Any] | None, shape: dict[str, Any], name: str, keys: tuple[str, ...]
) -> float | None:
    value: Any = find(report, shape) if report else None
    for key in (name, *keys):
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if value is not None else None


def microseconds(value: float) -> str:
    return f"{value / 1000:.2f} ms" if value >= 1000 else f"{value:.1f} µs"


def target_table(report: dict[str, Any] | None) -> list[str]:
    where = f"{report['device']}, {report['date']}" if report else "no CUDA device yet"
    lines = [
        f"Targets on one H200, V = 151 936, bf16 ({where}):",
        "",
        "| operation | target | measured |",
        "|---|---|---|",
    ]
    for name, shape, contender, keys, limit in TARGETS:
        value = measured(report, shape, contender, keys)
        found = "not yet measured" if value is None else microseconds(value)
        lines.append(f"| {name} | {microseconds(limit)} | {found} |")
    return lines


def contender_table(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['device']}, {report['date']}, median time:",
        "",
        "| operation | shape | contender | time | of copy bandwidth | extra memory |",
        "|---|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        shape = ", ".join(f"{key} {value}" for key, value in case["shape"].items())
        for name, entry in case["contenders"].items():
            if "us" not in entry:
                lines.append(
                    f"| {case['operation']} | {shape} | {name} | {entry['status'].split(':')[0]} | | |"
                )
                continue
            share = f"{entry['share_of_copy']:.0%}" if "share_of_copy" in entry else ""
            extra = f"{entry['extra_mib']:.1f} MiB" if "extra_mib" in entry else ""
            found = microseconds(entry["us"])
            lines.append(f"| {case['operation']} | {shape} | {name} | {found} | {share} | {extra} |")
    return lines


def tables(folder: Path) -> str:
    devices, processors = load(folder)
    full = [report for report in devices if not report["quick"]]
    parts = [target_table(full[0] if full else None)]
    parts += [contender_table(report) for report in (*devices[:1], *processors[:1])]
    return "\n\n".join("\n".join(part) for part in parts)
