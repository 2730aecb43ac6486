"""A trainer's share of the time while requests are served, by the test's clock and with a real process."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest

from moedraft.config import load_settings
from moedraft.distill.pace.governor import Load, why_wait
from moedraft.serve.supervisor import hold as module
from moedraft.serve.supervisor.child import Child
from moedraft.serve.supervisor.hold import SLICE, Hold


class Process:
    """Notes when it was suspended and resumed."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    @property
    def runs(self) -> bool:
        return not self.signals or self.signals[-1] == signal.SIGCONT


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def run(self, hold: Hold, seconds: float, step: float = 0.02, works: bool = True) -> float:
        """The share of `seconds` for which the process ran, looked at every `step`."""
        ran, process = 0.0, hold.child.process
        for _ in range(round(seconds / step)):
            hold.turn(works)
            if process.runs:  # type: ignore[attr-defined]
                ran += step
                hold.child.ran(step)  # type: ignore[attr-defined]
            self.now += step
        return ran / seconds


class Fake:
    """rate: how much of a core it gets while it runs; None: the system does not tell."""

    def __init__(self, rate: float | None) -> None:
        self.process, self.rate, self.used = Process(), rate, 0.0

    def ran(self, seconds: float) -> None:
        self.used += seconds * (self.rate or 1.0)

    def processor_seconds(self) -> float | None:
        return self.used if self.rate is not None and self.process.runs else None


def held(share: float, busy: bool = True, rate: float | None = None) -> Hold:
    child: Any = Fake(rate)
    return Hold(child, lambda: busy, share)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("step", [0.02, 0.2])
def test_it_runs_for_its_share_of_a_busy_time(
    share: float, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Clock(monkeypatch).run(held(share), 200, step)
    assert found == pytest.approx(share, rel=0.15)


@pytest.mark.parametrize("step", [0.02, 0.2])
def test_time_for_which_others_have_the_core_is_not_spent(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a quarter of a core while it runs, so it runs for four times its share."""
    clock, hold = Clock(monkeypatch), held(0.2, rate=0.25)
    found = clock.run(hold, 200, step)
    assert found == pytest.approx(0.8, rel=0.15)
    assert hold.child.used / 200 == pytest.approx(0.2, rel=0.15)  # type: ignore[attr-defined]


def test_what_was_used_before_the_requests_came_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hold = Clock(monkeypatch), held(0.3, busy=False, rate=1.0)
    clock.run(hold, 100)
    hold._busy = lambda: True
    assert clock.run(hold, 100) == pytest.approx(0.3, rel=0.15)


def test_without_a_share_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Clock(monkeypatch).run(held(0.0), 50) == 0.0


def test_with_a_share_it_gives_way_to_the_first_request_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hold = Clock(monkeypatch), held(0.05, busy=False)
    assert clock.run(hold, 5) == pytest.approx(1.0)
    hold.make_way(True)
    assert hold.held
    clock.now += SLICE
    hold.turn(True)
    assert hold.held  # a slice has to be earned first


def test_who_only_waits_is_never_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = held(0.05)
    assert Clock(monkeypatch).run(hold, 5, works=False) == pytest.approx(1.0)


def test_a_real_process_keeps_to_its_share() -> None:
    child = Child([sys.executable, "-c", "while True: pass"], {})
    hold = Hold(child, lambda: True, 0.2)
    try:
        used, until = 0.0, time.monotonic() + 2.0
        while time.monotonic() < until:
            hold.turn(True)
            used = child.processor_seconds() or used
            time.sleep(0.01)
        assert 0 < used < 0.2 * 2.0 + 3 * SLICE
    finally:
        hold.end()
        child.close(0.0)


def test_with_a_share_a_busy_engine_is_no_reason_to_wait() -> None:
    busy = Load(0.0, 5, 100.0)
    none = load_settings(home="/nowhere")
    some = load_settings(home="/nowhere", train_cpu_share=0.05)
    assert why_wait(busy, none, now=100.0)
    assert why_wait(busy, some, now=100.0) is None
    assert why_wait(busy, some, now=200.0) == "no word from the engine"
