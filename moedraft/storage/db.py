"""A home: the folder with moedraft's state, its database, its one writing connection and its lock.

Everything that only SQLite knows lives here; the other modules are plain SQLAlchemy Core. One process
owns the writing connection, guarded by an advisory lock on a file; its threads share that connection
under one lock, one transaction at a time. Reads go through a pool of read-only connections and never
wait for a write (WAL). Knows no table but Alembic's own.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.pool import Pool, QueuePool, StaticPool

from moedraft.core import StorageError

DATABASE = "moedraft.db"
LOCK = "moedraft.lock"
RESERVE = "reserve"  # a file that is deleted on a full disk, so that SQLite can still open its journal
RESERVE_BYTES = 256 * 1024
MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class StorageFull(StorageError):
    """The disk takes no more: it is full or read-only. Nothing was changed; serving can go on."""


class Home:
    """An open home folder. `folder_lock` guards its files as `write` guards its database.

    Safe to share between the threads of one process; not to be carried through a fork.
    """

    def __init__(self, path: Path, *, lock_file: int | None) -> None:
        self.path = path
        self.writable = lock_file is not None
        self.folder_lock = threading.RLock()
        # Durable transactions committed by this object. In the writing process the registry changes only so.
        self.durable_writes = 0
        self.erasing = False  # whether deleted data may still be in the journal; `checkpoint` tries again
        self._lock_file = lock_file
        self._write_lock = threading.RLock()
        self._writer: Engine | None = None
        self._reader: Engine | None = None

    @classmethod
    def open(cls, path: str | Path, *, write: bool = True) -> Home:
        """Open the home at `path`. For writing it is created, or upgraded to the newest schema, where needed.

        Raises StorageError where another process is writing it, it was made by a newer moedraft, or the
        folder cannot be used; for reading also where there is no home or it needs an upgrade.
        """
        path = Path(path).expanduser().resolve()
        home = cls(path, lock_file=_claim(path) if write else None)
        try:
            with storage_errors(path):
                if write:
                    _keep_reserve(path)
                try:
                    home._connect()
                except DatabaseError:
                    if not (home.writable and give_up_reserve(path)):
                        raise
                    home._connect()
        except BaseException:
            home.close()
            raise
        return home

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one consistent state. Raises StorageError."""
        if self._reader is None:
            raise StorageError(f"The home {self.path} is closed.")
        with storage_errors(self.path), self._reader.connect() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[Connection]:
        """One transaction; others wait. It outlives the end of this process, and a `durable` one a power cut.

        Without `durable` a power cut may lose the last transactions, but never damages the file. Raises
        StorageFull or StorageError; nothing was changed then.
        """
        self.require_writable()
        with self._write_lock:
            if self._writer is None:
                raise StorageError(f"The home {self.path} is closed.")
            with storage_errors(self.path), self._writer.connect() as connection:
                # `synchronous` cannot change inside a transaction, so it is set before SQLAlchemy begins one.
                _pragma(connection, f"synchronous = {'FULL' if durable else 'NORMAL'}")
                with connection.begin():
                    yield connection
                self.durable_writes += durable

    def checkpoint(self, *, wait: bool = True) -> bool:
        """Move the journal's contents into the database, so that deleted data is left in neither file.

        With `wait`, waits up to BUSY_SECONDS for readers. Returns False if one is still reading then (a
        process that was suspended while it read is), or if the disk fails; `erasing` says then that it must
        be tried again. What was deleted stays deleted. Raises StorageError only for a closed
        or read-only home.
        """
        self.require_writable()
        with self._write_lock:
            if self._writer is None:
                raise StorageError(f"The home {self.path} is closed.")
            self.erasing = True
            with suppress(DatabaseError, sqlite3.Error), self._writer.connect() as connection:
                _pragma(connection, f"busy_timeout = {int(BUSY_SECONDS * 1000) if wait else 0}")
                self.erasing = bool(_pragma(connection, "wal_checkpoint(TRUNCATE)")[0])
                _pragma(connection, f"busy_timeout = {int(BUSY_SECONDS * 1000)}")
        return not self.erasing

    def require_writable(self) -> None:
        """Raises StorageError where this home was opened for reading only."""
        if not self.writable:
            raise StorageError(f"The home {self.path} was opened for reading only.")

    def close(self) -> None:
        """Closes the connections and gives the lock back; a second call does nothing."""
        with self._write_lock:
            for engine in (self._reader, self._writer):
                if engine is not None:
                    engine.dispose()
            self._reader = self._writer = None
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        database = self.path / DATABASE
        if self.writable:
            database.touch(mode=0o600)  # the folder may be open to others; the journal gets the same mode
            self._writer = _engine(database, write=True)
            self._migrate()
            self.checkpoint(wait=False)  # a purge before the last end may have left something in the journal
        elif not database.is_file():
            raise StorageError(
                f"There is no moedraft home at {self.path}; register a domain to make one, "
                "or use another --home."
            )
        self._reader = _engine(database, write=False)
        with self._reader.connect() as connection:
            self._check_revision(connection)

    def _migrate(self) -> None:
        """Run all missing migrations in one transaction, so that all of them happen or none."""
        assert self._writer is not None
        with self._writer.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
        if current == _scripts(MIGRATIONS).get_current_head():
            return
        self._refuse_newer(current)
        if current is not None:
            self._keep_copy(current)
        with self._writer.connect() as connection:
            # with foreign keys on, rebuilding a table would delete the rows of others that refer to it
            _pragma(connection, "foreign_keys = OFF")
            with connection.begin():
                config = Config()
                config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
            _pragma(connection, "foreign_keys = ON")

    def _keep_copy(self, revision: str) -> None:
        """Copy the database before a migration, which cannot be undone. Raises StorageError."""
        copy, temporary = self.path / f"{DATABASE}.{revision}", self.path / f".{DATABASE}.{revision}.tmp"
        assert self._writer is not None
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=0o600)
        with self._writer.connect() as connection, closing(sqlite3.connect(temporary)) as target:
            driver: Any = connection.connection.driver_connection
            try:
                driver.backup(target)
            except sqlite3.Error as error:
                temporary.unlink()
                raise StorageError(f"{self.path} cannot be copied before its upgrade: {error}.") from error
        temporary.replace(copy)

    def _check_revision(self, connection: Connection) -> None:
        current = MigrationContext.configure(connection).get_current_revision()
        self._refuse_newer(current)
        if current is None:
            raise StorageError(f"The database of the home {self.path} is empty; a write makes it anew.")
        if current != _scripts(MIGRATIONS).get_current_head():
            raise StorageError(
                f"The home {self.path} was made by an older moedraft; "
                "run a command that writes to it (such as `moedraft distill`) once to upgrade it."
            )

    def _refuse_newer(self, revision: str | None) -> None:
        known = {script.revision for script in _scripts(MIGRATIONS).walk_revisions()}
        if revision is not None and revision not in known:
            raise StorageError(
                f"The home {self.path} was made by a newer moedraft (schema {revision}); "
                "upgrade moedraft or use another --home."
            )


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk and the database into StorageFull or StorageError that names `path`."""
    try:
        yield
    except IntegrityError:
        raise  # a bug of moedraft's, no fault of the disk
    except DatabaseError as error:
        raise _from_sqlite(path, error) from error
    except OSError as error:
        kind = StorageFull if error.errno in FULL else StorageError
        raise kind(f"The home {path} cannot be used: {error.strerror or error}.") from error


def _from_sqlite(path: Path, error: DatabaseError) -> StorageError:
    name = getattr(error.orig, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StorageFull(f"The disk that holds the home {path} is full; free some space.")
    if name.startswith("SQLITE_READONLY"):
        return StorageFull(f"The home {path} is on a read-only disk; use another --home.")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StorageError(f"The database of the home {path} is damaged: {error.orig}.")
    return StorageError(f"The database of the home {path} cannot be used: {error.orig}.")


def _claim(path: Path) -> int:
    """The file descriptor whose lock makes this process the writer. Creates the folder."""
    with storage_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tighten(path)
        lock_file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk: the lock holds all the same
                os.ftruncate(lock_file, 0)
                os.pwrite(lock_file, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(lock_file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock_file)
            raise StorageError(
                f"The home {path} is being written by another process (pid {owner}); "
                "stop it or use another --home."
            ) from error
        except OSError:
            os.close(lock_file)
            raise
    return lock_file


def _tighten(home: Path) -> None:
    """Take away other users' access to a home that a person, an earlier moedraft or a copy has left open."""
    found = home.stat()
    ours = (home / DATABASE).exists() or not any(home.iterdir())
    ours = ours and found.st_uid == os.geteuid() and not found.st_mode & stat.S_ISVTX
    if ours and found.st_mode & 0o077:
        home.chmod(stat.S_IMODE(found.st_mode) & 0o700)


def _keep_reserve(home: Path) -> None:
    """Make the reserve file where there is room; of random bytes, which no disk can compress."""
    reserve = home / RESERVE
    try:
        if not reserve.exists():
            reserve.touch(mode=0o600)
            reserve.write_bytes(os.urandom(RESERVE_BYTES))
    except OSError:
        with suppress(OSError):
            reserve.unlink(missing_ok=True)


def give_up_reserve(home: Path) -> bool:
    """Delete the reserve file to free its space; False if there is none."""
    try:
        (home / RESERVE).unlink()
    except OSError:
        return False
    return True


def _engine(database: Path, *, write: bool) -> Engine:
    """How connections are opened and transactions begin. Another database needs another such function."""
    mode = "rwc" if write else "ro"

    def connect() -> sqlite3.Connection:
        # isolation_level None: the driver never begins or commits by itself, SQLAlchemy does it below
        connection = sqlite3.connect(
            f"{database.as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        connection.execute("PRAGMA foreign_keys = ON")
        if write:
            if connection.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                connection.close()
                raise StorageError(f"{database.parent} lies on a file system that SQLite cannot share.")
            connection.execute("PRAGMA secure_delete = ON")  # what is purged is overwritten
            connection.execute(f"PRAGMA journal_size_limit = {2**24}")  # bytes, once they are written
        return connection

    def read_json(text: str | bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise StorageError(f"The database {database} is damaged: {error}.") from error

    pool: type[Pool] = StaticPool if write else QueuePool
    engine = create_engine("sqlite://", creator=connect, poolclass=pool, json_deserializer=read_json)
    begin = "BEGIN IMMEDIATE" if write else "BEGIN"
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _pragma(connection: Connection, pragma: str) -> Any:
    """Run a PRAGMA; returns its answer, a row or None."""
    driver: Any = connection.connection.driver_connection
    return driver.execute(f"PRAGMA {pragma}").fetchone()


@cache
def _scripts(folder: Path) -> ScriptDirectory:
    """Read once: each reading runs all the migrations' files."""
    return ScriptDirectory(folder)
