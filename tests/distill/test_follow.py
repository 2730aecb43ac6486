"""A trainer that follows a server: letters in the home, one trainer at a time, an end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distill_rig import Rig
from waiting import wait_for as until

from moedraft.config import load_settings
from moedraft.core import SHARED, StorageError
from moedraft.distill.claim import learner, learning_for
from moedraft.distill.following import mail
from moedraft.distill.following.follow import LONGEST_PAUSE, FollowingProcess
from moedraft.distill.following.mail import MailLink, letters, mail_of
from moedraft.distill.link import ServerOutlet
from moedraft.distill.loop import DistillLoop
from moedraft.distill.messages import TRAINING, Learned, Noted, StateReport, Withdraw
from moedraft.distill.pace.governor import PAUSED, Load, write_load
from moedraft.distill.single.trainer import Trainer
from moedraft.learning_state import NO_RECORDS, waiting
from moedraft.serve.supervisor.mailroom import Mailroom
from moedraft.serve.supervisor.publisher import Publisher
from moedraft.storage.store import Store

from random_models import random_model

NEWS = Learned(expert="code", last_id=3, update=None)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    yield rig
    rig.store.close()


def link_to(rig: Rig) -> MailLink:
    return MailLink(rig.store.home.path, rig.store.registry, lambda report: None)


def mailroom_of(rig: Rig, base_hash: str | None = None) -> Mailroom:
    return Mailroom(rig.store.home.path, Publisher(rig.store, base_hash, lambda: None))


# -- letters -----------------------------------------------------------------------------------


def test_a_letter_waits_for_the_server_and_leaves_nothing(rig: Rig) -> None:
    link, found = link_to(rig), list[Any]()
    asking = threading.Thread(target=lambda: found.append(link.ask(NEWS)))
    asking.start()
    until(lambda: len(list(letters(rig.store.home.path))) == 1)
    assert not found
    mailroom_of(rig).look()
    asking.join(10)
    assert found == [Noted()]
    assert rig.store.registry.get_meta("trained:code") == "3"
    assert list(mail_of(rig.store.home.path).iterdir()) == []


def test_what_the_server_refuses_is_an_error_in_its_words(rig: Rig) -> None:
    room, link = mailroom_of(rig), link_to(rig)
    room.start()
    try:
        with pytest.raises(StorageError, match="the live version of 'code' was changed meanwhile"):
            link.ask(Withdraw(expert="code", version=4))
    finally:
        room.stop()


@pytest.mark.parametrize("text", ["", "{", '{"type": "begin"}', '{"type": "state", "kind": "training"}'])
def test_what_is_no_letter_is_refused_and_the_others_are_answered(rig: Rig, text: str) -> None:
    folder = mail_of(rig.store.home.path)
    folder.mkdir(parents=True)
    (folder / f"0{mail.ASK}").write_text(text)
    (folder / f"1{mail.ASK}").write_bytes(NEWS.line())
    mailroom_of(rig).look()
    assert "does not understand" in (folder / f"0{mail.REPLY}").read_text()
    assert (folder / f"1{mail.REPLY}").read_bytes() == Noted().line()


def test_what_was_done_is_not_done_again_where_the_reply_could_not_be_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, room, done = mail_of(rig.store.home.path), mailroom_of(rig), list[Any]()
    folder.mkdir(parents=True)
    (folder / f"1{mail.ASK}").write_bytes(NEWS.line())
    monkeypatch.setattr(Publisher, "done", lambda self, message: done.append(message) or Noted())

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mail, "_put", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no space"):
                room.look()
    room.look()
    assert len(done) == 1
    assert (folder / f"1{mail.REPLY}").read_bytes() == Noted().line()


def test_a_server_that_does_not_answer_is_named(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "PATIENCE", 0.1)
    told: list[StateReport] = []
    link = MailLink(rig.store.home.path, rig.store.registry, told.append)
    threading.Timer(0.6, link.stop.set).start()
    with pytest.raises(SystemExit):
        link.ask(NEWS)
    assert [report.state().reason for report in told] == ["the server does not answer"]


def test_who_waits_for_an_answer_can_be_stopped(rig: Rig) -> None:
    link = link_to(rig)
    threading.Timer(0.2, link.stop.set).start()
    with pytest.raises(SystemExit):
        link.ask(NEWS)
    assert list(letters(rig.store.home.path)) == []


def test_a_pause_reaches_who_follows(rig: Rig) -> None:
    link = link_to(rig)
    assert not link.paused
    rig.store.registry.set_meta(PAUSED, "1")
    assert link.paused


# -- one at a time -----------------------------------------------------------------------------


def test_two_trainers_of_one_home_are_refused(rig: Rig) -> None:
    refused = pytest.raises(StorageError, match=f"Another trainer .pid {os.getpid()}. learns for the home")
    with learning_for(rig.store.home.path), refused, learning_for(rig.store.home.path):
        pass
    with learning_for(rig.store.home.path):
        pass


def test_who_learns_for_a_home_can_be_asked_at_any_time(rig: Rig, tmp_path: Path) -> None:
    home, enough = rig.store.home.path, threading.Event()

    def ask() -> None:
        while not enough.is_set():
            learner(home)

    assert learner(tmp_path / "nowhere") is None
    assert learner(home) is None
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(300):  # a trainer is never refused because somebody asks
            with learning_for(home):
                assert learner(home) == os.getpid()
        assert learner(home) is None
    finally:
        enough.set()
        asking.join()


# -- learning ----------------------------------------------------------------------------------


class Following:
    """A follower in a thread, with a tiny draft; `reports` is what it said."""

    def __init__(self, rig: Rig, **settings: Any) -> None:
        self.reports: list[StateReport] = []
        self.settings = load_settings(home=rig.store.home.path, update_every=8, update_steps=3, **settings)
        self.store = Store.open(rig.store.home.path, write=False)
        self.link = MailLink(rig.store.home.path, self.store.registry, self.reports.append)
        trainer = Trainer(
            random_model("llama", 1, layers=2),
            self.store,
            rank=4,
            shared_rank=4,
            steps=3,
            tokens_per_step=256,
        )
        outlet = ServerOutlet(self.link, rig.store.home.path)
        self.loop = DistillLoop(trainer, self.store, outlet, every=8)
        self.follower = FollowingProcess(self.settings, self.store, self.loop, self.link)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with suppress(SystemExit):
            self.follower.run()

    def end(self) -> None:
        self.link.stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.store.close()


def test_it_learns_by_letters_while_another_process_would_write(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    write_load(rig.store.registry, Load(1.0, 0, time.time()))
    room, following = mailroom_of(rig), Following(rig)
    try:
        until(lambda: any(mail_of(rig.store.home.path).glob(f"*{mail.ASK}")))
        assert rig.store.registry.live(SHARED) is None  # nobody has answered yet
        room.start()
        until(lambda: rig.store.registry.live("code") is not None)
        assert rig.store.registry.live(SHARED) is not None
    finally:
        following.end()
        room.stop()
    assert rig.store.updates.count() >= 2
    assert [path.name for path in (rig.store.home.path / TRAINING).iterdir()] == [mail.MAIL]


def test_it_waits_while_the_engine_is_busy_or_silent(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    following = Following(rig)
    try:
        until(lambda: any("no word" in one.reason for one in following.reports))
        write_load(rig.store.registry, Load(0.1, 0, time.time()))
        until(lambda: any("busy" in one.reason for one in following.reports))
        assert not list(letters(rig.store.home.path))
    finally:
        following.end()


def test_with_a_share_it_learns_beside_a_busy_engine_and_rests_meanwhile(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    write_load(rig.store.registry, Load(0.0, 9, time.time()))
    room, following = mailroom_of(rig), Following(rig, train_cpu_share=0.5)
    room.start()
    try:
        until(lambda: rig.store.registry.live("code") is not None)
    finally:
        following.end()
        room.stop()
    assert following.loop.waited > 0


@dataclass
class Clock:
    """Time that passes only where somebody waits or computes; every wait is noted."""

    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class Computes:
    """A loop whose updates take three steps of two seconds each, where one is due."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.state, self.waited, self.is_due, self.step = clock, waiting(), 0.0, False, 2.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def due(self) -> str | None:
        return SHARED if self.is_due else None

    def waits(self) -> str:
        return NO_RECORDS

    def run_once(self, expert: str, on_step: Any) -> None:
        for number in range(3):
            self.clock.now += self.step
            on_step(number, None)


@pytest.fixture
def paced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Computes, FollowingProcess]:
    """A follower with a quarter of the time beside an engine that is always busy, and its clock."""
    clock = Clock()
    for module in ("following.follow", "process"):
        monkeypatch.setattr(f"moedraft.distill.{module}.time", clock)
    settings = load_settings(home=rig.store.home.path, train_cpu_share=0.25)
    loop, link = Computes(clock), SimpleNamespace(send=lambda report: None, check=lambda: None, paused=False)
    link.wait = clock.wait
    write_load(rig.store.registry, Load(0.0, 9, time.time()))
    return clock, loop, FollowingProcess(settings, rig.store, loop, link)  # type: ignore[arg-type]


def test_an_hour_without_an_update_is_no_work(paced: tuple[Clock, Computes, FollowingProcess]) -> None:
    clock, loop, follower = paced
    clock.now += 3600
    follower.turn()  # nothing is due
    clock.waits.clear()
    loop.is_due = True
    follower.turn()
    assert sum(clock.waits) == pytest.approx(3 * 6)  # three seconds of rest for each of work
    assert loop.waited == pytest.approx(3 * 6)


def test_one_pause_is_bounded_and_ends_with_the_requests(
    paced: tuple[Clock, Computes, FollowingProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, loop, follower = paced
    loop.is_due, loop.step = True, 10_000.0
    follower.turn()
    assert sum(clock.waits) == pytest.approx(3 * LONGEST_PAUSE)
    clock.waits.clear()
    monkeypatch.setattr(follower, "_is_busy", lambda: sum(clock.waits) < 5)
    follower.turn()
    assert sum(clock.waits) == pytest.approx(5, abs=1)


def test_while_published_versions_are_measured_again_nobody_trains(
    paced: tuple[Clock, Computes, FollowingProcess],
) -> None:
    """It yields as an update does, but does not say that an adapter is trained."""
    clock, loop, follower = paced
    said: list[str] = []
    follower.link.send = lambda report: said.append(report.kind.value)  # type: ignore[method-assign]
    experts: list[str | None] = []

    def tend(on_step: Any) -> None:
        clock.now += 5.0
        on_step(0, None)
        experts.append(follower.said.expert if follower.said else "nobody")

    loop.tend = tend  # type: ignore[attr-defined]
    follower.turn()
    assert experts == [None]
    assert said == ["training", "waiting"]
    assert sum(clock.waits) >= 3 * 5, "it keeps to its share of the time"


PROGRAM = "from moedraft.cli import main; import sys; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_command_ends_cleanly_at_sigterm_and_refuses_a_second(rig: Rig, tmp_path: Path) -> None:
    """A real process, whose draft base never loads: it is asked to end while it waits for its home."""
    hold = (
        "import moedraft.distill.following.follow as f, threading\n"
        "class Loop:\n"
        "    state = None\n"
        "    def end(self): pass\n"
        "f.build_loop = lambda *_: Loop()\n"
        "f.FollowingProcess.turn = lambda self: self.link.wait(0.05)\n"
    )
    command = [
        sys.executable,
        "-c",
        hold + PROGRAM,
        "distill",
        "--follow",
        "--home",
        str(rig.store.home.path),
    ]
    said = tmp_path / "said"
    with said.open("wb") as file:
        first = subprocess.Popen(command, stderr=file)
    try:
        until(lambda: _claimed(rig.store.home.path), 60)
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert f"Another trainer (pid {first.pid})" in second.stderr
        time.sleep(0.5)
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        assert "Stopped." in said.read_text()
    finally:
        first.kill()
        first.wait()


def _claimed(home: Path) -> bool:
    try:
        with learning_for(home):
            return False
    except StorageError:
        return True
