"""The overview page: speed, tokens per target step, where tokens come from, and a table of all experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nicegui import ui

from moedraft.insight.columns import ratio
from moedraft.insight.tables.figures import SOURCES
from moedraft.insight.views import Overview
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.expert_rows import expert_rows
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import (
    NONE,
    Markup,
    count,
    duration,
    figure,
    figures,
    join,
    number,
    pill,
    rate,
    share,
    short,
    tag,
)
from moedraft.serve.dashboard.panels import Live, NumbersPanel, Panel, Small, SmallPanels, Text, join_title
from moedraft.serve.dashboard.words import (
    FIRST_GUESS,
    engine_state,
    idle_note,
    sentence,
    speedup_note,
    trainer_state,
)

if TYPE_CHECKING:
    from moedraft.serve.supervisor.supervisor import TrainerState
    from moedraft.serve.worker.worker import Snapshot


MOST_CHARTS = 12  # small charts of experts; the numbers and the CSV have all
SOURCE_PAINTS = ("var(--accent)", "var(--hue-1)", "var(--hue-2)", "var(--hue-shared)")  # as in `SOURCES`


@dataclass(frozen=True)
class OverviewPageData:
    figures: Overview
    engine: Snapshot
    trainer: TrainerState


def overview_page(look: Look) -> None:
    def see() -> OverviewPageData:
        figures, engine = look.at.observer.overview(look.span), look.at.worker.snapshot()
        return OverviewPageData(figures, engine, look.at.trainer.state())

    Live(look, see, lambda view: _build(look), lambda view: None)


@dataclass(frozen=True)
class OverviewPanels:
    """The charts, the states and the table of the overview."""

    speed: Panel
    state: Text
    per_step: SmallPanels
    sources: Panel
    experts: NumbersPanel

    @classmethod
    def lay_out(cls, look: Look) -> OverviewPanels:
        """Add the panels to the page, still empty."""
        none = "No answer was finished in this time."
        with ui.element("div").classes("grid"):
            return cls(
                speed=Panel(
                    look,
                    "throughput",
                    "Tokens per second",
                    "Of finished answers, by when they ended.",
                    none,
                ),
                state=state_card(),
                per_step=SmallPanels(
                    look,
                    "tokens_per_step",
                    "Tokens per target step, by expert",
                    "How many tokens one forward of the target gives; 1 is plain decoding, higher is faster. "
                    "Grey: all experts together.",
                    none,
                ),
                sources=Panel(
                    look,
                    "sources",
                    "Where tokens come from",
                    "Drafted by the model, looked up in the text so far or in earlier answers, or one "
                    "for each step of the target.",
                    none,
                    wide=True,
                ),
                experts=NumbersPanel(
                    look,
                    "experts",
                    "Which expert earns its place",
                    "Of the last 50 requests; the change is from the first 20, with its 95 % interval. "
                    "Grey: it may be chance.",
                    "There is no expert yet.",
                ),
            )

    def show(self, look: Look, view: OverviewPageData) -> None:
        """Draw the figures of `view`."""
        seen = view.figures
        speed, paints = seen.throughput.columns[3:4], {"tokens/s": "var(--accent)"}
        draw = partial(charts.over_time, seen.throughput, speed, paints)
        self.speed.show(seen.throughput, draw, some=seen.requests > 0)
        _show_per_step(look, self.per_step, seen)
        _show_sources(self.sources, seen)
        self.experts.show(seen.by_figures, expert_rows(look, seen.experts))
        self.state.show(_state(view))


def state_card() -> Text:
    """A card that says how the engine and the trainer are."""
    with ui.element("section").classes("card").props("data-panel=state"):
        ui.html(join_title("Engine and trainer", "The engine answers; the trainer learns beside it."))
        return Text()


def _build(look: Look) -> Callable[[OverviewPageData], None]:
    top, welcome = Text("strip"), Text("welcome-slot")
    panels = OverviewPanels.lay_out(look)

    def update(view: OverviewPageData) -> None:
        top.show(_strip(look, view))
        served = any(expert.stats for expert in view.figures.experts)
        welcome.show(Markup() if served else _welcome(look))
        panels.show(look, view)

    return update


def _strip(look: Look, view: OverviewPageData) -> Markup:
    seen, now = view.figures, view.engine
    first = f"First token after {duration(seen.time_to_first_token)} (median)."
    return figures(
        *_speeds(look, view),
        figure(
            "first_step_share",
            "First guesses right",
            seen.first_step_share,
            share(seen.first_step_share, 1),
            "Of a few tokens of the answers.",
            FIRST_GUESS,
        ),
        figure(
            "running",
            "Running",
            now.running,
            count(now.running),
            f"{count(now.waiting)} waiting. {idle_note(now)}",
        ),
        figure(
            "requests",
            "Requests",
            seen.requests,
            short(seen.requests),
            first if seen.time_to_first_token is not None else f"Finished, {look.span.words}.",
        ),
    )


def _speeds(look: Look, view: OverviewPageData) -> list[Markup]:
    seen, now = view.figures, view.engine
    speedup = NONE if now.speedup is None else f"{number(now.speedup)}×"
    return [
        figure(
            "tokens_per_second",
            "Tokens per second",
            now.tokens_per_second,
            rate(now.tokens_per_second),
            "Over the last ten seconds.",
        ),
        figure("speedup", "Against plain decoding", now.speedup, speedup, speedup_note(now)),
        figure(
            "tokens_per_step",
            "Tokens per target step",
            seen.tokens_per_step,
            number(seen.tokens_per_step),
            f"{short(seen.tokens)} tokens, {look.span.words}; 1 is plain.",
        ),
    ]


def _welcome(look: Look) -> Markup:
    body = json.dumps({"model": look.at.model, "prompt": "SELECT name FROM", "max_tokens": 64})
    command = f"curl {look.server}/v1/completions -H 'content-type: application/json' \\\n  -d '{body}'"
    return tag(
        "section",
        tag("h2", "Ready for the first request"),
        tag("p", "Nothing has been served yet. Send something, and this page begins to move:"),
        tag("pre", command),
        class_="card welcome",
    )


def _show_per_step(look: Look, panel: SmallPanels, seen: Overview) -> None:
    """One small chart for each of the busiest experts."""
    table = seen.by_expert
    paints = charts.colours([expert.name for expert in seen.experts])
    columns = {column.label: column for column in table.columns[2:]}
    served = [expert for expert in seen.experts if expert.requests]
    busiest = sorted(served, key=lambda expert: -expert.requests)[:MOST_CHARTS]
    shown = [expert for expert in served if expert in busiest]
    axis = charts.axis_of(table, [table.columns[1], *(columns[expert.name] for expert in shown)])
    left = len(served) - len(shown)
    panel.show(
        table,
        [
            Small(
                expert.name,
                look.url("experts", expert=expert.name),
                paints[expert.name],
                number(expert.tokens_per_step),
                partial(
                    charts.small,
                    table,
                    columns[expert.name],
                    table.columns[1],
                    paints[expert.name],
                    axis,
                ),
            )
            for expert in shown
        ],
        f"{left} more are among the numbers." if left else "",
    )


def _show_sources(panel: Panel, seen: Overview) -> None:
    table = seen.sources
    counts, shares = table.columns[1 : 1 + len(SOURCES)], table.columns[1 + len(SOURCES) :]
    paints = dict(zip((c.label for c in shares), SOURCE_PAINTS, strict=True))
    totals = [sum(int(n or 0) for n in table.column(column.key)) for column in counts]
    every = sum(totals)
    panel.show(
        table,
        lambda: charts.stacked(table, shares, paints),
        [
            (name, paint, share(ratio(total, every)))
            for (name, paint), total in zip(paints.items(), totals, strict=True)
        ],
        some=every > 0,
    )


def _state(view: OverviewPageData) -> Markup:
    engine, trainer = engine_state(view.engine), trainer_state(view.trainer)
    rows = [("Engine", engine, "engine_state"), ("Trainer", trainer, "trainer_state")]
    parts = [
        tag(
            "li",
            tag("div", tag("b", name), pill(state.word, state.tone), class_="state-head"),
            tag("p", state.sentence, data_figure=key, data_value=state.word),
        )
        for name, state, key in rows
    ]
    now = view.engine
    facts = [("Steps", count(now.steps)), ("Tokens since the start", count(now.tokens_total))]
    if view.trainer.own:
        facts += [
            ("Versions published", count(view.trainer.updates)),
            ("Restarts of the trainer", count(view.trainer.restarts)),
        ]
    if now.learning.is_paused:
        reason = sentence(now.learning.reason)
        parts.append(tag("li", tag("p", f"No records are kept: {reason}"), class_="bad"))
    listed = tag("dl", *(join([tag("dt", name), tag("dd", text)]) for name, text in facts), class_="facts")
    return join([tag("ul", *parts, class_="states"), listed])
