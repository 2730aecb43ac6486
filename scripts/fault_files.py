"""Damaged adapters, full disks, two processes on a home, and homes of another time."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_tools import Row, candidate, new_home, record
from moedraft.config import load_settings
from moedraft.core import MoedraftError
from moedraft.drafting.adapter import PREFIX
from moedraft.storage.backup import make_backup
from moedraft.storage.candidate import Candidate
from moedraft.storage.db import DATABASE, Home, StorageFull
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store
from moedraft.system.build import System, build

import torch

DISK = "6m"  # of the small disk


def timed(make: Callable[[], Row]) -> Row:
    began = time.monotonic()
    row = make()
    row.seconds = time.monotonic() - began
    return row


def files(folder: Path, cuts: int, flips: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    return [
        timed(lambda: damaged(folder / "damaged", cuts, flips, rng)),
        timed(lambda: unfit(folder / "unfit")),
        timed(lambda: full_disk(folder / "disk")),
        timed(lambda: two_at_once(folder / "two")),
    ]


# -- adapters ------------------------------------------------------------------------------------


def damaged(path: Path, cuts: int, flips: int, rng: random.Random) -> Row:
    """The second of two versions is damaged; each time the first has to serve, and the second is refused."""
    row = Row("adapter files cut, and bits of them flipped", "refused with a reason; the version before serves")
    store = Store.open(new_home(path))
    first = store.adapters.publish(candidate(1.0))
    second = store.adapters.publish(candidate(2.0, parent=first.version))
    own = store.adapters.folder("sql", second.version)
    whole = {file: file.read_bytes() for file in own.iterdir()}
    weights = next(data for file, data in whole.items() if file.suffix == ".safetensors")
    damages: list[tuple[Path, bytes]] = []
    for file, data in whole.items():
        if data is weights:
            damages += [(file, data[: len(data) * i // cuts]) for i in range(cuts)]
    for _ in range(flips):
        file, data = rng.choice(sorted(whole.items()))
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        damages.append((file, bytes(flipped)))
    for file, data in damages:
        file.write_bytes(data)
        try:
            same = store.adapters.load(second).tensors["lora_A"].eq(2.0).all()
            row.check(False, f"{file.name} is taken though damaged (its weights are the same: {bool(same)})")
        except MoedraftError as error:
            row.check(str(error).endswith("."), f"no reason: {error}")
        file.write_bytes(whole[file])
        row.cases += 1
    file, data = damages[0]
    file.write_bytes(data)
    served = store.adapters.load_live("sql")
    row.check(served is not None and served[0].version == first.version, "the version before does not serve")
    store.close()
    return row


def unfit(path: Path) -> Row:
    """Adapters whose files are whole and whose contents do not fit the draft model of the shipped pair."""
    row = Row("adapters with NaN, another rank, base, module, shape or vocabulary", "as above, by the engine")
    store = Store.open(new_home(path))
    store.close()
    system = build(load_settings(home=path))
    try:
        good = fitting(system)
        system.store.adapters.publish(good)
        system.loader.refresh([], now=True)
        row.check(system.bank.version("sql") == 1, "the sound version does not serve")
        for name, bad in unfitting(good).items():
            row.check(not taken(system, bad), f"{name}: it serves")
            row.cases += 1
        row.check(taken(system, Candidate(**{**vars(good), "parent": 1})), "the sound one does not serve again")
    finally:
        system.close()
    return row


def taken(system: System, new: Candidate) -> bool:
    """Whether a version that is published serves."""
    try:
        version = system.store.adapters.publish(new).version
    except MoedraftError:
        return False
    system.loader.refresh([], now=True)
    return system.bank.version("sql") == version


def fitting(system: System) -> Candidate:
    tensors = {}
    for module in sorted(system.bank.tail):
        out, inner = system.bank.layers[module].base_weight().shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(4, inner)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.zeros(out, 4)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    return candidate(1.0, base_hash=system.bank.base_hash, rank=4, config=config, tensors=tensors)


def unfitting(good: Candidate) -> dict[str, Candidate]:
    name, tensor = next(iter(good.tensors.items()))

    def changed(**changes: Any) -> Candidate:
        return Candidate(**{**vars(good), "parent": 1, **changes})

    def with_tensor(key: str, value: torch.Tensor) -> Candidate:
        return changed(tensors={**good.tensors, key: value})

    return {
        "NaN": with_tensor(name, tensor * float("nan")),
        "infinite": with_tensor(name, tensor / 0),
        "another rank": changed(config={**good.config, "r": 8}),
        "another shape": with_tensor(name, torch.zeros(4, 3)),
        "no module": changed(tensors={}),
        "an unknown module": with_tensor(f"{PREFIX}nowhere.lora_A.weight", tensor.clone()),
        "half a module": changed(tensors={k: v for k, v in good.tensors.items() if k != name}),
        "another base": changed(base_hash="sha256:another"),
        "no adapter at all": changed(config={"peft_type": "IA3"}),
    }


# -- disks ---------------------------------------------------------------------------------------


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """A disk of its own at `path`, of DISK bytes; False where this user may not mount one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "moedraft-faults", str(path)]
    mounted = shutil.which("mount") is not None
    mounted = mounted and subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True, timeout=10)


def fill(path: Path, leave: int = 0) -> Path:
    """A file that takes all the room but `leave` bytes."""
    file = path / "filler"
    with file.open("wb", buffering=0) as out:
        for size in (65536, 4096, 512):
            try:
                while True:
                    out.write(b"x" * size)
            except OSError:
                continue
    if leave:
        with file.open("r+b") as out:
            out.truncate(max(0, file.stat().st_size - leave))
    return file


def full_disk(path: Path) -> Row:
    row = Row(
        "the disk is full at a record, a domain, an adapter, a key, a backup, a purge, a start",
        "refused by name; nothing is lost; it goes on when there is room",
    )
    with small_disk(path) as mounted:
        if not mounted:
            row.figures = "not run: a small disk cannot be mounted here"
            return row
        home = new_home(path / "home")
        file = KeyFile(home)
        key, _ = file.create(["infer"])
        store = Store.open(home)
        store.replay.add([record(i) for i in range(20)])
        version = store.adapters.publish(candidate(1.0))
        filler = fill(path)
        attempts: dict[str, Callable[[], object]] = {
            "a record": lambda: store.replay.add([record(99, tokens=3000)] * 20),
            "an adapter": lambda: store.adapters.publish(candidate(2.0, tensors={"lora_A": torch.ones(512, 512)})),
            "a key": lambda: file.revoke(key.id),
            "a backup": lambda: make_backup(home, path / "backup.tar"),
        }
        for name, attempt in attempts.items():
            row.cases += 1
            try:
                attempt()
                row.check(False, f"{name} was written to a full disk")
            except (StorageFull, OSError):
                continue
            except MoedraftError as error:
                row.check("full" in str(error) or "space" in str(error).lower(), f"{name}: {error}")
        row.check([one.id for one in file.keys()] == [key.id], "the keys have changed")
        row.check(store.replay.count() == 20, f"{store.replay.count()} records instead of 20")
        row.check(store.adapters.load(version) is not None, "the version is gone")
        store.close()
        again = Store.open(home)  # a start on the full disk
        row.cases += 1
        row.check(again.replay.count() == 20, "a start on a full disk loses records")
        filler.unlink()
        again.replay.add([record(21)])
        row.check(again.replay.count() == 21, "nothing is written after there is room again")
        again.close()
        file.revoke(key.id)
    return row


# -- two processes, another time -----------------------------------------------------------------


def two_at_once(path: Path) -> Row:
    row = Row("a second writer; a home from the future; a clock a year off", "refused or right, never both")
    home = new_home(path)
    with Home.open(home):
        row.check(refused(home) is not None, "two processes write one home")
    store = Store.open(home)
    year = 365 * 86400.0
    for number, shift in enumerate((-year, 0.0, year)):
        changed = {**vars(record(number)), "created_at": time.time() + shift}
        store.replay.add([type(record(0))(**changed)])
    row.check(len(store.replay.records("sql")) == 3, "a clock that was set hides records")
    store.close()
    connection = sqlite3.connect(home / DATABASE)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    before = (home / DATABASE).read_bytes()
    reason = refused(home) or ""
    row.check("newer moedraft" in reason, f"a home from the future: {reason or 'opened'}")
    row.check((home / DATABASE).read_bytes() == before, "a home from the future was changed")
    row.cases = 5
    return row


def refused(home: Path) -> str | None:
    """Why the home cannot be opened for writing."""
    try:
        Store.open(home).close()
    except MoedraftError as error:
        return json.dumps(str(error))
    return None
