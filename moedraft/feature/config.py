"""What a feature drafter looks like, as `speculators` writes it down. Knows no tensor and no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moedraft.core import InvalidRequest, UnsupportedModel

KINDS = ("llama", "qwen3")  # of the decoder layer; qwen3 norms queries and keys as well
ROPE_TYPES = ("default", "linear", "llama3")
SWITCHES = ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
PARTIAL = "partial_rotary_factor"  # share of a head's dimensions that turn; all of a drafter's do


@dataclass(frozen=True)
class FeatureConfig:
    """Shape and switches of a drafter; the names in brackets are those of a `speculators` configuration."""

    hidden_size: int  # H, the target's
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # tokens of the target
    draft_vocab_size: int  # tokens that can be drafted
    feature_layers: tuple[int, ...]  # i: the states that enter the target's layer i, or L: those that leave
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # rope_type and what belongs to it
    max_len: int = 2**20
    kind: str = "llama"  # model_type of the decoder layer
    attention_bias: bool = False  # of the projections of queries, keys and values
    feature_size: int = 0  # states of the target; 0: hidden_size (target_hidden_size)
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # one norm over the joined features
    fc_norm: bool = False  # a norm for each feature (EAGLE-3.1)
    norm_output: bool = False  # what is fed back is normed (EAGLE-3.1)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedModel(f"a drafter's layer must be of type llama or qwen3, not {self.kind!r}.")
        if self.norm_before_fc and self.fc_norm:
            raise InvalidRequest("norm_before_fc and fc_norm exclude each other; choose one.")
        sizes = (self.hidden_size, self.intermediate_size, self.head_dim, self.vocab_size, self.max_len)
        numbers = (*sizes, self.num_heads, self.num_kv_heads, self.draft_vocab_size)
        if not all(type(number) is int and number > 0 for number in numbers):
            raise InvalidRequest("the drafter's configuration has a size that is no whole number above 0.")
        if type(self.feature_size) is not int or self.feature_size < 0:
            raise InvalidRequest("the width of the target's states is no whole number.")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise InvalidRequest(f"the drafter's {name} must be a number above 0.")
        if not all(type(getattr(self, name)) is bool for name in SWITCHES):
            raise InvalidRequest(f"each of {', '.join(SWITCHES)} is either true or false.")
        ids = self.feature_layers
        if not all(type(i) is int and i >= 0 for i in ids) or not 0 < len(set(ids)) == len(ids):
            raise InvalidRequest(f"feature layers must be distinct ids from 0 on, not {list(ids)}.")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InvalidRequest(
                f"a draft vocabulary of {self.draft_vocab_size} does not fit {self.vocab_size} tokens."
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidRequest("the drafter's attention heads do not fit together.")
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise UnsupportedModel(f"{kind} position scaling is not supported in a drafter.")
        if self.rope_scaling.get(PARTIAL, 1) != 1:
            raise UnsupportedModel("a drafter that turns a part of each head's dimensions is not supported.")
        try:
            self.frequencies()
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequest("the drafter's position scaling lacks a number, or one is wrong.") from error

    @property
    def state_size(self) -> int:
        """Width of one of the target's states."""
        return self.feature_size or self.hidden_size

    @property
    def features_size(self) -> int:
        """Width of the joined features, 3 H as a rule."""
        return self.state_size * len(self.feature_layers)

    def frequencies(self) -> list[float]:
        """Rotation per position of each pair of a head's dimensions, head_dim / 2 radians."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if kind == "default":
            return plain
        factor = float(self.rope_scaling["factor"])
        if kind == "linear":
            return [one / factor for one in plain]
        return [self._llama3(one, factor) for one in plain]

    def _llama3(self, frequency: float, factor: float) -> float:
        """Llama 3.1's: slow rotations are slowed by `factor`, fast ones stay, in between it is blended."""
        low, high = float(self.rope_scaling["low_freq_factor"]), float(self.rope_scaling["high_freq_factor"])
        turns = float(self.rope_scaling["original_max_position_embeddings"]) * frequency / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return frequency * (share + (1 - share) / factor)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """{2, L/2, L−3}, as published heads have it; for a target too shallow for that, what comes nearest."""
    chosen = sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)})
    spare = [i for i in (*range(num_layers - 1, -1, -1), num_layers) if i not in chosen]
    while len(chosen) < 3 and spare:
        chosen.append(spare.pop(0))
    return tuple(sorted(chosen))


def config_for(
    target: Any, *, draft_vocab_size: int, feature_layers: tuple[int, ...] = (), **switches: Any
) -> FeatureConfig:
    """A drafter for a target with this transformers text configuration: a Llama layer of its measures."""
    heads = target.num_attention_heads
    rope = dict(getattr(target, "rope_parameters", None) or {})
    known = rope.get("rope_type", "default") in ROPE_TYPES
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "feature_layers": feature_layers or default_layers(target.num_hidden_layers),
        "rms_norm_eps": getattr(target, "rms_norm_eps", None) or 1e-5,
        "rope_theta": float(rope.get("rope_theta") or 10_000.0),
        "rope_scaling": {k: v for k, v in rope.items() if k not in ("rope_theta", PARTIAL)} if known else {},
        "max_len": target.max_position_embeddings,
    }
    return FeatureConfig(**(values | switches))
