"""The draft model's proposals, asked for directly: how far, with whom, from what; and its cache."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from moedraft.core import SHARED, Sequence
from moedraft.drafting.drawing import LogitBuffer
from moedraft.drafting.model import LAG, ModelDrafter
from moedraft.evidence import NOBODY, Proposal, Rows
from moedraft.sampling import filter_logits

from rounds import evidence_of, row, rows_of
from tiny import TinyLM, random_table

VOCAB = 12
TABLE = random_table(VOCAB, 1)


class Experts:
    """A bank that notes what is selected. `only`: the expert that drafts for everybody, if one does."""

    def __init__(self, *, shares_cache: bool = True, only: str | None = None) -> None:
        self.shares_cache, self.only = shares_cache, only
        self.selected: list[list[str]] = []

    def drafters(self, rows: list[str]) -> list[str]:
        return [self.only or expert for expert in rows]

    def select(self, rows: list[str], *, exact: bool = False) -> None:
        self.selected.append(rows)

    def version(self, expert: str) -> int:
        return {"sql": 3, "code": 5}.get(expert, 0)


class Steps:
    """Says that one more token is to be drawn until there are so many; keeps the chances it was told."""

    def __init__(self, most: int) -> None:
        self.most, self.told = most, list[list[float]]()

    def __call__(self, chances: list[float]) -> bool:
        self.told.append(chances)
        return len(self.told) < self.most


def drafter(
    table: torch.Tensor = TABLE, bank: Experts | None = None, vocab: int = VOCAB, chunk: int = 512
) -> ModelDrafter:
    return ModelDrafter(TinyLM(table), bank or Experts(), 4, vocab, chunk)


def propose(one: ModelDrafter, rows: Rows, limits: list[int], steps: Steps | None = None) -> Proposal:
    one.catch_up(rows, limits)
    return one.propose(rows, limits, steps or Steps(max(limits)))


def forwards(one: ModelDrafter) -> list[tuple[int, int]]:
    """(rows, width) of each forward since the last look."""
    model = one.model
    assert isinstance(model, TinyLM)
    done, model.forwards = model.forwards, []
    return done


def greedy(context: list[int], count: int, table: torch.Tensor = TABLE) -> list[int]:
    model, text = TinyLM(table), list(context)
    for _ in range(count):
        text.append(int(model.logits_after(text).argmax()))
    return text[len(context) :]


# -- how far -------------------------------------------------------------------------------------


def test_each_row_keeps_no_more_than_its_limit() -> None:
    rows = rows_of(row(0, 1, 2), row(1, 3), row(2, 4, 5))
    drawn = propose(drafter(), rows, [3, 0, 1])
    assert drawn.token_ids.tolist() == [greedy([1, 2], 3), [-1] * 3, [*greedy([4, 5], 1), -1, -1]]
    assert drawn.lengths == [3, 0, 1]
    assert drawn.sources == ["model", NOBODY, "model"]
    assert [len(chances) for chances in drawn.confidences] == [3, 0, 1]
    assert (drawn.steps, drawn.width, drawn.parents) == (3, 3, None)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_it_stops_when_it_is_told_to(most: int) -> None:
    one, steps = drafter(), Steps(most)
    drawn = propose(one, rows_of(row(0, 1, 2), row(1, 3, 6)), [5, 4], steps)
    assert (drawn.steps, drawn.lengths) == (most, [most, most])
    assert len(forwards(one)) == len(steps.told) == most  # no token is read that nobody wants to go on from
    assert [list(chances) for chances in zip(*steps.told, strict=True)] == drawn.confidences


# -- from what -----------------------------------------------------------------------------------


def test_greedy_rows_come_without_logits_and_with_the_mass_of_the_best_token() -> None:
    drawn = propose(drafter(), rows_of(row(0, 1, 2)), [2])
    [[first, second]] = drawn.token_ids.tolist()
    assert (drawn.logits, drawn.lse) == (None, None)
    for chance, context in zip(drawn.confidences[0], ([1, 2], [1, 2, first]), strict=True):
        probs = TinyLM(TABLE).logits_after(context).softmax(-1)
        assert chance == pytest.approx(float(probs.max()), rel=1e-5)
    assert second == greedy([1, 2, first], 1)[0]


def test_sampled_rows_come_with_the_logits_and_the_lse_they_were_drawn_from() -> None:
    rows = rows_of(row(0, 1, 2, temperature=0.7, seed=4, top_k=3), row(1, 3, temperature=1.5, seed=5))
    drawn = propose(drafter(), rows, [3, 2])
    assert drawn.logits is not None
    assert drawn.lse is not None
    assert drawn.logits.shape == (2, 3, VOCAB)
    for b, one in enumerate(rows.sequences):
        text = list(one.token_ids)
        for k in range(drawn.lengths[b]):
            pair = torch.stack([TinyLM(TABLE).logits_after(text)] * 2)
            exact = filter_logits(pair, rows.sampling)[b]
            torch.testing.assert_close(drawn.logits[b, k], exact)
            lse = (exact / one.params.temperature).logsumexp(-1)
            torch.testing.assert_close(drawn.lse[b, k], lse.float())
            best = float((exact.max() / one.params.temperature - lse).exp())
            assert drawn.confidences[b][k] == pytest.approx(best, rel=1e-4)
            text.append(int(drawn.token_ids[b, k]))
            assert exact[text[-1]] > -torch.inf


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    def seeded(slot: int, seed: int) -> Sequence:
        return row(slot, 1, 2, temperature=1.0, seed=seed)

    texts = []
    for seed in range(12):
        alone = propose(drafter(), rows_of(seeded(0, seed)), [4]).token_ids[0].tolist()
        beside = propose(drafter(), rows_of(row(0, 7, 8, 9), seeded(1, seed)), [2, 4]).token_ids[1].tolist()
        assert alone == beside
        texts.append(tuple(alone))
    assert len(set(texts)) > 1  # another seed gives others


def test_the_buffer_of_logits_grows_with_the_batch_and_the_limits() -> None:
    one = drafter()
    for count, limit in ((1, 2), (3, 1), (2, 4), (1, 1)):
        rows = rows_of(*(row(b, b + 1, temperature=1.0, seed=b) for b in range(count)))
        drawn = propose(one, rows, [limit] * count)
        assert drawn.logits is not None
        assert drawn.logits.shape == (count, limit, VOCAB)
        torch.testing.assert_close(drawn.logits[-1, 0], TinyLM(TABLE).logits_after([count]))


def test_coupled_rows_come_without_what_nobody_asks_for() -> None:
    """Verification compares their tokens alone: no logits are kept, and no memory is taken for them."""
    one = drafter()
    rows = rows_of(row(0, 1, 2, temperature=1.0, seed=4, top_k=3))
    coupled = replace(rows, sampling=replace(rows.sampling, coupled=True))
    drawn = propose(one, coupled, [3])
    assert (drawn.logits, drawn.lse, drawn.cuts) == (None, None, None)
    assert one._buffer.of(1, 3).numel() == 0
    assert drawn.lengths == [3]
    assert propose(one, rows, [3]).logits is not None  # the control


def test_the_buffer_of_logits_moves_with_the_device() -> None:
    buffer = LogitBuffer()
    for device in ("cpu", "meta", "cpu"):
        buffer.put(torch.ones(2, 5, device=device), 0, 3)
        assert buffer.of(2, 1).device.type == device
    assert torch.equal(buffer.of(2, 1)[:, 0], torch.ones(2, 5))


@pytest.mark.parametrize("of_draft", [8, 16])
def test_the_target_may_have_another_vocabulary(of_draft: int) -> None:
    table = random_table(of_draft, 2)
    last = VOCAB - 1
    rows = rows_of(row(0, 1, last, temperature=1.0, seed=1))
    drawn = propose(drafter(table), rows, [1])
    assert drawn.logits is not None
    read = last if of_draft > last else 0  # a token that the draft has not is read as token 0
    own = TinyLM(table).logits_after([1, read])
    wanted = torch.full((VOCAB,), -torch.inf, dtype=own.dtype)
    wanted[: min(VOCAB, of_draft)] = own[:VOCAB]
    torch.testing.assert_close(drawn.logits[0, 0], wanted)


# -- with whom -----------------------------------------------------------------------------------


def test_experts_and_their_versions_stand_by_row() -> None:
    bank = Experts()
    drafting = row(0, 1, 2, expert="sql"), row(1, 3, 4, expert="code")
    plain = row(2, 6, 7, expert="sql", draft=False)
    drawn = propose(drafter(bank=bank), rows_of(*drafting, plain), [2, 2, 0])
    assert drawn.experts == ["sql", "code", SHARED]
    assert drawn.versions == [3, 5, 0]
    assert bank.selected == [["sql", "code", SHARED]]  # once for all steps


def test_the_bank_may_have_others_draft_but_never_for_a_reproducible_row() -> None:
    free = row(0, 1, 2, expert="sql")
    seeded = row(1, 3, expert="code", temperature=1.0, seed=1)
    one = drafter(bank=Experts(only=SHARED))
    assert propose(one, rows_of(free), [1]).experts == [SHARED]
    assert propose(one, rows_of(free, seeded), [1, 1]).experts == ["sql", "code"]


# -- its cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_the_cache_holds_what_was_accepted_and_no_more(accepted: int) -> None:
    """Four are drafted: the next draft reads one token again, or two where all four were accepted."""
    one, own = drafter(), row(0, 1, 2, 3)
    rows = rows_of(own)
    drawn = propose(one, rows, [4])
    assert (own.draft_cached, forwards(one)) == (3, [(1, 3), *[(1, 1)] * 3])
    one.observe(evidence_of(rows, drawn, [accepted]))
    assert own.draft_cached == 3 + min(accepted, 3)
    own.token_ids += [*drawn.token_ids[0, :accepted].tolist(), 11]
    again = propose(one, rows, [2])
    assert forwards(one) == [(1, 2 if accepted == 4 else 1), (1, 1)]
    assert again.token_ids.tolist() == [greedy(own.token_ids, 2)]


def test_rows_that_draft_nothing_keep_up_where_that_costs_nothing() -> None:
    """And those that are further behind are read as soon as they draft, with all that they lack."""
    one, near, far, own = drafter(), row(1, 4, 5), row(2, 6, 7, 8, 9), row(0, 1, 2)
    near.draft_cached, own.draft_cached = 1, 1
    rows = rows_of(own, near, far)
    propose(one, rows, [1, 0, 0])
    assert [each.draft_cached for each in (own, near, far)] == [2, 2, 0]
    drawn = propose(one, rows, [0, 0, 2])
    assert drawn.token_ids[2].tolist() == greedy([6, 7, 8, 9], 2)


def test_a_draft_that_was_stopped_early_leaves_as_much_as_it_read() -> None:
    one, own = drafter(), row(0, 1, 2, 3)
    rows = rows_of(own)
    drawn = propose(one, rows, [4], Steps(1))
    one.observe(evidence_of(rows, drawn, [1]))
    assert own.draft_cached == 3  # the only token was drawn and never read


@pytest.mark.parametrize("chunk", [5, 512])
def test_a_long_text_is_caught_up_with_in_chunks(chunk: int) -> None:
    one, new = drafter(chunk=chunk), row(0, *(i % VOCAB for i in range(4 * LAG)))
    rows = rows_of(new, row(1, *range(2 * LAG - VOCAB, LAG)), row(2, *(3,) * 4 * LAG))
    one.catch_up(rows, [2, 2, 0])
    count = 4 * LAG - 1
    widths = [min(chunk, count - start) for start in range(0, count, chunk)]
    assert forwards(one) == [(1, width) for width in widths]
    assert [each.draft_cached for each in rows.sequences] == [count, 0, 0]  # one is short, one drafts nothing
    drawn = one.propose(rows, [2, 2, 0], Steps(2))
    assert drawn.token_ids[:2].tolist() == [greedy(each.token_ids, 2) for each in rows.sequences[:2]]


@pytest.mark.parametrize("shares_cache", [True, False])
def test_whose_adapter_reads_a_text(shares_cache: bool) -> None:
    """Any where keys and values are the same for all; else its own, and again when that changes."""
    bank = Experts(shares_cache=shares_cache)
    one, own = drafter(bank=bank), row(0, *(i % VOCAB for i in range(4 * LAG)), expert="sql")
    one.catch_up(rows_of(own), [1])
    assert bank.selected == [[SHARED if shares_cache else "sql"]]
    one.experts_changed([own])
    assert own.draft_cached == (4 * LAG - 1 if shares_cache else 0)


def test_slots_are_exchanged_with_what_they_hold() -> None:
    one, first, second = drafter(), row(0, 1, 2, 3), row(1, 4, 5, 6)
    propose(one, rows_of(first, second), [1, 1])
    one.swap(0, 1, 4)
    first.slot, second.slot = 1, 0
    first.token_ids.append(9)
    second.token_ids.append(10)
    drawn = one.propose(rows_of(second, first), [2, 2], Steps(2))
    assert drawn.token_ids.tolist() == [greedy([4, 5, 6, 10], 2), greedy([1, 2, 3, 9], 2)]


# -- rows whose draft is no number ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_is_decoded_plainly_from_then_on(temperature: float) -> None:
    table = TABLE.clone()
    table[9] = torch.nan
    one = drafter(table)
    broken = row(1, 3, 9, temperature=temperature, seed=1)
    sound = row(0, 1, 2, temperature=temperature, seed=2)
    rows = rows_of(sound, broken)
    drawn = propose(one, rows, [1, 1])
    assert math.isnan(drawn.confidences[1][0])
    assert not math.isnan(drawn.confidences[0][0])
    assert 0 <= int(drawn.token_ids[1, 0]) < VOCAB
    kept = one.cache.layers[0].keys[0].clone()
    assert one.cache.layers[0].keys[1].any()
    one.observe(evidence_of(rows, drawn, [0, 0]))
    assert (sound.draft, broken.draft) == (True, False)
    assert broken.draft_cached == 0
    assert not one.cache.layers[0].keys[1].any()  # nothing there can spoil the next row in that slot
    assert torch.equal(one.cache.layers[0].keys[0], kept)


def test_what_others_drafted_is_none_of_its_business() -> None:
    """Rows that looked something up, or that drafted nothing, keep their place in the cache."""
    one, rows = drafter(), rows_of(row(0, 1, 2), row(1, 3, 4))
    drawn = propose(one, rows, [3, 0])
    theirs = Proposal(**{**vars(drawn), "sources": ["lookup", NOBODY]})
    before = [each.draft_cached for each in rows.sequences]
    one.observe(evidence_of(rows, theirs, [3, 0]))
    assert [each.draft_cached for each in rows.sequences] == before
