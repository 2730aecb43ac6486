"""The tables of a new home: the migrations make them once in a process, and later homes get a copy."""

from __future__ import annotations

import sqlite3
import threading

from moedraft.storage import db
from moedraft.storage.db import Home

MIGRATIONS = db.MIGRATIONS
migrate = Home._migrate
_copy = sqlite3.connect(":memory:", check_same_thread=False)
_copying = threading.Lock()


def copy_or_migrate(home: Home) -> None:
    """In place of `Home._migrate`; a home that has tables, and a test's own migrations, are left to that."""
    assert home._writer is not None
    with home._writer.connect() as connection:
        database = connection.connection.driver_connection
    if db.MIGRATIONS != MIGRATIONS or _has_tables(database):
        migrate(home)
        return
    with _copying:
        if _has_tables(_copy):
            _copy.backup(database)
        else:
            migrate(home)
            database.backup(_copy)


def _has_tables(database: sqlite3.Connection) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
