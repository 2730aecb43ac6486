"""Peers that lie on the path compute what they are compared with: run here in Triton's interpreter.

PYTHONPATH=.peers python -m pytest tests/kernels/test_peers_installed.py
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from scripts_loader import load_script

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
# Of Liger's kernels two take a number that the interpreter gives them in another form than a GPU does.
ON_A_GPU = {("liger", "fkl"), ("liger", "tvd")}
KINDS = [("speculators", kind) for kind in ("fkl", "rkl", "jsd", "tvd")]
KINDS += [("liger", kind) for kind in ("fkl", "jsd", "tvd")]


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(("package", "kind"), KINDS)
def test_losses_and_their_gradients(package: str, kind: str, device: str) -> None:
    need("liger_kernel" if package == "liger" else package)
    if device == "cpu" and (package, kind) in ON_A_GPU:
        pytest.skip("needs a CUDA device")
    peers = load_script("kernel_peers")
    student, teacher = torch.randn(2, 4, 300, device=device)
    student.requires_grad_()
    found = getattr(peers, f"{package}_divergence")(kind)(student, teacher)
    wanted = peers.plain_divergence(kind)(student, teacher)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(loss, student)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_ligers_loss_with_its_output_layer(device: str) -> None:
    need("liger_kernel")
    peers = load_script("kernel_peers")
    hidden, teacher = torch.randn(2, 6, 16, device=device)
    weight = torch.randn(40, 16, device=device)
    leaf = hidden.clone().requires_grad_()
    wanted = peers.plain_divergence("jsd")(leaf @ weight.T, teacher @ weight.T)
    found = peers.liger_linear_jsd(hidden, weight, teacher)()
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaf)[0], rtol=1e-4, atol=1e-6)


def test_sglangs_chain_accepts_what_it_should(device: str) -> None:
    """A token as long as its random number is less than the ratio of its probabilities."""
    need("sglang")
    rows, vocab = 12, 9
    target, draft = torch.randn(3, vocab, device=device), torch.randn(2, vocab, device=device)
    tokens = torch.stack([torch.multinomial(one.softmax(-1), rows, replacement=True) for one in draft], 1)
    inputs = {
        "target_logits": target.expand(rows, -1, -1), "draft_logits": draft.expand(rows, -1, -1),
        "draft_tokens": tokens,
    }  # fmt: skip
    call = load_script("kernel_peers").sglang_chain(inputs)
    torch.manual_seed(3)
    found = call()
    torch.manual_seed(3)
    numbers = torch.rand(rows, 3, device=device)[:, :2]
    places = torch.arange(2, device=device)
    ratio = (target[:2].softmax(-1) / draft.softmax(-1))[places, tokens]
    wanted = (numbers < ratio).cumprod(1).sum(1)
    assert torch.equal(found.long(), wanted)
    assert wanted.unique().numel() == 3  # the control: all lengths are there
