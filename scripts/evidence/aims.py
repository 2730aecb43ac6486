"""The aims that were set for learning, and how much of each the runs of a page show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from evidence import came, lows
from evidence.arrangements import (
    ARRANGEMENTS,
    GATED,
    LEAN,
    ONE_WIDE,
    ONE_WIDE_GATED,
    ONLINE,
    ONLINE_GATED,
    OTHER_WIDE,
    SERVED,
    WITHHELD_GATED,
)
from evidence.costs import learned, operations
from evidence.streams import ONLY, POISONED, heading_of, title_of
from evidence.words import NOT_MEASURED, how_many, interval, listed, short_sign, table

ABOUT = (
    "## The aims, and what was reached\n\n"
    "The aims were set before these runs, the words for what was reached afterwards, and so was the row on a "
    "client that sends rubbish, which compares with static only. *Held*: everything that "
    "this page measured of it bears it out; *partly*: some does; *open*: nothing speaks against it by its "
    "interval, and not everything for it. An interval that includes zero counts as level, and one that does "
    "not decides here even where seeds disagree. How many seeds there are, and whether they agree, is told "
    "below."
)
SOON = 100  # requests within which a domain is to be back, or at home
FORGOTTEN = 0.01  # first guesses that a silent domain may lose
CHEAP = 0.05  # of the target's operations, that learning may take
MOVING = ("shift", "one-by-one", "drift", "new-domain")
# What the default is compared with, with one update for each window and with further ones.
RIVALS = {GATED: ONLINE, SERVED: (ONE_WIDE, "mixed-replay:further", WITHHELD_GATED, *OTHER_WIDE)}
AS_SAFE = {  # of these, with the gate as well
    GATED: ONLINE_GATED,
    SERVED: (ONE_WIDE_GATED, WITHHELD_GATED, *OTHER_WIDE),
}
HELD, PARTLY, OPEN, MISSED = "held", "partly", "open", "**missed**"
SOME = " beside those that were run"
UPDATES = {GATED: "with one update for each window", SERVED: "with further updates"}
# The aims by whether the others have the gate, and whether it is about the requests as they came.
BEST = {
    (False, False): "on every traffic at least the best other online arrangement",
    (False, True): "the same on the requests as they came, beside one adapter on all traffic",
    (True, False): "on every traffic at least the best other online arrangement with the same gate",
    (True, True): "the same on the requests as they came, beside one adapter with the gate",
}
Whole = dict[str, Any]
Rivals = Mapping[str, Sequence[str]]


class Reached(NamedTuple):
    """One row of the table."""

    aim: str
    verdict: str
    figures: str


def part(whole: Whole) -> str:
    """The table; nothing where the default was not run."""
    default = {name: of for name in (GATED, SERVED) if (of := _runs_of(whole, name))}
    if not default:
        return ""
    rows = [
        at_least_the_best(whole, default),
        at_least_the_best(whole, default, as_they_came=True),
        above_where_it_moves(whole, default),
        above_where_it_moves(whole, default, as_they_came=True),
        at_least_the_best(whole, default, AS_SAFE),
        at_least_the_best(whole, default, AS_SAFE, as_they_came=True),
        never_below(default),
        nothing_lost(default),
        withstands(default),
        soon(default, "shift", "recovery", "after a sharp shift and return, back within .02 of before"),
        soon(default, "new-domain", "arrival", "a new domain at 80 % of what it gains offline"),
        not_forgotten(default),
        cheap(whole),
    ]
    return f"{ABOUT}\n\n{table(('aim', 'reached', 'figures'), rows)}"


def _runs_of(whole: Whole, name: str) -> dict[str, Whole]:
    """By pattern of traffic, the figures of an arrangement."""
    return {
        pattern: of[name]
        for pattern, of in whole["patterns"].items()
        if name in of and not pattern.startswith(ONLY) and of[name]["gain"] is not None
    }


def _compared(
    whole: Whole,
    name: str,
    patterns: Iterable[str],
    rivals: Rivals = RIVALS,
    as_they_came: bool = False,
) -> Iterator[tuple[str, str, Whole]]:
    """Pattern, rival, and what the default has more than it, on held-out prompts in the end.

    as_they_came: on the requests themselves, see `came`.
    """
    for pattern in patterns:
        for rival in rivals[name]:
            of = whole["patterns"][pattern].get(rival, {})
            one = (of.get("came", {}) if as_they_came else of).get("default_more", {}).get(name)
            if one is not None:
                yield pattern, rival, one


def _named(found: Iterable[tuple[str, str, Whole]]) -> str:
    """`one adapter, mixed replay: steady mix (−.004), slow drift (−.010)`"""
    by_rival: dict[str, list[str]] = {}
    for pattern, rival, one in found:
        by_rival.setdefault(ARRANGEMENTS[rival].title, []).append(
            f"{title_of(pattern)} {short_sign(one['value'])}"
        )
    return "; ".join(f"{title} with {listed(where)}" for title, where in by_rival.items())


def at_least_the_best(
    whole: Whole,
    default: Mapping[str, Mapping[str, Whole]],
    rivals: Rivals = RIVALS,
    as_they_came: bool = False,
) -> Reached:
    """Whether some other online arrangement is above the default by its interval."""
    said, verdicts, whole_field = list[str](), list[bool](), True
    for name, of in default.items():
        found = [*_compared(whole, name, of, rivals, as_they_came)]
        if not found:
            if rivals[name] and not as_they_came:  # nothing can be said of this default then
                whole_field, said = False, said + _not_run(name, rivals, found)
            continue
        below = [one for one in found if one[2]["high"] < 0]
        patterns = {pattern for pattern, _, _ in found}
        lost = {pattern for pattern, _, _ in below}
        where = f"on {len(patterns - lost)} of {how_many(len(patterns), 'pattern')}"
        said.append(f"{UPDATES[name].capitalize()}: {where}, beside {_beside(found, len(patterns))}.")
        if below:
            said.append(f"Below {_named(below)}.")
        if not as_they_came:  # what the aim of these is about is one adapter
            whole_field &= _everywhere(name, rivals, found)
            said += _not_run(name, rivals, found)
        verdicts += [pattern not in lost for pattern in patterns]
    return Reached(BEST[rivals is AS_SAFE, as_they_came], *_told(verdicts, said, whole_field))


def _beside(found: Sequence[tuple[str, str, Whole]], patterns: int) -> str:
    """`one adapter, mixed replay; one adapter, latest window (1 pattern)`: with how many, if not with all."""
    counts = Counter(rival for _, rival, _ in found)
    return "; ".join(
        _kind(rival) + ("" if count == patterns else f" ({how_many(count, 'pattern')})")
        for rival, count in counts.items()
    )


def _not_run(name: str, rivals: Rivals, found: Iterable[tuple[str, str, Whole]]) -> list[str]:
    """A sentence on those that the default stands beside on no pattern; none where there is no such one."""
    there = {rival for _, rival, _ in found}
    lacking = [_kind(rival) for rival in rivals[name] if rival not in there]
    return [f"Not run {UPDATES[name]} beside it: {'; '.join(lacking)}."] if lacking else []


def _everywhere(name: str, rivals: Rivals, found: Iterable[tuple[str, str, Whole]]) -> bool:
    """Whether the default stands beside all others on each pattern on which it does so beside one."""
    pairs = {(pattern, rival) for pattern, rival, _ in found}
    return bool(pairs) and all((p, rival) in pairs for p, _ in pairs for rival in rivals[name])


def _kind(name: str) -> str:
    """The title of an arrangement where it is said already that there are further updates."""
    return ARRANGEMENTS[name].title.removesuffix(", further updates")


def above_where_it_moves(
    whole: Whole, default: Mapping[str, Mapping[str, Whole]], as_they_came: bool = False
) -> Reached:
    """Whether the default is above every other online arrangement where traffic moves."""
    found = [
        one
        for name, of in default.items()
        for one in _compared(whole, name, [p for p in MOVING if p in of], as_they_came=as_they_came)
    ]
    above = [one for one in found if one[2]["low"] > 0]
    said = [f"Above {_named(above)}."] if above else ["Above none by its interval."]
    if rest := [one for one in found if one[2]["low"] <= 0]:
        said.append(f"Not above {_named(rest)}.")
    aim = "above every other online arrangement where traffic moves"
    if as_they_came:
        aim = "the same on the requests as they came, beside one adapter where traffic moves"
        return Reached(aim, *_told([one[2]["low"] > 0 for one in found], said))
    by_default = {name: [one for one in found if one[1] in RIVALS[name]] for name in default}
    whole_field = all(_everywhere(name, RIVALS, of) for name, of in by_default.items())
    return Reached(aim, *_told([one[2]["low"] > 0 for one in found], said, whole_field))


def never_below(default: Mapping[str, Mapping[str, Whole]]) -> Reached:
    """Whether a domain ended below static by its interval."""
    domains = [
        (f"{domain} with {title_of(pattern)} {interval(one)}", one["high"] >= 0)
        for of in default.values()
        for pattern, figures in of.items()
        for domain, one in figures["domains"].items()
        if one is not None
    ]
    below = [text for text, held in domains if not held]
    count = sum(map(len, default.values()))
    said = f"Below: {listed(below)}." if below else f"None, in {how_many(count, 'row')} of the tables."
    return Reached("with the gate no domain ends below static", *_told([held for _, held in domains], [said]))


def nothing_lost(default: Mapping[str, Mapping[str, Whole]]) -> Reached:
    """Whether a domain was below static by more than .01: at its lowest point, or on its own requests.

    Traffic that a client poisons is included, but for requests, of which some are that client's.
    """
    verdicts: list[bool | None] = []
    sure: list[str] = []
    unsure: list[str] = []
    for name, of in default.items():
        for pattern, figures in of.items():
            lost = [(d, low) for d, low in lows.points(figures).items() if low["value"] < -lows.WORST]
            verdicts.append(False if any(low["high"] < 0 for _, low in lost) else None if lost else True)
            further = ", further updates" if name == SERVED else ""
            for domain, low in lost:
                where = f"after {low['requests']} ({title_of(pattern)}{further})"
                (sure if low["high"] < 0 else unsure).append(f"{domain} {interval(low)} {where}")
            if pattern in POISONED:  # requests of a domain are that client's, too
                continue
            for domain, one in came.lost(figures["came"]).items():
                verdicts.append(False if one["high"] < 0 else None)
                where = f"on its own requests as they came ({title_of(pattern)}{further})"
                (sure if one["high"] < 0 else unsure).append(f"{domain} {interval(one)} {where}")
    said = [f"Below static by more than .01: {listed(sure)}."] if sure else []
    said += [f"Not sure: {listed(unsure)}."] if unsure else []
    none = "None, at any measurement or on its own requests."
    return Reached("none loses more than .01 while others learn", *_told(verdicts, said or [none]))


def withstands(default: Mapping[str, Mapping[str, Whole]]) -> Reached:
    """Whether a client that sends rubbish does harm to the others, and what the gate's record says."""
    verdicts, said = list[bool | None](), list[str]()
    for name, of in default.items():
        for pattern in (one for one in POISONED if one in of):
            figures = of[pattern]
            lost = [low for low in lows.points(figures).values() if low["value"] < -lows.WORST]
            harmed = any(low["high"] < 0 for low in lost)
            worse = sum(one["surely_worse"] for one in figures["record"].values())
            verdicts.append(False if harmed or worse else None if lost else True)
            said.append(
                f"{title_of(pattern)} ({UPDATES[name]}): lowest domain {lows.cell(figures)}; "
                f"{_by_record(figures['record'], worse)}."
            )
    return Reached(
        "a client that sends rubbish makes nothing worse that is published", *_told(verdicts, said)
    )


def _by_record(record: Whole, worse: int) -> str:
    """What the gate's record says of published versions. worse: of how many the interval is below zero."""
    if not record:
        return "the gate published nothing, or kept no record"
    counts = sum(one["versions"] for one in record.values())
    least = min(record.values(), key=lambda one: float(one["least"]))
    low, high = map(short_sign, least["least_interval"])
    return (
        f"of {how_many(counts, 'published version')} {worse or 'none'} surely worse than the one before by "
        f"the gate's record (the least gain is {short_sign(least['least'])} tokens per step, 80 % interval "
        f"{low} to {high})"
    )


def soon(default: Mapping[str, Mapping[str, Whole]], pattern: str, key: str, aim: str) -> Reached:
    """Whether it took at most SOON requests, by seed."""
    verdicts, said = [], []
    for name, of in default.items():
        waits = [one for one in of.get(pattern, {}).get(key, ()) if one is not None]
        if waits:
            verdicts += [one != "never" and int(one) <= SOON for one in waits]
            said.append(f"{ARRANGEMENTS[name].title}: {listed(map(str, waits))} requests, by seed.")
    return Reached(f"{aim} within {SOON} requests", *_told(verdicts, said))


def not_forgotten(default: Mapping[str, Mapping[str, Whole]]) -> Reached:
    """Whether domains that stopped coming lost more than FORGOTTEN."""
    found = [
        (pattern, one)
        for of in default.values()
        for pattern, figures in of.items()
        if (one := figures["forgotten"]) is not None
    ]
    said = [f"{heading_of(pattern)}: {interval(one)}." for pattern, one in found]
    return Reached(
        "domains that are silent lose at most .01",
        *_told([_keeps(one) for _, one in found], said),
    )


def cheap(whole: Whole) -> Reached:
    """What learning takes of the target's operations."""
    found = {name: of for name in (GATED, SERVED) if (of := learned(whole, name))}
    said = [f"{ARRANGEMENTS[name].title}: {operations(of)}, at least." for name, of in found.items()]
    for name in LEAN:
        for pattern, one in learned(whole, name).items():
            gain = f"{interval(one['gain'])} first guesses with {title_of(pattern)}"
            said.append(f"{ARRANGEMENTS[name].title}: at least {one['cost']:.0%} for {gain}.")
    more = any(map(any, whole["resampled"].values()))
    beside = "again, and further answers, are" if more else "again is"
    said.append(f"Reading the target's states {beside} not counted.")
    verdicts = [one["cost"] <= CHEAP for of in found.values() for one in of.values()]
    return Reached("learning takes at most 5 % of the target's operations", *_told(verdicts, said))


def _keeps(one: Whole) -> bool | None:
    """Whether a change is no loss beyond FORGOTTEN; None where its interval leaves that open."""
    if one["low"] >= -FORGOTTEN:
        return True
    return False if one["high"] < 0 and one["value"] < -FORGOTTEN else None


def _told(verdicts: Sequence[bool | None], said: list[str], whole_field: bool = True) -> tuple[str, str]:
    """The verdict and the figures. whole_field: whether all others that the aim is about were run."""
    if not verdicts:
        return NOT_MEASURED, "Not in these runs."
    if False in verdicts:
        return (PARTLY if True in verdicts else MISSED), " ".join(said)
    held = HELD if whole_field else HELD + SOME
    return (held if None not in verdicts else OPEN), " ".join(said)
