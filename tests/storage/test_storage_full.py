"""A home on a disk without a single free byte is opened and read, and written again when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from storage_fakes import domain, record

from moedraft.core import StorageError
from moedraft.storage import Home, Registry, StorageFull
from moedraft.storage.db import DATABASE, LOCK, RESERVE
from moedraft.storage.store import TARGET_ID, Store

pytestmark = pytest.mark.usefixtures("real_migrations")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; only an administrator can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take every free byte; the file that has them."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
    assert os.statvfs(disk).f_bavail == 0
    return filler


@pytest.mark.parametrize("times", [1, 2])
def test_a_home_on_a_full_disk_is_opened(disk: Path, times: int) -> None:
    home = disk / "home"
    with closing(Store.open(home)) as store:
        store.registry.add_domain(domain())
        store.registry.set_meta(TARGET_ID, "tiny")
    filler = fill(disk)
    for _ in range(times):
        with closing(Store.open(home)) as store:
            assert [one.name for one in store.registry.domains()] == ["sql"]
            store.registry.set_meta(TARGET_ID, "tiny")
            with pytest.raises(StorageFull):
                store.replay.add([record()] * 5000)
    filler.unlink()
    with closing(Store.open(home)) as store:
        store.replay.add([record()] * 500)
    assert (home / RESERVE).exists()


def test_a_value_that_stands_there_is_not_written(home: Home, registry: Registry) -> None:
    registry.set_meta("a", "1")
    before = home.durable_writes
    registry.set_meta("a", "1")
    registry.set_meta("b", None)
    assert home.durable_writes == before
    registry.set_meta("a", "2")
    assert (registry.get_meta("a"), home.durable_writes) == ("2", before + 1)


def test_the_number_of_the_process_is_no_condition(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with Home.open(path):
        assert (path / LOCK).exists()
        with pytest.raises(StorageError, match="pid unknown"):
            Home.open(path)


def test_without_room_for_a_reserve_there_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with Home.open(path):
        assert not (path / RESERVE).exists()
        assert (path / DATABASE).exists()
