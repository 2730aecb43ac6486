"""What scripts/evidence.py reads from runs whose traffic turns: recovery, forgetting and arrival."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

figures, summary, moves = (load_script(f"evidence.{name}") for name in ("figures", "summary", "moves"))


def test_recovery_arrival_and_forgetting_are_read_from_the_curve() -> None:
    run = made_up("shift", "joint", 0, [0.4, 0.6, 0.5, 0.45, 0.55, 0.59])
    assert figures.recovery(run) == 20
    assert figures.recovery(run, within=0.001) == figures.NEVER
    lost = figures.forgotten([run])
    assert lost.change.difference.value == pytest.approx(-0.15)
    assert lost.verdict == "worse"
    bound = made_up("new-domain", "offline", 0, [0.8])
    assert figures.arrival(made_up("new-domain", "joint", 0, [0.4, 0.4, 0.6, 0.75]), bound) == 20
    assert figures.forgotten([made_up("steady", "joint", 0, [0.4, 0.6])]) is None


def moved(run: dict[str, Any], turns: list[int], *points: tuple[int, int]) -> dict[str, Any]:
    """Measured after so many requests and updates instead, each of ten requests; with other turns."""
    curve = [
        one | {"requests": requests, "updates": updates}
        for one, (requests, updates) in zip(run["curve"], points, strict=True)
    ]
    updates = [run["updates"][0] | {"requests": 10 * (i + 1)} for i in range(points[-1][1])]
    return run | {"turns": turns, "curve": curve, "updates": updates}


BLOCKS = {
    "domains": ["a"] * 53 + ["b"] * 107,
    "routed": ["a"] * 160,
    "stream": [[10, 5, 2, 1]] * 160,
}


def test_turns_between_points_are_not_measured() -> None:
    """As the runs on SmolLM2 were: before anything was learned, half-way, and at the end."""
    far = [(0, 0), (80, 8), (160, 16)]
    run = moved(made_up("shift", "joint", 0, [0.4, 0.5, 0.6]), [53, 106], *far)
    assert figures.recovery(run) is None
    assert figures.forgotten([run]) is None
    bound = made_up("new-domain", "offline", 0, [0.4])
    late = moved(made_up("new-domain", "joint", 0, [0.4, 0.5, 0.6]), [60], *far)
    assert figures.arrival(late, bound) is None, "what was reached before it came is no arrival"
    blocks = moved(made_up("one-by-one", "joint", 0, [0.4, 0.5, 0.6], **BLOCKS), [53], *far)
    assert figures.forgotten([blocks]) is None
    still = [made_up(pattern, "static", 0, [0.4]) for pattern in ("shift", "one-by-one")]
    text = moves.part(summary.summary(figures.Runs([run, blocks, *still])))
    assert (
        "**Not measured in these runs: change while silent with one domain after another, change while "
        "silent with sharp shift and return and requests until back with sharp shift and return.**"
    ) in text
    row = "| sharp shift and return | joint, no gate | 1 | 0, 80, 160 | not measured | not measured | — |"
    assert row in text


def test_turns_between_windows_are_measured_at_the_turn_and_after_it() -> None:
    points = [(0, 0), (53, 5), (60, 6), (106, 10), (110, 11), (160, 16)]
    run = moved(made_up("shift", "joint", 0, [0.4, 0.5, 0.6, 0.5, 0.59, 0.7]), [53, 106], *points)
    lost = figures.forgotten([run])
    assert lost.change.difference.value == pytest.approx(-0.1), "from 60, when all was learned, to 106"
    assert figures.recovery(run) == 4
    fell = made_up("one-by-one", "joint", 0, [0.4, 0.5, 0.6, 0.5], **BLOCKS)
    lost = figures.forgotten([moved(fell, [53], *points[:3], (160, 16))])
    assert lost.change.difference.value == pytest.approx(-0.1), "of a alone; b was served to the end"


@pytest.mark.parametrize("pattern", ["shift", "new-domain", "one-by-one"])
def test_what_learns_nothing_has_nothing_to_recover(pattern: str) -> None:
    static = made_up(pattern, "static", 0, [0.4, 0.4, 0.4, 0.4])
    for point in static["curve"]:
        point["updates"] = 0
    bound = made_up("new-domain", "offline", 0, [0.4])
    assert figures.recovery(static) is None
    assert figures.arrival(static, bound) is None
    assert figures.forgotten([static]) is None
    of = summary.summary(figures.Runs([static, bound]))["patterns"][pattern]["static"]
    assert not {"recovery", "arrival"} & of.keys()
    assert of["forgotten"] is None
