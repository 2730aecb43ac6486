"""Describes the state of the engine and of the trainer by a word, a tone and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moedraft.serve.dashboard.markup import share

if TYPE_CHECKING:
    from moedraft.serve.supervisor.supervisor import TrainerState
    from moedraft.serve.worker.worker import Snapshot

FIRST_GUESS = (
    "For a few tokens of the answers, drafted or not, as many as half a percent of the time allows: whether "
    "the draft that serves an answer guesses them right from the tokens before. So it does not depend on how "
    "far the engine finds it worth to draft."
)
COVERAGE = (
    "How much of its newest answers is made of tokens of the list from which its draft guesses. Beside these "
    "a feature drafter guesses only tokens that stand in the request's own text."
)


@dataclass(frozen=True)
class StatusText:
    """A description of a state. tone: good, busy, bad or quiet."""

    word: str
    tone: str
    sentence: str


def engine_state(now: Snapshot) -> StatusText:
    if now.failed:
        return StatusText("Failed", "bad", f"The engine cannot serve: {now.failed}")
    if now.draining:
        return StatusText("Shutting down", "busy", "New requests are refused; running ones are finished.")
    if now.running or now.waiting:
        queue = f", {now.waiting} wait for one" if now.waiting else ""
        return StatusText("Serving", "good", f"{now.running} of {now.slots} slots are taken{queue}.")
    return StatusText("Idle", "quiet", f"Ready; all {now.slots} slots are free.")


def trainer_state(now: TrainerState) -> StatusText:
    """The trainer's state as text."""
    if not now.own and now.pid is None:
        text = "This server was started without learning, and no other process learns for it"
        return StatusText("Off", "quiet", f"{text}{'; learning is paused' if now.paused else ''}.")
    if now.paused:
        return StatusText("Paused", "quiet", "Learning was paused by an administrator.")
    if not now.own:
        pid = f" (pid {now.pid})" if now.pid else ""
        return StatusText("Beside", "good", f"Another process{pid} learns for this server.")
    if now.pid is None:
        again = f"The trainer is not running: {now.learning.text}."
        return (
            StatusText("Down", "bad", f"{again} {sentence(now.last_error)}")
            if now.last_error
            else (StatusText("Starting", "quiet", again))
        )
    doing = now.learning
    if doing.expert:
        done = f", step {doing.step} of {doing.steps}" if doing.steps else ""
        loss = f", loss {doing.loss:.2f}" if doing.loss is not None else ""
        if doing.waits_for or now.held:
            reason = sentence(doing.waits_for or "requests are being served")
            return StatusText("Yielding", "busy", f"In the middle of {doing.expert}{done}: {reason}")
        return StatusText("Training", "good", f"Updating the adapter of {doing.expert}{done}{loss}.")
    if doing.waits_for:
        return StatusText("Waiting", "busy", sentence(doing.waits_for))
    if now.trains and now.held:
        return StatusText("Yielding", "busy", f"{sentence(doing.text)[:-1]}: Requests are being served.")
    return StatusText("Running", "quiet", sentence(doing.reason if doing.is_paused else doing.text))


def sentence(text: str) -> str:
    """The text as a sentence, with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def speedup_note(now: Snapshot) -> str:
    if now.speedup is None:
        return "Not measured yet: it takes a few plain rounds."
    return "Measured: now and then a round decodes plainly."


def idle_note(now: Snapshot) -> str:
    return f"Idle {share(now.idle_share)} of the last seconds."
