"""Drafters on disk, in the EAGLE-3 checkpoint format of `speculators`; only safetensors, never pickle.

What published heads have in other layouts is read as well: the original EAGLE-3 code calls the layer
`midlayer` and puts its measures at the top of the configuration. `d2t` holds offsets: the target's id of
draft token i is i + d2t[i]; `t2d` tells for each of the target's tokens whether it can be drafted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.feature.config import PARTIAL, FeatureConfig, default_layers
from moedraft.feature.model import FeatureDraft
from moedraft.folders import replace_folder
from moedraft.loading.checks import in_one_line

log = logging.getLogger(__name__)

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TARGET = "target.json"  # which target it was trained for
FILES = (WEIGHTS, CONFIG, TARGET)  # what a drafter's folder holds; one with anything else is never replaced
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EMBEDDINGS = "embed_tokens.weight"
TARGETS = (EMBEDDINGS, "verifier_lm_head.weight", "verifier_norm.weight")  # not the drafter's own
VOCABULARY = ("d2t", "t2d")
STEPS = 3  # tokens that a drafter learned to draft, where nothing is said
COMPARED = 4096  # rows of the embeddings at least, spread over all of them
LAYER_KEYS = {  # of ours and of transformers'
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_len": "max_position_embeddings",
    "attention_bias": "attention_bias",
}


def save_draft(
    draft: FeatureDraft,
    folder: Path,
    *,
    target: str | None = None,
    target_hash: str | None = None,
    architectures: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float16,
    rows: bool = False,
    steps: int = STEPS,
) -> None:
    """Write `folder`, or replace it, at once or not at all. Raises InvalidRequest where it holds other files.

    target, target_hash: name and `weights_hash` of the model it was trained for. rows: the output rows too,
    which other engines want; rows of the drafter's own are always written. steps: tokens it learned to draft.
    """
    config = to_json(draft.config, len(draft.vocabulary), target, architectures, dtype, steps)

    def write(made: Path) -> None:
        (made / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors_of(draft, dtype, rows), made / WEIGHTS, metadata={"format": "pt"})
        if target_hash is not None:
            belongs = {"name": target, "weights_hash": target_hash}
            (made / TARGET).write_text(json.dumps(belongs) + "\n", encoding="utf-8")

    replace_folder(folder, FILES, write)


def tensors_of(draft: FeatureDraft, dtype: torch.dtype, rows: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name."""
    keep_rows = rows or draft.trained is not None
    tensors = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in draft.state_dict().items()
        if keep_rows or name != "lm_head.weight"
    }
    ids = draft.vocabulary.cpu()
    if len(ids) < draft.config.vocab_size:
        mask = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        mask[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    return tensors


def to_json(
    config: FeatureConfig,
    draft_vocab_size: int,
    target: str | None,
    architectures: tuple[str, ...],
    dtype: torch.dtype,
    steps: int,
) -> dict[str, Any]:
    """A `speculators` configuration."""
    layer = {theirs: getattr(config, ours) for ours, theirs in LAYER_KEYS.items()}
    rope = {"rope_type": "default"} | dict(config.rope_scaling) | {"rope_theta": config.rope_theta}
    layer |= {
        "model_type": config.kind,
        "num_hidden_layers": 1,
        "rope_parameters": rope,
        "hidden_act": "silu",
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "target_hidden_size": config.feature_size or None,
        **{flag: getattr(config, flag) for flag in FLAGS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": layer,
    }


def load_draft(folder: Path, embeddings: torch.Tensor, output: torch.Tensor, num_layers: int) -> FeatureDraft:
    """The drafter in `folder`, float32, on a target with these embeddings and output rows [V, H].

    num_layers: of the target, where the checkpoint leaves the default layers unsaid. Raises InvalidRequest
    where the folder is not such a checkpoint, UnsupportedModel where it is one that cannot be run.
    """
    try:
        config = from_json(json.loads((folder / CONFIG).read_text(encoding="utf-8")), num_layers)
        stored = renamed(read_tensors(folder))
    except KeyError as error:
        raise InvalidRequest(f"{folder}: the drafter's configuration lacks {error}.") from error
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        reason = in_one_line(error)
        raise InvalidRequest(f"{folder} holds no feature drafter that can be read: {reason}") from error
    vocabulary = vocabulary_of(stored, config, folder)
    warn_of_embeddings(stored, embeddings, folder)
    own = stored.pop("lm_head.weight", None)
    own = None if own is None else own.to(output.device)
    if own is not None and own.shape == output[vocabulary].shape and is_targets(own, output[vocabulary]):
        own = None
    draft = FeatureDraft(config, vocabulary, embeddings, output, own)
    weights = {name: value.float() for name, value in stored.items() if name not in TARGETS}
    fits = draft.load_state_dict(weights, strict=False)
    missing = [name for name in fits.missing_keys if name != "lm_head.weight"]
    if wrong := missing or fits.unexpected_keys:
        what = "lacks" if missing else "has an unknown tensor"
        raise UnsupportedModel(f"{folder}: the drafter's checkpoint {what} {wrong[0]}.")
    return draft.eval()


def is_targets(own: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether stored rows are the target's, but for having been rounded to half precision."""
    return bool(torch.allclose(own.float(), rows.float(), rtol=1e-2, atol=1e-2 * rows.float().std().item()))


def warn_of_embeddings(stored: Mapping[str, torch.Tensor], embeddings: torch.Tensor, folder: Path) -> None:
    """Say so if the drafter learned with embeddings of its own, as `embed_requires_grad` has it."""
    own = stored.get(EMBEDDINGS)
    if own is None:
        return
    fits = own.ndim == 2 and own.shape[1] == embeddings.shape[1]
    if fits:
        count = min(len(own), len(embeddings))
        every = max(1, count // COMPARED)
        rows, theirs = own[:count:every].to(embeddings.device), embeddings[:count:every]
        fits = is_targets(rows, theirs)
    if not fits:
        log.warning(
            "%s: the drafter's own embeddings are not used, so it guesses worse than it could.", folder
        )


def stored_as(folder: Path) -> tuple[torch.dtype, int]:
    """In what precision the drafter in `folder` is stored, and how many tokens it says that it drafts."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    try:
        steps = int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        steps = STEPS
    return renamed(read_tensors(folder))["fc.weight"].dtype, steps


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{folder} has no .safetensors file; other formats are not read.")
    return {name: value for file in files for name, value in load_file(file).items()}


def renamed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of the original EAGLE-3 code → those of `speculators`."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0.", 1): value
        for name, value in tensors.items()
        if "rotary_emb" not in name
    }


def vocabulary_of(stored: dict[str, torch.Tensor], config: FeatureConfig, folder: Path) -> torch.Tensor:
    """Takes `d2t` and `t2d` out of `stored`; the target's ids of the drafter's tokens, int64, ascending."""
    offsets, mask = (stored.pop(name, None) for name in VOCABULARY)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise InvalidRequest(f"{folder}: the drafter's checkpoint lacks d2t, the list of its tokens.")
        return torch.arange(config.vocab_size)
    if offsets.ndim != 1 or not len(offsets) or (mask is not None and mask.ndim != 1):
        raise InvalidRequest(f"{folder}: d2t or t2d of the drafter's checkpoint is no list.")
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise InvalidRequest(f"{folder}: d2t of the drafter's checkpoint names tokens that there are not.")
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], ids):
        raise InvalidRequest(f"{folder}: d2t and t2d of the drafter's checkpoint name different tokens.")
    return ids


def from_json(config: Mapping[str, Any], num_layers: int) -> FeatureConfig:
    """A `speculators` configuration, or one of the original code, where all stands at the top."""
    config = section({"config.json": config}, "config.json")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UnsupportedModel(f"a {kind} drafter is not supported, only eagle3.")
    layer = section(config, "transformer_layer_config") if "transformer_layer_config" in config else config
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel("a drafter of more than one layer is not supported.")
    if (activation := layer.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"a drafter with the activation {activation} is not supported, only silu.")
    heads = layer["num_attention_heads"]
    values = {ours: layer[theirs] for ours, theirs in LAYER_KEYS.items() if layer.get(theirs) is not None}
    values.setdefault("num_kv_heads", heads)
    if "head_dim" not in values:
        values["head_dim"] = layer["hidden_size"] // (heads or 1)  # no heads are refused below
    rope = section(layer, "rope_parameters") or section(layer, "rope_scaling")
    rope = {PARTIAL: layer[PARTIAL], **rope} if PARTIAL in layer else rope
    theta = layer.get("rope_theta") or rope.get("rope_theta") or 10_000.0
    ids = layers_of(config) or default_layers(num_layers)
    return FeatureConfig(
        **values,
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        feature_layers=tuple(ids),
        rope_theta=float(theta),
        rope_scaling={key: value for key, value in rope.items() if key != "rope_theta"},
        kind="qwen3" if layer.get("model_type") == "qwen3" else "llama",
        feature_size=config.get("target_hidden_size") or 0,
        **{flag: config.get(flag) or False for flag in FLAGS},
    )


def layers_of(config: Mapping[str, Any]) -> list[int] | None:
    """Where the ids of the layers stand, at the top or in an `eagle_config`."""
    name = "eagle_aux_hidden_state_layer_ids"
    found: list[int] | None = config.get(name) or section(config, "eagle_config").get(name)
    return found


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of that name; {} where there is none. Raises InvalidRequest where it is something else."""
    found = config.get(name)
    if not isinstance(found, dict | None):
        raise InvalidRequest(f"the drafter's configuration is damaged: {name} is no object.")
    return found or {}
