"""The page about one expert: its two main figures, and its guesses by position and by script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from nicegui import ui

from moedraft.core import SHARED
from moedraft.insight.change import Change
from moedraft.insight.coverage import Coverage
from moedraft.insight.tables.figures import FIRST_STEP, PER_STEP
from moedraft.insight.views import Expert, ExpertView
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import (
    Markup,
    ago,
    changed,
    count,
    figure,
    figures,
    join,
    notice,
    number,
    numbers,
    share,
    short,
    tag,
    tone_of,
)
from moedraft.serve.dashboard.panels import Live, NumbersPanel, Panel, Text
from moedraft.serve.dashboard.words import COVERAGE, FIRST_GUESS

MOSTLY = 0.5  # of a domain's tokens: the page says it where the shared draft stands for more of them


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

    speed: Panel
    guesses: Panel
    positions: Panel
    languages: Panel
    versions: NumbersPanel

    @classmethod
    def lay_out(cls, look: Look) -> ExpertPanels:
        """Add the panels to the page, still empty."""
        with ui.element("div").classes("grid"):
            return cls(
                speed=Panel(
                    look,
                    "progress",
                    "Tokens per target step",
                    "1 is plain decoding. Upright lines mark new versions.",
                    "No answer was finished in this time.",
                ),
                guesses=Panel(
                    look,
                    "progress",
                    "First guesses right",
                    "Of a few tokens of the answers, drafted or not.",
                    "No guess of this expert was looked at in this time.",
                ),
                positions=Panel(
                    look,
                    "by_position",
                    "By place in the draft",
                    "Accepted of the tokens that were drafted at this place.",
                    "Nothing was drafted in this time.",
                ),
                languages=Panel(
                    look,
                    "by_language",
                    "By writing of the prompt",
                    "How many first guesses are right, by script.",
                    "No request in this time.",
                ),
                versions=NumbersPanel(
                    look,
                    "versions",
                    "Versions",
                    "When made: first guesses right on held-out records. The rest: requests in this time.",
                    "No version yet: an untrained adapter changes nothing.",
                ),
            )

    def show(self, seen: ExpertView, paint: str) -> None:
        """Draw the expert's figures, in its colour `paint`."""
        progress = seen.progress
        written = numbers(progress)
        for panel, column, value in (
            (self.speed, PER_STEP, seen.expert.tokens_per_step),
            (self.guesses, FIRST_STEP, seen.expert.first_step_share),
        ):
            draw = partial(charts.over_time, progress, [column], {column.label: paint}, close=True)
            panel.show(progress, draw, some=value is not None, written=written)
        places = [str(place) for place in seen.by_position.column("position")]
        rates = {"accepted": seen.by_position.column("acceptance_rate")}
        self.positions.show(
            seen.by_position, lambda: charts.bars(places, rates, "share", [paint]), some=bool(places)
        )
        langs = [str(lang) for lang in seen.by_language.column("lang")]
        by_lang = {FIRST_STEP.label: seen.by_language.column(FIRST_STEP.key)}
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
        top.show(_strip(look, view.chosen))
        paint = charts.colours([expert.name for expert in view.experts])[view.chosen.expert.name]
        panels.show(view.chosen, paint)

    return update


def _choice(look: Look, view: ExpertsPageData) -> Markup:
    """A link for every expert, with its tokens per target step in its last requests."""
    paints = charts.colours([expert.name for expert in view.experts])
    chosen = view.chosen.expert.name if view.chosen else None
    links = [
        tag(
            "a",
            tag("i", style=f"background:{paints[expert.name]}"),
            tag("span", expert.name),
            tag("b", number(expert.recent_tokens_per_step)),
            href=look.url(expert=expert.name),
            aria_current="true" if expert.name == chosen else None,
        )
        for expert in view.experts
    ]
    return tag("nav", *links, class_="choice", aria_label="Experts")


def _strip(look: Look, view: ExpertView) -> Markup:
    expert = view.expert
    updates = f"{count(expert.updates)} updates so far."
    if expert.unadapted:
        why = "that does better, or nothing was learned yet"
        updates = f"The draft without any adapter serves it: {why}. {updates}"
    elif expert.updates and not expert.version and expert.name != SHARED:
        why = "no version of its own does better, or a person chose so"
        updates = f"The shared draft serves it at present: {why}. {updates}"
    elif expert.version and expert.name != SHARED and (expert.by_shared or 0) > MOSTLY:
        said = f"The shared draft stood for {share(expert.by_shared)} of the tokens looked at in this time"
        updates = f"{said}, since it guesses them better. {updates}"
    replay = f"Newest {ago(expert.replay_newest)}, oldest {ago(expert.replay_oldest)}."
    return figures(
        *_main(expert),
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
        figure("version", "Version", expert.version, expert.serving, updates),
        *_covered(expert.coverage),
    )


def _main(expert: Expert) -> list[Markup]:
    """The two main figures, and how they changed."""
    speed, accepted = expert.recent_tokens_per_step, expert.recent_first_step_share
    return [
        figure(
            "recent_tokens_per_step",
            "Tokens per target step",
            speed,
            number(speed),
            _since(expert.change_of_tokens_per_step, shares=False),
        ),
        figure(
            "recent_first_step_share",
            "First guesses right",
            accepted,
            share(accepted, 1),
            _since(expert.change_of_first_step_share, shares=True),
            FIRST_GUESS,
        ),
    ]


def _covered(found: Coverage | None) -> list[Markup]:
    """What share of its answers is on its list; nothing where every token is guessed."""
    if found is None:
        return []
    text = f"By {found.basis}."
    if found.shared is not None:
        text += f" By the shared draft's: {share(found.shared)}."
    return [figure("coverage", "On its list", found.share, share(found.share), text, COVERAGE)]


def _since(change: Change | None, *, shares: bool) -> Markup | str:
    """How the figure above changed since the first requests, with the 95 % interval."""
    if change is None:
        return "Of the last 50 requests."
    unit = " points" if shares else ""
    text = tag("b", f"{changed(change, shares=shares)}{unit}", class_=tone_of(change))
    return join([text, " since the first 20 requests."])
