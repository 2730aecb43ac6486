"""How low a domain stood against static on the way, while others learned."""

from __future__ import annotations

from typing import Any

from evidence.words import DASH, difference, how_many, interval, listed, short_sign

WORST = 0.01  # of first guesses, that no domain is to lose
HEAD = "lowest point of a domain against static"
Whole = dict[str, Any]


def cell(one: Whole) -> str:
    """The domain that stood lowest of all, and when."""
    found = points(one)
    if not found:
        return DASH
    domain, low = min(found.items(), key=lambda pair: pair[1]["value"])
    return f"{domain}, after {low['requests']}: {difference(low)}"


def points(one: Whole) -> dict[str, Whole]:
    """By domain, its lowest point."""
    return {domain: low for domain, low in one["lowest"].items() if low is not None}


def lost(one: Whole) -> dict[str, Whole]:
    """The domains that were surely below static at some point, or by more than `WORST` at all."""
    return {
        domain: low
        for domain, low in points(one).items()
        if low["verdict"] == "worse" or low["value"] < -WORST
    }


def sentence(one: Whole) -> str:
    """What domains lost on the way."""
    if not points(one):
        return ""
    if not lost(one):
        return f"On the way no domain stood more than .01 below static at any of {measurements(one)}."
    return f"On the way, below static: {shown(one)}."


def measurements(one: Whole) -> str:
    """`2 measurements (after 80 and 160 requests)`"""
    at = each_at(one)
    return f"{how_many(len(at), 'measurement')} (after {listed(map(str, at))} requests)"


def each_at(one: Whole) -> list[int]:
    """Numbers of requests after which there was a measurement."""
    return sorted({requests for low in points(one).values() for requests in low["measured"]})


def shown(one: Whole) -> str:
    return "; ".join(each(domain, low) for domain, low in lost(one).items())


def each(domain: str, low: Whole) -> str:
    """`docs_fr −.055 [−.101, −.012] (2 seeds: −.071, −.040) after 80 requests, 1 to 14 of them its own`"""
    seeds = f"{how_many(len(low['seeds']), 'seed')}: {', '.join(map(short_sign, low['seeds']))}"
    doubt = "" if low["verdict"] == "worse" else "not sure; "
    least, most = min(low["served"]), max(low["served"])
    own = f"{least} to {most}" if most > least else str(most)
    missed = (
        ", a miss of the aim that none loses more than .01"
        if low["verdict"] == "worse" and low["value"] < -WORST
        else ""
    )
    after = f"after {low['requests']} requests, {own} of them its own"
    return f"{domain} {interval(low)} ({doubt}{seeds}) {after}{missed}"
