"""On the router's page: an answer to a prompt that the reader tries, and how its drafts stood meanwhile."""

from __future__ import annotations

import asyncio
import logging

from moedraft.core import SHARED, RequestOutput
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, join, notice, number, share, tag
from moedraft.speculation import Standing

TOKENS = 64  # of the answer
PATIENCE = 60.0  # seconds for it
MOST_ARMS = 6  # that are shown
MOST_SHOWN = 600  # characters of the answer

log = logging.getLogger(__name__)


async def answered(look: Look, prompt: str) -> Markup:
    """Have the engine answer the prompt, and show how the drafts stood. Never raises."""
    if not look.may("infer"):
        why = "On a server with keys only a key that has the scope infer as well has prompts answered."
        return notice("No answer from here", why)
    try:
        found = await asyncio.wait_for(look.at.worker.trial(prompt, TOKENS), PATIENCE)
    except Exception as error:  # whatever went wrong, show that the attempt is over
        log.warning("A tried prompt was not answered: %s", type(error).__name__)
        return notice("No answer", "The engine is busy, shutting down or failed; or it is too long.", "bad")
    return shown(found)


def shown(found: RequestOutput) -> Markup:
    """The answer, and a table of the standings: one row for each time that the drafts were compared."""
    length = number(found.tokens_per_step)
    facts = f" drafted at the end; {len(found.token_ids)} tokens, {length} per target step"
    head = tag(
        "p",
        tag("strong", _name(found.expert), data_figure="drafted", data_value=found.expert),
        tag("span", facts, class_="hint"),
    )
    text = tag("p", found.text[:MOST_SHOWN], class_="hint")
    if not found.standings:
        never = (
            "They are where there are trained experts and the setting selector is evidence; those of an "
            "independent draft model must be of the scope tail."
        )
        return join([head, text, notice("The drafts were not compared", found.uncompared or never)])
    return join([head, text, _table(found.standings)])


def _table(standings: tuple[Standing, ...]) -> Markup:
    most: dict[str, float] = {}
    for one in standings:
        for arm, weight in one.weights.items():
            most[arm] = max(weight, most.get(arm, 0.0))
    arms = sorted(most, key=lambda arm: -most[arm])[:MOST_ARMS]
    head = tag(
        "tr",
        tag("th", "after", scope="col"),
        *(tag("th", _name(arm), scope="col", class_="num") for arm in arms),
    )
    whole = tag(
        "table",
        tag("thead", head),
        tag("tbody", *(_row(one, arms) for one in standings)),
        data_table="standings",
    )
    return tag("div", whole, class_="scroll")


def _row(one: Standing, arms: list[str]) -> Markup:
    when = f"{one.tokens} tokens" if one.tokens else "the prompt"
    found = [(arm, one.weights.get(arm, 0.0)) for arm in arms]
    cells = [tag("td", share(weight), class_="num", data_arm=arm, data_value=weight) for arm, weight in found]
    return tag("tr", tag("th", when, scope="row"), *cells)


def _name(arm: str) -> str:
    return "shared draft" if arm == SHARED else arm
