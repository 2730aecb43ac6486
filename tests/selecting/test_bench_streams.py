"""The benchmarks of who drafts on streams and of many experts, on the shipped target with random experts."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from random_experts import LISTS, base_of, publish_random
from scripts_loader import load_script
from slow_cases import slow

from moedraft.config import load_settings
from moedraft.core import SHARED
from moedraft.models import load_by
from moedraft.system.build import System, opened
from moedraft.system.domains.registering import register_all

HELDOUT = 2  # prompts of each domain
FOREIGN = ("x", "y")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of every domain, and of some that are not registered."""
    for split, question in (("dev", "What is {} together?"), ("train", "Add {}!")):
        (tmp_path / "data" / split).mkdir(parents=True)
        for name in (*LISTS, *FOREIGN, "general_en"):
            prompts = [f"({name}) {question.format(f'{i} and {i}')}" for i in range(8)]
            with lzma.open(tmp_path / "data" / split / f"{name}.jsonl.xz", "wt") as file:
                file.write("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("system")
    settings = load_settings(home=folder / "home", target="mini", draft=str(folder / "draft"))
    settings = settings.model_copy(update={"selector": "evidence", "max_batch_size": 4})
    base_of(load_by(settings, "target"), folder / "draft")
    with opened(settings) as made:
        prompts = {name: [f"Of {name}, question {i}: what is {i}?" for i in range(8)] for name in LISTS}
        register_all(made.store, made.router, prompts)
        made.refresh()  # the home has no version of them; what is published below stays
        publish_random(made.bank)
        yield made


def run(
    script: ModuleType, system: System, data: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> dict[str, Any]:
    """What the command writes."""
    out = data / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", *f"--home unused --data {data} --out {out} {options}".split()])
    monkeypatch.setattr(script, "opened", lambda settings: nullcontext(system))
    script.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


ALL = (
    *("labelled", "translated", "framed", "typos", "noise", "few origins"),
    *("permuted", "two in a prompt", "change"),
    *("no domain", "before registration", "6 arms", "permuted 6 arms"),
)


SOME = ("labelled", "typos", "permuted", "change")


@pytest.mark.parametrize(
    ("chosen", "streams"),
    [(f"--streams {','.join(SOME)}", SOME), slow("", ALL)],
    ids=["some", "all"],
)
def test_streams_are_measured(
    system: System, data: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, streams: tuple[str, ...]
) -> None:
    script = load_script("bench_streams")
    monkeypatch.setattr(sys.modules["selection_streams"], "MANY", (6,))
    before = dict(system.bank.experts)
    found = run(
        script,
        system,
        data,
        monkeypatch,
        f"--domains {','.join(LISTS)} --nowhere {','.join(FOREIGN)} --heldout {HELDOUT} --max-tokens 12 "
        + chosen,
    )["streams"]
    assert tuple(found) == streams
    assert system.bank.experts == before, "the decoys are gone"
    for name, part in found.items():
        ways = part["ways"]
        assert part["prompts"] == HELDOUT * len(FOREIGN if name == "no domain" else LISTS)
        assert {"shared", "classifier", "evidence", "evidence as served", "best fixed"} <= set(ways)
        assert ("owner" in ways) == (name != "two in a prompt")
        assert (part["sent_right"] is None) == (name == "two in a prompt")
        assert ways["best fixed"]["times_best_fixed"][0] == 1
        assert ways["shared"]["times_best_fixed"][0] <= 1
        assert all(len(way["quarters"]) == min(4, part["prompts"]) for way in ways.values())
    assert found["labelled"]["ways"]["shared"] == found["permuted"]["ways"]["shared"]
    assert load_script("selection_tables").streams({"streams": found}).count("\n") == len(found) + 1


def test_the_text_of_a_changing_answer_is_the_given_one(
    system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drafts, and in both halves by the expert whose text it is."""
    script = load_script("bench_streams")
    options = f"--domains {','.join(LISTS)} --heldout {HELDOUT} --max-tokens 12 --streams change"
    drafted: list[list[str]] = []
    alone = script.Alone.lengths

    def lengths(self: Any, part: Any, arm: str) -> Any:
        assert all(len(script) == 12 for script in part.scripts)
        drafted.append([name for owners in part.owners for _, name in owners])
        return alone(self, part, arm)

    monkeypatch.setattr(script.Alone, "lengths", lengths)
    run(script, system, data, monkeypatch, options)
    assert len(drafted) == len(LISTS) + 1
    assert {*drafted[0]} == {*LISTS}


def test_a_stream_that_does_not_exist_is_named(
    system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = f"--domains {','.join(LISTS)} --heldout 1 --streams change,flood"
    with pytest.raises(SystemExit, match=r"^There is no stream flood; there are labelled, "):
        run(load_script("bench_streams"), system, data, monkeypatch, options)


def test_an_expert_that_the_home_lacks_is_named(
    system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^The home has no trained expert for x\.$"):
        run(load_script("bench_streams"), system, data, monkeypatch, "--domains a,x --heldout 1")


def test_mixed_batches_and_many_experts_are_timed(
    system: System, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("bench_mix")
    before, selector = dict(system.bank.experts), system.engine.selector
    monkeypatch.setattr(script, "MANY", 8)
    try:
        found = run(script, system, data, monkeypatch, "--rounds 2 --steps 2")
    finally:
        system.engine.selector = selector
    assert system.bank.experts == before, "the copies are gone"
    assert found["experts"] == len(LISTS)
    assert found["batches"]["different"] == len(LISTS)
    assert found["batches"]["mixed / uniform"][0] > 0
    assert found["registered"]["8 / 4"][0] > 0
    assert found["registered"]["bytes"]["8"] > found["registered"]["bytes"]["own"] > 0
    assert SHARED not in system.bank.experts
    assert "a batch of 4 with 3 experts" in load_script("selection_tables").mix(found)


def test_what_is_won_back_is_told_by_quarter_of_the_requests() -> None:
    def way(*quarters: float) -> dict[str, Any]:
        return {"quarters": list(quarters), "tokens_per_step": [sum(quarters) / 4, 0, 0]}

    ways = {
        "classifier": way(1.0, 1.0, 1.0, 1.5),
        "owner": way(2.0, 2.0, 2.0, 2.5),
        "evidence": way(1.5, 2.0, 2.0, 2.5),
        "evidence as served": way(1.25, 1.5, 1.75, 2.5),
    }
    found = {"settings": {"domains": "a,b"}, "streams": {"permuted": {"ways": ways}}}
    told = load_script("selection_tables").quarters(found)
    assert "| 3 | as served | 25% | 50% | 75% | 100% |" in told
    assert "| 3 | unlimited time | 50% | 100% | 100% | 100% |" in told
