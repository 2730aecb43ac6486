"""Other packages are called as their versions want it; the packages themselves are stubs here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts_loader import load_script
from torch import Tensor

BATCH, LENGTH, VOCAB = 2, 3, 9


def older(
    tokens: Tensor, counts: Any, most: int, ends: Tensor, draft: Any, target_probs: Tensor, *_: Any
) -> Tensor:
    return target_probs


def newer(
    tokens: Tensor, counts: Any, most: int, ends: Tensor, draft: Any, target_logits: Tensor, *_: Any
) -> Tensor:
    return target_logits


@pytest.mark.parametrize(("verify", "logits"), [(older, False), (newer, True)])
def test_vllm_gets_probabilities_or_logits(
    verify: Callable[..., Tensor], logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.metadata"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sampler = ModuleType("vllm.v1.sample.rejection_sampler")
    sampler.rejection_sample = verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, sampler.__name__, sampler)
    metadata = type("SamplingMetadata", (), {})
    monkeypatch.setattr(sys.modules["vllm.v1.sample.metadata"], "SamplingMetadata", metadata, raising=False)
    target = torch.randn(BATCH, LENGTH + 1, VOCAB).bfloat16()
    inputs = {
        "target_logits": target,
        "draft_logits": torch.randn(BATCH, LENGTH, VOCAB).bfloat16(),
        "draft_tokens": torch.zeros(BATCH, LENGTH, dtype=torch.int64),
        "temperature": torch.ones(BATCH),
    }
    found = load_script("kernel_peers").vllm_verify(inputs)()
    rows = target[:, :-1].reshape(-1, VOCAB).float()
    assert found.dtype == torch.float32
    assert torch.equal(found, rows if logits else rows.softmax(-1))
