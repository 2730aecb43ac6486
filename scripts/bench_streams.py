#!/usr/bin/env python3
"""Measure who should draft where the router is wrong or cannot know, on a home with learned experts.

    python scripts/bench_streams.py --home HOME --data ../shared/data --out results/streams.json

The streams:

    labelled             held-out prompts of the registered domains
    translated           the same, with their instruction in another language
    permuted             the same, with a router that takes every domain for another one
    two in a prompt      two requests of different domains in one prompt
    change               the answer to one prompt, in whose middle the answer to another domain's begins
    no domain            prompts that belong to none
    before registration  prompts of a domain that neither router nor experts know; the shared draft learned it
    4, 16, 64 arms       `labelled` and `permuted` with fewer experts, or with decoys beside them

A decoy is an expert with its parts put together wrongly: it is as large as the expert and guesses badly. The
router leaves three tenths of the probability to all decoys together.

In `change` the target's logits are overwritten so that the answer is the given text; everything else is as
ever, and the text begins and ends in the same way for all. Every fixed expert answers all prompts too. So for
each request the best one is known in hindsight, and what a way of choosing loses against it, its regret.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from choosers import (
    ChosenArms,
    Counts,
    FollowingOwner,
    KnownRouter,
    PromptClassifier,
    PromptEvidence,
    answers,
    choosing,
    lengths,
    rounded,
)
from feature_answers import prompts_of
from reworded import KINDS

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestOutput
from moedraft.drafting.adapter import Adapter
from moedraft.drafting.arm_judge import FeatureJudge
from moedraft.drafting.feature import FeatureDrafter
from moedraft.evidence import Proposal, Rows
from moedraft.routing.router import Router
from moedraft.routing.selector import BackgroundSelector
from moedraft.showcase.bench import surroundings
from moedraft.showcase.estimates import quotient, ratio
from moedraft.showcase.measure import warm_up
from moedraft.system.build import System, opened

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja,support"
NOWHERE = "general_en,medical_en,textbook_en"
FEW = 4  # arms, in the stream with few of them
MANY = (16, 64)
DECOYED = 0.3  # what the router's probabilities leave to decoys
FORCED = 1e4  # added to the logit of a token that is to come

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
        for each in args.domains.split(","):
            name, _, expert = each.partition("=")
            self.names.append(expert or name)
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

    def translated(self) -> list[Part]:
        prompts, owners = self.labelled()
        prompts = [KINDS["translated"](prompt, random.Random(prompt)) for prompt in prompts]
        return [Part(prompts, self.known(prompts), self.arms, owners)]

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
            "translated": self.translated,
            "permuted": self.permuted,
            "two in a prompt": self.two_in_a_prompt,
            "change": self.change,
            "no domain": self.no_domain,
            "before registration": self.before_registration,
        }
        for turned in (False, True):
            before = "permuted " if turned else ""
            if len(self.names) >= FEW:
                made[f"{before}{FEW} arms"] = lambda turned=turned: self.few_arms(turned)  # type: ignore[misc]
            for count in MANY:
                made[f"{before}{count} arms"] = (  # type: ignore[misc]
                    lambda count=count, turned=turned: self.many_arms(count, turned)
                )
        return made


def decoy(adapter: Adapter, rng: torch.Generator) -> Adapter:
    """As large as the expert, with each of its ranks added or taken away by chance."""
    deltas = {}
    for name, (a, b) in adapter.deltas.items():
        signs = torch.randint(0, 2, (len(a), 1), generator=rng).to(a) * 2 - 1
        deltas[name] = (a * signs, b)
    return Adapter(adapter.version, deltas, adapter.vocabulary)


@contextmanager
def decoys(system: System, arms: Sequence[str], names: Sequence[str]) -> Iterator[None]:
    """Inside, the bank has the decoys that are among `arms`, made from the experts `names` in turns."""
    bank, rng = system.bank, torch.Generator().manual_seed(0)
    new = [arm for arm in arms if arm not in bank.experts and arm != SHARED]
    made = {arm: decoy(bank.experts[names[i % len(names)]], rng) for i, arm in enumerate(new)}
    bank.take(bank.prepare(made))
    try:
        yield
    finally:
        bank.take(bank.prepare(dict.fromkeys(made)))


@contextmanager
def forced(system: System, scripts: dict[str, list[int]]) -> Iterator[None]:
    """Inside, the target answers each of these prompts with the given tokens."""
    engine_round = system.engine.round
    verify = engine_round.verify

    def overwritten(rows: Rows, proposal: Proposal, logits: torch.Tensor) -> Any:
        for b, row in enumerate(rows.sequences):
            coming = scripts[row.prompt][row.num_generated :][: logits.shape[1]]
            logits[b, range(len(coming)), coming] += FORCED
        return verify(rows, proposal, logits)

    engine_round.verify = overwritten
    try:
        yield
    finally:
        engine_round.verify = verify


def answered(
    system: System, part: Part, selector: BackgroundSelector, expert: str | None, args: argparse.Namespace
) -> list[RequestOutput]:
    before = system.engine.selector
    choosing(system, selector)
    scripts = dict(zip(part.prompts, part.scripts, strict=True)) if part.scripts else {}
    longest = [len(script) for script in part.scripts] or args.max_tokens
    with (
        forced(system, scripts) if scripts else nullcontext(),
        system.engine.chooser.using(source="model", fixed_length=args.draft_length),
    ):
        found = answers(system, part.prompts, [expert] * len(part.prompts), longest)
    selector.close()
    system.engine.selector = before
    if scripts:
        told = [list(output.token_ids) for output in found]
        assert told == part.scripts, "the target did not say what it was made to say"
    return found


class Alone:
    """What every arm gives that drafts all answers alone; the same prompts are answered once."""

    def __init__(self, system: System, args: argparse.Namespace) -> None:
        self.system, self.args = system, args
        self._known: dict[tuple[str, ...], Counts] = {}

    def lengths(self, part: Part, arm: str) -> Counts:
        key = (arm, str(part.scripts), *part.prompts)
        if key not in self._known:
            chosen = answered(self.system, part, PromptClassifier(part.router), arm, self.args)
            self._known[key] = lengths(chosen)
        return self._known[key]


def measured(
    system: System, judge: FeatureJudge, parts: list[Part], alone: Alone, args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per step of all ways over the parts of one stream, with what choosing took."""
    counts: dict[str, Counts] = {}
    best: Counts = []
    spent = 0.0
    total = 0.0
    for part in parts:
        arms = ChosenArms(judge, part.arms)
        ways: dict[str, BackgroundSelector] = {
            "classifier": PromptClassifier(part.router),
            "evidence": PromptEvidence(part.router, arms, time_share=None),
            "evidence as served": PromptEvidence(part.router, arms),
        }
        if part.owners:
            ways["owner"] = FollowingOwner(part.router, dict(zip(part.prompts, part.owners, strict=True)))
        real = [arm for arm in part.arms if not arm.startswith("decoy-")]
        with decoys(system, part.arms, [arm for arm in real if arm != SHARED]):
            fixed = {arm: alone.lengths(part, arm) for arm in real}
            best += [max(each, key=lambda one: one[0] / one[1]) for each in zip(*fixed.values(), strict=True)]
            counts.setdefault("shared", []).extend(fixed[SHARED])
            for name, selector in ways.items():
                before = system.engine.timer.select_seconds, system.engine.timer.step_seconds
                counts.setdefault(name, []).extend(lengths(answered(system, part, selector, None, args)))
                if name == "evidence":
                    spent += system.engine.timer.select_seconds - before[0]
                    total += system.engine.timer.step_seconds - before[1]
    counts["best fixed"] = best
    return {
        "prompts": len(best),
        "share_of_time": round(spent / total, 4),
        "ways": {
            name: {
                "tokens_per_step": rounded(ratio(each)),
                "times_best_fixed": rounded(quotient(each, best)),
                "times_owner": rounded(quotient(each, counts["owner"])) if "owner" in counts else None,
                "times_classifier": rounded(quotient(each, counts["classifier"])),
            }
            for name, each in counts.items()
        },
    }


def begun(settings: dict[str, str], file: Path) -> dict[str, Any]:
    """What an earlier run with the same settings has left in the file, to be gone on with."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if found.get("settings") == settings:
        return found
    return {"settings": settings, "date": datetime.now(UTC).date().isoformat(), "streams": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--home", type=Path, required=True, help="with learned experts; nothing is kept there"
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domains", default=DOMAINS, help="of the data, or NAME=EXPERT of the home")
    parser.add_argument("--nowhere", default=NOWHERE, help="of the data, domains that are not registered")
    parser.add_argument("--streams", help="only these, separated by commas")
    parser.add_argument("--heldout", type=int, default=12, help="prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--draft-length", type=int, default=4)
    args = parser.parse_args()
    settings = load_settings(home=args.home, target=args.target, draft=args.draft, selector="evidence")
    free = ("home", "data", "out", "streams")
    shown = {key: str(value) for key, value in vars(args).items() if key not in free}
    with opened(settings) as system, TemporaryDirectory() as folder:
        drafter = system.engine.chooser.model
        assert isinstance(drafter, FeatureDrafter), "the experts of a feature drafter alone can be compared"
        judge = FeatureJudge(drafter, system.bank)
        warm_up(system)
        versions = {name: system.bank.version(name) for name in (SHARED, *sorted(system.bank.experts))}
        report = begun(shown | {"versions": str(versions)}, args.out) | surroundings(system)
        made, alone = Streams(system, args, Path(folder)).all(), Alone(system, args)
        chosen = args.streams.split(",") if args.streams else list(made)
        if unknown := [name for name in chosen if name not in made]:
            raise SystemExit(f"There is no stream {', '.join(unknown)}; there are {', '.join(made)}.")
        for name in chosen:
            if name in report["streams"]:
                continue
            found = report["streams"][name] = measured(system, judge, made[name](), alone, args)
            print(f"{name}: {found['prompts']} prompts, comparing {found['share_of_time']:.1%} of the time")
            for way, each in found["ways"].items():
                print(f"  {way:20} {each['tokens_per_step']} × best {each['times_best_fixed']}", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
