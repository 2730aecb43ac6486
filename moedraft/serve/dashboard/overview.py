"""The overview page: speed, acceptance, where tokens come from, and a table of all experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nicegui import ui

from moedraft.core import SHARED
from moedraft.insight.columns import ratio
from moedraft.insight.figures import ALL
from moedraft.insight.views import Expert, Overview
from moedraft.serve.dashboard import charts
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
    points,
    rate,
    share,
    short,
    tag,
)
from moedraft.serve.dashboard.panels import Live, NumbersPanel, Panel, Text, join_title
from moedraft.serve.dashboard.words import engine_state, idle_note, sentence, speedup_note, trainer_state

if TYPE_CHECKING:
    from moedraft.serve.supervisor.supervisor import TrainerState
    from moedraft.serve.worker.worker import Snapshot


MOST_LINES = 12  # of experts in a chart; the numbers and the CSV have all
SOURCE_PAINTS = ("var(--accent)", "var(--hue-1)", "var(--hue-shared)")  # of draft, text and target


@dataclass(frozen=True)
class OverviewPageData:
    figures: Overview
    engine: Snapshot
    trainer: TrainerState | None


def overview_page(look: Look) -> None:
    def see() -> OverviewPageData:
        supervisor = look.at.supervisor
        trainer = supervisor.state() if supervisor else None
        return OverviewPageData(look.at.observer.overview(look.span), look.at.worker.snapshot(), trainer)

    Live(look, see, lambda view: _build(look), lambda view: None)


def _build(look: Look) -> Callable[[OverviewPageData], None]:
    top, welcome = Text("strip"), Text("welcome-slot")
    with ui.element("div").classes("grid"):
        speed = Panel(
            look,
            "throughput",
            "Tokens per second",
            "Of finished answers, by when they ended.",
            "No answer was finished in this time.",
        )
        with ui.element("section").classes("card").props("data-panel=state"):
            ui.html(join_title("Engine and trainer", "The engine answers; the trainer learns beside it."))
            state = Text()
        accepted = Panel(
            look,
            "acceptance_by_expert",
            "Acceptance by expert",
            "Share of guessed tokens that the target would have said too. Higher is faster.",
            "Nothing was drafted in this time.",
            wide=True,
            height=280,
        )
        sources = Panel(
            look,
            "sources",
            "Where tokens come from",
            "Drafted by the model, drafted from the text so far, or one for each step of the target.",
            "No answer was finished in this time.",
            wide=True,
        )
        table = NumbersPanel(
            look,
            "experts",
            "Which expert earns its place",
            "Now is the last 50 requests, then the change since the first 20.",
            "There is no expert yet.",
        )

    def update(view: OverviewPageData) -> None:
        seen = view.figures
        top.show(_strip(look, view))
        served = any(expert.stats for expert in seen.experts)
        welcome.show(Markup() if served else _welcome(look))
        speed.show(
            seen.throughput,
            lambda: charts.over_time(
                seen.throughput, seen.throughput.columns[3:4], {"tokens/s": "var(--accent)"}
            ),
            some=seen.requests > 0,
        )
        _show_acceptance(accepted, seen)
        _show_sources(sources, seen)
        table.show(seen.by_figures, _experts(look, seen.experts))
        state.show(_state(view))

    return update


def _strip(look: Look, view: OverviewPageData) -> Markup:
    seen, now = view.figures, view.engine
    speedup = NONE if now.speedup is None else f"{number(now.speedup)}×"
    first = f"First token after {duration(seen.time_to_first_token)} (median)."
    return figures(
        figure(
            "tokens_per_second",
            "Tokens per second",
            now.tokens_per_second,
            rate(now.tokens_per_second),
            "Over the last ten seconds.",
        ),
        figure("speedup", "Against plain decoding", now.speedup, speedup, speedup_note(now)),
        figure(
            "acceptance",
            "Acceptance",
            seen.acceptance,
            share(seen.acceptance),
            f"{short(seen.tokens)} tokens, {look.span.words}.",
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


def _show_acceptance(panel: Panel, seen: Overview) -> None:
    table = seen.by_expert
    paints = charts.colours([expert.name for expert in seen.experts])
    busiest = sorted(seen.experts, key=lambda expert: -expert.requests)[:MOST_LINES]
    drawn = {ALL, *(expert.name for expert in busiest)}
    columns = [column for column in table.columns[1:] if column.label in drawn]
    left = len(table.columns) - 1 - len(columns)
    rest = [(f"{left} more among the numbers", "transparent", "")] if left else []
    found = {expert.name: expert.acceptance for expert in seen.experts} | {ALL: seen.acceptance}
    panel.show(
        table,
        lambda: charts.over_time(table, columns, {**paints, ALL: "var(--ink)"}),
        [
            (name, {**paints, ALL: "var(--ink)"}[name], share(found[name]))
            for name in (c.label for c in columns)
        ]
        + rest,
        some=seen.acceptance is not None,
    )


def _show_sources(panel: Panel, seen: Overview) -> None:
    table = seen.sources
    counts, shares = table.columns[1:4], table.columns[4:]
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
    if view.trainer:
        facts += [
            ("Updates", count(view.trainer.updates)),
            ("Restarts of the trainer", count(view.trainer.restarts)),
        ]
    if now.learning.is_paused:
        reason = sentence(now.learning.reason)
        parts.append(tag("li", tag("p", f"No records are kept: {reason}"), class_="bad"))
    listed = tag("dl", *(join([tag("dt", name), tag("dd", text)]) for name, text in facts), class_="facts")
    return join([tag("ul", *parts, class_="states"), listed])


def _experts(look: Look, experts: tuple[Expert, ...]) -> Markup:
    paints = charts.colours([expert.name for expert in experts])
    labels = ("expert", "traffic", "now", "change", "mean length", "replay", "version")
    head = tag("tr", *(tag("th", label, scope="col", class_="num") for label in labels))
    body = [_expert_row(look, expert, paints[expert.name]) for expert in experts]
    whole = tag("table", tag("thead", head), tag("tbody", *body), data_table="experts", class_="roomy")
    return tag("div", whole, class_="scroll")


def _expert_row(look: Look, expert: Expert, paint: str) -> Markup:
    stats = expert.stats
    now = stats.recent_acceptance_rate if stats else None
    first = stats.first_acceptance_rate if stats else None
    change = None if now is None or first is None else now - first
    tone = "" if change is None or abs(change) < 0.005 else "up" if change > 0 else "down"
    width = f"width:{100 * (expert.share or 0):.1f}%;background:{paint}"
    name = join(
        [
            tag("i", style=f"background:{paint}"),
            tag("a", expert.name, href=look.url("experts", expert=expert.name)),
            tag("small", _kind(expert)) if _kind(expert) else Markup(),
        ]
    )
    meter = join([tag("span", tag("i", style=width), class_="meter"), tag("span", share(expert.share))])
    cells = [
        ("share", expert.share, meter, "num wide-cell"),
        ("recent_acceptance_rate", now, share(now, 1), "num"),
        ("change", change, points(change), f"num {tone}"),
        (
            "mean_acceptance_length",
            expert.mean_acceptance_length,
            number(expert.mean_acceptance_length),
            "num",
        ),
        ("replay_size", expert.replay_size, count(expert.replay_size), "num"),
        ("version", expert.version, f"v{expert.version}" if expert.version else "untrained", "num"),
    ]
    written = [
        tag("td", text, class_=kind, data_key=key, data_value=None if value is None else repr(value))
        for key, value, text, kind in cells
    ]
    return tag(
        "tr", tag("th", tag("div", name, class_="named"), scope="row"), *written, data_expert=expert.name
    )


def _kind(expert: Expert) -> str:
    if expert.name == SHARED:
        return "fits no domain"
    return "" if expert.registered else "removed"
