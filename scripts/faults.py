#!/usr/bin/env python3
"""Do to moedraft what must not harm it, and write down whether it held.

    python scripts/faults.py --quick                           # minutes; a part of every fault
    python scripts/faults.py --out results/faults.json         # all of it; python scripts/tables.py shows it
    python scripts/faults.py --quick --only kills              # kills, files or server

Loads this machine's loopback alone. Everything is bounded in number and time. Ends with 1 where something did
not hold. A small disk is mounted for the full-disk fault where this user may do that; else it is left out.
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

import torch
from fault_files import files
from fault_kills import kills
from fault_server import server_rows
from fault_tools import Row


@dataclass(frozen=True)
class Size:
    """How often each fault is tried."""

    kills: int
    cuts: int
    flips: int
    servers: int  # kills of a whole server
    clients: int
    bodies: int


QUICK = Size(kills=4, cuts=8, flips=50, servers=1, clients=35, bodies=60)
WHOLE = Size(kills=50, cuts=64, flips=1000, servers=20, clients=1000, bodies=2000)


def parts(size: Size, seed: int) -> dict[str, Callable[[Path], list[Row]]]:
    rng = random.Random(seed)
    return {
        "kills": lambda folder: kills(folder, size.kills, rng),
        "files": lambda folder: files(folder, size.cuts, size.flips, rng),
        "server": lambda folder: server_rows(folder, size.servers, size.clients, size.bodies, rng),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["kills", "files", "server"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="moedraft-faults-") as folder:
        for name, run in parts(QUICK if args.quick else WHOLE, args.seed).items():
            if args.only in (None, name):
                where = Path(folder) / name
                where.mkdir()
                rows += run(where / "work") if name != "kills" else run(where)
    for row in rows:
        print(f"{'kept' if not row.broken else 'BROKEN':7}{row.cases:6}  {row.seconds:6.1f} s  {row.fault}")
        for sentence in (row.broken or [])[:5]:
            print(f"           {sentence}")
    if args.out:
        write(args.out, rows, quick=args.quick)
    raise SystemExit(any(row.broken for row in rows))


def write(out: Path, rows: list[Row], *, quick: bool) -> None:
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "quick": quick,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "rows": [row.data for row in rows],
    }
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
