"""What scripts/evidence.py says of the requests on both sides of where one data set follows another."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

boundaries, figures, summary = (
    load_script(f"evidence.{name}") for name in ("boundaries", "figures", "summary")
)


def run(name: str, seed: int, *shares: float, every: int = 4) -> dict[str, Any]:
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
    one = of(run("static", 0, *([0.5] * 6)), run("joint", 0, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9, every=16))
    found = one["patterns"]["one-by-one"]["joint"]["boundaries"]
    assert (found["before"]["value"], found["after"]["value"]) == pytest.approx((0.25, -0.15))


def test_the_table_names_each_data_set_and_stands_only_where_there_are_runs() -> None:
    still, learned = run("static", 0, *([0.5] * 6)), run("joint", 0, 0.5, 0.7, 0.4, 0.8, 0.3, 0.9)
    text = boundaries.part(of(still, learned))
    assert "| seeds | last window of a data set | first window of the next | a | b | c |" in text
    assert "| +.000 → +.200 | −.100 → +.300 | −.200 → +.400 |" in text
    assert boundaries.part(of(still)) == ""
    assert boundaries.part(of(still, learned | {"stream": learned["stream"][5:]})) == ""
    assert boundaries.part(of(made_up("steady", "joint", 0, [0.4]))) == ""
