"""From a candidate to a version: through both outlets, whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
import torch
from candidates import candidate

from moedraft.core import SHARED, AdapterVersion, Domain, MoedraftError, StorageError, UpdateRecord
from moedraft.distill.link import ServerLink, ServerOutlet
from moedraft.distill.messages import (
    TRAINING,
    Begin,
    Learned,
    Message,
    Noted,
    Published,
    Refused,
    StandAside,
    Withdraw,
    Withdrawn,
    from_trainer,
)
from moedraft.distill.messages import Publish as PublishMessage
from moedraft.distill.outlet import KEEP_VERSIONS, HomeOutlet, Outlet
from moedraft.storage import AdapterStore, changes
from moedraft.storage.store import Store
from moedraft.storage.versions.version_rows import Also


@dataclass
class FakeServer:
    """Answers a trainer's messages over pipes, as the supervisor does, until it is told to `die`."""

    store: Store
    reads: IO[bytes]
    writes: IO[bytes]
    dies: bool = False

    def serve(self) -> None:
        while line := self.reads.readline():
            if self.dies:
                break
            self.tell(self._reply(from_trainer.validate_json(line)))
        self.writes.close()

    def tell(self, message: Message) -> None:
        self.writes.write(message.line())
        self.writes.flush()

    def _reply(self, message: Message) -> Message:
        outlet, home = HomeOutlet(self.store), self.store.home.path
        try:
            if isinstance(message, PublishMessage):
                parts = [(one.summary(), home / TRAINING / one.folder) for one in message.parts]
                return Published(versions=tuple(outlet.adopt(parts, message.also())))
            if isinstance(message, Withdraw):
                return Withdrawn(version=outlet.withdraw(message.expert, message.version))
            if isinstance(message, StandAside):
                outlet.stand_aside(message.names)
                return Noted()
            assert isinstance(message, Learned)
            outlet.learned(message.expert, message.last_id, message.update)
            return Noted()
        except MoedraftError as error:
            return Refused(reason=str(error))


@pytest.fixture
def store(store: Store) -> Store:
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    return store


@pytest.fixture
def server(store: Store) -> Iterator[tuple[FakeServer, ServerLink]]:
    (link_reads, server_writes), (server_reads, link_writes) = os.pipe(), os.pipe()
    fake = FakeServer(store, os.fdopen(server_reads, "rb"), os.fdopen(server_writes, "wb"))
    ends = os.fdopen(link_reads, "rb"), os.fdopen(link_writes, "wb", buffering=0)
    thread = threading.Thread(target=fake.serve)
    thread.start()
    link = ServerLink(*ends)
    fake.tell(Begin(settings={}))
    link.begin()
    yield fake, link
    ends[1].close()
    thread.join(10)
    link.gone.wait(10)
    ends[0].close()
    fake.reads.close()


@pytest.fixture(params=["home", "server"])
def outlet(request: pytest.FixtureRequest, store: Store) -> Outlet:
    if request.param == "home":
        return HomeOutlet(store)
    _, link = request.getfixturevalue("server")
    return ServerOutlet(link, store.home.path)


def nothing_is_half_done(store: Store, versions: list[int]) -> bool:
    """These versions of "code" and no other file that an update leaves."""
    folder = store.home.path / "adapters" / "code"
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    staged = store.home.path / TRAINING
    rows = [version.version for version in store.registry.versions("code")]
    clean = not staged.exists() or not list(staged.iterdir())
    return clean and rows == versions and left == [f"v{number}" for number in versions]


def test_a_candidate_becomes_the_live_version(outlet: Outlet, store: Store) -> None:
    made = candidate("code", 3.0, rank=2, modules=("a", "b"))
    [version] = outlet.publish([made])
    assert version == store.registry.live("code")
    assert (version.version, version.parent, version.acceptance) == (1, 0, made.acceptance_after)
    config, tensors, manifest, _ = store.adapters.load(version, "base")
    assert config == made.config
    assert torch.equal(tensors["lora_A"], made.tensors["lora_A"])
    assert (manifest["rank"], manifest["modules"]) == (2, ["a", "b"])
    assert nothing_is_half_done(store, [1])


def test_a_joint_update_becomes_live_at_once(outlet: Outlet, store: Store) -> None:
    generation = store.registry.generation()
    made = outlet.publish([candidate(SHARED), candidate("code")])
    assert made == [store.registry.live(SHARED), store.registry.live("code")]
    assert [one.stood_on for one in made] == [None, 1]
    assert store.registry.generation() == generation + 1
    assert outlet.publish([candidate(SHARED, parent=1)], Also({"code": 1}))[0].version == 2
    assert store.registry.live("code") is None
    staged = store.home.path / TRAINING
    assert not staged.exists() or not list(staged.iterdir())


def test_a_domain_that_was_pinned_meanwhile_is_not_left_to_the_base(outlet: Outlet, store: Store) -> None:
    store.registry.add_domain(Domain("prose", "", ("x",) * 8, 0.0))
    changes.pin(store, "code")
    outlet.stand_aside(["code", "prose"])
    assert store.registry.unadapted() == {"prose"}


def test_versions_and_who_is_left_to_the_base_change_in_one_transaction(outlet: Outlet, store: Store) -> None:
    """Else a crash between them would leave domains to adapters that the gate took from them."""
    for name in ("prose", "pinned", "chosen"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    changes.pin(store, "pinned")
    outlet.publish([candidate(SHARED), candidate("chosen")])
    changes.promote(store, "chosen", 1)
    generation, writes = store.registry.generation(), store.home.durable_writes
    outlet.publish(
        [candidate(SHARED, parent=1)], Also(unadapted=["code", "pinned", "chosen", "unknown"], purges=0)
    )
    assert store.registry.unadapted() == {"code"}
    assert store.registry.generation() > generation
    between = store.home.durable_writes
    outlet.publish([candidate(SHARED, parent=2)])
    assert store.home.durable_writes - between == between - writes, "no transaction more than without"
    assert store.registry.unadapted() == {"code"}, "nothing was said of it"
    outlet.publish([candidate(SHARED, parent=3)], Also(unadapted=()))
    assert store.registry.unadapted() == frozenset()


def test_what_a_person_chose_is_not_left_to_the_base(outlet: Outlet, store: Store) -> None:
    outlet.publish([candidate("code")])
    changes.promote(store, "code", 1)
    outlet.stand_aside(["code"])
    assert store.registry.unadapted() == frozenset()


def test_that_nobody_is_to_be_trained_is_a_choice_too(outlet: Outlet, store: Store) -> None:
    outlet.publish([candidate("code")])
    changes.promote(store, "code", 0)
    outlet.stand_aside(["code"])
    assert store.registry.unadapted() == frozenset()
    outlet.publish([candidate("code", parent=0)])
    outlet.stand_aside(["code"])
    assert store.registry.unadapted() == {"code"}, "something newer came since"


def test_what_may_have_learned_from_purged_records_is_refused(outlet: Outlet, store: Store) -> None:
    purges = store.registry.purges()
    store.replay.purge("code")
    with pytest.raises(MoedraftError, match="purged meanwhile"):
        outlet.publish([candidate(SHARED), candidate("code")], Also(unadapted=["code"], purges=purges))
    assert store.registry.live(SHARED) is None
    assert store.registry.unadapted() == frozenset()
    assert nothing_is_half_done(store, [])


def test_versions_that_cannot_be_removed_do_not_undo_a_publication(
    outlet: Outlet, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> list[int]:
        raise StorageError("the disk is full")

    monkeypatch.setattr(AdapterStore, "prune", full)
    assert outlet.publish([candidate("code")]) == [store.registry.live("code")]
    assert "the disk is full" in caplog.text


def test_a_version_is_taken_back_unless_another_is_live(outlet: Outlet, store: Store) -> None:
    outlet.publish([candidate(SHARED), candidate("code")])
    outlet.publish([candidate(SHARED, parent=1), candidate("code", parent=1)])
    assert outlet.withdraw(SHARED, 2) == 1
    assert [one.version for one in (store.registry.live(SHARED), store.registry.live("code")) if one] == [
        1,
        1,
    ]
    with pytest.raises(MoedraftError, match="changed meanwhile"):
        outlet.withdraw(SHARED, 2)
    assert outlet.withdraw("code", 1) == 0
    assert store.registry.live("code") is None


def test_a_joint_update_is_refused_as_a_whole(outlet: Outlet, store: Store) -> None:
    outlet.publish([candidate(SHARED), candidate("code")])
    for refused in ([candidate(SHARED, parent=1), candidate("code", float("nan"), parent=1)],):
        with pytest.raises(MoedraftError, match="not finite"):
            outlet.publish(refused)
    changes.pin(store, "code")
    with pytest.raises(MoedraftError, match="'code' is pinned"):
        outlet.publish([candidate(SHARED, parent=1), candidate("code", parent=1)])
    with pytest.raises(MoedraftError, match="'code' is pinned"):
        outlet.publish([candidate(SHARED, parent=1)], Also({"code": 1}))
    live = store.registry.live(SHARED)
    assert live is not None
    assert live.version == 1


def test_old_versions_go(outlet: Outlet, store: Store) -> None:
    for number in range(KEEP_VERSIONS + 3):
        outlet.publish([candidate("code", float(number), parent=number)])
    last = KEEP_VERSIONS + 3
    assert nothing_is_half_done(store, list(range(last - KEEP_VERSIONS + 1, last + 1)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_candidate_that_is_not_finite_is_refused(outlet: Outlet, store: Store, value: float) -> None:
    [first] = outlet.publish([candidate("code")])
    with pytest.raises(StorageError, match="tensor 'lora_A' is not finite"):
        outlet.publish([candidate("code", value, parent=1)])
    assert store.registry.live("code") == first
    assert nothing_is_half_done(store, [1])


def test_a_candidate_of_nobody_is_refused(outlet: Outlet, store: Store) -> None:
    with pytest.raises(MoedraftError, match="no domain named 'prose'"):
        outlet.publish([candidate("prose")])
    assert not (store.home.path / "adapters" / "prose").exists()
    assert nothing_is_half_done(store, [])


def test_a_failure_before_the_row_leaves_nothing(
    outlet: Outlet, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(versions: list[AdapterVersion], _: object) -> None:
        assert store.adapters.folder("code", versions[0].version).exists()
        raise StorageError("The database is gone.")

    with monkeypatch.context() as patch:
        patch.setattr(store.registry, "add_versions", broken)
        with pytest.raises(StorageError, match="is gone"):
            outlet.publish([candidate("code")])
    assert nothing_is_half_done(store, [])
    assert outlet.publish([candidate("code")])[0].parent == 0


def test_what_an_update_did_is_written_down(outlet: Outlet, store: Store) -> None:
    record = UpdateRecord(SHARED, 1, 16, 1, 1.0, 2.0, 0.50, None)
    outlet.learned(SHARED, 7, record)
    outlet.learned("code", 8, None)
    assert store.updates.recent() == [record]
    assert [store.registry.get_meta(f"trained:{name}") for name in (SHARED, "code")] == ["7", "8"]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_files_that_cannot_be_staged_never_reach_the_server(
    store: Store, server: tuple[FakeServer, ServerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.storage.versions.candidate.save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        ServerOutlet(server[1], store.home.path).publish([candidate("code")])
    assert nothing_is_half_done(store, [])


def test_a_server_that_dies_has_published_nothing(
    store: Store, server: tuple[FakeServer, ServerLink]
) -> None:
    server[0].dies = True
    with pytest.raises(SystemExit):
        ServerOutlet(server[1], store.home.path).publish([candidate("code")])
    assert nothing_is_half_done(store, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no tensors"),
        lambda folder: (folder / "adapter_config.json").unlink(),
        lambda folder: (folder / "adapter_config.json").write_text("[]"),
    ],
)
def test_files_that_are_damaged_on_their_way_are_refused(
    store: Store,
    server: tuple[FakeServer, ServerLink],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    def ask(message: PublishMessage) -> Message:
        damage(store.home.path / TRAINING / message.parts[0].folder)
        return answer(message)

    link = server[1]
    answer = link.ask
    monkeypatch.setattr(link, "ask", ask)
    with pytest.raises(StorageError):
        ServerOutlet(link, store.home.path).publish([candidate("code")])
    assert nothing_is_half_done(store, [])


def test_the_base_alone_serves_whom_the_trainer_says(outlet: Outlet, store: Store) -> None:
    outlet.stand_aside({"code"})
    assert store.registry.unadapted() == {"code"}
    outlet.stand_aside(())
    assert store.registry.unadapted() == frozenset()
