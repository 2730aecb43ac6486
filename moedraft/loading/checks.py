"""What is refused before it could answer wrongly: layouts, holes in checkpoints, pairs that do not fit.

And the bare model's own answers through transformers, which are those that the engine gives.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from moedraft.cache import SlotCache
from moedraft.core import UnsupportedModel

log = logging.getLogger(__name__)

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


class CheckedModel(Protocol):
    """What the checks need of a `LanguageModel`."""

    hf: Any
    tokenizer: Any
    name: str
    vocab_size: int
    max_len: int

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self, slots: int) -> SlotCache: ...

    def forward(
        self, cache: SlotCache, first: int, token_ids: torch.Tensor, starts: list[int]
    ) -> torch.Tensor: ...


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
    if getattr(text, "alibi", False):
        raise UnsupportedModel(
            f"{name}: {kind} has ALiBi position biases, which it makes from a mask of whole prompts."
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


def has_attention_alone(config: Any) -> bool:
    """Whether a configuration says of every layer that it has full attention."""
    return set(getattr(config.get_text_config(), "layer_types", None) or [""]) == {"full_attention"}


def refuse_holes(report: dict[str, Any], name: str) -> None:
    """Raise UnsupportedModel where weights would be random: missing, or of another shape."""
    for key, what in (("missing_keys", "misses"), ("mismatched_keys", "has wrong shapes for")):
        found = sorted(one if isinstance(one, str) else str(one[0]) for one in report.get(key) or ())
        if found:
            raise UnsupportedModel(
                f"{name}: the checkpoint {what} {len(found)} of the model's weights, {found[0]} for one."
            )


def warn_of_processors(model: CheckedModel) -> None:
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


@torch.inference_mode()
def self_check(model: CheckedModel) -> None:
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
        got = torch.cat([parts[0][0], parts[1][0], parts[1][1]]).float()
        gap = got - torch.cat([whole[0, :6], whole[1, 5:8]])
        # Rounded to half precision, single logits of a deep model are off by a third of their spread.
        error = gap.abs().max() if model.dtype == torch.float32 else gap.square().mean().sqrt()
        limit = 1e-2 if model.dtype == torch.float32 else 0.25
        if not error <= limit * whole.std().clamp_min(1e-6):
            problem = f"its logits over the slot cache are off by {error.item():.2g}"
    except Exception as failure:  # whatever a foreign model's code raises is a reason to refuse it
        problem = f"it does not run over the slot cache ({type(failure).__name__}: {failure})".splitlines()[0]
    if problem:
        raise UnsupportedModel(f"{model.name}: {model.hf.config.model_type} is not supported; {problem}.")


@contextmanager
def bare_generation(model: CheckedModel) -> Iterator[None]:
    """Meanwhile `generate` heeds nothing of the checkpoint's generation_config but what ends an answer."""
    own, ends = model.hf.generation_config, sorted(model.eos_token_ids)
    bare = type(own)(eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, do_sample=False)
    model.hf.generation_config = bare  # `generate` takes from it all that is not set
    try:
        yield
    finally:
        model.hf.generation_config = own


@torch.inference_mode()
def greedy_answers(model: CheckedModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What the model answers to these prompts in one batch, with the token that ends each answer.

    Prompts are shorter than the model's context; the longest of them with its answer fits into it.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with bare_generation(model):
        made = model.hf.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=min(max_tokens, model.max_len - width),
        )
    return [until_end(row, model.eos_token_ids) for row in made[:, width:].tolist()]


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Up to and with the first token that ends an answer."""
    stops = [i for i, token in enumerate(tokens) if token in ends]
    return tokens[: stops[0] + 1] if stops else tokens


def check_pair(target: CheckedModel, draft: CheckedModel) -> None:
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


def in_one_line(error: Exception) -> str:
    """The first line of what it says, and the next where that only announces it."""
    lines = [line.strip() for line in (str(error).strip() or repr(error)).splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
