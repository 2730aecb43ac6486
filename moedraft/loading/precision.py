"""In which precision a target is used on a CPU, and which forward runs a model there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from moedraft import cpu
from moedraft.core import UnsupportedModel
from moedraft.cpu import lean
from moedraft.cpu.steady import forward as steady
from moedraft.cpu.steady.independence import FastModel, made_independent
from moedraft.loading.checks import CheckedModel, self_check

log = logging.getLogger(__name__)


class LoadedModel(FastModel, CheckedModel, cpu.SizedModel, Protocol):
    """What is asked of a model here; `LanguageModel` has it."""

    original_hash: str

    def weights_hash(self) -> str: ...

    @property
    def mixes(self) -> bool: ...


Target = TypeVar("Target", bound=LoadedModel)


def rounded_target(
    name: str, read: Callable[[torch.dtype], Target], rounding: steady.Rounding
) -> Target | None:
    """The target with its numbers rounded; None where answers would depend on the batch then.

    read: loads it in a precision. rounding: what makes it fastest here.
    """
    if rounding == "bfloat16":
        model = read(torch.bfloat16)
        if speed_up(model, "target") and made_independent(model):
            return model
        log.warning("%s: its answers in bfloat16 would depend on the batch here; float32 is used.", name)
        return None
    model = read(torch.float32)
    model.original_hash = model.weights_hash()  # of some checkpoints it is taken from the weights
    if not steady.halve(model.hf):  # not all of them fit
        speed_up(model, "target")
        return model
    if not speed_up(model, "target", steady.HALVED[0]):
        log.warning("%s: it does not run with weights in half precision here; float32 is used.", name)
    elif made_independent(model, steady.HALVED):
        return model
    else:
        log.warning(
            "%s: its answers with weights in half precision would depend on the batch here; float32 is used.",
            name,
        )
    return None


def speed_up(model: LoadedModel, role: str, arranged: steady.Arrangement | None = None) -> bool:
    """Use the faster forward for its architecture, if there is one that passes the check; say whether.

    arranged: how the weights of a large target are laid out; None: as is usual for its precision.
    """
    if not cpu.allows(model):
        return False
    if role == "target" and steady.fits(model.hf):
        model.lean = steady.SteadyForward(model.hf, arranged)
    elif lean.fits(model.hf):
        model.lean = lean.LeanForward(model.hf, fuse=role == "target" and cpu.suits(model))
    try:
        self_check(model)
    except UnsupportedModel:
        model.lean = None
    return model.lean is not None


def warn_of_batches(model: LoadedModel) -> None:
    """Say so if bfloat16 was asked for and answers depend on the batch in it."""
    if model.mixes and model.dtype == torch.bfloat16 and not made_independent(model):
        log.warning("%s: in bfloat16, which was asked for, its answers depend on the batch here.", model.name)
