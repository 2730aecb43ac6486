"""`generate` and `distill` on a tiny pair of models, end to end."""

from __future__ import annotations

import io
import json
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Pair, Run, write_rows

from moedraft.cli.generate import in_order, summary
from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.learning_state import paused
from moedraft.routing.selector import FixedSelector
from moedraft.speculation import SpeculationStats
from moedraft.storage.store import TARGET_ID, Store

from tiny import NumberTokenizer, TinyLM, random_table

KEYS = [
    *("text", "token_ids", "finish_reason", "expert", "adapter_version", "draft_acceptance_rate"),
    *("mean_acceptance_length", "num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    *("num_lookup_tokens", "num_accepted_lookup_tokens", "num_earlier_tokens", "num_accepted_earlier_tokens"),
    *("num_steps", "tokens_per_step", "tokens_per_second"),
]


def test_one_prompt_gives_one_json_object(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEDRAFT_ADAPTIVE_BUDGET", "false")  # a draft as large as its target never pays
    result = run("generate", "1 2 3", "--max-tokens", 12, *pair, "--json", "--home", home)
    assert result.code == 0
    assert result.err == ""
    assert list(result.data) == KEYS
    assert len(result.data["token_ids"]) == 12
    assert (result.data["finish_reason"], result.data["expert"]) == ("length", "shared")
    assert result.data["draft_acceptance_rate"] is not None


def test_plain_decoding_says_the_same(run: Run, home: Path, pair: Pair) -> None:
    options = ["--max-tokens", 12, *pair, "--json", "--home", home]
    drafted, plain = (
        run("generate", "1 2", *options).data,
        run("generate", "1 2", "--no-draft", *options).data,
    )
    assert plain["token_ids"] == drafted["token_ids"]
    assert (plain["num_drafts"], plain["draft_acceptance_rate"], plain["mean_acceptance_length"]) == (
        0,
        None,
        None,
    )


def test_text_and_summary_are_kept_apart(run: Run, home: Path, pair: Pair) -> None:
    options = ["--max-tokens", 6, *pair, "--home", home]
    expected = run("generate", "1 2", *options, "--json").data["text"]
    result = run("generate", "1 2", *options)
    assert result.out == f"{expected}\n"
    assert result.err.startswith("shared v0 · ")
    assert "6 tokens" in result.err
    two = run("generate", "1 2", "3 4", *options)
    assert two.out.startswith(f"{expected}\n")
    assert two.err.count("shared v0") == 2


def test_options_may_stand_on_both_sides(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    before = run("--home", home, *pair, "generate", "1", "--max-tokens", 2, "--json")
    assert len(before.data["token_ids"]) == 2
    assert run("--home", tmp_path / "other", "stats", "--home", home, "--json").data["experts"]


def test_sampling_is_repeatable(run: Run, home: Path, pair: Pair) -> None:
    options = ["--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--seed", 7, "--json", "--home", home]
    first, second = (run("generate", "1 2", *options, *pair, "--max-tokens", 16).data for _ in range(2))
    assert first["token_ids"] == second["token_ids"]


def test_a_prompts_file_is_answered_in_order(
    run: Run, home: Path, store: Store, pair: Pair, tmp_path: Path
) -> None:
    store.close()
    rows = [
        {"prompt": "1 2", "max_tokens": 9},
        {"prompt": "3", "domain": "shared", "max_tokens": 1},
        {"prompt": "4 5 6"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--domain", "sql", "--max-tokens", 4, *pair, "--json", "--home", home]
    found = run("generate", "--prompts-file", path, *options).rows
    assert [len(row["token_ids"]) for row in found] == [9, 1, 4]
    assert [row["expert"] for row in found] == ["sql", "shared", "sql"]


def test_prompts_come_from_standard_input(run: Run, home: Path, pair: Pair, monkeypatch: Any) -> None:
    text = '{"prompt": "1"}\n\n{"prompt": "2"}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    result = run("generate", "--prompts-file", "-", "--max-tokens", 2, *pair, "--json", "--home", home)
    assert len(result.rows) == 2


def test_a_stop_string_ends_the_answer(run: Run, home: Path, pair: Pair) -> None:
    options = ["--max-tokens", 12, *pair, "--json", "--home", home]
    words = run("generate", "1 2", *options).data["text"].split()
    stopped = run("generate", "1 2", *options, "--stop", f"{words[4]}").data
    assert stopped["finish_reason"] == "stop"
    assert words[4] not in stopped["text"].split()


def test_nothing_is_learned_unasked(run: Run, home: Path, pair: Pair) -> None:
    run("generate", "1 2", "--max-tokens", 4, *pair, "--home", home)
    data = run("stats", "--json", "--home", home).data
    assert data["experts"]["shared"]["requests"] == 1
    assert data["learning"]["records"] == 0


def test_a_question_to_another_target_does_not_change_whose_records_are_learned_from(
    run: Run, home: Path, pair: Pair
) -> None:
    def target() -> str | None:
        with closing(Store.open(home, write=False)) as store:
            return store.registry.get_meta(TARGET_ID)

    with closing(Store.open(home)) as store:
        store.registry.set_meta(TARGET_ID, "another")
    assert run("generate", "1", "--max-tokens", 2, "--home", home, *pair).code == 0
    assert target() == "another"
    assert run("generate", "1", "--max-tokens", 2, "--learn", "--home", home, *pair).code == 0
    assert target() not in (None, "another")


def test_adapters_learn_between_answers(run: Run, home: Path, pair: Pair, tmp_path: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text(
        "update_every = 4\nupdate_steps = 2\nmax_batch_size = 2\nadaptive_budget = false\n"
    )
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i} {i + 1}"} for i in range(10)])
    options = ["--max-tokens", 8, *pair, "--json", "--home", home]
    plain = run("generate", "--prompts-file", path, *options, "--no-draft").rows
    learned = run("generate", "--prompts-file", path, *options, "--learn")
    assert "shared learned: version 1" in learned.err
    assert [row["token_ids"] for row in learned.rows] == [row["token_ids"] for row in plain]
    assert learned.rows[-1]["adapter_version"] >= 1
    data = run("stats", "--json", "--home", home).data
    assert data["learning"]["records"] == 10
    assert data["experts"]["shared"]["version"] >= 2


# -- distill -------------------------------------------------------------------------------------


@pytest.fixture
def answered(run: Run, home: Path, store: Store, pair: Pair, tmp_path: Path) -> Path:
    """A home with records of "sql", too few for an update to be due."""
    store.close()
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}", "domain": "sql"} for i in range(10)])
    run("generate", "--prompts-file", path, "--learn", "--max-tokens", 4, *pair, "--json", "--home", home)
    return home


def test_distill_trains_those_due(
    run: Run, answered: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--draft", pair[3], "--steps", 2, "--home", answered]
    nothing = run("distill", *options, "--json")
    assert (nothing.code, nothing.out) == (0, ""), nothing.err
    assert "Nothing is due" in nothing.err
    monkeypatch.setenv("MOEDRAFT_UPDATE_EVERY", "8")
    assert run("stats", "--json", "--home", answered).data["learning"]["due"] == ["shared"]
    rows = run("distill", *options, "--json").rows
    assert [(row["expert"], row["version"], row["steps"]) for row in rows[:2]] == [
        ("shared", 1, 2),
        ("sql", 1, 2),
    ]  # further updates may follow from the same records
    assert run("stats", "--json", "--home", answered).data["learning"]["due"] == []


def test_distill_trains_the_one_named(run: Run, answered: Path, pair: Pair) -> None:
    options = ["--draft", pair[3], "--steps", 2, "--home", answered]
    assert "sql version 1: 2 steps on" in run("distill", "--domain", "sql", *options).out
    rows = run("distill", "--domain", "sql", *options, "--json").rows
    assert {row["expert"]: row["parent"] for row in rows}["sql"] == 1
    assert run("distill", "--domain", "none", *options).code == 2


def test_the_divergence_is_chosen_on_the_command_line(run: Run, answered: Path, pair: Pair) -> None:
    options = ("--domain", "sql", "--draft", pair[3], "--steps", 2, "--home", answered, "--json")
    usual = run("distill", *options).rows[0]["loss"]
    for name in ("sql", SHARED):
        assert run("adapter", "rollback", name, "--home", answered).code == 0
    assert run("distill", *options, "--kind", "tvd").rows[0]["loss"] < min(1, usual)
    refused = run("distill", *options, "--kind", "l2")
    assert refused.code == 2
    assert "'l2' is not one of" in refused.err


def test_distill_without_records_is_refused(run: Run, home: Path, store: Store, pair: Pair) -> None:
    store.close()
    result = run("distill", "--domain", "sql", "--draft", pair[3], "--home", home)
    assert result.code == 2
    assert "no records to train 'sql' on" in result.err


def test_distill_reports_a_full_disk(
    run: Run, answered: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(loop: Any, *_: object, **__: object) -> None:
        loop.state = paused("The disk is full.")

    monkeypatch.setattr("moedraft.distill.loop.DistillLoop.run_once", full)
    result = run("distill", "--domain", "sql", "--draft", pair[3], "--home", answered)
    assert result.code == 2
    assert "The disk is full." in result.err


# -- the order of answers, on a table of logits --------------------------------------------------


def tiny_engine(slots: int = 4) -> Engine:
    target, draft = TinyLM(random_table(16, 0)), TinyLM(random_table(16, 1))
    drafter = ModelDrafter(draft, NoExperts(), slots, 16)
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=slots)


def test_answers_come_early_and_in_order() -> None:
    engine = tiny_engine()
    lengths = [30, 2, 12]
    ids = [engine.add("1 2", SamplingParams(max_tokens=n)) for n in lengths]
    finished: list[int] = []
    seen = []
    for answer in in_order(engine, ids, lambda: finished.append(len(seen))):
        outputs = list(answer)
        texts = [output.text for output in outputs]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [True]
        seen.append(outputs[-1])
    assert [len(output.token_ids) for output in seen] == lengths
    assert [output.request_id for output in seen] == ids
    assert len(finished) == 3


def test_an_answer_without_probabilities_is_an_error(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Engine.step

    def step(engine: Engine) -> list[RequestOutput]:
        return [replace(output, finish_reason="error") for output in real(engine)]

    monkeypatch.setattr(Engine, "step", step)
    result = run("generate", "1", "--max-tokens", 1, *pair, "--json", "--home", home)
    assert (result.code, result.data["finish_reason"]) == (1, "error")
    assert "1 of 1 prompts" in result.err


def test_letters_that_stdout_lacks_are_escaped(
    run: Run, home: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moedraft.cli.common import emit, say

    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    emit({"text": "größer", "loss": float("nan"), "rates": [1.5, float("inf")]})
    say("größer")
    lines = ascii_only.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
    assert json.loads(lines[0]) == {"text": "größer", "loss": None, "rates": [1.5, None]}
    assert lines[1] == "gr\\xf6\\xdfer"


def test_a_summary_without_drafts_has_no_rates() -> None:
    engine = tiny_engine()
    (output,) = engine.generate("1 2", SamplingParams(max_tokens=2), draft=False)
    output = replace(output, expert="sql", adapter_version=3, seconds=0.5)
    assert summary(output) == "sql v3 · 2 tokens, 4 a second"


def test_a_summary_says_what_was_looked_up_where() -> None:
    (output,) = tiny_engine().generate("1 2", SamplingParams(max_tokens=2), draft=False)
    output = replace(output, expert="sql", adapter_version=3, seconds=0.5)
    found = SpeculationStats(num_lookup_tokens=9, num_accepted_lookup_tokens=5)
    own = replace(output, speculation=found)
    assert summary(own) == "sql v3 · 5 looked up · 2 tokens, 4 a second"
    both = replace(output, speculation=replace(found, num_accepted_earlier_tokens=3))
    assert summary(both) == "sql v3 · 5 looked up, 3 of them in earlier answers · 2 tokens, 4 a second"


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from moedraft.cli import common

    for terminal in (True, False):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=80)
        monkeypatch.setattr(common, "err", console)
        with common.bar("Working", 3) as advance:
            advance(1)
            advance(2, "Still working", 4)
            advance(3, 0.25)
        assert ("Still working" in screen.getvalue()) == terminal
