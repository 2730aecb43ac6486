"""The short way to the most likely tokens finds the same as the long one."""

from __future__ import annotations

import pytest
import torch

from moedraft.engine.capture import GROUP, top_ids, top_logprobs


@pytest.mark.parametrize("vocab", [5, 97, 8192, 8191, 8 * 16 * GROUP - 1, 8 * 16 * GROUP + 1, 50_257])
def test_the_same_as_torch(vocab: int) -> None:
    logits = torch.randn(7, vocab) * 3
    ids, logprobs = top_logprobs(logits, 16)
    k = min(16, vocab)
    wanted = logits.double().log_softmax(-1).topk(k)
    assert torch.equal(ids, wanted.indices)
    assert torch.allclose(logprobs.double(), wanted.values, atol=1e-5)
    assert logprobs.dtype == torch.float32


def test_wherever_the_largest_stand() -> None:
    """All in one group, all at the end that fills no group, the first and the last."""
    for start in (0, 4096, 8 * 16 * GROUP + 2):
        values = torch.randn(1, 8 * 16 * GROUP + 18)
        values[0, start : start + 16] = torch.arange(100.0, 116.0)
        assert top_ids(values, 16)[0].tolist() == list(range(start + 15, start - 1, -1))


def test_equal_values_and_none() -> None:
    """What is filtered out is −∞; of equal ones any may come, each once."""
    values = torch.zeros(3, 8192)
    values[1] = -torch.inf
    values[1, [7, 8000]] = 0.0
    found = top_ids(values, 16)
    assert all(len(set(row.tolist())) == 16 for row in found)
    assert set(found[1, :2].tolist()) == {7, 8000}


def test_half_precision() -> None:
    ids, logprobs = top_logprobs(torch.randn(2, 97).bfloat16(), 4)
    assert (ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
