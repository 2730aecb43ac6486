"""The life of a request: limits, stops, abort, streaming, errors, fairness; on a table of logits."""

from __future__ import annotations

import pytest
import torch

from moedraft.core import InvalidRequest, RequestOutput, SamplingParams
from moedraft.drafting.drafter import Drafter, NoExperts
from moedraft.engine.engine import Engine

from tiny import FixedSelector, NumberTokenizer, TinyLM, random_table

VOCAB = 12


def engine(max_len: int = 128, slots: int = 4, **options: object) -> Engine:
    target = TinyLM(random_table(VOCAB, 1), max_len)
    drafter = Drafter(TinyLM(target.table, max_len), NoExperts(), slots, VOCAB)
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=slots, **options)  # type: ignore[arg-type]


def finish(one: Engine) -> dict[str, RequestOutput]:
    done = {}
    while one.has_work:
        done |= {o.request_id: o for o in one.step() if o.finish_reason}
    return done


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_bad_parameters_are_named(values: dict, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        SamplingParams(**values)


def test_bad_prompts_change_nothing() -> None:
    one = engine(max_len=16)
    bad = [("", "empty"), ("  ", "empty"), ([], "empty"), ([99], "vocabulary"), ([1] * 16, "context")]
    for prompt, word in bad:
        with pytest.raises(InvalidRequest, match=word):
            one.add(prompt)
    with pytest.raises(InvalidRequest, match="context"):
        one.generate([[1, 2], [1] * 40])
    assert not one.has_work
    one.add([1], request_id="same")
    with pytest.raises(InvalidRequest, match="in use"):
        one.add([1], request_id="same")
    with pytest.raises(InvalidRequest, match="sampling parameters"):
        one.generate([[1]], [SamplingParams(), SamplingParams()])


def test_truncation_keeps_the_end() -> None:
    one = engine(max_len=16, truncate_prompts=True)
    long = [i % VOCAB for i in range(40)]
    a = one.generate([long], SamplingParams(max_tokens=1))[0]
    b = one.generate([long[-15:]], SamplingParams(max_tokens=1))[0]
    assert a.token_ids == b.token_ids


def test_stop_string_and_eos_end_in_the_middle_of_a_round() -> None:
    one = engine()
    [whole] = one.generate([[1, 2]], SamplingParams(max_tokens=40))
    text = whole.text
    third = str(whole.token_ids[2])
    [stopped] = one.generate([[1, 2]], SamplingParams(max_tokens=40, stop=(f" {third} ",)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(f" {third} ")]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    one.eos_token_ids = frozenset([whole.token_ids[5]])
    [ended] = one.generate([[1, 2]], SamplingParams(max_tokens=40))
    cut = whole.token_ids.index(whole.token_ids[5]) + 1
    assert (ended.finish_reason, ended.token_ids) == ("stop", whole.token_ids[:cut])
    [ignored] = one.generate([[1, 2]], SamplingParams(max_tokens=40, ignore_eos=True))
    assert ignored.token_ids == whole.token_ids


def test_stream_grows_and_never_shows_what_a_stop_takes_back() -> None:
    one = engine()
    [whole] = one.generate([[1, 2]], SamplingParams(max_tokens=30))
    stop = whole.text[20:26]
    outputs = list(one.stream("1 2", SamplingParams(max_tokens=30, stop=(stop,))))
    assert "".join(o.delta for o in outputs) == outputs[-1].text == whole.text[: whole.text.index(stop)]
    assert all(outputs[-1].text.startswith(o.text) for o in outputs)
    assert outputs[-1].finish_reason == "stop"


def test_closing_a_stream_frees_the_slot() -> None:
    one = engine()
    stream = one.stream("1 2", SamplingParams(max_tokens=60))
    next(stream)
    stream.close()
    assert not one.has_work
    assert one.scheduler.running == []


def test_abort_anywhere() -> None:
    one = engine(slots=2)
    for i in range(1, 6):
        one.add([i], SamplingParams(max_tokens=30))
    one.step()
    kept = one.generate([[7]], SamplingParams(max_tokens=3))  # steps the others too
    assert len(kept[0].token_ids) == 3
    finish(one)
    other = [one.add([i], SamplingParams(max_tokens=30)) for i in range(1, 5)]
    one.step()
    assert one.abort(other[0]).finish_reason == "abort"  # type: ignore[union-attr]  # running
    assert one.abort(other[3]).finish_reason == "abort"  # type: ignore[union-attr]  # waiting
    assert one.abort("nobody") is None
    done = finish(one)
    assert set(done) == {other[1], other[2]}
    [alone] = engine().generate([[2]], SamplingParams(max_tokens=30))
    assert done[other[1]].token_ids == alone.token_ids


def test_a_broken_row_ends_alone() -> None:
    """NaN logits after one token: that request ends with an error, its neighbours go on unharmed."""
    one = engine()
    [fine] = one.generate([[3, 4]], SamplingParams(max_tokens=12))
    bad = next(t for t in range(VOCAB) if t not in (3, 4, *fine.token_ids))
    one.target.table[bad] = torch.nan  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=12)
    good, broken = one.add([3, 4], params), one.add([bad], params)
    done = finish(one)
    assert done[broken].finish_reason == "error"
    assert done[good].token_ids == fine.token_ids


def test_sinks_see_every_finished_request_once_and_capture_matches() -> None:
    one = engine()
    seen = []
    one.sinks.append(seen.append)
    one.generate([[1], [2], [3]], SamplingParams(max_tokens=7), learn=True)
    assert len(seen) == 3
    for sequence in seen:
        rows = sum(len(ids) for ids, _ in sequence.captured)
        assert rows >= sequence.num_generated == 7
        first_ids, first_logprobs = sequence.captured[0]
        logits = one.target.logits_after(sequence.token_ids[: sequence.num_prompt_tokens])  # type: ignore[attr-defined]
        assert first_ids[0, 0] == logits.argmax()
        torch.testing.assert_close(
            first_logprobs[0, 0], logits.log_softmax(-1).max(), check_dtype=False, atol=1e-5, rtol=0
        )


def test_prompts_are_read_beside_decoding() -> None:
    """A long prompt is read in chunks while others decode; nobody waits for all of it."""
    one = engine(max_len=512, prefill_chunk=8)
    quick = one.add([1, 2], SamplingParams(max_tokens=3))
    one.add([3] * 200, SamplingParams(max_tokens=3))
    steps = 0
    while quick in one.sequences:
        one.step()
        steps += 1
    assert steps <= 3
    assert len(finish(one)) == 1


def test_fixed_length_without_adaptive_budget() -> None:
    one = engine(adaptive_budget=False, num_speculative_tokens=3)
    [output] = one.generate([[1]], SamplingParams(max_tokens=41))
    assert output.num_draft_tokens == 3 * output.num_drafts
    assert output.mean_acceptance_length == 4.0


def test_close_aborts_and_calls_closers() -> None:
    closed = []
    with engine() as one:
        one.closers.append(lambda: closed.append(True))
        one.add([1])
    assert not one.has_work
    assert closed == [True]
