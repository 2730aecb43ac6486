"""What the pages say of the trainer, without a browser."""

from __future__ import annotations

import pytest

from moedraft.learning_state import LearningKind, LearningState, waiting
from moedraft.serve.dashboard.words import trainer_state
from moedraft.serve.supervisor.supervisor import TrainerState

TRAINING, YIELDING = LearningKind.TRAINING, LearningKind.YIELDING


@pytest.mark.parametrize(
    ("learning", "held", "word", "part"),
    [
        (LearningState(TRAINING, expert="sql", step=2, steps=9), False, "Training", "adapter of sql, step 2"),
        (LearningState(TRAINING, expert="sql", step=2, steps=9), True, "Yielding", "Requests are being"),
        (LearningState(YIELDING, "the engine is busy", "sql"), False, "Yielding", "The engine is busy."),
        (LearningState(TRAINING), False, "Running", "Measuring what serves on newer requests."),
        (LearningState(TRAINING), True, "Yielding", "Measuring what serves on newer requests: Requests are"),
        (LearningState(YIELDING, "the engine is busy"), False, "Waiting", "The engine is busy."),
        (waiting("3 of 16 new records are there"), False, "Waiting", "3 of 16 new records are there."),
    ],
)
def test_the_trainer_in_words(learning: LearningState, held: bool, word: str, part: str) -> None:
    said = trainer_state(TrainerState(learning=learning, held=held, pid=1))
    assert said.word == word
    assert part in said.sentence
    assert "None" not in said.sentence


@pytest.mark.parametrize(
    ("paused", "pid", "word"),
    [(False, None, "Off"), (True, None, "Off"), (False, 12, "Beside"), (True, 12, "Paused")],
)
def test_a_trainer_that_follows_the_server_in_words(paused: bool, pid: int | None, word: str) -> None:
    assert trainer_state(TrainerState(own=False, paused=paused, pid=pid)).word == word
