"""Makes the table of what keeping a feature drafter's features costs, from `bench_features.py`'s figures."""

from __future__ import annotations

from statistics import median
from typing import Any

from markdown_tables import table


def features(found: dict[str, Any]) -> str:
    """Memory, disk and time of either way."""
    of, serving = found["sizes"], found["serving"]
    bytes_each, cpu = of["bytes_per_token"], of["cpu_us_per_token"]
    record, kept = bytes_each["record"], bytes_each["kept on disk"]
    learned = found["learning"]

    def middle(way: str, *keys: str) -> float:
        values = list[float]()
        for one in learned[way]:
            value = one
            for key in keys:
                value = value[key]
            values.append(float(value))
        return median(values)

    def both(digits: int, scale: float, *keys: str) -> list[str]:
        return [f"{scale * middle(way, *keys):.{digits}f}" for way in ("recompute", "keep")]

    losses = [
        ", ".join(f"{middle(way, which, 'loss'):.3f}" for which in ("first", "second"))
        for way in ("recompute", "keep")
    ]
    rows = [
        ["on disk, bytes a token", f"{record:,.0f}", f"{record + kept:,.0f}"],
        [
            "in the server while a request runs, bytes a token",
            "0",
            f"{bytes_each['kept while it runs']:,.0f}",
        ],
        ["keeping, in the engine's thread, µs a token", "0", f"{cpu['keeping']:.0f}"],
        [
            "storing, in the recorder's thread, µs a token",
            f"{cpu['storing records']:.0f}",
            f"{cpu['storing both']:.0f}",
        ],
    ]
    for batch, each in serving.items():
        for key, words in (("tokens_per_second", "tokens a second"), ("cpu_ms_per_token", "processor time")):
            one = each[key]
            shown = f"{one['ratio']:.2f} ({min(one['ratios']):.2f}–{max(one['ratios']):.2f})"
            rows.append([f"{words} of keep over recompute, {batch}: median and range", "", shown])
    rows += [
        [f"first update of {found['arguments']['steps']} steps, processor s", *both(1, 1, "first", "cpu")],
        ["the next one, all records in memory", *both(1, 1, "second", "cpu")],
        ["loss of both updates", *losses],
        ["peak memory of the trainer, GB", *both(2, 1e-9, "peak_bytes")],
    ]
    note = (
        f"{of['keep']['records']} records, {of['keep']['tokens']:,} tokens of prompts and answers; "
        f"{found['arguments']['threads']} thread(s)."
    )
    return f"{table(['', 'recompute', 'keep'], rows)}\n\n{note}"
