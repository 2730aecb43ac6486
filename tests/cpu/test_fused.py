"""What is compiled computes what PyTorch's own operations do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft

from random_models import VOCAB, random_model

feature = pytest.importorskip("moedraft.cpu.feature_layer", exc_type=ImportError)
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
    features = torch.randn(3, 600, draft.config.features_size).to(dtype)
    ids = torch.randint(VOCAB, (3, 600))
    found = []
    for fast in (feature.fused_for(draft), None):
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
    draft = draft_of({"kind": "qwen3"} if kind == "qwen3" else {}, torch.float32)
    if kind != "qwen3":
        draft.embeddings = draft.embeddings.bfloat16()
    assert feature.fused_for(draft) is None


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_is_the_same_for_each_row_whatever_the_others_are(dtype: torch.dtype) -> None:
    from moedraft.cpu.steady.fused import FusedGate
    from moedraft.cpu.steady.plain import plain_gate

    joined = (torch.randn(130, 2 * 1003) * torch.logspace(-2, 2.5, 130)[:, None]).to(dtype)
    joined[7, 3], joined[8, 5] = torch.nan, torch.inf
    mixed = FusedGate(dtype)(joined)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close(mixed, plain_gate(joined), equal_nan=True, **tolerance)
    for row in range(130):
        assert torch.equal(FusedGate(dtype)(joined[row : row + 1])[0].nan_to_num(9), mixed[row].nan_to_num(9))


@pytest.mark.parametrize("wrong", [-3, VOCAB, 2**40])
def test_a_token_that_does_not_exist_reads_no_foreign_memory(wrong: int) -> None:
    draft = draft_of({}, torch.float32)
    draft.faster = feature.fused_for(draft)
    states = torch.randn(1, 1, draft.config.hidden_size)
    found = [draft.advance(draft.new_cache(1), 0, states, torch.tensor([[t]]), [0]) for t in (wrong, 0)]
    assert torch.equal(*found)


def test_a_slot_that_does_not_exist_is_refused() -> None:
    draft = draft_of({}, torch.float32)
    states, ids = torch.randn(2, 1, draft.config.hidden_size), torch.zeros(2, 1, dtype=torch.int64)
    for first in (-1, 2):
        with pytest.raises(IndexError, match="3 slots"):
            draft.advance(draft.new_cache(3), first, states, ids, [0, 0])
