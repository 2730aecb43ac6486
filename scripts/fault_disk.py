"""Full and read-only disks: a small one of its own is mounted, where this user may do that."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from fault_process import Server, until
from fault_tools import Row, candidate, ids_of, new_home, record, timed, void

from moedraft.core import Domain, MoedraftError
from moedraft.storage.backup import make_backup
from moedraft.storage.db import StorageFull
from moedraft.storage.keys import SCOPES, KeyFile
from moedraft.storage.store import Store

DISK = "6m"  # of the small disk
LARGER = "24m"  # of that of a server
ANSWERS = 100  # of a server whose disk is full
NO_DISK = "not run: a small disk cannot be mounted here"
NO_FAILING_DISK = "not run: a disk that fails cannot be had here"


def disks(folder: Path) -> list[Row]:
    folder.mkdir()
    return [
        timed(lambda: full_disk(folder / "disk")),
        timed(lambda: read_only(folder / "read-only")),
        timed(lambda: served_on_a_full_disk(folder / "served")),
        timed(lambda: served_on_a_failing_disk(folder / "failing")),
    ]


@contextmanager
def small_disk(path: Path, size: str = DISK) -> Iterator[bool]:
    """A disk of its own at `path`; False where this user may not mount one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "moedraft-faults", str(path)]
    mounted = shutil.which("mount") is not None
    mounted = mounted and subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True, timeout=10)


@contextmanager
def failing_disk(path: Path) -> Iterator[Callable[[], None] | None]:
    """A disk of its own at `path` and what makes it read-only under those who have files open on it.

    Linux does that to a file system in which it finds an error. None where it cannot be had.
    """
    path.mkdir(parents=True)
    image = path.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(64 * 2**20)
    made = shutil.which("mkfs.ext4") is not None and _done("mkfs.ext4", "-q", "-F", str(image))
    mounted = made and _done("mount", "-o", "loop,errors=remount-ro", str(image), str(path))
    try:
        trigger = _trigger(path) if mounted else None
        yield None if trigger is None else lambda: void(trigger.write_text("1"))
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True, timeout=30)


def repaired(path: Path) -> bool:
    """Check the disk that `failing_disk` made and mount it again, as an operator would."""
    image = path.with_suffix(".image")
    _done("umount", str(path))
    subprocess.run(["e2fsck", "-fp", str(image)], capture_output=True, timeout=60)
    return _done("mount", "-o", "loop,errors=remount-ro", str(image), str(path))


def _done(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _trigger(path: Path) -> Path | None:
    """The file of the kernel by which an error in the file system mounted at `path` is feigned."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    device = next(line[0] for line in mounts if line[1] == str(path.resolve()))
    trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    return trigger if trigger.exists() else None


def fill(path: Path) -> Path:
    """A file that takes all the room."""
    file = path / "filler"
    with file.open("wb", buffering=0) as out:
        for size in (65536, 4096, 512):
            try:
                while True:
                    out.write(b"x" * size)
            except OSError:
                continue
    return file


def full_disk(path: Path) -> Row:
    row = Row(
        "the disk is full at a record, a domain, an adapter, a backup, a start, a purge, a revocation",
        "refused by name, but keys can be revoked; nothing is lost; it goes on when there is room",
    )
    with small_disk(path) as mounted:
        if not mounted:
            row.figures = NO_DISK
            return row
        home = new_home(path / "home")
        file = KeyFile(home)
        key, _ = file.create(["infer"])
        store = Store.open(home)
        store.replay.add([record(i) for i in range(20)])
        version = store.adapters.publish(candidate(1.0))
        filler = fill(path)
        large = Domain("large", "", tuple(f"{i}" * 5000 for i in range(100)), 1.0)
        heavy = candidate(2.0, tensors={"lora_A": torch.ones(512, 512)})
        attempts: dict[str, Callable[[], object]] = {
            "a record": lambda: store.replay.add([record(99, tokens=3000)] * 20),
            "an adapter": lambda: store.adapters.publish(heavy),
            "a backup": lambda: make_backup(home, path / "backup.tar"),
            "a domain": lambda: store.registry.add_domain(large),
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
        row.check(ids_of(file) == [key.id], "the keys have changed")
        row.check([name for name, _ in store.registry.domain_names()] == ["sql"], "the domains have changed")
        row.check(store.replay.count() == 20, f"{store.replay.count()} records instead of 20")
        row.check(store.adapters.load(version) is not None, "the version is gone")
        store.close()
        again = Store.open(home)  # a start on the full disk
        row.cases += 1
        row.check(again.replay.count() == 20, "a start on a full disk loses records")
        row.cases += 1
        try:
            again.replay.purge("sql")  # needs room in the journal, which the reserve or nothing gives
            row.check(again.replay.count() == 0, "a purge that was acknowledged left records")
        except StorageFull:
            row.check(again.replay.count() == 20, "a purge that was refused removed records")
        row.cases += 1
        file.revoke(key.id)  # the reserve makes room for it
        row.check(ids_of(file) == [], "a key that was revoked is still there")
        before = again.replay.count()
        filler.unlink()
        again.replay.add([record(21)])
        row.check(again.replay.count() == before + 1, "nothing is written after there is room again")
        again.close()
        row.check(ids_of(file) == [], "a key that was revoked is there again")
    return row


def read_only(path: Path) -> Row:
    row = Row("the disk is read-only at a start", "refused in a sentence; afterwards all is there")
    with small_disk(path) as mounted:
        if not mounted:
            row.figures = NO_DISK
            return row
        home = new_home(path / "home")
        store = Store.open(home)
        store.replay.add([record(i) for i in range(20)])
        store.close()
        for mode in ("ro", "rw"):
            subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True, timeout=10)
            try:
                Store.open(home).close()
                row.check(mode == "rw", "a read-only disk was opened for writing")
            except MoedraftError as error:
                row.check(mode == "ro" and str(error).endswith("."), f"{mode}: {error}")
            row.cases += 1
        reading = Store.open(home, write=False)
        row.check(reading.replay.count() == 20, "records are lost")
        reading.close()
    return row


def served_on_a_full_disk(path: Path) -> Row:
    row = Row(
        "the disk of a server becomes full, the server is started again, there is room again",
        "answers go on unchanged; learning says that it is paused; a start works; it recovers by itself",
    )
    with small_disk(path, LARGER) as mounted:
        if not mounted:
            row.figures = NO_DISK
            return row
        home = new_home(path / "home", ("sql", "python"))
        secret = KeyFile(home).create(SCOPES)[1]
        with Server(home, secret, "--no-learning", log=path.with_suffix(".log")) as server:
            wanted = server.answer()
            row.check(until(lambda: records_of(server) > 0, 10), "nothing is recorded")
            filler = fill(path)
            failed = [number for number in range(ANSWERS) if not same(server, wanted)]
            row.check(not failed, f"answers failed or differ: {failed[:3]}")
            row.check("Learning is paused" in server.log.read_text(), "it does not say so")
            row.check(server.client.get("/ready").status_code == 200, "it is not ready")
            server.kill()
            server.start()
            row.check(same(server, wanted), "after a start on the full disk an answer differs")
            before = records_of(server)
            filler.unlink()
            row.check(until(lambda: same(server, wanted) and records_of(server) > before, 30), "no recovery")
            row.cases = ANSWERS
            row.figures = f"{before} records when it was full, {records_of(server)} after"
    return row


def served_on_a_failing_disk(path: Path) -> Row:
    row = Row(
        "the disk of a server becomes read-only under it",
        "answers go on unchanged; learning says that it is paused; changes are refused; a start on it is "
        "refused in a sentence; on the repaired disk all that was acknowledged is there",
    )
    with failing_disk(path) as fail:
        if fail is None:
            row.figures = NO_FAILING_DISK
            return row
        home = new_home(path / "home", ("sql", "python"))
        secret = KeyFile(home).create(SCOPES)[1]
        log = path.with_suffix(".log")
        server = Server(home, secret, "--no-learning", log=log)
        with server:
            wanted = server.answer()
            row.check(until(lambda: records_of(server) > 0, 10), "nothing is recorded")
            before = records_of(server)
            fail()
            failed = [number for number in range(ANSWERS) if not same(server, wanted)]
            row.check(not failed, f"answers failed or differ: {failed[:3]}")
            row.check(until(lambda: "Learning is paused" in log.read_text(), 10), "it does not say so")
            row.check(server.client.get("/ready").status_code == 200, "it is not ready")
            change = {"name": "new", "examples": [f"example {i}" for i in range(8)]}
            status = server.client.post("/admin/domains", json=change).status_code
            row.check(status == 503, f"a change got {status}")
            server.kill()
            _refused_start(server, row)
            row.check(repaired(path), "the disk cannot be mounted again")
            server.start()
            row.check(same(server, wanted), "on the repaired disk an answer differs")
            row.check(records_of(server) >= before, f"{records_of(server)} records instead of {before}")
            names = {one["name"] for one in server.client.get("/admin/domains").json()["domains"]}
            row.check(names == {"sql", "python"}, f"the domains are {sorted(names)}")
        row.cases = ANSWERS
    return row


def _refused_start(server: Server, row: Row) -> None:
    size = server.log.stat().st_size
    try:
        server.start()
        row.check(False, "it was started on a read-only disk")
        server.kill()
    except RuntimeError:
        said = server.log.read_text()[size:]
        row.check("Traceback" not in said and "Error: " in said, f"it said {said[-200:]!r}")


def same(server: Server, wanted: str) -> bool:
    try:
        return server.answer(max_tokens=24) == wanted
    except httpx.HTTPError:
        return False


def records_of(server: Server) -> int:
    return int(sum(server.client.get("/admin/replay").json()["records"].values()))
