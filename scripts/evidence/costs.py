"""What learning costs."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS, FURTHER, MAIN, SERVED
from evidence.streams import ONLY, title_of
from evidence.words import listed, table

HEAD = ("arrangement", "gain per update", "gain per minute of one core", "operations, of the target's")
Whole = dict[str, Any]


def prices(whole: Whole) -> str:
    """Gains by arrangement on the first pattern that has it, and operations on all of them."""
    rows, first = [], []
    for name in (*MAIN, *FURTHER):
        of = learned(whole, name)
        if of:
            pattern, one = next(iter(of.items()))
            first.append(pattern)
            gains = (f"{one[key]:+.4f}" for key in ("gain_per_update", "gain_per_minute"))
            rows.append([ARRANGEMENTS[name].title, *gains, operations(of)])
    if not rows:
        return ""
    gains_of = listed(title_of(pattern) for pattern in dict.fromkeys(first))
    return f"## What it costs\n\n{about(whole, gains_of)}\n\n{table(HEAD, rows)}"


def learned(whole: Whole, name: str) -> dict[str, Whole]:
    """By pattern, this arrangement, where it learned."""
    return {
        pattern: of[name]
        for pattern, of in whole["patterns"].items()
        if not pattern.startswith(ONLY) and "gain_per_update" in of.get(name, {})
    }


def operations(of: dict[str, Whole], more: float = 0.0) -> str:
    """The least and the most of all patterns, in per cent of the target's."""
    least, most = (f"{pick(one['cost'] for one in of.values()) + more:.0%}" for pick in (min, max))
    return most if least == most else f"{least.removesuffix('%')} to {most}"


def about(whole: Whole, gains_of: str) -> str:
    """How the table is to be read, and what the default costs as a server has it."""
    reads = whole["settings"].get("target") != "mini"  # an independent draft model reads no states
    reading = (
        " The trainer also has its own copy of the target read each record once, which is another 100 % here "
        "and would be saved by keeping the states."
    )
    of = learned(whole, SERVED)
    whole_price = f", {operations(of, 1.0)} with that reading" if of and reads else ""
    served = f" **The default as a server has it takes {operations(of)} of them**{whole_price}." if of else ""
    return (
        f"Gains are first guesses on all held-out prompts, here with {gains_of}. Operations are those of all "
        "updates, with measuring and judging, out of the target's for the requests that fed them, the least "
        "and the most of all patterns of traffic: two for each weight and token. (A target that decodes "
        "reads all its weights for each token, which these do not show.)"
        + (reading if reads else "")
        + served
        + " Minutes are of a core that others used as well, without what the trainer measures for its log. "
        "The aim was 5 % of the target's operations: it is missed by far, since each request is learned from "
        "many times and answers here are short. That work is done in time that the engine leaves idle, or "
        "within `train_cpu_share`."
    )
