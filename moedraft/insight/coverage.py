"""How much of what a domain's answers are made of its expert can guess at all.

A token outside a drafter's vocabulary is never accepted, whatever is learned. Experts of a feature drafter
choose their own; an independent draft model guesses every token, so nothing is to be shown there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moedraft.core import SHARED
from moedraft.storage.store import Store

NEWEST = 64  # answers that are looked at


@dataclass(frozen=True)
class Coverage:
    """The live version's vocabulary, held against the newest answers in the replay."""

    tokens: int  # that can be guessed
    share: float  # of the answers' tokens that are among them
    shared: float | None  # the same for the shared adapter's vocabulary, where it has one


def coverage(store: Store, name: str) -> Coverage | None:
    """None where the expert has no vocabulary of its own, or no answer is kept. Raises StorageError."""
    own = _vocabulary(store, name)
    if own is None:
        return None
    records = store.replay.records(None if name == SHARED else name, limit=NEWEST)
    tokens = np.array([token for one in records for token in one.token_ids[one.num_prompt_tokens :]])
    if not len(tokens):
        return None
    general = None if name == SHARED else _vocabulary(store, SHARED)
    shared = None if general is None else float(np.isin(tokens, general).mean())
    return Coverage(len(own), float(np.isin(tokens, own).mean()), shared)


def _vocabulary(store: Store, name: str) -> NDArray[np.int32] | None:
    live = store.registry.live(name)
    found = store.adapters.vocabulary(live) if live else None
    return None if found is None else found.numpy()
