"""What leaves the engine for storage, and what comes in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moedraft.core import SHARED, Domain, SamplingParams, Sequence, StorageError
from moedraft.drafting.lora import ExpertBank
from moedraft.engine.loader import AdapterLoader
from moedraft.engine.recorder import Recorder, script_of
from moedraft.storage.store import Store

from random_models import random_model


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("How are you?", "latin"),
        ("Как дела?", "cyrillic"),
        ("你好，世界", "han"),
        ("PHP の配列を教えてください", "kana"),
        ("안녕하세요", "hangul"),
        ("123 !?", "other"),
        ("", "other"),
    ],
)
def test_script(text: str, script: str) -> None:
    assert script_of(text) == script


def sequence(reason: str, tokens: int) -> Sequence:
    made = Sequence("r", [1, 2, *range(tokens)], 2, SamplingParams(), 0, prompt="hello")
    made.finish_reason = reason  # type: ignore[assignment]
    return made


def test_aborted_and_empty_requests_leave_nothing(store: Store) -> None:
    recorder = Recorder(store, "t")
    for one in (sequence("abort", 3), sequence("error", 3), sequence("stop", 0)):
        recorder(one)
    assert store.requests.summary() == {}
    recorder(sequence("length", 3))
    assert store.requests.summary()[SHARED].tokens == 3


# -- beside the engine ---------------------------------------------------------------------------


@pytest.fixture
def beside(store: Store) -> Iterator[Recorder]:
    recorder = Recorder(store, "t")
    recorder.record_beside()
    yield recorder
    recorder.close()


def recorded(store: Store) -> int:
    return store.requests.summary()[SHARED].requests if store.requests.summary() else 0


def test_the_engine_waits_for_no_disk(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.engine.recorder.FLUSH_SECONDS", 0.1)
    began = time.monotonic()
    with store.home.write():  # as long as another thread writes
        for _ in range(3):
            beside(sequence("length", 3))
        assert time.monotonic() - began < 2
        with pytest.raises(StorageError, match="takes no records"):
            beside.flush()
    monkeypatch.setattr("moedraft.engine.recorder.FLUSH_SECONDS", 10)
    beside.flush()
    assert recorded(store) == 3


def test_those_that_end_together_are_written_together(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    add = store.requests.add
    monkeypatch.setattr(store.requests, "add", lambda stats: (sizes.append(len(stats)), add(stats)))
    for count in (5, 1):
        for _ in range(count):
            beside(sequence("length", 3))
        beside.flush()
    assert sizes == [5, 1]
    beside.flush()  # with nothing to write
    assert recorded(store) == 6


def test_what_waits_is_bounded_and_learning_goes_on_by_itself(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.engine.recorder.MOST", 4)
    with store.home.write():
        for _ in range(50):
            beside(sequence("length", 3))
        assert beside.status == "paused: the disk is slower than the requests"
    beside.flush()
    assert beside.status == "learning"
    assert recorded(store) <= 8


def test_at_the_end_everything_is_written(store: Store) -> None:
    recorder = Recorder(store, "t")
    recorder.record_beside()
    for _ in range(3):
        recorder(sequence("length", 3))
    recorder.close()
    recorder.close()
    assert recorded(store) == 3
    assert not any("recorder" in thread.name for thread in threading.enumerate())


def test_a_fault_of_ours_ends_no_thread(
    store: Store, beside: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    broken = sequence("length", 3)
    broken.captured = [None]  # type: ignore[list-item]
    beside(broken)
    beside.flush()
    assert "1 requests were not recorded" in caplog.text
    beside(sequence("length", 3))
    beside.flush()
    assert recorded(store) == 1


def test_a_failing_home_never_raises_into_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path / "home")
    store.registry.add_domain(Domain("x", "", ("p",) * 8, 0.0))
    bank = ExpertBank(random_model("llama", 1))
    loader, recorder = AdapterLoader(store, bank), Recorder(store, "t")
    store.close()
    with caplog.at_level(logging.WARNING):
        recorder(sequence("length", 3))
        recorder(sequence("length", 3))
        loader.refresh([], now=True)
    assert recorder.status.startswith("paused: ")
    assert sum("Learning is paused" in message for message in caplog.messages) == 1
    assert any("not refreshed" in message for message in caplog.messages)
    with pytest.raises(StorageError):
        store.registry.domains()
