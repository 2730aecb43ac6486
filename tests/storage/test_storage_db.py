from __future__ import annotations

import errno
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError
from storage_fakes import domain, record, stats

from moedraft.core import InvalidRequest, StorageError
from moedraft.storage import Home, Registry, ReplayBuffer, RequestLog, StorageFull, Store
from moedraft.storage.db import DATABASE, LOCK, storage_errors

pytestmark = pytest.mark.usefixtures("real_migrations")

WORKER = Path(__file__).with_name("crash_worker.py")


def test_a_killed_process_loses_nothing(path: Path) -> None:
    with subprocess.Popen([sys.executable, WORKER, "serve", path], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"written\n"
            with pytest.raises(StorageError) as refused:
                Home.open(path)
            with Home.open(path, write=False) as reader:
                assert [d.name for d in Registry(reader).domains()] == ["sql"]
        finally:
            os.kill(other.pid, signal.SIGKILL)
    assert str(refused.value) == (
        f"The home {path} is being written by another process (pid {other.pid}); "
        "stop it or use another --home."
    )
    with Home.open(path) as home:
        assert ReplayBuffer(home, 10).records("sql") == [record(token=42)]
        assert RequestLog(home).summary()["sql"].requests == 1


def test_the_folder_belongs_to_its_owner_alone(path: Path, home: Home) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / DATABASE).stat().st_mode) == 0o600
    assert (path / LOCK).read_text() == f"{os.getpid()}\n"


def test_writers_set_durability_and_deletion(home: Home) -> None:
    def pragmas(durable: bool) -> list[object]:
        with home.write(durable=durable) as connection:
            names = ("journal_mode", "foreign_keys", "secure_delete", "synchronous")
            return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert pragmas(durable=True) == ["wal", 1, 1, 2]
    assert pragmas(durable=False) == ["wal", 1, 1, 1]


def test_a_failed_transaction_leaves_nothing(home: Home, registry: Registry) -> None:
    def fail() -> None:
        with home.write() as connection:
            connection.exec_driver_sql("DELETE FROM domains")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(registry.domains()) == 1


def test_our_own_faults_stay_visible(home: Home) -> None:
    with pytest.raises(IntegrityError), home.write() as connection:
        connection.exec_driver_sql("INSERT INTO domains VALUES ('x', '', '[]', 0)")  # no such expert


def test_reading_a_missing_home_is_refused(path: Path) -> None:
    with pytest.raises(StorageError, match=f"There is no moedraft home at {path}"):
        Home.open(path, write=False)
    assert not path.exists()


def test_a_reader_cannot_write(path: Path, home: Home, registry: Registry) -> None:
    with Home.open(path, write=False) as reader:
        assert not reader.writable
        with pytest.raises(StorageError, match="opened for reading only"):
            Registry(reader).add_domain(domain("python"))
        with pytest.raises(StorageFull, match="read-only"), reader.read() as connection:
            connection.exec_driver_sql("DELETE FROM domains")
        registry.add_domain(domain("python"))
        assert Registry(reader).generation() == registry.generation() == 2
        registry.remove_domain("python")
        assert Registry(reader).generation() == 3


def test_a_closed_home_is_refused(path: Path) -> None:
    home = Home.open(path)
    registry = Registry(home)
    home.close()
    home.close()
    with pytest.raises(StorageError, match="is closed"):
        registry.domains()
    with pytest.raises(StorageError, match="is closed"):
        registry.add_domain(domain())
    Home.open(path).close()


def test_a_home_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be used"):
        Home.open(tmp_path / "file")
    (tmp_path / LOCK).mkdir()
    with pytest.raises(StorageError, match="cannot be used"):
        Home.open(tmp_path)


def test_a_disk_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", unsupported)
        with pytest.raises(StorageError, match="No locks available"):
            Home.open(path)
    Home.open(path).close()


def test_a_damaged_database_is_reported(path: Path) -> None:
    path.mkdir()
    (path / DATABASE).write_bytes(b"no database at all" * 100)
    for write in (True, False):
        with pytest.raises(StorageError, match="damaged"):
            Home.open(path, write=write)
    (path / DATABASE).unlink()
    Home.open(path).close()  # the lock was given back


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EROFS, StorageFull),
        (errno.EACCES, StorageError),
    ],
)
def test_disk_errors_name_the_home(path: Path, number: int, kind: type[StorageError]) -> None:
    with pytest.raises(StorageError) as caught, storage_errors(path):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)


def test_a_full_disk_loses_nothing_and_recovers(home: Home, registry: Registry) -> None:
    replay = ReplayBuffer(home, 10_000)
    replay.add([record()])
    with home.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull, match="is full; free some space"):
        replay.add([record()] * 500)
    assert replay.count() == 1
    assert [d.name for d in registry.domains()] == ["sql"]
    with home.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    replay.add([record()] * 500)
    assert replay.count() == 501


def test_other_database_errors_are_reported(home: Home) -> None:
    with pytest.raises(StorageError, match=r"cannot be used: .*no such table"), home.read() as connection:
        connection.exec_driver_sql("SELECT * FROM not_there")


def test_many_threads_read_and_write(home: Home, registry: Registry) -> None:
    replay, log, failures = ReplayBuffer(home, 10_000), RequestLog(home), []

    def work(number: int) -> None:
        try:
            for step in range(20):
                replay.add([record(token=number), record(token=step)])
                log.add([stats()])
                registry.set_meta(f"{number}", f"{step}")
                assert replay.count() >= 2 * step
                assert registry.generation() == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert replay.count() == 160
    assert log.summary()["sql"].requests == 80
    assert [registry.get_meta(str(number)) for number in range(4)] == ["19"] * 4


def test_all_stores_open_together_or_not_at_all(path: Path) -> None:
    with pytest.raises(InvalidRequest, match="capacity"):
        Store.open(path, replay_capacity=0)
    store = Store.open(path)  # the lock was given back
    store.registry.add_domain(domain())
    store.replay.add([record()])
    assert store.replay.count("sql") == 1
    assert store.requests.summary() == {}
    assert store.adapters.load_live("sql") is None
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        store.registry.domains()


def test_purged_bytes_are_overwritten(path: Path) -> None:
    tokens = [123456789] * 5
    with Home.open(path) as home:
        replay = ReplayBuffer(home, 10)
        replay.add([record(token_ids=tokens)])
    written = (path / DATABASE).read_bytes()
    with Home.open(path) as home:
        assert ReplayBuffer(home, 10).purge() == 1
    purged = (path / DATABASE).read_bytes()
    needle = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert needle in written
    assert needle not in purged


def test_a_reader_that_stands_still_holds_up_overwriting_and_no_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trainer that was stopped in the middle of reading."""
    monkeypatch.setattr("moedraft.storage.db.BUSY_SECONDS", 0.2)
    tokens = [123456789] * 5
    needle = b"".join(token.to_bytes(4, "little") for token in tokens)

    def found() -> bool:
        return any(needle in file.read_bytes() for file in path.glob(f"{DATABASE}*"))

    with Home.open(path) as home, Home.open(path, write=False) as other:
        replay = ReplayBuffer(home, 10)
        replay.add([record(token_ids=tokens)])
        with other.read() as reading:
            reading.exec_driver_sql("SELECT count(*) FROM replay").scalar()
            assert replay.purge() == 1
            assert replay.count() == 0
            assert home.erasing
            assert found()
            assert not home.checkpoint(wait=False)
        assert home.checkpoint(wait=False)
        assert not home.erasing
        assert not found()
        replay.add([record()])  # it waits for others as before
        with monkeypatch.context() as patch:
            patch.setattr("moedraft.storage.db._pragma", _fails)
            assert not home.checkpoint()
        assert home.erasing


def _fails(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_what_a_killed_process_left_in_the_journal_is_overwritten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [123456789] * 5
    with Home.open(path) as home:
        ReplayBuffer(home, 10).add([record(token_ids=tokens)])
        with monkeypatch.context() as patch:
            patch.setattr(Home, "checkpoint", lambda home, **_: None)
            ReplayBuffer(home, 10).purge()
        files = {file.name: file.read_bytes() for file in path.glob(f"{DATABASE}*")}
    for name, content in files.items():  # as they were before it ended
        (path / name).write_bytes(content)
    (path / f"{DATABASE}-shm").unlink()
    needle = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert any(needle in file.read_bytes() for file in path.glob(f"{DATABASE}*"))
    with Home.open(path):
        assert not any(needle in file.read_bytes() for file in path.glob(f"{DATABASE}*"))


def test_only_db_and_backups_know_sqlite() -> None:
    """The seam for another database, which has backups of its own."""
    package = Path(sys.modules["moedraft.storage"].__file__ or "").parent
    for module in package.glob("*.py"):
        text = module.read_text()
        assert module.name in ("db.py", "backup.py") or ("PRAGMA" not in text and "sqlite3" not in text), (
            module.name
        )
