"""Drafts: the same from every way to draw them, and without a kernel where the vocabulary varies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedraft.core import SamplingParams
from moedraft.drafting import drawing
from moedraft.drafting.drawing import Drawing, LogitBuffer, draw, most_likely, most_likely_there
from moedraft.kernels import sample_coupled, sample_draft
from moedraft.sampling import SamplingBatch


def logits_of(dtype: torch.dtype) -> torch.Tensor:
    """Random rows; a tie, one without any token, one with NaN, one with infinity, one with a single token."""
    rows = torch.randn(9, 37, generator=torch.Generator().manual_seed(3)).to(dtype) * 4
    rows[1, 5] = rows[1, 20] = 50
    rows[2] = -torch.inf
    rows[3, 7] = torch.nan
    rows[4, 9] = torch.inf
    rows[5] = -torch.inf
    rows[5, 30] = 1.0
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_draw_the_likeliest_token_gives_the_same(dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    where = torch.zeros(len(logits), dtype=torch.int64)
    tokens, lse, top = most_likely(logits)
    for name in (sample_draft, sample_coupled):
        expected = name(logits, 0.0, where, where)
        assert tokens.tolist() == expected[0].tolist()
        torch.testing.assert_close(lse, expected[1], equal_nan=True)
        torch.testing.assert_close(torch.tensor(top), expected[2].float(), equal_nan=True)
    there = most_likely_there(logits)
    assert there[0].tolist() == tokens.tolist()
    torch.testing.assert_close(there[1], lse, equal_nan=True)
    torch.testing.assert_close(torch.tensor(there[2]), torch.tensor(top), equal_nan=True)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_from_a_list_of_tokens_nothing_is_compiled(
    coupled: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts' lists have any length, and a batch's logits that of the longest."""

    def kernel(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel was launched")

    for name in ("sample_draft", "sample_coupled"):
        monkeypatch.setattr(drawing, name, kernel)
    if there:  # as where the logits are not on the CPU
        monkeypatch.setattr(drawing, "most_likely", most_likely_there)
    sampling: Any = SimpleNamespace(greedy=True, coupled=coupled, seed=None)
    logits = logits_of(torch.float32)
    assert (
        draw(logits, None, sampling, [0] * len(logits), is_listed=True)[0].tolist()
        == most_likely(logits)[0].tolist()
    )
    sampling.greedy = False
    sampling.temperature = torch.ones(len(logits))
    with pytest.raises(AssertionError, match="kernel"):
        draw(logits, None, sampling, [0] * len(logits), is_listed=True)


def rows_of(sampling: SamplingBatch) -> Any:
    tokens = [SimpleNamespace(token_ids=[1] * (3 + b)) for b in range(len(sampling.seed))]
    return SimpleNamespace(sampling=sampling, sequences=tokens)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
@pytest.mark.parametrize("same_list", [False, True])
def test_a_token_is_drawn_from_a_list_as_from_the_whole_vocabulary(
    same_list: bool, filters: dict[str, Any]
) -> None:
    """Also where the list is longer than a row's own, and its last tokens, those of the text, in any order.

    So what one seed draws depends neither on the other rows of a batch nor on the order of a list.
    """
    generator = torch.Generator().manual_seed(8)
    temperatures = (1.0, 0.0, 0.7, 1.0, 1.3, 1.0)
    params = [SamplingParams(temperature=one, **(filters if one else {})) for one in temperatures]
    sampling = SamplingBatch.of(params, [*range(40, 46)], torch.device("cpu"))
    names = torch.stack([torch.randperm(90, generator=generator)[:30] for _ in params])
    names[:, :20] = names[:, :20].sort(-1)[0]
    names[:, 5] = names[:, 11]  # a place that is not in use has any name
    logits = torch.randn(6, 30, generator=generator) * 2
    logits[:, 8] = logits[:, 9]  # a tie
    logits[:, 5] = -torch.inf
    if same_list:
        names = names[0]
    whole = torch.full((6, 90), -torch.inf)
    whole.scatter_reduce_(1, names.expand_as(logits), logits, "amax")
    listed, every = (Drawing(rows_of(sampling), [2] * 6, LogitBuffer()) for _ in range(2))
    for _ in range(2):
        listed.draw(logits, names, 90)
        every.draw(whole)
    found, expected = (one.proposal("model", ["e"] * 6, [1] * 6) for one in (listed, every))
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.lse, expected.lse)
    torch.testing.assert_close(torch.tensor(found.confidences), torch.tensor(expected.confidences))
