#!/usr/bin/env python3
"""Memory and time of a loss with its output layer: chunked in one, against logits of all rows.

    python scripts/bench_linear.py --threads 1 --out results

For each way and each thing that learns (the hidden states alone, an adapter on the layer too, or the layer's
whole weight too) a process of its own measures the peak of its memory beyond its arguments, in the first call
of full size, and then the median time of a forward and a backward. The teacher is a top-k list. CPU, float32.

Beside it stands what `linear_divergence` takes by calculation, here and for 8192 rows of width 4096 and a
vocabulary of 151 936 in bfloat16 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_peers import plain_topk
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import linear

LEARNS = ("hidden states", "and an adapter", "and the weight")
RANK, TOP_K = 16, 16
LARGE = {"rows": 8192, "width": 4096, "vocab": 151_936, "bytes_per_number": 2, "device": "cuda"}


def parts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Hidden states, the layer, its adapter and the teacher's list."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=gen) * scale

    ids = torch.rand(args.rows, args.vocab, generator=gen).topk(TOP_K).indices
    return {
        "hidden": normal(args.rows, args.width).requires_grad_(),
        "weight": normal(args.vocab, args.width, scale=args.width**-0.5),
        "lora": (normal(RANK, args.width, scale=0.02), normal(args.vocab, RANK, scale=0.02)),
        "topk": (ids, (normal(args.rows, TOP_K) - 2).log_softmax(-1) - 0.1),
    }


def loss_of(way: str, parts: dict[str, Any], learns: str, rows: slice) -> Tensor:
    hidden, weight = parts["hidden"][rows], parts["weight"]
    ids, logprobs = (part[rows] for part in parts["topk"])
    lora = parts["lora"] if learns == LEARNS[1] else None
    if way == "linear_divergence":
        return kernels.linear_divergence(hidden, weight, lora=lora, teacher_topk=(ids, logprobs))
    logits = hidden @ weight.T
    if lora is not None:
        logits = logits + hidden @ lora[0].T @ lora[1].T
    if way == "logits, then divergence":
        return kernels.divergence(logits, teacher_topk=(ids, logprobs))
    return plain_topk("fkl", ids, logprobs)(logits, logits)


WAYS = ("plain PyTorch", "logits, then divergence", "linear_divergence")


def resident(field: str) -> int:
    """Bytes that the process holds (VmRSS), or held at most since its peak was set back (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure(way: str, learns: str, args: argparse.Namespace) -> dict[str, float]:
    """In this process: MiB beyond the arguments in the first full call, then the median of the times."""
    torch.set_num_threads(args.threads)
    parts = parts_of(args)
    more = {LEARNS[0]: [], LEARNS[1]: [*parts["lora"]], LEARNS[2]: [parts["weight"]]}[learns]
    leaves = [parts["hidden"], *(tensor.requires_grad_() for tensor in more)]

    def step(rows: slice) -> None:
        torch.autograd.grad(loss_of(way, parts, learns, rows), leaves)

    step(slice(0, 16))  # what is set up once is not counted
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    step(slice(None))
    peak = resident("VmHWM") - before
    return {"peak_mib": round(peak / 2**20, 1), "seconds": round(median(timed(step, args.calls)), 3)}


def timed(step: Callable[[slice], None], calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        step(slice(None))
        taken.append(time.perf_counter() - start)
    return taken


def calculated(rows: int, width: int, vocab: int, bytes_per_number: int, device: str) -> dict[str, float]:
    """MiB of `linear_divergence` beyond its arguments, by what learns.

    One block's logits, the gradients' sums in float32, the product that is added to a sum of another type,
    and, when all blocks are done, the sums once more in the parameters' type.
    """
    block = min(rows, max(16, linear.BYTES[device] // (4 * vocab)))
    found = {}
    for learns, numbers in zip(LEARNS, (0, RANK * (width + vocab), width * vocab), strict=True):
        sums = 4 * (rows * width + numbers)
        other = bytes_per_number != 4
        product = max(block * width, numbers if other else 0) * bytes_per_number
        running = sums + block * vocab * bytes_per_number + product
        handed = sums + (bytes_per_number * (rows * width + numbers) if other else 0)
        found[learns] = round(max(running, handed) / 2**20, 1)
    return found


def apart(way: str, learns: str, args: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own."""
    one = ["--one", way, learns]
    sizes = [f"--{name}={getattr(args, name)}" for name in ("rows", "width", "vocab", "threads", "calls")]
    command = [sys.executable, __file__, *sizes, *one]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LEARNS"), help="measure this one here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.one:
        way, learns = args.one
        print(json.dumps(measure(way, learns, args)))
        return
    here = {"rows": args.rows, "width": args.width, "vocab": args.vocab}
    found: dict[str, Any] = {}
    for learns in LEARNS:
        found[learns] = {way: apart(way, learns, args) for way in WAYS}
        print(learns, found[learns], flush=True)
    result = {
        **here,
        "threads": args.threads,
        "calls": args.calls,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "measured": found,
        "calculated_mib": calculated(**here, bytes_per_number=4, device="cpu"),
        "large": {**LARGE, "calculated_mib": calculated(**LARGE)},  # type: ignore[arg-type]
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "linear_divergence.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("written:", path)


if __name__ == "__main__":
    main()
