"""The page about one expert: acceptance over time, by position in the draft and by writing system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nicegui import ui

from moedraft.core import SHARED
from moedraft.insight.views import Expert, ExpertView
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import (
    Markup,
    ago,
    count,
    figure,
    figures,
    notice,
    number,
    points,
    share,
    short,
    tag,
)
from moedraft.serve.dashboard.panels import Live, NumbersPanel, Panel, Text

RATE = "acceptance_rate"


@dataclass(frozen=True)
class ExpertsPageData:
    experts: tuple[Expert, ...]
    chosen: ExpertView | None  # None: no expert has the name in the URL


def experts_page(look: Look) -> None:
    name = look.expert

    def see() -> ExpertsPageData:
        nonlocal name
        experts = look.at.observer.experts(look.span)
        # Chosen once, so that the page does not switch to another expert while somebody reads it.
        name = name or _first(experts)
        return ExpertsPageData(experts, look.at.observer.expert(name, look.span))

    Live(look, see, lambda view: _build(look, view), lambda view: view.chosen is None)


@dataclass(frozen=True)
class ExpertPanels:
    """The charts and the table of one expert."""

    over_time: Panel
    positions: Panel
    languages: Panel
    versions: NumbersPanel

    @classmethod
    def lay_out(cls, look: Look) -> ExpertPanels:
        """Add the panels to the page, still empty."""
        with ui.element("div").classes("grid"):
            return cls(
                over_time=Panel(
                    look,
                    "acceptance",
                    "Acceptance over time",
                    "Upright lines mark new versions.",
                    "Nothing was drafted for this expert in this time.",
                    wide=True,
                    height=280,
                ),
                positions=Panel(
                    look,
                    "by_position",
                    "By place in the draft",
                    "The further ahead a token is guessed, the harder it is.",
                    "Nothing was drafted in this time.",
                ),
                languages=Panel(
                    look,
                    "by_language",
                    "By writing of the prompt",
                    "Which scripts this expert guesses well.",
                    "No request in this time.",
                ),
                versions=NumbersPanel(
                    look,
                    "versions",
                    "Versions",
                    "When made: on held-out records. In traffic: of requests in this time.",
                    "No version yet: an untrained adapter changes nothing.",
                ),
            )

    def show(self, seen: ExpertView, paint: str) -> None:
        """Draw the expert's figures, in its colour `paint`."""
        column = seen.acceptance.columns[4:5]
        self.over_time.show(
            seen.acceptance,
            lambda: charts.over_time(seen.acceptance, column, {column[0].label: paint}),
            some=seen.expert.acceptance is not None,
        )
        places = [str(place) for place in seen.by_position.column("position")]
        rates = {"acceptance": seen.by_position.column(RATE)}
        self.positions.show(
            seen.by_position, lambda: charts.bars(places, rates, "share", [paint]), some=bool(places)
        )
        langs = [str(lang) for lang in seen.by_language.column("lang")]
        by_lang = {"acceptance": seen.by_language.column(RATE)}
        self.languages.show(
            seen.by_language,
            lambda: charts.bars(langs, by_lang, "share", [paint], lying=True),
            some=bool(langs),
        )
        self.versions.show(seen.versions)


def _first(experts: tuple[Expert, ...]) -> str:
    """The expert to show if the URL names none: the domain with the most requests."""
    domains = [expert for expert in experts if expert.name != SHARED]
    busiest = max(domains, key=lambda expert: expert.requests, default=None)
    return busiest.name if busiest else SHARED


def _build(look: Look, view: ExpertsPageData) -> Callable[[ExpertsPageData], None]:
    choice = Text("choice-slot")
    if view.chosen is None:
        ui.html(notice("There is no such expert", "It was removed and never served, or the name is another."))
        return lambda view: choice.show(_choice(look, view))
    look = replace(look, expert=view.chosen.expert.name)
    top = Text("strip")
    panels = ExpertPanels.lay_out(look)

    def update(view: ExpertsPageData) -> None:
        choice.show(_choice(look, view))
        if view.chosen is None:
            return
        top.show(_strip(look, view.chosen.expert))
        paint = charts.colours([expert.name for expert in view.experts])[view.chosen.expert.name]
        panels.show(view.chosen, paint)

    return update


def _choice(look: Look, view: ExpertsPageData) -> Markup:
    """A link for every expert, with its current acceptance."""
    paints = charts.colours([expert.name for expert in view.experts])
    chosen = view.chosen.expert.name if view.chosen else None
    links = [
        tag(
            "a",
            tag("i", style=f"background:{paints[expert.name]}"),
            tag("span", expert.name),
            tag("b", share(expert.stats.recent_acceptance_rate if expert.stats else None)),
            href=look.url(expert=expert.name),
            aria_current="true" if expert.name == chosen else None,
        )
        for expert in view.experts
    ]
    return tag("nav", *links, class_="choice", aria_label="Experts")


def _strip(look: Look, expert: Expert) -> Markup:
    stats = expert.stats
    now = stats.recent_acceptance_rate if stats else None
    first = stats.first_acceptance_rate if stats else None
    change = None if now is None or first is None else now - first
    since = "Of the last 50 requests." if change is None else f"{points(change)} points since registration."
    length = expert.mean_acceptance_length
    live = f"v{expert.version}" if expert.version else "untrained"
    replay = f"Newest {ago(expert.replay_newest)}, oldest {ago(expert.replay_oldest)}."
    return figures(
        figure("recent_acceptance_rate", "Acceptance now", now, share(now, 1), since),
        figure(
            "first_acceptance_rate", "At registration", first, share(first, 1), "Of the first 20 requests."
        ),
        figure(
            "mean_acceptance_length", "Mean length", length, number(length), "Tokens per step of the target."
        ),
        figure(
            "share",
            "Share of traffic",
            expert.share,
            share(expert.share),
            f"{short(expert.requests)} requests.",
        ),
        figure(
            "replay_size",
            "Replay",
            expert.replay_size,
            count(expert.replay_size),
            replay if expert.replay_size else "No record is kept.",
        ),
        figure("version", "Version", expert.version, live, f"{count(expert.updates)} updates so far."),
    )
