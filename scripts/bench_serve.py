#!/usr/bin/env python3
r"""Measure the server under load: plain decoding, lookup, a generic draft, experts, experts that learn.

All but the first look drafts up in the text as well, but not in earlier answers: prompts come again from load
to load and would be guessed from their own answers (`bench_experts.py` measures that on new prompts).
`lookup` does nothing else; the difference to it is what a draft model adds.

    moedraft demo --target mini --home H            # experts to measure with
    python scripts/bench_serve.py --home H --out results/serve.json
    python scripts/bench_serve.py --home H --out results/serve_learning.json --load 0.4 --instances 3 \
        --rounds 14 --open-rounds 20 --requests 32 \
        --systems "nothing kept" "nothing kept again" "experts + learning"

The servers run side by side on copies of the home and take turns at every load, so that noise hits all alike.
Only the one whose turn it is gets requests. Only then, and in the seconds of calm before, may its trainer
learn; `met_update` counts the loads that began in the middle of an update. All loads send shipped prompts of
mixed languages:

    streams     `--streams` clients, each of which sends its next request when the last one is answered
    saturated   the same with four times as many clients
    poisson     an open loop: random arrivals, at the share `--load` of the rate that the first system reaches
    bursty      the same rate in bursts (gamma arrivals, coefficient of variation 2)

Reported for each system and load are tokens per second, tokens per piece, failed requests, and p50 and p99 in
milliseconds of: the time to the first token; the gap between two pieces of a stream (a piece is what one step
gives, one token or several); the time per token after the first one of a request; the time of whole requests.

Ratios are medians over the rounds. Percentiles are taken over all rounds together, since the slowest
hundredth of one round's gaps is only five gaps. `p99_against_first` is the ratio of a system's p99 to that
of the first system, with a 95 % interval from bootstrapping over the rounds.

What learning costs (the third command above) is measured on one and the same server, with learning, and
with learning paused and requests that may not be kept. Two servers would not do: they differ by up to a
twentieth for as long as they live, depending on where their weights lie in memory, and experts that have
learned draft longer, which is no cost of learning. "nothing kept again" is the same as "nothing kept", so
its ratios show the noise of the machine. `--instances` starts several servers of each kind, which are used
in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
from scipy.stats import bootstrap
from serve_loads import TIMES, Load, Trace, arrivals, closed, mixed, opened

from moedraft.storage.store import Store

CALM = 4.0  # seconds of rest before each load, long enough for a trainer to see that it may begin


@dataclass(frozen=True)
class System:
    """A kind of server, and what happens in its turn."""

    server: str  # its kind; systems with the same kind share the servers
    environment: dict[str, str]
    home: bool = True  # start on a copy of the home instead of an empty one
    trainer: bool = False  # the server runs a trainer
    learns: bool = False  # the trainer may work in this system's turn
    keeps: bool = True  # requests may be learned from


NO_DRAFT = {"MOEDRAFT_NUM_SPECULATIVE_TOKENS": "0", "MOEDRAFT_MAX_SPECULATIVE_TOKENS": "0"}
SYSTEMS = {
    "plain": System("plain", NO_DRAFT, home=False),
    "lookup": System("lookup", {"MOEDRAFT_DRAFT_SOURCE": "lookup"}, home=False),
    "generic draft": System("generic", {}, home=False),
    "experts": System("experts", {}),
    "experts + learning": System("learning", {}, trainer=True, learns=True),
    "nothing kept": System("learning", {}, trainer=True, keeps=False),
    "nothing kept again": System("learning", {}, trainer=True, keeps=False),
}
USUAL = ("plain", "lookup", "generic draft", "experts", "experts + learning")


@dataclass(frozen=True)
class Server:
    url: str
    home: Path
    trainer: bool

    def learn(self, on: bool) -> None:
        """Let the trainer work, or pause it."""
        if self.trainer:
            self._admin("POST", f"learning/{'resume' if on else 'pause'}")

    @property
    def trains(self) -> bool:
        state = self._admin("GET", "learning")
        return state["enabled"] and state["expert"] is not None and state["waits"] is None

    @property
    def starts(self) -> bool:
        """Whether the trainer's process is still starting."""
        state = self._admin("GET", "learning")
        return state["enabled"] and state["waits"] is None

    def _admin(self, method: str, path: str) -> dict[str, Any]:
        key = json.loads((self.home / "server.json").read_text())["key"]
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.request(method, f"{self.url}/admin/{path}", headers=headers).raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def running(system: System, home: Path, args: argparse.Namespace) -> Iterator[Server]:
    """Start a server in a process of its own on a free port, and stop it at the end."""
    command = [sys.executable, "-m", "moedraft", "serve", "--home", str(home), "--port", "0"]
    command += ["--learning" if system.trainer else "--no-learning", "--max-batch-size", str(args.streams)]
    command += ["--max-waiting", "4096", "--target", args.target, "--draft", args.draft]
    usual = {"OMP_NUM_THREADS": "1", "MOEDRAFT_LOOKUP_ANSWERS": "0"}
    environment = os.environ | usual | system.environment
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        found = home / "server.json"
        deadline = time.monotonic() + 120
        while not found.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench_serve: the server {system.server!r} did not start.")
            time.sleep(0.2)
        url = json.loads(found.read_text())["url"]
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.2)
        yield Server(url, home, system.trainer)
    finally:
        process.terminate()
        process.wait(30)


def measure(servers: dict[str, list[Server]], args: argparse.Namespace) -> dict[str, dict[str, list[Load]]]:
    """Loads by kind and system, a list of rounds each; each round uses one server of each system."""
    rounds = {"streams": args.rounds, "saturated": args.rounds}
    rounds |= {"poisson": args.open_rounds, "bursty": args.open_rounds}
    rounds = {kind: count for kind, count in rounds.items() if count}
    names, rate = list(args.systems), 0.0
    found: dict[str, dict[str, list[Load]]] = {kind: {name: [] for name in names} for kind in rounds}
    for number in range(max(rounds.values())):
        prompts = mixed(args.requests, args.seed + number)
        for kind in (kind for kind, count in rounds.items() if number < count):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                system = SYSTEMS[name]
                server = servers[system.server][number % args.instances]
                server.learn(system.learns)
                time.sleep(CALM)
                met = server.trains
                trace = Trace(prompts, args.max_tokens, system.keeps)
                if kind in ("streams", "saturated"):
                    streams = args.streams * (4 if kind == "saturated" else 1)
                    load = asyncio.run(closed(server.url, trace, streams))
                else:
                    gaps = arrivals(kind, rate, len(prompts), args.seed + number)
                    load = asyncio.run(opened(server.url, trace, gaps))
                server.learn(False)
                load.met_update = met
                found[kind][name].append(load)
                print(
                    f"round {number + 1}, {kind}, {name}: {load.tokens / load.seconds:.1f} tokens/s, "
                    f"{load.failed} failed",
                    flush=True,
                )
            rate = rate or args.load * len(prompts) / found["streams"][names[0]][0].seconds
    return found


def percentile(values: list[float], share: float) -> float:
    """p50 and p99 in milliseconds; nan if there are no values."""
    return round(1e3 * float(np.quantile(values, share, method="higher")), 2) if values else float("nan")


def p99_ratio(rounds: list[Load], base: list[list[Load]], name: str) -> dict[str, float]:
    """The p99 of `name` over all rounds against the base's. Rounds run in turns are drawn together."""

    def p99(loads: list[list[Load]], drawn: np.ndarray[Any, Any]) -> float:
        times = [several[i].times[name] for several in loads for i in drawn.astype(int)]
        return float(np.quantile(np.concatenate(times), 0.99, method="higher"))

    def ratio(drawn: np.ndarray[Any, Any]) -> float:
        return p99([rounds], drawn) / p99(base, drawn)

    numbers = np.arange(len(rounds))
    result = {"base_ms": round(1e3 * p99(base, numbers), 2), "ratio": round(ratio(numbers), 3)}
    if len(rounds) < 2:
        return result
    found = bootstrap((numbers,), ratio, vectorized=False, n_resamples=2000, method="percentile", rng=0)
    low, high = found.confidence_interval
    return {**result, "low": round(float(low), 3), "high": round(float(high), 3)}


def summary(loads: dict[str, list[Load]]) -> dict[str, Any]:
    """Per system; ratios against the first, plain decoding by default, round by round.

    Where others are the same as the first, ratios of the rest are against all these together.
    """
    result, first = {}, next(iter(loads))
    same = [name for name in loads if SYSTEMS[name] == SYSTEMS[first]]
    for name, rounds in loads.items():
        base = [loads[other] for other in ([first] if name in same else same)]
        rates = [load.tokens / load.seconds for load in rounds]
        theirs = [mean(load.tokens / load.seconds for load in each) for each in zip(*base, strict=True)]
        result[name] = {
            "tokens_per_second": round(median(rates), 2),
            "ratio": round(median(a / b for a, b in zip(rates, theirs, strict=True)), 3),
            "failed": sum(load.failed for load in rounds),
            "tokens_per_piece": round(
                sum(load.tokens for load in rounds) / max(1, sum(load.pieces for load in rounds)), 3
            ),
            "met_update": sum(load.met_update for load in rounds),
            "rounds": [round(rate, 2) for rate in rates],
        }
        for what in TIMES:
            values = [value for load in rounds for value in load.times[what]]
            result[name][f"{what}_ms"] = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        if name != first and all(load.times["latency"] for load in itertools.chain(rounds, *base)):
            result[name]["p99_against_first"] = {what: p99_ratio(rounds, base, what) for what in TIMES}
    return result


def learned(home: Path, since: float) -> dict[str, Any]:
    """What the trainer did in `home` from `since` on, seconds since the epoch."""
    store = Store.open(home, write=False)
    updates = [one for one in store.updates.recent(limit=10_000) if one.created_at > since]
    store.close()
    return {
        "updates": len(updates),
        "training_seconds": round(sum(one.seconds for one in updates), 1),
        "optimiser_steps": sum(one.steps for one in updates),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, required=True, help="a home whose experts have learned")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=USUAL)
    parser.add_argument("--target", default="mini")
    parser.add_argument("--draft", default="mini")
    parser.add_argument("--streams", type=int, default=8, help="also the largest batch")
    parser.add_argument("--requests", type=int, default=48, help="of one load")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--instances", type=int, default=1, help="servers of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--open-rounds", type=int, default=8, help="of the open loops")
    parser.add_argument(
        "--load", type=float, default=0.7, help="of the open loops, of the first system's capacity"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/serve.json"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not (args.home / "moedraft.db").is_file():
        raise SystemExit(f"bench_serve: no home at {args.home}; make one with `moedraft demo --home DIR`.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers as well
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        kinds = {SYSTEMS[name].server: SYSTEMS[name] for name in args.systems}
        servers: dict[str, list[Server]] = {kind: [] for kind in kinds}
        for (kind, system), number in itertools.product(kinds.items(), range(args.instances)):
            home = Path(folder) / f"{kind}-{number}"
            shutil.copytree(args.home, home) if system.home else home.mkdir()
            servers[kind].append(stack.enter_context(running(system, home, args)))
        for server in itertools.chain(*servers.values()):
            server.learn(False)
            while server.starts:
                time.sleep(0.2)
            asyncio.run(closed(server.url, Trace(mixed(args.streams, 99), 16), args.streams))  # warm up
        began = time.time()
        found = measure(servers, args)
        trainers = [learned(one.home, began) for one in servers.get("learning", [])]
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    figures = {kind: summary(loads) for kind, loads in found.items()}
    result = {
        "loads": figures,
        "learned": trainers,
        "settings": settings,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for kind, systems in figures.items():
        print(kind, {name: (one["tokens_per_second"], one["ratio"]) for name, one in systems.items()})


if __name__ == "__main__":
    main()
