"""How much of what a domain's answers are made of is on the list of whoever drafts for it.

A feature drafter guesses the tokens of a list and, beside these, those of a row's own text, which are not
counted here. Its experts choose their own lists. An independent draft model guesses every token, so nothing
is to be shown there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moedraft.core import SHARED
from moedraft.storage.store import GENERAL_LIST, Store

NEWEST = 64  # answers that are looked at

Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class Coverage:
    """The list by which a domain is drafted for, held against the newest answers in its replay."""

    tokens: int  # of the list
    share: float  # of the answers' tokens that are among them
    shared: float | None  # beside an expert's own list: the same for the list that would serve without it
    basis: str  # in words: whose list it is, and which answers were looked at


def coverage(store: Store, name: str) -> Coverage | None:
    """None where every token is guessed, or no answer is kept. Raises StorageError."""
    found = _list_of(store, name)
    if found is None:
        return None
    tokens, whose, last_record = found
    # A list fits the answers by which it was chosen, so later ones count where there are any.
    newer = store.replay.answers(name, NEWEST, (last_record or 0) + 1)
    answers = newer or store.replay.answers(name, NEWEST)
    if not any(map(len, answers)):
        return None
    text = np.concatenate(answers)
    general = _list_of(store, SHARED) if whose == "its own" and name != SHARED else None
    shared = None if general is None else float(np.isin(text, general[0]).mean())
    looked_at = f"{len(answers)} answer{'s' * (len(answers) > 1)}"
    if not newer:
        looked_at += " by which they may have been chosen, as no newer one has come"
    elif last_record is not None:
        looked_at += " since they were chosen"
    basis = f"{len(tokens)} tokens of {whose}, counted in {looked_at}"
    return Coverage(len(tokens), float(np.isin(text, tokens).mean()), shared, basis)


def _list_of(store: Store, name: str) -> tuple[Tokens, str, int | None] | None:
    """The list of a domain, whose that is, and the last record that it may be chosen by.

    Without a version of its own a domain has the shared adapter's list, and without that the draft base's.
    """
    names = () if name in store.registry.unadapted() else (name, SHARED)
    live = next(filter(None, map(store.registry.live, names)), None)
    own = None if live is None else store.adapters.vocabulary(live)
    if live is not None and own is not None:
        return own.numpy(), "its own" if live.domain == name else "the shared draft", live.last_record
    bits = np.frombuffer(bytes.fromhex(store.registry.get_meta(GENERAL_LIST, "") or ""), np.uint8)
    return (np.unpackbits(bits).nonzero()[0], "the draft base", None) if len(bits) else None
