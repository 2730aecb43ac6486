"""The trainer process, without the process: its turns over real pipes, with the test as the server."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distill_rig import Rig

from moedraft.config import load_settings
from moedraft.core import SHARED, InvalidRequest, StorageError
from moedraft.distill.link import ServerLink, ServerOutlet
from moedraft.distill.loop import DistillLoop
from moedraft.distill.messages import (
    TRAINING,
    Begin,
    Learned,
    Message,
    Noted,
    Pause,
    Publish,
    Published,
    Refused,
    Resume,
    StateReport,
    from_trainer,
)
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.pace.governor import Load, read_load, why_wait, write_load
from moedraft.distill.process import OutOfMemory, Process, work
from moedraft.distill.single.trainer import Trainer
from moedraft.learning_state import NO_RECORDS, LearningKind
from moedraft.storage.store import Store

from random_models import random_model


@dataclass
class Parent:
    """The server's side: answers by `HomeOutlet`, keeps what it heard, and knows when the process ended."""

    rig: Rig
    to_process: Any
    from_process: Any
    thread: threading.Thread | None = None
    refuse: str = ""
    ended_by: str = ""

    def __post_init__(self) -> None:
        self.heard: list[Message] = []
        self.on_message: Callable[[Message], None] = lambda message: None

    def tell(self, message: Message) -> None:
        self.to_process.write(message.line())
        self.to_process.flush()

    def hear_until(self, wanted: Callable[[Message], bool]) -> Message:
        while True:
            message = from_trainer.validate_json(self.from_process.readline())
            self.heard.append(message)
            if isinstance(message, Publish | Learned):
                self.tell(self.reply(message))
            self.on_message(message)
            if wanted(message):
                return message

    def states(self) -> list[StateReport]:
        return [message for message in self.heard if isinstance(message, StateReport)]

    def load(self, idle: float = 1.0, waiting: int = 0, age: float = 0.0) -> None:
        write_load(self.rig.store.registry, Load(idle, waiting, time.time() - age))

    def leave(self) -> None:
        """The server dies; the process ends by itself."""
        if not self.to_process.closed:
            self.to_process.close()
        assert self.thread is not None
        self.thread.join(10)
        assert not self.thread.is_alive()

    def reply(self, message: Publish | Learned) -> Message:
        if self.refuse:
            return Refused(reason=self.refuse)
        outlet = HomeOutlet(self.rig.store)
        if isinstance(message, Learned):
            outlet.learned(message.expert, message.last_id, message.update)
            return Noted()
        home = self.rig.store.home.path
        parts = [(one.summary(), home / TRAINING / one.folder) for one in message.parts]
        return Published(versions=tuple(outlet.adopt(parts, message.also())))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with 20 records of "code", to be copied."""
    home = tmp_path_factory.mktemp("served") / "home"
    rig = Rig(home)
    rig.serve("code", 20, seed=1)
    rig.store.close()
    return home


@pytest.fixture
def parent(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    """A process that learns from a home with 20 records of "code"; nothing is said yet."""
    monkeypatch.setattr("moedraft.distill.process.LOOK_SECONDS", 0.02)
    rig = Rig(shutil.copytree(served, tmp_path / "home"))
    (process_reads, parent_writes), (parent_reads, process_writes) = os.pipe(), os.pipe()
    one = Parent(rig, os.fdopen(parent_writes, "wb"), os.fdopen(parent_reads, "rb"))
    ends = os.fdopen(process_reads, "rb"), os.fdopen(process_writes, "wb", buffering=0)
    link = ServerLink(*ends)

    def live() -> None:
        store = Store.open(rig.store.home.path, write=False)
        try:
            settings = load_settings(**link.begin().settings)
            trainer = Trainer(
                random_model("llama", 1, layers=2),
                store,
                rank=4,
                shared_rank=4,
                steps=settings.update_steps,
                tokens_per_step=256,
            )
            loop = DistillLoop(trainer, store, ServerOutlet(link, store.home.path), settings.update_every)
            Process(settings, store, loop, link).run()
        except SystemExit:
            pass
        except OutOfMemory as error:
            one.ended_by = str(error)
        finally:
            store.close()
            ends[1].close()

    one.thread = threading.Thread(target=live)
    one.thread.start()
    yield one
    one.leave()
    for file in (one.from_process, ends[0]):
        file.close()
    rig.store.close()


def begin(parent: Parent, paused: bool = False, **settings: object) -> None:
    home = str(parent.rig.store.home.path)
    parent.tell(Begin(settings={"home": home, "update_steps": 3, **settings}, paused=paused))


def is_state(**wanted: object) -> Callable[[Message], bool]:
    def check(message: Message) -> bool:
        return isinstance(message, StateReport) and all(getattr(message, k) == v for k, v in wanted.items())

    return check


def is_learned(message: Message) -> bool:
    return isinstance(message, Learned)


def test_an_update_is_handed_over_and_published(parent: Parent) -> None:
    parent.load()
    begin(parent)
    parent.hear_until(is_learned)
    parent.hear_until(is_learned)
    store = parent.rig.store
    for name in (SHARED, "code"):
        live = store.registry.live(name)
        assert live is not None
        assert live.version == 1
        assert store.adapters.load(live).manifest["rank"] == 4
        assert store.registry.get_meta(f"trained:{name}") == "20"
    assert [(one.expert, one.version, one.steps) for one in store.updates.recent()] == [
        (SHARED, 1, 3),
        ("code", 1, 3),
    ]
    parent.hear_until(is_state(kind="waiting", reason=NO_RECORDS))
    assert list((store.home.path / TRAINING).iterdir()) == []
    training = [state for state in parent.states() if state.expert == "code"]
    assert [(state.step, state.steps) for state in training] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert training[-1].loss is not None
    parent.rig.loader.refresh([], now=True)
    assert parent.rig.bank.version("code") == 1


@pytest.mark.parametrize(
    ("load", "paused", "word"),
    [
        (None, False, "no word"),
        ({"age": 100.0}, False, "no word"),
        ({"idle": 0.1}, False, "busy"),
        ({"waiting": 2}, False, "2 requests"),
        ({}, True, "paused"),
    ],
)
def test_it_waits_where_there_is_no_room(
    parent: Parent, load: dict[str, Any] | None, paused: bool, word: str
) -> None:
    if load is not None:
        parent.load(**load)
    begin(parent, paused)
    state = parent.hear_until(lambda message: isinstance(message, StateReport))
    assert isinstance(state, StateReport)
    assert word in state.reason
    parent.hear_until(is_state(kind="waiting"))  # the heartbeat
    assert parent.rig.store.registry.versions() == []
    parent.load()
    parent.tell(Resume())
    parent.hear_until(is_learned)


@pytest.mark.parametrize("how", ["load", "pause"])
def test_it_yields_between_two_optimiser_steps(parent: Parent, how: str) -> None:
    def occupy(message: Message) -> None:
        if is_state(step=1)(message) and not yielding:
            yielding.append(message)
            parent.load(waiting=3) if how == "load" else parent.tell(Pause())

    yielding: list[Message] = []
    parent.on_message = occupy
    parent.load()
    begin(parent, update_steps=40)
    state = parent.hear_until(is_state(kind="yielding"))
    assert isinstance(state, StateReport)
    assert 1 <= state.step < 40
    again = parent.hear_until(is_state())  # a sign of life, no step further
    assert isinstance(again, StateReport)
    assert (again.step, again.kind) == (state.step, LearningKind.YIELDING)
    parent.load()
    parent.tell(Resume())
    learned = parent.hear_until(is_learned)
    assert isinstance(learned, Learned)
    assert learned.update is not None
    assert learned.update.steps == 40


def test_waiting_is_no_time_spent_learning(parent: Parent) -> None:
    def occupy(message: Message) -> None:
        if is_state(step=1, kind="training", expert=SHARED)(message) and len(parent.states()) < 5:
            parent.load(waiting=3)

    parent.on_message = occupy
    parent.load()
    began = time.monotonic()
    begin(parent)
    parent.hear_until(is_state(kind="yielding"))
    time.sleep(0.5)  # what must not be counted is time itself
    parent.load()
    learned = parent.hear_until(is_learned)
    assert isinstance(learned, Learned)
    assert learned.update is not None
    assert learned.update.seconds <= time.monotonic() - began - 0.5


def test_a_refusal_is_said_and_tried_again_later(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.distill.process.LONGEST_REST", 0.1)
    parent.refuse = "The disk is full."
    parent.load()
    begin(parent)
    parent.hear_until(is_state(reason="the last update failed", error="The disk is full."))
    assert list((parent.rig.store.home.path / TRAINING).iterdir()) == []
    parent.refuse = ""
    parent.hear_until(is_learned)
    parent.hear_until(lambda message: isinstance(message, StateReport) and message.error is None)


def test_records_that_teach_nothing_are_noted_all_the_same(parent: Parent) -> None:
    parent.rig.store.registry.set_meta("target_id", "another target")
    parent.load()
    begin(parent)
    learned = parent.hear_until(is_learned)
    assert isinstance(learned, Learned)
    assert (learned.expert, learned.last_id, learned.update) == (SHARED, 20, None)


def test_measuring_is_a_sign_of_life_too(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.distill.process.HEARTBEAT", 0.0)
    parent.load()
    begin(parent)
    parent.hear_until(is_learned)
    said = [(state.step, state.loss is None) for state in parent.states() if state.expert == SHARED]
    assert said.count((0, True)) > 20  # the records, and the measurement before
    assert said.count((3, False)) > 1  # the last step, and the measurement after


@pytest.mark.parametrize("when", ["begin", "waiting", "training", "publishing"])
def test_it_ends_when_the_server_is_gone(parent: Parent, when: str) -> None:
    parent.load(waiting=int(when == "waiting"))
    if when != "begin":
        begin(parent, update_steps=1 if when == "publishing" else 1000)
        parent.reply = lambda message: Noted()  # type: ignore[method-assign]
        seen = {
            "waiting": is_state(kind="waiting"),
            "training": is_state(step=2),
            "publishing": is_state(step=1),
        }[when]
        parent.hear_until(seen)
    if when == "begin":
        parent.tell(Begin(settings={"home": str(parent.rig.store.home.path)}))
    parent.leave()
    assert parent.rig.store.registry.versions() == []
    folder = parent.rig.store.home.path / TRAINING
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_server_that_reads_no_more_is_gone_too(parent: Parent) -> None:
    parent.from_process.close()
    parent.load()
    begin(parent, update_steps=1000)
    assert parent.thread is not None
    parent.thread.join(20)
    assert not parent.thread.is_alive()


def test_without_its_first_line_it_says_who_starts_it() -> None:
    read, write = os.pipe()
    os.close(write)
    with os.fdopen(read, "rb") as incoming, pytest.raises(InvalidRequest, match="moedraft serve"):
        ServerLink(incoming, incoming).begin()


@pytest.mark.parametrize(("share", "idle"), [(0.0, True), (0.25, False)])
def test_only_without_a_share_it_runs_when_nobody_wants_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, idle: bool
) -> None:
    called = list[bool]()
    monkeypatch.setattr("moedraft.distill.process.run_when_idle", lambda: called.append(True))
    begun = Begin(settings={"home": str(tmp_path / "none"), "train_cpu_share": share})
    link: Any = SimpleNamespace(begin=lambda: begun, send=lambda message: None)
    with pytest.raises(StorageError):
        work(link)
    assert bool(called) == idle


def test_a_load_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "home")
    assert read_load(store.registry) is None
    for text in ("", "7", "[]", "{", '{"idle": 1}', '{"idle": 1, "waiting": 0, "at": 0, "more": 1}'):
        store.registry.set_meta("load", text)
        assert read_load(store.registry) is None
    store.close()


def test_room_is_what_the_settings_say() -> None:
    settings = load_settings(home="/nowhere", train_idle_share=0.5, train_max_waiting=2)
    assert why_wait(Load(0.5, 2, 100.0), settings, now=100.0) is None
    assert "busy (49% idle)" in str(why_wait(Load(0.49, 2, 100.0), settings, now=100.0))
    assert "3 requests" in str(why_wait(Load(0.5, 3, 100.0), settings, now=100.0))
    assert why_wait(Load(1.0, 0, 100.0), settings, now=130.0) == "no word from the engine"
    assert why_wait(None, settings) == "no word from the engine"


def test_a_home_that_fails_is_waited_for(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise StorageError("The home is gone.")

    parent.load()
    with monkeypatch.context() as patch:
        patch.setattr("moedraft.distill.process.read_load", broken)
        begin(parent)
        parent.hear_until(is_state(kind="waiting", reason="The home is gone."))
    with monkeypatch.context() as patch:
        patch.setattr("moedraft.distill.loop.news", broken)
        parent.hear_until(is_state(error="The home is gone."))
    parent.hear_until(is_learned)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")],
)
def test_a_process_that_finds_no_memory_ends_for_a_new_one(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """By itself it would try again for ever with the memory that it has lost or may not have."""

    def train(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "update", train)
    parent.load()
    begin(parent)
    assert parent.thread is not None
    parent.thread.join(20)
    assert not parent.thread.is_alive()
    assert "no memory" in parent.ended_by
