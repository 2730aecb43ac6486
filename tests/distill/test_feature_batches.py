"""What teaches a feature drafter: the right distribution, the right rows, and no state of another record."""

from __future__ import annotations

import pytest
import torch
from feature_records import CPU, EVERY, LAYERS, SOME, a_batch, a_draft, a_record, a_target

from moedraft.core import ReplayRecord
from moedraft.cpu.steady.forward import SteadyForward
from moedraft.distill.features.feature_batches import OUTSIDE, DraftVocabulary, taught_at, within
from moedraft.distill.features.feature_loss import loss_of
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import HALF, RecordStates
from moedraft.distill.features.unrolled import unroll
from moedraft.distill.guessing.feature_guesses import acceptance
from moedraft.feature import unroll as whole
from moedraft.feature.features import FeatureCapture
from moedraft.feature.unroll import Batch
from moedraft.models import LanguageModel


def records_of(target: LanguageModel) -> list[ReplayRecord]:
    """Ragged prompts and answers."""
    return [a_record(target, seed, prompt=6 + seed, answer=7 - seed) for seed in range(3)]


def test_a_row_is_taught_the_distribution_that_the_target_has_two_tokens_on() -> None:
    """Entry i, with the target's state at i and the token at i + 1, guesses the token at i + 2."""
    target = a_target()
    draft, one = a_draft(target), a_record(target, 0, prompt=6, answer=5)
    batch = a_batch(target, draft, [one])
    with torch.no_grad():
        logprobs = target.hf(input_ids=torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
    for step in (1, 2, 3):
        taught = taught_at(batch, step)
        rows = taught.rows[0].nonzero()[:, 0].tolist()
        assert rows == list(range(5 - step))
        for n, row in enumerate(rows):
            i = 6 - 1 + row  # position of the target's state that the row reads
            known = torch.empty(97).index_copy_(0, taught.topk_ids[n], taught.topk_logprobs[n])
            torch.testing.assert_close(known, logprobs[i + step], rtol=1e-4, atol=1e-4)
            assert taught.tokens[n] == one.token_ids[i + step + 1]


def test_rows_hold_the_targets_state_and_the_token_after_it() -> None:
    target = a_target()
    draft, one = a_draft(target), a_record(target, 0, prompt=6, answer=5)
    batch = a_batch(target, draft, [one])
    with torch.no_grad(), FeatureCapture(target.hf, LAYERS) as capture:
        target.hf(input_ids=torch.tensor([one.token_ids]))
        fused = draft.fuse(capture.joined())[0]
    torch.testing.assert_close(batch.context_states[0].float(), fused[:5], rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(batch.states[0].float(), fused[5:10], rtol=1e-2, atol=2e-2)
    assert batch.context_ids[0].tolist() == one.token_ids[1:6]
    assert batch.answer_ids[0].tolist() == one.token_ids[6:]


def test_the_unrolled_steps_are_those_over_whole_texts() -> None:
    """Ragged prompts and answers side by side give what each text gives by itself in the plain twin."""
    target = a_target()
    draft, records = a_draft(target), records_of(target)
    batch, fused = a_batch(target, draft, records), RecordStates(target, draft).of(records)
    ours = list(unroll(draft, batch, 3))
    draft.fuse = lambda states: states  # type: ignore[method-assign]  # the twin gets them fused
    for b, one in enumerate(records):
        ids = torch.tensor([one.token_ids])
        theirs = whole.unroll(draft, fused[b][None].float(), ids, 3)
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
            begin, count = one.num_prompt_tokens - 1, len(one.topk_ids) - step
            expected = other[0, begin : begin + count]
            torch.testing.assert_close(mine[b, :count], expected, rtol=1e-4, atol=1e-4)


def test_the_loss_is_that_over_whole_texts_when_all_tokens_are_known() -> None:
    target = a_target()
    draft = a_draft(target)
    one = a_record(target, 3, prompt=1, answer=9)  # then everything but the first guess is the answer
    batch, vocabulary = a_batch(target, draft, [one]), DraftVocabulary(EVERY, 97)
    loss = loss_of(FeatureStudent(draft, "base"), batch, vocabulary, steps=2)
    teacher = whole.Teacher(target.hf, LAYERS, EVERY)
    read = Batch.read(teacher, [one.token_ids])
    # The twin also teaches what would follow the text's last token; no record knows it.
    inner = Batch(read.token_ids, read.lengths - 1, read.features, read.states)
    assert loss.item() == pytest.approx(whole.loss_of(draft, teacher, inner, 2).item(), rel=0.02)


def test_what_is_taught_is_the_targets_choice_among_what_can_be_drafted() -> None:
    """As the draft base is trained: without the tokens that it has no row for, at whatever probability."""
    target = a_target()
    draft, one = a_draft(target, SOME), a_record(target, 0)
    taught = taught_at(a_batch(target, draft, [one]), 1)
    with torch.no_grad():
        logits = target.hf(input_ids=torch.tensor([one.token_ids])).logits[0, 6:10][:, SOME]
    for n, expected in enumerate(logits.log_softmax(-1)):
        known = taught.topk_ids[n] >= 0
        found = torch.empty(len(SOME)).index_copy_(
            0, taught.topk_ids[n][known], taught.topk_logprobs[n][known]
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_nothing_is_left_where_no_likely_token_can_be_drafted() -> None:
    ids, logprobs = within(torch.tensor([[OUTSIDE, OUTSIDE], [3, OUTSIDE]]), torch.tensor([[0.0, -99.0]] * 2))
    assert ids.tolist() == [[OUTSIDE, OUTSIDE], [3, OUTSIDE]]
    assert (logprobs[0] == -torch.inf).all()
    assert logprobs[1, 0] == pytest.approx(0, abs=1e-5)


def test_tokens_that_cannot_be_drafted_are_padding() -> None:
    target = a_target()
    batch = a_batch(target, a_draft(target, SOME), [a_record(target, 0, topk=12)])
    shown = batch.topk_ids >= 0
    assert 0 < shown.sum() < shown.numel()
    assert (batch.topk_logprobs[~shown] == -torch.inf).all()
    assert batch.topk_ids.max() < len(SOME)
    assert DraftVocabulary(SOME, 97)(torch.tensor([4, 5, 6, 7, -1])).tolist() == [
        OUTSIDE,
        0,
        OUTSIDE,
        1,
        OUTSIDE,
    ]


def test_long_prompts_lose_their_beginning_and_long_answers_their_end() -> None:
    target = a_target()
    draft, one = a_draft(target), a_record(target, 0, prompt=12, answer=9)
    batch = a_batch(target, draft, [one], max_tokens=10)
    assert batch.prompts.tolist() == [5]
    assert batch.lengths.tolist() == [5]
    whole_batch = a_batch(target, draft, [one])
    torch.testing.assert_close(batch.states[0], whole_batch.states[0, :5])  # the target has read it whole


def test_a_long_prompt_keeps_its_first_entry() -> None:
    """The drafter sees that one whenever it serves, however long the prompt is."""
    target = a_target()
    draft, one = a_draft(target), a_record(target, 0, prompt=30, answer=5)
    whole, cut = (a_batch(target, draft, [one], max_tokens=most) for most in (2048, 20))
    assert cut.context_ids[0].tolist() == [one.token_ids[1], *one.token_ids[22:30]]
    places = [0, *range(21, 29)]
    torch.testing.assert_close(cut.context_states[0], whole.context_states[0][places])
    single = a_batch(target, draft, [one], max_tokens=2)  # there is room for no entry
    assert single.prompts.tolist() == [1]


def test_states_are_computed_once_and_kept_within_bounds() -> None:
    target = a_target()
    draft, records = a_draft(target), records_of(target)
    states = RecordStates(target, draft)
    first = states.of(records)
    read = states.tokens_read
    again = states.of(records[::-1])
    assert read == states.tokens_read == sum(len(record.token_ids) for record in records)
    assert all(torch.equal(a, b) for a, b in zip(first, again[::-1], strict=True))
    assert first[0].dtype == HALF
    assert states.bytes == sum(one.nbytes for one in first)
    small = RecordStates(target, draft, limit_bytes=first[1].nbytes + first[2].nbytes)
    small.of(records[:1])
    small.of(records[1:])
    assert small.bytes <= small.limit_bytes
    small.of(records[1:])
    assert small.tokens_read == read
    small.of(records[:1])  # the one that was used longest ago is read again
    assert small.tokens_read == read + len(records[0].token_ids)


@pytest.mark.parametrize("layers", [LAYERS, (0, 2, 3)])
def test_states_are_the_same_alone_and_in_a_batch(layers: tuple[int, ...]) -> None:
    """Also where the last layer's own states are wanted, which the serving forward does not give."""
    target = a_target()
    draft, records = a_draft(target), records_of(target)
    object.__setattr__(draft.config, "feature_layers", layers)
    together = RecordStates(target, draft).of(records)
    for one, found in zip(records, together, strict=True):
        alone = RecordStates(target, draft).of([one])[0]
        assert found.shape == (len(one.token_ids), draft.config.hidden_size)
        torch.testing.assert_close(found.float(), alone.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("fast", [False, True], ids=["plain", "fast path"])
def test_the_target_is_read_as_it_serves_though_the_drafter_learns_in_bfloat16(fast: bool) -> None:
    """A target in float32 whose weights are laid out for float32 cannot be run in another precision."""
    target = a_target()
    target.lean = SteadyForward(target.hf) if fast else None
    draft, records = a_draft(target), records_of(target)
    served = RecordStates(target, draft).of(records)
    with torch.autocast("cpu", torch.bfloat16):
        learned = RecordStates(target, draft).of(records)
        assert torch.is_autocast_enabled("cpu")  # for the drafter that comes after
    for one, other in zip(learned, served, strict=True):
        assert torch.equal(one, other)


def test_acceptance_counts_what_whole_texts_count() -> None:
    target = a_target()
    draft = a_draft(target)
    records = records_of(target)
    student = FeatureStudent(draft, "base")
    ours = acceptance(student, a_batch(target, draft, records), 3).sum(0)
    teacher = whole.Teacher(target.hf, LAYERS, EVERY)
    batch = Batch.read(teacher, [record.token_ids for record in records])
    theirs = whole.acceptance(draft, batch, [record.num_prompt_tokens for record in records], 3)
    assert ours[:, 1].tolist()[0] == theirs[:, 1].tolist()[0] == sum(len(r.topk_ids) - 1 for r in records)
    assert (ours[:, 0] - theirs[:, 0]).abs().max() <= 1  # states are rounded to half precision


def test_batches_are_on_the_device_that_is_asked_for() -> None:
    target = a_target()
    assert a_batch(target, a_draft(target), records_of(target)).states.device == CPU
