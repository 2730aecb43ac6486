"""Load a target or draft base and run it over slot caches. With `cache.py` the only importer of transformers.

A model that would be run wrongly is refused by name: by its configuration where that tells, and by a
self-check at load time that compares the slot-cache path with the model's own forward.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from moedraft import cpu
from moedraft.cache import SlotCache
from moedraft.core import InvalidRequest, MoedraftError, UnsupportedModel
from moedraft.cpu.lean import LeanForward, fits
from moedraft.evidence import HiddenStates

log = logging.getLogger(__name__)

PIECE = 256  # bytes read at each of some 16 places of a stored tensor, to tell checkpoints apart
MINI = {"target": "mini-target", "draft": "mini-draft"}
# What `generate` of transformers would do to the logits before it takes the largest; None and 0: nothing.
PROCESSORS = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "min_length"),
    *("encoder_no_repeat_ngram_size", "min_new_tokens", "guidance_scale", "diversity_penalty", "num_beams"),
    *("exponential_decay_length_penalty", "sequence_bias", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "penalty_alpha"),
    *("watermarking_config", "dola_layers"),
)
SCALES = ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams")
NEUTRAL = {**dict.fromkeys(SCALES, (0, 1)), "forced_bos_token_id": (), "forced_eos_token_id": ()}


class LanguageModel:
    """A decoder-only model with its tokenizer, called with explicit positions over a `SlotCache`."""

    folder: Path | None = None  # where its files lie, if it came from files

    def __init__(self, hf: PreTrainedModel, tokenizer: Any, name: str, cpu_fast_paths: bool = True) -> None:
        self.hf = hf
        self.cpu_fast_paths = cpu_fast_paths
        self.tokenizer = tokenizer
        self.name = name
        text = hf.config.get_text_config()
        self.vocab_size: int = hf.get_input_embeddings().num_embeddings
        self.num_parameters: int = hf.num_parameters()
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
        """What ends an answer of transformers' own `generate`; the tokenizer may think otherwise."""
        eos = getattr(self.hf.generation_config, "eos_token_id", None)
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.num_layers, slots)

    @property
    def ragged(self) -> bool:
        """Whether `forward` makes use of `lengths`: padding then costs nothing."""
        return self.lean is not None and self.lean.ragged

    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
        lengths: list[int] | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Logits of the last `keep` positions (0: all), [B, keep or T, V].

        token_ids int64 [B, T]; row b is slot `first + b` and its first token stands at `starts[b]`.
        Positions past the model's context (padding only) are clamped for the embedding. lengths: how many
        tokens of each row count; logits of the others mean nothing. hidden: collects the input of the layers
        that it names, at all positions.
        """
        positions = cache.at(first, starts, token_ids.shape[1], token_ids.device)
        mask = torch.arange(cache.cursor.length, device=token_ids.device) <= positions[:, None, :, None]
        if self.additive_mask:
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        if cache.cursor.length > self.max_len:
            positions = positions.clamp(max=self.max_len - 1)
        if self.lean is not None and hidden is None:
            return self.lean(cache, token_ids, positions, mask, keep, lengths if self.ragged else None)
        result = self.hf(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=hidden is not None,
        )
        if hidden is not None:
            hidden.states = {layer: result.hidden_states[layer] for layer in hidden.layers}
        logits: torch.Tensor = result.logits
        return logits

    def weights_hash(self) -> str:
        """Short hash of architecture and weights: adapters belong to exactly one base.

        Taken from the checkpoint's files, so that it is the same base in whatever precision it is loaded;
        from a sample of each tensor, at bfloat16 precision, where there are none.
        """
        if self.folder is not None and (found := hash_files(self.folder)):
            return found
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


def load_model(
    name: str, role: str, device: str = "auto", dtype: str = "auto", cpu_fast_paths: bool = True
) -> LanguageModel:
    """Load `name` (`mini`, folder or hub id) as `role` ("target" or "draft").

    Raises InvalidRequest where there is no such model, UnsupportedModel where it cannot be run rightly.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    where, on = resolve(name, role), pick_device(device)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        refuse_layouts(config, name)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
        hf, report = load_weights(where, pick_dtype(dtype, on))
        refuse_holes(report, name)
        if getattr(hf, "_is_stateful", False):
            raise UnsupportedModel(f"{name}: {config.model_type} keeps a recurrent state, no key and value.")
        model = LanguageModel(hf.to(on).eval().requires_grad_(False), tokenizer, name, cpu_fast_paths)
        model.folder = folder_of(where)
    except MoedraftError:
        raise
    except Exception as error:  # whatever a broken file makes the libraries below raise
        raise InvalidRequest(f"{role} {name!r} cannot be loaded: {in_one_line(error)}") from error
    if role == "target":
        warn_of_processors(model)
    self_check(model)
    if cpu.allows(model) and fits(model.hf):
        try:
            model.lean = LeanForward(model.hf, fuse=role == "target" and cpu.suits(model))
            self_check(model)
        except UnsupportedModel:
            model.lean = None
    return model


def load_weights(where: str, dtype: torch.dtype | str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, with PyTorch's fused attention where the architecture knows it, and what did not fit."""

    def load(attention: str) -> tuple[PreTrainedModel, dict[str, Any]]:
        model, report = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_holes` names them
        )
        return model, report

    try:
        return load("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return load("eager")


def refuse_holes(report: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModel where weights would be random: missing, or of another shape."""
    for key, what in (("missing_keys", "misses"), ("mismatched_keys", "has wrong shapes for")):
        found = sorted(one if isinstance(one, str) else str(one[0]) for one in report.get(key) or ())
        if found:
            raise UnsupportedModel(
                f"{name}: the checkpoint {what} {len(found)} of the model's weights, {found[0]} for one."
            )


def in_one_line(error: Exception) -> str:
    """The first line of what it says, and the next where that only announces it."""
    lines = [line.strip() for line in (str(error).strip() or repr(error)).splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def warn_of_processors(model: LanguageModel) -> None:
    """Say which settings of the checkpoint's own `generate` are not followed."""
    settings = model.hf.generation_config
    set_ones = [name for name in PROCESSORS if getattr(settings, name, None) not in (None, [], {}, ())]
    found = [name for name in set_ones if getattr(settings, name) not in NEUTRAL.get(name, (0,))]
    if found:
        log.warning(
            "%s: %s of its generation_config are not applied; greedy answers are the bare model's.",
            model.name,
            ", ".join(found),
        )


def folder_of(where: str) -> Path | None:
    """Where the files of a local folder or of a hub id's snapshot lie."""
    file = cached_file(
        where, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(file).parent if file else None


def hash_files(folder: Path) -> str:
    """Of the configuration and a sample of every tensor as stored; "" where there are no safetensors."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        return ""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for loose in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(loose, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in files:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            base = file.tell()
            digest.update(header)
            for name, tensor in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                for at in range(begin, end, max(PIECE, (end - begin) // 16)):
                    file.seek(base + at)
                    digest.update(file.read(min(PIECE, end - at)))
    return digest.hexdigest()[:16]


def refuse_layouts(config: Any, name: str) -> None:
    """Raise UnsupportedModel for layouts whose cache is not one key and value per token and layer."""
    text = config.get_text_config()
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name}: {kind} is an encoder-decoder; only decoder-only models are supported."
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for each in (rope, *rope.values()):  # one for all layers, or one by kind of layer
        rope_type = each.get("rope_type", each.get("type")) if isinstance(each, dict) else None
        if rope_type in ("longrope", "dynamic"):
            raise UnsupportedModel(
                f"{name}: {kind} has {rope_type} position scaling, which depends on the prompt's length; "
                "keys in the cache would not fit."
            )
    if kind == "gpt_neo":
        raise UnsupportedModel(f"{name}: {kind} has local attention layers, and masks of a fixed size.")
    if not getattr(text, "max_position_embeddings", None):  # as MPT, whose buffers end unannounced
        raise UnsupportedModel(f"{name}: the configuration of {kind} does not say how long its context is.")
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
