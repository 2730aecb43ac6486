"""Drafters on disk: the `speculators` format, read back, read by others, and read from others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.drafting.base import feature_folder, is_feature_checkpoint
from moedraft.feature.checkpoint import load_draft, save_draft
from moedraft.feature.model import FeatureDraft
from moedraft.loading.hashes import hash_files

from feature_rig import LAYERS, VOCABULARY, draft_for, target, texts_of, weights_of

SWITCHES: list[dict[str, Any]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True, "kind": "qwen3", "attention_bias": True},
]


def load(folder: Path) -> FeatureDraft:
    return load_draft(folder, *weights_of(target()), num_layers=3)


def written(folder: Path, **options: Any) -> FeatureDraft:
    draft = draft_for(target())
    save_draft(draft, folder, dtype=torch.float32, **options)
    return draft


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("switches", SWITCHES)
def test_what_is_written_is_read_back(switches: dict[str, Any], tmp_path: Path) -> None:
    draft = draft_for(target(), **switches)
    save_draft(draft, tmp_path / "draft", dtype=torch.float32)
    again = load(tmp_path / "draft")
    assert again.config == draft.config
    assert torch.equal(again.vocabulary, VOCABULARY)
    for name, value in draft.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_half_precision_halves_the_file_and_a_folder_is_replaced(tmp_path: Path) -> None:
    written(tmp_path / "draft")
    whole = (tmp_path / "draft" / "model.safetensors").stat().st_size
    draft = draft_for(target(), seed=7)
    save_draft(draft, tmp_path / "draft", dtype=torch.float16)
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 0.6 * whole
    assert torch.equal(load(tmp_path / "draft").fc.weight, draft.fc.weight.half().float())
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_the_format_is_that_of_speculators(tmp_path: Path) -> None:
    """Read without a line of our own reading code."""
    written(tmp_path / "draft", target="some/target", rows=True)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    assert config["draft_vocab_size"] == 46
    assert config["transformer_layer_config"]["num_attention_heads"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    ids = [i + int(offset) for i, offset in enumerate(tensors["d2t"])]
    assert ids == VOCABULARY.tolist()
    assert [i for i, drafted in enumerate(tensors["t2d"]) if drafted] == ids
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert tensors["fc.weight"].shape == (32, 96)
    assert torch.equal(tensors["lm_head.weight"], weights_of(target())[1][VOCABULARY])
    assert not any(name.startswith("embed") for name in tensors)


def test_a_drafter_turns_all_dimensions_whatever_its_target_does(tmp_path: Path) -> None:
    """NeoX turns a quarter of each head's; that must not be said of the drafter."""
    model = target("gpt_neox")
    assert model.hf.config.rope_parameters["partial_rotary_factor"] == 0.25
    draft = draft_for(model)
    save_draft(draft, tmp_path / "draft", dtype=torch.float32)
    layer = json.loads((tmp_path / "draft" / "config.json").read_text())["transformer_layer_config"]
    assert "partial_rotary_factor" not in layer | layer["rope_parameters"]
    assert load_draft(tmp_path / "draft", *weights_of(model), num_layers=3).config == draft.config
    for place in (layer, layer["rope_parameters"]):
        change(tmp_path / "draft", transformer_layer_config=layer)
        assert load_draft(tmp_path / "draft", *weights_of(model), num_layers=3)
        place["partial_rotary_factor"] = 0.5
        change(tmp_path / "draft", transformer_layer_config=layer)
        with pytest.raises(UnsupportedModel, match="a part of each head's dimensions"):
            load_draft(tmp_path / "draft", *weights_of(model), num_layers=3)
        place["partial_rotary_factor"] = 1.0


def test_the_targets_rows_are_recognised_and_own_ones_are_kept(tmp_path: Path) -> None:
    written(tmp_path / "draft", rows=True)
    assert load(tmp_path / "draft").trained is None
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn(46, 32)
    save_file(tensors, file)
    draft = load(tmp_path / "draft")
    assert draft.trained is not None
    assert torch.equal(draft.lm_head.weight, tensors["lm_head.weight"])
    save_draft(draft, tmp_path / "again", dtype=torch.float32)
    assert torch.equal(load(tmp_path / "again").lm_head.weight, tensors["lm_head.weight"])


def test_the_original_layout_is_read(tmp_path: Path) -> None:
    """`midlayer`, all measures at the top of the configuration, layer ids in `eagle_config`."""
    draft = written(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    layer = config["transformer_layer_config"]
    flat = {key: value for key, value in layer.items() if key not in ("model_type", "rope_parameters")}
    flat |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 46, "rope_theta": 10000.0}
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(flat))
    file = tmp_path / "draft" / "model.safetensors"
    old = {name.replace("layers.0.", "midlayer."): value for name, value in load_file(file).items()}
    save_file(old | {"embed_tokens.weight": torch.zeros(97, 32)}, file)
    again = load(tmp_path / "draft")
    assert again.config.feature_layers == LAYERS
    for name, value in draft.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_embeddings_of_its_own_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`embed_requires_grad` of speculators lets a head learn them; the target's own may be rounded."""
    written(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    tensors, theirs = load_file(file), weights_of(target())[0]
    learned, longer = theirs.clone(), torch.cat([theirs, torch.randn(31, 32)])
    learned[40] += 0.1 * theirs.std()
    for embeddings, named in (
        (theirs.half(), False),
        (theirs.bfloat16(), False),
        (longer, False),
        (learned, True),
        (torch.randn(97, 16), True),
    ):
        caplog.clear()
        save_file(tensors | {"embed_tokens.weight": embeddings.contiguous()}, file)
        with caplog.at_level(logging.WARNING):
            load(tmp_path / "draft")
        assert ("the drafter's own embeddings are not used" in caplog.text) == named


@pytest.mark.parametrize(
    "config", [{"speculators_model_type": "eagle3"}, {"architectures": ["LlamaForCausalLM"]}]
)
def test_a_drafter_on_the_hub_without_the_usual_file_gets_one_sentence(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights lie in parts, or are no safetensors. What is no drafter is left to who loads it."""
    (tmp_path / "config.json").write_text(json.dumps(config))

    def cached_file(name: str, file: str) -> str:
        if file == "config.json":
            return str(tmp_path / file)
        raise OSError(f"{name} does not appear to have a file named {file}.")

    monkeypatch.setattr("moedraft.models.cached_file", cached_file)
    if "architectures" in config:
        assert feature_folder("some/head") is None
        return
    with pytest.raises(InvalidRequest, match=r"no model\.safetensors of the drafter some/head; download"):
        feature_folder("some/head")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert feature_folder("some/head") == tmp_path


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "draft")
    folder = tmp_path / "draft"
    change(folder, speculators_model_type="dflash")
    with pytest.raises(UnsupportedModel, match="dflash"):
        load(folder)
    change(folder, speculators_model_type="eagle3", fc_norm=True)
    with pytest.raises(UnsupportedModel, match=r"lacks fc_norm\.0\.weight"):
        load(folder)
    change(folder, fc_norm=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"t2d": ~tensors["t2d"]}, file)
    with pytest.raises(InvalidRequest, match="name different tokens"):
        load(folder)
    save_file({name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}, file)
    with pytest.raises(InvalidRequest, match="lacks d2t"):
        load(folder)
    save_file(tensors | {"fc.bias": torch.zeros(32)}, file)
    with pytest.raises(UnsupportedModel, match=r"unknown tensor fc\.bias"):
        load(folder)
    file.write_bytes(b"no tensors")
    with pytest.raises(InvalidRequest, match="holds no feature drafter"):
        load(folder)
    file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match=r"no \.safetensors"):
        load(folder)
    with pytest.raises(InvalidRequest, match="holds no feature drafter"):
        load(tmp_path / "nowhere")


LAYER = "transformer_layer_config"
DAMAGES: dict[str, tuple[Any, str]] = {
    "a list": ([], "config.json is no object"),
    "nothing": (None, "lacks 'num_attention"),
    "a number": (5, "config.json is no object"),
    "no layer": ({LAYER: None}, "lacks 'num_attention"),
    "layer": ({LAYER: "llama"}, "transformer_layer_config is no object"),
    "rope": ({LAYER: {"rope_parameters": "default"}}, "rope_parameters is no object"),
    "scaling": ({LAYER: {"rope_parameters": {"rope_type": "linear"}}}, "position scaling lacks a number"),
    "theta": ({LAYER: {"rope_theta": "ten"}}, "could not convert string to float"),
    "ids elsewhere": ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": "x"}, "eagle_config is no"),
    "heads": ({LAYER: {"num_attention_heads": 0, "head_dim": None}}, "no whole number above 0"),
    "key heads": ({LAYER: {"num_key_value_heads": 0}}, "no whole number above 0"),
    "size": ({LAYER: {"hidden_size": "32"}}, "no whole number above 0"),
    "activation": ({LAYER: {"hidden_act": "gelu"}}, "the activation gelu is not supported"),
    "epsilon": ({LAYER: {"rms_norm_eps": "1e-5"}}, "rms_norm_eps must be a number above 0"),
    "negative theta": (
        {LAYER: {"rope_parameters": {"rope_theta": -5.0}}},
        "rope_theta must be a number",
    ),
    "states": ({"target_hidden_size": "32"}, "width of the target's states is no whole number"),
    "states of half a number": ({"target_hidden_size": 32.5}, "width of the target's states is no whole"),
    "a switch": ({"norm_output": "false"}, "is either true or false"),
    "layer ids": ({"eagle_aux_hidden_state_layer_ids": [-1, 0, 2]}, "distinct ids from 0 on, not [-1, 0, 2]"),
    "layer names": ({"eagle_aux_hidden_state_layer_ids": "0,2"}, "distinct ids from 0 on"),
}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(old[key], new[key]) for key in new if isinstance(new[key], dict) and key in old}
    return old | new | both


@pytest.mark.parametrize(("damage", "why"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_configuration_gets_one_sentence(damage: Any, why: str, tmp_path: Path) -> None:
    written(tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = merged(json.loads(file.read_text()), damage) if isinstance(damage, dict) else damage
    file.write_text(json.dumps(config))
    if isinstance(damage, dict):
        assert is_feature_checkpoint(tmp_path / "draft")
    with pytest.raises((InvalidRequest, UnsupportedModel)) as refused:
        load(tmp_path / "draft")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", ["[]", "null", "5", '"eagle3"', '{"architectures": 5}', "{"])
def test_what_is_no_configuration_is_no_feature_drafter(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert not is_feature_checkpoint(tmp_path)


@pytest.mark.parametrize("first", [-1, 90])
def test_a_list_of_tokens_that_there_are_not_gets_one_sentence(first: int, tmp_path: Path) -> None:
    written(tmp_path / "draft", rows=True)
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][0 if first < 0 else -1] = first
    save_file({name: value for name, value in tensors.items() if name != "t2d"}, file)
    with pytest.raises(InvalidRequest, match="names tokens that there are not"):
        load(tmp_path / "draft")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("lm_head.weight", torch.zeros(7, 32), r"has output rows \[7, 32\] for \d+ tokens"),
        ("lm_head.weight", torch.zeros(32), r"has output rows \[32\]"),
        ("d2t", torch.tensor(3), "is no list"),
        ("d2t", torch.zeros(0, dtype=torch.int64), "is no list"),
        ("t2d", torch.tensor(True), "is no list"),
        ("d2t", torch.zeros(3, dtype=torch.int64), "name different tokens"),
    ],
)
def test_tensors_of_another_shape_get_one_sentence(
    name: str, value: torch.Tensor, why: str, tmp_path: Path
) -> None:
    written(tmp_path / "draft", rows=True)
    file = tmp_path / "draft" / "model.safetensors"
    save_file(load_file(file) | {name: value}, file)
    with pytest.raises(InvalidRequest, match=why):
        load(tmp_path / "draft")


def test_embeddings_that_are_none_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    save_file(load_file(file) | {"embed_tokens.weight": torch.tensor(1.0)}, file)
    load(tmp_path / "draft")
    assert "the drafter's own embeddings are not used" in caplog.text


def test_a_head_under_another_name_has_a_hash_of_its_own(tmp_path: Path) -> None:
    hashes = []
    for seed in range(2):
        folder = tmp_path / str(seed)
        written(folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        moved = {name: value + seed * value.is_floating_point() for name, value in tensors.items()}
        save_file(moved, folder / "eagle3.safetensors")
        hashes.append(hash_files(folder) or hash_files(folder, "*.safetensors"))
    assert len({"", *hashes}) == 3


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("switches", SWITCHES[:2])
def test_the_real_package_runs_what_is_written(switches: dict[str, Any], tmp_path: Path) -> None:
    """`speculators` itself guesses the same from the same features, at each of three unrolled steps."""
    pytest.importorskip("speculators")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    from moedraft.feature.unroll import unroll

    model = target()
    model.hf.save_pretrained(tmp_path / "target")
    draft = draft_for(model, **switches)
    save_draft(draft, tmp_path / "draft", target=str(tmp_path / "target"), dtype=torch.float32, rows=True)
    config = SpeculatorModelConfig.from_pretrained(tmp_path / "draft")
    config.transformer_layer_config._attn_implementation = "eager"  # the others want a GPU
    theirs = SpeculatorModel.from_pretrained(tmp_path / "draft", config=config).eval()
    # The package reads these from the target itself, but leaves them random under a newer transformers.
    theirs.embed_tokens.weight.data.copy_(draft.embeddings)
    ids, features = torch.tensor(texts_of(1, 9)), torch.randn(1, 9, 96)
    with torch.no_grad():
        ours = [draft.logits(h).argmax(-1) for h in unroll(draft, features, ids, 3)]
        # There row i holds the features at i and the token at i + 1.
        told = theirs(
            hidden_states=features,
            input_ids=ids.roll(-1, dims=1),
            document_ids=torch.zeros_like(ids),
            ttt_steps=3,
        )
    for step, (own, their) in enumerate(zip(ours, told, strict=True)):
        assert torch.equal(own[:, : 8 - step], their[:, : 8 - step])
