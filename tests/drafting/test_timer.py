"""What a round takes by a clock that the tests move: all of its own time, and none of another's."""

from __future__ import annotations

import pytest

from moedraft.drafting.timer import RoundTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> RoundTimer:
    return RoundTimer(clock)


def a_round(timer: RoundTimer, clock: Clock, seconds: float = 4.0, apart: float = 0.0) -> float:
    """Milliseconds that a round of so many seconds is said to take."""
    with timer.round():
        with timer.apart():
            clock.wait(apart)
        clock.wait(seconds)
    return timer.ms


def test_the_first_round_takes_what_it_takes(timer: RoundTimer, clock: Clock) -> None:
    clock.wait(50)
    assert a_round(timer, clock) == pytest.approx(4000)


def test_the_time_between_two_rounds_is_the_later_ones(timer: RoundTimer, clock: Clock) -> None:
    a_round(timer, clock)
    clock.wait(1.5)
    assert a_round(timer, clock) == pytest.approx(5500)
    assert a_round(timer, clock) == pytest.approx(4000)  # nothing lay between


def test_a_pause_counts_no_more_than_the_round_itself(timer: RoundTimer, clock: Clock) -> None:
    """A caller that steps rarely would make rounds look slow otherwise."""
    a_round(timer, clock)
    clock.wait(60)
    assert a_round(timer, clock) == pytest.approx(2 * 4000)


def test_what_is_paid_once_is_left_out(timer: RoundTimer, clock: Clock) -> None:
    assert a_round(timer, clock, apart=7) == pytest.approx(4000)
    assert a_round(timer, clock) == pytest.approx(4000)  # and is not left out of the next one again


def test_several_parts_are_left_out_together(timer: RoundTimer, clock: Clock) -> None:
    with timer.round():
        for seconds in (2, 3):
            with timer.apart():
                clock.wait(seconds)
            clock.wait(1)
    assert timer.ms == pytest.approx(2000)


def test_a_part_outside_of_a_round_is_no_rounds(timer: RoundTimer, clock: Clock) -> None:
    with timer.apart():
        clock.wait(30)
    assert a_round(timer, clock) == pytest.approx(4000)


def test_an_interruption_is_not_the_next_rounds_time(timer: RoundTimer, clock: Clock) -> None:
    a_round(timer, clock)
    clock.wait(0.5)
    timer.interrupted()  # a prompt is read
    clock.wait(1.5)
    assert a_round(timer, clock) == pytest.approx(4000)
    clock.wait(1.5)
    assert a_round(timer, clock) == pytest.approx(5500)  # it lasts for one round


def test_a_round_that_raises_is_not_timed(timer: RoundTimer, clock: Clock) -> None:
    """And the time until the next one counts from the last whole round, up to the round's own length."""
    a_round(timer, clock)

    def fail() -> None:
        with timer.round():
            clock.wait(9)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert timer.ms == pytest.approx(4000)
    assert a_round(timer, clock) == pytest.approx(8000)


def test_steps_and_verification_add_up(timer: RoundTimer, clock: Clock) -> None:
    def work(seconds: float, *, more: float = 0.0) -> float:
        clock.wait(seconds + more)
        return seconds

    verify = timer.verifying(work)
    for _ in range(3):
        with timer.step():
            clock.wait(2)
            assert verify(1, more=0.5) == 1
        clock.wait(10)
    assert timer.step_seconds == pytest.approx(10.5)
    assert timer.verify_seconds == pytest.approx(4.5)
    assert verify.__name__ == "work"


def test_a_verification_that_raises_is_counted(timer: RoundTimer, clock: Clock) -> None:
    def work() -> None:
        clock.wait(2)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        timer.verifying(work)()
    assert timer.verify_seconds == pytest.approx(2)
