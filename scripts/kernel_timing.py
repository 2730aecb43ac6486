"""How the kernel benchmark measures: device time, CUDA-graph time, host time, memory. Knows no kernel.

Each call is given several sets of data, which take turns and together are larger than the L2 cache, so that
every call finds a cold cache. `COLD_FACTOR` says how much larger.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
COLD_FACTOR = 4  # the sets of data together take at least this many times the L2 cache
COLD_BYTES = 256 * 2**20  # and at least this much
MIN_SAMPLES, MAX_SAMPLES = 20, 2000
GRAPH_US, MOST_REPEATS = 2000.0, 1000  # what a graph lasts at least, of so many rounds at most


@dataclass(frozen=True)
class Bench:
    """Where and how long is measured, and the sizes that the cases use."""

    device: str
    cuda: bool  # measure with CUDA events and graphs; else with the processor's clock
    seconds: float  # for each measurement
    cold_bytes: int  # all sets of data together take at least this
    dtype: torch.dtype
    vocab: int
    vocabs: tuple[int, ...]
    batches: tuple[int, ...]  # the first and the last are measured first
    rows: int  # of a divergence
    length: int = 4  # drafted tokens of a row
    top_k: int = 16  # tokens that the trainer keeps of the target's distribution

    def sets(self, bytes_read: int, least: int = 2) -> int:
        """How many sets of data a call that reads so much needs. On a CPU one will do.

        least: one suffices where a call cannot find its own beginning in the cache when it is called again.
        """
        return max(least, -(-self.cold_bytes // max(bytes_read, 1))) if self.cuda else 1


def cuda_bench(quick: bool, cache: int | None = None) -> Bench:
    """cache: bytes of the second-level cache; None: those of the first device."""
    if cache is None:
        cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
    return Bench(
        device="cuda",
        cuda=True,
        seconds=0.15 if quick else 0.5,
        cold_bytes=max(COLD_BYTES, COLD_FACTOR * cache),
        dtype=torch.bfloat16,
        vocab=151_936,
        vocabs=(128_256, 32_000) if quick else (128_256, 32_000, 50_257, 262_144),
        batches=(1, 64) if quick else (1, 8, 256, 64),
        rows=2048 if quick else 8192,
    )


def cpu_bench(quick: bool) -> Bench:
    """The references, at the size of the pair that comes with the project."""
    return Bench(
        device="cpu",
        cuda=False,
        seconds=0.2 if quick else 1.0,
        cold_bytes=0,
        dtype=torch.float32,
        vocab=8192,
        vocabs=() if quick else (49_152,),
        batches=(1,) if quick else (1, 8),
        rows=256,
    )


class Data:
    """Random numbers of a generator of its own: the default one can be left unusable by a failed capture."""

    def __init__(self, bench: Bench, seed: int = 0) -> None:
        self.bench = bench
        self.generator = torch.Generator(bench.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of the benchmark's type, unless another is asked for."""
        dtype = dtype or self.bench.dtype
        found = torch.randn(shape, device=self.bench.device, dtype=dtype, generator=self.generator)
        return found.mul_(scale)


def quantiles(samples: list[float]) -> dict[str, float]:
    """Median, 20 % and 80 % of samples in microseconds."""
    ordered = sorted(samples)
    picked = {
        name: ordered[int(share * (len(ordered) - 1))]
        for name, share in (("us", 0.5), ("p20", 0.2), ("p80", 0.8))
    }
    return {name: round(value, 2) for name, value in picked.items()}


def enough(samples: list[float], until: float, least: int = MIN_SAMPLES) -> bool:
    return len(samples) >= least and (time.perf_counter() >= until or len(samples) >= MAX_SAMPLES)


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_cuda(calls: list[Call], seconds: float) -> dict[str, float]:
    """One sample is the time of one call between two events; the host's time shows where it is the longer."""
    for call in calls[:3] * 2:
        call()
    torch.cuda.synchronize()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while not enough(samples, until):
        marks = [event() for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        samples += [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(marks)]
    return quantiles(samples)


def graph_of(calls: list[Call]) -> Any:
    """A graph of these calls, which has run once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def time_replay(graph: Any) -> float:
    """Microseconds of one replay."""
    start, end = event(), event()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_graph(calls: list[Call], seconds: float) -> dict[str, float]:
    """One sample is the time of a replayed graph, divided by the number of its calls: no host time.

    A graph holds all calls, as often as it takes to last `GRAPH_US`: what begins a replay is a few of them.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph, many = graph_of(calls), calls
    lasted = time_replay(graph)
    if lasted < GRAPH_US:
        many = calls * min(MOST_REPEATS, math.ceil(GRAPH_US / max(lasted, 1.0)))
        graph = graph_of(many)
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while not enough(samples, until):
        samples.append(time_replay(graph) / len(many))
    return quantiles(samples)


def time_host(calls: list[Call]) -> float:
    """Microseconds until a call has returned to Python, while the device may still be at work."""
    taken = []
    for call in (calls * 20)[:20]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return quantiles(taken)["us"]


def time_cpu(call: Call, seconds: float) -> dict[str, float]:
    call()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while not enough(samples, until, 5):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return quantiles(samples)


def peak_mib(call: Call) -> float:
    """The most memory that a call takes beyond its arguments."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


def copy_bandwidth(bench: Bench) -> float:
    """Bytes read and written per second by a copy on the device, of 2 GiB on a GPU."""
    source = torch.ones(2**30 if bench.device == "cuda" else 2**20, dtype=torch.bfloat16, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_cuda([lambda: target.copy_(source)], bench.seconds)["us"] * 1e-6)


def measured(calls: list[Call], bench: Bench) -> dict[str, Any]:
    """Everything that is measured of one contender outside a CUDA graph."""
    if not bench.cuda:
        return dict(time_cpu(calls[0], bench.seconds))
    found = time_cuda(calls, bench.seconds)
    return {**found, "host_us": time_host(calls), "extra_mib": peak_mib(calls[0])}


def captured(calls: list[Call], bench: Bench) -> dict[str, Any]:
    """The time in a CUDA graph. One that cannot be made is named; do not trust the device then."""
    try:
        return dict(time_graph(calls, bench.seconds))
    except Exception as error:
        return {"status": f"no graph: {type(error).__name__}: {str(error)[:200]}"}
