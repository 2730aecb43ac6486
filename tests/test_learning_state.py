"""The words that people read are made from the state, in one place."""

from __future__ import annotations

import pytest

from moedraft.learning_state import NO_RECORDS, LearningKind, LearningState, paused, waiting


@pytest.mark.parametrize(
    ("state", "text", "waits_for"),
    [
        (waiting(), "waiting", NO_RECORDS),
        (waiting(""), "waiting", None),
        (LearningState(LearningKind.LOADING), "loading the draft base", None),
        (LearningState(LearningKind.TRAINING, expert="sql", step=1, steps=2), "training sql", None),
        (LearningState(LearningKind.YIELDING, "busy", "sql"), "yielding in training sql", "busy"),
        (LearningState(LearningKind.TRAINING), "measuring what serves on newer requests", None),
        (
            LearningState(LearningKind.YIELDING, "busy"),
            "yielding in measuring what serves on newer requests",
            "busy",
        ),
        (paused("The disk is full."), "paused: The disk is full.", None),
        (LearningState(LearningKind.RESTARTING, "in 4 s"), "starts again in 4 s", None),
        (LearningState(LearningKind.NOT_STARTED), "not started", None),
        (LearningState(LearningKind.LEARNING), "learning", None),
    ],
)
def test_a_state_in_words(state: LearningState, text: str, waits_for: str | None) -> None:
    assert (state.text, state.waits_for) == (text, waits_for)
    assert state.is_paused == (text.startswith("paused"))
