"""Whether one more run can stand beside those of the same traffic that are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moedraft.config import Settings
from moedraft.distill.assembly import TEXT_RATE, WHOLE

BEFORE_TOKENS = 4096  # of an expert's list, in runs that do not tell it
SERVER_STEPS: int = Settings.model_fields["update_steps"].default
BEFORE_RATE = 1e-3  # of an independent draft model's updates, in runs that do not tell it


def text_rate(steps: int) -> float:
    """The learning rate of an independent draft model, where updates have so many steps.

    With half of a server's steps each goes twice as far, so that an update goes as far as a server's.
    """
    return TEXT_RATE * SERVER_STEPS / steps


class Manner(NamedTuple):
    """How a run is made, beside what its settings tell."""

    precision: str  # of the target, such as "float32"
    strength: float  # with which adapters are published
    own_tokens: int  # of an expert's list at most
    resampled: int  # further answers to a prompt that are learned from
    text_tokens: bool  # whether drafters guess the tokens of a request's own text, beside a list
    rate: float | None = None  # learning rate of an independent draft model


def check(out: Path, pattern: str, now: Manner) -> None:
    """Exits where runs of the same traffic, with which this one is compared, were made otherwise."""
    for file in (out / "runs").glob(f"{pattern.replace(':', '-')}.*.json"):
        found = json.loads(file.read_text(encoding="utf-8"))
        for difference in differences(found, now):
            raise SystemExit(f"evidence.py: {file} {difference}, or name another --out.")


def differences(found: dict[str, Any], now: Manner) -> Iterator[str]:
    """What a run has otherwise, with what to do about it. Runs that tell nothing are older ones."""
    if found.get("text_tokens", False) != now.text_tokens:
        guess = "guessed" if found.get("text_tokens", False) else "did not guess"
        yield f"is of a drafter that {guess} the tokens of a request's own text; take the code of its commit"
    if (other := found.get("precision")) not in (None, now.precision):
        yield f"was made with a target in {other}, and this one is in {now.precision}; give --dtype {other}"
    if not found["updates"]:  # nothing was published
        return
    if (strength := found.get("strength", WHOLE)) != now.strength:
        yield (
            f"was made with adapters of strength {strength:g}, and this run has {now.strength:g}; "
            f"give --strength {strength:g}"
        )
    if found["settings"]["target"] == "mini":  # an independent draft model has no lists
        if now.rate is not None and (rate := found.get("learning_rate", BEFORE_RATE)) != now.rate:
            rates = f"learned at a rate of {rate:g}, and this run would at {now.rate:g}"
            yield f"{rates}; take the code of its commit"
        return
    if (size := found.get("own_tokens", BEFORE_TOKENS)) not in (None, now.own_tokens):
        yield (
            f"was made with experts' lists of {size} tokens, and this run has {now.own_tokens}; "
            f"give --own-tokens {size}"
        )
    if (count := found.get("resampled", 0)) != now.resampled:
        yield (
            f"learned from {count} further answers to a prompt, and this run would from {now.resampled}; "
            f"give --resampled {count}"
        )
