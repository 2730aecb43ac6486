from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from storage_fakes import BASE, candidate, domain, publish

from moedraft.core import SHARED, AdapterVersion, CorruptAdapter, InvalidRequest, StorageError
from moedraft.storage import AdapterStore, Home, Registry, StorageFull
from moedraft.storage.db import DATABASE
from moedraft.storage.store import Store
from moedraft.storage.versions.adapter_files import sealed
from moedraft.storage.versions.adapters import QUARANTINE
from moedraft.storage.versions.candidate import Candidate, write_files
from moedraft.storage.versions.version_rows import Also

WORKER = Path(__file__).with_name("crash_worker.py")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def store(home: Home, registry: Registry) -> AdapterStore:
    return AdapterStore(home, registry)


@pytest.fixture
def chain(store: AdapterStore) -> list[AdapterVersion]:
    """v1 ← v2 ← v3 of sql, each filled with its number."""
    return [publish(store, float(number), number - 1) for number in (1, 2, 3)]


def folders(store: AdapterStore, name: str = "sql") -> list[str]:
    parent = store.folder(name, 1).parent
    return sorted(path.name for path in parent.iterdir()) if parent.exists() else []


def flip(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4])


def rehash(folder: Path, **changes: object) -> None:
    """A manifest that fits whatever lies in the folder."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))


def reword(folder: Path, old: str, new: str) -> None:
    """Another word in the manifest, whose digest stays."""
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


def nan(folder: Path) -> None:
    save_file({"lora_A": torch.tensor([1.0, float("nan")])}, folder / WEIGHTS)
    rehash(folder)


def garbage(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"no tensors")
    rehash(folder)


def no_object(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[1]")
    rehash(folder)


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit": (flip, "do not match its manifest"),
    "truncated": (truncate, "do not match its manifest"),
    "missing weights": (lambda folder: (folder / WEIGHTS).unlink(), "do not match its manifest"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "is missing or no JSON"),
    "no manifest": (lambda folder: (folder / "manifest.json").write_text("{"), "is missing or no JSON"),
    "binary manifest": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "no JSON"),
    "another rank": (lambda folder: reword(folder, '"rank": 2', '"rank": 6'), "manifest was changed"),
    "another format": (lambda folder: reword(folder, '"format": 2', '"format": 3'), "unknown format"),
    "no digest": (lambda folder: reword(folder, '"sha256"', '"sha257"'), "manifest was changed"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "is no JSON object"),
    "a stranger": (lambda folder: (folder / "x.bin").write_bytes(b""), "holds 'x.bin'"),
    "one file more": (lambda folder: (folder / "x.json").write_text("{}"), "do not match"),
    "a link": (lambda folder: (folder / "x.md").symlink_to("/etc/hostname"), "holds 'x.md'"),
    "nan": (nan, "tensor 'lora_A' is not finite"),
    "garbage": (garbage, "cannot be read"),
    "config": (no_object, "is no JSON object"),
    "another's": (lambda folder: rehash(folder, version=1), "belongs to another version"),
    "gone": (lambda folder: folder.rename(folder.parent / "away"), "its folder is gone"),
}


def test_a_manifest_of_the_first_format_had_no_digest(store: AdapterStore) -> None:
    version = store.publish(candidate(2.0))
    path = store.folder("sql", 1) / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": 1}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    assert store.load(version).tensors["lora_A"].eq(2.0).all()


def test_published_files_come_back(home: Home, store: AdapterStore, registry: Registry) -> None:
    version = store.publish(candidate(2.0, acceptance_after=0.75))
    assert version == registry.live("sql")
    assert (version.version, version.path, version.acceptance) == (1, "adapters/sql/v1", 0.75)
    config, tensors, manifest, _ = store.load(version, BASE)
    assert config["r"] == 2
    assert torch.equal(tensors["lora_A"], torch.full((2, 3), 2.0))
    assert (manifest["rank"], manifest["modules"], manifest["parent"]) == (2, ["q_proj"], 0)
    assert set(manifest["files"]) == {"adapter_config.json", WEIGHTS}
    assert manifest["created_at"] == version.created_at
    assert folders(store) == ["v1"]


def test_live_is_the_newest(store: AdapterStore, chain: list[AdapterVersion]) -> None:
    found = store.load_live("sql", BASE)
    assert found is not None
    assert found[0] == chain[2]
    assert found[1].tensors["lora_A"][0, 0] == 3
    assert store.load_live(SHARED) is None


def test_the_shared_adapter_is_stored_like_others(store: AdapterStore) -> None:
    publish(store, 1.0, 0, SHARED)
    assert folders(store, SHARED) == ["v1"]
    assert store.load_live(SHARED, BASE) is not None


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_the_parent_of_a_corrupt_version_serves(
    kind: str,
    store: AdapterStore,
    registry: Registry,
    chain: list[AdapterVersion],
    caplog: pytest.LogCaptureFixture,
) -> None:
    corrupt, message = CORRUPTIONS[kind]
    corrupt(store.folder("sql", 3))
    with pytest.raises(CorruptAdapter, match=message) as caught:
        store.load(chain[2])
    assert str(caught.value).endswith(".")
    found = store.load_live("sql", BASE)
    assert found is not None
    assert found[0].version == 2
    assert registry.live("sql") == replace(chain[1], state="live")
    assert registry.versions("sql")[2].state == "rolled_back"
    assert message in caplog.text


def test_without_an_intact_version_none_serves(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    for version in chain:
        flip(store.folder("sql", version.version))
    assert store.load_live("sql") is None
    assert registry.live("sql") is None
    assert {v.state for v in registry.versions("sql")} == {"rolled_back"}


def test_a_version_of_another_base_is_not_corrupt(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion], caplog: pytest.LogCaptureFixture
) -> None:
    """Not corrupt: it serves again as soon as its base does."""
    with pytest.raises(StorageError, match="belongs to another draft base") as caught:
        store.load(chain[2], "sha256:other")
    assert not isinstance(caught.value, CorruptAdapter)
    assert store.load_live("sql", "sha256:other") is None
    assert "belongs to another draft base" in caplog.text
    assert registry.live("sql") == chain[2]
    rehash(store.folder("sql", 3), base_hash="sha256:other")
    with pytest.raises(CorruptAdapter, match="belongs to another version"):
        store.load(chain[2])


def test_a_corrupt_ancestor_of_a_foreign_version(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    other = store.publish(candidate(parent=3, base_hash="other"))
    flip(store.folder("sql", 3))
    found = store.load_live("sql", BASE)
    assert found is not None
    assert found[0].version == 2
    assert registry.live("sql") == other
    assert registry.versions("sql")[2].state == "rolled_back"


def test_a_reader_falls_back_without_writing(
    path: Path, store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    flip(store.folder("sql", 3))
    (store.folder("sql", 9)).mkdir()
    with Home.open(path, write=False) as reader:
        found = AdapterStore(reader, Registry(reader)).load_live("sql", BASE)
        assert found is not None
        assert found[0].version == 2
        with pytest.raises(StorageError, match="reading only"):
            publish(AdapterStore(reader, Registry(reader)), 1.0, 0)
    assert registry.live("sql") == chain[2]
    assert folders(store) == ["v1", "v2", "v3", "v9"]


def test_a_removed_version_is_not_called_corrupt(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = registry.lineage("sql")
    monkeypatch.setattr(registry, "lineage", lambda domain, base_hash=None: lineage)
    store.remove("sql")
    assert store.load_live("sql") is None
    assert registry.versions("sql") == []


def failing(error: Exception) -> Callable[..., None]:
    """Instead of safetensors' `save_file`: breaks off in the middle of the file."""

    def save(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of")
        raise error

    return save


@pytest.fixture
def unchanged(store: AdapterStore, registry: Registry, chain: list[AdapterVersion]) -> Iterator[None]:
    """After the test the versions are those of `chain`, and the third is live."""
    generation = registry.generation()
    yield
    assert folders(store) == ["v1", "v2", "v3"]
    assert registry.live("sql") == chain[2]
    assert registry.generation() == generation


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (ZeroDivisionError("x"), ZeroDivisionError, "x"),
        (OSError(errno.ENOSPC, "No space left on device"), StorageFull, "No space left"),
        (SafetensorError("I/O error: No space left on device"), StorageFull, "is full"),
        (SafetensorError("header too large"), SafetensorError, "header too large"),
    ],
)
def test_a_candidate_that_cannot_be_written_leaves_nothing(
    fault: Exception,
    error: type[Exception],
    message: str,
    store: AdapterStore,
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moedraft.storage.versions.candidate.save_file", failing(fault))
    with pytest.raises(error, match=message):
        publish(store, 1.0, 3)
    assert registry.next_version("sql") == 4


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_no_version(store: AdapterStore, value: float) -> None:
    with pytest.raises(CorruptAdapter, match="tensor 'lora_A' is not finite"):
        publish(store, value, 3)


@pytest.mark.usefixtures("unchanged")
def test_a_failure_between_folder_and_row_leaves_nothing(
    store: AdapterStore, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(versions: list[AdapterVersion], _: object) -> None:
        assert store.folder("sql", versions[0].version).exists()
        raise StorageError("The database is gone.")

    monkeypatch.setattr(registry, "add_versions", broken)
    with pytest.raises(StorageError, match="is gone"):
        publish(store, 1.0, 3)


# -- a candidate whose files another process has written -----------------------------------------


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    folder = tmp_path / "staged"
    folder.mkdir()
    write_files(candidate(4.0), folder)
    return folder


def test_staged_files_are_moved_into_the_version(store: AdapterStore, staged: Path) -> None:
    (staged / "optimizer.pkl").write_bytes(b"never taken")
    version = store.adopt(candidate().summary(), staged)
    assert [path.name for path in staged.iterdir()] == ["optimizer.pkl"]
    assert sorted(path.name for path in store.folder("sql", 1).iterdir()) == [
        "adapter_config.json",
        WEIGHTS,
        "manifest.json",
    ]
    assert store.load(version, BASE).tensors["lora_A"][0, 0] == 4


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"no tensors")


def linked(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder / "elsewhere")


def not_finite(folder: Path) -> None:
    write_files(candidate(float("nan")), folder)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), StorageError, "No such file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), CorruptAdapter, "no JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), CorruptAdapter, "no JSON object"),
        (no_weights, CorruptAdapter, "cannot be read"),
        (linked, CorruptAdapter, f"holds '{WEIGHTS}'"),
        (not_finite, CorruptAdapter, "not finite"),
    ],
)
def test_damaged_staged_files_leave_nothing(
    damage: Callable[[Path], None],
    error: type[Exception],
    message: str,
    store: AdapterStore,
    staged: Path,
) -> None:
    damage(staged)
    with pytest.raises(error, match=message):
        store.adopt(candidate(parent=3).summary(), staged)


def test_a_staged_folder_that_is_a_link_is_refused(store: AdapterStore, staged: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(staged)
    with pytest.raises(InvalidRequest, match="in the home itself"):
        store.adopt(candidate().summary(), tmp_path / "link")
    assert len(list(staged.iterdir())) == 2
    assert folders(store) == []


def test_a_row_that_fails_leaves_no_folder(
    home: Home, store: AdapterStore, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(registry, "add_versions", full)
        with pytest.raises(StorageFull):
            publish(store, 1.0, 0)
    assert folders(store) == []
    assert publish(store, 1.0, 0).version == 2  # a number that was given is never given again


def test_the_folder_is_whole_before_the_row(
    store: AdapterStore, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    add, fsync = registry.add_versions, os.fsync

    def spy_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        fsync(descriptor)

    def spy_add(versions: list[AdapterVersion], untrained: dict[str, int]) -> list[AdapterVersion]:
        assert set(synced) >= {WEIGHTS, "adapter_config.json", "manifest.json", ".tmp", "sql", "adapters"}
        assert store.load(versions[0]).manifest["version"] == 1
        assert registry.live("sql") is None
        return add(versions, untrained)

    monkeypatch.setattr(os, "fsync", spy_sync)
    monkeypatch.setattr(registry, "add_versions", spy_add)
    publish(store, 1.0, 0)
    assert registry.live("sql") is not None


def test_a_folder_without_row_is_cleaned_up(path: Path) -> None:
    assert subprocess.run([sys.executable, WORKER, "publish", path], check=False).returncode == -9
    assert (path / "adapters/sql/v1" / WEIGHTS).exists()
    with Home.open(path) as home:
        registry = Registry(home)
        store = AdapterStore(home, registry)
        assert folders(store) == []
        assert registry.live("sql") is None
        assert publish(store, 1.0, 0).version == 2


def test_what_the_database_does_not_know_is_set_aside(
    home: Home, store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    """Only what was never a version is deleted."""
    parent = store.folder("sql", 1).parent
    for name in (".tmp-abc", "v9", "notes"):
        (parent / name).mkdir()
        (parent / name / "file").write_text("x")
    store.folder("gone", 1).mkdir(parents=True)
    AdapterStore(home, registry)
    assert folders(store) == ["notes", "v1", "v2", "v3"]
    assert folders(store, "gone") == []
    for content in "ab":
        (parent / "v8").mkdir()
        (parent / "v8" / "file").write_text(content)
        publish(store, 4.0, 3)
    assert folders(store) == ["notes", "v1", "v2", "v3", "v4", "v5"]
    aside = home.path / QUARANTINE
    assert [path.name.split("-")[0] for path in sorted(aside.glob("*/*"))] == ["v1", "v8", "v8", "v9"]
    assert sorted(path.read_text() for path in aside.glob("sql/*/file")) == ["a", "b", "x"]
    store.remove("sql")
    assert [path.name for path in aside.iterdir()] == ["gone"]


def test_a_version_that_cannot_be_set_aside_stays(
    home: Home, store: AdapterStore, chain: list[AdapterVersion]
) -> None:
    """Its number is in use, so the publication that would take it is refused; the next one gets another."""
    unknown = store.folder("sql", 4)
    unknown.mkdir()
    (unknown / "file").write_text("newer")
    (home.path / QUARANTINE).write_text("in the way")
    with pytest.raises(StorageError):
        publish(store, 4.0, 3)
    assert (unknown / "file").read_text() == "newer"
    assert folders(store) == ["v1", "v2", "v3", "v4"]
    assert publish(store, 4.0, 3).version == 5


def test_an_older_database_put_back_costs_no_newer_version(path: Path) -> None:
    with closing(Store.open(path)) as opened:
        opened.registry.add_domain(domain())
        publish(opened.adapters, 1.0, 0)
    older = (path / DATABASE).read_bytes()
    with closing(Store.open(path)) as opened:
        publish(opened.adapters, 2.0, 1)
        newer = (opened.adapters.folder("sql", 2) / WEIGHTS).read_bytes()
    (path / DATABASE).write_bytes(older)
    with closing(Store.open(path)) as opened:
        assert [version.version for version in opened.registry.versions("sql")] == [1]
        assert publish(opened.adapters, 3.0, 1).version == 2
    [aside] = (path / QUARANTINE / "sql").iterdir()
    assert (aside / WEIGHTS).read_bytes() == newer


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_a_new_database_beside_adapters_is_refused(path: Path, write: bool, emptied: bool) -> None:
    with closing(Store.open(path)) as opened:
        opened.registry.add_domain(domain())
        publish(opened.adapters, 1.0, 0)
    for file in path.glob(f"{DATABASE}*"):
        file.unlink()
    if emptied:
        (path / DATABASE).touch()
    with pytest.raises(StorageError, match="has adapters and no database, or an empty one"):
        Store.open(path, write=write)
    assert (path / DATABASE).exists() == emptied
    assert (path / "adapters/sql/v1" / WEIGHTS).exists()


@pytest.mark.parametrize("name", ["../sql", "..", "", "a/b", "/tmp", "sql\0", "SQL"])
def test_bad_names_never_leave_the_folder(name: str, home: Home, store: AdapterStore) -> None:
    version = AdapterVersion(name, 1, 0, "adapters/sql/v1", BASE, None, 1.0, "live")
    for use in (
        lambda: store.folder(name, 1),
        lambda: store.load(version),
        lambda: store.remove(name),
        lambda: publish(store, 1.0, 0, name),
    ):
        with pytest.raises(InvalidRequest):
            use()
    assert [path.name for path in home.path.parent.iterdir()] == ["home"]


def test_the_path_of_a_row_is_not_trusted(store: AdapterStore, chain: list[AdapterVersion]) -> None:
    assert store.load(replace(chain[0], path="../../etc")).tensors["lora_A"][0, 0] == 1


def test_an_unknown_domain_writes_nothing(store: AdapterStore) -> None:
    with pytest.raises(InvalidRequest, match="no domain named 'python'"):
        publish(store, 1.0, 0, "python")
    assert folders(store, "python") == []


def test_an_unreadable_file_is_not_corrupt(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        assert store.load_live("sql") is None
    assert registry.live("sql") == chain[2]


def test_removing_deletes_files_and_rows(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    generation = registry.generation()
    store.remove("sql")
    assert not store.folder("sql", 1).parent.exists()
    assert registry.versions("sql") == []
    assert registry.generation() == generation + 1
    store.remove("sql")
    assert publish(store, 1.0, 0).version == 4


def test_removing_works_after_the_domain_is_gone(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    registry.remove_domain("sql")
    store.remove("sql")
    assert not store.folder("sql", 1).parent.exists()
    registry.add_domain(domain())
    assert store.load_live("sql") is None


def test_pruning_keeps_newest_live_and_parent(store: AdapterStore, registry: Registry) -> None:
    for number in range(1, 9):
        publish(store, float(number), number - 1)
    registry.promote("sql", 3)
    generation = registry.generation()
    assert store.prune("sql", keep=2) == [1, 4, 5, 6]
    assert folders(store) == ["v2", "v3", "v7", "v8"]
    assert [v.version for v in registry.versions("sql")] == [2, 3, 7, 8]
    assert registry.generation() == generation
    assert store.prune("sql") == []
    assert registry.rollback("sql") == store.load_live("sql")[0]  # type: ignore[index]


def test_each_draft_base_has_its_own_line(
    store: AdapterStore, registry: Registry, chain: list[AdapterVersion]
) -> None:
    for number in (4, 5, 6, 7):
        store.publish(candidate(parent=number - 1 if number > 4 else 0, base_hash="b"))
    assert store.prune("sql", keep=2) == [1, 4, 5]
    assert registry.live("sql").version == 7  # type: ignore[union-attr]
    flip(store.folder("sql", 3))
    assert store.load_live("sql", BASE)[0].version == 2  # type: ignore[index]
    assert store.load_live("sql", "b")[0].version == 7  # type: ignore[index]
    registry.rollback("sql")
    assert registry.rollback("sql") == store.load_live("sql", BASE)[0]  # type: ignore[index]


def test_deeply_nested_json_is_corrupt(store: AdapterStore, chain: list[AdapterVersion]) -> None:
    (store.folder("sql", 3) / "manifest.json").write_text("[" * 200_000)
    assert store.load_live("sql", BASE)[0].version == 2  # type: ignore[index]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "File too large"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: File too large (os error 27)"),
    ],
)
def test_a_write_limit_is_a_full_disk(
    store: AdapterStore, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.storage.versions.candidate.save_file", failing(error))
    with pytest.raises(StorageFull):
        publish(store, 1.0, 0)
    assert folders(store) == []


# -- several adapters in one transaction ----------------------------------------------------------


def joint(value: float, shared: int, expert: int) -> list[Candidate]:
    """A joint update's candidates, which began with these versions."""
    return [candidate(value, shared, SHARED), candidate(value, expert)]


def test_a_joint_update_becomes_live_at_once(store: AdapterStore, registry: Registry) -> None:
    before = registry.generation()
    made = store.publish_together(joint(1.0, 0, 0))
    assert [(one.domain, one.version, one.stood_on) for one in made] == [(SHARED, 1, None), ("sql", 1, 1)]
    assert [registry.live(one.domain) for one in made] == made
    assert registry.generation() == before + 1
    alone = publish(store, 2.0, 1)
    assert alone.stood_on == 1


def test_a_joint_update_with_one_bad_part_changes_nothing(store: AdapterStore, registry: Registry) -> None:
    before = store.publish_together(joint(1.0, 0, 0))
    generation = registry.generation()
    bad = [candidate(2.0, 1, SHARED), candidate(float("nan"), 1)]
    with pytest.raises(CorruptAdapter, match="not finite"):
        store.publish_together(bad)
    assert [registry.live(one.domain) for one in before] == before
    assert (folders(store), folders(store, SHARED)) == (["v1"], ["v1"])
    assert registry.generation() == generation


def test_a_row_that_fails_takes_the_other_rows_with_it(store: AdapterStore, registry: Registry) -> None:
    before = store.publish_together(joint(1.0, 0, 0))
    with pytest.raises(InvalidRequest, match="cannot descend from 9"):
        store.publish_together([candidate(2.0, 1, SHARED), candidate(2.0, 9)])
    with pytest.raises(InvalidRequest, match="'sql' was changed meanwhile"):
        store.publish_together([candidate(2.0, 1, SHARED)], Also({"sql": 7}))
    assert [registry.live(one.domain) for one in before] == before
    assert (folders(store), folders(store, SHARED)) == (["v1"], ["v1"])


def test_an_expert_is_put_back_with_the_shared_adapter(store: AdapterStore, registry: Registry) -> None:
    store.publish_together(joint(1.0, 0, 0))
    store.publish_together([candidate(2.0, 1, SHARED)], Also({"sql": 1}))
    assert registry.live("sql") is None
    assert [one.state for one in registry.versions("sql")] == ["rolled_back"]
    live = registry.live(SHARED)
    assert live is not None
    assert live.version == 2
    assert publish(store, 3.0, 0).stood_on == 2


@pytest.mark.parametrize("moment", ["joint", "joint-row"])
def test_a_crash_within_a_joint_publication_leaves_the_former_versions(path: Path, moment: str) -> None:
    assert subprocess.run([sys.executable, WORKER, moment, path], check=False).returncode == -9
    with Home.open(path) as home:
        registry = Registry(home)
        store = AdapterStore(home, registry)
        for name in (SHARED, "sql"):
            found = store.load_live(name, BASE)
            assert found is not None
            assert found[0].version == 1
            assert found[1].tensors["lora_A"][0, 0] == 1
            assert folders(store, name) == ["v1"]
        made = store.publish_together(joint(3.0, 1, 1))
        assert [registry.live(one.domain) for one in made] == made
