#!/usr/bin/env python3
"""What it costs to keep a feature drafter's features with the replay, and to compute them again instead.

    python scripts/bench_features.py [--target smollm2] [--requests 16] [--rounds 4] [--out FILE]

Two systems with the same target, one that keeps features and one that does not, answer the same prompts in
turns, at batch 1 and at `--batch`, recording beside the traffic as a server does. Then one process after
the other updates from the home with the features, as a trainer would: a first update, which finds nothing in
its memory, and a second one. Reported are tokens per second and processor time per token of serving (the
median over the rounds of one system, and of the ratios within the rounds), of this the processor time that
keeping takes in the engine's thread and storing in the recorder's, bytes per token on disk and in memory, and
seconds of an update with the peak memory of its process. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moedraft.config import Settings, load_settings
from moedraft.core import KeptStates, SamplingParams, Sequence
from moedraft.distill.assembly import build_loop
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.drafting.base import load_base
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import Read, StateKeeper
from moedraft.models import load_by
from moedraft.showcase import shipped
from moedraft.storage.db import DATABASE
from moedraft.storage.store import Store
from moedraft.system.build import System, assemble, open_store

WAYS = ("recompute", "keep")


class TimedKeeper(StateKeeper):
    """Measures the processor time that it takes of the engine's thread."""

    seconds = 0.0

    def keep(self, read: Read, fused: torch.Tensor) -> None:
        began = time.thread_time()
        super().keep(read, fused)
        self.seconds += time.thread_time() - began

    def finish(self, row: Sequence, rest: torch.Tensor) -> None:
        began = time.thread_time()
        super().finish(row, rest)
        self.seconds += time.thread_time() - began


def settings_of(args: argparse.Namespace, home: Path, way: str) -> Settings:
    options = {"threads": args.threads, "max_batch_size": args.batch, "update_steps": args.steps}
    options["resampled_answers"] = 0  # for these the target runs either way
    return load_settings(home=home, target=args.target, features=way, gate="off", **options)


def served(system: System, prompts: list[str], args: argparse.Namespace, together: int) -> dict[str, float]:
    """Answer all prompts, `together` at once; what is recorded is written when this returns."""
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    cpu, began, tokens = time.process_time(), time.perf_counter(), 0
    for first in range(0, len(prompts), together):
        outputs = system.engine.generate(prompts[first : first + together], params, learn=True, chat=True)
        tokens += sum(len(one.token_ids) for one in outputs)
    seconds = time.perf_counter() - began
    system.recorder.flush()
    return {
        "tokens_per_second": tokens / seconds,
        "cpu_ms_per_token": 1e3 * (time.process_time() - cpu) / tokens,
    }


def serving(systems: dict[str, System], args: argparse.Namespace) -> dict[str, Any]:
    """All rounds of both systems, in turns, by the number of requests that run at once."""
    prompts = [query.prompt for query in shipped.chosen().stream]
    found: dict[str, Any] = {}
    for together in (1, args.batch):
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(args.rounds + 1):
            count = args.requests if together > 1 else max(1, args.requests // 4)
            chosen = prompts[number * count : (number + 1) * count]
            for way in WAYS if number % 2 else WAYS[::-1]:
                rounds[way].append(served(systems[way], chosen, args, together))
        found[f"batch {together}"] = summary(
            {way: each[1:] for way, each in rounds.items()}
        )  # the first warms up
        print(together, json.dumps(found[f"batch {together}"]), flush=True)
    return found


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    pairs = list(zip(rounds["keep"], rounds["recompute"], strict=True))
    figures: dict[str, Any] = {}
    for key in rounds["keep"][0]:
        ratios = sorted(keep[key] / other[key] for keep, other in pairs)
        figures[key] = {way: median(one[key] for one in rounds[way]) for way in WAYS}
        figures[key] |= {"ratio": median(ratios), "ratios": [round(one, 4) for one in ratios]}
    return figures


def sizes(systems: dict[str, System]) -> dict[str, Any]:
    """What lies in the homes, and how much a running request keeps."""
    found: dict[str, Any] = {}
    for way, system in systems.items():
        system.store.home.checkpoint()
        tokens = sum(len(record.token_ids) for record in system.store.replay.records())
        file = (system.settings.home / DATABASE).stat().st_size
        found[way] = {"records": system.store.replay.count(), "tokens": tokens, "database": file}
    drafter = systems["keep"].engine.chooser.model
    assert isinstance(drafter, FeatureDrafter)
    kept = systems["keep"].store.replay.states_size()
    found["bytes_per_token"] = {
        "record": (found["recompute"]["database"]) / found["recompute"]["tokens"],
        "kept on disk": kept / found["keep"]["tokens"],
        "kept while it runs": 2 * drafter.draft.config.hidden_size,
        "features before fc": 2 * drafter.draft.config.features_size,
    }
    assert isinstance(drafter.keeper, TimedKeeper)
    tokens = found["keep"]["tokens"]
    found["cpu_us_per_token"] = {"keeping": 1e6 * drafter.keeper.seconds / tokens, **storing(systems["keep"])}
    return found


def storing(system: System) -> dict[str, float]:
    """Processor time per token of writing all records of this system once more, with states and without."""
    records = system.store.replay.records()
    found = system.store.replay.states(records, system.bank.base_hash)
    states = [
        KeptStates(system.bank.base_hash, found[one.id]) if one.id in found else None for one in records
    ]
    tokens, times = sum(len(one.token_ids) for one in records), {}
    for name, kept in (("storing records", []), ("storing both", states)):
        with (
            TemporaryDirectory(prefix="moedraft-") as folder,
            closing(Store.open(Path(folder), states_bytes=2**40)) as store,
        ):
            began = time.thread_time()
            for first in range(0, len(records), 4):
                store.replay.add(records[first : first + 4], kept[first : first + 4])
            store.home.checkpoint()
            times[name] = 1e6 * (time.thread_time() - began) / tokens
    return times


def learn(args: argparse.Namespace, home: Path, way: str) -> dict[str, Any]:
    """In a process of its own: two updates from a home, as a trainer makes them."""
    torch.set_num_threads(1)
    settings = settings_of(args, home, way)
    store = Store.open(home, write=False)
    loop = build_loop(settings, store)
    assert isinstance(loop, JointLoop)
    states = loop.trainer.lessons.states
    assert isinstance(states, RecordStates)
    times = []
    for _ in range(2):
        began, cpu = time.perf_counter(), time.process_time()
        update = loop.trainer.update(steps=args.steps)
        assert update is not None
        times.append(
            {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "loss": update.loss}
        )
    store.close()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {"first": times[0], "second": times[1], "tokens_read": states.tokens_read, "peak_bytes": peak}


def learning(args: argparse.Namespace, homes: dict[str, Path]) -> dict[str, Any]:
    """Updates from the home that kept features, with them and without, in turns."""
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for number in range(args.updates):
        for way in WAYS if number % 2 else WAYS[::-1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--learn", way, "--home", str(homes["keep"])]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(way, found[way][-1], flush=True)
    return found


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    homes = {way: folder / way for way in WAYS}
    target = load_by(settings_of(args, homes["keep"], "keep"), "target")
    torch.set_num_threads(args.threads)
    systems: dict[str, System] = {}
    for way, home in homes.items():
        settings = settings_of(args, home, way)
        systems[way] = assemble(settings, open_store(settings), target, load_base(settings, target))
        drafter = systems[way].engine.chooser.model
        if isinstance(drafter, FeatureDrafter) and drafter.keeper is not None:
            drafter.keeper = TimedKeeper(drafter.draft.config.hidden_size)
        systems[way].recorder.record_beside()
        systems[way].engine.work_beside()
    try:
        found = {"serving": serving(systems, args), "sizes": sizes(systems)}
        print(json.dumps(found["sizes"]), flush=True)
    finally:
        for system in systems.values():
            system.close()
    found["learning"] = learning(args, homes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--requests", type=int, default=16, help="of a round, a quarter of it at batch 1")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16, help="of an update")
    parser.add_argument("--updates", type=int, default=2, help="processes of each way that learn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--learn", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learn:
        print(json.dumps(learn(args, args.home, args.learn)))
        return
    with TemporaryDirectory(prefix="moedraft-") as folder:
        found = run(args, Path(folder))
    if args.out:
        found |= {
            "arguments": {key: str(value) for key, value in vars(args).items()},
            "cores": os.cpu_count(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
