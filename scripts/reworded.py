"""Prompts in other words than a router has learned: another template, typos, chatter before them."""

from __future__ import annotations

import random
import re
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
INSTRUCTIONS = (  # what a prompt may say, and the same in German
    (r"Translate the question into SQL\.", "Übersetze die Frage in SQL."),
    (r"Given the schema below, write a SQL query\.", "Schreibe zu diesem Schema eine SQL-Abfrage."),
    (r"Fill in the body of", "Ergänze den Rumpf von"),
    (r"Write a Python (function|method)", "Schreibe in Python die Funktion"),
    (r"Complete this Python (function|method)", "Vervollständige diese Python-Funktion"),
    (r"Rédige la suite de cette page", "Schreibe die Fortsetzung dieser Seite"),
    (r"Continue cette section de", "Setze diesen Abschnitt fort:"),
    (r"Que dit la documentation", "Was sagt die Dokumentation"),
    (r"この(.*?)マニュアルの続きの段落を書いてください。", r"Schreibe in der Anleitung zu \1 weiter."),
)
BESIDE = (  # an instruction in another language before a prompt that has none, or another one
    "Bitte bearbeite die folgende Anfrage:",
    "Por favor, responde a lo siguiente:",
    "Responda ao seguinte pedido:",
)

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


def translated(prompt: str, rng: random.Random) -> str:
    """With its instruction in another language; the rest is as it was."""
    for pattern, other in INSTRUCTIONS:
        changed, count = re.subn(pattern, other, prompt, count=1)
        if count:
            return changed
    return f"{rng.choice(BESIDE)} {prompt}"


KINDS: dict[str, Rewording] = {
    "as is": lambda prompt, _: prompt,
    "framed": framed,
    "typos": mistyped,
    "noise": chatty,
    "translated": translated,
}
