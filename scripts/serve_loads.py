"""Send loads of requests to a running server, and record what clients see: times, tokens, failures."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx

from moedraft.showcase import shipped

TIMES = ("ttft", "gap", "per_token", "latency")


@dataclass
class Load:
    """What the clients saw in one load. Times are in seconds."""

    tokens: int = 0
    pieces: int = 0  # pieces of text that arrived, each with one token or several
    seconds: float = 0.0
    failed: int = 0
    met_update: bool = False  # whether the trainer was in the middle of an update when the load began
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})


@dataclass(frozen=True)
class Trace:
    """Prompts in order, `max_tokens` tokens for each answer; with `store` the server may learn from them."""

    prompts: list[str]
    max_tokens: int
    store: bool = True


async def ask(client: httpx.AsyncClient, prompt: str, trace: Trace, load: Load) -> None:
    """Ask for one completion as a stream and record its times."""
    body = {
        "model": "mini",
        "prompt": prompt,
        "max_tokens": trace.max_tokens,
        "store": trace.store,
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
                    load.pieces += 1
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


async def closed(url: str, trace: Trace, streams: int) -> Load:
    """A closed loop: `streams` clients, each of which always has one request running."""
    load, left = Load(), iter(trace.prompts)
    async with client_of(url) as client:

        async def worker() -> None:
            for prompt in left:
                await ask(client, prompt, trace, load)

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(streams)))
        load.seconds = time.perf_counter() - began
    return load


async def opened(url: str, trace: Trace, gaps: list[float]) -> Load:
    """An open loop: requests are sent at given times, whether or not others are answered."""
    load = Load()
    async with client_of(url) as client, asyncio.TaskGroup() as group:
        began = time.perf_counter()
        due = began
        for prompt, gap in zip(trace.prompts, gaps, strict=True):
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(ask(client, prompt, trace, load))
    load.seconds = time.perf_counter() - began
    return load


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))


def arrivals(kind: str, rate: float, count: int, seed: int) -> list[float]:
    """Gaps between requests, seconds, `rate` requests a second on average."""
    rng = random.Random(seed)
    shape = 1.0 if kind == "poisson" else 0.25  # a gamma's coefficient of variation is 1/√shape
    return [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)]


def mixed(count: int, seed: int) -> list[str]:
    """`count` prompts of the shipped traffic, shuffled."""
    queries = shipped.traffic()
    random.Random(seed).shuffle(queries)
    return [queries[i % len(queries)].prompt for i in range(count)]
