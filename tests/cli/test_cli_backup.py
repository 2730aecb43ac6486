"""`backup` and `restore`: whole, private, beside a server that writes, and without keys that were revoked."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from candidates import candidate
from cli_fakes import Run

from moedraft.core import SHARED, ReplayRecord
from moedraft.routing.embedder import write_tensors
from moedraft.serve.auth.keyring import Keyring
from moedraft.storage import backup
from moedraft.storage.backup import UNFINISHED
from moedraft.storage.db import DATABASE
from moedraft.storage.keys import KEYS_FILE, KeyFile
from moedraft.storage.store import Store
from moedraft.storage.versions.adapter_files import MANIFEST
from moedraft.storage.versions.candidate import WEIGHTS


def publish(store: Store, value: float) -> int:
    return store.adapters.publish(candidate(SHARED, value)).version


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_home_comes_back_as_it_was(run: Run, home: Path, store: Store, tmp_path: Path) -> None:
    """Taken while the home is open for writing."""
    publish(store, 1.0)
    publish(store, 2.0)
    (home / "config.toml").write_text("max_waiting = 7\n")
    file, new = tmp_path / "home.backup", tmp_path / "new"
    made = run("backup", file, "--home", home, "--json")
    assert made.code == 0, made.err
    assert (made.data["versions"], made.data["missing"]) == (2, [])
    assert mode(file) == 0o600
    assert run("backup", file, "--home", home).code == 2  # nothing is overwritten
    restored = run("restore", file, "--home", new, "--json")
    assert restored.code == 0, restored.err
    assert mode(new) == 0o700
    assert {mode(path) for path in new.rglob("*") if path.is_file()} == {0o600}
    with closing(Store.open(new)) as found:
        assert found.registry.domains() == store.registry.domains()
        assert found.registry.versions() == store.registry.versions()
        for version in store.registry.versions():
            assert found.adapters.load(version).tensors["lora_A"].eq(float(version.version)).all()
    assert (new / "config.toml").read_text() == "max_waiting = 7\n"
    assert not (new / KEYS_FILE).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "home.backup", "new"]
    assert run("restore", file, "--home", new).code == 2  # never over a home


def test_a_backup_ends_beside_commits_that_never_stop(
    run: Run, home: Path, store: Store, tmp_path: Path
) -> None:
    with store.home.write() as connection:  # a database that takes a while to copy
        connection.exec_driver_sql("CREATE TABLE ballast (b BLOB)")
        connection.exec_driver_sql("INSERT INTO ballast VALUES (randomblob(20000000))")
    stop, count = threading.Event(), 0

    def commit() -> None:
        nonlocal count
        while not stop.is_set():
            store.registry.set_meta("n", str(count), durable=False)
            count += 1

    writer = threading.Thread(target=commit)
    writer.start()
    try:
        assert run("backup", tmp_path / "file", "--home", home).code == 0
    finally:
        stop.set()
        writer.join()
    assert count > 0
    assert run("restore", tmp_path / "file", "--home", tmp_path / "new").code == 0


def test_revoked_keys_do_not_come_back(run: Run, home: Path, store: Store, tmp_path: Path) -> None:
    old = KeyFile(home).create(["admin"])[0]
    for name, options in (("without", ()), ("with", ("--keys",))):
        assert run("backup", tmp_path / name, "--home", home, *options).code == 0
    KeyFile(home).revoke(old.id)
    told = run("restore", tmp_path / "with", "--home", tmp_path / "a")
    assert "no keys and lets nobody in" in told.err
    assert run("restore", tmp_path / "without", "--keys", "--home", tmp_path / "b").code == 0
    for new in (tmp_path / "a", tmp_path / "b"):
        assert KeyFile(new).keys() == []
        assert not Keyring(KeyFile(new), open_without_keys=True).is_open
    assert run("restore", tmp_path / "with", "--keys", "--home", tmp_path / "c").code == 0
    assert KeyFile(tmp_path / "c").keys() == [old]
    assert old.digest.encode() not in (tmp_path / "without").read_bytes()


def test_a_restored_home_is_closed_before_it_has_its_name(
    run: Run, home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed right after the last rename must not leave a home without its key file."""
    KeyFile(home).create(["admin"])
    assert run("backup", tmp_path / "file", "--home", home).code == 0
    new, seen = tmp_path / "new", list[bool]()
    rename = Path.rename

    def noting(self: Path, target: Path) -> Path:
        found = rename(self, target)
        seen.extend([(new / KEYS_FILE).exists()] if target == new else [])
        return found

    monkeypatch.setattr(Path, "rename", noting)
    assert run("restore", tmp_path / "file", "--home", new).code == 0
    assert seen == [True]


def test_a_backup_into_no_folder_names_that_folder(
    run: Run, home: Path, store: Store, tmp_path: Path
) -> None:
    done = run("backup", tmp_path / "nowhere" / "file", "--home", home)
    assert (done.code, done.err) == (2, f"Error: {tmp_path / 'nowhere'}: No such file or directory.\n")


def test_a_version_that_is_not_whole_is_left_out_by_name(
    run: Run, home: Path, store: Store, tmp_path: Path
) -> None:
    publish(store, 1.0)
    publish(store, 2.0)
    (store.adapters.folder(SHARED, 1) / MANIFEST).unlink()
    made = run("backup", tmp_path / "file", "--home", home, "--json").data
    assert (made["versions"], made["missing"]) == (1, [[SHARED, 1]])


def test_a_version_whose_folder_holds_another_one_is_left_out_by_name(
    run: Run, home: Path, store: Store, tmp_path: Path
) -> None:
    """Its files and its manifest agree, but they are those of another version, or lie somewhere else."""
    for value in (1.0, 2.0, 3.0):
        publish(store, value)
    first, second, third = (store.adapters.folder(SHARED, number) for number in (1, 2, 3))
    shutil.rmtree(first)
    shutil.copytree(third, first)
    weights = second / WEIGHTS
    weights.rename(tmp_path / WEIGHTS)
    weights.symlink_to(tmp_path / WEIGHTS)
    made = run("backup", tmp_path / "file", "--home", home, "--json").data
    assert (made["versions"], made["missing"]) == (1, [[SHARED, 1], [SHARED, 2]])


def test_settings_that_change_meanwhile_are_whole(
    run: Run, home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was hashed is what is packed, even if the file is written anew between the two."""
    settings = home / "config.toml"
    settings.write_text("max_waiting = 7\n")
    add = tarfile.TarFile.addfile

    def write_and_add(self: tarfile.TarFile, *arguments: Any) -> None:
        settings.write_text("max_waiting = 70\n")
        add(self, *arguments)

    monkeypatch.setattr(tarfile.TarFile, "addfile", write_and_add)
    assert run("backup", tmp_path / "file", "--home", home).code == 0
    assert run("restore", tmp_path / "file", "--home", tmp_path / "new").code == 0
    assert (tmp_path / "new/config.toml").read_text() == "max_waiting = 7\n"


def test_a_version_that_is_pruned_meanwhile_is_whole(
    run: Run, home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1.0)
    add = tarfile.TarFile.addfile

    def remove_and_add(self: tarfile.TarFile, *arguments: Any) -> None:
        store.adapters.remove(SHARED)
        add(self, *arguments)

    monkeypatch.setattr(tarfile.TarFile, "addfile", remove_and_add)
    assert run("backup", tmp_path / "file", "--home", home).code == 0
    assert run("restore", tmp_path / "file", "--home", tmp_path / "new").code == 0
    with closing(Store.open(tmp_path / "new")) as found:
        [version] = found.registry.versions()
        assert found.adapters.load(version).tensors["lora_A"].eq(1.0).all()


def test_a_full_disk_makes_no_backup_without_a_version(
    run: Run, home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1.0)

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backup, "_write", full)
    result = run("backup", tmp_path / "file", "--home", home)
    assert (result.code, "No space left" in result.err) == (2, True), result.err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_what_a_killed_backup_left_is_removed_by_the_next(
    run: Run, home: Path, store: Store, tmp_path: Path
) -> None:
    place = tmp_path / "backups"
    place.mkdir()
    kill = "import os, pathlib, sys; from moedraft.storage import backup; "
    kill += "backup._pack = lambda *_: os.kill(os.getpid(), 9); "
    kill += "backup.make_backup(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    for _ in range(2):
        command = [sys.executable, "-c", kill, str(home), str(place / "monday")]
        assert subprocess.run(command, check=False).returncode == -9
        assert len(list(place.iterdir())) == 1
    (place / f"{UNFINISHED}running").mkdir()
    with _locked(place / f"{UNFINISHED}running"):  # as by a backup that is being made
        assert run("backup", place / "tuesday", "--home", home).code == 0
    assert sorted(path.name for path in place.iterdir()) == [f"{UNFINISHED}running", "tuesday"]


@pytest.fixture
def file(run: Run, home: Path, store: Store, tmp_path: Path) -> Path:
    publish(store, 1.0)
    assert run("backup", tmp_path / "file", "--home", home).code == 0
    return tmp_path / "file"


def test_a_damaged_backup_makes_no_home(run: Run, file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    places = range(700, len(whole) - 20_000, len(whole) // 12)
    for damaged in (b"", b"no archive", whole[: len(whole) // 2], *(_flipped(whole, at) for at in places)):
        file.write_bytes(damaged)
        result = run("restore", file, "--home", tmp_path / "new")
        assert result.code == 0 or "no whole backup" in result.err or "damaged" in result.err
        if result.code:
            assert not (tmp_path / "new").exists()
        else:  # the bit was in what fills up a block
            assert damaged not in (b"", b"no archive", whole[: len(whole) // 2])
            _remove(tmp_path / "new")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def _flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    "name", ["../evil", "/tmp/evil", "adapters/../../x/v1/evil", "adapters/x/v1/..", "router/x"]
)
def test_a_name_leads_nowhere_else(run: Run, file: Path, tmp_path: Path, name: str) -> None:
    with tarfile.open(file) as archive:
        members = [(one.name, archive.extractfile(one).read()) for one in archive]  # type: ignore[union-attr]
    contents = json.loads(members[0][1])
    contents["files"][name] = contents["files"][DATABASE]
    members = [("backup.json", json.dumps(contents).encode()), *members[1:], (name, dict(members)[DATABASE])]
    with tarfile.open(file, "w") as archive:
        for one, data in members:
            info = tarfile.TarInfo(one)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    result = run("restore", file, "--home", tmp_path / "new")
    assert (result.code, (tmp_path / "new").exists()) == (2, False)
    assert "nothing that a home has" in result.err
    assert not list(tmp_path.rglob("evil"))


def test_what_is_taken_out_is_for_its_owner_only(run: Run, home: Path, store: Store, tmp_path: Path) -> None:
    store.replay.add([_record()])
    assert run("replay", "export", "--out", tmp_path / "out", "--home", home).code == 0
    assert mode(tmp_path / "out") == 0o600


def test_a_home_that_others_may_read_is_tightened(home: Path, store: Store) -> None:
    store.close()
    home.chmod(0o755)
    Store.open(home, write=False).close()
    assert mode(home) == 0o755  # who only reads changes nothing
    Store.open(home).close()
    assert mode(home) == 0o700


def test_a_new_home_in_an_empty_folder_is_tightened_at_once(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new").chmod(0o755)
    Store.open(tmp_path / "new").close()
    assert mode(tmp_path / "new") == 0o700


def test_all_files_of_a_home_are_for_its_owner_only(home: Path, store: Store) -> None:
    store.adapters.publish(candidate("sql"))
    write_tensors(home / "router" / "vectors.safetensors", {"rows": np.zeros(2)}, {})
    files = [path for path in home.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert {path.name: oct(mode(path)) for path in files if mode(path) != 0o600} == {}


def test_a_folder_that_is_no_home_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir(mode=0o755)
    (tmp_path / "new").chmod(0o1777)
    Store.open(tmp_path / "new").close()
    Store.open(tmp_path / "new").close()
    assert mode(tmp_path / "new") == 0o1777


def _record() -> ReplayRecord:
    return ReplayRecord(
        domain="sql",
        expert="sql",
        adapter_version=1,
        target_id="tiny",
        token_ids=[1, 2, 3],
        num_prompt_tokens=2,
        topk_ids=[[3, 9]],
        topk_logprobs=[[-0.125, -3.5]],
        rejected=[],
        drafted=1,
        accepted=1,
        created_at=12.5,
    )


@pytest.mark.parametrize(
    "contents",
    [
        "[]", "1", '{"format": 1, "files": 3}', "[" * 100_000,
        '{"format": 1, "files": {}, "made_at": 1, "versions": 0, "missing": [], "note": "x"}',
        '{"format": 1, "files": {}, "made_at": 1, "missing": [], "note": null}',
        '{"format": 1, "files": {}, "made_at": 1, "versions": 0, "note": null}',
    ],
)  # fmt: skip
def test_what_is_no_backup_makes_no_home(run: Run, tmp_path: Path, contents: str) -> None:
    file, new = tmp_path / "x.backup", tmp_path / "new"
    data = contents.encode()
    with tarfile.open(file, "w") as archive:
        info = tarfile.TarInfo("backup.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    found = run("restore", file, "--home", new)
    assert found.code == 2
    assert "is no whole backup" in found.err
    assert not new.exists()


def test_an_emptied_database_is_not_backed_up(run: Run, home: Path, store: Store, tmp_path: Path) -> None:
    store.close()
    (home / DATABASE).write_bytes(b"")
    found = run("backup", tmp_path / "x.backup", "--home", home)
    assert found.code == 2
    assert "cannot be copied" in found.err
    assert not (tmp_path / "x.backup").exists()
