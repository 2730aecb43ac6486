"""What the demo says of measurements that are known beforehand: in figures, in words, as page and picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moedraft.showcase.findings.page import page, publish
from moedraft.showcase.findings.picture import running_mean
from moedraft.showcase.findings.report import Point, Result, joined, result_of, sentences, summary
from moedraft.showcase.shipped import Query
from moedraft.showcase.trials import (
    EARLIER,
    EXPERTS,
    LOOKUP,
    PLAIN,
    SERVED,
    STATIC,
    SYSTEMS,
    Comparison,
    Trial,
    Trials,
    in_rotation,
)

ANSWER = list(range(24))


def trials() -> Trials:
    """Two domains of five prompts each: SQL gains, Japanese stays as it was."""
    made = Trials([Query(f"{d} {n}", d, 24) for n in range(5) for d in ("sql", "docs-ja")], timed=10)
    for query in made.queries:
        gains = query.domain == "sql"
        for name, steps, seconds in (
            (PLAIN, 24, 1.2),
            (STATIC, 20, 1.0),
            (EXPERTS, 12 if gains else 20, 0.8),
            (LOOKUP, 16, 0.75),
            (EARLIER, 12, 0.7),
            (SERVED, 10, 0.6),
        ):
            made.alone.setdefault(name, []).append(Trial(ANSWER, steps, seconds))
            made.together.setdefault(name, []).append(ANSWER)
        made.guessed.setdefault(STATIC, []).append((6, 24))
        made.guessed.setdefault(EXPERTS, []).append((12 if gains else 6, 24))
    seconds = {PLAIN: 1.0, STATIC: 0.8, EXPERTS: 0.5, LOOKUP: 0.5, EARLIER: 0.48, SERVED: 0.45}
    made.seconds = {name: [one, one] for name, one in seconds.items()}  # of two queues
    return made


@pytest.fixture
def result() -> Result:
    return result_of(trials(), [Point(n, 1 + n / 10) for n in range(8)], [4], {"<fact>": "a & b"})


def test_figures_are_those_of_the_measurements(result: Result) -> None:
    plain, static, experts, *_ = result.systems
    assert plain.tokens_per_step.value == 1
    assert static.tokens_per_step.value == pytest.approx(1.2)
    assert experts.speedup.value == pytest.approx(1.5)
    assert experts.batched_tokens_per_second == pytest.approx(10 * 24)
    found = {row.domain: row for row in result.rows}
    assert found["sql"].tokens_per_step.after.value == pytest.approx(2.0)
    assert found["sql"].first_guess.difference.value == pytest.approx(0.25)
    assert found["docs-ja"].first_guess.verdict == "open"
    assert result.whole.prompts == 10


def test_words_name_what_gained_and_what_did_not(result: Result) -> None:
    said = " ".join(sentences(result))
    assert "better than before in SQL." in said
    assert "No gain yet that so few prompts could show in Japanese docs." in said
    assert "2.00 times as fast" in said
    whole = "Over all domains the first guesses of the experts hit 38 % of the tokens and those of the static"
    assert f"{whole} draft 25 %: a change of +3 to +22 points (95 % interval)." in said
    assert (
        "Lookup in the text alone is 1.60 times as fast, with earlier answers 1.71, experts alone 1.50 and"
        in said
    )
    assert "Every answer is that of plain decoding" in said
    assert "worse" not in said
    assert "full batch" not in said


def test_a_domain_that_gives_fewer_tokens_a_step_is_worse_whatever_its_first_guesses_do() -> None:
    made = trials()
    for number, query in enumerate(made.queries):
        if query.domain == "docs-ja":
            made.alone[EXPERTS][number] = replace(made.alone[EXPERTS][number], steps=22)
    found = result_of(made, [], [], {})
    row = {row.domain: row for row in found.rows}["docs-ja"]
    assert (row.first_guess.verdict, row.tokens_per_step.verdict, row.verdict) == ("open", "worse", "worse")
    assert "Drafts are worse than before in Japanese docs." in sentences(found)
    assert summary(found)["domains"]["docs-ja"]["verdict"] == "worse"
    assert summary(found)["domains"]["sql"]["verdict"] == "better"


def test_a_weak_expert_is_named_where_tokens_per_step_show_no_loss() -> None:
    """First guesses are those of the router's choice; where experts are compared another one may draft."""
    made = trials()
    for number, query in enumerate(made.queries):
        if query.domain == "docs-ja":
            right, total = made.guessed[STATIC][number]
            made.guessed[EXPERTS][number] = (right - 2, total)
    found = result_of(made, [], [], {})
    row = {row.domain: row for row in found.rows}["docs-ja"]
    assert (row.first_guess.verdict, row.verdict) == ("worse", "open")
    said = " ".join(sentences(found))
    assert "own expert guesses worse than the static draft in Japanese docs; another one may draft" in said
    assert "Drafts are worse" not in said


def test_below_five_prompts_there_is_no_interval_and_a_loss_is_said_all_the_same() -> None:
    made = trials()
    made.alone = {name: found[:8] for name, found in made.alone.items()}
    for number in range(1, 8, 2):
        made.alone[EXPERTS][number] = replace(made.alone[EXPERTS][number], steps=24)
    found = result_of(made, [], [], {})
    row = {row.domain: row for row in found.rows}["docs-ja"]
    assert not row.tokens_per_step.has_interval
    assert row.first_guess.has_interval
    assert (row.prompts, row.alone) == (5, 4)
    assert "<td>5, 4 of them alone</td>" in page(found, "p.png")
    assert row.verdict == "open"
    [words] = [one for one in sentences(found) if "to be sure" in one]
    assert words.endswith("too few prompts to be sure, in Japanese docs (1.20 → 1.00).")
    assert not summary(found)["domains"]["docs-ja"]["tokens_per_step"]["has_interval"]
    assert ">-0.20<" in page(found, "p.png")


def test_a_full_batch_that_is_slower_with_experts_is_said() -> None:
    made = trials()
    made.seconds[EXPERTS] = [1.3, 1.2]
    [said] = [one for one in sentences(result_of(made, [], [], {})) if "In a full batch" in one]
    assert said.endswith("fewer tokens/s than plain decoding (120): experts (96).")
    assert "each guess adds to what it computes" in " ".join(sentences(result_of(made, [], [], {})))
    made.seconds[EXPERTS] = [1.01 * one for one in made.seconds[PLAIN]]
    assert "full batch" not in " ".join(sentences(result_of(made, [], [], {})))


def test_queues_that_disagree_tell_nothing_of_full_batches() -> None:
    """Between two queues the machine may have become half as fast."""
    made = trials()
    made.seconds[EXPERTS] = [2.0, 0.8]
    [said] = [one for one in sentences(result_of(made, [], [], {})) if "full batch" in one]
    assert said.startswith("Whether a full batch is slower")
    assert said.endswith(": experts.")
    assert "fewer tokens/s" not in " ".join(sentences(result_of(made, [], [], {})))
    made.seconds = {name: [sum(queues)] for name, queues in made.seconds.items()}  # few prompts are one queue
    assert "fewer tokens/s" in " ".join(sentences(result_of(made, [], [], {})))


def test_a_difference_from_plain_decoding_is_said() -> None:
    for where in ("alone", "together"):
        made = trials()
        if where == "alone":
            made.alone[EXPERTS][3] = replace(made.alone[EXPERTS][3], token_ids=[9])
        else:
            made.together[STATIC][0] = [9]
        assert not made.equal
        assert "NOT every answer" in sentences(result_of(made, [], [], {}))[-1]


def test_a_demo_that_drafted_nothing_says_so(result: Result) -> None:
    idle = replace(result, systems=[replace(result.systems[0], name=name) for name in SYSTEMS])
    assert "Hardly anything was drafted" in " ".join(sentences(idle))
    assert "Hardly anything was drafted" not in " ".join(sentences(result))


def test_files_hold_the_same_figures(result: Result, tmp_path: Path) -> None:
    paths = publish(result, tmp_path / "report")
    assert paths["picture"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(paths["numbers"].read_text()) == summary(result)
    assert summary(result)["domains"]["sql"]["after"] == 0.5
    text = paths["report"].read_text(encoding="utf-8")
    assert "Japanese docs" in text
    assert paths["picture"].name in text


def test_the_page_is_escaped(result: Result) -> None:
    text = page(replace(result, rows=[replace(result.rows[0], domain="<b>")]), "p.png")
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "<fact>" not in text


def test_systems_take_turns() -> None:
    assert [in_rotation(n)[0] for n in range(7)] == [*SYSTEMS, SYSTEMS[0]]
    assert sorted(in_rotation(2)) == sorted(SYSTEMS)


def test_prompts_without_an_answer_of_their_own_still_count_where_they_were_measured() -> None:
    made = trials()
    made.alone = {name: found[:4] for name, found in made.alone.items()}
    found = result_of(made, [], [], {})
    assert found.equal
    assert found.whole.prompts == 10
    assert found.systems[2].tokens_per_step.value == pytest.approx(96 / 64)


def test_prompts_that_only_plain_decoding_answered_count_for_first_guesses() -> None:
    made = trials()
    whole = {name: list(answers) for name, answers in made.together.items()}
    made.timed, made.rest = 6, whole[PLAIN][6:]
    made.together = {name: answers[:6] for name, answers in whole.items()}
    found = result_of(made, [], [], {})
    assert found.equal
    assert found.whole.first_guess.after.value == pytest.approx(0.375)
    assert found.systems[2].batched_tokens_per_second == pytest.approx(6 * 24)
    made.alone[STATIC][8] = replace(made.alone[STATIC][8], token_ids=[9])
    assert not made.equal


def test_a_change_of_first_guesses_that_may_be_chance_is_called_so() -> None:
    made = trials()
    made.guessed[EXPERTS] = [(6 + (n in (0, 3)) - (n == 5), 24) for n in range(10)]
    [said] = [one for one in sentences(result_of(made, [], [], {})) if "Over all domains" in one]
    assert said.endswith("points (95 % interval), so it may be chance.")


def test_small_helpers() -> None:
    assert running_mean([1.0, 2.0, 3.0], 2) == [1.0, 1.5, 2.5]
    assert joined(["a"]) == "a"
    assert joined(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 1), (23.0, 1), (24.0, 2), (36.5, 3), (99.0, 5)])
def test_measuring_ends_in_time_after_a_whole_round_over_the_domains(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """Nothing is measured on half of the domains, however slow the machine is. A round: 12 s."""
    comparison = object.__new__(Comparison)
    comparison.trials = Trials([Query(f"{d} {n}", d, 4) for n in range(5) for d in ("math", "sql")], timed=10)
    now = 0.0

    def answer(name: str, query: Query) -> Trial:
        nonlocal now
        now += 1.0
        return Trial([1], 1, 1.0)

    monkeypatch.setattr("moedraft.showcase.trials.time.monotonic", lambda: now)
    monkeypatch.setattr(comparison, "_alone", answer)
    found = comparison.run(seconds)
    assert len(found.queries) == 10
    assert {len(trials) for trials in found.alone.values()} == {2 * rounds}
