"""What learning costs."""

from __future__ import annotations

from typing import Any

from evidence import served
from evidence.arrangements import ARRANGEMENTS, JOINT, LEAN, MAIN, SERVED, SERVED_EQUAL_COST, TABLED_FURTHER
from evidence.streams import ONLY, title_of
from evidence.words import DASH, short_sign, table

HEAD = (
    "arrangement",
    "gain in the end",
    "gain per update",
    "gain per minute of one core",
    "operations, of the target's",
)
GAINS = ("gain_per_update", "gain_per_minute")
Whole = dict[str, Any]


def prices(whole: Whole) -> str:
    """Gains by arrangement on one pattern, and operations on all that it was run with."""
    by_name = {
        name: of
        for name in (*MAIN, *TABLED_FURTHER, SERVED_EQUAL_COST, *LEAN)
        if (of := learned(whole, name))
    }
    if not by_name:
        return ""
    pattern = shared_pattern(by_name)
    rows = []
    for name, of in by_name.items():
        gains = [f"{of[pattern][key]:+.4f}" if pattern in of else DASH for key in GAINS]
        end = short_sign(of[pattern]["gain"]["value"]) if pattern in of else DASH
        rows.append([ARRANGEMENTS[name].title, end, *gains, operations(of)])
    return f"## What it costs\n\n{about(whole, title_of(pattern))}\n\n{table(HEAD, rows)}"


def shared_pattern(by_name: dict[str, dict[str, Whole]]) -> str:
    """The pattern that most arrangements were run with; of several such, the one with most seeds."""
    every = list(dict.fromkeys(pattern for of in by_name.values() for pattern in of))

    def runs(pattern: str) -> tuple[int, int]:
        seeds = [of[pattern]["seeds"] for of in by_name.values() if pattern in of]
        return len(seeds), sum(seeds)

    return max(every, key=runs)


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
    """How the table is to be read, and what the default costs with further updates."""
    reads = whole["settings"].get("target") != "mini"  # an independent draft model reads no states
    reading = (
        " The trainer also has its own copy of the target read each record once, which is another 100 % here "
        "and would be saved by keeping the states."
    )
    return (
        f"Gains are first guesses on all held-out prompts, with {gains_of} in every row. Operations are "
        "those of the updates, with measuring and judging, out of the target's for the requests that fed "
        "them, the least and the most of all patterns of traffic: two for each weight and token. (A target "
        "that decodes reads all its weights for each token, which these do not show.) They were counted for "
        "one update of a run, the second, and multiplied by the number of updates. The second has few "
        "held-out records for the gate to measure, and where further updates are made it is the first "
        "window's further one, which has the fewest. So with a gate the figures are lower bounds."
        f"{reading if reads else ''}{with_further(whole, reads)}"
        " Minutes are of a core that others used as well, without what the trainer measures for its log. The "
        "aim was 5 % of the target's operations: it is missed by far, since each request is learned from "
        f"many times and answers here are short.{one_pass(whole)} That work "
        "is done in time that the engine leaves idle, or within `train_cpu_share`. In a server, updates that "
        "do not save their own time over `train_horizon` requests become up to 32 times rarer; in these runs "
        "there is an update for every window."
    )


def one_pass(whole: Whole) -> str:
    """What it would take to learn from each request once; nothing where joint learning alone was not run."""
    of, settings = learned(whole, JOINT), whole["settings"]
    if not of:
        return ""
    passes = settings["steps"] * settings["rows"] / settings["every"]
    each = sum(one["cost"] for one in of.values()) / len(of) / passes
    return (
        f" An update reads {settings['steps'] * settings['rows']} records, forward and backward, for "
        f"{settings['every']} requests; one such pass for each request would take about {each:.0%}."
    )


def with_further(whole: Whole, reads: bool) -> str:
    """What the default costs with further updates, as a server makes them, but fewer."""
    of = learned(whole, SERVED)
    if not of:
        return ""
    price = f", {operations(of, 1.0)} with that reading" if reads else ""
    return (
        f" **With further updates the default takes at least {operations(of)} of them**{price}. These are "
        f"further updates as a server makes them, but fewer: {served.fewer(whole)}. So a server with time to "
        "spare can take several times as much."
    )
