"""The page about learning: updates, what they gained, loss, time spent, and what the trainer waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from moedraft.insight.tables.table import Table
from moedraft.insight.views import LearningView
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import (
    Markup,
    ago,
    count,
    duration,
    figure,
    figures,
    gained,
    join,
    numbers,
    pill,
    short,
    tag,
)
from moedraft.serve.dashboard.panels import Live, NumbersPanel, Panel, Text
from moedraft.serve.dashboard.words import sentence, trainer_state

if TYPE_CHECKING:
    from moedraft.serve.supervisor.supervisor import TrainerState
    from moedraft.serve.worker.worker import Snapshot


@dataclass(frozen=True)
class LearningPageData:
    figures: LearningView
    engine: Snapshot
    trainer: TrainerState


def learning_page(look: Look) -> None:
    def see() -> LearningPageData:
        figures, engine = look.at.observer.learning(look.span), look.at.worker.snapshot()
        return LearningPageData(figures, engine, look.at.trainer.state())

    Live(look, see, lambda view: _build(look))


@dataclass(frozen=True)
class LearningPanels:
    """The charts and the table about updates."""

    gain: Panel
    loss: Panel
    spent: Panel
    updates: NumbersPanel

    @classmethod
    def lay_out(cls, look: Look) -> LearningPanels:
        """Add the panels to the page, still empty."""
        none = "No update in this time."
        with ui.element("div").classes("grid"):
            return cls(
                gain=Panel(
                    look,
                    "updates",
                    "What each update gained",
                    "First guesses right on held-out records, after training less before it, in points of a "
                    "hundred.",
                    none,
                    wide=True,
                ),
                loss=Panel(look, "updates", "Loss", "Mean of an update, nats per token.", none),
                spent=Panel(
                    look, "updates_by_expert", "Time spent", "Seconds of training, by adapter.", none
                ),
                updates=NumbersPanel(
                    look,
                    "updates",
                    "Updates",
                    "The newest first, a row for each adapter. Tokens per step of the target, more or less "
                    "than by what serves, as the gate measured it by so many records; with 80 % it lies "
                    "between the two ends.",
                    none,
                ),
            )

    def show(self, seen: LearningView) -> None:
        """Draw the figures of `seen`."""
        paints, some = charts.colours(seen.names), bool(seen.updates.rows)
        paints |= {str(name): paints.get(str(name), "var(--muted)") for name in seen.updates.column("expert")}
        names = [str(name) for name in seen.by_expert.column("expert")]
        entries = [(name, paints[name], "") for name in names]
        written = numbers(seen.updates)
        for panel, key in ((self.gain, "gain"), (self.loss, "loss")):
            draw = partial(charts.scatter, seen.updates, key, paints)
            panel.show(seen.updates, draw, entries, some=some, written=written)
        seconds = {"time": seen.by_expert.column("seconds")}
        self.spent.show(
            seen.by_expert,
            lambda: charts.bars(names, seconds, "seconds", ["var(--accent)"], lying=True),
            some=some,
        )
        self.updates.show(seen.updates, written)


def _build(look: Look) -> Callable[[LearningPageData], None]:
    banner, top = Text(), Text("strip")
    panels = LearningPanels.lay_out(look)

    def update(view: LearningPageData) -> None:
        banner.show(_banner(view))
        top.show(_strip(view))
        panels.show(view.figures)

    return update


def _banner(view: LearningPageData) -> Markup:
    """What the trainer does now, or what it waits for."""
    state = trainer_state(view.trainer)
    words = [tag("p", state.sentence, data_figure="trainer_state", data_value=state.word)]
    trainer = view.trainer
    if trainer.last_error and state.tone != "bad":
        words.append(tag("p", f"Its last failure: {trainer.last_error}", class_="hint"))
    if view.engine.learning.is_paused:
        words.append(tag("p", f"No records are kept: {sentence(view.engine.learning.reason)}", class_="bad"))
    words = [*_withdrawn(view.figures.updates), *words]
    return tag("section", pill(state.word, state.tone), join(words), class_="card banner")


def _withdrawn(updates: Table) -> list[Markup]:
    """The newest version in this time that was taken back by itself; nothing where there is none."""
    keys = "decision", "expert", "version", "gate_gain", "gate_records", "at"
    rows = [*zip(*map(updates.column, keys), strict=True)]
    for decision, expert, version, gain, records, at in reversed(rows):
        if decision == "withdraw" and isinstance(gain, float) and isinstance(at, float):
            text = (
                f"The adapter of {expert} was taken back to version {version}, {ago(at)}: on {records} later "
                f"requests the newer one gave {-gain:.2f} tokens per step of the target less."
            )
            return [tag("p", text, class_="bad", data_figure="withdrawn", data_value=str(expert))]
    return []


def _strip(view: LearningPageData) -> Markup:
    seen, trainer = view.figures, view.trainer
    made, published = len(seen.updates.rows), f"{short(seen.published)} of them published."
    restarts = trainer.restarts if trainer.own else None
    return figures(
        figure("updates", "Adapters taught", seen.taught, short(seen.taught), published),
        figure(
            "seconds",
            "Time spent",
            seen.seconds,
            duration(seen.seconds) if made else "0",
            "Training, not waiting.",
        ),
        figure(
            "gain",
            "Mean gain",
            seen.gain,
            gained(seen.gain),
            "Tokens per step of the target, by the gate, of what was published.",
        ),
        figure("restarts", "Restarts", restarts, count(restarts), "Of the trainer, since the start."),
    )
