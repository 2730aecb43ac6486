"""Greedy drafts: the same from every way to draw them, and without a kernel where the vocabulary varies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedraft.drafting import drawing
from moedraft.drafting.drawing import draw, most_likely, most_likely_there
from moedraft.kernels import sample_coupled, sample_draft


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
