"""Kill −9 while a home is written: what was acknowledged must be there, and nothing half."""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from fault_tools import Row, Say, candidate, ids_of, killed, needle_of, new_home, record

from moedraft.core import Domain, MoedraftError
from moedraft.storage.backup import UNFINISHED, make_backup, restore_backup
from moedraft.storage.db import DATABASE
from moedraft.storage.keys import KeyFile
from moedraft.storage.store import Store

ROOT = Path(__file__).resolve().parents[1]
FIRST_SCHEMA = ROOT / "tests" / "storage" / "first_schema.sql"
CAPACITY = 1_000_000
LONGEST = 0.06  # s after the first acknowledged write
RESTART = 10.0  # s

Work = Callable[[Path, Say], None]
Check = Callable[[Path, list[str], Row], None]


def opened(home: Path, row: Row) -> Store:
    """The home again, as a restart opens it."""
    began = time.monotonic()
    store = Store.open(home, replay_capacity=CAPACITY)
    row.check(time.monotonic() - began < RESTART, "opening took longer than ten seconds")
    return store


# -- records -------------------------------------------------------------------------------------


def append(home: Path, say: Say) -> None:
    store = Store.open(home, replay_capacity=CAPACITY)
    number = store.replay.last_id()
    while True:
        number += 1
        store.replay.add([record(number)])
        say(str(number))


def check_append(home: Path, said: list[str], row: Row) -> None:
    store = opened(home, row)
    kept = {one.token_ids[0] for one in store.replay.records("sql")}
    lost = [number for number in said if record(int(number)).token_ids[0] not in kept]
    row.check(not lost, f"acknowledged records are lost: {lost[:3]}")
    store.close()


def purge(home: Path, say: Say) -> None:
    store = Store.open(home, replay_capacity=CAPACITY)
    while True:
        number = time.monotonic_ns() % 10**9  # never twice
        store.replay.add([record(number)])
        store.replay.purge("sql")
        if not store.home.erasing:
            say(str(number))


def check_purge(home: Path, said: list[str], row: Row) -> None:
    """Searched as the kill has left it, and once more after a start."""
    for when in ("after the kill", "after a start"):
        left = b"".join(path.read_bytes() for path in home.glob(f"{DATABASE}*"))
        remaining = [number for number in said if needle_of(int(number)) in left]
        row.check(not remaining, f"purged bytes remain {when}: {remaining[:3]}")
        opened(home, row).close()


# -- versions ------------------------------------------------------------------------------------


def publish(home: Path, say: Say) -> None:
    store = Store.open(home)
    while True:
        number = store.registry.next_version("sql")
        say(str(store.adapters.publish(candidate(float(number))).version))
        store.adapters.prune("sql", keep=3)


def check_publish(home: Path, said: list[str], row: Row) -> None:
    store = opened(home, row)
    live = store.registry.live("sql")
    last = int(said[-1]) if said else 0
    row.check((live.version if live else 0) >= last, f"version {last} was acknowledged and is not live")
    for version in store.registry.versions("sql"):
        try:
            found = store.adapters.load(version)
        except MoedraftError as error:
            row.check(False, f"a half version: {error}")
        else:
            whole = bool((found.tensors["lora_A"] == float(version.version)).all())
            row.check(whole, f"version {version.version} has the weights of another")
    store.close()


def promote(home: Path, say: Say) -> None:
    store = Store.open(home)
    while not len(store.registry.versions("sql")) > 1:
        store.adapters.publish(candidate(1.0))
    number = 1
    while True:
        number = 3 - number
        store.registry.promote("sql", number)
        say(f"{store.registry.generation()} {number}")


def check_promote(home: Path, said: list[str], row: Row) -> None:
    if not said:
        return
    store = opened(home, row)
    generation, number = map(int, said[-1].split())
    live, found = store.registry.live("sql"), store.registry.generation()
    after = found - generation
    wanted = number if after == 0 else 3 - number
    row.check(after in (0, 1) and live is not None and live.version == wanted, f"{said[-1]}: {live} lives")
    store.close()


# -- domains, keys, backups, migrations ----------------------------------------------------------


def register(home: Path, say: Say) -> None:
    store = Store.open(home)
    known = {name for name, _ in store.registry.domain_names()}
    number = 0
    while True:
        number += 1
        name = f"d{number}"
        if name in known:
            store.registry.remove_domain(name)
            say(f"-{name}")
        else:
            store.registry.add_domain(Domain(name, "", ("x",) * 8, time.time()))
            say(f"+{name}")


def check_register(home: Path, said: list[str], row: Row) -> None:
    store = opened(home, row)
    known = {name for name, _ in store.registry.domain_names()}
    wrong = [one for one in said if (one[1:] in known) != (one[0] == "+")]
    row.check(not wrong, f"acknowledged and not so: {wrong[:3]}")
    store.close()


def revoke(home: Path, say: Say) -> None:
    file = KeyFile(home)
    while True:
        key, _ = file.create(["infer"])
        say(f"+{key.id}")
        file.revoke(key.id)
        say(f"-{key.id}")


def check_revoke(home: Path, said: list[str], row: Row) -> None:
    known = set(ids_of(KeyFile(home)))
    gone = {one[1:] for one in said if one[0] == "-"}
    row.check(not known & gone, f"revoked keys are valid: {known & gone}")
    wanted = {one[1:] for one in said if one[0] == "+"} - gone
    row.check(len(wanted - known) <= 1, f"keys are lost: {wanted - known}")  # the last may be revoked, unsaid


def back_up(home: Path, say: Say) -> None:
    number = 0
    while True:
        number += 1
        file = home.parent / f"{time.monotonic_ns()}.tar"
        make_backup(home, file)
        say(file.name)


def check_backup(home: Path, said: list[str], row: Row) -> None:
    for file in home.parent.glob("*.tar"):
        target = home.parent / "restored"
        restore_backup(file, target)
        store = Store.open(target, write=False)
        row.check(store.replay.count() == 50, "a backup has lost records")
        store.close()
        shutil.rmtree(target)
        said = [name for name in said if name != file.name]
        file.unlink()
    row.check(not said, f"acknowledged backups are not there: {said[:3]}")
    make_backup(home, home.parent / "last.tar")
    (home.parent / "last.tar").unlink()
    left = list(home.parent.glob(f"{UNFINISHED}*"))
    row.check(not left, f"a later backup leaves what a killed one left: {left[:3]}")


def migrate(home: Path, say: Say) -> None:
    say("")
    Store.open(home).close()


def first_schema(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    connection = sqlite3.connect(home / DATABASE)
    connection.executescript(FIRST_SCHEMA.read_text())
    connection.close()


def check_migrate(home: Path, said: list[str], row: Row) -> None:
    store = opened(home, row)
    row.check(store.replay.count("sql") == 1 and len(store.registry.versions("sql")) == 2, "rows are lost")
    store.close()


KINDS: dict[str, tuple[Work, Check, float, str]] = {
    "a record is appended": (append, check_append, LONGEST, "every acknowledged record is there"),
    "records are purged": (purge, check_purge, LONGEST, "no byte of an acknowledged purge is left"),
    "an adapter is written, synced, renamed": (publish, check_publish, LONGEST, "no half version; none lost"),
    "a version is promoted": (promote, check_promote, LONGEST, "the acknowledged version is live"),
    "a domain is registered or removed": (register, check_register, LONGEST, "so it is afterwards"),
    "a key is made or revoked": (revoke, check_revoke, LONGEST, "no revoked key is valid; none is lost"),
    "a backup is made": (back_up, check_backup, 0.3, "each file is whole; each acknowledged one is there"),
    "the schema is migrated": (migrate, check_migrate, 0.25, "all rows are there; it opens"),
}


def kills(folder: Path, times: int, rng: random.Random) -> list[Row]:
    folder.mkdir()
    return [_killed(folder / str(i), name, times, rng) for i, name in enumerate(KINDS)]


def _killed(folder: Path, name: str, times: int, rng: random.Random) -> Row:
    work, check, longest, must = KINDS[name]
    row, began, writes = Row(f"kill −9 while {name}", must), time.monotonic(), 0
    folder.mkdir()
    home = new_home(folder / "home")
    if work is back_up:
        store = Store.open(home)
        store.replay.add([record(i) for i in range(50)])
        store.close()
    for _ in range(times):
        if work is migrate:
            first_schema(home)
        said = killed(lambda say: work(home, say), rng, longest)
        writes += len(said)
        check(home, said, row)
        row.cases += 1
    row.figures = f"{writes} writes acknowledged"
    row.seconds = time.monotonic() - began
    return row
