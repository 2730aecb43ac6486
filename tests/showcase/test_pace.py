"""How learning gets the time that serving leaves, on a clock that the test sets."""

from __future__ import annotations

import pytest

from moedraft.showcase.serving.pace import FIRST_STEPS, LEAST_STEPS, Pace, StepClock


class Clock:
    """Goes on by itself a little, as a clock does between two looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("moedraft.showcase.serving.pace.time.monotonic", made)
    return made


def run(
    clock: Clock, pace: Pace, serving: float, step: float, beside: float = 0.0, running: int = 0
) -> list[int]:
    """Serve and train as `serve_and_learn` does, one update a pause. Returns the steps of each update.

    running: requests that have begun, beside those that are done.
    """
    taken, done = [], 0
    while done < pace.requests:
        done, clock.now = done + 1, clock.now + serving
        if done % pace.window == 0 or done == pace.requests:
            pace.pause(done, min(done + running, pace.requests))
            steps = pace.next_steps()
            taken.append(steps)
            if steps:
                clock.now += beside + steps * step
                pace.took(steps, beside + steps * step, step)
    return taken


def test_serving_and_learning_end_in_time(clock: Clock) -> None:
    taken = run(clock, Pace(250, 320, 64, 128), serving=0.3, step=1.0, beside=6.0)
    assert 225 <= clock.now <= 255
    assert taken[0] == FIRST_STEPS
    assert len(taken) == 5
    assert sum(taken) > 100


def test_a_slow_machine_serves_and_learns_less(clock: Clock) -> None:
    pace = Pace(250, 320, 64, 128)
    taken = run(clock, pace, serving=0.75, step=2.0)
    assert clock.now <= 275
    assert 30 < sum(taken) < 60
    assert pace.requests == 192  # so that time for learning is left


def test_three_windows_are_served_in_any_case(clock: Clock) -> None:
    pace = Pace(250, 320, 40, 128)
    run(clock, pace, serving=3.0, step=2.0)
    assert pace.requests == 120


@pytest.mark.parametrize(
    "pauses",  # each: the time, requests that are done and begun, and how many the stream has from then on
    [
        pytest.param([(25.0, 40, 50, 240), (300.0, 120, 130, 130)], id="what has begun is served"),
        pytest.param([(80.0, 40, 40, 120), (90.0, 120, 120, 160)], id="a slow start cuts nothing for good"),
    ],
)
def test_the_speed_of_the_machine_may_change(clock: Clock, pauses: list[tuple[float, int, int, int]]) -> None:
    pace = Pace(250, 320, 40, 128)
    for now, done, started, requests in pauses:
        clock.now = now
        pace.pause(done, started)
        assert pace.requests == requests


def test_something_is_learned_where_serving_takes_all_the_time(clock: Clock) -> None:
    taken = run(clock, Pace(100, 64, 32, 96), serving=2.0, step=1.0)
    assert min(taken) > 0
    assert clock.now <= 128 * 1.35


def test_the_last_window_is_learned_from_however_slow_the_machine_is(clock: Clock) -> None:
    taken = run(clock, Pace(250, 320, 40, 128), serving=2.0, step=2.0, beside=20.0, running=16)
    assert taken == [FIRST_STEPS, 0, LEAST_STEPS]


def test_no_update_is_longer_than_the_most(clock: Clock) -> None:
    taken = run(clock, Pace(240, 64, 32, 32), serving=0.1, step=0.1)
    assert taken == [FIRST_STEPS, 32]


def test_a_step_is_timed_without_what_comes_before_the_first(clock: Clock) -> None:
    timed = StepClock()
    for after, done in ((9.0, 0), (6.0, 1), (2.0, 2), (2.0, 3), (50.0, 3)):
        clock.now += after
        timed(done, None)
    assert timed.step_seconds == pytest.approx(2.0, abs=1e-3)
