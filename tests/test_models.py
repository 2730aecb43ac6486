"""Which models are taken and which are refused, by name and with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.models import (
    LanguageModel,
    check_pair,
    load_model,
    pick_device,
    pick_dtype,
    refuse_layouts,
    resolve,
    self_check,
)

from random_models import random_model

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (transformers.MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2), "sliding"),
        (transformers.Gemma2Config(**SMALL, intermediate_size=64, head_dim=8), "sliding_attention"),
        (transformers.T5Config(vocab_size=60, d_model=32, num_layers=2, num_heads=4), "encoder-decoder"),
        (transformers.MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2), "mamba"),
    ],
)
def test_unsupported_layouts_are_refused_by_name(config: transformers.PreTrainedConfig, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        refuse_layouts(config, "some-model")


def test_mistral_without_a_window_is_fine() -> None:
    refuse_layouts(transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None), "m")


def test_a_model_that_would_be_run_wrongly_is_refused() -> None:
    """BLOOM builds its position bias from a two-dimensional mask: the self-check notices."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    model = LanguageModel(transformers.BloomForCausalLM(config).eval(), None, "bloom")
    with pytest.raises(UnsupportedModel, match="bloom"):
        self_check(model)


def test_the_self_check_sees_wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", 0)
    self_check(model)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: forward(*a, **k).roll(1, dims=1))
    with pytest.raises(UnsupportedModel, match="off by"):
        self_check(model)


def save(folder: Path, words: list[str]) -> Path:
    """A tiny Llama with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": len(words)}, intermediate_size=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_local_folder_loads_in_float32_on_a_cpu(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path, ["<unk>", "a", "b"])), "target", device="cpu")
    assert model.dtype == torch.float32
    assert model.vocab_size == 3
    assert load_model(str(tmp_path), "target", "cpu", "bfloat16").dtype == torch.bfloat16
    assert model.weights_hash() == load_model(str(tmp_path), "draft", "cpu", "bfloat16").weights_hash()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["<unk>", "a", "b", "c"], "3 tokens against 4"),
        (["<unk>", "b", "a"], "token 1 is 'a' in the target"),
    ],
)
def test_different_tokenizers_are_explained(tmp_path: Path, words: list[str], reason: str) -> None:
    one = load_model(str(save(tmp_path / "one", ["<unk>", "a", "b"])), "target")
    other = load_model(str(save(tmp_path / "two", words)), "draft")
    check_pair(one, one)
    with pytest.raises(UnsupportedModel, match=reason):
        check_pair(one, other)


def test_missing_and_broken_models_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load_model(str(tmp_path / "nowhere"), "target")
    folder = save(tmp_path / "broken", ["<unk>", "a"])
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load_model(str(folder), "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load_model(str(folder), "target")


def test_devices_and_dtypes() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(InvalidRequest, match="nonsense"):
        pick_device("nonsense")
    assert pick_dtype("auto", torch.device("cuda")) == "auto"
    assert pick_dtype("float16", torch.device("cpu")) == torch.float16
    assert resolve("some/hub-id", "target") == "some/hub-id"


def test_eos_comes_from_wherever_it_is_said() -> None:
    model = random_model("llama", 0)
    model.tokenizer = None
    assert model.eos_token_ids == frozenset()
    model.hf.generation_config.eos_token_id = [3, 5]
    assert model.eos_token_ids == frozenset({3, 5})
    model.hf.generation_config.eos_token_id = 4
    assert model.eos_token_ids == frozenset({4})
