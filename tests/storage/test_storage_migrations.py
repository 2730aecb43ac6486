from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from storage_fakes import domain, record, stats

from moedraft.core import StorageError, UpdateRecord
from moedraft.storage import ExpertStats, Home, Registry, ReplayBuffer, RequestLog, UpdateLog
from moedraft.storage.db import DATABASE, MIGRATIONS
from moedraft.storage.requests import Outcome
from moedraft.storage.tables import metadata

pytestmark = pytest.mark.usefixtures("real_migrations")

FIRST_SCHEMA = Path(__file__).with_name("first_schema.sql")
LATER = """
import sqlalchemy as sa
from alembic import op

revision = "later"
down_revision = "0001"


def upgrade():
    op.create_table("novelty", sa.Column("x", sa.Integer))
    with op.batch_alter_table("experts", recreate="always") as batch:
        batch.add_column(sa.Column("note", sa.Text))
"""


def execute(path: Path, script: str) -> None:
    connection = sqlite3.connect(path / DATABASE)
    connection.executescript(script)
    connection.close()


def schema(path: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(path / DATABASE)
    query = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    rows = connection.execute(query).fetchall()
    connection.close()
    return [(name, " ".join((sql or "").split())) for name, sql in rows]


@pytest.fixture
def first(path: Path) -> Path:
    """A home as the first schema left it, with a row in every table."""
    path.mkdir()
    execute(path, FIRST_SCHEMA.read_text())
    return path


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A moedraft with one more migration, which rebuilds a table that others point to."""
    scripts = tmp_path / "scripts"
    shutil.copytree(MIGRATIONS, scripts)
    for known in (scripts / "versions").glob("0*.py"):
        if not known.name.startswith("0001"):
            known.unlink()
    (scripts / "versions/later.py").write_text(LATER)
    monkeypatch.setattr("moedraft.storage.db.MIGRATIONS", scripts)
    return scripts


def test_a_first_schema_home_still_serves(first: Path) -> None:
    with Home.open(first) as home:
        registry = Registry(home)
        assert registry.domains() == [domain()]
        assert [v.state for v in registry.versions("sql")] == ["retired", "live"]
        assert (registry.updates("sql"), registry.next_version("sql")) == (2, 3)
        assert registry.generation() == 3
        assert registry.get_meta("target") == "tiny"
        assert ReplayBuffer(home, 10).records() == [record(temperature=0.0)]  # not known
        assert RequestLog(home).summary()["sql"].accepted_tokens == stats().speculation.num_accepted_tokens


def test_updates_older_than_the_gate_have_no_decision(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = tmp_path / "older"
    shutil.copytree(MIGRATIONS, older)
    for script in (older / "versions").glob("0*.py"):
        if script.name >= "0004":
            script.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("moedraft.storage.db.MIGRATIONS", older)
        Home.open(path).close()
    execute(path, "INSERT INTO updates VALUES (1, 'sql', 2, 20, 16, 1.5, 2.25, 0.4, NULL, 7.0)")
    with Home.open(path) as home:
        log = UpdateLog(home)
        assert log.recent() == [UpdateRecord("sql", 2, 20, 16, 1.5, 2.25, 0.4, None, 7.0)]
        assert log.decisions() == {}


def test_what_versions_stood_on_is_told_by_the_log_or_by_their_age(first: Path) -> None:
    """Of sql's two versions the log knows the second; the first is as old as the first shared adapter."""
    row = "INSERT INTO adapter_versions VALUES ('{}', {}, 0, 'x', 'sha256:base', NULL, {}, '{}')"
    with_log = first.parent / "with_log"
    shutil.copytree(first, with_log)
    execute(first, "UPDATE adapter_versions SET base_hash = 'sha256:base', created_at = 10.0 * version")
    execute(first, row.format("shared", 7, 5.0, "retired") + ";" + row.format("shared", 8, 15.0, "live"))
    with Home.open(first) as home:
        registry = Registry(home)
        assert [one.stood_on for one in registry.versions("sql")] == [7, 8]
        assert [one.stood_on for one in registry.versions("shared")] == [None, None]
    with Home.open(with_log) as home:
        assert [one.stood_on for one in Registry(home).versions("sql")] == [0, 0]


def upgraded(first: Path, *, requests: int, drafted_at: str = "[4, 2]") -> ExpertStats:
    """The expert of a home of the third schema that had so many requests, one of which is kept."""
    execute(
        first,
        f"UPDATE requests SET drafted_at = '{drafted_at}', accepted_at = '[3, 1]';"
        f"UPDATE request_totals SET requests = {requests};",
    )
    with Home.open(first) as home:
        return RequestLog(home).summary()["sql"]


@pytest.fixture
def third(first: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home as the third schema left it."""
    scripts = tmp_path / "third"
    shutil.copytree(MIGRATIONS, scripts, ignore=shutil.ignore_patterns("000[4-9]*", "001*", "__pycache__"))
    with monkeypatch.context() as patch:
        patch.setattr("moedraft.storage.db.MIGRATIONS", scripts)
        Home.open(first).close()
    return first


def test_first_guesses_of_drafted_rounds_are_not_taken_for_those_of_all_tokens(third: Path) -> None:
    found = upgraded(third, requests=1)
    assert (found.first_guesses, found.first_step_share) == (0, None)
    assert found.first_window == (Outcome(8, 4, 0, 0),)
    assert found.tokens_per_step == 2.0
    with Home.open(third) as home:
        RequestLog(home).add([stats(first_guesses=4, right_first_guesses=3)])
        assert RequestLog(home).summary()["sql"].first_step_share == 3 / 4


def test_a_beginning_that_was_trimmed_stays_unknown(third: Path) -> None:
    found = upgraded(third, requests=7)
    assert found.first_window is None
    with Home.open(third) as home:
        RequestLog(home).add([stats()])
        assert RequestLog(home).summary()["sql"].first_window is None


def test_a_copy_is_kept_before_an_upgrade(first: Path) -> None:
    """A migration has no way back but this."""
    before = schema(first)
    Home.open(first).close()
    [copy] = first.glob(f"{DATABASE}.0*")
    assert copy.stat().st_mode & 0o077 == 0
    Home.open(first).close()
    assert [copy] == list(first.glob(f"{DATABASE}.0*"))
    copy.replace(first / DATABASE)
    assert schema(first) == before


def test_without_room_for_a_copy_nothing_is_upgraded(first: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, connect = schema(first), sqlite3.connect

    def full(path: object, *args: object, **options: object) -> sqlite3.Connection:
        connection = connect(path, *args, **options)  # type: ignore[call-overload]
        if str(path).endswith(".tmp"):
            connection.execute("PRAGMA max_page_count = 2")
        return connection  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", full)
        with pytest.raises(StorageError, match="cannot be copied before its upgrade"):
            Home.open(first)
    assert schema(first) == before
    assert not list(first.glob(f".{DATABASE}*"))
    Home.open(first).close()


def test_a_file_system_without_the_journal_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(sqlite3.Connection):
        def execute(self, statement: str, *rest: object) -> sqlite3.Cursor:  # type: ignore[override]
            return super().execute("SELECT 'delete'" if "journal_mode" in statement else statement, *rest)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **o, factory=Stubborn))
    with pytest.raises(StorageError, match="SQLite cannot share"):
        Home.open(path)


def test_the_first_migration_was_never_edited(path: Path, tmp_path: Path, later: Path) -> None:
    (later / "versions/later.py").unlink()
    Home.open(path).close()
    known = tmp_path / "known"
    known.mkdir()
    execute(known, FIRST_SCHEMA.read_text())
    assert schema(path) == schema(known)


def test_migrations_end_at_the_declared_tables(home: Home) -> None:
    with home.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_newer_home_is_refused_unchanged(path: Path) -> None:
    Home.open(path).close()
    execute(path, "UPDATE alembic_version SET version_num = '9999'")
    before = (path / DATABASE).read_bytes()
    for write in (True, False):
        with pytest.raises(StorageError, match=r"made by a newer moedraft \(schema 9999\)"):
            Home.open(path, write=write)
    assert (path / DATABASE).read_bytes() == before


def test_only_a_writer_upgrades_an_older_home(first: Path, later: Path) -> None:
    with pytest.raises(StorageError, match="made by an older moedraft"):
        Home.open(first, write=False)
    with Home.open(first) as home:
        assert Registry(home).domains() == [domain()]
        assert ReplayBuffer(home, 10).count() == 1
        with home.write() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM adapter_versions").scalar() == 2
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
    with Home.open(first, write=False) as reader:
        assert Registry(reader).domains() == [domain()]


def test_a_failed_upgrade_changes_nothing(first: Path, later: Path) -> None:
    with (later / "versions/later.py").open("a") as script:
        script.write('    raise RuntimeError("half way")\n')
    before = schema(first)
    with pytest.raises(RuntimeError, match="half way"):
        Home.open(first)
    assert schema(first) == before
    (later / "versions/later.py").write_text(LATER)
    Home.open(first).close()
    assert "novelty" in dict(schema(first))
