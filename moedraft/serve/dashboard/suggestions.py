"""On the router's page, when asked for: groups of prompts that no expert serves, and domains to merge."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from nicegui import ui

from moedraft.config import NO_TEXT
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, join, notice, share, tag
from moedraft.serve.dashboard.panels import Text, show_out
from moedraft.system.domains.suggest import Suggestion, Suggestions

PATIENCE = 60.0  # seconds for the search
MOST = 8  # groups that are shown

log = logging.getLogger(__name__)


class SuggestBox:
    """A button that has the newest prompts without an expert compared. Nothing is registered by it."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._busy = False
        with ui.element("div").classes("try-row"):
            with ui.element("button").classes("primary").props('type="button"').mark("suggest") as button:
                ui.html("Look for domains", tag="span")
            button.on("click", self._search)
            ui.html(tag("span", "Takes some seconds beside the traffic.", class_="hint"))
        self._answer = Text("answer")

    async def _search(self) -> None:
        if not self._look.allowed:
            show_out()
            return
        if self._busy:
            return
        self._busy = True
        self._answer.show(tag("p", "Comparing prompts …", class_="hint"))
        try:
            search = self._look.at.worker.search
            found = await asyncio.wait_for(search.suggestions(), PATIENCE)
            pairs = await asyncio.wait_for(search.overlaps(), PATIENCE)
            groups = groups_of(found, texts=self._look.may("admin"))  # prompts of others, as an operator
            self._answer.show(join([groups, merges_of(pairs)]))
        except Exception as error:  # whatever went wrong, show that the attempt is over
            log.warning("No suggestions: %s", type(error).__name__)
            self._answer.show(notice("Nothing was found out", "Try again in a moment.", "bad"))
        finally:
            self._busy = False


def groups_of(found: Suggestions, *, texts: bool) -> Markup:
    """The largest groups, each with the command that makes it a domain. texts: show example prompts."""
    if not found.groups:
        return notice("No group is large enough", f"{found.looked_at} prompts without an expert were read.")
    return join([*(_group(one, texts) for one in found.groups[:MOST]), _advice(found, texts)])


def _advice(found: Suggestions, texts: bool) -> Markup:
    if not found.capture:
        return tag("p", NO_TEXT)
    if not texts:
        return tag("p", "Names, prompts and commands are shown to a key that has the scope admin as well.")
    return tag("p", "Their prompts are written by ", tag("code", "moedraft domain suggest --out FOLDER"), ".")


def merges_of(pairs: list[dict[str, Any]]) -> Markup:
    """The registered domains that the router can hardly tell apart; nothing where there are none."""
    near = [f"{one['first']} and {one['second']}" for one in pairs if one["should_merge"]]
    advice = "Register one with the examples of both; then remove both and what they learned."
    return notice("Hold nearly the same", f"{'; '.join(near[:MOST])}. {advice}") if near else Markup()


def _group(one: Suggestion, texts: bool) -> Markup:
    now = "" if one.acceptance is None else f", {share(one.acceptance)} of the guesses accepted now"
    facts = f" {one.size} prompts, {share(one.share)} of the traffic{now}"
    name = one.name if texts else "A group"
    examples = [tag("li", text[:160]) for text in one.prompts[:2]] if texts else []
    return tag(
        "div",
        tag(
            "p",
            tag("strong", name, data_figure="suggestion", data_value=name),
            tag("span", facts, class_="hint"),
        ),
        tag("ul", *examples) if examples else Markup(),
        tag("code", one.command) if texts and one.command else Markup(),
    )
