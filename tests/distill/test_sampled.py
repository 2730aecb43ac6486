"""How likely drafted tokens are accepted where answers were sampled, against whole distributions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from feature_records import CPU, SOME, a_batch, a_draft, a_record, a_target, stir
from numpy.typing import NDArray

from moedraft.config import DistillKind, load_settings
from moedraft.core import ReplayRecord
from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, taught_at
from moedraft.distill.features.feature_loss import loss_of
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.guessing.feature_guesses import guessed
from moedraft.distill.guessing.sampled import accepted, at_temperature
from moedraft.distill.guessing.text_guesses import guessed_rows, runs
from moedraft.distill.joint.plan import kinds_for
from moedraft.distill.text.batches import collate
from moedraft.models import LanguageModel

from random_models import VOCAB


def whole(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.double() / temperature).softmax(-1)


def a_student(target: LanguageModel, own: bool) -> FeatureStudent:
    """With an expert that changes something. own: whether it guesses from a list of its own."""
    student = FeatureStudent(a_draft(target, SOME), "base", rank=4)
    student.add("code")
    stir(student)
    if own:
        student.use_lists({"code": SOME[3:20]})
    return student


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0])
def test_all_tokens_together_say_the_whole_distribution(temperature: float) -> None:
    logits = 3 * torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    logprobs, ids = logits.log_softmax(-1).topk(30)
    found = at_temperature(logprobs, torch.full((5,), temperature))
    assert torch.allclose(found, whole(logits, temperature).gather(1, ids), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.0])
def test_few_tokens_say_nearly_all(temperature: float) -> None:
    logits = 4 * torch.randn(200, 1000, generator=torch.Generator().manual_seed(0))
    logprobs, ids = logits.log_softmax(-1).topk(16)
    right = whole(logits, temperature).gather(1, ids)
    found = at_temperature(logprobs, torch.full((200,), temperature))
    assert found.sum(-1).max() <= 1 + 1e-6
    assert (found - right).abs().sum(-1).mean() < 0.06


def test_padding_and_lost_tokens_are_worth_nothing() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.0]]).log()
    found = at_temperature(logprobs, torch.tensor([1.0]))
    assert torch.allclose(found, torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64))
    logits = torch.tensor([[0.6, 0.4]]).log()
    assert accepted(logits, torch.tensor([[0, -1, -1]]), found, torch.tensor([1.0])).item() == pytest.approx(
        0.5
    )
    assert accepted(logits, torch.tensor([[-1, 1, -1]]), found, torch.tensor([1.0])).item() == pytest.approx(
        0.25
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e4])
def test_extreme_temperatures_give_numbers(temperature: float) -> None:
    logprobs = torch.tensor([[0.0, -65504.0, -torch.inf], [-0.1, -3.0, -3.5]])
    found = at_temperature(logprobs, torch.full((2,), temperature))
    assert found.isfinite().all()
    assert (found.sum(-1) <= 1 + 1e-9).all()
    assert (
        accepted(
            torch.tensor([[5.0, 0.0, -5.0]] * 2),
            torch.tensor([[0, 1, 2]] * 2),
            found,
            torch.full((2,), temperature),
        )
        .isfinite()
        .all()
    )


def test_a_temperature_above_one_counts_as_one() -> None:
    """What tokens have there that are not kept is not known; stored numbers are rounded besides."""
    logits = 4 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    logprobs, ids = logits.log_softmax(-1).topk(16)
    found = [at_temperature(logprobs.half().float(), torch.full((20,), t)) for t in (1.0, 1.5, 9.0)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    drawn = [accepted(logits, ids, found[0], torch.full((20,), t)) for t in (1.0, 9.0)]
    assert torch.equal(*drawn)
    assert drawn[0] == pytest.approx(logprobs.exp().sum(-1).numpy(), abs=2e-3)


def test_a_draft_that_gives_no_numbers_is_never_accepted() -> None:
    target = a_target()
    student = FeatureStudent(a_draft(target, SOME), "base", rank=4)
    student.draft.norm.weight.data[:] = torch.nan
    sampled = replace(a_record(target, 2, answer=7), temperature=0.8)
    found = guessed(student, a_batch(target, student.draft, [sampled, a_record(target, 1)]), 3)
    assert found.counts.isfinite().all()
    assert found.counts[:, :, 0].sum() == found.chances[0, 0] == 0


def test_rows_of_several_experts_are_counted_as_each_by_itself() -> None:
    target = a_target()
    draft = a_draft(target, SOME)
    student = FeatureStudent(draft, "base", rank=4)
    for name in ("code", "sql"):
        student.add(name)
    stir(student)
    student.use_lists({"code": SOME[3:20], "sql": SOME[10:30]})
    records = [
        replace(a_record(target, i, answer=4 + i, domain=name), temperature=temperature)
        for i, (name, temperature) in enumerate([("code", 0.5), ("code", 0.0), ("sql", 0.9), ("sql", 1.0)])
    ]
    together = guessed(student, a_batch(target, draft, records), 3)
    for i, record in enumerate(records):
        alone = guessed(student, a_batch(target, draft, [record]), 3)
        assert together.counts[i].numpy() == pytest.approx(alone.counts[0].numpy(), abs=1e-5)
        assert together.chances[i].numpy() == pytest.approx(alone.chances[0].numpy(), abs=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_sampled_answers_count_what_is_expected_to_be_accepted(own: bool) -> None:
    """Beside a greedy answer, whose guesses are right or wrong; the reference goes place by place."""
    target = a_target()
    student = a_student(target, own)
    draft = student.draft
    greedy = a_record(target, 1)
    sampled = replace(a_record(target, 2, answer=7), temperature=0.8)
    batch = a_batch(target, draft, [greedy, sampled])
    found = guessed(student, batch, 3)
    counts = found.counts.numpy()
    assert np.array_equal(counts[0], guessed(student, a_batch(target, draft, [greedy]), 3).counts[0].numpy())
    assert np.array_equal(counts[0], counts[0].round())
    assert counts[1] == pytest.approx(expected(student, a_batch(target, draft, [sampled]), sampled, 3))
    assert found.chances[1].numpy() == pytest.approx(counts[1, 0])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("missed", [1.0, 2.0])
def test_sampled_answers_learn_by_a_divergence_of_their_own(own: bool, missed: float) -> None:
    target = a_target()
    student = a_student(target, own)
    draft = student.draft
    vocabulary = DraftVocabulary(draft.vocabulary, draft.config.vocab_size)
    greedy = [a_record(target, i, answer=4 + i) for i in range(2)]
    sampled = [replace(a_record(target, 5 + i, answer=6 + i), temperature=0.8) for i in range(2)]

    def loss(records: list[ReplayRecord], **kinds: Any) -> tuple[float, torch.Tensor]:
        batch = a_batch(target, draft, records)
        found = loss_of(student, batch, vocabulary, steps=1, missed=missed, **kinds)
        rows = sum(taught_at(batch, 1).counts)
        parameters = list(student.parameters("code"))
        gradients = torch.autograd.grad(found, parameters, allow_unused=True)
        flat = torch.cat([g.flatten() for g in gradients if g is not None])
        return float(found.detach()) * rows, flat * rows

    mixed = [greedy[0], sampled[0], greedy[1], sampled[1]]
    found = loss(mixed, kind="fkl", sampled="tvd")
    parts = loss(greedy, kind="fkl"), loss(sampled, kind="tvd")
    assert found[0] == pytest.approx(parts[0][0] + parts[1][0], rel=1e-5)
    assert torch.allclose(found[1], parts[0][1] + parts[1][1], atol=1e-5)
    assert loss(sampled, kind="fkl", sampled="tvd")[0] == pytest.approx(parts[1][0], rel=1e-6)
    assert loss(mixed, kind="fkl")[0] != pytest.approx(found[0], rel=1e-2)
    assert loss(mixed, kind="fkl", sampled="fkl")[0] == loss(mixed, kind="fkl")[0]


def test_the_setting_says_what_sampled_answers_learn_by() -> None:
    assert load_settings().distill_kind == "auto"
    kinds = {kind: kinds_for(kind) for kind in get_args(DistillKind)}
    assert kinds.pop("auto") == ("fkl", "jsd")
    assert kinds == {kind: (kind, kind) for kind in ("fkl", "rkl", "jsd", "tvd")}


def test_an_independent_draft_counts_the_same_way() -> None:
    target = a_target()
    greedy, sampled = a_record(target, 1), replace(a_record(target, 2, answer=7), temperature=0.8)
    batch = collate([greedy, sampled], CPU)
    logits = 2 * torch.randn(len(batch.topk_ids), VOCAB, generator=torch.Generator().manual_seed(0))
    found = list(guessed_rows(logits.split(4), batch, 2))
    answer = len(greedy.topk_ids)
    assert (
        found[0][0].tolist()
        == runs(logits[:answer].argmax(-1).eq(batch.topk_ids[:answer, 0]).numpy(), 2).tolist()
    )
    rates = []
    for row, ids, logprobs in zip(logits[answer:], sampled.topk_ids, sampled.topk_logprobs, strict=True):
        wanted = torch.full((VOCAB,), -torch.inf)
        wanted[ids] = torch.tensor(logprobs)
        rates.append(torch.minimum(whole(row, 0.8), whole(wanted, 0.8)).sum().item())
    assert found[1][0][0] == pytest.approx([sum(rates), 7])
    assert found[1][0][1] == pytest.approx([sum(a * b for a, b in pairwise(rates)), sum(rates[:-1])])
    assert found[1][1] == pytest.approx((sum(rates), 7))


def expected(
    student: FeatureStudent, batch: FeatureBatch, record: ReplayRecord, depth: int
) -> NDArray[np.float64]:
    """Hits and tries of `guessed`, from the full distributions of the draft and of the record."""
    vocabulary, places = student.draft.vocabulary, len(record.topk_ids)
    alive, counts = [1.0] * places, np.zeros((depth, 2))
    for step, hidden in enumerate(student.outputs(batch, depth), start=1):
        for row in range(places):
            if row + step >= places:
                alive[row] = 0.0
                continue
            [part] = student.guesses(hidden[0, row][None], ["code"], [1])
            own = vocabulary if part.numbers is None else vocabulary[part.numbers]
            text = record.token_ids[1 : record.num_prompt_tokens + row + step]
            further = torch.tensor([token for token in {*text} if token not in own.tolist()])
            rows = student.draft.rows(further)
            more = student.draft.normed(hidden[0, row]) @ rows.T
            drawn = torch.zeros(VOCAB, dtype=torch.float64)
            names = torch.cat([own, further])
            drawn[names] = whole(torch.cat([part.logits[0], more]).detach(), 0.8)
            logits = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            ids = torch.tensor(record.topk_ids[row + step])
            logits[ids] = torch.tensor(record.topk_logprobs[row + step]).double()
            accepted_here = torch.minimum(drawn, whole(logits, 0.8)).sum().item()
            counts[step - 1] += alive[row] * accepted_here, alive[row]
            alive[row] *= accepted_here
    return counts
