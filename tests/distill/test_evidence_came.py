"""First guesses on the requests as they came: who is compared with whom, and from which counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evidence_runs import made_up
from scripts_loader import load_script

aims, came, figures, summary = (
    load_script(f"evidence.{name}") for name in ("aims", "came", "figures", "summary")
)


def run(name: str, seed: int, right: int, pattern: str = "steady", requests: int = 40) -> dict[str, Any]:
    """Each request has some first guesses, of which so many are right. No two prompts are alike."""
    stream = [[1000, 100 * right + (i % 2), 2 + i, 1] for i in range(requests)]
    return made_up(pattern, name, seed, (0.4, 0.5)) | {"stream": stream}


def test_each_default_is_held_against_its_own_kind() -> None:
    rights = {"static": 3, "mixed-replay": 4, "joint+gate": 5, "mixed-replay:wide": 7, "joint+gate:wide": 6}
    runs = figures.Runs([run(name, seed, right) for name, right in rights.items() for seed in range(2)])
    whole = summary.summary(runs)
    text = came.part(whole)
    lines = {line.split("|")[2].strip(): line for line in text.splitlines() if line.startswith("| steady")}
    assert set(lines) == {
        "static",
        "one adapter, mixed replay",
        "joint, with gate",
        "one wide adapter, further updates",
        "joint, with gate, wide, further updates",
    }
    assert "+.100 [+.100, +.100] **better** |" in lines["one adapter, mixed replay"].split("static")[-1]
    assert lines["one wide adapter, further updates"].endswith("| −.100 [−.100, −.100] **worse** |")
    assert lines["joint, with gate"].endswith("| +.200 [+.200, +.200] **better** | — |")
    said = aims.part(whole)
    row = next(line for line in said.splitlines() if line.startswith("| the same on the requests"))
    assert "| partly |" in row
    assert "Below one wide adapter, further updates with steady mix −.100." in row


def test_a_prompt_counts_once_however_many_seeds_served_it() -> None:
    """Its requests are no evidence independent of each other."""

    def interval(seeds: int) -> tuple[float, float]:
        noise = np.random.default_rng(1).integers(-200, 200, 40)
        found = [run("static", seed, 3) for seed in range(seeds)]
        for seed in range(seeds):
            better = run("joint+gate", seed, 4)
            for i, row in enumerate(better["stream"]):
                row[1] += 30 + int(noise[i])
            found += [run("mixed-replay", seed, 4), better]
        change = came.compared(figures.Runs(found), "steady", "mixed-replay", "joint+gate").change
        return change.difference.low, change.difference.high

    assert interval(5) == pytest.approx(interval(1), abs=1e-6)


def test_seeds_that_disagree_leave_it_open() -> None:
    runs = figures.Runs(
        [
            *(run("static", seed, 3) for seed in range(2)),
            *(run("mixed-replay", seed, 5) for seed in range(2)),
            *(run("joint+gate", seed, right) for seed, right in enumerate((9, 4))),
        ]
    )
    found = came.compared(runs, "steady", "mixed-replay", "joint+gate")
    assert found.seeds == pytest.approx((0.4, -0.1), abs=0.01)
    assert found.verdict == "open"


def test_runs_without_requests_are_left_out() -> None:
    """What learns beforehand has served nothing."""
    runs = figures.Runs(
        [run("static", 0, 3), run("offline", 0, 5, requests=0), run("mixed-replay", 0, 5, requests=20)]
    )
    assert came.compared(runs, "steady", "static", "mixed-replay") is None
    assert came.of_runs(runs, "steady", "offline") == {}
    assert came.compared(runs, "steady", "static", "offline") is None
    assert came.part(summary.summary(runs)) == ""
