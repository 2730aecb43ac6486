"""Prompts in other words than a router has learned: another template, typos, chatter before them."""

from __future__ import annotations

import random
from collections.abc import Callable

FRAMES = (
    "Please help me with the following request.\n\n### Request\n{prompt}\n\n### Reply",
    "I was asked this by a colleague and do not know what to say: «{prompt}» What would you answer?",
    "Task: read what stands below and do what it asks.\n---\n{prompt}\n---",
)
CHATTER = (
    "Hi there! Hope your week is going well, mine was rather long. By the way, the weather here is lovely. "
    "Now to my question. ",
    "[ticket 48213] [priority: normal] [from: web form] ",
    "ok so last time this worked great, thanks again. ",
)
TYPOS = 0.06  # of all letters

Rewording = Callable[[str, random.Random], str]


def framed(prompt: str, rng: random.Random) -> str:
    """Inside another template."""
    return rng.choice(FRAMES).format(prompt=prompt)


def chatty(prompt: str, rng: random.Random) -> str:
    """With something before it that says nothing of its domain."""
    return rng.choice(CHATTER) + prompt


def mistyped(prompt: str, rng: random.Random) -> str:
    """Letters exchanged, left out or doubled."""
    letters, i = list(prompt), 0
    while i < len(letters) - 1:
        if letters[i].isalpha() and rng.random() < TYPOS:
            kind = rng.randrange(3)
            if kind == 0:
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
                i += 1
            else:
                letters[i] = "" if kind == 1 else 2 * letters[i]
        i += 1
    return "".join(letters)


KINDS: dict[str, Rewording] = {
    "as is": lambda prompt, _: prompt,
    "framed": framed,
    "typos": mistyped,
    "noise": chatty,
}
