"""Prompts by domain: what is served, what is held out, and what the router is fitted on. None is in two."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST = 600  # characters of a prompt
SHUFFLE = 0  # seed of the order of a domain's prompts: the held-out ones are the same in all runs
EXAMPLES = 40  # of a domain, that the router is fitted on


@dataclass(frozen=True)
class Query:
    """A prompt and the domain that it really comes from. Arrangements see the domain only if they say so."""

    domain: str
    prompt: str
    source: str = ""  # the client that asks
    pinned: str = ""  # the domain that the client claims, whatever the router says


@dataclass(frozen=True)
class Domain:
    """The prompts of one domain, each kind in a fixed order."""

    name: str
    served: tuple[str, ...]
    held_out: tuple[str, ...]
    examples: tuple[str, ...]


def load_domain(data: Path, name: str, held_out: int) -> Domain:
    """Served prompts come from stream/, held-out ones and the router's examples from dev/."""
    served, others = (_shuffled(data / part / f"{name}.jsonl.xz") for part in ("stream", "dev"))
    return Domain(
        name, tuple(served), tuple(others[:held_out]), tuple(others[held_out : held_out + EXAMPLES])
    )


def _shuffled(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    short = sorted({prompt for prompt in prompts if len(prompt) < LONGEST})
    random.Random(SHUFFLE).shuffle(short)
    return short


REWORDINGS = (
    "Could you please help me with the following? {}",
    "{}\n\nThank you in advance, and please keep it short.",
    "I have been asked this at work and do not know what to say:\n\n{}",
    "Quick question. {} Explain your answer.",
)


def reworded(prompts: Sequence[str]) -> list[str]:
    """The same prompts in other words around them, each way of wording in turn."""
    return [REWORDINGS[i % len(REWORDINGS)].format(prompt) for i, prompt in enumerate(prompts)]
