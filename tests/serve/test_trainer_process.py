"""The trainer beside the server: whatever it does, the supervisor goes on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from serve_fakes import DOMAINS, tiny_system
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from waiting import wait_for as until

from moedraft.config import Settings, load_settings
from moedraft.core import (
    SHARED,
    AdapterVersion,
    Domain,
    ReplayRecord,
    SamplingParams,
    StorageError,
    UpdateRecord,
)
from moedraft.distill.claim import learning_for
from moedraft.distill.messages import TRAINING, Begin, Learned
from moedraft.distill.pace.governor import Load, write_load
from moedraft.learning_state import LearningKind
from moedraft.serve.supervisor.child import CHUNK, Child, ChildFailed
from moedraft.serve.supervisor.conversation import Conversation
from moedraft.serve.supervisor.supervisor import BREATH, COMMAND, TrainerSupervisor
from moedraft.serve.worker.worker import Worker
from moedraft.showcase.shipped import examples
from moedraft.storage.store import Store
from moedraft.system.build import System

from random_models import VOCAB, random_model

FAKE = str(Path(__file__).with_name("fake_trainer.py"))


def is_gone(pid: int) -> bool:
    """Dead and reaped, no zombie."""
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "home")
    store.registry.add_domain(Domain("code", "", DOMAINS["code"], 1.0))
    yield store
    store.close()


@pytest.fixture
def settings(store: Store) -> Settings:
    return load_settings(home=store.home.path)


@pytest.fixture
def impatient(settings: Settings) -> Settings:
    return settings.model_copy(update={"trainer_timeout": 0.6})


Supervise = Callable[..., TrainerSupervisor]


@pytest.fixture
def supervise(store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervise]:
    """Starts a supervisor of a fake trainer; stops it at the end and proves that nothing is left."""
    monkeypatch.setattr("moedraft.serve.supervisor.supervisor.GRACE", 0.3)
    monkeypatch.setattr("moedraft.serve.supervisor.supervisor.LOOK_SECONDS", 0.02)
    made: list[TrainerSupervisor] = []
    pids: set[int] = set()

    def start(*arguments: object, **options: Any) -> TrainerSupervisor:
        command = [sys.executable, "-S", FAKE, *map(str, arguments)]
        one = TrainerSupervisor(
            options.pop("settings", settings),
            store,
            **{"command": command, "backoff": (0.05, 0.2), **options},
        )
        made.append(one)
        one.start()
        return one

    class Noted(Child):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            pids.add(self.process.pid)

    monkeypatch.setattr("moedraft.serve.supervisor.supervisor.Child", Noted)

    files = open_files()
    yield start
    for one in made:
        one.stop()
        one.stop()
        assert one.state().learning.kind is LearningKind.STOPPED
        assert one.state().pid is None
    assert pids
    assert all(is_gone(pid) for pid in pids)
    assert open_files() == files


def open_files() -> int:
    """Pipes and selectors; the store's connections come and go."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{entry}").startswith(("pipe:", "anon_inode:"))
    return found


# -- the process as such -------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[Callable[[str], Child]]:
    made: list[Child] = []

    def start(code: str) -> Child:
        made.append(Child([sys.executable, "-S", "-c", "import os, sys, time, signal\n" + code], os.environ))
        return made[-1]

    files = open_files()
    yield start
    for one in made:
        one.close(0.0)
        assert is_gone(one.process.pid)
    assert open_files() == files


def lines_of(child: Child, count: int) -> list[bytes]:
    lines: list[bytes] = []
    deadline = time.monotonic() + 10
    while len(lines) < count and time.monotonic() < deadline:
        lines += child.read(0.1)
    return lines


def test_lines_come_whole_however_they_were_written(child: Callable[[str], Child]) -> None:
    one = child(
        "for part in (b'a', b'b\\nc', b'\\n', b'', b'd' * 200_000 + b'\\n', b'no end'):\n"
        "    os.write(1, part); sys.stdin.readline()"
    )
    lines: list[bytes] = []
    for part in range(5):  # the next one is written when this one has been read
        lines += one.read(10.0 if part != 3 else 0.0)
        while part == 4 and len(lines) < 3:
            lines += one.read(10.0)
        one.send(b"\n")
    assert lines == [b"ab", b"c", b"d" * 200_000]
    one.send(b"\n")
    until(lambda: not one.read(0.01) and one.ended)


def test_a_child_that_does_not_read_is_not_waited_for(child: Callable[[str], Child]) -> None:
    one = child("signal.pause()")
    began = time.monotonic()
    with pytest.raises(ChildFailed, match="does not read"):
        one.send(b"x" * 10_000_000 + b"\n")
    assert time.monotonic() - began < 20


def test_a_child_that_has_ended_cannot_be_written_to(child: Callable[[str], Child]) -> None:
    one = child("")
    until(lambda: one.ended)
    with pytest.raises(ChildFailed, match="reads no more"):
        one.send(b"x\n")


def test_ctrl_c_does_not_reach_it_and_its_priority_counts_against_ours(
    child: Callable[[str], Child],
) -> None:
    """Linux shares the cores out among sessions before it looks at priorities."""
    one = child("signal.pause()")
    assert os.getpgid(one.process.pid) != os.getpgid(0)
    assert os.getsid(one.process.pid) == os.getsid(0)


def test_a_line_without_an_end_is_given_up(child: Callable[[str], Child]) -> None:
    one = child("while True: os.write(1, b'x' * 65536)")
    with pytest.raises(ChildFailed, match="without an end"):
        lines_of(one, 1)


def test_last_words_are_kept_and_a_flood_is_not(child: Callable[[str], Child]) -> None:
    one = child("os.write(2, b'x\\n' * 200_000 + b'the reason'); os._exit(4)")
    until(lambda: not one.read(0.01) and one.ended)
    one.close(1.0)
    assert len(one.errors) <= 20
    assert one.why_ended() == "it ended with status 4: the reason"


@pytest.mark.parametrize(
    "code",
    [
        "sys.stdin.read()",
        "signal.pause()",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "os.close(1); os.close(2); signal.pause()",
        "while True: os.write(1, b'x\\n' * 30_000)",
    ],
)
def test_closing_ends_whatever_it_is(child: Callable[[str], Child], code: str) -> None:
    one = child(f"print('up', flush=True)\n{code}")
    assert lines_of(one, 1)[0] == b"up"
    began = time.monotonic()
    one.close(0.3)
    assert is_gone(one.process.pid)
    assert time.monotonic() - began < 20


# -- the supervisor ------------------------------------------------------------------------------


def test_it_says_what_the_trainer_does_and_passes_pauses_on(supervise: Supervise) -> None:
    one = supervise("polite")
    until(lambda: one.state().learning.waits_for == "nothing to do")
    pid = one.state().pid
    assert pid is not None
    one.pause()
    until(lambda: one.state().learning.waits_for == "paused")
    assert one.state().paused
    one.resume()
    until(lambda: one.state().learning.waits_for == "nothing to do")
    assert not one.state().paused
    assert (one.state().pid, one.state().restarts, one.state().last_error) == (pid, 0, None)


def test_a_pause_outlives_the_server(supervise: Supervise, store: Store, settings: Settings) -> None:
    first = supervise("polite")
    first.pause()
    first.stop()
    second = supervise("polite")
    assert second.state().paused
    until(lambda: second.state().learning.waits_for == "paused")
    second.resume()
    second.stop()
    assert not TrainerSupervisor(settings, store).state().paused


def test_a_pause_that_cannot_be_written_down_is_none(
    supervise: Supervise, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("The disk is full.")

    one = supervise("polite")
    with monkeypatch.context() as patch:
        patch.setattr(store.registry, "set_meta", full)
        with pytest.raises(StorageError):
            one.pause()
    assert not one.state().paused


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("crash", "status 3: RuntimeError: out of luck"),
        ("killed", "SIGKILL, as when memory runs out"),
        ("rubbish", "talks rubbish"),
        ("endless", "without an end"),
        ("deaf", "does not read"),
    ],
)
def test_a_bad_trainer_is_ended_and_started_again(supervise: Supervise, mode: str, words: str) -> None:
    one = supervise(mode, base_hash="tiny")
    until(lambda: one.state().restarts >= 2)
    assert words in (one.state().last_error or "")


def test_the_next_trainer_is_told_whose_update_killed_the_last_ones(supervise: Supervise) -> None:
    one = supervise("deadly")
    until(lambda: one.state().last_error == "{'code': 2}")  # it says what it was told
    assert one.state().restarts >= 2


@pytest.mark.parametrize("mode", ["silent", "frozen", "stubborn"])
def test_a_trainer_that_hangs_is_killed(supervise: Supervise, impatient: Settings, mode: str) -> None:
    one = supervise(mode, settings=impatient)
    until(lambda: one.state().restarts >= 2)
    assert "said nothing for" in (one.state().last_error or "")


def test_a_trainer_that_cannot_be_started_is_tried_again(store: Store, settings: Settings) -> None:
    one = TrainerSupervisor(settings, store, command=["/no/such/python"], backoff=(0.01, 0.02))
    one.start()
    until(lambda: one.state().restarts >= 3)
    assert "cannot be started" in (one.state().last_error or "")
    one.stop()


def test_waiting_for_another_trainer_of_the_home_is_no_restart(store: Store, settings: Settings) -> None:
    with learning_for(settings.home):
        one = TrainerSupervisor(settings, store, command=["/no/such/python"], backoff=(0.01, 0.02))
        one.start()
        until(lambda: "trainer" in (one.state().last_error or ""))
        until(lambda: one.state().learning.kind == LearningKind.RESTARTING)
        assert one.state().restarts == 0
    until(lambda: one.state().restarts >= 1)  # now it is its own that cannot be started
    one.stop()


def test_restarts_come_later_each_time_until_it_was_healthy(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout in (0.05, 0.1, 0.2):
            pauses.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", noted)
    one = supervise("crash")
    until(lambda: one.state().restarts >= 4)
    one.stop()
    assert pauses[:4] == [0.05, 0.1, 0.2, 0.2]
    pauses.clear()
    one = supervise("crash", healthy=0.0)
    until(lambda: one.state().restarts >= 3)
    one.stop()
    assert set(pauses) == {0.05}


def test_kill_minus_nine_from_outside(supervise: Supervise) -> None:
    one = supervise("polite")
    first = until(lambda: one.state().learning.waits_for and one.state().pid)
    os.kill(first, signal.SIGKILL)
    until(lambda: one.state().pid not in (None, first) and one.state().learning.waits_for)
    assert one.state().restarts == 1
    assert is_gone(first)


def test_complaints_hold_up_nobody(supervise: Supervise) -> None:
    one = supervise("noisy")
    until(lambda: one.state().learning.reason == "still here")


def test_chatter_is_listened_to_a_little_at_a_time(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[float, int, float]] = []  # began to listen, bytes, ended
    hear = Child.read

    def watched(child: Child, timeout: float) -> list[bytes]:
        began = time.monotonic()
        lines = hear(child, timeout)
        heard.append((began, sum(map(len, lines)), time.monotonic()))
        return lines

    monkeypatch.setattr(Child, "read", watched)
    one = supervise("talks")
    until(lambda: sum(size > 0 for _, size, _ in heard) > 10)
    assert one.state().restarts == 0
    seen = heard.copy()
    pauses = [later[0] - sooner[2] for sooner, later in itertools.pairwise(seen)]
    assert min(pauses) > 0.9 * BREATH
    assert 10_000 < max(size for _, size, _ in seen) < 2 * CHUNK


def test_serving_goes_on_beside_a_trainer_that_keeps_dying(tmp_path: Path) -> None:
    system = tiny_system(tmp_path / "served", trainer_timeout=0.2)
    worker = Worker(system, max_waiting=20)
    trainers = [
        TrainerSupervisor(
            system.settings,
            system.store,
            base_hash="tiny",
            command=[sys.executable, "-S", FAKE, mode],
            backoff=(0.01, 0.01),
        )
        for mode in ("killed", "deaf", "rubbish", "stubborn")
    ]
    for one in (worker, *trainers):
        one.start()

    async def ask() -> list[str | None]:
        async def answer(number: int) -> str | None:
            ticket = await worker.submit([number], SamplingParams(max_tokens=40))
            return (await ticket.result()).finish_reason

        reasons: list[str | None] = []
        while min(one.state().restarts for one in trainers) < 2:
            reasons += await asyncio.gather(*(answer(number) for number in range(8)))
        return reasons

    reasons = asyncio.run(asyncio.wait_for(ask(), 60))
    assert set(reasons) == {"length"}
    for one in trainers:
        one.stop()
    worker.stop()
    system.close()


# -- while requests are served -------------------------------------------------------------------


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_it_is_held_in_mid_step_while_requests_are_served(
    supervise: Supervise, store: Store, settings: Settings
) -> None:
    """Its silence meanwhile is no fault, and the time is not counted as time spent."""
    busy, patience = threading.Event(), 0.8
    settings = settings.model_copy(update={"trainer_timeout": patience})
    one = supervise("trains", 300, settings=settings, busy=busy.is_set)
    until(lambda: one.state().learning.step > 3)
    pid = one.state().pid
    assert pid is not None
    busy.set()
    until(lambda: one.state().held and is_stopped(pid))  # a signal takes its time to arrive
    time.sleep(2 * patience)  # what must be excused is time itself
    assert one.state().learning.step < 300
    assert (one.state().held, one.state().restarts, is_stopped(pid)) == (True, 0, True)
    busy.clear()
    until(lambda: one.state().learning.waits_for == "nothing to do")
    assert (one.state().held, one.state().pid, one.state().restarts) == (False, pid, 0)
    [update] = store.updates.recent("code")
    assert 50 < update.seconds < 100 - 2 * patience  # it says 100 itself


def test_it_makes_way_at_once(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hands in a request does not wait for the supervisor to look. When it is calm it goes on."""
    monkeypatch.setattr("moedraft.serve.supervisor.hold.CALM", 1000.0)
    one = supervise("trains", 1000)
    until(lambda: one.state().learning.step > 3)
    pid = one.state().pid
    assert pid is not None
    one.make_way()
    until(lambda: is_stopped(pid))
    monkeypatch.setattr("moedraft.serve.supervisor.hold.CALM", 0.1)
    until(lambda: not is_stopped(pid))
    step = one.state().learning.step
    until(lambda: one.state().learning.step > step + 3)
    one.stop()
    one.make_way()  # there is none any more


def test_making_way_leaves_one_that_waits_alone(supervise: Supervise) -> None:
    one = supervise("polite")
    one.make_way()  # maybe before there is a process
    until(lambda: one.state().learning.waits_for == "nothing to do")
    one.make_way()
    assert not is_stopped(one.state().pid or 0)


def test_time_held_in_an_update_that_failed_is_none_of_the_next(supervise: Supervise, store: Store) -> None:
    busy = threading.Event()
    busy.set()
    one, errors = supervise("trains", 200, 5, busy=busy.is_set), set[str | None]()
    until(lambda: one.state().held)
    time.sleep(0.3)  # what must not be counted is time itself
    busy.clear()
    until(lambda: errors.add(one.state().last_error) or one.state().learning.waits_for == "nothing to do")
    assert errors == {None, "out of luck"}
    assert one.state().last_error is None, "the next update succeeded"
    [update] = store.updates.recent("code")
    assert update.seconds > 100 - 0.3


def test_one_that_waits_is_left_to_itself(supervise: Supervise) -> None:
    asked: list[bool] = []

    def busy() -> bool:
        asked.append(True)
        return True

    one = supervise("polite", busy=busy)
    until(lambda: one.state().learning.waits_for == "nothing to do")
    seen = len(asked)
    until(lambda: len(asked) > seen + 5)
    assert not one.state().held
    assert not is_stopped(one.state().pid or 0)


def test_it_is_not_held_for_ever(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to see the load for itself, and to end its reading of the store."""
    monkeypatch.setattr("moedraft.serve.supervisor.hold.LONGEST", 0.2)
    one = supervise("trains", 200, busy=lambda: True)
    until(lambda: one.state().held)
    until(lambda: one.state().learning.waits_for == "nothing to do")
    assert one.state().restarts == 0


def test_a_server_that_stops_does_not_wait_for_a_held_trainer(supervise: Supervise) -> None:
    one = supervise("trains", 1000, busy=lambda: True)
    until(lambda: one.state().held)
    began = time.monotonic()
    one.stop()
    assert time.monotonic() - began < 20


def test_a_held_trainer_dies_with_its_server() -> None:
    """Even with one that is killed on the spot."""
    trainer = (
        "import os, signal; from moedraft.distill.background import step_back; "
        "step_back(); print(os.getpid(), flush=True); signal.pause()"
    )
    server = (
        "import os, signal, sys; from moedraft.serve.supervisor.child import Child\n"
        f"one = Child([sys.executable, '-c', {trainer!r}], os.environ)\n"
        "while not (lines := one.read(1)): pass\n"
        "one.process.send_signal(signal.SIGSTOP); print(lines[0].decode(), flush=True)\n"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        until(lambda: is_stopped(pid))
        process.kill()
    until(lambda: is_gone(pid) or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")


# -- what it publishes ---------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", 1.0)


def write_adapter(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"lora_A": torch.full((2, 3), value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "peft_type": "LORA"}))
    return folder


def answers(
    supervise: Supervise, store: Store, adapter: Path | str, *updates: dict[str, Any], **options: Any
) -> list[Any]:
    one = supervise("update", adapter, *map(json.dumps, updates), base_hash="tiny", **options)
    file = store.home.path / "answers.json"
    until(lambda: one.state().learning.reason == "done" or one.state().restarts)
    assert one.state().restarts == 0, one.state().last_error
    found: list[Any] = json.loads(file.read_text())
    one.stop()
    return found


def test_an_update_becomes_the_live_version(supervise: Supervise, store: Store, adapter: Path) -> None:
    told: list[int] = []
    updates: list[dict[str, Any]] = [{}, {"parent": 1, "acceptance_after": None}, {"expert": SHARED}]
    first, second, shared, noted = answers(
        supervise,
        store,
        adapter,
        *updates,
        published=lambda: told.append(len(store.registry.versions())),
    )
    assert told == [1, 2, 3]
    assert [one["type"] for one in (first, second, shared, noted)] == ["published"] * 3 + ["noted"]
    live = store.registry.live("code")
    assert live is not None
    assert AdapterVersion(**second["versions"][0]) == live
    assert (live.version, live.parent, live.base_hash) == (2, 1, "tiny")
    assert store.adapters.load(live).manifest["modules"] == ["m"]
    assert store.registry.get_meta("trained:code") == "7"
    assert sum(path.is_file() for path in (store.home.path / TRAINING).rglob("*")) == 0


def test_a_version_is_taken_back_once(supervise: Supervise, store: Store, adapter: Path) -> None:
    told: list[str] = []
    one = supervise("withdraws", adapter, base_hash="tiny", published=lambda: told.append("new"))
    until(lambda: one.state().learning.reason == "done" or one.state().restarts)
    *_, withdrawn, refused = json.loads((store.home.path / "answers.json").read_text())
    assert withdrawn == {"type": "withdrawn", "version": 1}
    assert refused["type"] == "refused"
    assert len(told) == 3  # two versions, and back: the engine looks for what is live each time
    assert [version.state for version in store.registry.versions("code")] == ["live", "rolled_back"]


@pytest.mark.parametrize(
    ("update", "word"),
    [
        ({"expert": "nobody"}, "no domain"),
        ({"base": "another"}, "not the one that serves"),
        ({"parent": 3}, "changed meanwhile"),
        ({"folder": "0" * 32, "source": ""}, "No such file"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    supervise: Supervise, store: Store, adapter: Path, update: dict[str, Any], word: str
) -> None:
    source = update.pop("source", adapter)
    refused, noted = answers(supervise, store, source, update)
    assert refused["type"] == "refused"
    assert word in refused["reason"]
    assert noted["type"] == "noted"
    assert store.registry.versions() == []


@pytest.mark.parametrize("fault", ["nan", "link", "missing"])
def test_damaged_files_are_refused(
    supervise: Supervise, store: Store, adapter: Path, tmp_path: Path, fault: str
) -> None:
    if fault == "nan":
        adapter = write_adapter(tmp_path / "nan", float("nan"))
    elif fault == "link":
        (adapter / "adapter_config.json").rename(tmp_path / "elsewhere.json")
        (adapter / "adapter_config.json").symlink_to(tmp_path / "elsewhere.json")
    else:
        (adapter / "adapter_model.safetensors").unlink()
    refused, _ = answers(supervise, store, adapter, {})
    assert refused["type"] == "refused"
    assert store.registry.versions() == []


@pytest.mark.parametrize(
    "update", [{"folder": "../../etc"}, {"parent": -1}, {"acceptance_after": 7}, {"rank": 0}]
)
def test_what_no_trainer_would_say_is_no_message(
    supervise: Supervise, store: Store, impatient: Settings, update: dict[str, Any]
) -> None:
    one = supervise("update", "", json.dumps(update), settings=impatient)
    until(lambda: one.state().restarts)
    assert "said nothing" in (one.state().last_error or "")
    assert store.registry.versions() == []


def test_an_update_does_not_undo_a_rollback(supervise: Supervise, store: Store, adapter: Path) -> None:
    answers(supervise, store, adapter, {}, {"parent": 1})
    store.registry.rollback("code")
    refused, _ = answers(supervise, store, adapter, {"parent": 2})
    assert "changed meanwhile" in refused["reason"]
    live = store.registry.live("code")
    assert live is not None
    assert live.version == 1


def test_what_a_dead_trainer_left_is_cleared_away(supervise: Supervise, store: Store) -> None:
    left = store.home.path / TRAINING / "abc"
    left.mkdir(parents=True)
    (left / "adapter_model.safetensors").write_bytes(b"half")
    one = supervise("polite")
    until(lambda: one.state().learning.waits_for)
    assert not left.exists()


# -- the real one --------------------------------------------------------------------------------


def learnable(draft: Path, store: Store) -> Settings:
    """Settings of a small draft base, in a home with 20 records of "code"."""
    random_model("llama", 1, layers=2).hf.save_pretrained(draft)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(draft)
    store.registry.set_meta("target_id", "tiny")
    store.replay.add([record(number) for number in range(20)])
    small = {"update_steps": 2, "update_tokens": 128, "adapter_rank": 4, "shared_rank": 4}
    return load_settings(home=store.home.path, draft=str(draft), trainer_timeout=100.0, **small)


def record(number: int) -> ReplayRecord:
    return ReplayRecord(
        domain="code",
        expert="code",
        adapter_version=0,
        target_id="tiny",
        token_ids=[number, 2, 3, 4, 5],
        num_prompt_tokens=2,
        topk_ids=[[3, 9], [4, 9], [5, 9]],
        topk_logprobs=[[-0.1, -3.0]] * 3,
        rejected=[],
        drafted=3,
        accepted=1,
    )


def test_the_time_that_an_update_was_suspended_is_taken_from_all_of_its_parts(
    store: Store, settings: Settings
) -> None:
    """A joint update of two adapters took 10 s in all, 7 of which it was suspended."""
    one, hold = TrainerSupervisor(settings, store), SimpleNamespace(seconds=7.0)
    for name in (SHARED, "code"):
        part = UpdateRecord(name, 0, 4, 2, 1.0, 5.0, None, None, decision="keep")
        one._note(Learned(expert=name, last_id=0, update=part), hold)  # type: ignore[arg-type]
    assert {part.expert: part.seconds for part in store.updates.recent()} == {SHARED: 0.0, "code": 3.0}
    assert hold.seconds == 0


def test_the_real_trainer_learns_publishes_and_ends(tmp_path: Path, store: Store) -> None:
    settings = learnable(tmp_path / "draft", store)
    one = TrainerSupervisor(settings, store)
    one.start()

    def learned() -> bool:
        assert one.state().restarts == 0, one.state().last_error
        write_load(store.registry, Load(1.0, 0, time.time()))
        return one.state().learning.waits_for == "waiting for records"

    until(learned, 120)
    state = one.state()
    assert state.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, state.pid) == 19
    assert int(Path(f"/proc/{state.pid}/oom_score_adj").read_text()) >= 800
    assert os.sched_getscheduler(state.pid) == os.SCHED_IDLE
    assert (state.last_error, state.learning.expert) == (None, None)
    assert state.updates >= 2  # further ones follow while the gate sees a use in them
    assert {update.expert for update in store.updates.recent()} == {SHARED, "code"}
    assert {version.domain for version in store.registry.versions()} == {SHARED, "code"}
    began = time.monotonic()
    one.stop()
    assert is_gone(state.pid)
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_the_real_trainer_ends_with_its_server(tmp_path: Path, store: Store) -> None:
    """Killed, a server closes nothing by hand; the kernel closes the pipe."""
    settings = learnable(tmp_path / "draft", store)
    one = Child(COMMAND, os.environ)
    one.send(Begin(settings=settings.model_dump(mode="json")).line())
    until(lambda: one.read(0.1), 60)
    one.process.stdin.close()  # type: ignore[union-attr]
    until(lambda: one.process.poll() is not None, 30)
    one.close(0.0)
    assert one.why_ended() == "it ended with status 0"


@pytest.mark.slow
def test_the_real_trainer_says_what_is_wrong(tmp_path: Path, store: Store) -> None:
    settings = load_settings(home=store.home.path, draft=str(tmp_path / "nothing"))
    one = TrainerSupervisor(settings, store, backoff=(60, 60))
    one.start()
    error = until(lambda: one.state().last_error, 60)
    assert "status 2" in error
    assert "nothing" in error
    one.stop()


@pytest.mark.slow
def test_the_shipped_pair_learns_while_it_serves(mini_system: System) -> None:
    """The first update that passes the gate comes into use; further ones take more traffic."""
    small = {"update_steps": 4, "update_tokens": 512, "update_every": 4, "train_idle_share": 0.0}
    settings = mini_system.settings.model_copy(update=small)
    prompts = [prompt for texts in examples().values() for prompt in texts[:2]]
    plain = mini_system.engine.generate(prompts, SamplingParams(max_tokens=24), draft=False)
    worker = Worker(mini_system, max_waiting=100)
    trainer = TrainerSupervisor(settings, mini_system.store, base_hash=mini_system.bank.base_hash)
    worker.start()
    trainer.start()

    async def ask() -> None:
        deadline = time.monotonic() + 200
        while mini_system.bank.version(SHARED) < 1:
            assert time.monotonic() < deadline, trainer.state()
            assert (trainer.state().restarts, trainer.state().last_error) == (0, None), trainer.state()
            tickets = [await worker.submit(prompt, SamplingParams(max_tokens=24)) for prompt in prompts]
            texts = [(await ticket.result()).text for ticket in tickets]
            assert texts == [output.text for output in plain]

    asyncio.run(ask())
    trainer.stop()
    worker.stop()
    assert trainer.state().updates >= 1


# -- silence -------------------------------------------------------------------------------------


class Mute:
    """A child that says nothing and has used `used` seconds of processor time."""

    def __init__(self) -> None:
        self.used: float | None = 0.0

    def read(self, seconds: float) -> list[bytes]:
        time.sleep(seconds)
        return []

    def processor_seconds(self) -> float | None:
        return self.used


def test_who_gets_no_processor_is_not_taken_for_hung() -> None:
    """The lowest priority under sustained load: slow is no fault, and its expert is not to be blamed."""
    child = Mute()
    conversation = Conversation(child, 0.2)  # type: ignore[arg-type]
    for _ in range(30):
        conversation.hear(0.02, starved=True)
        child.used = (child.used or 0.0) + 0.001
    with pytest.raises(ChildFailed, match="said nothing"):  # noqa: PT012
        for _ in range(30):  # one that works and works is
            child.used += 0.02
            conversation.hear(0.02, starved=True)


@pytest.mark.parametrize("used", [0.0, None])
def test_without_a_load_silence_is_silence(used: float | None) -> None:
    child = Mute()
    child.used = used
    conversation = Conversation(child, 0.2)  # type: ignore[arg-type]
    with pytest.raises(ChildFailed, match="said nothing"):  # noqa: PT012
        for _ in range(30):
            conversation.hear(0.02, starved=used is None)


def test_who_hangs_is_not_excused_by_being_held_now_and_then() -> None:
    """While it is held it may be silent for ever; what it was silent before stays counted."""
    conversation = Conversation(Mute(), 0.3)  # type: ignore[arg-type]
    for _ in range(30):
        conversation.hear(0.02, held=True)
    with pytest.raises(ChildFailed, match="said nothing"):  # noqa: PT012
        for number in range(80):
            conversation.hear(0.02, held=number % 2 == 0)


def test_processor_time_is_told(child: Callable[[str], Child]) -> None:
    busy = child("while True: pass")
    until(lambda: (busy.processor_seconds() or 0) > 0.1)
    idle = child("sys.stdin.read()")
    assert (idle.processor_seconds() or 0) < 5


def test_who_is_suspended_from_outside_is_taken_for_hung_under_load_as_well(
    child: Callable[[str], Child],
) -> None:
    """It uses no processor time, however long one waits."""
    one = child("while True: pass")
    conversation = Conversation(one, 0.5)
    one.process.send_signal(signal.SIGSTOP)
    until(lambda: one.processor_seconds() is None)
    with pytest.raises(ChildFailed, match="said nothing"):  # noqa: PT012
        for _ in range(50):
            conversation.hear(0.05, starved=True)
