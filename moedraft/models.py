"""Load a target or draft base and run it over slot caches. With `cache.py` the only importer of transformers.

A model that would be run wrongly is refused by name: by its configuration where that tells, and by a
self-check at load time that compares the slot-cache path with the model's own forward.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from moedraft.cache import SlotCache
from moedraft.core import InvalidRequest, UnsupportedModel
from moedraft.lean import LeanForward, fits

MINI = {"target": "mini-target", "draft": "mini-draft"}


class LanguageModel:
    """A decoder-only model with its tokenizer, called with explicit positions over a `SlotCache`."""

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.name = name
        text = hf.config.get_text_config()
        self.vocab_size: int = hf.get_input_embeddings().num_embeddings
        self.num_layers: int = text.num_hidden_layers
        self.max_len: int = getattr(text, "max_position_embeddings", None) or 2**20
        self.additive_mask = hf.config._attn_implementation != "sdpa"
        self.lean: LeanForward | None = None  # a faster way to the same logits, where there is one

    @property
    def device(self) -> torch.device:
        device: torch.device = self.hf.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.hf.dtype
        return dtype

    @property
    def eos_token_ids(self) -> frozenset[int]:
        for source in (self.hf.generation_config, self.hf.config, self.tokenizer):
            eos = getattr(source, "eos_token_id", None)
            if eos is not None:
                return frozenset([eos] if isinstance(eos, int) else eos)
        return frozenset()

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.num_layers, slots)

    def forward(
        self, cache: SlotCache, first: int, token_ids: torch.Tensor, starts: list[int], keep: int = 0
    ) -> torch.Tensor:
        """Logits of the last `keep` positions (0: all), [B, keep or T, V].

        token_ids int64 [B, T]; row b is slot `first + b` and its first token stands at `starts[b]`.
        Positions past the model's context (padding only) are clamped for the embedding.
        """
        positions = cache.at(first, starts, token_ids.shape[1], token_ids.device)
        mask = torch.arange(cache.cursor.length, device=token_ids.device) <= positions[:, None, :, None]
        if self.additive_mask:
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        if cache.cursor.length > self.max_len:
            positions = positions.clamp(max=self.max_len - 1)
        if self.lean is not None:
            return self.lean(cache, token_ids, positions, mask, keep)
        result: torch.Tensor = self.hf(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return result

    def weights_hash(self) -> str:
        """Short hash of architecture and weights: adapters belong to exactly one base.

        Taken at bfloat16 precision from a fixed sample of each tensor, so that the same checkpoint loaded
        as float32 and as bfloat16 is the same base.
        """
        digest = hashlib.sha256(type(self.hf).__name__.encode())
        for name, value in sorted(self.hf.state_dict().items()):
            digest.update(f"{name}{tuple(value.shape)}".encode())
            flat = value.flatten()
            probe = flat[:: max(1, flat.numel() // 4096)].to(torch.bfloat16).cpu()
            digest.update(probe.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]


def resolve(name: str, role: str) -> str:
    """Folder of the embedded model for `mini`, else `name` itself."""
    if name != "mini":
        return name
    folder = Path(str(importlib.resources.files("moedraft.data") / "models" / MINI[role]))
    if not (folder / "config.json").exists():
        raise InvalidRequest(f"the embedded {MINI[role]} is missing from this installation; name a folder.")
    return str(folder)


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {device!r} is not usable here: {str(error).splitlines()[0]}") from error
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """float32 on a CPU, where half precision is slower and greedy ties matter; else the checkpoint's own."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def load_model(name: str, role: str, device: str = "auto", dtype: str = "auto") -> LanguageModel:
    """Load `name` (`mini`, folder or hub id) as `role` ("target" or "draft").

    Raises InvalidRequest where there is no such model, UnsupportedModel where it cannot be run rightly.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    where, on = resolve(name, role), pick_device(device)
    try:
        config = AutoConfig.from_pretrained(where)
        refuse_layouts(config, name)
        tokenizer = AutoTokenizer.from_pretrained(where)
        hf = load_weights(where, pick_dtype(dtype, on))
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise InvalidRequest(f"{role} {name!r} cannot be loaded: {reason}") from error
    if getattr(hf, "_is_stateful", False):
        raise UnsupportedModel(f"{name}: {config.model_type} keeps a recurrent state, not keys and values.")
    model = LanguageModel(hf.to(on).eval().requires_grad_(False), tokenizer, name)
    self_check(model)
    lean = LeanForward(model.hf, fuse=role == "target") if fits(model.hf) else None
    if lean is not None:
        try:
            model.lean = lean
            self_check(model)
        except UnsupportedModel:
            model.lean = None
    return model


def load_weights(where: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model with PyTorch's fused attention where the architecture knows it."""
    try:
        return AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="eager")


def refuse_layouts(config: Any, name: str) -> None:
    """Raise UnsupportedModel for layouts whose cache is not one key and value per token and layer."""
    text = config.get_text_config()
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: {kind} is an encoder-decoder; only decoder-only models are supported."
        )
    layers = set(getattr(text, "layer_types", None) or [])
    other = sorted(layers - {"full_attention"})
    if other:
        raise UnsupportedModel(
            f"{name}: {kind} has {', '.join(other)} layers; only full attention is supported."
        )
    window = getattr(text, "sliding_window", None)
    if window and not layers and getattr(text, "use_sliding_window", True):
        raise UnsupportedModel(
            f"{name}: {kind} uses sliding-window attention ({window} tokens), unsupported."
        )


@torch.inference_mode()
def self_check(model: LanguageModel) -> None:
    """Compare ragged, chunked slot-cache logits with the model's own forward; refuse what differs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (2, 9), generator=generator).to(model.device)
    problem = ""
    try:
        whole = model.hf(input_ids=ids, use_cache=False).logits.float()
        cache = model.new_cache(3)
        parts = [model.forward(cache, 1, ids[:, :5], [0, 0])[:, :3]]
        late = torch.stack([ids[0, 3:6], ids[1, 5:8]])
        parts.append(model.forward(cache, 1, late, [3, 5]))
        got = torch.cat([parts[0][0], parts[1][0]]).float()
        error = (got - whole[0, :6]).abs().max() + (parts[1][1].float() - whole[1, 5:8]).abs().max()
        limit = 1e-2 if model.dtype == torch.float32 else 0.25
        if not error <= limit * whole.std().clamp_min(1e-6):
            problem = f"its logits over the slot cache are off by {error.item():.2g}"
    except Exception as failure:  # whatever a foreign model's code raises is a reason to refuse it
        problem = f"it does not run over the slot cache ({type(failure).__name__}: {failure})".splitlines()[0]
    if problem:
        raise UnsupportedModel(f"{model.name}: {model.hf.config.model_type} is not supported; {problem}.")


def check_pair(target: LanguageModel, draft: LanguageModel) -> None:
    """Raise UnsupportedModel, saying how, where the two tokenizers differ."""
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    if len(ours) != len(theirs):
        detail = f"{len(ours)} tokens against {len(theirs)}"
    else:
        token = next(t for t, i in sorted(ours.items(), key=lambda item: item[1]) if theirs.get(t) != i)
        detail = (
            f"token {ours[token]} is {token!r} in the target and {theirs.get(token)} is its id in the draft"
        )
    raise UnsupportedModel(f"target and draft need the same tokenizer; theirs differ: {detail}.")
