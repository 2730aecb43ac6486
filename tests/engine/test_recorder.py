"""What leaves the engine for storage, and what comes in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moedraft.core import SHARED, Domain, SamplingParams, Sequence, StorageError, TokenLogprobs
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.learning_state import paused
from moedraft.storage.store import Store
from moedraft.system.recorder import LEARNING, Recorder, replay_record, script_of, size_of
from moedraft.system.sources.loader import AdapterLoader

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


def test_a_record_tells_whose_text_it_is_and_who_drafted(store: Store) -> None:
    """Evidence may have given a request of a domain to the shared draft; the domain still learns from it."""
    made = sequence("stop", 1)
    made.routed, made.expert = "sql", SHARED
    made.captured = [SimpleNamespace(top=lambda: (torch.zeros(1, 2).long(), torch.zeros(1, 2)))]
    made.weights, made.heard = {"sql": 0.5, SHARED: 0.3, "python": 0.2}, {SHARED: 1.0}
    record = replay_record(made, "t")
    assert (record.domain, record.expert) == ("sql", SHARED)
    assert (record.weights, record.heard) == (made.weights, made.heard)
    assert record.belief == pytest.approx(0.8)


def test_a_record_tells_at_which_temperature_it_was_sampled(store: Store) -> None:
    made = sequence("stop", 1)
    made.captured = [SimpleNamespace(top=lambda: (torch.zeros(1, 2).long(), torch.zeros(1, 2)))]
    made.params = SamplingParams(temperature=0.7)
    Recorder(store, "t")(made)
    assert [record.temperature for record in store.replay.records()] == [0.7]


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
    monkeypatch.setattr("moedraft.system.recorder.FLUSH_SECONDS", 0.1)
    began = time.monotonic()
    with store.home.write():  # as long as another thread writes
        for _ in range(3):
            beside(sequence("length", 3))
        assert time.monotonic() - began < 8  # a disk is waited for longer
        with pytest.raises(StorageError, match="takes no records"):
            beside.flush()
    monkeypatch.setattr("moedraft.system.recorder.FLUSH_SECONDS", 10)
    beside.flush()
    assert recorded(store) == 3


def test_those_that_end_together_are_written_together(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedraft.system.recorder.GATHER_SECONDS", 60)  # `flush` waits for nothing
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
    monkeypatch.setattr("moedraft.system.recorder.MOST", 4)
    with store.home.write():
        for _ in range(50):
            beside(sequence("length", 3))
        assert beside.state == paused("the disk is slower than the requests")
    beside.flush()
    assert beside.state == LEARNING
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


def captured(tokens: int, k: int = 4) -> Sequence:
    made = sequence("length", tokens)
    top = torch.ones(tokens, k, dtype=torch.int64), torch.zeros(tokens, k)
    made.captured = [SimpleNamespace(top=lambda: top)]
    return made


def broken() -> Sequence:
    made = sequence("length", 3)
    made.captured = [SimpleNamespace(top=None)]  # type: ignore[list-item]
    return made


def test_what_waits_is_bounded_by_its_size_too(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(captured(3))
    beside.flush()  # how many alternatives there are is known now
    monkeypatch.setattr("moedraft.system.recorder.MOST_BYTES", 100_000)
    with store.home.write():
        for _ in range(50):
            beside(captured(300))  # 25 kB
        assert beside.state == paused("the disk is slower than the requests")
    beside.flush()
    assert beside.state == LEARNING
    assert 1 + 3 <= store.replay.count() <= 1 + 6, "three are being written, three wait"
    beside(captured(50_000))  # alone it may be larger
    beside.flush()
    assert store.replay.records(limit=1)[0].token_ids[-1] == 49_999


def test_a_request_with_logprobs_weighs_more() -> None:
    plain, asked = captured(100), captured(100)
    asked.params = SamplingParams(logprobs=20)
    asked.logprobs = [TokenLogprobs(0.0, ((1, 0.0),) * 20)] * 100
    assert size_of(asked) > 3 * size_of(sequence("length", 100))
    assert size_of(asked) > size_of(plain) > size_of(sequence("length", 100))


@pytest.mark.parametrize("malformed", [False, True])
def test_a_record_that_cannot_be_made_costs_no_other(
    store: Store, beside: Recorder, caplog: pytest.LogCaptureFixture, malformed: bool
) -> None:
    bad = broken()
    if malformed:  # which storage notices
        bad.captured = captured(2).captured
    for one in (captured(3), bad, captured(3)):
        beside(one)
    beside.flush()
    assert (store.replay.count(), recorded(store)) == (2, 3)
    assert "1 records could not be made" in caplog.text
    assert beside.state == LEARNING


@pytest.mark.parametrize("threaded", [False, True])
def test_where_nothing_can_be_recorded_the_status_says_so(
    store: Store, caplog: pytest.LogCaptureFixture, threaded: bool
) -> None:
    recorder = Recorder(store, "t")
    if threaded:
        recorder.record_beside()
    recorder(broken())
    recorder.flush()
    assert recorder.state == paused("records cannot be made (TypeError)")
    assert "1 records could not be made" in caplog.text
    recorder(captured(3))
    recorder.flush()
    assert recorder.state == LEARNING
    assert store.replay.count() == 1
    recorder.close()


def test_a_fault_of_storage_is_no_end_either(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(stats: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(store.requests, "add", fails)
        beside(captured(3))
        beside.flush()
        assert beside.state == paused("records cannot be made (RuntimeError)")
    beside(captured(3))
    beside.flush()
    assert (beside.state, recorded(store), store.replay.count()) == (LEARNING, 1, 2)


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
    assert recorder.state.is_paused
    assert recorder.state.reason
    assert sum("Learning is paused" in message for message in caplog.messages) == 1
    assert any("not refreshed" in message for message in caplog.messages)
    with pytest.raises(StorageError):
        store.registry.domains()


def with_states(tokens: int, width: int) -> Sequence:
    made = captured(tokens)
    made.states = [
        torch.ones(1, width, dtype=torch.bfloat16),
        torch.zeros(tokens, width, dtype=torch.bfloat16),
    ]
    return made


def test_kept_features_are_stored_with_their_record(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "home", states_bytes=10**6)) as store:
        recorder = Recorder(store, "t", "base")
        recorder(with_states(5, 8))
        recorder(captured(5))
        [plain, kept] = store.replay.records()
        found = store.replay.states([plain, kept], "base")
        assert list(found) == [kept.id]
        assert found[kept.id][:, 0].tolist() == [1, 0, 0, 0, 0, 0]


def test_a_slow_disk_costs_features_before_it_costs_records(
    store: Store, beside: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside(captured(3))
    beside.flush()
    monkeypatch.setattr("moedraft.system.recorder.MOST_BYTES", 100_000)
    heavy = [with_states(30, 1000) for _ in range(10)]  # 60 kB each, 3 kB without the states
    assert size_of(heavy[0]) > 60_000
    with store.home.write():
        for one in heavy:
            beside(one)
        assert beside.state == LEARNING
        assert sum(bool(one.states) for one in heavy) <= 2
    beside.flush()
    assert store.replay.count() == 11
