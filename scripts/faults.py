#!/usr/bin/env python3
"""Do to moedraft what must not harm it, and write down whether it held.

    python scripts/faults.py --quick                           # minutes; a part of every fault
    python scripts/faults.py --out results/faults.json         # all of it; python scripts/tables.py shows it
    python scripts/faults.py --quick --only kills              # one part of it; see --help

Loads this machine's loopback alone. Everything is bounded in number and time. Ends with 1 where something did
not hold. What is in the file already is not run again; with --again it is. Small disks are mounted for the
faults of disks where this user may do that; else these are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fault_crowd import crowds
from fault_disk import disks
from fault_files import files
from fault_kills import kills
from fault_moments import moments
from fault_server import killed_rows, server_rows
from fault_tools import Row
from fault_trainer import trainers


@dataclass(frozen=True)
class Size:
    """How often each fault is tried."""

    kills: int
    cuts: int
    flips: int
    servers: int  # kills of a whole server
    clients: int
    bodies: int
    trainers: int  # of each kind of fault
    crowd: int  # connections
    overload: float  # s


QUICK = Size(kills=4, cuts=8, flips=50, servers=1, clients=70, bodies=300, trainers=1, crowd=64, overload=10)
WHOLE = Size(
    kills=50,
    cuts=64,
    flips=1000,
    servers=50,
    clients=10_000,
    bodies=10_000,
    trainers=3,
    crowd=512,
    overload=600,
)


def parts(size: Size, seed: int) -> dict[str, Callable[[Path], list[Row]]]:
    """By name; each takes a folder that does not exist yet."""
    rng = random.Random(seed)
    return {
        "kills": lambda folder: kills(folder, size.kills, rng),
        "moments": moments,
        "files": lambda folder: files(folder, size.cuts, size.flips, rng),
        "disks": disks,
        "trainer": lambda folder: trainers(folder, size.trainers),
        "server": lambda folder: server_rows(folder, size.clients, size.bodies, rng),
        "crowd": lambda folder: crowds(folder, size.crowd, size.overload),
        "killed": lambda folder: killed_rows(folder, size.servers, rng),
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    found = read(args.out)
    for name, run in parts(QUICK if args.quick else WHOLE, args.seed).items():
        if args.only not in (None, name) or (is_done(found, name, args.quick) and not args.again):
            continue
        with tempfile.TemporaryDirectory(prefix="moedraft-faults-") as folder:
            rows = run(Path(folder) / name)
        for row in rows:
            say(row)
        made = {"quick": args.quick, "date": time.strftime("%Y-%m-%d")}
        found["parts"][name] = {**made, "rows": [row.data for row in rows]}
        if args.out:
            write(args.out, found)
    raise SystemExit(not all(row["kept"] for part in found["parts"].values() for row in part["rows"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=list(parts(QUICK, 0)))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true")
    return parser.parse_args()


def say(row: Row) -> None:
    print(
        f"{'kept' if not row.broken else 'BROKEN':7}{row.cases:6}  {row.seconds:6.1f} s  {row.fault}",
        flush=True,
    )
    if row.figures:
        print(f"           {row.figures}", flush=True)
    for sentence in (row.broken or [])[:5]:
        print(f"           {sentence}", flush=True)


def read(out: Path | None) -> dict[str, Any]:
    """What was found before."""
    if out is None or not out.exists():
        return {"cores": os.cpu_count(), "python": platform.python_version(), "parts": {}}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def is_done(found: dict[str, Any], name: str, quick: bool) -> bool:
    """A whole part counts for a quick one, too."""
    return name in found["parts"] and (quick or not found["parts"][name]["quick"])


def write(out: Path, found: dict[str, Any]) -> None:
    """In the order of the parts, under another name first, so that a kill leaves a whole file."""
    found["parts"] = {name: found["parts"][name] for name in parts(QUICK, 0) if name in found["parts"]}
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(out)


if __name__ == "__main__":
    main()
