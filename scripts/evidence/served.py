"""The default as a server has it: with further updates from the same requests, in time nobody else wants."""

from __future__ import annotations

from typing import Any

from evidence import lows
from evidence.arrangements import ARRANGEMENTS, FURTHER, GATED, SERVED, STATIC
from evidence.streams import ONLY, title_of
from evidence.words import DASH, cells, difference, how_many, listed, short_sign, table, waits

Whole = dict[str, Any]
REASONS = (
    "Most of that is the gate, which publishes late for safety's sake: without it both are level with five "
    "domains, and with twelve, where an expert learns from few rows of each step and drafts from a shorter "
    "list of its own, one adapter stays ahead "
    "([why](experiments.md#the-rank-of-the-shared-adapter-and-of-an-expert)). Experts stay the default since "
    "each domain can be pinned, taken back, exported or kept from harm by itself."
)
ONE_WIDE, NARROW = "mixed-replay:wide", "joint+gate:further"


def patterns(whole: Whole) -> list[str]:
    return [name for name, of in whole["patterns"].items() if SERVED in of and not name.startswith(ONLY)]


def finding(whole: Whole) -> str:
    """One sentence for each thing that is claimed of the default as a server has it."""
    names = patterns(whole)
    gains = {p: of for p in names if (of := whole["patterns"][p][SERVED]["gain"]) is not None}
    if not gains:
        return ""
    least, most = (pick(one["value"] for one in gains.values()) for pick in (min, max))
    seeds = min(len(one["seeds"]) for one in gains.values())
    where = f"on {how_many(len(gains), 'pattern')} of traffic with {how_many(seeds, 'seed')} or more"
    doubts = [
        f"; {word} with {listed(found)}"
        for verdict, word in (("open", "not sure"), ("worse", "**worse**"))
        if (found := [title_of(p) for p, one in gains.items() if one["verdict"] == verdict])
    ]
    said = [
        "**As a server learns**, with further updates from the same requests while the gate sees a use in "
        f"them, joint learning with the gate gains {short_sign(least)} to {short_sign(most)} first guesses "
        f"on the static draft, {where}{''.join(doubts) or ', each of them sure'}."
    ]
    one_wide = beside(whole, ONE_WIDE)
    said += [one_wide, REASONS if one_wide else "", beside(whole, NARROW), below(whole)]
    return "- " + " ".join(one for one in said if one)


def beside(whole: Whole, other: str) -> str:
    """Where it is above and below another arrangement that learns as much."""
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "open": []}
    for pattern in patterns(whole):
        one = whole["patterns"][pattern].get(other, {}).get("default_more", {}).get(SERVED)
        if one is not None:
            seeds = how_many(len(one["seeds"]), "seed")
            by_verdict[one["verdict"]].append(f"{title_of(pattern)} ({short_sign(one['value'])}, {seeds})")
    if not any(by_verdict.values()):
        return ""
    words = (
        ("better", "better with"),
        ("worse", "**worse** with"),
        ("open", "level, as far as can be told, with"),
    )
    found = [f"{word} {listed(by_verdict[key])}" for key, word in words if by_verdict[key]]
    return f"Against {ARRANGEMENTS[other].title}: {'; '.join(found)}."


def below(whole: Whole) -> str:
    """The domains that ended below static."""
    found = [
        f"{domain} with {title_of(pattern)} ({short_sign(one['value'])})"
        for pattern in patterns(whole)
        for domain, one in whole["patterns"][pattern][SERVED]["domains"].items()
        if one is not None and one["verdict"] == "worse"
    ]
    if found:
        return f"Below static by its interval: {listed(found)}."
    return "No domain ends below static by its interval."


def on_the_way(whole: Whole) -> str:
    """What domains lost while others learned, pattern by pattern; the same with a narrow shared adapter."""
    said = [text for name in (SERVED, NARROW) for text in _lows(whole, name)]
    if not said:
        return ""
    about = (
        "The gate judges by held-out records of the requests that came: of a domain of which hardly any "
        "came it has too few to see a loss."
    )
    return f"- **While others learn.** {' '.join(said)} {about}"


def _lows(whole: Whole, name: str) -> list[str]:
    of = {p: one[name] for p, one in whole["patterns"].items() if name in one and not p.startswith(ONLY)}
    of = {title_of(p): one for p, one in of.items() if lows.points(one)}
    said = [f"with {traffic}, {lows.shown(one)}" for traffic, one in of.items() if lows.lost(one)]
    if kept := [traffic for traffic, one in of.items() if not lows.lost(one)]:
        said.append(f"with {listed(kept)}, no domain by more than .01")
    title = ARRANGEMENTS[name].title
    return [f"{title[0].upper()}{title[1:]}, on the way below static: {'; '.join(said)}."] if said else []


def part(whole: Whole) -> str:
    """The table."""
    rows = []
    for pattern in patterns(whole):
        of = whole["patterns"][pattern]
        for name in (STATIC, GATED, *FURTHER, "offline"):
            if name in of:
                rows.append([title_of(pattern), *_row(of, name)])
    if not rows:
        return ""
    about = (
        "## With further updates\n\nA server does not stop at one update for its new requests: while it has "
        "time to spare, it makes further ones from the records that are there, until the gate throws one "
        "away. Here up to two follow each update, so that there are at most as many as the offline bound "
        "has; those without a gate make all of them. *Wide*: the shared adapter has four times an expert's "
        "rank, as a server's has by default, and one adapter that stands alone as much as both. The experts "
        "of wide runs are cut to the directions that matter, as a server's are since 2026-11-26. That the "
        "base drafts for a domain [of which nothing was learned yet]"
        "(experiments.md#before-anything-was-learned-of-a-domain) is in the wide runs of the slow drift and "
        "of the new domain alone; all others were made before. *Until at "
        "home*: requests after a new domain came until it had 80 % of what it gains offline, by seed.\n\n"
    )
    head = (
        "traffic",
        "arrangement",
        "seeds",
        "first guesses",
        "tokens per step",
        "more than static",
        "as a server, it has more",
        lows.HEAD,
        "until at home",
    )
    return about + table(head, rows)


def _row(of: Whole, name: str) -> list[str]:
    one, is_static = of[name], name == STATIC
    more = difference(None if is_static else one["default_more"].get(SERVED))
    wait = waits(None if is_static else one.get("arrival"))
    return [
        *cells(ARRANGEMENTS[name].title, one, is_static=is_static),
        more,
        DASH if is_static else lows.cell(one),
        wait,
    ]
