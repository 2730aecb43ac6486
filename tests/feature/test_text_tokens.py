"""The tokens of a row's text, guessed beside its list."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedraft.feature.model import FeatureDraft
from moedraft.feature.text_tokens import BesideList, GrowingText, TextTokens

from random_features import SOME, draft_for
from random_models import VOCAB, random_model

DRAFT = draft_for(random_model("llama", 0))
LISTED = SOME.tolist()
OTHERS = [token for token in range(VOCAB) if token not in LISTED]
SIZE = DRAFT.config.hidden_size


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, SIZE, generator=torch.Generator().manual_seed(0))


def every(normed: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens."""
    return normed @ DRAFT.rows(torch.arange(VOCAB)).T


def spread(names: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[..., v] of `names` → [..., VOCAB], −inf elsewhere; every token once, but for what is −inf."""
    found = torch.full((*logits.shape[:-1], VOCAB), -torch.inf)
    for row, own in zip(logits, names, strict=True):
        for each in row.reshape(-1, row.shape[-1]):
            finite = own[each.isfinite()].tolist()
            assert len(finite) == len(set(finite))
    return found.scatter_reduce(-1, names[:, None].expand_as(logits), logits, "amax")


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_guesses_from_its_list_and_its_text(exact: bool) -> None:
    texts = [[LISTED[3], OTHERS[0], OTHERS[5]], [], [OTHERS[1], LISTED[0], OTHERS[7], OTHERS[2]]]
    normed = states(3, 2)
    beside = BesideList(DRAFT, texts, exact=exact)
    for step in (slice(0, 1), slice(1, 2)):
        names, logits = beside.add(SOME, DRAFT.guess(normed[:, step]), normed[:, step])
        found = spread(names, logits)
        for b, text in enumerate(texts):
            known = sorted({*LISTED, *text})
            torch.testing.assert_close(found[b, 0, known], every(normed[b, step])[0, known])
            assert (found[b, 0, sorted({*range(VOCAB)} - {*known})] == -torch.inf).all()


def test_a_row_whose_list_lacks_a_token_of_the_batchs_list_guesses_it_from_its_text() -> None:
    """In a batch of several experts what a row's own list lacks is −inf, also where others have it."""
    normed, lacking = states(2, 1), 4
    logits = DRAFT.guess(normed)
    logits[1, :, lacking] = -torch.inf
    text = [LISTED[lacking], LISTED[lacking + 1]]
    names, found = BesideList(DRAFT, [text, text]).add(SOME.expand(2, -1), logits, normed)
    torch.testing.assert_close(spread(names, found)[:, 0, LISTED], every(normed)[:, 0, LISTED])


def test_lists_that_end_at_different_places_are_filled_up_with_the_last_token() -> None:
    short = torch.cat([SOME[:5], torch.full((len(SOME) - 5,), VOCAB - 1)])
    normed = states(2, 1)
    logits = DRAFT.guess(normed)
    logits[1, :, 5:] = -torch.inf
    names, found = BesideList(DRAFT, [[VOCAB - 1], [VOCAB - 1, LISTED[2], LISTED[9]]]).add(
        torch.stack([SOME, short]), logits, normed
    )
    known = sorted({*LISTED[:5], VOCAB - 1, LISTED[9]})
    torch.testing.assert_close(spread(names, found)[1, 0, known], every(normed)[1, 0, known])


def test_a_row_by_itself_has_the_same_numbers_as_in_a_batch_where_that_is_asked_for() -> None:
    texts, normed = [[OTHERS[0]], [*OTHERS[:9]], [OTHERS[3], OTHERS[1]]], states(3, 1)
    _, together = BesideList(DRAFT, texts, exact=True).add(SOME, DRAFT.guess(normed), normed)
    for b, text in enumerate(texts):
        own = normed[b : b + 1]
        _, alone = BesideList(DRAFT, [text], exact=True).add(SOME, DRAFT.guess(normed)[b : b + 1], own)
        width = len(LISTED) + len(text)
        assert torch.equal(alone[0, :, :width], together[b, :, :width])


def test_no_row_has_a_text() -> None:
    normed = states(2, 1)
    names, logits = BesideList(DRAFT, [[], []]).add(SOME, DRAFT.guess(normed), normed)
    assert torch.equal(names[0, : len(SOME)], SOME)
    assert torch.equal(logits[..., : len(SOME)], DRAFT.guess(normed))
    assert (logits[..., len(SOME) :] == -torch.inf).all()


def test_in_a_known_text_each_place_guesses_from_what_stands_before_it() -> None:
    text = [OTHERS[4], LISTED[1], OTHERS[0], OTHERS[4], LISTED[2], OTHERS[9], OTHERS[8], OTHERS[0]]
    normed, known = states(len(text)), torch.arange(1, len(text) + 1)
    growing = GrowingText(DRAFT, text).beside(SOME)
    found = growing.add(DRAFT.guess(normed), normed, known)
    for place in range(len(text)):
        before = [*dict.fromkeys(text[: place + 1])]
        alone = BesideList(DRAFT, [before]).add(
            SOME, DRAFT.guess(normed)[place][None, None], normed[place][None, None]
        )
        theirs = spread(growing.names[None], found[place][None, None])
        torch.testing.assert_close(theirs, spread(*alone))
    asked = torch.tensor([OTHERS[9], LISTED[7], OTHERS[20], -1])
    columns = growing.columns(asked)
    assert growing.names[columns[:2]].tolist() == asked[:2].tolist()
    assert columns[2:].tolist() == [-1, -1]


def test_of_what_stands_before_the_first_guess_only_the_newest_tokens_count() -> None:
    text = [OTHERS[1], OTHERS[2], OTHERS[3], OTHERS[1], OTHERS[4], OTHERS[5]]
    normed = states(1)
    growing = GrowingText(DRAFT, text, 5, most=2).beside(SOME)
    found = spread(growing.names[None], growing.add(DRAFT.guess(normed), normed, torch.tensor([5]))[None])
    assert found[0, 0, [OTHERS[1], OTHERS[4]]].isfinite().all()
    assert (found[0, 0, [OTHERS[2], OTHERS[3], OTHERS[5]]] == -torch.inf).all()
    later = growing.add(DRAFT.guess(normed), normed, torch.tensor([6]))
    assert spread(growing.names[None], later[None])[0, 0, OTHERS[5]].isfinite()


def test_rows_that_a_checkpoint_has_trained_are_used() -> None:
    target = random_model("llama", 0).hf
    own = torch.randn(len(SOME), SIZE, generator=torch.Generator().manual_seed(1))
    weights = (target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach())
    draft = FeatureDraft(DRAFT.config, SOME, *weights, own_rows=own)
    found = draft.rows(torch.tensor([[LISTED[5], OTHERS[0]], [OTHERS[3], LISTED[1]]]))
    assert torch.equal(found[0, 0], own[5])
    assert torch.equal(found[1, 1], own[1])
    assert torch.equal(found[0, 1], weights[1][OTHERS[0]])


def test_a_text_within_the_list_adds_nothing() -> None:
    growing = GrowingText(DRAFT, LISTED[:4]).beside(SOME)
    normed = states(2)
    found = growing.add(DRAFT.guess(normed), normed, torch.tensor([1, 2]))
    assert torch.equal(found[:, : len(SOME)], DRAFT.guess(normed))
    assert (found[:, len(SOME) :] == -torch.inf).all()
    assert growing.columns(torch.tensor([LISTED[2], OTHERS[0]])).tolist() == [2, -1]


def row(*tokens: int, name: str = "a") -> Any:
    return SimpleNamespace(request_id=name, token_ids=[*tokens])


def test_the_newest_different_tokens_of_a_text_that_grows() -> None:
    texts, one = TextTokens(3), row(1, 2, 1, 3)
    assert sorted(texts.of(one)) == [1, 2, 3]
    one.token_ids += [2, 4]
    assert sorted(texts.of(one)) == [2, 3, 4], "1 came last before the others"
    assert sorted(texts.of(row(9, name="b"))) == [9]
    assert sorted(texts.of(one)) == [2, 3, 4]
    texts.forget(one)
    assert sorted(texts.of(row(5, 6))) == [5, 6], "its id is used again"


@pytest.mark.parametrize("most", [0, 1, 2, 7])
def test_tokens_of_a_text_are_those_that_a_search_from_its_end_finds(most: int) -> None:
    rng, one, texts = random.Random(most), row(), TextTokens(most)
    for _ in range(60):
        one.token_ids += [rng.randrange(10) for _ in range(rng.randrange(4))]
        newest = [*dict.fromkeys(reversed(one.token_ids))][:most]
        assert sorted(texts.of(one)) == sorted(newest)
