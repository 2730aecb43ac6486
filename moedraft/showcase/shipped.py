"""The prompts that come with moedraft: examples to register with, a mixed stream, held-out prompts."""

from __future__ import annotations

import importlib.resources
import json
import random
from dataclasses import dataclass, replace
from typing import Any

# The domains of the demo on a real model: what the shipped drafter knows, and what it has never seen.
CHOSEN = ("general", "math", "python", "sql", "docs-de", "docs-fr", "docs-ja", "support")
REGISTERED = 20  # of each chosen domain's examples
STREAMED = 16  # of its examples, that the router was not fitted on; the rest is held out
HELD_OUT = 8  # prompts of each chosen domain, at most


@dataclass(frozen=True)
class Query:
    """A prompt, and the domain it was written for. The system never sees that domain."""

    prompt: str
    domain: str
    max_tokens: int


@dataclass(frozen=True)
class DemoPrompts:
    """What a demo needs: no prompt is in two of these."""

    examples: dict[str, list[str]]  # by domain, to register with
    stream: list[Query]  # in the order in which it is served
    heldout: list[Query]  # one of each domain after the other, so that any beginning has all of them

    def shortened(self, requests: int | None, per_domain: int | None) -> DemoPrompts:
        """With fewer requests in the stream, and fewer held-out prompts of each domain."""
        heldout = in_turns(grouped(self.heldout, per_domain))
        return DemoPrompts(self.examples, self.stream[:requests], heldout)


def examples() -> dict[str, list[str]]:
    """Example prompts by domain name, of the domains that the stream and the held-out prompts are of."""
    served = {query.domain for query in heldout()}
    return {name: prompts for name, prompts in _all_examples().items() if name in served}


def traffic() -> list[Query]:
    """The mixed stream of 360 prompts, in the order in which it is served."""
    return _queries("traffic.jsonl")


def heldout() -> list[Query]:
    """The 60 prompts for measurements before and after learning."""
    return _queries("heldout.jsonl")


def everything() -> DemoPrompts:
    """All fifteen domains, for the quick demo on the embedded pair."""
    return DemoPrompts(examples(), traffic(), in_turns(grouped(heldout())))


def chosen(names: tuple[str, ...] = CHOSEN) -> DemoPrompts:
    """The domains of the demo on a real model, with some of their examples in the stream or held out."""
    found = _all_examples()
    streams = grouped(traffic() + _queries("support-traffic.jsonl"))
    held = grouped(heldout() + _queries("support-heldout.jsonl"))
    stream, kept = {}, {}
    for name in names:
        more = [Query(prompt, name, held[name][0].max_tokens) for prompt in found[name][REGISTERED:]]
        if name != "support":  # which has enough prompts of its own
            streams[name] += more[:STREAMED]
            held[name] += more[STREAMED:]
        stream[name], kept[name] = streams[name], held[name][:HELD_OUT]
    longest = min(map(len, stream.values()))  # of the same length, so that the mix stays the same
    mixed = in_turns({name: queries[:longest] for name, queries in stream.items()}, shuffle=True)
    return DemoPrompts({name: found[name][:REGISTERED] for name in names}, mixed, in_turns(kept))


def with_short_answers(queries: list[Query], max_tokens: int) -> list[Query]:
    """The same prompts with answers of at most so many tokens."""
    return [replace(query, max_tokens=min(query.max_tokens, max_tokens)) for query in queries]


def grouped(queries: list[Query], most: int | None = None) -> dict[str, list[Query]]:
    """Queries by domain, at most so many of each."""
    groups: dict[str, list[Query]] = {}
    for query in queries:
        groups.setdefault(query.domain, []).append(query)
    return {name: groups[name][:most] for name in sorted(groups)}


def in_turns(groups: dict[str, list[Query]], *, shuffle: bool = False) -> list[Query]:
    """One query of each domain after the other; with `shuffle` in another order in each round."""
    rng, mixed = random.Random(0), []
    for number in range(max(map(len, groups.values()), default=0)):
        turn = [group[number] for group in groups.values() if number < len(group)]
        mixed += rng.sample(turn, len(turn)) if shuffle else turn
    return mixed


def _all_examples() -> dict[str, list[str]]:
    folder = importlib.resources.files("moedraft.data") / "domains"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".jsonl")), key=lambda f: f.name)
    return {file.name.removesuffix(".jsonl"): [row["prompt"] for row in _rows(file)] for file in files}


def _queries(name: str) -> list[Query]:
    rows = _rows(importlib.resources.files("moedraft.data") / name)
    return [Query(row["prompt"], row["true_domain"], row["max_tokens"]) for row in rows]


def _rows(file: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
