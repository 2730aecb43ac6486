"""The life of a request: limits, stops, abort, streaming, errors, fairness; on a table of logits."""

from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest
import torch

from moedraft.core import InvalidRequest, RequestOutput, SamplingParams, Sequence
from moedraft.drafting.drafter import NoDrafter, NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.engine.tokenise import tokenise
from moedraft.evidence import Reading
from moedraft.routing.selector import FixedSelector

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 12


def engine(max_len: int = 128, slots: int = 4, **options: object) -> Engine:
    target = TinyLM(random_table(VOCAB, 1), max_len)
    drafter = ModelDrafter(TinyLM(target.table, max_len), NoExperts(), slots, VOCAB)
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
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (1,)}, "stop"),
        ({"stop": 5}, "stop"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": None}, "top_p"),
        ({"top_k": 99999999999999999999}, "top_k"),
        ({"top_k": 10**5000}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"seed": 1.0}, "seed"),
        ({"ignore_eos": "no"}, "ignore_eos"),
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
    for wrong in (5, None, 1.5):
        with pytest.raises(InvalidRequest, match="list of prompts"):
            one.generate(wrong)  # type: ignore[arg-type]
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


def test_truncation_keeps_the_mark_of_the_beginning() -> None:
    one = engine(max_len=16, truncate_prompts=True)
    one.tokenizer.bos_token_id = 9
    long = [9, *(i % 5 for i in range(40))]
    text = " ".join(map(str, long))
    [kept] = one.generate(text, SamplingParams(max_tokens=1, logprobs=3))
    [told] = one.generate([[9, *long[-14:]]], SamplingParams(max_tokens=1, logprobs=3))
    [other] = one.generate([long], SamplingParams(max_tokens=1, logprobs=3))  # ids are as they were given
    assert kept.num_prompt_tokens == told.num_prompt_tokens == other.num_prompt_tokens == 15
    for prompt, read in ((text, [9, *long[-14:]]), (long, long[-15:])):
        ids = tokenise(one.tokenizer, prompt, chat=False, vocab_size=VOCAB, room=15, truncate=True)
        assert ids == read
    assert kept.logprobs == told.logprobs


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
    assert ended.text == NumberTokenizer().decode(ended.token_ids[:-1])  # its end is no text
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
    one.subscribe(seen.append)
    one.generate([[1], [2], [3]], SamplingParams(max_tokens=7), learn=True)
    assert len(seen) == 3
    for sequence in seen:
        captured = [rows.top() for rows in sequence.captured]
        rows = sum(len(ids) for ids, _ in captured)
        assert rows >= sequence.num_generated == 7
        first_ids, first_logprobs = captured[0]
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
    while quick in one.request_ids:
        one.step()
        steps += 1
    assert steps <= 3
    assert len(finish(one)) == 1


@pytest.mark.parametrize(
    ("lengths", "chunk", "expected"),
    [
        ([21], 8, [[8], [8], [4]]),
        ([21, 1, 4, 11], 9, [[3, 3, 3, 0], [5, 4], [6, 3], [6]]),  # what short ones leave, long ones get
        ([4, 4, 4, 4], 2, [[1, 1, 1, 1]] * 3),
        ([1, 1], 8, []),
    ],
)
def test_prompts_that_come_together_share_a_chunk(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], chunk: int, expected: list[list[int]]
) -> None:
    """Many long prompts hold a step up no longer than one does, and none waits for another."""
    one = engine(max_len=512, prefill_chunk=chunk)
    read, pieces = one.runner.read, list[list[int]]()

    def noted(reading: Reading) -> None:
        pieces.append(sorted((count for _, count in reading.pieces), reverse=True))
        read(reading)

    monkeypatch.setattr(one.runner, "read", noted)
    for length in lengths:
        one.add([3] * length, SamplingParams(max_tokens=1))
    assert len(finish(one)) == len(lengths)
    assert pieces == expected


def test_fixed_length_without_adaptive_budget() -> None:
    one = engine(adaptive_budget=False, num_speculative_tokens=3)
    [output] = one.generate([[1]], SamplingParams(max_tokens=41))
    assert output.speculation.num_draft_tokens == 3 * output.speculation.num_drafts
    assert output.speculation.mean_acceptance_length == 4.0


def test_close_aborts_and_calls_closers() -> None:
    closed = []
    with engine(closers=[lambda: closed.append(True)]) as one:
        one.add([1])
    assert not one.has_work
    assert closed == [True]


def test_a_lone_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 7, b"1", [1.0], [True], ["1"], "1\ud800 2", {"a": 1}])
def test_prompts_of_other_types_are_refused(prompt: object) -> None:
    one = engine()
    with pytest.raises(InvalidRequest, match="prompt"):
        one.add(prompt)  # type: ignore[arg-type]
    for wrong in ({"params": {"top_k": 1}}, {"expert": ["a"]}, {"request_id": 5}, {"request_id": ""}):
        with pytest.raises(InvalidRequest):
            one.add([1], **wrong)  # type: ignore[arg-type]
    assert not one.has_work


def test_the_highest_temperature_gives_an_answer() -> None:
    [output] = engine().generate([[1]], SamplingParams(1e4, top_p=0.9, max_tokens=9))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 9)


def test_a_reused_request_id_has_its_own_parameters() -> None:
    one, answers = engine(), []
    for params in (SamplingParams(max_tokens=9), SamplingParams(5.0, max_tokens=9, seed=1)):
        one.add([1, 2], params, request_id="same")
        answers.append(finish(one)["same"].token_ids)
    [fresh] = engine().generate([[1, 2]], SamplingParams(5.0, max_tokens=9, seed=1))
    assert answers[1] == fresh.token_ids != answers[0]


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_broken_draft_costs_nothing_but_speed(adaptive: bool) -> None:
    """NaN from the draft: greedy answers are the target's, sampled ones come to their end."""
    target, draft = TinyLM(random_table(VOCAB, 1)), TinyLM(torch.full((VOCAB, VOCAB), torch.nan).double())
    one = Engine(
        target,
        NumberTokenizer(),
        ModelDrafter(draft, NoExperts(), 4, VOCAB),
        FixedSelector(),
        adaptive_budget=adaptive,
    )
    params = [SamplingParams(1.0, max_tokens=20, seed=3), SamplingParams(max_tokens=20), SamplingParams(0.7)]
    outputs = one.generate([[1, 2], [3], [4]], params)
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [
        ("length", 20),
        ("length", 20),
        ("length", 128),
    ]
    assert outputs[0].speculation.num_draft_tokens > outputs[0].speculation.num_accepted_tokens == 0
    [plain] = one.generate([[3]], SamplingParams(max_tokens=20), draft=False)
    assert outputs[1].token_ids == plain.token_ids
    confidences = [x for model in one.chooser.budget.acceptance.values() for x, _ in model.seen]
    assert all(x == x for x in confidences)


def test_acceptance_counts_the_answer_only() -> None:
    """Four drafted tokens are right, but the first one, or a stop string in it, ends the answer."""
    one = engine(adaptive_budget=False, num_speculative_tokens=4)
    [whole] = one.generate([[1, 2]], SamplingParams(max_tokens=20))
    [stopped] = one.generate([[1, 2]], SamplingParams(max_tokens=20, stop=(f"{whole.token_ids[0]} ",)))
    one.eos_token_ids = frozenset(whole.token_ids[:1])
    [ended] = one.generate([[1, 2]], SamplingParams(max_tokens=20))
    for output in (stopped, ended):
        assert (
            len(output.token_ids),
            output.speculation.num_draft_tokens,
            output.speculation.num_accepted_tokens,
        ) == (1, 4, 1)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_shorter_draft_does_not_shorten_answers(adaptive: bool) -> None:
    target, draft = TinyLM(random_table(VOCAB, 1), 64), TinyLM(random_table(VOCAB, 1), 20)
    calls: list[int] = []
    forward = draft.forward

    def watched(cache, first, ids, starts, keep=0):  # type: ignore[no-untyped-def]
        calls.append(max(starts) + ids.shape[1])
        return forward(cache, first, ids, starts, keep)

    draft.forward = watched  # type: ignore[method-assign]
    drafter = ModelDrafter(draft, NoExperts(), 4, VOCAB)
    one = Engine(target, NumberTokenizer(), drafter, FixedSelector(), adaptive_budget=adaptive)
    prompts, params = [[1, 2], [3] * 30], SamplingParams(max_tokens=500)
    for prompt in prompts:  # alone, so that no other row's drafting reaches further
        [plain] = one.generate([prompt], params, draft=False)
        [output] = one.generate([prompt], params)
        assert output.token_ids == plain.token_ids
        assert len(output.token_ids) == 64 - len(prompt)
    assert calls
    assert max(calls) <= 20
    together = one.generate(prompts, params)
    assert [o.token_ids for o in together] == [
        o.token_ids for o in one.generate(prompts, params, draft=False)
    ]


def test_an_answer_longer_than_the_draft_reads_is_not_learned_from() -> None:
    target, draft = TinyLM(random_table(VOCAB, 1), 64), TinyLM(random_table(VOCAB, 1), 20)
    one = Engine(target, NumberTokenizer(), ModelDrafter(draft, NoExperts(), 4, VOCAB), FixedSelector())
    seen = []
    one.subscribe(lambda sequence: seen.append(bool(sequence.captured)))
    one.generate([[1]], SamplingParams(max_tokens=40), learn=True)
    one.generate([[1]], SamplingParams(max_tokens=4), learn=True)
    assert seen == [False, True]


def test_streams_and_whole_answers_side_by_side_lose_nothing() -> None:
    params = SamplingParams(max_tokens=30)
    texts = [o.text for o in engine().generate(["1 2", "3 4", "5 6"], params)]
    one = engine()
    streams, got, inner = [one.stream(prompt, params) for prompt in ("1 2", "3 4")], ["", ""], ""
    ended = [False, False]
    while not all(ended):
        for i, stream in enumerate(streams):
            output = next(stream, None)
            ended[i] = output is None
            got[i] += output.delta if output else ""
        inner = inner or one.generate(["5 6"], params)[0].text
    assert [*got, inner] == texts
    assert not one.has_work


def test_a_step_still_returns_everything() -> None:
    one = engine()
    stream = one.stream("1 2", SamplingParams(max_tokens=30))
    first = next(stream)
    assert [o.request_id for o in one.step()] == [first.request_id]
    stream.close()


@pytest.mark.parametrize("aborted", [False, True])
def test_who_listened_is_forgotten(aborted: bool) -> None:
    one, box = engine(), deque[RequestOutput]()
    listener = weakref.ref(box)
    request_id = one.add("1 2", SamplingParams(max_tokens=9), on_output=box.append)
    one.step()
    if aborted:
        one.abort(request_id)
    while one.has_work:
        one.step()
    assert box[-1].finish_reason == ("abort" if aborted else "length")
    del box
    gc.collect()
    assert listener() is None


class Asked(FixedSelector):
    """Remembers for which prompts it was asked at once, and gives all of them the same expert."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def assign(self, sequences: list[Sequence]) -> None:
        self.calls.append([row.token_ids[: row.num_prompt_tokens] for row in sequences])


def test_the_prompts_of_a_queue_are_routed_together_and_each_once() -> None:
    asked = Asked()
    one = Engine(TinyLM(random_table(VOCAB, 1)), NumberTokenizer(), NoDrafter(), asked, max_batch_size=3)
    prompts = [[5, i % VOCAB] for i in range(11)]
    one.generate(prompts, [SamplingParams(max_tokens=2 + i % 4) for i in range(11)])
    assert [prompt for call in asked.calls for prompt in call] == prompts  # in their order, none twice
    assert [len(call) for call in asked.calls] == [6, 4, 1]
