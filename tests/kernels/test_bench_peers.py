"""Other packages are called as their versions want it; the packages themselves are stubs here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
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


def test_the_losses_of_speculators_are_called_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits [1, T, V] of student and teacher, for each position's loss [1, T]."""
    peers = load_script("kernel_peers")

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        s, t = logits.log_softmax(-1), targets.log_softmax(-1)
        assert logits.shape == targets.shape == (1, 3, 9)
        return (t.exp() * (t - s)).sum(-1)

    fake = ModuleType("speculators.losses.fused")
    fake.fused_kl_div_loss = loss  # type: ignore[attr-defined]
    for module in (ModuleType("speculators"), ModuleType("speculators.losses"), fake):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    student, teacher = torch.randn(2, 3, 9)
    found = peers.speculators_divergence("fkl")(student, teacher)
    torch.testing.assert_close(found, peers.plain_divergence("fkl")(student, teacher))


def test_of_speculators_the_losses_alone_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its package imports beside them need not be there."""
    losses = tmp_path / "speculators" / "losses"
    losses.mkdir(parents=True)
    (losses.parent / "__init__.py").write_text("import no_such_package\n")
    (losses / "__init__.py").write_text("")
    (losses / "fused.py").write_text("def fused_tv_loss(s, t):\n    return s - t\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("speculators", "speculators.losses", "speculators.losses.fused"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        importlib.import_module("speculators")  # the control
    loss = load_script("kernel_peers").speculators_divergence("tvd")
    assert loss(torch.full((2, 3), 5.0), torch.full((2, 3), 3.0)) == 2


def test_liger_gets_all_the_arguments_that_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    class Linear:
        def __init__(self, jsd_beta: float) -> None:
            assert jsd_beta == 0.5

        def __call__(
            self, s: Tensor, sw: Tensor, t: Tensor, tw: Tensor, shift_labels: Tensor | None
        ) -> Tensor:
            assert shift_labels is None
            return ((s @ sw.T) * (t @ tw.T)).sum()

    fake = ModuleType("liger_kernel.transformers")
    fake.LigerFusedLinearJSD = Linear  # type: ignore[attr-defined]
    for module in (ModuleType("liger_kernel"), fake):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    hidden, weight, teacher = torch.randn(4, 3), torch.randn(7, 3), torch.randn(4, 3)
    found = load_script("kernel_peers").liger_linear_jsd(hidden, weight, teacher)()
    torch.testing.assert_close(found, teacher @ weight.T @ weight)
