"""scripts/evidence.py on a tiny target: traffic, arrangements and cached answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_records import SOME, a_draft, a_record, a_target
from scripts_loader import load_script

from moedraft.config import Settings
from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.assembly import TEXT_RATE
from moedraft.distill.features.record_states import RecordStates

from random_models import random_model

running, streams, prompts, answers = (
    load_script(f"evidence.{name}") for name in ("running", "streams", "prompts", "answers")
)
arrangements, figures = (load_script(f"evidence.{name}") for name in ("arrangements", "figures"))
list_of, further = load_script("evidence.tokens").list_of, load_script("evidence.further")
withheld, comparable = load_script("evidence.withheld"), load_script("evidence.comparable")
ARRANGEMENTS = arrangements.ARRANGEMENTS
ONE_WIDE, ONE_WIDE_GATED, WITHHELD, WITHHELD_GATED = (
    getattr(arrangements, name) for name in ("ONE_WIDE", "ONE_WIDE_GATED", "WITHHELD", "WITHHELD_GATED")
)

NAMES = ("code", "law", "prose")
PLAN = running.Plan(every=6, steps=2, rows=4, rank=2, measured=2, beforehand=2)


def domain(name: str) -> Any:
    served, held = (tuple(f"{name} {part} {i}" for i in range(40)) for part in ("served", "held"))
    return prompts.Domain(name, served, held[:4], held[4:8])


DOMAINS = [domain(name) for name in NAMES]


class TinyAnswers(RecordStates):
    """In the place of cached answers: random ones, the same for the same prompt."""

    def records(self, queries: Sequence[Any]) -> list[ReplayRecord]:
        seeds = [sum((i + 1) * ord(letter) for i, letter in enumerate(query.prompt)) for query in queries]
        pairs = zip(queries, seeds, strict=True)
        found = [a_record(self.target, seed, domain=query.domain, topk=8) for query, seed in pairs]
        return [replace(record, target_id=answers.TARGET) for record in found]


@pytest.fixture(scope="module")
def bench() -> Any:
    target = a_target()
    draft = a_draft(target, SOME)
    return running.Bench(target, draft, TinyAnswers(target, draft), PLAN)


def run(
    bench: Any, pattern: str, name: str, seed: int = 0, requests: int = 24, **more: Any
) -> dict[str, Any]:
    """A run whose router is right about every second request."""
    stream = streams.traffic(pattern, DOMAINS, requests, seed)
    routed = [q.domain if i % 2 else SHARED for i, q in enumerate(stream.queries)]
    held = [prompts.Query(one.name, prompt) for one in DOMAINS for prompt in one.held_out]
    served = [running.Served(record, record.domain) for record in bench.answers.records(held)]
    found = running.run(bench, ARRANGEMENTS[name], stream, routed, served, seed, **more)
    marks = {"absent": stream.absent, "turns": stream.turns, "newcomer": stream.newcomer}
    words = {"pattern": pattern, "arrangement": name, "seed": seed, "machine": "any", "torch": "any"}
    settings = {"every": 6, "measured": 2, "steps": 2, "rows": 4, "rank": 2, "requests": requests}
    settings |= {"domains": ",".join(NAMES), "max_tokens": 5, "heldout": 4}
    return words | {"settings": settings} | marks | found


# -- traffic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [*[name for name in streams.ORDERS if name != streams.FLOOD], "only:law"])
def test_traffic_is_the_same_for_the_same_seed_and_asks_nothing_twice(pattern: str) -> None:
    found = streams.traffic(pattern, DOMAINS, 24, 1)
    assert found == streams.traffic(pattern, DOMAINS, 24, 1)
    assert len(found.queries) == 24
    if pattern != streams.CROSSED:  # halves of these short prompts are alike
        assert len({query.prompt for query in found.queries}) == 24
    assert found.queries != streams.traffic(pattern, DOMAINS, 24, 2).queries


def test_traffic_moves_as_its_pattern_says() -> None:
    def names(pattern: str) -> list[str]:
        return [query.domain for query in streams.traffic(pattern, DOMAINS, 60, 0).queries]

    assert Counter(names("steady")) == dict.fromkeys(NAMES, 20)
    one_by_one = names("one-by-one")
    assert sum(a != b for a, b in pairwise(one_by_one)) == 2
    shift = names("shift")
    assert set(shift[:20]) == set(shift[40:]) == {"code", "prose"}
    assert set(shift[20:40]) == {"law"}
    late = names("new-domain")
    assert "prose" not in late[:30]
    assert late[30:].count("prose") == 15
    assert Counter(names("zipf")).most_common(1)[0][1] > 25
    drift = names("drift")
    assert drift[:20].count(drift[0]) > drift[40:].count(drift[0])
    crossed = streams.traffic("crossed", DOMAINS, 24, 0).queries
    assert all(query.prompt.startswith(query.domain[:2]) and "\n" in query.prompt for query in crossed)
    assert streams.traffic("unregistered", DOMAINS, 6, 0).registered == NAMES[:-1]
    assert (
        streams.traffic("reworded", DOMAINS, 6, 0).queries != streams.traffic("steady", DOMAINS, 6, 0).queries
    )


def test_a_poisoner_sends_every_third_request_and_claims_domains_that_are_not_its_own() -> None:
    for pattern in streams.POISONED:
        queries = streams.traffic(pattern, DOMAINS, 30, 0).queries
        assert [one.source == streams.POISONER for one in queries] == [i % 3 == 2 for i in range(30)]
        sent = [one for one in queries if one.source]
        if pattern == streams.FLOOD:
            assert len({one.prompt for one in sent}) == 1
        else:
            assert all(one.pinned in NAMES and one.pinned != one.domain for one in sent)
        real = {prompt for domain in DOMAINS for prompt in domain.served}
        assert all((one.prompt in real) is (pattern != streams.NOISE) for one in sent)


# -- arrangements ----------------------------------------------------------------------------------


# For independent draft models alone.
OF_MODELS = tuple(name for name, one in ARRANGEMENTS.items() if one.data != "target")
DEAR = "joint:mixed-data", *(name for name in OF_MODELS if "+" in name)
VARIANTS = (
    "joint:rkl",
    "joint:missed",
    "joint:jsd",
    "joint:double",
    "joint:equal-cost",
    "joint:wide",
    "joint+gate:wide:equal-cost",
    "one-both",
    "separate-true",
    "joint+gate-once",
    "joint:resumed",
    "joint:2-steps",
    "latest-window+gate",
    "separate+gate",
    "turns+gate",
    "mixed-replay:wide:withheld",  # see the test of what is computed of it
    # What these do is done by others too: more updates, a wide shared adapter, another number of steps.
    "joint:further",
    "joint+gate:further",
    "mixed-replay:further",
    "joint:1-step",
    "joint:wide",
    "offline:wide",
    "latest-window+gate:wide",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ())
        for name in ARRANGEMENTS
        if name not in OF_MODELS
    ],
)
def test_every_arrangement_runs_and_says_what_it_did(bench: Any, name: str) -> None:
    found = run(bench, "steady", name)
    json.dumps(found)
    assert all(len(row) == 4 and row[0] >= row[1] >= row[2] >= row[3] for row in found["curve"][-1]["counts"])
    assert len(found["curve"][-1]["counts"]) == 12
    expected = {
        "static": 0,
        "offline": 8,
        "offline:wide": 8,
        "one-offline": 8,
        "one-both": 6,
        "joint:half": 8,
        "joint:double": 2,
        "mixed-replay:further": 12,
        "joint:further": 12,
        "mixed-replay:wide": 12,
        "joint:wide": 12,
        "mixed-replay:wide:withheld": 12,
    }
    for update in found["updates"]:
        counted = Counter(one["decision"] for one in update["outcomes"])
        assert update["decisions"] == counted
    # As many of the further updates as the gate allows.
    if ARRANGEMENTS[name].gate and ARRANGEMENTS[name].further:
        assert 4 <= len(found["updates"]) <= 12
    else:
        assert len(found["updates"]) == expected.get(name, 4)
    assert len(found["stream"]) == {"offline": 0, "offline:wide": 0, "one-offline": 0, "one-both": 12}.get(
        name, 24
    )
    assert (found["operations"] > 0) == (name != "static")


def test_tokens_that_are_told_are_those_that_are_counted(bench: Any) -> None:
    found = run(bench, "only:law", "joint", tell_tokens=True)
    for when, point in (("before", 0), ("after", -1)):
        rows = found["tokens"][when]
        tried, right = (sum(counts[i] for counts in found["curve"][point]["counts"]) for i in (0, 1))
        said, guessed, both = (sum(row[i] for row in rows) for i in (1, 2, 3))
        assert (said, guessed, both) == (tried, tried, right)
        assert rows[-1][0] == -1
        assert [row[1] for row in rows[:-1]] == sorted((row[1] for row in rows[:-1]), reverse=True)
    assert found["tokens"]["before"] != found["tokens"]["after"]


def test_tokens_are_told_on_the_device_of_the_draft(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without numbers stands for a GPU; nothing is computed there."""
    module, seen = load_script("evidence.tokens"), []

    def collated(*given: Any) -> None:
        seen.append(given[4])
        raise InterruptedError

    def told(one: Any, held: Any) -> None:
        monkeypatch.setattr(module, "collate", collated)
        one.trainer.student.draft.fc.to("meta")
        with pytest.raises(InterruptedError):
            one.tokens(held)

    run(bench, "only:law", "joint", at_end=told)
    assert seen == [torch.device("meta")]


def test_ways_of_guessing_are_measured_beside_what_serves(bench: Any) -> None:
    mixtures = load_script("bench_mixtures")
    found = run(bench, "steady", "joint", at_end=mixtures.mixtures)
    shares, counts = found["at_end"], found["curve"][-1]["counts"]
    served = sum(row[1] for row in counts) / sum(row[0] for row in counts)
    assert shares["expert"] == pytest.approx(served, abs=0.003)
    assert {"shared", "base", "expert × 0.8, shared × 1.0", *mixtures.MEANS} <= shares.keys()
    assert all(0 <= share <= 1 for share in shares.values())


def test_factors_are_measured_on_what_serves(bench: Any) -> None:
    strength, seen = load_script("bench_strength"), []

    def measured(one: Any, held: Any) -> dict[str, Any]:
        usual, one.measure = one.measure, lambda *given: seen.append(given[0]) or usual(*given)
        return strength.by_factor(one, held[:1], [1.0, 0.5])

    found = run(bench, "steady", "joint", at_end=measured)
    assert found["at_end"].keys() == {"1.0", "0.5"}
    assert found["at_end"]["1.0"] == found["curve"][-1]["counts"][:1]
    whole, half = seen
    assert whole.keys() == half.keys()
    for name, one in whole.items():
        for key, tensor in one.tensors.items() if one else ():
            factor = 0.5 if "lora_B" in key else 1.0
            torch.testing.assert_close(half[name].tensors[key], factor * tensor)
    assert any(one is not None for one in whole.values())


def test_all_may_guess_from_the_same_tokens(bench: Any) -> None:
    """Looked at on what was learned from, since of random texts nothing else is guessed right."""
    records = load_script("bench_records")
    short = replace(bench, own_tokens=6, plan=replace(PLAN, steps=12))

    def measured(one: Any, held: Any) -> dict[str, Any]:
        held = [running.Served(record, record.domain) for record in one.store.replay.records()]
        widest = len(one.trainer.student.vocabulary)
        lists = {o: one.serving(o) for o in {one.owner(served) for served in held}}
        own = {o: len(list_of(found, o, one.measure.general)) for o, found in lists.items()}
        same = records.from_all_tokens(one, held)
        return {"own": own, "widest": widest, "served": one.counts(held), "same": same}

    for name, is_short in (("joint", True), ("mixed-replay", False)):
        found = run(short, "steady", name, at_end=measured)["at_end"]
        assert [row[0] for row in found["same"]] == [row[0] for row in found["served"]]  # as many guesses
        assert any(n < found["widest"] for n in found["own"].values()) == is_short
        assert sum(row[1] for row in found["same"]) > 0
        assert (found["same"] == found["served"]) != is_short


def test_the_wide_arrangement_has_the_ranks_that_a_server_has_by_default() -> None:
    settings = Settings.model_fields
    assert settings["shared_rank"].default == arrangements.WIDE * settings["adapter_rank"].default


@pytest.fixture(scope="module")
def text_bench() -> Any:
    """With an independent draft model."""
    target = a_target()
    draft = random_model("llama", 2, layers=2, cpu_fast_paths=False)
    found = answers.Answers(target, None, Path(), 5)
    found.records = TinyAnswers(target, a_draft(target, SOME)).records
    return running.Bench(target, draft, found, PLAN)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in DEAR else ())
        for name in ("static", "mixed-replay", "separate", "joint+gate:wide", *OF_MODELS)
    ],
)
def test_an_independent_draft_model_runs_in_the_same_arrangements(text_bench: Any, name: str) -> None:
    found = run(text_bench, "steady", name)
    json.dumps(found)
    assert len(found["curve"][-1]["counts"]) == 12
    assert bool(found["updates"]) == (name != "static")
    if found["updates"]:
        assert found["learning_rate"] == comparable.text_rate(text_bench.plan.steps)


def test_short_updates_of_an_independent_draft_go_as_far_as_a_servers() -> None:
    assert comparable.text_rate(comparable.SERVER_STEPS) == TEXT_RATE
    assert comparable.text_rate(comparable.SERVER_STEPS // 2) == 2 * TEXT_RATE


def test_answers_of_the_draft_are_its_own_and_the_target_labels_them(text_bench: Any) -> None:
    records = text_bench.answers.records([prompts.Query("law", f"question {i}") for i in range(3)])
    draft = text_bench.draft
    for given, found in zip(records, text_bench.answers.drafted(draft, records), strict=True):
        begin = given.num_prompt_tokens
        assert found.token_ids[:begin] == given.token_ids[:begin]
        assert found.domain == "law"
        for model, tokens in (
            (draft, found.token_ids[begin:]),
            (text_bench.target, [t[0] for t in found.topk_ids]),
        ):
            logits = model.hf(torch.tensor([found.token_ids])).logits[0, begin - 1 : -1]
            assert tokens == logits.argmax(-1).tolist()


def live(bench: Any, name: str, updates: int = 1) -> dict[str, bool]:
    """By adapter that was published after so many updates: whether it changes anything."""
    stream = streams.traffic("steady", DOMAINS, 30, 0)
    served = [running.Served(r, r.domain) for r in bench.answers.records(stream.queries)]
    with running.new_home(NAMES) as store:
        one = running.Run(bench, ARRANGEMENTS[name], store, 0)
        for _ in range(updates):
            one.feed(served)
            one.learn()
        loaded = {who: store.adapters.load_live(who, one.base) for who in (SHARED, *NAMES)}
        return {
            who: any(bool(t.any()) for key, t in found[1].tensors.items() if "lora_B" in key)
            for who, found in loaded.items()
            if found
        }


def test_each_arrangement_teaches_whom_it_says(bench: Any) -> None:
    everybody = {SHARED: True} | dict.fromkeys(NAMES, True)
    assert live(bench, "joint") == everybody
    assert live(bench, "mixed-replay") == {SHARED: True}
    assert live(bench, "latest-window") == {SHARED: True}
    assert live(bench, "separate-true") == everybody | {SHARED: False}
    assert live(bench, "turns", 1) == dict.fromkeys(NAMES, False) | {SHARED: True}
    assert live(bench, "turns", 2) == everybody


def test_an_independent_draft_models_adapters_learn_as_the_arrangement_says(text_bench: Any) -> None:
    everybody = {SHARED: True} | dict.fromkeys(NAMES, True)
    assert live(text_bench, "joint") == everybody
    assert live(text_bench, "joint:draft-data") == everybody
    assert live(text_bench, "mixed-replay") == {SHARED: True}
    assert live(text_bench, "separate-true") == everybody | {SHARED: False}


def test_the_latest_window_forgets_what_came_before(bench: Any) -> None:
    stream = bench.answers.records(streams.traffic("steady", DOMAINS, 36, 0).queries)
    with running.new_home(NAMES) as store:
        one = running.Run(bench, ARRANGEMENTS["latest-window"], store, 0)
        for first in (0, 18):
            one.feed([running.Served(r, r.domain) for r in stream[first : first + 18]])
            drawn = one.trainer.draw(2)
            used = [record.token_ids for batch in one.trainer.batches(drawn, 4) for record in batch]
            new = [record.token_ids for record in stream[first : first + 18]]
            assert all(ids in new for ids in used)
            one.trainer.last_id = store.replay.last_id()


@pytest.fixture(scope="module")
def blocks(bench: Any) -> dict[str, Any]:
    return run(bench, "one-by-one", "joint+gate")


def test_where_traffic_turns_it_is_measured_before_and_after_what_comes_is_learned(
    bench: Any, blocks: dict[str, Any]
) -> None:
    found = run(bench, "shift", "joint")
    assert found["turns"] == (8, 16)
    points = [(point["requests"], point["updates"]) for point in found["curve"]]
    assert points == [(0, 0), (8, 1), (12, 2), (16, 2), (18, 3), (24, 4)]
    assert found["curve"][2]["counts"] == found["curve"][3]["counts"], "nothing was learned between"
    assert figures.recovery(found) is not None
    assert figures.forgotten([found]) is not None
    assert [point["requests"] for point in run(bench, "shift", "static")["curve"]] == [0, 24]
    assert [point["requests"] for point in blocks["curve"]] == [0, 8, 12, 16, 18, 24]
    assert figures.forgotten([blocks]) is not None


def test_what_is_computed_of_one_adapter_withheld_from_new_domains_is_what_its_run_finds(bench: Any) -> None:
    still, usual, found = (run(bench, "one-by-one", name) for name in ("static", ONE_WIDE, WITHHELD))
    [computed] = withheld.runs_of(figures.Runs([still, usual])).of("one-by-one", ONE_WIDE)
    assert computed["stream"] == found["stream"] != usual["stream"]
    assert [point["counts"] for point in computed["curve"]] == [point["counts"] for point in found["curve"]]


@pytest.mark.parametrize(("name", "aside"), [(ONE_WIDE_GATED, False), (WITHHELD_GATED, True)])
def test_the_gate_can_withhold_one_adapter_from_a_domain(bench: Any, name: str, aside: bool) -> None:
    record = bench.answers.records([prompts.Query("law", "law served 1")])[0]
    with running.new_home(NAMES) as store:
        one = running.Run(bench, ARRANGEMENTS[name], store, 0)
        assert one.loop.judge.base_serves is aside
        assert one.owner(running.Served(record, "law")) == SHARED, "one adapter serves every domain"
        store.registry.set_unadapted(one.loop.judge.untaught())
        assert one.owner(running.Served(record, "law")) == ("law" if aside else SHARED)


def test_an_independent_draft_cannot_be_withheld_from_single_domains(text_bench: Any) -> None:
    with running.new_home(NAMES) as store, pytest.raises(ValueError, match="Only a feature drafter's base"):
        running.Run(text_bench, ARRANGEMENTS[WITHHELD], store, 0)


def test_familiar_traffic_has_one_more_domain() -> None:
    command = load_script("evidence.command")
    asked = SimpleNamespace(domains=",".join(NAMES), data=None, heldout=4)
    place = SimpleNamespace(domains=DOMAINS, args=asked)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "load_domain", lambda data, name, held: domain(name))
        of = {pattern: command.Workplace.domains_of(place, pattern) for pattern in ("familiar", "steady")}
    assert [one.name for one in of["familiar"]] == [*NAMES, "general_en"]
    assert of["steady"] == DOMAINS
    sent = streams.traffic("familiar", of["familiar"], 24, 0)
    assert Counter(query.domain for query in sent.queries) == dict.fromkeys((*NAMES, "general_en"), 6)
    assert sent.registered == (*NAMES, "general_en")


def test_a_run_repeats_itself(bench: Any, blocks: dict[str, Any]) -> None:
    again = run(bench, "one-by-one", "joint+gate")
    assert blocks["curve"] == again["curve"]
    assert blocks["stream"] == again["stream"]


# -- answers ---------------------------------------------------------------------------------------


def test_answers_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_target()
    draft, asked = a_draft(target, SOME), []

    def answered(
        model: Any, wanted: list[list[int]], name: str, longest: int, *how: float
    ) -> list[ReplayRecord]:
        asked.append(len(wanted))
        return [a_record(target, seed) for seed in range(len(wanted))]

    ids = [a_record(target, seed).token_ids[:6] for seed in range(3)]
    monkeypatch.setattr(answers, "answered", answered)
    monkeypatch.setattr(answers, "asked", lambda tokenizer, prompt: ids[int(prompt)])
    queries = [prompts.Query("law", number) for number in ("0", "1", "2", "1")]
    first = answers.Answers(target, RecordStates(target, draft), tmp_path, 5)
    states = first.of(first.records(queries))
    second = answers.Answers(target, RecordStates(target, draft), tmp_path, 5)
    monkeypatch.setattr(second.states, "_read", lambda texts: pytest.fail("the target was asked again"))
    again = second.records(queries)
    assert asked == [3]
    assert [record.domain for record in again] == ["law"] * 4
    assert all(torch.equal(a, b) for a, b in zip(states, second.of(again), strict=True))


def test_further_answers_are_computed_once_and_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the draw of its own temperature or number, kept in a file of its own."""
    target = a_target()
    draft, asked = a_draft(target, SOME), list[tuple[float, ...]]()

    def answered(model: Any, wanted: list[list[int]], name: str, longest: int, *how: float) -> Any:
        asked.append(how)
        seed = int(100 * how[1]) + int(how[3])
        records = [a_record(target, seed, answer=4, topk=8) for _ in wanted]
        return [
            replace(r, token_ids=[*ids, *r.token_ids[6:]]) for r, ids in zip(records, wanted, strict=True)
        ]

    monkeypatch.setattr(answers, "answered", answered)
    states = RecordStates(target, draft)
    record = a_record(target, 0)
    for _ in range(2):
        served = answers.Answers(target, states, tmp_path, 5)
        kept = further.KeptFurther(served, 3)
        kept.prepare([record, record], lambda: None)
        assert kept.count(record) == 3
        more = [kept.get(record, number) for number in range(3)]
        assert len({tuple(one.token_ids) for one in more}) == 3
        assert all(one.token_ids[:6] == record.token_ids[:6] and one.domain == "code" for one in more)
        before = states.tokens_read
        assert [len(one) for one in served.of(more)] == [10, 10, 10]
        assert states.tokens_read == before, "their files hold the states"
    assert [(how[1], how[3]) for how in asked] == [(1.0, 0), (0.7, 0), (1.0, 1)]
    assert kept.count(a_record(target, 1)) == 0
