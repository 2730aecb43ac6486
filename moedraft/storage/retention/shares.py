"""How much of a domain's replay one client may have, and how records are drawn so that none dominates.

A client can choose the domain of its requests, and so put what it likes into any domain's replay. Therefore
one source (a key) has at most half of a full buffer and of a sample, and records whose domain the client
chose at most a quarter. In a buffer either may have more where others leave room; of what is drawn, one
source never has more than all others together, but for a few records. Knows no database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

COPIES = 4  # records of one client with the same prompt in one domain that are kept when it is full, or drawn
SOURCE_SHARE = 2  # one source has at most 1 / 2
PINNED_SHARE = 4  # records whose domain the client chose have at most 1 / 4
LEAST_TAUGHT = 32  # records of one source that are learned from, though others give fewer


class Held(NamedTuple):
    """What the shares depend on in a record."""

    id: int
    source: str
    pinned: bool
    prompt: int | None = None  # a hash of it; None: unlike all others


def few_copies(held: Iterable[Held]) -> list[Held]:
    """Of each client's records with the same prompt the first COPIES; `held` are those of one domain."""
    seen, chosen = Counter[tuple[str, int]](), list[Held]()
    for one in held:
        if one.prompt is not None:
            seen[one.source, one.prompt] += 1
        if one.prompt is None or seen[one.source, one.prompt] <= COPIES:
            chosen.append(one)
    return chosen


def one_of_each_prompt(held: Iterable[Held]) -> list[Held]:
    """The first record of each prompt, whosever it is; `held` are those of one domain."""
    firsts: dict[int | tuple[int], Held] = {}
    for one in held:
        firsts.setdefault((one.id,) if one.prompt is None else one.prompt, one)
    return list(firsts.values())


def draw(held: list[Held], n: int, random: Random) -> list[int]:
    """Ids of `n` different records in random order, drawn uniformly as far as `of_many` allows."""
    chosen = of_many(random.sample(held, len(held)), n, LEAST_TAUGHT)
    return random.sample(chosen, len(chosen))


def of_many(held: Sequence[Held], n: int, least: int) -> list[int]:
    """As `within_shares`, but the key with the most records gives no more than all others, or `least`.

    Its further records are left out, and nothing takes their place. So it is only where several keys give
    some: records without a key are the operator's, or come from a server without keys.
    """
    sources = {one.id: one.source for one in held}
    chosen = within_shares(held, n)
    keys = Counter(sources[number] for number in chosen if sources[number])
    if len(keys) < 2:
        return chosen
    loud, count = keys.most_common(1)[0]
    own = [number for number in chosen if sources[number] == loud]
    dropped = set(own[max(least, len(chosen) - count) :])
    return [number for number in chosen if number not in dropped]


def within_shares(held: Iterable[Held], n: int) -> list[int]:
    """Ids of the first `n` records, as far as the shares allow.

    What the shares leave open is filled with the first of the others, those of a chosen domain last.
    """
    chosen, others, taken, pinned = list[int](), list[Held](), Counter[str](), 0
    for one in held:
        too_many = taken[one.source] >= -(-n // SOURCE_SHARE)
        if too_many or (one.pinned and pinned >= -(-n // PINNED_SHARE)):
            others.append(one)
        else:
            chosen.append(one.id)
            taken[one.source] += 1
            pinned += one.pinned
    others.sort(key=lambda one: one.pinned)
    return [*chosen, *(one.id for one in others)][:n]


def even_shares(sizes: dict[str, int], n: int) -> dict[str, int]:
    """How many of `n` each domain gives: the same number, or all it has where that is less."""
    shares, left = dict[str, int](), n
    for done, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        shares[name] = min(size, left // (len(sizes) - done))
        left -= shares[name]
    return shares
