#!/usr/bin/env python3
r"""What the server gives its users: plain decoding, lookup, a generic draft, experts, experts that learn.

All but the first look drafts up in the text as well; `lookup` does nothing else, so that what a draft model
adds can be told apart.

    moedraft demo --home H                          # experts to measure with
    python scripts/bench_serve.py --home H --out results/serve.json
    python scripts/bench_serve.py --home H --out results/serve_learning.json --load 0.4 --instances 3 \
        --rounds 15 --open-rounds 12 --requests 32 --systems experts "experts again" "experts + learning"

The servers run side by side on copies of the home and take turns, load by load, so that noise hits all
alike; only the one whose turn it is gets requests, and only then may its trainer learn. The loads are a
mixed-language trace of shipped prompts:

    streams     so many clients, each sending its next request when the last one is answered
    saturated   the same with four times as many
    poisson     an open loop: requests come when they come, at `--load` of what the first system takes
    bursty      the same rate in bursts (gamma arrivals, coefficient of variation 2)

Reported per system and load: tokens per second, failed requests, and in milliseconds, p50 and p99: time to
first token, gap between two pieces of a stream (a piece is what one step gives, one token or several), time
per token after the first (of one request), latency of whole requests.

Ratios are medians over the rounds. Percentiles are of all rounds together; of one round's gaps the slowest
hundredth is five. `p99_against_first` is the ratio of a system's p99 to the first's with an interval that
holds it in 95 of 100 cases, bootstrapped over the rounds. Two servers of the same kind differ by up to a
twentieth for as long as they live (where their weights happen to lie); `--instances` starts several of each,
used in turns. "experts again" is of the same kind as "experts": how far its ratios are from one is what the
machine does, not the system. What learning costs is measured with both (the second line above).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from scipy.stats import bootstrap

from moedraft.showcase import shipped
from moedraft.storage.store import Store

SYSTEMS: dict[str, dict[str, str]] = {
    "plain": {"MOEDRAFT_NUM_SPECULATIVE_TOKENS": "0", "MOEDRAFT_MAX_SPECULATIVE_TOKENS": "0"},
    "lookup": {"MOEDRAFT_DRAFT_SOURCE": "lookup"},  # on an empty home, as is the next
    "generic draft": {},
    "experts": {},
    "experts again": {},
    "experts + learning": {},
}
TIMES = ("ttft", "gap", "per_token", "latency")


@dataclass(frozen=True)
class Server:
    url: str
    home: Path
    learns: bool

    def learn(self, on: bool) -> None:
        """Let its trainer work, or hold it."""
        if not self.learns:
            return
        key = json.loads((self.home / "server.json").read_text())["key"]
        path = f"{self.url}/admin/learning/{'resume' if on else 'pause'}"
        httpx.post(path, headers={"Authorization": f"Bearer {key}"}).raise_for_status()


@dataclass
class Load:
    """What one load gave. Times in seconds."""

    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})


@contextmanager
def running(name: str, home: Path, args: argparse.Namespace) -> Iterator[Server]:
    """A server of its own process on a free port, stopped at the end."""
    learns = name == "experts + learning"
    command = [sys.executable, "-m", "moedraft", "serve", "--home", str(home), "--port", "0"]
    command += ["--learning" if learns else "--no-learning", "--max-batch-size", str(args.streams)]
    command += ["--max-waiting", "4096", "--target", args.target, "--draft", args.draft]
    environment = os.environ | SYSTEMS[name] | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        found = home / "server.json"
        deadline = time.monotonic() + 120
        while not found.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench_serve: the server of {name!r} did not start.")
            time.sleep(0.2)
        url = json.loads(found.read_text())["url"]
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.2)
        yield Server(url, home, learns)
    finally:
        process.terminate()
        process.wait(30)


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int, load: Load) -> None:
    """One streamed completion."""
    body = {
        "model": "mini",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = began = time.perf_counter()
    first, tokens = None, None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                now = time.perf_counter()
                if chunk.get("choices") and chunk["choices"][0].get("text"):
                    load.times["ttft" if first is None else "gap"].append(now - last)
                    first, last = first or now, now
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
    except httpx.HTTPError:
        tokens = None
    if tokens is None:
        load.failed += 1
        return
    load.tokens += tokens
    load.times["latency"].append(last - began)
    if first is not None and tokens > 1:
        load.times["per_token"].append((last - first) / (tokens - 1))


async def closed(url: str, prompts: list[tuple[str, int]], streams: int) -> Load:
    """`streams` clients that always have one request out."""
    load, left = Load(), iter(prompts)
    async with client_of(url) as client:

        async def worker() -> None:
            for prompt, max_tokens in left:
                await ask(client, prompt, max_tokens, load)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(streams)))
        load.seconds = time.perf_counter() - began
    return load


async def opened(url: str, prompts: list[tuple[str, int]], gaps: list[float]) -> Load:
    """Requests that come when they come."""
    load = Load()
    async with client_of(url) as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        due = began
        for (prompt, max_tokens), gap in zip(prompts, gaps, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(ask(client, prompt, max_tokens, load))
    load.seconds = time.perf_counter() - began
    return load


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


def arrivals(kind: str, rate: float, count: int, seed: int) -> list[float]:
    """Gaps between requests, seconds, `rate` requests a second on average."""
    rng = random.Random(seed)
    shape = 1.0 if kind == "poisson" else 0.25  # a gamma's coefficient of variation is 1/√shape
    return [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)]


def trace(count: int, max_tokens: int, seed: int) -> list[tuple[str, int]]:
    queries = shipped.traffic()
    random.Random(seed).shuffle(queries)
    return [(queries[i % len(queries)].prompt, max_tokens) for i in range(count)]


def measure(servers: dict[str, list[Server]], args: argparse.Namespace) -> dict[str, dict[str, list[Load]]]:
    """Loads by kind and system, a list of rounds each; each round uses one server of each system."""
    rounds = {"streams": args.rounds, "saturated": args.rounds}
    rounds |= {"poisson": args.open_rounds, "bursty": args.open_rounds}
    found: dict[str, dict[str, list[Load]]] = {kind: {name: [] for name in servers} for kind in rounds}
    names, rate = list(servers), None
    for number in range(max(rounds.values())):
        for kind in (kind for kind, count in rounds.items() if number < count):
            prompts = trace(args.requests, args.max_tokens, args.seed + number)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                server = servers[name][number % args.instances]
                server.learn(True)
                if kind in ("streams", "saturated"):
                    streams = args.streams * (4 if kind == "saturated" else 1)
                    load = asyncio.run(closed(server.url, prompts, streams))
                else:
                    assert rate is not None
                    gaps = arrivals(kind, rate, len(prompts), args.seed + number)
                    load = asyncio.run(opened(server.url, prompts, gaps))
                server.learn(False)
                found[kind][name].append(load)
                print(
                    f"round {number + 1}, {kind}, {name}: {load.tokens / load.seconds:.1f} tokens/s, "
                    f"{load.failed} failed",
                    flush=True,
                )
            if rate is None:
                base = found["streams"][names[0]][0]
                rate = args.load * len(prompts) / base.seconds
    return found


def percentile(values: list[float], share: float) -> float:
    """In milliseconds; nan of nothing."""
    return round(1e3 * float(np.quantile(values, share, method="higher")), 2) if values else float("nan")


def p99_ratio(rounds: list[Load], base: list[Load], name: str) -> dict[str, float]:
    """Of the times called `name`, all rounds together; rounds that were run in turns are drawn together."""

    def ratio(drawn: np.ndarray[Any, Any]) -> float:
        one, other = (
            np.concatenate([loads[i].times[name] for i in drawn.astype(int)]) for loads in (rounds, base)
        )
        return float(np.quantile(one, 0.99, method="higher") / np.quantile(other, 0.99, method="higher"))

    numbers = np.arange(len(rounds))
    if len(rounds) < 2:
        return {"ratio": round(ratio(numbers), 3)}
    found = bootstrap((numbers,), ratio, vectorized=False, n_resamples=2000, method="percentile", rng=0)
    low, high = found.confidence_interval
    return {"ratio": round(ratio(numbers), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def summary(loads: dict[str, list[Load]]) -> dict[str, Any]:
    """Per system; ratios against the first, plain decoding by default, round by round."""
    result, first = {}, next(iter(loads))
    for name, rounds in loads.items():
        rates = [load.tokens / load.seconds for load in rounds]
        base = [load.tokens / load.seconds for load in loads[first]]
        result[name] = {
            "tokens_per_second": round(median(rates), 2),
            "ratio": round(median(a / b for a, b in zip(rates, base, strict=True)), 3),
            "failed": sum(load.failed for load in rounds),
            "rounds": [round(rate, 2) for rate in rates],
        }
        for what in TIMES:
            values = [value for load in rounds for value in load.times[what]]
            result[name][f"{what}_ms"] = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
        if name != first and all(load.times["latency"] for load in rounds + loads[first]):
            result[name]["p99_against_first"] = {
                what: p99_ratio(rounds, loads[first], what) for what in TIMES
            }
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
    usual = [name for name in SYSTEMS if name != "experts again"]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=usual)
    parser.add_argument("--target", default="mini")
    parser.add_argument("--draft", default="mini")
    parser.add_argument("--streams", type=int, default=8, help="also the largest batch")
    parser.add_argument("--requests", type=int, default=48, help="of one load")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--instances", type=int, default=1, help="servers of each system")
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
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers: dict[str, list[Server]] = {name: [] for name in args.systems}
        for name, number in itertools.product(args.systems, range(args.instances)):
            home = Path(folder) / f"{name.replace(' ', '-')}-{number}"
            shutil.copytree(args.home, home) if name.startswith("experts") else home.mkdir()
            servers[name].append(stack.enter_context(running(name, home, args)))
        for server in itertools.chain(*servers.values()):
            server.learn(False)
            asyncio.run(closed(server.url, trace(args.streams, 16, 99), args.streams))  # warm up
        began = time.time()
        found = measure(servers, args)
        learners = [one for several in servers.values() for one in several if one.learns]
        trainers = [learned(one.home, began) for one in learners]
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
