"""What is compiled computes what PyTorch's own operations do, and its absence changes nothing but time."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from moedraft.cpu import optional
from moedraft.cpu.products import packs
from moedraft.cpu.steady import forward as steady
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft

from random_models import VOCAB, random_model

feature = pytest.importorskip("moedraft.cpu.feature_layer")
DTYPES = [torch.float32, torch.bfloat16]
SWITCHES = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def draft_of(switches: dict[str, object], dtype: torch.dtype) -> FeatureDraft:
    hf = random_model("llama", 3).hf
    torch.manual_seed(5)
    config = config_for(hf.config, draft_vocab_size=30, feature_layers=(0, 1, 2), **switches)
    embeddings, output = (layer.weight.detach() for layer in (hf.get_input_embeddings(), hf.lm_head))
    draft = FeatureDraft(config, torch.arange(30), embeddings.to(dtype), output.to(dtype))
    for norm in (part for part in draft.modules() if type(part).__name__ == "Norm"):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return draft.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("switches", SWITCHES)
def test_a_drafter_gives_the_same_in_compiled_functions(
    switches: dict[str, object], dtype: torch.dtype
) -> None:
    draft = draft_of(switches, dtype)
    assert feature.fits(draft)
    features = torch.randn(3, 600, draft.config.features_size).to(dtype)
    ids = torch.randint(VOCAB, (3, 600))
    found = []
    for fast in (feature.FusedFeature(draft), None):
        draft.faster, cache = fast, draft.new_cache(5)
        states = draft.fuse(features)
        long = draft.advance(cache, 1, states, ids, [0, 0, 0])
        ragged = draft.advance(cache, 1, features[:, :2], ids[:, :2], [600, 17, 250])
        single, logits = draft.step(cache, 3, long[2:, :1], ids[2:, 5:6], [252])
        together = draft.advance(cache, 2, ragged[1:, :1], ids[1:, 3:4], [19, 253])
        found.append((states, long, ragged, single, logits, together))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, **tolerance)


def test_gradients_go_through_the_plain_forward() -> None:
    draft = draft_of({}, torch.float32)
    draft.faster = feature.FusedFeature(draft)
    with torch.enable_grad():
        features = torch.randn(1, 2, draft.config.features_size, requires_grad=True)
        draft.fuse(features).sum().backward()
    assert features.grad is not None


@pytest.mark.parametrize("kind", ["qwen3", "half and single"])
def test_a_drafter_that_does_not_fit_is_left_to_pytorch(kind: str) -> None:
    if kind == "qwen3":
        assert not feature.fits(draft_of({"kind": "qwen3"}, torch.float32))
        return
    draft = draft_of({}, torch.float32)
    draft.embeddings = draft.embeddings.bfloat16()
    assert not feature.fits(draft)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_the_same_and_rounds_as_pytorch_does(dtype: torch.dtype) -> None:
    from moedraft.cpu.steady.fused import FusedNorm
    from moedraft.cpu.steady.plain import PlainNorm

    norm = random_model("llama", 3).hf.model.norm
    hidden = torch.randn(5, norm.weight.numel()) * torch.logspace(-3, 4, 5)[:, None]
    hidden[3, 1], added = torch.nan, torch.randn(8, norm.weight.numel()).to(dtype)
    fused, plain = FusedNorm(norm, dtype, lambda rows: rows + 3), PlainNorm(norm, dtype)
    for more in (None, added):
        sums, normed = fused(hidden, more)
        right = plain(hidden, more if more is None else more[:5])
        assert torch.equal(sums.nan_to_num(9), right[0].nan_to_num(9))
        assert not normed[5:].any()
        torch.testing.assert_close(normed[:5], right[1], rtol=1e-2, atol=1e-3, equal_nan=True)
        assert normed[3].isnan().all()


@pytest.mark.skipif(not packs(torch.ones(1)), reason="no blocked products here")
def test_without_numba_pytorch_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.4 or less.")

    monkeypatch.setattr(optional, "import_module", missing)
    optional.compiled.cache_clear()
    with caplog.at_level(logging.INFO):
        model = random_model("llama", 3)
        model.lean = steady.SteadyForward(model.hf)
    optional.compiled.cache_clear()
    assert type(model.lean.mixing).__name__ == "PlainMixing"
    assert "Numba needs NumPy 2.4 or less." in caplog.text
    ids = torch.randint(VOCAB, (1, 9))
    logits = model.forward(model.new_cache(1), 0, ids, [0])
    torch.testing.assert_close(logits, model.hf(ids).logits, rtol=1e-4, atol=1e-4)
