"""What leaves the engine for storage, and what comes in."""

from __future__ import annotations

import logging
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


def test_aborted_and_empty_requests_leave_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "home")
    recorder = Recorder(store, "t")
    for one in (sequence("abort", 3), sequence("error", 3), sequence("stop", 0)):
        recorder(one)
    assert store.requests.summary() == {}
    recorder(sequence("length", 3))
    assert store.requests.summary()[SHARED].tokens == 3
    store.close()


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
