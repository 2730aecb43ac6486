"""What scripts/evidence.py reads from files of runs, its document, and its command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evidence_runs import made_up
from scripts_loader import load_script

command, figures, summary, lows, missing, costs, decisions, served = (
    load_script(f"evidence.{name}")
    for name in ("command", "figures", "summary", "lows", "missing", "costs", "decisions", "served")
)
arrangements, document, paper, tokens, growth, comparable = (
    load_script(f"evidence.{name}")
    for name in ("arrangements", "document", "paper", "tokens", "growth", "comparable")
)
SERVED = arrangements.SERVED


# -- figures ---------------------------------------------------------------------------------------


def test_a_difference_is_sure_only_where_interval_and_every_seed_agree() -> None:
    def runs(*ends: float) -> Any:
        static = [made_up("steady", "static", seed, [0.4]) for seed in range(len(ends))]
        return figures.Runs(
            [*static, *(made_up("steady", "joint", i, [0.4, end]) for i, end in enumerate(ends))]
        )

    assert figures.against(runs(0.6, 0.5), "steady", "static", "joint").verdict == "better"
    assert figures.against(runs(0.3, 0.2), "steady", "static", "joint").verdict == "worse"
    split = figures.against(runs(0.7, 0.35), "steady", "static", "joint")
    assert split.change.verdict == "better"
    assert split.verdict == "open"
    assert figures.against(runs(0.4), "steady", "static", "joint").verdict == "open"
    assert figures.against(runs(), "steady", "static", "joint") is None


def test_the_lowest_point_of_a_domain_is_found_on_the_way() -> None:
    def runs(*middles: float) -> Any:
        still = [made_up("drift", "static", seed, [0.4]) for seed in range(len(middles))]
        learned = [made_up("drift", "joint", i, [0.4, one, 0.6]) for i, one in enumerate(middles)]
        return figures.Runs([*still, *learned])

    found = figures.lowest(runs(0.3, 0.2), "drift", "static", "joint", "a")
    assert (found.requests, found.served) == (10, (10, 10))
    assert found.compared.verdict == "worse"
    assert found.compared.change.difference.value == pytest.approx(-0.15)
    assert figures.lowest(runs(0.3, 0.2), "drift", "static", "joint", "b").served == (0, 0)
    risen = figures.lowest(runs(0.5), "drift", "static", "joint", "a")
    assert risen.compared.change.difference.value == pytest.approx(0.1)
    assert figures.lowest(runs(), "drift", "static", "joint", "a") is None

    of = summary.summary(runs(0.3, 0.2))["patterns"]["drift"]
    assert of["joint"]["domains"]["a"]["verdict"] == "better"  # in the end nothing is to be seen of it
    text = lows.sentence(of["joint"])
    assert text.startswith("On the way, below static: a −.150 [")
    assert (
        "(2 seeds: −.100, −.200) after 10 requests, 10 of them its own, a miss of the aim that none" in text
    )
    assert lows.cell(of["joint"]).startswith("a, after 10: −.150")
    assert lows.cell(of["static"]) == "—"
    one = summary.summary(runs(0.5))["patterns"]["drift"]["joint"]
    said = "On the way no domain stood more than .01 below static at any of 2 measurements"
    assert lows.sentence(one) == f"{said} (after 10 and 20 requests)."


def test_gains_on_the_stream_are_those_of_windows() -> None:
    still, learned = (made_up("steady", name, 0, [0.4, 0.6]) for name in ("static", "joint"))
    learned["stream"] = [[10, 5, 2, 1]] * 20 + [[10, 8, 2, 1]] * 20
    assert figures.stream_gain([still], [learned], 20) == [(10, 0.0), (30, pytest.approx(0.3))]
    assert figures.stream_gain([still], [learned], 20, ["b"]) == [(30, pytest.approx(0.3))]


def test_what_the_gate_had_measured_is_shown_where_runs_kept_it() -> None:
    outcomes = [
        {"expert": "a", "decision": "promote", "gain": gain, "low": low, "high": 0.3, "records": 9}
        for gain, low in ((0.2, 0.1), (0.05, -0.01))
    ]
    outcomes.append(
        {"expert": "b", "decision": "along", "gain": -0.01, "low": -0.1, "high": 0.1, "records": 2}
    )
    outcomes.append({"expert": "b", "decision": "keep", "gain": 0.01, "low": -0.1, "high": 0.1, "records": 2})
    old, new = (made_up("steady", "joint+gate", seed, [0.4, 0.6]) for seed in range(2))
    assert "cannot be shown" in decisions.gate(summary.summary(figures.Runs([old])))
    new["updates"] = [new["updates"][0] | {"outcomes": outcomes}]
    text = decisions.gate(summary.summary(figures.Runs([old, new])))
    assert "| steady mix | joint, with gate | 2 | +.125 | +.050 | 1 of 2 | — | 1, least −.010 |" in text
    outcomes[0]["witness"] = 0.5
    outcomes[1]["witness"] = 0.96
    text = decisions.gate(summary.summary(figures.Runs([old, new])))
    assert "| 1 of 2 | 1 of 1 | 1, least −.010 |" in text


def test_the_default_as_served_has_a_price_and_a_place() -> None:
    learned = ("joint", SERVED, "mixed-replay:wide")
    runs = [made_up("drift", one, 0, [0.4, 0.3, 0.6]) for one in learned]
    runs.append(made_up("drift", "static", 0, [0.4]))
    runs += [made_up("steady", one, 0, [0.4, 0.6]) for one in ("static", "joint")]
    whole = summary.summary(figures.Runs(runs))
    text = costs.prices(whole)
    assert "With further updates the default takes at least 20% of them**, 120% with that reading." in text
    assert "at most 2 after each update, of 1 steps, where a server makes up to 8 of 16" in text
    assert text.count("| joint, with gate, wide, further updates |") == 1
    assert "was run with slow drift. It was not run with steady mix." in missing.part(whole)
    assert "Of the arrangements: one adapter, latest window" in missing.part(whole)
    assert "with slow drift, a −.100" in served.on_the_way(whole)
    assert "experiments.md#the-rank-of-the-shared-adapter" in served.finding(whole)
    assert "each of them sure" not in served.finding(whole)
    assert "with one seed, which tells nothing of others, slow drift (+.200" in served.finding(whole)


def test_what_was_run_with_some_of_the_traffic_only_is_told() -> None:
    runs = [made_up(pattern, "static", 0, [0.4]) for pattern in ("steady", "drift", "shift", "poison-flood")]
    some = {
        "joint": ("steady", "drift", "shift", "poison-flood"),
        "joint+gate": ("steady", "shift"),
        "mixed-replay+gate": ("drift",),
        "turns+gate": ("drift",),
        SERVED: ("steady",),
    }
    runs += [made_up(pattern, name, 0, [0.4, 0.5]) for name, there in some.items() for pattern in there]
    text = missing.part(summary.summary(figures.Runs(runs)))
    assert (
        "- Run with some of the traffic only: one adapter, mixed replay, with gate; shared and experts in "
        "turns, with gate (with slow drift); joint, with gate (with all but slow drift).\n"
    ) in text
    assert (
        "- With a client that sends rubbish, nothing was run but the static draft and joint, no gate.\n"
        in text
    )
    never = next(line for line in text.splitlines() if line.startswith("- Of the arrangements: "))
    assert "one adapter, latest window, with gate; separate experts, classifier, with gate" in never
    assert "turns, with gate" not in never
    assert "was run with steady mix. It was not run with sharp shift and return, slow drift and a" in text
    whole = summary.summary(figures.Runs([run for run in runs if run["pattern"] == "steady"]))
    assert "Run with some" not in missing.part(whole)
    assert "a client that sends rubbish" not in missing.part(whole)
    alone = [made_up("only:law", "static", 0, [0.4]), made_up("only:law", SERVED, 0, [0.4, 0.5])]
    text = missing.part(summary.summary(figures.Runs([*alone, runs[0]])))
    assert "further updates): on no traffic of several domains, only with law alone." in text


def test_gains_that_are_set_beside_each_other_are_of_one_pattern() -> None:
    runs = [made_up("crossed", name, 0, [0.4, 0.5]) for name in ("joint", "joint+gate")]
    runs += [made_up("drift", name, 0, [0.4, 0.6]) for name in ("joint", "joint+gate", "turns")]
    runs += [made_up(pattern, "static", 0, [0.4]) for pattern in ("crossed", "drift")]
    text = costs.prices(summary.summary(figures.Runs(runs)))
    assert "with slow drift in every row" in text
    assert text.count("| +0.2000 |") == 3
    fewer = [run for run in runs if (run["pattern"], run["arrangement"]) != ("drift", "joint")]
    more = [
        made_up("crossed", name, 1, shares) for name, shares in (("joint", [0.4, 0.5]), ("static", [0.4]))
    ]
    text = costs.prices(summary.summary(figures.Runs([*fewer, *more])))
    assert "with prompts whose second half is of another domain in every row" in text
    assert text.count("| +0.1000 |") == 2
    assert "| shared and experts in turns | — | — |" in text


def test_open_is_not_level_where_the_interval_excludes_zero() -> None:
    runs = [made_up("drift", "static", seed, [0.4]) for seed in range(2)]
    runs += [made_up("drift", SERVED, seed, [0.4, 0.5]) for seed in range(2)]
    runs += [made_up("drift", "mixed-replay:wide", seed, [0.4, e]) for seed, e in enumerate((0.7, 0.48))]
    found = served.finding(summary.summary(figures.Runs(runs)))
    assert "gains first guesses on the static draft: +.100 to +.100 on 1 pattern of traffic" in found
    assert "each of them sure" in found
    assert "Against one wide adapter, further updates: open with slow drift: its interval says −.090" in found
    assert "but the 2 seeds disagree" in found
    assert "level" not in found.split("Where one adapter")[0]


def test_precision_and_recall_of_frequent_tokens() -> None:
    told = [(1, 1), (1, 1), (1, 2), (2, 1), (3, 3), (4, 9)]
    rows = tokens.counted(told)
    assert rows[0] == [1, 3, 3, 2]
    assert rows[-1] == [-1, 0, 1, 0], "what is guessed and never said"
    found = tokens.rates(rows)
    assert found["the 10 most frequent"] == pytest.approx({"share": 1, "precision": 0.6, "recall": 0.5})
    assert found["the next 90"] == {"share": 0.0, "precision": 0.0, "recall": 0.0}
    assert found["all others"] == {"share": 0.0, "precision": 0.0, "recall": 0.0}
    one = made_up("only:sql_en", "latest-window", 0, [0.4, 0.6], tokens={"before": rows, "after": rows})
    runs = figures.Runs([one, made_up("only:sql_en", "static", 0, [0.4])])
    text = paper.top_tokens(summary.summary(runs))
    row = "| sql_en | one adapter, latest window | the 10 most frequent | 1.00 | 0.60 | 0.60 | 0.50 | 0.50 |"
    assert row in text
    assert "which tokens are guessed right" not in missing.part(summary.summary(runs))
    assert "its fourth data set, general questions; each objective" in missing.part(summary.summary(runs))


def test_harm_without_a_gate_is_said_beside_what_the_gate_makes_of_it() -> None:
    runs = [made_up("only:general_en", "static", 0, [0.6]), made_up("only:sql_en", "static", 0, [0.4])]
    runs.append(made_up("only:sql_en", "latest-window", 0, [0.4, 0.6]))
    assert paper.harmed(summary.summary(figures.Runs(runs))) == ""
    runs.append(made_up("only:general_en", "latest-window", 0, [0.6, 0.5]))
    text = paper.harmed(summary.summary(figures.Runs(runs)))
    assert "With general_en, adapters that learn without a gate end below static" in text
    assert "With the gate" not in text
    runs.append(made_up("only:general_en", SERVED, 0, [0.6, 0.6]))
    whole = summary.summary(figures.Runs(runs))
    assert "With the gate and further updates: general_en +.000 [+.000, +.000]." in paper.harmed(whole)
    assert "sql_en" not in paper.harmed(whole)


def test_languages_and_topics_are_told_apart() -> None:
    names = {"held_out": ["docs_fr"] * 10 + ["docs_ja"] * 10 + ["sql"] * 10 + ["code"] * 10}
    shares = {"static": [0.4], "mixed-replay": [0.4, 0.5], "separate": [0.4, 0.45]}
    runs = [made_up("steady", name, 0, found, **names) for name, found in shares.items()]
    text = paper.routed(summary.summary(figures.Runs(runs)))
    for group in ("language", "topic"):
        assert f"| {group} | separate experts, classifier | 1 | +.050" in text
    assert "| −.050" in text, "less than one adapter"
    assert paper.routed(summary.summary(figures.Runs([made_up("steady", "joint", 0, [0.4])]))) == ""


def test_patterns_that_ran_in_another_precision_are_named() -> None:
    runs = [made_up(pattern, "static", 0, [0.4]) for pattern in ("steady", "drift")]
    assert "float32" not in document.settings(summary.summary(figures.Runs(runs)))
    runs.append(made_up("crossed", "static", 0, [0.4], precision="float32"))
    text = document.settings(summary.summary(figures.Runs(runs)))
    assert "With prompts whose second half is of another domain, the target ran in float32" in text


def test_nine_ways_of_objective_and_answers_are_one_table() -> None:
    nine = [name for row in arrangements.TAUGHT.values() for name in row.values()]
    runs = [made_up("steady", name, 0, [0.4, 0.6]) for name in nine]
    runs.append(made_up("steady", "static", 0, [0.4]))
    whole = summary.summary(figures.Runs(runs))
    assert paper.data(whole).count("\n| joint") == 9
    assert "each objective" not in missing.part(whole)
    assert paper.data(summary.summary(figures.Runs([runs[0], runs[3], runs[-1]]))) == ""


def test_tokens_per_step_count_drafts_as_far_as_they_are_right() -> None:
    rows = np.array([[10, 5, 4, 1], [10, 0, 0, 0]])
    assert figures.tokens_per_step(rows) == [(20.0, 10.0), (10.0, 10.0)]


# -- the whole -------------------------------------------------------------------------------------


class TinyWorkplace:
    """In the place of models: runs that are made up, counted."""

    made = 0

    def __init__(self, args: Any) -> None:
        self.args = args
        self.manner = comparable.Manner("float32", 1.0, args.own_tokens, 0, False)

    def run(self, pattern: str, arrangement: str, seed: int) -> dict[str, Any]:
        type(self).made += 1
        ends = {"static": [0.4], "latest-window": [0.4, 0.6, 0.6, 0.7], "joint": [0.4, 0.5, 0.6, 0.6]}
        asked = {
            "domains": ["a"] * 20 + ["b"] * 10,
            "routed": ["a"] * 30,
            "stream": [[10, 5, 2, 1]] * 30,
        }  # measured when all were served
        found = made_up(pattern, arrangement, seed, ends.get(arrangement, [0.4, 0.5, 0.3, 0.3]), **asked)
        return found | {"settings": command.settings(self.args), "own_tokens": self.args.own_tokens}


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "data" / "stream").mkdir(parents=True)
    monkeypatch.setattr(command, "Workplace", TinyWorkplace)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    TinyWorkplace.made = 0
    places = {"--data": "data", "--out": "out", "--doc": "docs/evidence.md"}
    return [word for flag, name in places.items() for word in (flag, str(tmp_path / name))]


def test_in_a_quarter_of_an_hour_the_default_stands_beside_one_adapter_as_large(given: list[str]) -> None:
    args = command.arguments([*given, "--quick"])
    names = ("static", arrangements.ONE_WIDE, SERVED)
    assert command.jobs(args) == [(0, p, name) for p in ("steady", "one-by-one") for name in names]
    command.main([*given, "--quick"])
    assert "The 6 runs of `--quick` took 0 minutes here" in args.doc.read_text(encoding="utf-8")


def test_runs_are_resumed_and_the_document_says_what_the_figures_say(
    given: list[str], tmp_path: Path
) -> None:
    given += ["--parts", "main,gated", "--patterns", "steady,one-by-one"]
    given += ["--arrangements", "static,latest-window,joint,joint+gate"]
    command.main([*given, "--seeds", "1"])
    assert TinyWorkplace.made == 8
    command.main([*given, "--seeds", "1"])
    assert TinyWorkplace.made == 8
    command.main([*given, "--seeds", "2"])
    assert TinyWorkplace.made == 16
    text = (tmp_path / "docs" / "evidence.md").read_text()
    assert "Joint, no gate is better than the static draft: +.200" in text
    assert "It is **below** one adapter, latest window (−.100, 2 seeds)." in text
    assert "Joint, with gate is worse than the static draft" in text
    assert "It is **below** one adapter, latest window (−.400, 2 seeds)." in text
    assert "Below static by its interval: a (−.100) and b (−.100)." in text
    assert "(../out/curves.png)" in text
    pictures = {file.stem for file in (tmp_path / "out").glob("*.png")}
    expected = "curves gains domains by-domain positions recovery forgetting updates seconds"
    assert pictures == set(expected.split())
    assert all(f"(../out/{name}.png)" in text for name in pictures)
    whole = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert whole["patterns"]["steady"]["joint"]["gain"]["verdict"] == "better"
    one = json.loads((tmp_path / "out" / "runs" / "steady.joint.0.json").read_text())
    assert one["commit"] == command.commit()


def test_no_page_is_written_outside_of_the_results_that_nobody_named(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages in docs/ are of other runs than those of a quick look."""
    monkeypatch.chdir(tmp_path)
    command.main([*given[:-2], "--quick"])
    assert not (tmp_path / "docs").exists()
    text = (tmp_path / "out" / "evidence.md").read_text()
    assert "(curves.png)" in text
    assert f"from the files in `{(tmp_path / 'out').resolve()}`" in text
    links = set(re.findall(r"\]\(([^)#]+\.(?:md|png))", text))
    assert len(links) > 9
    assert all((tmp_path / "out" / link).exists() for link in links)


def test_pages_in_docs_point_to_what_lies_beside_them() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "[one](benchmarks.md#experts) and [two](experiments.md)"
    assert document.pointed(text, docs) == text
    assert "](../../docs/benchmarks.md#experts)" in document.pointed(text, docs.parent / "results" / "any")


@pytest.mark.parametrize("target", ["smollm2", "mini"])
def test_a_page_names_the_other_pages_but_not_itself(target: str) -> None:
    words, docs = load_script("evidence.words"), Path(__file__).parents[2] / "docs"
    pages = words.OTHER_PAGES[target]
    assert all((docs / f"{page}.md").exists() and page in words.TITLES for page in pages)
    for page in pages:
        named = set(re.findall(r"\]\((\S+)\.md\)", words.introduction(target, f"results/{page}")))
        assert named == pages.keys() - {page}


def test_the_printed_commands_name_the_pages_in_docs() -> None:
    text = document.COMMANDS.replace("\\\n", "")
    lines = [line.split("#")[0].strip() for line in text.splitlines() if "evidence.py" in line]
    assert len(lines) == 14
    assert all(command.jobs(command.arguments(line.split()[2:])) for line in lines)
    for out, doc in (re.search(r"--out (\S+)(?:.* --doc (\S+))?", line).groups() for line in lines):
        assert doc == (None if out.startswith("/tmp/") else f"docs/{Path(out).name}.md")


@pytest.mark.parametrize("folder", ["evidence-served", "evidence-mini-served"])
def test_the_printed_commands_make_every_run_that_is_there(folder: str) -> None:
    text = document.COMMANDS.replace("\\\n", "")
    lines = [line.split()[2:] for line in text.splitlines() if f"results/{folder} " in line]
    made = {job[1:] for line in lines for job in command.jobs(command.arguments(line))}
    files = (Path(__file__).parents[2] / "results" / folder / "runs").glob("*.json")
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert runs
    assert {(run["pattern"], run["arrangement"]) for run in runs} <= made


def test_every_part_is_written_about(given: list[str], tmp_path: Path) -> None:
    command.main([*given, "--seeds", "1"])
    assert TinyWorkplace.made == len(command.jobs(command.arguments([*given, "--seeds", "1"])))
    text = (tmp_path / "docs" / "evidence.md").read_text()
    for part in (
        "Where traffic moves",
        "What it costs",
        "Update interval",
        "Objectives",
        "Offline, online, and both",
    ):
        assert part in text
    assert "Spider .59 → .75" in text


@pytest.mark.parametrize(
    ("folder", "given"),
    [
        ("evidence", []),
        ("evidence-served", []),
        ("evidence-turns", []),
        ("evidence-mini", ["--target", "mini"]),
        ("evidence-mini-served", ["--target", "mini"]),
        ("evidence-long", ["--requests", "960", "--measured", "10"]),
    ],
)
def test_the_printed_commands_go_on_with_the_published_runs(folder: str, given: list[str]) -> None:
    args = command.arguments(["--data", "any", "--out", "any", *given])
    assert " ".join(given) in document.COMMANDS
    published = Path(__file__).parents[2] / "results" / folder / "summary.json"
    assert command.settings(args) == json.loads(published.read_text())["settings"]


def test_a_long_stream_is_told_point_by_point() -> None:
    def whole(requests: int) -> Any:
        runs = [
            made_up("steady", name, seed, shares)
            for name, shares in {"static": [0.4], "joint": [0.4, 0.5, 0.7]}.items()
            for seed in range(2)
        ]
        found = summary.summary(figures.Runs(runs))
        return found | {"settings": found["settings"] | {"requests": requests}}

    assert growth.part(whole(growth.LONG - 1)) == ""
    said = growth.part(whole(growth.LONG))
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert rows[0] == "| arrangement | seeds | 0 | 10 | 20 | learning's operations |"
    static = next(line for line in rows if "static" in line).split(" | ")
    joint = next(line for line in rows if "joint" in line).split(" | ")
    # As the shares were given, but for the noise of the prompts.
    assert "the first 10 requests brought +.100 first guesses, the last 10 +.200" in said
    assert static[-1].strip(" |") == "—"
    assert joint[-1].strip(" |") == "20% of the target's"
    static, joint = static[:-1], joint[:-1]
    assert [cell.split(" / ")[0] for cell in static[2:]] == [".407"] * 3
    assert [cell.split(" / ")[0] for cell in joint[2:]] == [".407", ".507", ".708"]


@pytest.mark.parametrize(
    ("end", "verdict"),
    [(0.7, "more: +.100"), (0.5, "**less**: −.100"), (0.6, "not surely more or less: +.000")],
)
def test_as_many_operations_are_set_beside_one_adapter(end: float, verdict: str) -> None:
    shares = {"static": [0.4], "mixed-replay": [0.4, 0.6], arrangements.EQUAL_COST: [0.4, end]}
    found = [made_up("steady", name, i, some) for name, some in shares.items() for i in range(2)]
    of = summary.summary(figures.Runs(found))["patterns"]["steady"]
    assert verdict in growth.at_equal_cost(of, 8)
    assert "takes about as many operations (10% and 10% of the target's)" in growth.at_equal_cost(of, 8)
    of[arrangements.EQUAL_COST]["cost"] *= 2
    assert "takes 2.00 times the operations" in growth.at_equal_cost(of, 8)
    del of[arrangements.EQUAL_COST], of["mixed-replay"]["default_more"][arrangements.EQUAL_COST]
    assert growth.at_equal_cost(of, 8) == ""


def test_other_settings_are_not_mixed_in(given: list[str]) -> None:
    command.main([*given, "--quick"])
    with pytest.raises(SystemExit, match=r"made with another steps; name another --out\."):
        command.main([*given, "--quick", "--steps", "5"])


def test_what_is_missing_is_said(given: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no part magic; there are quick, main"):
        command.main([*given, "--parts", "magic"])
    with pytest.raises(SystemExit, match="no stream/ folder"):
        command.main(["--data", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="no run has finished yet"):
        command.main([*given, "--only-write"])


NOW = comparable.Manner("float32", 0.85, 8192, 2, True)
LIKE_NOW = {
    "updates": [1],
    "settings": {"target": "smollm2"},
    "precision": "float32",
    "strength": 0.85,
    "own_tokens": 8192,
    "resampled": 2,
    "text_tokens": True,
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"precision": "bfloat16"}, "give --dtype bfloat16"),
        ({"strength": 1.0}, "give --strength 1,"),
        ({"strength": None}, "give --strength 1,"),
        ({"own_tokens": 4096}, "give --own-tokens 4096"),
        ({"own_tokens": None}, "give --own-tokens 4096"),
        ({"resampled": 0}, "give --resampled 0"),
        ({"resampled": None}, "give --resampled 0"),
        ({"text_tokens": None}, "did not guess the tokens of a request's own text"),
    ],
)
def test_a_run_does_not_stand_beside_one_that_was_made_otherwise(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    """None: an older run, from before that was told or was there."""
    (tmp_path / "runs").mkdir()
    older = {key: value for key, value in (LIKE_NOW | changed).items() if value is not None}
    file = tmp_path / "runs" / "steady.joint.0.json"
    file.write_text(json.dumps(older))
    with pytest.raises(SystemExit, match=f"{said}.* name another --out"):
        comparable.check(tmp_path, "steady", NOW)
    comparable.check(tmp_path, "drift", NOW)
    file.write_text(json.dumps(LIKE_NOW))
    comparable.check(tmp_path, "steady", NOW)


def test_what_does_not_matter_to_a_run_is_not_compared() -> None:
    nothing_published = {"updates": [], "strength": 0.5, "own_tokens": 10, "resampled": 7}
    assert not [*comparable.differences(LIKE_NOW | nothing_published, NOW)]
    independent = NOW._replace(text_tokens=False)
    mini = {"updates": [1], "settings": {"target": "mini"}, "strength": 0.85}  # has no lists
    assert not [*comparable.differences(mini, independent)]
    assert not [*comparable.differences(mini | {"own_tokens": None}, independent)]
    slower = independent._replace(rate=3e-4)
    assert "at a rate of 0.001" in next(comparable.differences(mini, slower))
    assert not [*comparable.differences(mini | {"learning_rate": 3e-4}, slower)]
