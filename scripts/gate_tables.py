"""The tables of what the gate goes by, from results/gate.json."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
from markdown_tables import table

from moedraft.distill.judging.gate import DOUBTFUL, LIKELY, SURE, SURE_AGAIN, suffices
from moedraft.distill.measuring.figures import FEW

Update = dict[str, Any]
HARM = 0.01  # tokens per step
WORTH = 0.02


def before(one: Update) -> bool:
    """The rule until 2026-11-27."""
    sure, risen = (0.95, 0.975) if one["seen"] else (SURE, 0.95)
    return bool(one["better"] >= sure or (one["better"] > LIKELY and one["witness"] >= risen))


def now(one: Update) -> bool:
    """The gate's own."""
    return suffices(one["better"], one["witness"], SURE_AGAIN if one["seen"] else SURE)


RULES: dict[str, Callable[[Update], bool]] = {
    "guesses sure to .9": lambda one: one["better"] >= SURE,
    "guesses sure to .9, or likely and their witness sure to .95 (before)": before,
    "witness sure to .9": lambda one: one["witness"] >= SURE,
    f"guesses sure to .9 or their witness to .95, the other at least {DOUBTFUL} (now)": now,
    "all": lambda one: True,
}


def judged(found: dict[str, Any]) -> list[Update]:
    """The updates that the gate had enough records for."""
    every = [one for run in found["runs"].values() for one in run["updates"]]
    return [one for one in every if one["records"] + one["seen"] >= FEW and one["witness"] is not None]


def rules(found: dict[str, Any]) -> str:
    """What each rule would have published."""
    updates = judged(found)
    rows = []
    for name, rule in RULES.items():
        taken = [one["true"]["gain"] for one in updates if rule(one)]
        left = [one["true"]["gain"] for one in updates if not rule(one)]
        rows.append(
            [
                name,
                f"{len(taken)} of {len(updates)}",
                f"{sum(taken):.2f}",
                str(sum(gain < -HARM for gain in taken)),
                str(sum(gain > WORTH for gain in left)),
            ]
        )
    head = ["rule", "published", "true gains, summed", f"of them below −{HARM}", f"left out above +{WORTH}"]
    return table(head, rows)


def agreement(found: dict[str, Any]) -> str:
    """How far guesses and their witness tell the true gain."""
    updates = judged(found)
    true = np.array([one["true"]["gain"] for one in updates])
    rows = []
    for name, key in (("gain by guesses", "gain"), ("rise of the right tokens' probability", "rise")):
        seen = np.array([one[key] for one in updates])
        rows.append([f"{name}, on the gate's records", f"{np.corrcoef(seen, true)[0, 1]:.2f}"])
    rise = np.array([one["true"]["rise"] for one in updates])
    slope = float(rise @ true / (rise @ rise))
    rest = sqrt(float(((true - slope * rise) ** 2).mean()))
    rows.append(
        [
            "rise of the right tokens' probability, on the held-out prompts",
            f"{np.corrcoef(rise, true)[0, 1]:.2f}",
        ]
    )
    text = (
        f"{len(updates)} updates; a rise of .01 stands for {slope / 100:.3f} tokens per step, "
        f"give or take {rest:.3f}."
    )
    return f"{table(['', 'correlation with the true gain'], rows)}\n\n{text}"
