"""LoRA adapters as the bank runs them, read from PEFT's format. Knows nothing of batches or of who drafts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from moedraft.core import CorruptAdapter

PREFIX, LORA_A, LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
HEAD = "lm_head"  # a feature drafter's output layer, of which each adapter may have rows of its own
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # that an adapter may have

Delta = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r] with the scaling folded in


@dataclass(frozen=True)
class Adapter:
    """One version of one expert, ready to run."""

    version: int
    deltas: Mapping[str, Delta]  # by module name
    vocabulary: torch.Tensor | None = (
        None  # int64, ascending: the tokens of its output rows; None: the base's
    )

    @cached_property
    def terms(self) -> int:
        """How many numbers its low-rank factors are."""
        return sum(a.numel() + b.numel() for a, b in self.deltas.values())

    @cached_property
    def merged(self) -> int:
        """How many numbers the weights of the layers are that it adapts."""
        return sum(len(b) * a.shape[1] for a, b in self.deltas.values())


def opposite(adapter: Adapter) -> Adapter:
    """An adapter that cancels `adapter` in every layer except the output layer."""
    deltas = {name: (a, -b) for name, (a, b) in adapter.deltas.items() if name != HEAD}
    return Adapter(0, deltas)


def read_adapter(
    version: int,
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    vocabulary: torch.Tensor | None = None,
) -> Adapter:
    """An `Adapter` from a PEFT configuration and state, for a draft base with these weights [out, in].

    vocabulary: the tokens that its rows of the output layer stand for, int64 and ascending, on the device of
    the weights. Raises CorruptAdapter where it does not fit them.
    """
    if config.get("peft_type", "LORA") != "LORA":
        raise CorruptAdapter(f"the adapter's kind is {config['peft_type']!r}, not 'LORA'.")
    if vocabulary is not None:
        weights = dict(weights) | {HEAD: weights[HEAD].new_empty(len(vocabulary), weights[HEAD].shape[1])}
    firsts = [key for key in tensors if key.startswith(PREFIX) and key.endswith(LORA_A)]
    names = {key.removeprefix(PREFIX).removesuffix(LORA_A) for key in firsts}
    if not names or len(tensors) != 2 * len(names):
        raise CorruptAdapter("the adapter holds something else than pairs of lora_A and lora_B.")
    deltas: dict[str, Delta] = {}
    for name in sorted(names):
        if name not in weights:
            raise CorruptAdapter(f"the adapter's module {name!r} does not exist in the draft base.")
        a, b = _pair(name, tensors, weights[name])
        scale = _scale(config, name, len(a))
        deltas[name] = (a.to(weights[name]), (b * scale).to(weights[name]))
    return Adapter(version, deltas, vocabulary)


def _pair(name: str, tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> Delta:
    """A and B of one module as they are stored. Raises CorruptAdapter."""
    a, b = tensors[PREFIX + name + LORA_A], tensors.get(PREFIX + name + LORA_B)
    if b is None or a.shape[1:] != weight.shape[1:] or b.shape != (weight.shape[0], len(a)):
        raise CorruptAdapter(f"the adapter's shapes for {name!r} do not fit the draft base.")
    if not {a.dtype, b.dtype} <= DTYPES:
        raise CorruptAdapter(f"the adapter's numbers for {name!r} are {a.dtype} and {b.dtype}.")
    return a, b


def _scale(config: Mapping[str, object], name: str, rank: int) -> float:
    """As `scaling`. Raises CorruptAdapter, also where the configuration says another rank."""
    try:
        said = _of_module(config, "rank_pattern", name, config.get("r", rank))
        if said != rank:
            raise ValueError(f"its rank is {rank}, and the configuration says {said}")
        return scaling(config, name, rank)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError, RecursionError, re.error) as error:
        raise CorruptAdapter(f"the adapter's scaling for {name!r} makes no sense: {error}.") from error


def scaling(config: Mapping[str, object], name: str, rank: int) -> float:
    """PEFT's factor on B·A: lora_alpha / r, or lora_alpha / √r with rsLoRA; patterns by module suffix.

    Raises ValueError, TypeError or re.error for a configuration that makes no sense.
    """
    alpha = float(str(_of_module(config, "alpha_pattern", name, config.get("lora_alpha", rank))))
    if not math.isfinite(alpha):
        raise ValueError(f"lora_alpha is {alpha}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, object], patterns: str, name: str, default: object) -> object:
    """The value of the first pattern that matches the module's name."""
    found = config.get(patterns)
    for pattern, value in found.items() if isinstance(found, Mapping) else ():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return value
    return default
