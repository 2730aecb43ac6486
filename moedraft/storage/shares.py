"""How much of a domain's replay one client may have, and how records are drawn so that none dominates.

A client can choose the domain of its requests, and so put what it likes into any domain's replay. Therefore
one source (a key) has at most half of a full buffer and of a sample, and records whose domain the client
chose at most a quarter. Where others leave room, either may fill it. Knows no database.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

SOURCE_SHARE = 2  # one source has at most 1 / 2
PINNED_SHARE = 4  # records whose domain the client chose have at most 1 / 4


class Held(NamedTuple):
    """A record as it matters here."""

    id: int
    source: str
    pinned: bool


def draw(held: list[Held], n: int, random: Random) -> list[int]:
    """Ids of `n` different records in random order; all of them where there are fewer.

    Uniformly, as far as the shares allow; what they leave open is filled with the others, those of a chosen domain last.
    """
    if len({(one.source, one.pinned) for one in held}) <= 1:  # nobody to protect from anybody
        return [one.id for one in random.sample(held, min(n, len(held)))]
    chosen, others, taken, pinned = list[int](), list[Held](), dict[str, int](), 0
    for one in random.sample(held, len(held)):
        mine = taken.get(one.source, 0)
        if mine >= -(-n // SOURCE_SHARE) or (one.pinned and pinned >= -(-n // PINNED_SHARE)):
            others.append(one)
        else:
            chosen.append(one.id)
            taken[one.source], pinned = mine + 1, pinned + one.pinned
    others.sort(key=lambda one: one.pinned)
    chosen = [*chosen, *(one.id for one in others)][:n]
    return random.sample(chosen, len(chosen))


def even_shares(sizes: dict[str, int], n: int) -> dict[str, int]:
    """How many of `n` each domain gives: the same number, or all it has where that is less."""
    shares, left = dict[str, int](), n
    for done, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        shares[name] = min(size, left // (len(sizes) - done))
        left -= shares[name]
    return shares
