"""What benchmarks have in common that show something of a run when all is learned."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from feature_answers import TOPK

from evidence.command import DOMAINS, Workplace, arguments


def parser(
    about: str, patterns: str = "", domains: str = "", *, samples: bool = False
) -> argparse.ArgumentParser:
    """about: what the benchmark does. patterns, domains: of traffic, unless others are asked for.

    Without patterns, or domains, there is no such option. samples: whether answers may be sampled.
    """
    made = argparse.ArgumentParser(description=about.splitlines()[0])
    made.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--cache", type=Path, help="as of scripts/evidence.py")
    made.add_argument("--target", default="smollm2")
    made.add_argument("--draft", help="of any kind; default: the one that is shipped for the target")
    if patterns:
        made.add_argument("--patterns", default=patterns)
    if domains:
        made.add_argument("--domains", default=domains)
    made.add_argument("--requests", type=int, default=160)
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--resampled", type=int, default=0, help="as of scripts/evidence.py; default: none")
    made.add_argument("--threads", type=int, default=1)
    if samples:
        made.add_argument("--temperature", type=float, default=0.0, help="of the answers, 0 (greedy) to 1")
    made.add_argument("--dtype", default="float32", choices=("auto", "float32", "bfloat16"))
    return made


def workplace(args: argparse.Namespace, *more: str | int) -> Workplace:
    """Models, prompts and router for these arguments. more: options of scripts/evidence.py."""
    torch.set_num_threads(args.threads)
    options = ["--data", args.data, "--out", args.out.parent, "--requests", args.requests]
    options += ["--threads", args.threads, "--dtype", args.dtype, "--target", args.target]
    options += ["--resampled", args.resampled]
    options += ["--domains", vars(args).get("domains", DOMAINS), *more]
    options += ["--cache", args.cache] if args.cache else []
    options += ["--draft", args.draft] if args.draft else []
    temperature = vars(args).get("temperature", 0.0)
    if not 0 <= temperature <= 1:  # above 1 a record does not tell how likely a guess is accepted
        raise SystemExit("--temperature is between 0 and 1.")
    given = vars(args).get("topk", TOPK)
    return Workplace(arguments([*map(str, options)]), temperature, given)


def runs(args: argparse.Namespace, workplace: Workplace) -> Iterator[dict[str, Any]]:
    """What tells each run from the others, in the results too: all runs of one seed before the next."""
    for seed in range(args.seeds):
        for pattern in args.patterns.split(","):
            for name in args.arrangements.split(","):
                yield {
                    "target": Path(args.target).name,
                    "dtype": workplace.precision,
                    "pattern": pattern,
                    "arrangement": name,
                    "seed": seed,
                    "requests": args.requests,
                }
