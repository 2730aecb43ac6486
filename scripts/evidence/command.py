"""The command line: which runs there are, in which order, and where each one's file lies."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from feature_answers import TOPK

from evidence import comparable, document, plots
from evidence.answers import Answers
from evidence.arrangements import ARRANGEMENTS, Arrangement
from evidence.choosing import chosen
from evidence.figures import Runs
from evidence.further import KeptFurther
from evidence.parts import PARTS, QUICK
from evidence.prompts import Domain, Query, load_domain, reworded
from evidence.running import AtEnd, Bench, Plan, Served, run
from evidence.streams import FAMILIAR, ONLY, TRAINED_ON, Traffic, traffic
from moedraft.config import Settings, load_settings
from moedraft.distill.assembly import WHOLE
from moedraft.distill.features.expert_vocabularies import OWN_TOKENS
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.joint.plan import JointPlan
from moedraft.drafting.base import draft_name, feature_folder, load_feature_base
from moedraft.feature.model import FeatureDraft
from moedraft.models import load_model
from moedraft.routing.embedder import Embedder
from moedraft.routing.router import Route, Router
from moedraft.selecting.contest import LEAST_WEIGHT, TRUSTED

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja"
RESAMPLED: int = Settings.model_fields["resampled_answers"].default


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evidence.py", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the results, such as results/evidence"
    )
    parser.add_argument(
        "--doc", type=Path, help="the page to write; default: evidence.md in the folder --out"
    )
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/moedraft-evidence").expanduser())
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the main contrasts in a quarter of an hour, without further answers",
    )
    usual = "main,further,poison,objectives,interval,paper"
    parser.add_argument("--parts", default=usual, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--patterns", help="only these, separated by commas")
    parser.add_argument("--arrangements", help="only these, separated by commas")
    parser.add_argument(
        "--only-write", action="store_true", help="run nothing; write plots and document anew"
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", help="of any kind; default: the one that is shipped for the target")
    precisions = ("auto", "float32", "bfloat16")
    parser.add_argument("--dtype", default="auto", choices=precisions, help="of the target, as in `serve`")
    strengths = "factor on what published adapters add; 1: as learned; default: as a trainer publishes"
    parser.add_argument("--strength", type=float, help=strengths)
    lists = "of an expert's list, with a feature drafter; default: as a trainer chooses"
    parser.add_argument("--own-tokens", type=int, default=OWN_TOKENS, help=lists)
    again = "further answers to a prompt that are learned from, with a feature drafter; default: as a trainer"
    parser.add_argument("--resampled", type=int, default=RESAMPLED, help=again)
    parser.add_argument("--domains", default=DOMAINS)
    parser.add_argument("--requests", type=int, default=160, help="of a run")
    parser.add_argument("--heldout", type=int, default=40, help="prompts a domain to measure with")
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    for name, value in dataclasses.asdict(Plan()).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="see Plan")
    args = parser.parse_args(given)
    if args.strength is not None and not 0 < args.strength <= 1:
        parser.error("--strength is above 0 and at most 1.")
    if args.own_tokens < 1:
        parser.error("--own-tokens is 1 at least.")
    if args.resampled < 0:
        parser.error("--resampled is 0 at least.")
    args.doc = args.doc or args.out / "evidence.md"
    if args.quick:
        if args.parts != usual:
            parser.error("--quick is a part by itself; leave out --quick or --parts.")
        args.parts = "quick"
        vars(args).update(
            {name: v for name, v in QUICK.items() if getattr(args, name) == parser.get_default(name)}
        )
    return args


def jobs(args: argparse.Namespace) -> list[tuple[int, str, str]]:
    """Seed, pattern and arrangement of each run; all of one seed before the next."""
    given = (args.parts, args.patterns, args.arrangements)
    wanted = chosen(*(names.split(",") if names else [] for names in given))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    # The static draft does not depend on the seed of anything but the order of the stream.
    return [(seed, *job) for seed in seeds for job in wanted]


class Workplace:
    """Models, prompts and router, loaded once for all runs."""

    def __init__(self, args: argparse.Namespace, temperature: float = 0.0, topk: int = TOPK) -> None:
        """Of the target's answers, the temperature, where 0 is greedy, and what is kept of probabilities."""
        self.args = args
        self.plan = Plan(**{name: getattr(args, name) for name in dataclasses.asdict(Plan())})
        self.bench = _bench(args, self.plan, temperature, topk)
        self.domains = [load_domain(args.data, name, args.heldout) for name in args.domains.split(",")]
        self.embedder = Embedder()
        self._routed: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Route]] = {}

    @property
    def precision(self) -> str:
        """Of the target, such as "float32"."""
        return str(self.bench.target.dtype).removeprefix("torch.")

    @property
    def manner(self) -> comparable.Manner:
        """How runs are made here, beside what `settings` tells."""
        further = len(self.bench.further.more) if self.bench.further else 0
        has_lists = isinstance(self.bench.draft, FeatureDraft)
        rate = None if has_lists else comparable.text_rate(self.bench.plan.steps)
        strength, size = self.bench.strength, self.args.own_tokens
        return comparable.Manner(self.precision, strength, size, further, has_lists, rate)

    def run(
        self, pattern: str, arrangement: str | Arrangement, seed: int, at_end: AtEnd | None = None
    ) -> dict[str, Any]:
        """at_end: see `running.run`."""
        domains = self.domains_of(pattern)
        stream = traffic(pattern, domains, self.args.requests, seed)
        held = self.held_out(pattern, stream, domains)
        by_router = self.route(stream.registered, [query.prompt for query in stream.queries])
        routed = [query.pinned or name for query, name in zip(stream.queries, by_router, strict=True)]
        one = arrangement if isinstance(arrangement, Arrangement) else ARRANGEMENTS[arrangement]
        alone = pattern.startswith(ONLY) and isinstance(self.bench.draft, FeatureDraft)
        tell = alone and one.trainer is not None
        more: dict[str, Any] = {"weights": self.weights(stream), "tell_tokens": tell, "at_end": at_end}
        found = run(self.bench, one, stream, routed, held, seed, **more)
        words = {
            "pattern": pattern,
            "arrangement": one.name,
            "seed": seed,
            "settings": settings(self.args),
            "precision": self.precision,
        }
        marks = {"absent": stream.absent, "turns": stream.turns, "newcomer": stream.newcomer}
        return words | marks | found

    def domains_of(self, pattern: str) -> list[Domain]:
        """Those of the settings; and one more that the pattern is of, or has, if it is none of them."""
        only = TRAINED_ON if pattern == FAMILIAR else pattern.removeprefix(ONLY)
        more = [] if only == pattern or only in self.args.domains.split(",") else [only]
        return [*self.domains, *(load_domain(self.args.data, name, self.args.heldout) for name in more)]

    def held_out(self, pattern: str, stream: Traffic, domains: Sequence[Domain]) -> list[Served]:
        queries = [
            Query(domain.name, prompt)
            for domain in domains
            for prompt in (reworded(domain.held_out) if pattern == "reworded" else domain.held_out)
            if not pattern.startswith(ONLY) or domain.name == pattern.removeprefix(ONLY)
        ]
        routed = self.route(stream.registered, [query.prompt for query in queries])
        return [Served(r, name) for r, name in zip(self.bench.answers.records(queries), routed, strict=True)]

    def route(self, registered: tuple[str, ...], prompts: Sequence[str]) -> list[str]:
        """The domain that the router sends each prompt to."""
        return [route.domain for route in self._routes(registered, prompts)]

    def weights(self, stream: Traffic) -> list[dict[str, float]]:
        """Whose text each request may be, by the router; nothing where it is sure, or the client said it.

        A server does so where it compared nothing; else it goes by what the experts guessed as well.
        """
        routes = self._routes(stream.registered, [query.prompt for query in stream.queries])
        return [
            {} if query.pinned or max(route.probabilities.values()) >= TRUSTED else _kept(route.probabilities)
            for query, route in zip(stream.queries, routes, strict=True)
        ]

    def _routes(self, registered: tuple[str, ...], prompts: Sequence[str]) -> list[Route]:
        key = registered, tuple(prompts)
        if key not in self._routed:
            router = Router(self.embedder, self.args.cache / "router" / "+".join(registered))
            known = [domain for name in registered for domain in self.domains_of(ONLY + name)]
            examples = {domain.name: domain.examples for domain in known if domain.name in registered}
            if not router.matches(examples):
                router.fit(examples)
            self._routed[key] = router.route(prompts)
        return self._routed[key]


def _kept(probabilities: Mapping[str, float]) -> dict[str, float]:
    return {name: share for name, share in probabilities.items() if share >= LEAST_WEIGHT}


def _bench(args: argparse.Namespace, plan: Plan, temperature: float, topk: int) -> Bench:
    target = load_model(args.target, "target", dtype=args.dtype)
    precision = str(target.dtype).removeprefix("torch.")
    name = draft_name(load_settings(target=args.target, draft=str(args.draft or "auto")))
    if feature_folder(name) is None:
        draft = load_model(name, "draft", dtype="float32", cpu_fast_paths=False)
        cache = args.cache / f"{Path(args.target).name}-{precision}"
        answers, strength = Answers(target, None, cache, args.max_tokens, temperature, topk), WHOLE
        return Bench(target, draft, answers, plan, args.strength or strength)
    base = load_feature_base(Path(name), target, torch.float32)
    states = RecordStates(target, base.hf, 2**28)
    # What is cached depends on both models.
    cache = args.cache / f"{Path(args.target).name}-{precision}-{base.weights_hash()[:12]}"
    answers = Answers(target, states, cache, args.max_tokens, temperature, topk)
    strength = JointPlan.strength
    further = KeptFurther(answers, args.resampled) if args.resampled else None
    return Bench(target, base.hf, answers, plan, args.strength or strength, args.own_tokens, further)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures of a run depend on. Runs of other settings are not to be mixed with it."""
    names = ("target", "domains", "requests", "heldout", "max_tokens", *dataclasses.asdict(Plan()))
    return {name: getattr(args, name) for name in names}


def outstanding(args: argparse.Namespace) -> Iterator[tuple[int, str, str, Path]]:
    """The runs that have no file yet. Exits where a file was made with other settings."""
    for seed, pattern, arrangement in jobs(args):
        file = args.out / "runs" / f"{pattern.replace(':', '-')}.{arrangement.replace(':', '-')}.{seed}.json"
        if not file.exists():
            yield seed, pattern, arrangement, file
        elif (before := json.loads(file.read_text(encoding="utf-8"))["settings"]) != settings(args):
            other = sorted(key for key in before if before[key] != settings(args).get(key))
            raise SystemExit(
                f"evidence.py: {file} was made with another {', '.join(other)}; name another --out."
            )


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    jobs(args)  # a name that is not known is told before anything else
    torch.set_num_threads(args.threads)
    if not args.only_write and not (args.data / "stream").is_dir():
        raise SystemExit(f"evidence.py: no stream/ folder in {args.data}; name the data with --data.")
    if not args.only_write:
        run_all(args)
    runs = Runs.read(args.out / "runs")
    if not runs.by_name:
        raise SystemExit(f"evidence.py: no run has finished yet in {args.out}.")
    pictures = plots.draw_all(runs, args.out)
    document.write(runs, args.out, args.doc, pictures)


def run_all(args: argparse.Namespace) -> None:
    """Every run that has no file yet; each writes its own as soon as it is done."""
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    workplace, code = None, commit()
    for seed, pattern, arrangement, file in outstanding(args):
        workplace = workplace or Workplace(args)
        comparable.check(args.out, pattern, workplace.manner)
        began = time.monotonic()
        found = workplace.run(pattern, arrangement, seed)
        made = {
            "machine": platform.machine(),
            "torch": torch.__version__,
            "commit": code,
            "seconds": round(time.monotonic() - began),
        }
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(found | made, separators=(",", ":")) + "\n", encoding="utf-8")
        scratch.rename(file)
        print(f"{pattern}, {arrangement}, seed {seed}: {made['seconds']} s", flush=True)


def commit() -> str:
    """Of the code, short; empty where there is no git. Changes that are not committed are not told."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    try:
        said = subprocess.run(
            asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
