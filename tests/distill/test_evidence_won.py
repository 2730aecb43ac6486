"""What scripts/evidence.py says of whom its arrangements harm, and who the default is therefore."""

from __future__ import annotations

from typing import Any

import pytest
from evidence_runs import made_up
from scripts_loader import load_script

arrangements, figures, summary, withheld, won = (
    load_script(f"evidence.{name}") for name in ("arrangements", "figures", "summary", "withheld", "won")
)
STATIC, ONE, GATED, SERVED = (
    getattr(arrangements, name) for name in ("STATIC", "ONE_WIDE", "ONE_WIDE_GATED", "SERVED")
)


def told(*runs: dict[str, Any]) -> str:
    text: str = won.part(summary.summary(figures.Runs(runs)))
    return text


def test_an_arrangement_that_harms_a_domain_on_the_way_does_not_win() -> None:
    still = made_up("steady", STATIC, 0, [0.4, 0.4, 0.4])
    default = made_up("steady", SERVED, 0, [0.4, 0.5, 0.6])
    dip = made_up("steady", ONE, 0, [0.4, 0.3, 0.7])
    text = told(still, default, dip)
    row = next(line for line in text.splitlines() if line.startswith("| one wide adapter "))
    assert row.startswith("| one wide adapter | 1 | 1 | −.100 ")
    assert "better 1, level 0, worse 0" in row
    assert "with *one wide adapter* on 1 (steady mix); with " in text
    assert "with *joint, with gate, wide* on 0." in text
    assert "only with the default no domain did" in text


def test_others_that_harm_nobody_either_are_named() -> None:
    runs = [made_up("steady", STATIC, 0, [0.4, 0.4, 0.4])]
    runs += [made_up("steady", name, 0, [0.4, 0.5, 0.6]) for name in (SERVED, GATED)]
    text = told(*runs)
    assert "So none is harmed on these either with *one wide adapter, with gate* and *one wide" in text
    assert "What keeps domains from harm" not in text, "it harms nobody where it is not withheld either"


def test_a_rival_is_also_told_as_if_it_were_withheld_from_new_domains() -> None:
    """The second domain comes after half of the requests; until then the adapter does it harm."""
    come = {"routed": ["a"] * 20 + ["b"] * 20}
    still = made_up("steady", STATIC, 0, [0.4] * 5, **come) | {"stream": [[10, 4, 2, 1]] * 40}
    default = made_up("steady", SERVED, 0, [0.4, 0.5, 0.5, 0.5, 0.6], **come)
    dip = made_up("steady", ONE, 0, [0.4, 0.5, 0.5, 0.5, 0.7], **come) | {"stream": [[10, 6, 2, 1]] * 40}
    for point in dip["curve"][1:3]:
        point["counts"] = [*point["counts"][:20], *([100, 20, 10, 5] for _ in range(20))]
    found = withheld.runs_of(figures.Runs([still, default, dip]))
    [run] = found.of("steady", ONE)
    assert [row[1] for row in run["stream"]] == [4] * 10 + [6] * 10 + [4] * 10 + [6] * 10
    assert run["curve"][2]["counts"][:20] == dip["curve"][2]["counts"][:20]
    assert run["curve"][2]["counts"][20:] == still["curve"][0]["counts"][20:]
    assert run["curve"][3]["counts"] == dip["curve"][3]["counts"]
    assert found.of("steady", SERVED) == [default]
    text = told(still, default, dip)
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| one")}
    assert rows["| one wide adapter"].startswith("| one wide adapter | 1 | 1 | −")
    assert rows["| one wide adapter, withheld from new domains"].split(" | ")[1:3] == ["1", "0"]
    assert "So none is harmed on these either with *one wide adapter, withheld from new domains*." in text
    assert "What keeps domains from harm" in text


def test_a_domain_is_admitted_when_a_version_is_published_after_its_fourth_record() -> None:
    come = {"routed": ["a"] * 17 + ["b"] * 23}
    still = made_up("steady", STATIC, 0, [0.4] * 5, **come) | {"stream": [[10, 4, 2, 1]] * 40}
    rival = made_up("steady", ONE, 0, [0.4, 0.5, 0.5, 0.6, 0.7], **come) | {"stream": [[10, 6, 2, 1]] * 40}
    for update, decided in zip(rival["updates"], ("promote", "promote", "keep", "promote"), strict=True):
        update["shared"] = decided
    [run] = withheld.runs_of(figures.Runs([still, rival])).of("steady", ONE)
    guessed = [row[1] for row in run["stream"]]
    assert guessed[:10] == [4] * 10, "nothing was published yet"
    assert guessed[10:17] == [6] * 7
    assert guessed[17:] == [4] * 23, "three records at the second update, and the third was kept"
    assert run["curve"][3]["counts"][20:] == rival["curve"][0]["counts"][20:]
    assert run["curve"][4]["counts"] == rival["curve"][4]["counts"]


def test_a_domain_that_nobody_registered_is_not_withheld() -> None:
    """Whoever is routed to no domain is served by the adapter of all."""
    still = made_up("steady", STATIC, 0, [0.4, 0.4], routed=["shared"] * 40, absent=[])
    rival = made_up("steady", ONE, 0, [0.4, 0.6], routed=["shared"] * 40, absent=[])
    [run] = withheld.runs_of(figures.Runs([still, rival])).of("steady", ONE)
    assert run["curve"] == rival["curve"]
    assert run["stream"] == rival["stream"]


def test_where_one_adapter_was_run_withheld_the_run_counts() -> None:
    runs = [made_up("steady", STATIC, seed, [0.4, 0.4]) for seed in (0, 1)]
    runs += [made_up("steady", SERVED, seed, [0.4, 0.6]) for seed in (0, 1)]
    runs += [made_up("steady", ONE, seed, [0.4, 0.6]) for seed in (0, 1)]
    done = made_up("steady", arrangements.WITHHELD, 1, [0.4, 0.9])
    found = figures.Runs([*runs, done])
    first, second = withheld.runs_of(found).of("steady", ONE)
    assert first["curve"][1]["counts"] == runs[4]["curve"][1]["counts"]
    assert second["curve"] == done["curve"]
    whole = summary.summary(found)
    assert whole["withheld"]["steady"][ONE]["run"] == 1
    assert whole["withheld"]["steady"][ONE]["seeds"] == 2
    assert arrangements.WITHHELD in whole["patterns"]["steady"]
    alone = figures.Runs([*runs[:4], made_up("steady", arrangements.WITHHELD_GATED, 0, [0.4, 0.6])])
    assert "one wide adapter, with gate, withheld" in won.part(summary.summary(alone))


def test_without_a_static_run_nothing_is_computed() -> None:
    assert not withheld.runs_of(figures.Runs([made_up("steady", ONE, 0, [0.4, 0.6])])).by_name


def test_a_default_that_harms_a_domain_is_called_so() -> None:
    runs = [made_up("steady", STATIC, 0, [0.4, 0.4, 0.4])]
    runs += [made_up("steady", SERVED, 0, [0.4, 0.3, 0.6]), made_up("steady", ONE, 0, [0.4, 0.5, 0.6])]
    assert "the default does not keep its promise here" in told(*runs)


def test_a_default_that_harms_where_a_gated_rival_does_not_has_not_won_by_safety() -> None:
    """On another pattern than the common one. The control: a rival that does harm there, too."""
    common = [made_up("steady", STATIC, 0, [0.4, 0.4, 0.4])]
    ran = (SERVED, ONE, arrangements.WITHHELD_GATED)
    common += [made_up("steady", name, 0, [0.4, 0.5, 0.6]) for name in ran]
    still = made_up("familiar", STATIC, 0, [0.4, 0.4, 0.4])
    dip = made_up("familiar", SERVED, 0, [0.4, 0.3, 0.6])
    safe = made_up("familiar", arrangements.WITHHELD_GATED, 0, [0.4, 0.4, 0.5])
    text = told(*common, still, dip, safe)
    assert "By safety alone the default has not won" in text
    assert "stays the default for what it gains" in text
    assert "*one wide adapter, with gate, withheld from new domains* (in the end surely below" in text
    assert "on 1 of 2 patterns)" in text
    assert "the default is what won" not in text
    harms = made_up("familiar", arrangements.WITHHELD_GATED, 0, [0.4, 0.3, 0.5])
    also = told(*common, still, dip, harms)
    assert "the default is what won" in also
    assert "lost more than .01 with it as well, and so with *one wide adapter, with gate, withheld" in also
    assert "and no rival that harms nobody was run there" in told(*common, still, dip)


def test_what_a_domain_lost_on_its_own_requests_counts_where_no_measurement_shows_it() -> None:
    """Held-out prompts are measured now and then, and what was lost between is told by the requests."""
    still = made_up("steady", STATIC, 0, [0.4, 0.4, 0.4]) | {
        "stream": [[100, 50 + i % 3, i, 1] for i in range(40)]
    }
    fine = made_up("steady", SERVED, 0, [0.4, 0.5, 0.6])
    fine |= {"stream": [[100, 60 + i % 3, i, 1] for i in range(40)]}
    loses = made_up("steady", ONE, 0, [0.4, 0.5, 0.6])
    loses |= {"stream": [[100, (60 if i < 20 else 45) + i % 3, i, 1] for i in range(40)]}
    text = told(still, fine, loses)
    row = next(line for line in text.splitlines() if line.startswith("| one wide adapter |"))
    assert row.split(" | ")[2:5] == ["1", "+.100 [+.100, +.100] better", "−.050 [−.050, −.050] worse"]
    assert "only with the default no domain did" in text


def test_a_small_loss_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [made_up("steady", STATIC, 0, [0.4, 0.4, 0.4]), made_up("steady", SERVED, 0, [0.4, 0.5, 0.6])]
    runs.append(made_up("steady", ONE, 0, [0.4, 0.37, 0.7]))
    assert "with *one wide adapter* on 1 " in told(*runs)
    monkeypatch.setattr(won.lows, "WORST", 0.05)
    assert "with *one wide adapter* on 0;" in told(*runs)


def test_only_patterns_that_all_were_run_on_decide() -> None:
    runs = [made_up(pattern, STATIC, 0, [0.4, 0.4, 0.4]) for pattern in ("steady", "drift")]
    runs += [made_up(pattern, SERVED, 0, [0.4, 0.5, 0.6]) for pattern in ("steady", "drift")]
    text = told(*runs, made_up("drift", ONE, 0, [0.4, 0.5, 0.6]))
    assert "On the 1 pattern of traffic that all of these were run on" in text
    assert told(*runs) == "", "nothing stands beside the default"


def test_a_page_says_in_which_runs_unsure_records_teach_by_probability() -> None:
    words = load_script("evidence.words")
    text = words.unsure_routing({"steady": [3, 5], "drift": [None]})
    assert "with steady mix (up to 5 requests). In older runs (slow drift)" in text
    assert "in these runs, which are older" in words.unsure_routing({"steady": [None], "drift": []})


def test_a_rival_that_harms_nobody_and_is_better_is_said_to_be_ahead() -> None:
    runs = [made_up("steady", STATIC, 0, [0.4, 0.4, 0.4]), made_up("steady", SERVED, 0, [0.4, 0.5, 0.5])]
    assert "has not won**: it is behind *one wide adapter* and" in told(
        *runs, made_up("steady", ONE, 0, [0.4, 0.5, 0.7])
    )
    level = told(*runs, made_up("steady", ONE, 0, [0.4, 0.5, 0.5]))
    assert "has not won" not in level
    assert "the default is what won" in level
    assert "has not won" not in told(*runs, made_up("steady", ONE, 0, [0.4, 0.2, 0.7])), "it harms"


def test_arrangements_that_were_run_with_some_traffic_stand_in_the_table_and_choose_no_patterns() -> None:
    runs = [made_up(pattern, STATIC, 0, [0.4, 0.4, 0.4]) for pattern in ("steady", "drift")]
    runs += [made_up(p, name, 0, [0.4, 0.5, 0.6]) for p in ("steady", "drift") for name in (SERVED, ONE)]
    text = told(*runs, made_up("steady", arrangements.SEPARATE_WIDE, 0, [0.4, 0.5, 0.7]))
    row = next(line for line in text.splitlines() if line.startswith("| separate wide experts"))
    assert row.startswith("| separate wide experts, with gate | 1 | 0 |")
    assert "On the 2 patterns of traffic that one adapter and the default were all run on" in text
    assert "behind *separate wide experts, with gate*, which is surely better on some patterns" in text


def test_harm_that_not_every_seed_shows_counts() -> None:
    runs = [made_up("steady", STATIC, seed, [0.4, 0.4, 0.4]) for seed in (0, 1)]
    runs += [made_up("steady", ONE, seed, [0.4, 0.5, 0.6]) for seed in (0, 1)]
    runs += [made_up("steady", SERVED, 0, [0.4, 0.2, 0.6]), made_up("steady", SERVED, 1, [0.4, 0.41, 0.6])]
    assert "the default does not keep its promise here" in told(*runs)
