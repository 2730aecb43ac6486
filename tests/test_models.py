"""Which models are taken and which are refused, by name and with a reason."""

from __future__ import annotations

import json
import logging
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.cpu.products import halves, packs
from moedraft.cpu.steady import forward as steady
from moedraft.devices import pick_device, pick_dtype
from moedraft.loading.checks import check_pair, has_attention_alone, refuse_layouts, self_check
from moedraft.models import LanguageModel, load_model, resolve

from random_models import random_model

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (transformers.MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2), "sliding"),
        (transformers.Gemma2Config(**SMALL, intermediate_size=64, head_dim=8), "sliding_attention"),
        (transformers.T5Config(vocab_size=60, d_model=32, num_layers=2, num_heads=4), "encoder-decoder"),
        (transformers.LlamaConfig(**SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
        (
            transformers.Phi3Config(
                **SMALL | {"vocab_size": 60},
                pad_token_id=0,
                rope_scaling={
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "factor": 2.0,
                },
            ),
            "longrope",
        ),
        (
            transformers.GPTNeoConfig(
                vocab_size=60,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
            ),
            "local",
        ),
        (
            transformers.GPTNeoConfig(
                vocab_size=60, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
            ),
            "masks of a fixed size",
        ),
        (transformers.FalconConfig(**SMALL, alibi=True), "ALiBi"),
        (transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=60), "how long its context"),
        (transformers.MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2), "mamba"),
    ],
)
def test_unsupported_layouts_are_refused_by_name(config: transformers.PreTrainedConfig, word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        refuse_layouts(config, "some-model")


def test_mistral_without_a_window_is_fine() -> None:
    refuse_layouts(transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None), "m")


def test_a_model_with_other_logits_is_refused() -> None:
    """BLOOM builds its position bias from a two-dimensional mask: the self-check notices."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4)
    model = LanguageModel(transformers.BloomForCausalLM(config).eval(), None, "bloom")
    with pytest.raises(UnsupportedModel, match="bloom"):
        self_check(model)


def test_attention_that_takes_positions_from_the_cache_is_refused() -> None:
    """Llama 4 scales queries by where they stand, from positions as large as nothing that a check reads."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **SMALL, intermediate_size=64, intermediate_size_mlp=64, num_key_value_heads=2, head_dim=8,
        num_local_experts=2, layer_types=["full_attention"] * 2, no_rope_layers=[0, 0], floor_scale=16,
    )  # fmt: skip
    refuse_layouts(config, "llama4")
    model = LanguageModel(transformers.Llama4ForCausalLM(config).eval(), None, "llama4")
    with pytest.raises(UnsupportedModel, match="takes positions from the length of the cache"):
        self_check(model)


def test_a_kind_that_may_keep_a_state_is_fine_where_all_its_layers_are_attention(tmp_path: Path) -> None:
    save(tmp_path, ["<unk>", "a", "b"])
    config = transformers.GraniteMoeHybridConfig(
        **SMALL | {"vocab_size": 3}, intermediate_size=64, shared_intermediate_size=64,
        num_key_value_heads=2, num_local_experts=0, layer_types=["attention"] * 2,
        mamba_n_heads=8, mamba_d_head=8,
    )  # fmt: skip
    transformers.GraniteMoeHybridForCausalLM(config).save_pretrained(tmp_path)
    hf = load_model(str(tmp_path), "target", device="cpu").hf
    assert type(hf)._is_stateful
    ids = torch.tensor([[1, 2, 1, 2, 1]])
    plain = hf.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, hf.generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2))
    mixed = transformers.GraniteMoeHybridConfig.from_dict(
        config.to_dict() | {"layer_types": ["attention", "mamba"]}
    )
    assert not has_attention_alone(mixed)
    with pytest.raises(UnsupportedModel, match="only full attention"):
        refuse_layouts(mixed, "granite")


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


@pytest.mark.skipif(not halves(torch.ones(1)), reason="FBGEMM is not there")
@pytest.mark.parametrize("alike", [True, False])
def test_weights_are_halved_only_where_answers_do_not_depend_on_the_batch(
    alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By `auto`, for a large target, on a CPU that does not multiply bfloat16."""
    for module in ("products", "steady.forward"):
        monkeypatch.setattr(f"moedraft.cpu.{module}.multiplies_bfloat16", lambda: False)
    where = str(save(tmp_path, ["<unk>", "a", "b"]))
    own = load_model(where, "target", "cpu").hf.model.layers[0].mlp.up_proj.weight
    monkeypatch.setattr("moedraft.cpu.steady.forward.SMALL", 100)
    monkeypatch.setattr("moedraft.cpu.steady.independence.sums_alike", lambda *of: alike)
    monkeypatch.setattr("moedraft.cpu.steady.independence.independent", lambda model: True)
    found = load_model(where, "target", "cpu")
    assert found.precision == ("float32 with weights in half precision" if alike else "float32")
    assert torch.equal(found.hf.model.layers[0].mlp.up_proj.weight, own.half().float() if alike else own)
    assert ("would depend on the batch here" in caplog.text) != alike
    assert found.weights_hash() == load_model(where, "target", "cpu", "float32").weights_hash()
    assert load_model(where, "target", "cpu", "float32").precision == "float32"
    assert load_model(where, "draft", "cpu").precision == "float32"


@pytest.mark.skipif(
    not packs(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU does not multiply bfloat16 itself"
)
@pytest.mark.parametrize("found", [True, False])
def test_bfloat16_that_was_asked_for_is_independent_or_says_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: bool
) -> None:
    wanted = steady.ARRANGEMENTS[torch.bfloat16][-1]
    monkeypatch.setattr("moedraft.cpu.steady.forward.SMALL", 100)
    monkeypatch.setattr(
        "moedraft.cpu.steady.independence.sums_alike", lambda config, dtype, one: found and one == wanted
    )
    monkeypatch.setattr("moedraft.cpu.steady.independence.independent", lambda model: True)
    model = load_model(str(save(tmp_path, ["<unk>", "a", "b"])), "target", "cpu", "bfloat16")
    assert (model.lean.arranged == wanted) == found
    assert ("its answers depend on the batch" in caplog.text) != found


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


def test_broken_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"num_attention_heads": 5}, InvalidRequest, "cannot be loaded"),
        ({"num_attention_heads": 0}, InvalidRequest, "cannot be loaded"),
        ({"hidden_size": "wide"}, InvalidRequest, "cannot be loaded"),
        ({"intermediate_size": 96}, UnsupportedModel, "wrong shapes for 6"),
        ({"num_hidden_layers": 3}, UnsupportedModel, "misses 9 of .*layers.2"),
        ({"auto_map": {"AutoConfig": "x.X"}, "model_type": "own"}, InvalidRequest, "cannot be loaded"),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, change: dict[str, object], error: type[Exception], word: str
) -> None:
    path = save(tmp_path, ["<unk>", "a"]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=word) as caught:
        load_model(str(tmp_path), "target", "cpu")
    assert "\n" not in str(caught.value)


def test_missing_weights_are_refused_unless_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = save(tmp_path, ["<unk>", "a"]) / "model.safetensors"
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if k != "lm_head.weight"}, file, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"misses 1 of the model.s weights, lm_head\.weight"):
        load_model(str(tmp_path), "target", "cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    load_model(str(tmp_path), "target", "cpu")


def test_one_checkpoint_is_one_base_in_every_precision(tmp_path: Path) -> None:
    folder = save(tmp_path / "one", ["<unk>", "a", "b"])
    hashes = {
        load_model(str(folder), "draft", "cpu", dtype).weights_hash()
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert len(hashes) == 1
    model = load_model(str(folder), "draft", "cpu").hf
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 1
    model.save_pretrained(tmp_path / "two")
    save_tokenizer_of(folder, tmp_path / "two")
    assert load_model(str(tmp_path / "two"), "draft", "cpu").weights_hash() not in hashes


def save_tokenizer_of(one: Path, other: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(one).save_pretrained(other)


def test_ignored_generate_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, ["<unk>", "a"])
    with caplog.at_level(logging.WARNING, "moedraft"):
        load_model(str(tmp_path), "target", "cpu")
        assert caplog.messages == []
        settings = {"repetition_penalty": 1.3, "suppress_tokens": [1], "eos_token_id": 1, "num_beams": 1}
        settings |= {"forced_eos_token_id": 0, "min_new_tokens": 1, "no_repeat_ngram_size": 0}
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        load_model(str(tmp_path), "draft", "cpu")
        assert caplog.messages == []
        model = load_model(str(tmp_path), "target", "cpu")
    assert model.eos_token_ids == frozenset({1})
    (message,) = caplog.messages
    assert "repetition_penalty, min_new_tokens, suppress_tokens, forced_eos_token_id of" in message


def test_devices_and_dtypes_are_chosen() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(InvalidRequest, match="nonsense"):
        pick_device("nonsense")
    assert pick_dtype("auto", torch.device("cuda")) == "auto"
    assert pick_dtype("float16", torch.device("cpu")) == torch.float16
    assert resolve("some/hub-id", "target") == "some/hub-id"


def test_eos_is_what_transformers_generate_ends_at() -> None:
    model = random_model("llama", 0)
    model.tokenizer = SimpleNamespace(eos_token_id=7)
    assert model.eos_token_ids == frozenset()
    model.hf.generation_config.eos_token_id = [3, 5]
    assert model.eos_token_ids == frozenset({3, 5})
    model.hf.generation_config.eos_token_id = 4
    assert model.eos_token_ids == frozenset({4})


@pytest.mark.parametrize("role", ["target", "draft"])
def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, role: str) -> None:
    """A folder whose configuration asks for its own Python is refused, and the Python stays unread."""
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        load_model(str(folder), role)
    assert not ran.exists()
    runpy.run_path(str(folder / "own.py"))
    assert ran.exists()  # the trap works
