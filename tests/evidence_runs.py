"""Files of runs of scripts/evidence.py that are made up, for tests of what is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def made_up(pattern: str, name: str, seed: int, shares: Sequence[float], **more: Any) -> dict[str, Any]:
    """A run whose first guesses are right in these shares at each of its measurements, on 40 prompts."""
    rng = np.random.default_rng(7)
    noise = rng.integers(-5, 6, 40)  # the same prompts are hard for everybody
    points = [
        [[100, min(100, int(100 * share) + n), int(40 * share), int(20 * share)] for n in noise.tolist()]
        for share in shares
    ]
    curve = [{"requests": 10 * i, "updates": i, "counts": counts} for i, counts in enumerate(points)]
    update = {"cpu_seconds": 2.0, "seconds": 2.0, "decisions": {"publish": 1}, "shared": "publish"}
    learned = range(1, 1 if name == "static" else len(shares))
    settings = {
        "every": 10,
        "measured": 1,
        "steps": 1,
        "rows": 1,
        "rank": 1,
        "requests": 40,
        "domains": "a,b",
    }
    return {
        "pattern": pattern,
        "arrangement": name,
        "seed": seed,
        "machine": "any",
        "torch": "any",
        "settings": settings | {"max_tokens": 5, "heldout": 20},
        "held_out": ["a"] * 20 + ["b"] * 20,
        "domains": ["a"] * 20 + ["b"] * 20,
        "routed": ["a"] * 40,
        "curve": curve,
        "stream": [[10, 5, 2, 1]] * 40,
        "updates": [update | {"requests": 10 * i} for i in learned],
        "operations": 10,
        "target_operations": 100,
        "absent": ["a"],
        "turns": [10, 30],
        "newcomer": "b",
    } | more
