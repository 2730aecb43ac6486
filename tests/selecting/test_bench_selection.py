"""The benchmark of who drafts, on the shipped target with a few random experts."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from random_experts import LISTS, base_of, publish_random
from scripts_loader import load_script

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestOutput
from moedraft.models import load_by
from moedraft.routing.router import Route
from moedraft.speculation import SpeculationStats
from moedraft.system.build import System, opened

HELDOUT = 3  # prompts of each domain


class ByLetter:
    """A router that reads the domain from the prompt."""

    domains = tuple(LISTS)
    fits = 0

    def route(self, texts: Sequence[str]) -> list[Route]:
        rest = 0.1 / len(LISTS)
        names = [next(name for name in LISTS if f"({name})" in text) for text in texts]
        shares = dict.fromkeys([*LISTS, SHARED], rest)
        return [Route(name, 0.9, shares | {name: 0.9}) for name in names]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("bench_selection")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Held-out prompts of every domain."""
    (tmp_path / "data" / "dev").mkdir(parents=True)
    for name in LISTS:
        lines = [json.dumps({"prompt": f"({name}) What is {i} and {i} together?"}) for i in range(HELDOUT)]
        with lzma.open(tmp_path / "data" / "dev" / f"{name}.jsonl.xz", "wt") as file:
            file.write("\n".join(lines))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    settings = load_settings(home=folder / "home", target="mini", draft=str(folder / "draft"))
    settings = settings.model_copy(update={"selector": "evidence", "max_batch_size": 4})
    base_of(load_by(settings, "target"), folder / "draft")
    with opened(settings) as made:
        publish_random(made.bank)
        yield replace(made, router=ByLetter())  # type: ignore[arg-type]


def run(
    script: ModuleType, system: System, data: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> dict[str, Any]:
    """What the command writes."""
    out = data / "selection.json"
    fixed = f"--home unused --data {data} --out {out} --domains {','.join(LISTS)} --max-tokens 12"
    monkeypatch.setattr(sys, "argv", ["bench_selection.py", *fixed.split(), *options.split()])
    monkeypatch.setattr(script, "opened", lambda settings: nullcontext(system))
    script.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_all_ways_are_measured_and_timed(
    script: ModuleType, system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts are asked to be timed than there are; in batches they are too few to be timed at all."""
    options = f"--heldout {HELDOUT} --timed {HELDOUT + 3} --kinds"
    found = run(script, system, data, monkeypatch, f"{options} framed")
    framed = found["tokens per step"]["framed"]
    ways = {"oracle", *load_script("selection_tables").WAYS}
    assert ways < set(framed)
    assert all(framed[name]["tokens_per_step"][0] >= 1 for name in ways)
    assert framed["same_answers"] == 1
    assert framed["classifier"]["ended_with_the_domains_expert"] == 1
    assert framed["permuted classifier"]["ended_with_the_domains_expert"] == 0
    assert list(framed["by_domain"]) == list(LISTS)
    assert list(found["cost"]) == ["batch 1"]
    assert 0 < found["cost"]["batch 1"]["share_of_time"]["evidence"] < 1


def test_another_kind_is_added_to_those_that_were_measured(
    script: ModuleType, system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So few prompts are not timed."""
    monkeypatch.setattr(script, "warm_up", lambda system: None)
    first = run(script, system, data, monkeypatch, "--heldout 1 --kinds framed")["tokens per step"]["framed"]
    found = run(script, system, data, monkeypatch, "--heldout 1 --kinds noise")
    assert list(found["tokens per step"]) == ["framed", "noise"]
    assert found["tokens per step"]["framed"] == first
    assert found["cost"] == {}


def test_too_few_prompts_are_told_in_one_sentence(
    script: ModuleType, system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=rf"^a has {HELDOUT} held-out prompts; --heldout asks for 9\.$"):
        run(script, system, data, monkeypatch, "--heldout 9")


def test_where_a_wrong_prior_loses_nothing_nothing_is_recovered(script: ModuleType) -> None:
    speculation = SpeculationStats(num_steps=5)
    output = RequestOutput("1", "", "", [1] * 10, "stop", "a", 1, speculation, 0, 1.0)
    ways = ("oracle", "permuted classifier", "permuted evidence")
    found = script.figures({way: [output] for way in ways}, ["a"])
    assert found["recovered"] is None


def test_a_measurement_goes_on_where_it_was_interrupted(script: ModuleType, tmp_path: Path) -> None:
    begun, file = script.begun, tmp_path / "selection.json"
    assert begun({"heldout": "15"}, file, "tokens per step")["tokens per step"] == {}
    file.write_text('{"settings": {"heldout": "15"}, "tokens per step": {"as is": {}}}')
    assert begun({"heldout": "15"}, file, "tokens per step")["tokens per step"] == {"as is": {}}
    assert begun({"heldout": "40"}, file, "tokens per step")["tokens per step"] == {}
