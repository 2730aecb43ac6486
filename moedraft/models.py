"""Load a target or draft base and run it over slot caches. With `cache.py` the only importer of transformers.

A model that would be run wrongly is refused by name: by its configuration where that tells, and by a
self-check at load time that compares the slot-cache path with the model's own forward.
"""

from __future__ import annotations

import importlib.resources
import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from moedraft.cache import SlotCache, cache_argument
from moedraft.core import InvalidRequest, MoedraftError, UnsupportedModel
from moedraft.cpu import lean
from moedraft.cpu.steady import forward as steady
from moedraft.cpu.steady import spans
from moedraft.devices import pick_device, pick_dtype
from moedraft.evidence import Beside, HiddenStates
from moedraft.gguf import HUB_ID, INSTALL, SMOLLM2, converted, find_smollm2, is_gguf
from moedraft.loading.checks import (
    has_attention_alone,
    in_one_line,
    refuse_holes,
    refuse_layouts,
    self_check,
    warn_of_processors,
)
from moedraft.loading.hashes import hash_files, hash_tensors
from moedraft.loading.precision import rounded_target, speed_up, warn_of_batches

if TYPE_CHECKING:  # models are also run where the libraries of the settings are missing
    from moedraft.config import Settings

log = logging.getLogger(__name__)

MINI = {"target": "mini-target", "draft": "mini-draft"}

Role = Literal["target", "draft"]


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
        self.cache_argument = cache_argument(hf)
        self.original_hash = ""  # of weights that were rounded since
        self.lean: lean.LeanForward | steady.SteadyForward | None = (
            None  # a faster way to the same logits, where there is one
        )

    @property
    def precision(self) -> str:
        """In words, such as "bfloat16"."""
        halved = isinstance(self.lean, steady.SteadyForward) and self.lean.arranged.half
        return str(self.dtype).removeprefix("torch.") + " with weights in half precision" * halved

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

    @property
    def mixes(self) -> bool:
        """Whether tokens that `forward` reads beside others cost less than in a forward of their own."""
        return isinstance(self.lean, steady.SteadyForward)

    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
        lengths: list[int] | None = None,
        hidden: HiddenStates | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        """Logits of the last `keep` positions (0: all), [B, keep or T, V].

        token_ids int64 [B, T]; row b is slot `first + b` and its first token stands at `starts[b]`.
        Positions past the model's context (padding only) are clamped for the embedding. lengths: how many
        tokens of each row count; logits of the others mean nothing. hidden: collects the input of the layers
        that it names, at all positions. beside: tokens of other slots, which are read as well.
        """
        if isinstance(self.lean, steady.SteadyForward):
            part = spans.Part.at(cache, first, token_ids, starts, lengths, hidden, keep)
            return self.lean(cache, part, spans.Part.beside(cache, beside) if beside else None)
        if beside is not None:
            at, ids, its = beside.first, beside.token_ids, beside.lengths
            self.forward(cache, at, ids, beside.starts, keep=1, lengths=its, hidden=beside.hidden)
        positions = cache.at(first, starts, token_ids.shape[1], token_ids.device)
        mask = torch.arange(cache.cursor.length, device=token_ids.device) <= positions[:, None, :, None]
        if self.additive_mask:
            mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        if cache.cursor.length > self.max_len:
            positions = positions.clamp(max=self.max_len - 1)
        if self.lean is not None:
            real = lengths if self.ragged else None
            return self.lean(lean.Call(cache, token_ids, positions, mask, keep, real, hidden))
        result = self.hf(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            output_hidden_states=hidden is not None,
            **{self.cache_argument: cache},
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
        if self.original_hash:
            return self.original_hash
        if self.folder is not None and (found := hash_files(self.folder)):
            return found
        return hash_tensors(self.hf)


def resolve(name: str, role: str) -> str:
    """Where the model of that name is: a folder, a GGUF file or a hub id.

    `mini` is embedded; `smollm2` is the file that a package carries or else a hub id; any other is itself.
    """
    if name == SMOLLM2:
        return str(find_smollm2() or HUB_ID)
    if name != "mini":
        return os.path.expanduser(name)
    folder = Path(str(importlib.resources.files("moedraft.data") / "models" / MINI[role]))
    if not (folder / "config.json").exists():
        raise InvalidRequest(f"the embedded {MINI[role]} is missing from this installation; name a folder.")
    return str(folder)


def unpacked(where: str, cache_dir: Path | None) -> str:
    """What `resolve` gave, as transformers loads it: the folder of a GGUF file's conversion."""
    return str(converted(Path(where).expanduser(), cache_dir)) if is_gguf(where) else where


def load_model(
    name: str,
    role: str,
    device: str = "auto",
    dtype: str = "auto",
    *,
    cpu_fast_paths: bool = True,
    cache_dir: Path | None = None,
) -> LanguageModel:
    """Load `name` (`mini`, `smollm2`, folder, GGUF file or hub id) as `role` ("target" or "draft").

    cache_dir: where GGUF files are converted into; None: the user's cache folder.

    Raises InvalidRequest where there is no such model, UnsupportedModel where it cannot be run rightly.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    where, on = resolve(name, role), pick_device(device)
    try:
        where = unpacked(where, cache_dir)
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        refuse_layouts(config, name)
        chosen = pick_dtype(dtype, on)
        read = partial(read_model, name, role, config, where, on, cpu_fast_paths=cpu_fast_paths)
        may_round = dtype == "auto" and on.type == "cpu" and role == "target" and cpu_fast_paths
        wanted = steady.preferred(config, count_parameters(config)) if may_round else None
        if wanted and (rounded := rounded_target(name, read, wanted)):
            return rounded
        model = read(chosen)
    except MoedraftError:
        raise
    except Exception as error:  # whatever a broken file makes the libraries below raise
        if where == HUB_ID:
            raise InvalidRequest(
                f"{role} {name!r} is not installed and {HUB_ID} cannot be fetched; run `{INSTALL}`."
            ) from error
        raise InvalidRequest(f"{role} {name!r} cannot be loaded: {in_one_line(error)}") from error
    speed_up(model, role)
    warn_of_batches(model)
    return model


def load_by(
    settings: Settings, role: Role, dtype: str | None = None, name: str | None = None
) -> LanguageModel:
    """The target or draft model that the settings name (or `name` in its place); raises as `load_model`.

    The number of threads that is set comes first, since what is checked of a model's sums depends on it.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return load_model(
        name or getattr(settings, role),
        role,
        settings.device,
        dtype or settings.dtype,
        cpu_fast_paths=settings.cpu_fast_paths,
        cache_dir=settings.cache_dir,
    )


def load_tokenizer(settings: Settings) -> Any:
    """The target's tokenizer without the target. Raises InvalidRequest as `load_model` does."""
    where = resolve(settings.target, "target")
    try:
        return AutoTokenizer.from_pretrained(unpacked(where, settings.cache_dir), trust_remote_code=False)
    except MoedraftError:
        raise
    except Exception as error:  # whatever a broken file makes the libraries below raise
        raise InvalidRequest(f"the tokenizer of {settings.target!r} cannot be loaded.") from error


def count_parameters(config: Any) -> int:
    """Of a model with this configuration, which is not loaded for that."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return int(model.num_parameters())


def read_model(
    name: str,
    role: str,
    config: Any,
    where: str,
    device: torch.device,
    dtype: torch.dtype | str,
    cpu_fast_paths: bool,
) -> LanguageModel:
    """The model as transformers runs it, checked. Raises UnsupportedModel, and what a broken file causes."""
    tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    hf, report = load_weights(where, dtype)
    refuse_holes(report, name)
    if getattr(hf, "_is_stateful", False):
        if not has_attention_alone(config):
            kind = config.model_type
            raise UnsupportedModel(f"{name}: {kind} keeps a recurrent state, no keys and values.")
        hf._is_stateful = False  # of this one nothing is; transformers' own speculation asks
    model = LanguageModel(hf.to(device).eval().requires_grad_(False), tokenizer, name, cpu_fast_paths)
    model.folder = folder_of(where)
    if role == "target":
        warn_of_processors(model)
    self_check(model)
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


def snapshot_folder(name: str) -> Path | None:
    """Where a checkpoint's files lie, fetched from the hub if need be; None where there is none."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    found = None
    with suppress(OSError):  # no such model or file, or it cannot be fetched; whoever loads it says so
        found = cached_file(name, "config.json")
        cached_file(name, "model.safetensors")
    return Path(found).parent if found else None


def folder_of(where: str) -> Path | None:
    """Where the files of a local folder or of a hub id's snapshot lie."""
    file = cached_file(
        where, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(file).parent if file else None
