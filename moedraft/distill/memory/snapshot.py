"""What a joint trainer has in memory beside the published versions, as plain tensors, and back into memory.

A version holds the average of an adapter's weights over its last steps, with the scaling that serves, and of
an expert the directions that matter. Training goes on from more: the weights of the last step, whole, the
averages, and Adam's moments. With these a new trainer makes the next update as the one before it would have
made it, but for chance: which expert an unsure record teaches, and what a new adapter begins with, is
drawn anew.

Besides, it has the counts of tokens from which experts' lists are chosen, and what was seen of how long these
should be. In which order a list's rarest tokens came is not in it: the first update sees nothing of lengths.

Rows in which all of this is zero are left out: an expert's factor of the output layer has a row for each
token that anybody drafts, and learns those of its own tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, Field

from moedraft.core import SHARED, CorruptAdapter
from moedraft.distill.averages import AVERAGE
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.memory.of_gate import OfGate
from moedraft.feature.vocabulary import checked, union

VOCABULARY = "vocabulary"  # the tokens that the student drafts; "vocabulary/NAME": an adapter's own
COUNTS = "vocabulary.possible"  # "vocabulary.possible/NAME": those of `feature.vocabulary.counted`
MOMENTS = ("exp_avg", "exp_avg_sq", AVERAGE)  # in the optimiser's state of a factor, of the factor's shape
Tensors = dict[str, torch.Tensor]


class Stamp(BaseModel):
    """The live version that an adapter's weights go on from, and the number that the next one would get.

    Where another one was published since, the weights are no longer what the last trainer went on from, even
    if the same version serves again.
    """

    version: int  # 0 before there is one
    created_at: float | None
    following: int


class Words(OfGate):
    """What a snapshot says beside its tensors."""

    format: Literal[1] = 1
    base_hash: str
    purges: int  # of the home; with another number it may have learned from what is gone
    seed: int  # of the next draw of records
    adapters: dict[str, Stamp]
    target: str | None = None  # whose words were learned from
    gated: bool = True  # whether a gate decided on what was published
    lengths: dict[str, list[float]] = Field(default_factory=dict)  # see `ListLengths`
    settled: dict[str, bool] = Field(default_factory=dict)  # of the optimisers, see `AveragingAdamW`


class Unfit(ValueError):
    """The snapshot is of another trainer: of other ranks, layers or tokens, or not a snapshot at all."""


def taken(trainer: JointTrainer, names: Mapping[str, Stamp]) -> Tensors:
    """What `trainer` has in memory of these adapters, between two updates."""
    tensors = {VOCABULARY: _plain(trainer.student.vocabulary).clone()}
    for name in names:
        own, optimiser = trainer.vocabularies.of(name), trainer.optimisers.get(name)
        if own is not None:
            tensors[f"{VOCABULARY}/{name}"] = _plain(own)
        if (counts := trainer.vocabularies.counts(name)) is not None:
            tensors[f"{COUNTS}/{name}"] = counts
        for key, factor in _factors(trainer, name).items():
            state = optimiser.state.get(factor, {}) if optimiser else {}
            if state:
                tensors[f"{key}/step"] = _plain(state["step"])
            tensors |= _packed(key, {"weight": factor} | {part: state[part] for part in MOMENTS if state})
    return tensors


def restore(trainer: JointTrainer, words: Words, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the adapters that `words` names into a trainer's memory. Raises Unfit, and then none of them is."""
    try:
        _widen(trainer, _lists(trainer, tensors))
        for name, stamp in words.adapters.items():
            _restore(trainer, name, stamp.version, tensors)
            if name in words.settled:
                trainer.optimiser(name).settled = words.settled[name]
    except (CorruptAdapter, KeyError, IndexError, RuntimeError, ValueError) as error:
        for name in {SHARED, *words.adapters}:
            trainer.forget(name)
            trainer.vocabularies.restore(name, None)
        raise Unfit(str(error)) from error
    trainer.seed = words.seed
    trainer.vocabularies.lengths.restore(words.lengths)


def _lists(trainer: JointTrainer, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tokens that the student drafted; all lists are looked at. Raises what `restore` catches."""
    for name, found in tensors.items():
        kind = name.partition("/")[0]
        if name == VOCABULARY or (kind == VOCABULARY and name.count("/") == 1):  # else of a domain so called
            checked(found, trainer.student.vocab_size)
        elif kind == COUNTS:
            _check_counts(found, trainer.student.vocab_size)
    return checked(tensors[VOCABULARY], trainer.student.vocab_size)


def _check_counts(found: torch.Tensor, vocab_size: int) -> None:
    """Raises CorruptAdapter or Unfit where these are no counts of different tokens, as `taken` writes."""
    if found.dtype != torch.int64 or found.dim() != 2 or len(found) != 2 or bool((found < 0).any()):
        raise Unfit("its counts of tokens are none")
    checked(found[0].sort().values, vocab_size)


def _widen(trainer: JointTrainer, wanted: torch.Tensor) -> None:
    """Have the student draft the tokens that it drafted then."""
    student = trainer.student
    wanted = wanted.to(student.vocabulary.device)
    if not torch.equal(union([student.vocabulary, wanted]), wanted):
        raise Unfit("it drafts other tokens")
    if len(wanted) > len(student.vocabulary):
        student.widen(wanted)


def _restore(trainer: JointTrainer, name: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
    trainer.forget(name)
    own, counts = (tensors.get(f"{part}/{name}") for part in (VOCABULARY, COUNTS))
    trainer.vocabularies.restore(name, own, counts)
    trainer.student.add(name)
    trainer.versions[name] = version
    factors = _factors(trainer, name)
    if {key.rpartition("/")[0] for key in tensors if key.startswith(f"{name}/")} != factors.keys():
        raise Unfit("it changes other layers")
    for key, factor in factors.items():
        factor.data = _unpacked(key, "weight", tensors, factor)
        if f"{key}/step" in tensors:
            step = tensors[f"{key}/step"].to(factor.device)
            state = {part: _unpacked(key, part, tensors, factor) for part in MOMENTS}
            trainer.optimiser(name).state[factor] = {"step": step, **state}


def _factors(trainer: JointTrainer, name: str) -> dict[str, torch.nn.Parameter]:
    """The two factors of each layer's term, by the beginning of their tensors' names."""
    parts = trainer.student.low_ranks(name).items()
    return {f"{name}/{layer}/{which}": getattr(part, which) for layer, part in parts for which in "ab"}


def _packed(key: str, found: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors [rows, n] of one shape, without the rows in which all of them are zero."""
    used = torch.stack([tensor.detach().ne(0).any(1) for tensor in found.values()]).any(0)
    if used.all():
        return {f"{key}/{part}": _plain(tensor) for part, tensor in found.items()}
    rows = used.nonzero().flatten()
    packed = {f"{key}/{part}": _plain(tensor[rows]) for part, tensor in found.items()}
    return packed | {f"{key}/rows": _plain(rows)}


def _unpacked(key: str, part: str, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    found = tensors[f"{key}/{part}"].to(like.device, like.dtype)
    if not found.isfinite().all():
        raise Unfit(f"{key} is not finite")
    if (rows := tensors.get(f"{key}/rows")) is not None:
        found = torch.zeros_like(like).index_copy_(0, rows.to(like.device), found)
    if found.shape != like.shape:
        raise Unfit(f"{key} has another shape")
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()
