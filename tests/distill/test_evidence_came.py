"""First guesses on the requests as they came: who is compared with whom, and from which counts."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

aims, came, figures, summary = (
    load_script(f"evidence.{name}") for name in ("aims", "came", "figures", "summary")
)


def run(name: str, seed: int, right: int, pattern: str = "steady", requests: int = 40) -> dict[str, Any]:
    """Each request has ten first guesses, of which so many are right."""
    stream = [[10, right + (i % 2), 2, 1] for i in range(requests)]
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


def test_seeds_that_disagree_leave_it_open() -> None:
    runs = figures.Runs(
        [
            *(run("mixed-replay", seed, 5) for seed in range(2)),
            *(run("joint+gate", seed, right) for seed, right in enumerate((9, 4))),
        ]
    )
    found = came.compared(runs, "steady", "mixed-replay", "joint+gate")
    assert found.seeds == pytest.approx((0.4, -0.1))
    assert found.verdict == "open"


def test_runs_without_requests_are_left_out() -> None:
    """What learns beforehand has served nothing."""
    runs = figures.Runs([run("static", 0, 3), run("offline", 0, 5, requests=0)])
    assert came.of_runs(runs, "steady", "offline") == {}
    assert came.compared(runs, "steady", "static", "offline") is None
    assert came.part(summary.summary(runs)) == ""
