"""The lean forward gives the model's own logits, shares its weights, and is dropped where it would not."""

from __future__ import annotations

import pytest
import torch
import transformers

from moedraft.cpu.lean import FEW_QUERIES, LeanForward, fits
from moedraft.loading.checks import self_check
from moedraft.models import LanguageModel

from random_models import random_model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("fuse", [False, True])
def test_same_logits_ragged_and_chunked(kind: str, fuse: bool) -> None:
    model = random_model(kind, 3)
    model.lean = None
    ids = torch.randint(97, (3, 11))
    whole = model.hf(ids).logits
    model.lean = LeanForward(model.hf, fuse=fuse)
    self_check(model)
    cache = model.new_cache(4)
    first = model.forward(cache, 1, ids[:, :6], [0, 0, 0])
    torch.testing.assert_close(first, whole[:, :6], atol=1e-4, rtol=1e-4)
    ragged = torch.stack([ids[0, 4:7], ids[1, 6:9], ids[2, 5:8]])
    rest = model.forward(cache, 1, ragged, [4, 6, 5])
    for row, start in enumerate((4, 6, 5)):
        torch.testing.assert_close(rest[row], whole[row, start : start + 3], atol=1e-4, rtol=1e-4)
    alone = model.forward(model.new_cache(1), 0, ids[:1, :1], [0], keep=1)
    torch.testing.assert_close(alone[:, 0], whole[:1, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.hf(ids).logits, whole, atol=1e-5, rtol=1e-5)  # its layers still work


def test_short_pieces_agree_with_the_fused_kernel() -> None:
    """Attention over few queries is written out: both ways must see the same past and no future."""
    model = random_model("llama", 3)
    model.lean = LeanForward(model.hf, fuse=True)
    ids = torch.randint(97, (2, FEW_QUERIES + 8))
    whole = model.hf(ids).logits
    torch.testing.assert_close(model.forward(model.new_cache(2), 0, ids, [0, 0]), whole, atol=1e-4, rtol=1e-4)
    cache = model.new_cache(2)
    for start in range(0, ids.shape[1], 4):
        piece = model.forward(cache, 0, ids[:, start : start + 4], [start, start])
        torch.testing.assert_close(piece, whole[:, start : start + 4], atol=1e-4, rtol=1e-4)


def test_only_what_is_written_down() -> None:
    assert fits(random_model("llama", 0).hf)
    assert not fits(random_model("gpt_neox", 0).hf)
    assert not fits(random_model("qwen3", 0).hf)
    assert not fits(random_model("llama", 0).hf.half())


def test_a_relative_that_differs_is_noticed() -> None:
    """The self-check is what keeps a wrong lean forward out: here, one that forgets the biases."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LanguageModel(transformers.LlamaForCausalLM(config).eval().requires_grad_(False), None, "x")
    model.lean = LeanForward(model.hf, fuse=False)
    self_check(model)
    model.lean.layers[1].head_dim = 4
    with pytest.raises(Exception, match="llama"):
        self_check(model)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_padding_is_left_out_and_nothing_else_changes(kind: str) -> None:
    """Rows of very different lengths: the real tokens' logits, and the keys and values they leave."""
    model = random_model(kind, 3)
    model.lean = LeanForward(model.hf, fuse=True)
    assert model.ragged
    ids = torch.randint(model.vocab_size, (4, 9), generator=torch.Generator().manual_seed(1))
    after = ids[:, :3]
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for lengths in (None, [9, 1, 2, 1]):
        cache = model.new_cache(5)
        model.forward(cache, 1, ids, [0] * 4)
        starts = [4, 6, 2, 9]
        first = model.forward(cache, 1, ids, starts, lengths=lengths)
        ends = [start + length for start, length in zip(starts, [9, 1, 2, 1], strict=True)]
        found.append((first, model.forward(cache, 1, after, ends)))
    (whole, then), (packed, later) = found
    for row, length in enumerate([9, 1, 2, 1]):
        torch.testing.assert_close(packed[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(later, then, rtol=1e-4, atol=1e-5)
