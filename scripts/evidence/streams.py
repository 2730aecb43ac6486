"""Patterns of traffic: in which order requests of which domain come. Arrangements do not see the domains."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evidence.prompts import Domain, Query, reworded


@dataclass(frozen=True)
class Traffic:
    """The requests of one run, in order."""

    queries: tuple[Query, ...]
    registered: tuple[str, ...]  # domains that the router knows
    absent: tuple[str, ...] = ()  # domains that are in the traffic first, then not, see `turns`
    turns: tuple[int, ...] = ()  # numbers of requests at which the traffic changes
    newcomer: str = ""  # a domain that comes only from the first of `turns` on


Order = Callable[[list[str], int, random.Random], list[str]]  # domains, number of requests → domain of each


def steady(names: list[str], count: int, rng: random.Random) -> list[str]:
    """All domains in equal shares, mixed."""
    order = [names[i % len(names)] for i in range(count)]
    rng.shuffle(order)
    return order


def zipf(names: list[str], count: int, rng: random.Random) -> list[str]:
    """The k-th domain comes 1/k times as often as the first; which is first changes with the seed."""
    ranked = rng.sample(names, len(names))
    return rng.choices(ranked, [1 / (k + 1) for k in range(len(ranked))], k=count)


def one_by_one(names: list[str], count: int, rng: random.Random) -> list[str]:
    """One domain after another, in an order of the seed's."""
    return sorted_blocks(rng.sample(names, len(names)), count)


def sorted_blocks(names: Sequence[str], count: int) -> list[str]:
    return [names[min(i * len(names) // count, len(names) - 1)] for i in range(count)]


def drift(names: list[str], count: int, rng: random.Random) -> list[str]:
    """The shares move slowly, from mostly the first domains to mostly the last."""
    ranked, last = rng.sample(names, len(names)), len(names) - 1
    return [
        rng.choices(
            ranked, [max(0.02, 1 - abs(k - i * last / max(count - 1, 1)) / 1.5) for k in range(last + 1)]
        )[0]
        for i in range(count)
    ]


def shift_and_return(names: list[str], count: int, rng: random.Random) -> list[str]:
    """Half of the domains, then the other half, then the first again; a third of the requests each."""
    first, second = halves(names)
    third = count // 3
    return steady(first, third, rng) + steady(second, third, rng) + steady(first, count - 2 * third, rng)


def halves(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every other domain."""
    return list(names[::2]), list(names[1::2])


def late(names: list[str], count: int, rng: random.Random) -> list[str]:
    """All but the last domain at first; from the middle on the last is half of the traffic."""
    *known, new = names
    begin, rest = count // 2, count - count // 2
    order = [new] * (rest // 2) + steady(known, rest - rest // 2, rng)
    rng.shuffle(order)
    return steady(known, begin, rng) + order


NOISE, LABELS, FLOOD = "poison-noise", "poison-labels", "poison-flood"
POISONED = (NOISE, LABELS, FLOOD)
POISONER = "poisoner"  # the client that every third request of these patterns comes from

CROSSED = "crossed"
FAMILIAR, TRAINED_ON = "familiar", "general_en"  # one more domain, which the shipped drafter was trained on

ORDERS: Mapping[str, Order] = {
    "steady": steady,
    "one-by-one": one_by_one,
    "new-domain": late,
    "shift": shift_and_return,
    "zipf": zipf,
    "drift": drift,
    "unregistered": steady,
    "reworded": steady,
    CROSSED: steady,
    FAMILIAR: steady,
    **dict.fromkeys(POISONED, steady),
}
TITLES = {
    "steady": "steady mix",
    "one-by-one": "one domain after another",
    "new-domain": "a new domain from the middle on",
    "shift": "sharp shift and return",
    "zipf": "shares by Zipf's law",
    "drift": "slow drift",
    "unregistered": "a domain that nobody registered",
    "reworded": "reworded prompts",
    FAMILIAR: "steady mix with a domain that the drafter was trained on",
    CROSSED: "prompts whose second half is of another domain",
    NOISE: "a client that sends random letters under the name of any domain",
    LABELS: "a client that sends each prompt under the name of another domain",
    FLOOD: "a client that sends one prompt again and again",
}
ONLY = "only:"  # a pattern of one domain alone: "only:sql_en"


def title_of(pattern: str) -> str:
    return f"{pattern.removeprefix(ONLY)} alone" if pattern.startswith(ONLY) else TITLES[pattern]


def heading_of(pattern: str) -> str:
    """Its title as the beginning of a sentence."""
    title = title_of(pattern)
    return title[:1].upper() + title[1:]


def traffic(pattern: str, domains: Sequence[Domain], count: int, seed: int) -> Traffic:
    """`count` requests of this pattern. No prompt comes twice unless a domain has too few."""
    rng, names = random.Random(f"{pattern}:{seed}"), [domain.name for domain in domains]
    if pattern.startswith(ONLY):
        return Traffic(_asked([pattern.removeprefix(ONLY)] * count, domains, seed, False), tuple(names))
    order = ORDERS[pattern](names, count, rng)
    queries = _asked(order, domains, seed, pattern == "reworded")
    if pattern == CROSSED:
        others = rng.sample(queries, len(queries))
        queries = tuple(_crossed(*pair) for pair in zip(queries, others, strict=True))
    if pattern in POISONED:
        queries = _poisoned(pattern, queries, names, rng)
    registered = tuple(names[:-1] if pattern == "unregistered" else names)
    if pattern == "shift":
        return Traffic(queries, registered, tuple(halves(names)[0]), (count // 3, 2 * (count // 3)))
    if pattern == "new-domain":
        return Traffic(queries, registered, turns=(count // 2,), newcomer=names[-1])
    if pattern == "one-by-one":
        turns = tuple(i for i in range(1, count) if order[i] != order[i - 1])
        return Traffic(queries, registered, turns=turns)
    return Traffic(queries, registered)


def _asked(order: list[str], domains: Sequence[Domain], seed: int, reword: bool) -> tuple[Query, ...]:
    prompts = {
        domain.name: _endless(domain.served, order.count(domain.name), seed, reword) for domain in domains
    }
    return tuple(Query(name, next(prompts[name])) for name in order)


def _crossed(query: Query, other: Query) -> Query:
    """The first half of one prompt, and the second half of another; the domain is that of the first."""
    one, two = query.prompt, other.prompt
    return replace(query, prompt=f"{one[: len(one) // 2]}\n{two[len(two) // 2 :]}")


def _poisoned(
    pattern: str, queries: Sequence[Query], names: list[str], rng: random.Random
) -> tuple[Query, ...]:
    """Every third query is the poisoner's instead."""

    def poison(number: int, query: Query) -> Query:
        if pattern == FLOOD:
            return replace(queries[2], source=POISONER)
        other = names[(names.index(query.domain) + 1 + number % (len(names) - 1)) % len(names)]
        prompt = _letters(rng) if pattern == NOISE else query.prompt
        return Query(query.domain, prompt, POISONER, other)

    return tuple(poison(i, query) if i % 3 == 2 else query for i, query in enumerate(queries))


def _letters(rng: random.Random) -> str:
    """Words that are none."""
    return " ".join("".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9))) for _ in range(30))


def _endless(served: Sequence[str], wanted: int, seed: int, reword: bool) -> Iterator[str]:
    """The first `wanted` prompts in the seed's order: seeds share the prompts, whose answers are dear."""
    chosen = list(served[: max(wanted, 1)])
    random.Random(seed).shuffle(chosen)
    chosen = reworded(chosen) if reword else chosen
    while True:
        yield from chosen
