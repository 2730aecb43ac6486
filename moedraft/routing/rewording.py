"""Other wordings of example prompts, made without a model, from which a router learns what does not matter.

A person who registers a domain gives prompts of one or two wordings; the traffic has others. So the router
is fitted on copies too: with a neutral sentence before the text or a frame around it, or without the text's
beginning, where its wording usually is. What is added is the same for all domains and says nothing about any
of them. Knows texts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BEFORE = (
    "Could you take a look at this for me? I would be grateful for an answer.\n",
    "Good morning, I am new here and have to get this done by tonight, so here it is:\n\n",
    "Guten Tag, können Sie mir hierbei bitte helfen? ",
    "Bonjour, j'ai besoin d'aide pour ceci : ",
    "Hola, necesito ayuda con lo siguiente. ",
    "From: customer desk | Ref 7719 | Status open\n",
)
AROUND = (
    "<instructions>\n{text}\n</instructions>\nWrite your answer below.",
    'Somebody sent me this message: "{text}" How should it be answered?',
    "You are a careful assistant. Answer the user.\n\nUser: {text}\n\nAssistant:",
    "{text}\n\nThanks a lot, and please keep it brief.",
)
LEAST_WORDS = 6  # a text with fewer is not cut
SPACELESS_CUT = 24  # characters that are cut from a text without spaces, such as a Japanese one


def copies(texts: Sequence[str], most: int) -> list[tuple[int, str]]:
    """At most `most` reworded copies, evenly spread: (place in `texts`, copy). The same ones every time."""
    count = min(most, len(texts))
    chosen = [i * len(texts) // count for i in range(count)]
    return [(place, reworded(texts[place], number)) for number, place in enumerate(chosen)]


def reworded(text: str, number: int) -> str:
    """One copy; the kinds take turns by `number`."""
    kind = KINDS[number % len(KINDS)]
    return kind(text, number // len(KINDS))


def preceded(text: str, number: int) -> str:
    """With a neutral sentence before it."""
    return BEFORE[number % len(BEFORE)] + text


def framed(text: str, number: int) -> str:
    """With a neutral frame around it."""
    return AROUND[number % len(AROUND)].format_map({"text": text})


def beheaded(text: str, number: int) -> str:
    """Without its first line or sentence, or without its first words where that would leave too little."""
    first, _, rest = text.strip().partition("\n")
    if len(rest.split()) >= LEAST_WORDS or len(rest) >= 2 * SPACELESS_CUT:
        return rest.strip()
    words = first.split()
    if len(words) >= LEAST_WORDS:
        return " ".join(words[len(words) // 3 :])
    return text[SPACELESS_CUT:] if len(text) >= 3 * SPACELESS_CUT else text


KINDS: tuple[Callable[[str, int], str], ...] = (preceded, beheaded, framed, beheaded)
