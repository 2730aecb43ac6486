"""What scripts/evidence.py says of the requests on both sides of where one data set follows another."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

boundaries, figures, summary = (
    load_script(f"evidence.{name}") for name in ("boundaries", "figures", "summary")
)


def run(name: str, seed: int, *shares: float, every: int = 5) -> dict[str, Any]:
    """Three data sets of ten requests each; shares of right first guesses, five requests after the other."""
    stream = [[10, round(10 * share), 2, 1] for share in shares for _ in range(5)]
    found = made_up("one-by-one", name, seed, [0.4] if name == "static" else [0.4, 0.5])
    settings = found["settings"] | {"every": every}
    order = ["a", "b", "c"] if seed == 0 else ["b", "a", "c"]
    domains = [name for name in order for _ in range(10)]
    return found | {"stream": stream, "domains": domains, "routed": domains, "settings": settings}


def of(*runs: dict[str, Any]) -> Any:
    return summary.summary(figures.Runs(runs))


def test_windows_before_and_after_each_boundary_are_compared_with_static() -> None:
    still = [run("static", seed, *([0.5] * 6)) for seed in (0, 1)]
    learned = [run("joint", seed, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9) for seed in (0, 1)]
    found = of(*still, *learned)["patterns"]["one-by-one"]["joint"]["boundaries"]
    assert found["before"]["value"] == pytest.approx(0.25)  # .2 before the first, .3 before the second
    assert found["after"]["value"] == pytest.approx(-0.15)
    assert found["after"]["seeds"] == pytest.approx([-0.15, -0.15])
    assert found["after"]["verdict"] == "worse"
    assert found["by"]["c"] == pytest.approx([-0.2, 0.4])
    assert found["by"]["a"] == pytest.approx([-0.05, 0.25])  # first with one seed, second with the other


def test_a_long_window_is_half_of_a_short_stretch() -> None:
    one = of(run("static", 0, *([0.5] * 6)), run("joint", 0, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9, every=10))
    found = one["patterns"]["one-by-one"]["joint"]["boundaries"]
    assert (found["before"]["value"], found["after"]["value"]) == pytest.approx((0.25, -0.15))


def test_the_table_names_each_data_set_and_stands_only_where_there_are_runs() -> None:
    still, learned = run("static", 0, *([0.5] * 6)), run("joint", 0, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9)
    text = boundaries.part(of(still, learned))
    assert "| seeds | last window of a data set | first window of the next | a | b | c |" in text
    assert "| +.000 → +.200 | −.100 → +.300 | −.200 → +.400 |" in text
    assert boundaries.part(of(still)) == ""
    assert boundaries.part(of(still, learned | {"stream": learned["stream"][5:]})) == ""
    inside = [run(name, 0, *([0.5] * 6), every=4) for name in ("static", "joint")]
    assert boundaries.part(of(*inside)) == "", "an update came in the middle of a first window"
    assert boundaries.part(of(made_up("steady", "joint", 0, [0.4]))) == ""


def test_prompts_that_come_with_several_seeds_are_counted_once() -> None:
    """Two seeds with the same figures are no more evidence than one."""
    still = [run("static", seed, *([0.5] * 6)) for seed in (0, 1)]
    learned = [run("joint", seed, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9) for seed in (0, 1)]
    for one in (*still, *learned):
        one["domains"] = one["routed"] = ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    for i in range(30):  # each prompt is told by what the static draft guesses of it
        for one in still:
            one["stream"][i] = [10, 5, 2, i]
        for one in learned:
            one["stream"][i] = [10, one["stream"][i][1] + i % 3 - 1, 2, 1]
    both, single = (
        of(*runs)["patterns"]["one-by-one"]["joint"]["boundaries"]["after"]
        for runs in ((*still, *learned), (still[0], learned[0]))
    )
    assert [both[key] for key in ("value", "low", "high")] == pytest.approx(
        [single[key] for key in ("value", "low", "high")], abs=1e-6
    )
