"""The table of aims says what the runs show, and that nothing is known where there are none."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

aims, figures, summary = (load_script(f"evidence.{name}") for name in ("aims", "figures", "summary"))


def rows(*runs: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Verdict and figures by aim."""
    lines = aims.part(summary.summary(figures.Runs(runs))).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {aim: (verdict, text) for aim, verdict, text in cells[2:]}


def of(pattern: str, name: str, *shares: float, **more: Any) -> list[dict[str, Any]]:
    return [made_up(pattern, name, seed, shares, **more) for seed in range(2)]


STATIC = [*of("shift", "static", 0.4), *of("steady", "static", 0.4)]
BEST = "on every traffic at least the best other online arrangement"


@pytest.mark.parametrize(
    ("others", "verdict", "said"),
    [
        (
            [0.5, 0.7],
            "partly",
            "on 1 of 2 patterns, beside one adapter, mixed replay. Below one "
            "adapter, mixed replay with steady mix −.100.",
        ),
        ([0.5, 0.6], "held", "on 2 of 2 patterns, beside one adapter, mixed replay."),
        ([0.7, 0.7], "**missed**", "on 0 of 2 patterns, beside one adapter, mixed replay."),
    ],
)
def test_the_default_is_held_against_the_best_of_the_others(
    others: list[float], verdict: str, said: str
) -> None:
    rivals = [
        run
        for pattern, share in zip(("shift", "steady"), others, strict=True)
        for run in of(pattern, "mixed-replay", 0.4, share)
    ]
    gated = [*of("shift", "joint+gate", 0.4, 0.6), *of("steady", "joint+gate", 0.4, 0.6)]
    found = rows(*STATIC, *rivals, *gated)
    some = " beside those that were run"
    assert found[BEST][0] == (verdict + some if verdict == "held" else verdict)
    assert said in found[BEST][1]
    assert (
        "Not run with one update for each window beside it: one adapter, latest window; separate experts, "
        "classifier; shared and experts in turns."
    ) in found[BEST][1]
    moves = found["above every other online arrangement where traffic moves"]
    assert moves[0] == (f"held{some}" if others[0] < 0.6 else "**missed**")
    assert "steady" not in moves[1]


def test_the_default_is_held_against_others_with_the_gate_by_itself() -> None:
    """One adapter that publishes everything is ahead, and with the gate it is not."""
    free, gated = of("steady", "mixed-replay", 0.4, 0.7), of("steady", "mixed-replay+gate", 0.4, 0.5)
    found = rows(*STATIC, *free, *gated, *of("steady", "joint+gate", 0.4, 0.6))
    assert found[BEST][0] == "**missed**"
    safe = "on every traffic at least the best other online arrangement with the same gate"
    assert found[safe] == (
        "held beside those that were run",
        "With one update for each window: on 1 of 1 pattern, beside one adapter, mixed replay, with gate. "
        "Not run with one update for each window beside it: one adapter, latest window, with gate; "
        "separate experts, classifier, with gate; shared and experts in turns, with gate.",
    )
    without = rows(*STATIC, *free, *of("steady", "joint+gate", 0.4, 0.6))
    assert without[safe] == ("not measured", "Not in these runs.")


def test_who_was_there_is_told_by_pattern() -> None:
    every = ("latest-window", "mixed-replay", "separate", "turns")
    runs = [run for name in every for run in of("steady", name, 0.4, 0.5)]
    gated = [run for pattern in ("shift", "steady") for run in of(pattern, "joint+gate", 0.4, 0.6)]
    verdict, text = rows(*STATIC, *runs, *gated)[BEST]
    assert verdict == "held"
    assert "Not run" not in text
    verdict, text = rows(*STATIC, *runs, *of("shift", "turns", 0.4, 0.5), *gated)[BEST]
    assert verdict == "held beside those that were run"
    assert text.endswith(
        "beside shared and experts in turns; one adapter, latest window (1 pattern); one adapter, mixed "
        "replay (1 pattern); separate experts, classifier (1 pattern)."
    )


def test_one_rival_with_further_updates_is_not_all_of_them() -> None:
    """All that learn online could stand beside the default in the form that serves."""
    wide = [*of("steady", "mixed-replay:wide", 0.4, 0.5), *of("steady", "joint+gate:wide", 0.4, 0.6)]
    assert rows(*STATIC, *wide)[BEST] == (
        "held beside those that were run",
        "With further updates: on 1 of 1 pattern, beside one wide adapter. Not run with further updates "
        "beside it: one adapter; one wide adapter, with gate, withheld from new domains; one wide adapter, "
        "latest window, with gate, withheld from new domains; separate wide experts, with gate; shared and "
        "experts in turns, with gate, wide; one wide adapter, a list for each domain, with gate.",
    )


def test_a_default_without_rivals_is_not_held_to_be_above_them() -> None:
    one_window = [*of("steady", "mixed-replay", 0.4, 0.5), *of("steady", "joint+gate", 0.4, 0.6)]
    alone = of("steady", "joint+gate:wide", 0.4, 0.6)
    verdict, said = rows(*STATIC, *one_window, *alone)[BEST]
    assert verdict == "held beside those that were run"
    none = (
        "Not run with further updates beside it: one wide adapter; one adapter; one wide adapter, with gate"
    )
    assert none in said


def test_domains_that_lost_are_named_and_only_those_of_the_default() -> None:
    worse = of("steady", "joint", 0.4, 0.2, 0.3)
    found = rows(*STATIC, *worse, *of("steady", "joint+gate", 0.4, 0.5, 0.6))
    assert found["with the gate no domain ends below static"] == ("held", "None, in 1 row of the tables.")
    assert found["none loses more than .01 while others learn"] == (
        "held",
        "None, at any measurement or on its own requests.",
    )
    found = rows(*STATIC, *of("steady", "joint+gate", 0.4, 0.2, 0.6))
    assert found["with the gate no domain ends below static"][0] == "held"
    verdict, text = found["none loses more than .01 while others learn"]
    assert verdict == "**missed**"
    assert "a −.200 [" in text
    assert "after 10 (steady mix)" in text
    found = rows(*STATIC, *of("steady", "joint+gate", 0.4, 0.2))
    verdict, text = found["with the gate no domain ends below static"]
    assert verdict == "**missed**"
    assert text.startswith("Below: a with steady mix −.200 [")


def test_what_learning_takes_is_told_and_what_was_not_measured() -> None:
    found = rows(*STATIC, *of("steady", "joint+gate", 0.4, 0.6))
    cost = "learning takes at most 5 % of the target's operations"
    assert found[cost] == (
        "**missed**",
        "joint, with gate: 10%, at least. Reading the target's states again is not counted.",
    )
    cheap = of("steady", "joint+gate", 0.4, 0.6, operations=1)
    assert rows(*STATIC, *cheap)[cost][0] == "held"
    nothing = ("not measured", "Not in these runs.")
    assert found["domains that are silent lose at most .01"] == nothing
    assert found[BEST] == nothing
    assert found["a new domain at 80 % of what it gains offline within 100 requests"] == nothing


def test_waits_are_held_against_their_bound() -> None:
    bound = of("new-domain", "offline", 0.4, 0.8)
    still = of("new-domain", "static", 0.4)
    aim = "a new domain at 80 % of what it gains offline within 100 requests"
    quick = rows(*still, *bound, *of("new-domain", "joint+gate", 0.4, 0.8, 0.8))
    never = rows(*still, *bound, *of("new-domain", "joint+gate", 0.4, 0.5, 0.5))
    assert quick[aim][0] == "held"
    assert never[aim] == ("**missed**", "joint, with gate: never and never requests, by seed.")


def test_nothing_is_said_where_the_default_was_not_run() -> None:
    runs = figures.Runs([*STATIC, *of("steady", "joint", 0.4, 0.6)])
    assert aims.part(summary.summary(runs)) == ""


def test_what_few_steps_bring_stands_beside_what_they_cost() -> None:
    few = of("steady", "joint:1-step", 0.4, 0.45)
    for run in few:
        run["operations"] = 3
    gated = of("steady", "joint+gate", 0.4, 0.6)
    said = rows(*STATIC, *few, *gated)["learning takes at most 5 % of the target's operations"]
    assert said[0] == "**missed**"
    assert (
        "joint, no gate, 1 step where others make 8: at least 3% for +.050 [+.050, +.050] first guesses"
        in said[1]
    )


def test_what_a_client_that_sends_rubbish_does_is_told_by_held_out_prompts_and_the_gates_record() -> None:
    aim = "a client that sends rubbish makes nothing worse that is published"
    outcome = {"expert": "shared", "decision": "promote"}
    update = {"requests": 10, "cpu_seconds": 1.0, "seconds": 1.0, "decisions": {"promote": 1}, "shared": ""}

    def told(*shares: float, gain: float = 0.02, chance: float = 0.01) -> tuple[str, str]:
        figures = {"gain": gain, "low": gain - chance, "high": gain + chance, "witness": None, "records": 4}
        updates = [update | {"outcomes": [outcome | figures]}]
        still = made_up("poison-flood", "static", 0, [0.4, 0.4, 0.4])
        learned = made_up("poison-flood", "joint+gate:wide", 0, shares, updates=updates)
        return rows(still, learned)[aim]

    assert told(0.4, 0.5, 0.6)[0] == "held"
    assert told(0.4, 0.5, 0.6, gain=-0.01, chance=0.02)[0] == "held", "level, as far as can be told"
    assert told(0.4, 0.5, 0.6, gain=-0.03, chance=0.02)[0] == "**missed**"
    assert told(0.4, 0.3, 0.6)[0] == "**missed**"
    assert (
        "of 1 published version none surely worse than the one before by the gate's record (the least gain "
        "is −.010 tokens per step, 80 % interval −.030 to +.010)"
    ) in told(0.4, 0.5, 0.6, gain=-0.01, chance=0.02)[1]
