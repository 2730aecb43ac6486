"""Streams of prompts for `bench_streams.py`, on which the router is right, wrong, or cannot know."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from choosers import KnownRouter, PromptClassifier, answers, choosing
from feature_answers import first_prompts, prompts_of
from reworded import KINDS

from moedraft.core import SHARED
from moedraft.routing.router import Router
from moedraft.system.build import System

FEW = 4  # arms, in the stream with few of them
MANY = (8, 16, 64)
REWORDED = ("translated", "framed", "typos", "noise")
FEW_ORIGINS = 60  # examples of a domain, those that come first in the data, from one or two sources
DECOYED = 0.3  # what the router's probabilities leave to decoys

Owners = list[tuple[int, str]]  # from which token of an answer on whose expert is the right one


@dataclass
class Part:
    """Prompts that one router and one set of arms serve."""

    prompts: list[str]
    router: Router
    arms: list[str]
    owners: list[Owners] = field(default_factory=list)
    scripts: list[list[int]] = field(default_factory=list)  # by prompt, the tokens to be answered


class Streams:
    """Builds the streams for one home."""

    def __init__(self, system: System, args: argparse.Namespace, folder: Path) -> None:
        self.system, self.args, self.folder = system, args, folder
        self.names: list[str] = []
        self.prompts: dict[str, list[str]] = {}
        self.sources: dict[str, str] = {}  # by domain of the home, that of the data
        for each in args.domains.split(","):
            name, _, expert = each.partition("=")
            self.names.append(expert or name)
            self.sources[self.names[-1]] = name
            self.prompts[self.names[-1]] = prompts_of(args.data, name, "dev", args.heldout)
        missing = [name for name in self.names if name not in system.bank.experts]
        if missing:
            raise SystemExit(f"The home has no trained expert for {', '.join(missing)}.")

    @property
    def arms(self) -> list[str]:
        return [SHARED, *self.names]

    def labelled(self, names: Sequence[str] | None = None) -> tuple[list[str], list[Owners]]:
        """Prompts of the domains in turns, and whose they are."""
        pairs = [(p, n) for n in names or self.names for p in self.prompts[n]]
        random.Random(0).shuffle(pairs)
        return [prompt for prompt, _ in pairs], [[(0, name)] for _, name in pairs]

    def known(self, prompts: Sequence[str], turned: bool = False, names: Sequence[str] = ()) -> KnownRouter:
        names = list(names or self.names)
        other = dict(zip(names, [*names[1:], names[0]], strict=True)) if turned else {}
        return KnownRouter(self.system.router, prompts, other)

    def plain(self) -> list[Part]:
        prompts, owners = self.labelled()
        return [Part(prompts, self.known(prompts), self.arms, owners)]

    def reworded(self, kind: str) -> list[Part]:
        prompts, owners = self.labelled()
        prompts = [KINDS[kind](prompt, random.Random(prompt)) for prompt in prompts]
        return [Part(prompts, self.known(prompts), self.arms, owners)]

    def few_origins(self) -> list[Part]:
        """With a router fitted on examples of few origins, from which the prompts differ in wording."""
        router = Router(self.system.router.embedder, self.folder / "few", self.system.router.threshold)
        router.fit(
            {name: first_prompts(self.args.data, self.sources[name], FEW_ORIGINS) for name in self.names}
        )
        prompts, owners = self.labelled()
        return [Part(prompts, KnownRouter(router, prompts, {}), self.arms, owners)]

    def permuted(self) -> list[Part]:
        prompts, owners = self.labelled()
        return [Part(prompts, self.known(prompts, turned=True), self.arms, owners)]

    def _pairs(self) -> Iterator[tuple[str, str, str, str]]:
        """Two domains, and a prompt of either."""
        for step, first in enumerate(self.names):
            second = self.names[(step + 1) % len(self.names)]
            other = self.prompts[second]
            for i, prompt in enumerate(self.prompts[first]):
                yield first, second, prompt, other[(i + 1) % len(other)]

    def two_in_a_prompt(self) -> list[Part]:
        prompts = [f"{one}\n\n{two}" for _, _, one, two in self._pairs()]
        return [Part(prompts, self.known(prompts), self.arms)]

    def change(self) -> list[Part]:
        """Half of the one prompt's answer, then half of the other's."""
        pairs, half = list(self._pairs()), self.args.max_tokens // 2
        wanted = sorted({prompt for _, _, *both in pairs for prompt in both})
        choosing(self.system, PromptClassifier(self.known(wanted)))
        found = answers(self.system, wanted, [SHARED] * len(wanted), half)
        texts = {prompt: self._unended(o.token_ids) for prompt, o in zip(wanted, found, strict=True)}
        prompts = [one for _, _, one, _ in pairs]
        scripts = [texts[one] + texts[two] for _, _, one, two in pairs]
        owners = [[(0, first), (len(texts[one]), second)] for first, second, one, _ in pairs]
        return [Part(prompts, self.known(prompts), self.arms, owners, scripts)]

    def _unended(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self.system.engine.eos_token_ids]

    def no_domain(self) -> list[Part]:
        prompts = [
            prompt
            for name in self.args.nowhere.split(",")
            for prompt in prompts_of(self.args.data, name, "dev", self.args.heldout)
        ]
        return [Part(prompts, self.known(prompts), self.arms, [[(0, SHARED)] for _ in prompts])]

    def before_registration(self) -> list[Part]:
        """Each domain in turn is the one that nobody knows."""
        known = {domain.name: list(domain.examples) for domain in self.system.store.registry.domains()}
        parts = []
        for name in self.names:
            router = Router(self.system.router.embedder, self.folder / name, self.system.router.threshold)
            router.fit({other: examples for other, examples in known.items() if other != name})
            prompts, arms = self.prompts[name], [arm for arm in self.arms if arm != name]
            parts.append(
                Part(prompts, KnownRouter(router, prompts, {}), arms, [[(0, SHARED)] for _ in prompts])
            )
        return parts

    def few_arms(self, turned: bool) -> list[Part]:
        names = self.names[: FEW - 1]
        prompts, owners = self.labelled(names)
        return [Part(prompts, self.known(prompts, turned, names), [SHARED, *names], owners)]

    def many_arms(self, count: int, turned: bool) -> list[Part]:
        prompts, owners = self.labelled()
        router = self.known(prompts, turned)
        decoys = [f"decoy-{i}" for i in range(count - len(self.arms))]
        for prompt, route in router.known.items():
            shares = {name: (1 - DECOYED) * p for name, p in route.probabilities.items()}
            shares |= dict.fromkeys(decoys, DECOYED / max(1, len(decoys)))
            router.known[prompt] = replace(route, probabilities=shares)
        return [Part(prompts, router, [*self.arms, *decoys], owners)]

    def all(self) -> dict[str, Callable[[], list[Part]]]:
        made: dict[str, Callable[[], list[Part]]] = {
            "labelled": self.plain,
            **{kind: lambda kind=kind: self.reworded(kind) for kind in REWORDED},  # type: ignore[misc]
            "few origins": self.few_origins,
            "permuted": self.permuted,
            "two in a prompt": self.two_in_a_prompt,
            "change": self.change,
            "no domain": self.no_domain,
            "before registration": self.before_registration,
        }
        for turned in (False, True):
            before = "permuted " if turned else ""
            if len(self.names) >= FEW:
                made[f"{before}{FEW} arms"] = partial(self.few_arms, turned)
            for count in MANY:
                made[f"{before}{count} arms"] = partial(self.many_arms, count, turned)
        return made
