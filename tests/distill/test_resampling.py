"""Further answers of the target to what it was asked: who is asked, what comes, and what learns from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_records import a_draft, a_record, a_target
from test_joint import Home
from test_kept_features import drafter, loop_of, served, settings_of

from moedraft.config import load_settings
from moedraft.core import ReplayRecord
from moedraft.distill.assembly import build_loop, joint_trainer
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.judging.trial import TrialTrainer
from moedraft.distill.resampling import drawing, further
from moedraft.distill.resampling.drawing import Asked, Resampled, answers
from moedraft.distill.resampling.further import FurtherAnswers, NoFurther, one_of, warmths
from moedraft.loading.checks import greedy_answers
from moedraft.models import LanguageModel
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store

from random_models import CONFIGS, VOCAB, prompts_of, random_model

__all__ = ["drafter"]  # a fixture
COLD = 1e-6  # as good as greedy


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def found(target: LanguageModel, asked: Sequence[Asked], seed: int = 0) -> dict[Asked, Resampled]:
    return {asked[number]: answer for number, answer, _ in answers(target, asked, chance(seed))}


def of(kept: FurtherAnswers, record: ReplayRecord) -> list[ReplayRecord]:
    return [kept.get(record, number) for number in range(kept.count(record))]


# -- the answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_told_of_each_token_is_what_the_target_says_there(kind: str) -> None:
    target = random_model(kind, seed=1)
    asked = [Asked(tuple(p), 3 + i, 1.0, 5) for i, p in enumerate([[7], *prompts_of(6, 0)])]
    got = found(target, asked)
    assert got.keys() == set(asked)
    for one, answer in got.items():
        assert len(answer.tokens) == one.most
        ids = torch.tensor([[*one.prompt, *answer.tokens.tolist()]])
        logits = target.hf(input_ids=ids).logits[0, len(one.prompt) - 1 : -1]
        values, likeliest = logits.log_softmax(-1).topk(5)
        torch.testing.assert_close(answer.topk_logprobs, values, rtol=1e-3, atol=1e-3)
        assert torch.equal(answer.topk_ids.long(), likeliest)


@pytest.mark.parametrize("kind", CONFIGS)
def test_without_warmth_it_answers_as_it_does_greedily(kind: str) -> None:
    target = random_model(kind, seed=1)
    for asked, answer in found(target, [Asked(tuple(p), 12, COLD, 2) for p in prompts_of(5, 3)]).items():
        assert answer.tokens.tolist() == greedy_answers(target, [list(asked.prompt)], 12)[0]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    target, prompt, warmth = a_target(), (3, 4, 5), 0.7
    wanted = (target.hf(input_ids=torch.tensor([[*prompt]])).logits[0, -1] / warmth).softmax(-1)
    # Asked with different numbers of likely tokens, so that no two are the same question.
    asked = [Asked(prompt, 1, warmth, 1 + i % 7) for i in range(4000)]
    tokens = torch.tensor([int(answer.tokens[0]) for _, answer, _ in answers(target, asked, chance())])
    share = torch.bincount(tokens, minlength=VOCAB) / len(asked)
    assert float((share - wanted).abs().sum()) < 0.15
    assert float((share - (wanted**2 / (wanted**2).sum())).abs().sum()) > 0.3, "colder ones differ"


def test_an_answer_ends_with_the_token_that_ends_it_and_within_the_context() -> None:
    target = a_target()
    (usual,) = found(target, [Asked((1, 2, 3), 20, COLD, 3)]).values()
    end = int(usual.tokens[4])
    target.hf.generation_config.eos_token_id = end
    assert end in target.eos_token_ids
    (cut,) = found(target, [Asked((1, 2, 3), 20, COLD, 3)]).values()
    assert cut.tokens.tolist() == usual.tokens.tolist()[: usual.tokens.tolist().index(end) + 1]
    assert len(cut.topk_ids) == len(cut.topk_logprobs) == len(cut.tokens)
    small = random_model("gpt2", seed=1)
    small.max_len = 16
    asked = [Asked(tuple(range(n)), 10, 1.0, 2) for n in (4, 12, 15, 16, 17)]
    got = {len(one.prompt): len(answer.tokens) for one, answer in found(small, asked).items()}
    assert got.keys() == {4, 12, 15}, "no room for a token after the others"
    assert all(0 < count <= min(10, 16 - length) for length, count in got.items())


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "READ", 32)
    asked = [Asked((1,) * n, 4, 1.0, 2) for n in (1, 3, 5, 8, 20, 90)]
    assert drawing._batches(range(6), asked) == [[0, 1, 2, 3], [4], [5]]
    many = [Asked((1,), 1, 1.0, 2)] * (drawing.ROWS + 1)
    assert [len(batch) for batch in drawing._batches(range(len(many)), many)] == [drawing.ROWS, 1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_long_prompt_is_read_in_parts_with_a_heartbeat(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, beats = random_model(kind, seed=1), list[int]()
    asked = [Asked(tuple(i % VOCAB for i in range(70)), 4, COLD, 3)]
    whole = found(target, asked)
    monkeypatch.setattr(drawing, "READ", 16)
    ((_, parts, _),) = answers(target, asked, chance(), lambda: beats.append(1))
    assert parts.tokens.tolist() == whole[asked[0]].tokens.tolist()
    torch.testing.assert_close(parts.topk_logprobs, whole[asked[0]].topk_logprobs, rtol=1e-4, atol=1e-4)
    assert len(beats) == 5 + 4


def test_each_row_has_its_own_room() -> None:
    """The neighbours of a prompt that nearly fills the context are not cut short by it."""
    target = random_model("gpt2", seed=1)
    target.max_len = 32
    asked = [Asked(tuple(range(n)), 10, 1.0, 2) for n in (28, 29, 30, 31, 3)]
    got = found(target, asked)
    assert [len(got[one].tokens) for one in asked] == [4, 3, 2, 1, 10]


def test_logits_that_are_no_numbers_end_an_answer_and_its_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_target()
    forward, steps = target.forward, list[int]()

    def broken(*args: Any, **keywords: Any) -> torch.Tensor:
        logits = forward(*args, **keywords)
        steps.append(1)
        if len(steps) == 4:  # that of the third token, after the one that reads the prompts
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(target, "forward", broken)
    got = found(target, [Asked((1, 2), 6, 1.0, 3), Asked((1, 2, 3), 6, 1e-38, 3)])
    assert [len(answer.tokens) for answer in got.values()] == [2, 6]
    assert all(answer.topk_logprobs.isfinite().all() for answer in got.values())


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_the_target_read_is_what_a_forward_of_the_whole_text_reads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a feature drafter: so that the target need not read the further answers once more."""
    monkeypatch.setattr(drawing, "READ", 16)  # the longest prompt alone, in parts
    target = random_model(kind, seed=1)
    draft = a_draft(target)
    states = RecordStates(target, draft)
    assert states.layers == tuple(draft.config.feature_layers)
    kept = FurtherAnswers(target, 1, states)
    records = [a_record(target, seed, prompt=length, topk=4) for seed, length in enumerate((1, 2, 5, 40))]
    kept.prepare(records, lambda: None)
    more = [one for record in records for one in of(kept, record)]
    assert len(more) == 4
    ours = states.of(more)
    assert states.tokens_read == 0
    theirs = RecordStates(target, draft).of(more)
    for one, (a, b) in zip(more, zip(ours, theirs, strict=True), strict=True):
        assert len(a) == len(one.token_ids) - 1
        torch.testing.assert_close(a.float(), b[:-1].float(), rtol=3e-2, atol=3e-2)


# -- who is asked ---------------------------------------------------------------------------------


def test_each_prompt_is_answered_once_more_as_often_as_wanted() -> None:
    target, beats = a_target(), list[int]()
    kept = FurtherAnswers(target, 2)
    records = [replace(a_record(target, seed, topk=8), id=seed + 1) for seed in range(3)]
    kept.prepare(records, lambda: beats.append(1))
    assert len(beats) > 5, "a heartbeat with each token"
    for record in records:
        assert kept.count(record) == 2
        for one in of(kept, record):
            assert one.token_ids[:6] == record.token_ids[:6]
            assert len(one.token_ids) - 6 == len(one.topk_ids) == len(one.topk_logprobs)
            assert len(one.topk_ids) == further.SHORTEST, "longer than what was served"
            assert {len(ids) for ids in one.topk_ids} == {8}
            assert (one.domain, one.temperature, one.id) == ("code", 0.0, 0)
    before = [of(kept, record) for record in records]
    beats.clear()
    kept.prepare(records, lambda: beats.append(1))
    assert not beats, "what is known is not asked again"
    assert [of(kept, record) for record in records] == before
    kept.forget()
    assert (of(kept, records[0]), kept.bytes) == ([], 0)


def test_greedy_answers_are_given_at_temperatures_in_turns_and_sampled_ones_at_their_own() -> None:
    assert warmths(0.0, 3) == [1.0, 0.7, 1.0]
    assert warmths(0.4, 2) == [0.4, 0.4]
    assert warmths(2.5, 2) == [1.0, 1.0], "what a model says above 1 teaches little"


def test_one_update_asks_for_some_records_and_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further, "AT_ONCE", 2)
    target = a_target()
    kept = FurtherAnswers(target, 1)
    records = [a_record(target, seed, topk=4) for seed in range(5)]
    given = [*records, records[0]]  # that one stays the most urgent
    kept.prepare(given, lambda: None)
    assert [len(of(kept, record)) for record in records] == [1, 1, 0, 0, 0]
    kept.prepare(given, lambda: None)
    assert [len(of(kept, record)) for record in records] == [1, 1, 1, 1, 0]


def test_what_was_used_longest_ago_goes_first() -> None:
    target = a_target()
    records = [a_record(target, seed, topk=4) for seed in range(3)]
    kept = FurtherAnswers(target, 1)
    kept.prepare(records[:1], lambda: None)
    kept.limit_bytes = 2 * kept.bytes
    kept.prepare(records[1:2], lambda: None)
    assert of(kept, records[0])
    kept.prepare(records[2:], lambda: None)
    assert [len(of(kept, record)) for record in records] == [1, 0, 1]
    assert 0 < kept.bytes <= kept.limit_bytes


def test_a_record_without_room_or_answer_has_none() -> None:
    target = a_target()
    target.max_len = 8
    kept = FurtherAnswers(target, 1)
    whole, empty = a_record(target, 0, prompt=8), replace(a_record(target, 1), topk_ids=[], topk_logprobs=[])
    kept.prepare([whole, empty], lambda: None)
    assert not of(kept, whole)
    assert not of(kept, empty)


def test_states_that_are_kept_with_a_record_are_not_those_of_its_further_answers() -> None:
    target = a_target()
    record = replace(a_record(target, 0, answer=further.SHORTEST, topk=8), id=7)
    kept = FurtherAnswers(target, 4)
    kept.prepare([record], lambda: None)
    draft = a_draft(target)

    def find(records: Sequence[ReplayRecord]) -> dict[tuple[int, ...], torch.Tensor]:
        """By id, as `kept_in` does."""
        wrong = torch.zeros(len(record.token_ids) - 1, draft.config.hidden_size)
        return {tuple(one.token_ids): wrong for one in records if one.id == 7}

    states = RecordStates(target, draft, kept=find)
    assert not states.of([record])[0].any(), "the control"
    for one in of(kept, record):
        assert len(one.token_ids) == len(record.token_ids)
        assert states.of([one])[0].any()


# -- who learns from them -------------------------------------------------------------------------


class Spy:
    """Further answers that are told apart by their last token, and who was asked."""

    def __init__(self) -> None:
        self.asked: list[ReplayRecord] = []
        self.forgotten = 0

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        self.asked += records

    def count(self, record: ReplayRecord) -> int:
        return 2

    def get(self, record: ReplayRecord, number: int) -> ReplayRecord:
        return replace(record, token_ids=[*record.token_ids[:-1], number], id=0)

    def forget(self) -> None:
        self.forgotten += 1


def test_an_update_learns_from_all_answers_to_a_prompt_and_asks_for_none_that_is_held_out(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path, {"code": 20, "prose": 20})
    spy, read = Spy(), list[ReplayRecord]()
    home.trainer.further = spy
    learn = home.trainer.lessons.learn

    def spied(records: Sequence[ReplayRecord], *rest: Any) -> float:
        read.extend(records)
        return learn(records, *rest)

    home.trainer.lessons.learn = spied  # type: ignore[method-assign]
    update = home.trainer.update()
    assert update is not None
    held = {tuple(one.token_ids[:6]) for one in home.store.replay.records() if is_held_out(one)}
    assert held
    assert spy.asked
    assert not held & {tuple(one.token_ids[:6]) for one in [*spy.asked, *read]}
    further_ones = [one for one in read if one.token_ids[-1] in (0, 1)]
    assert 0.4 < len(further_ones) / len(read) < 0.9, "two of three"
    stored = {tuple(one.token_ids) for one in home.store.replay.records()}
    taught = {one.expert: one.records for one in update.candidates}
    assert taught["shared"] <= len(stored) - len(held), "records are counted, not texts"


def test_experts_have_the_tokens_of_further_answers_in_their_lists(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 12}, vocabulary=torch.arange(5, VOCAB, 2))
    kept = FurtherAnswers(home.target, 2)
    home.trainer.further = kept
    counted: list[ReplayRecord] = []
    choose = home.trainer.vocabularies.choose

    def spied(found: Mapping[str, Iterable[ReplayRecord]]) -> None:
        counted.extend(found["code"])
        choose({"code": counted})

    home.trainer.vocabularies.choose = spied  # type: ignore[method-assign]
    assert home.trainer.update(steps=2) is not None
    originals = sum(one.id > 0 for one in counted)
    assert len(counted) == 3 * originals


def test_one_of_the_answers_is_drawn_evenly() -> None:
    record = a_record(a_target(), 0)
    rng = random.Random(0)
    drawn = [one_of(record, Spy(), rng).token_ids[-1] for _ in range(900)]
    counts = [drawn.count(token) for token in (0, 1)]
    assert all(240 < count < 360 for count in counts)
    assert one_of(record, NoFurther(), rng) is record


@pytest.mark.parametrize("count", [0, 3])
def test_the_setting_says_how_many(drafter: Path, tmp_path: Path, count: int) -> None:
    settings = settings_of(tmp_path / "home", drafter, resampled_answers=count)
    system = served(settings)
    try:
        loop = loop_of(system)
        assert loop.trainer.update(steps=1) is not None
        records = [one for one in system.store.replay.records() if not is_held_out(one)]
        counts = [loop.trainer.further.count(one) for one in records]
        assert max(counts) == count, "all but those of one token"
        assert all(counts) == (count > 0)
        loop._forget_records()
        assert not any(loop.trainer.further.count(one) for one in records), "what was purged is gone here"
        assert isinstance(joint_trainer(settings, system.store, TrialTrainer).further, NoFurther)
    finally:
        system.close()


def test_an_independent_draft_model_has_none(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    loop = build_loop(load_settings(home=tmp_path, model_updates="joint"), store)
    assert isinstance(loop, JointLoop)
    assert isinstance(loop.trainer.further, NoFurther)
    store.close()


def test_a_prompt_that_was_answered_greedily_and_sampled_has_answers_of_both_kinds() -> None:
    target = a_target()
    greedy = a_record(target, 0, topk=4)
    drawn = replace(greedy, temperature=0.7, domain="prose")
    kept = FurtherAnswers(target, 2)
    kept.prepare([greedy, drawn], lambda: None)
    assert [kept.count(greedy), kept.count(drawn)] == [2, 2]
    assert [one.temperature for one in of(kept, drawn)] == [0.7, 0.7]


def test_answers_of_one_token_teach_nothing_and_are_not_kept() -> None:
    target = a_target()
    target.hf.generation_config.eos_token_id = list(range(VOCAB))
    kept = FurtherAnswers(target, 3)
    record = a_record(target, 0)
    kept.prepare([record], lambda: None)
    assert kept.count(record) == 0
    kept.prepare([record], lambda: pytest.fail("it is not asked again"))
