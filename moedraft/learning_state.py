"""What learning does at a moment, as a value: the recorder, the loop, the trainer process and its supervisor
all say it this way, and the words that people read are made from it here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NO_RECORDS = "waiting for records"


class LearningKind(StrEnum):
    """In the order in which a trainer passes through them; `LEARNING` is the recorder's."""

    LEARNING = "learning"  # records of finished requests are being kept
    NOT_STARTED = "not started"  # there was no trainer process yet
    STARTING = "starting"  # the process runs but has said nothing
    LOADING = "loading"  # the draft base is being read
    WAITING = "waiting"  # no update runs, for `reason`
    TRAINING = "training"  # an update of `expert` runs; without one, see `LearningState.expert`
    YIELDING = "yielding"  # that has begun and waits, for `reason`
    PAUSED = "paused"  # something went wrong: `reason`
    RESTARTING = "restarting"  # the process has ended; the next one starts `reason`, such as "in 4 s"
    STOPPED = "stopped"  # the server is shutting down


@dataclass(frozen=True)
class LearningState:
    """One state; what does not belong to its kind is empty."""

    kind: LearningKind
    reason: str = ""  # why it waits, yields or is paused
    expert: str | None = None  # whose update is running; None: what serves is measured between updates
    step: int = 0  # optimiser steps done, of `steps`
    steps: int = 0
    loss: float | None = None  # mean over the running update, nats per token

    @property
    def is_paused(self) -> bool:
        return self.kind is LearningKind.PAUSED

    @property
    def waits_for(self) -> str | None:
        """Why it waits, where it waits of its own accord."""
        waiting = self.kind in (LearningKind.WAITING, LearningKind.YIELDING)
        return self.reason if waiting and self.reason else None

    @property
    def text(self) -> str:
        """The state in a few words, without the reason where `waits_for` gives it."""
        work = f"training {self.expert}" if self.expert else "measuring what serves on newer requests"
        return {
            LearningKind.LOADING: "loading the draft base",
            LearningKind.TRAINING: work,
            LearningKind.YIELDING: f"yielding in {work}",
            LearningKind.PAUSED: f"paused: {self.reason}",
            LearningKind.RESTARTING: f"starts again {self.reason}",
        }.get(self.kind, self.kind.value)


def waiting(reason: str = NO_RECORDS) -> LearningState:
    return LearningState(LearningKind.WAITING, reason)


def paused(reason: str) -> LearningState:
    return LearningState(LearningKind.PAUSED, reason)
