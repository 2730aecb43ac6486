"""The page about the router: requests by domain, confidence, unknown traffic, and a box to try a prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from nicegui import events, ui

from moedraft.core import SHARED
from moedraft.insight.views import RouterView, gained
from moedraft.routing.router import Route
from moedraft.selecting.prior.confusion import Mistake
from moedraft.serve.dashboard import charts
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, figure, figures, join, notice, share, short, tag
from moedraft.serve.dashboard.panels import Live, Panel, Text, join_title, last_figures, show_out
from moedraft.serve.dashboard.standings import answered
from moedraft.serve.dashboard.suggestions import SuggestBox

MUCH = 0.25  # the share of unknown requests from which the page advises to register a domain
LEAST = 20  # no advice is given before that many requests
LONGEST = 8000  # characters of a prompt to try
PATIENCE = 10.0  # seconds for the router to answer

log = logging.getLogger(__name__)


def router_page(look: Look) -> None:
    Live(look, lambda: look.at.observer.router(look.span), lambda view: _build(look))


@dataclass(frozen=True)
class RouterPanels:
    """The charts about routed requests."""

    confidence: Panel
    shares: Panel
    unknown: Panel

    @classmethod
    def lay_out(cls, look: Look) -> RouterPanels:
        """Add the panels to the page, still empty."""
        empty = "Nothing was routed in this time."
        confidence = Panel(
            look,
            "confidences",
            "How sure the router is",
            "Requests by the probability of their best domain.",
            empty,
        )
        shares = Panel(
            look,
            "shares",
            "Traffic by domain",
            "Share of the routed requests; “shared” takes what fits no domain.",
            empty,
            wide=True,
            height=280,
        )
        unknown = Panel(
            look,
            "unknown",
            "Traffic that fits no domain",
            "It is drafted by the shared draft; much of it is a domain to be registered.",
            empty,
            wide=True,
        )
        return cls(confidence, shares, unknown)

    def show(self, view: RouterView) -> None:
        """Draw the figures of `view`."""
        paints, some = charts.colours(view.names), view.routed > 0
        columns = view.shares.columns[2:]
        latest = _mean_shares(view)
        entries = [(c.label, paints[c.label], text) for c, text in zip(columns, latest, strict=True)]
        draw_shares = partial(charts.stacked, view.shares, columns, paints)
        self.shares.show(view.shares, draw_shares, entries, some=some)
        self.confidence.show(
            view.histogram,
            lambda: _histogram(view),
            [("to an expert", "var(--accent)", ""), ("fits none", "var(--hue-shared)", "")],
            some=some,
        )
        lines = view.unknown_share.columns[3:]
        hues = {"share that fits none": "var(--hue-1)", "mean confidence": "var(--accent)"}
        texts = last_figures(view.unknown_share, [line.key for line in lines], share)
        self.unknown.show(
            view.unknown_share,
            lambda: charts.over_time(view.unknown_share, lines, hues),
            [(line.label, hues[line.label], text) for line, text in zip(lines, texts, strict=True)],
            some=some,
        )


def _build(look: Look) -> Callable[[RouterView], None]:
    top, advice = Text("strip"), Text()
    with ui.element("div").classes("grid"):
        with ui.element("section").classes("card").props("data-panel=try"):
            ui.html(
                join_title(
                    "Try a prompt",
                    "Which expert would draft for it, and what does an answer say to that?",
                )
            )
            TryBox(look)
        with ui.element("section").classes("card").props("data-panel=suggestions"):
            ui.html(join_title("What could be a domain", "Groups of prompts that no expert serves."))
            SuggestBox(look)
        panels = RouterPanels.lay_out(look)

    def update(view: RouterView) -> None:
        top.show(_strip(view, look.at.worker.compares))
        advice.show(join([_advice(view), *map(_mistake, look.at.worker.mistakes)]))
        panels.show(view)

    return update


def _strip(view: RouterView, compares: bool) -> Markup:
    """compares: whether drafts are compared now; a share of nought says nothing where they are not."""
    strange = view.unknown / view.routed if view.routed else None
    told = view.routed and (view.overruled or compares)
    overruled = view.overruled / view.routed if told else None
    domains = len(view.domains)
    return figures(
        figure("routed", "Routed requests", view.routed, short(view.routed), "Those that named no expert."),
        figure("unknown", "Fit no domain", strange, share(strange), f"{short(view.unknown)} requests."),
        figure(
            "confidence", "Mean confidence", view.confidence, share(view.confidence), "Of the best domain."
        ),
        figure(
            "overruled",
            "Overruled",
            overruled,
            share(overruled),
            f"{short(view.overruled)} requests that evidence gave to another draft"
            f"{gained(view.overruled_gain, view.overruled_tokens)}.",
        ),
        figure("domains", "Domains", domains, str(domains), "Registered now."),
    )


def _advice(view: RouterView) -> Markup:
    command = tag("code", "moedraft domain register NAME --examples FILE")
    if not view.domains:
        text = "Every prompt goes to the shared draft until a domain is registered."
        return notice("No domain yet", text, "quiet", command)
    if view.routed >= LEAST and view.unknown >= MUCH * view.routed:
        text = (
            f"{share(view.unknown / view.routed)} of the requests fit no domain. “Look for domains” below "
            "groups them and names the command that registers a group; or with examples of your own:"
        )
        return notice("Unknown traffic", text, "busy", command)
    return Markup()


def _mistake(one: Mistake) -> Markup:
    """What answers begin with instead of what the router says, and what could be done about it."""
    said = "prompts that fit no domain" if one.said == SHARED else f"prompts for {one.said}"
    best = "the shared draft" if one.best == SHARED else one.best
    if one.best == SHARED:
        advice = f"The expert {one.said} may need more records."
    else:
        advice = f"If such prompts belong to {best}, examples in their wording would teach the router."
    text = (
        f"Of the last answers that were compared, to what the router takes for {said}, {best} guessed best "
        f"in probably {share(one.share)}, so {best} drafts for new ones from the start. {advice}"
    )
    return notice(f"For many {said}, {best} guesses best", text, "busy")


def _mean_shares(view: RouterView) -> list[str]:
    """Each column's mean over all requests of the table."""
    weights = [int(n or 0) for n in view.shares.column("requests")]
    found = []
    for column in view.shares.columns[2:]:
        parts = [float(v or 0) * w for v, w in zip(view.shares.column(column.key), weights, strict=True)]
        found.append(share(sum(parts) / sum(weights) if sum(weights) else None))
    return found


def _histogram(view: RouterView) -> charts.Options:
    table = view.histogram
    labels = [share(float(low or 0)) for low in table.column("from")]
    columns = {"to an expert": table.column("to_an_expert"), "fits none": table.column("fits_none")}
    return charts.bars(labels, columns, "count", ["var(--accent)", "var(--hue-shared)"], gap="8%")


class TryBox:
    """Routes a prompt that the reader writes, beside the engine, or has it answered as well.

    It handles one prompt at a time. Nobody else sees the prompt, and it is not stored.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self._busy = False
        area = (
            ui.element("textarea").classes("try").props(f'rows="5" maxlength="{LONGEST}" spellcheck="false"')
        )
        area.props["placeholder"] = "SELECT name, count(*) FROM orders GROUP BY …"
        area.props["aria-label"] = "Prompt to try"
        # The browser sends the prompt only when the button is pressed, not while it is typed.
        read = f"emit(document.getElementById('c{area.id}').value)"
        area.on(
            "keydown",
            self._ask,
            js_handler=f"e => {{ if (e.key === 'Enter' && (e.ctrlKey || e.metaKey)) {read} }}",
        )
        with ui.element("div").classes("try-row"):
            with ui.element("button").classes("primary").props('type="button"').mark("ask") as button:
                ui.html("Ask the router", tag="span")
            button.on("click", self._ask, js_handler=f"() => {read}")
            with ui.element("button").classes("second").props('type="button"').mark("answer") as second:
                ui.html("Answer and compare", tag="span")
            second.on("click", self._answer_it, js_handler=f"() => {read}")
            ui.html(tag("span", "Nothing is kept or counted.", class_="hint"))
        self._answer = Text("answer")

    async def _ask(self, event: events.GenericEventArguments) -> None:
        await self._try(event, self._routed)

    async def _answer_it(self, event: events.GenericEventArguments) -> None:
        await self._try(event, self._compared)

    async def _try(
        self, event: events.GenericEventArguments, find: Callable[[str], Awaitable[Markup]]
    ) -> None:
        """Show what `find`, which never raises, says of the prompt."""
        if not self._look.allowed:
            show_out()
            return
        prompt = event.args if isinstance(event.args, str) else ""
        if self._busy:
            return
        if not prompt.strip():
            self._answer.show(notice("Write a prompt first", "Any text will do."))
            return
        self._busy = True
        self._answer.show(tag("p", "Asking …", class_="hint"))
        try:
            self._answer.show(await find(prompt[:LONGEST]))
        finally:
            self._busy = False

    async def _routed(self, prompt: str) -> Markup:
        try:
            routes = await asyncio.wait_for(self._look.at.worker.routes([prompt]), PATIENCE)
            return _answer(routes[0])
        except Exception as error:  # whatever went wrong, show that the attempt is over
            log.warning("The router did not answer: %s", type(error).__name__)
            text = "The engine is busy, shutting down or failed. Try again in a moment."
            return notice("The router did not answer", text, "bad")

    async def _compared(self, prompt: str) -> Markup:
        return join([await self._routed(prompt), await answered(self._look, prompt)])


def _answer(route: Route) -> Markup:
    chosen, sure = route.domain, share(route.confidence, 1)
    why = f" {sure} sure"
    if route.domain == SHARED:
        chosen = "Fits no domain"
        why = f" the best is {sure} sure" if len(route.probabilities) > 1 else " none is registered"
    ranked = sorted(route.probabilities.items(), key=lambda item: -item[1])[:6]
    bars = [
        tag(
            "li",
            tag("span", "fits none" if name == SHARED else name),
            tag("span", tag("i", style=f"width:{100 * probability:.1f}%"), class_="meter"),
            tag("b", share(probability, 1), data_probability=name, data_value=repr(probability)),
            class_="chosen" if name == route.domain else "",
        )
        for name, probability in ranked
    ]
    head = tag(
        "p",
        tag("strong", chosen, data_figure="route", data_value=route.domain),
        tag("span", why, class_="hint"),
    )
    return join([head, tag("ul", *bars, class_="ranked")])
