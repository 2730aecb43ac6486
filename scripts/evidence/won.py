"""What decides who the default is: first whom an arrangement does harm to, then what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evidence import boundaries, came, lows
from evidence.arrangements import ARRANGEMENTS, ONE_WIDE, ONE_WIDE_GATED, OTHER_WIDE, SERVED
from evidence.streams import ONLY, POISONED, title_of
from evidence.words import DASH, difference, how_many, listed, table
from moedraft.distill.judging.judge import TAUGHT

Whole = dict[str, Any]
COMPARED = (ONE_WIDE, ONE_WIDE_GATED)  # run with most traffic, or to be computed
WITHHELD = ", withheld from new domains"
LIKE_ALL = ", further updates"  # of the titles, as all of these make them
HEAD = (
    "arrangement",
    "patterns of traffic",
    "of these, a domain lost more than .01",
    "lowest point of all",
    "least on a domain's own requests",
    "in the end, beside the default",
    "on the requests as they came",
    "first window of a new data set, beside static",
)
ABOUT = (
    "## What decides who the default is\n\n"
    "First that nobody loses, then what is gained: an operator who turns learning on must not fear for a "
    "domain. This order of the two is a choice, made when these figures were known; by what is gained alone"
    " the last columns decide. All of these make further updates, with a wide shared adapter or one adapter"
    " as large. *Lost more than .01*: of first guesses, against static, on held-out prompts at any "
    "measurement on the way or in the end, or on the domain's own requests as they came; by the mean of the "
    "seeds, and surely something by its interval, whether all seeds agree or "
    "not; intervals are not corrected for how many there are. What a rival has beside the default: on how "
    "many patterns it is surely better, level as far as can be told, and surely worse. The default leaves "
    f"domains with fewer than {TAUGHT} records to the draft base alone. *Withheld from new domains*: one "
    "adapter that is withheld likewise. Where that was not run, it is computed from the runs without it, "
    "since what an adapter learns does not depend on whom it serves; then what its gate, where it has one, "
    "would have said of leaving a domain to the base is not known, and held-out prompts count by their true"
    " domain, where a router takes a few for another."
)


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    kind: str  # the title, without what all of these have
    patterns: dict[str, Whole]  # what was found, by pattern of traffic; poisoned ones are left out
    is_everywhere: bool = True  # whether the patterns that all were run on are also chosen by this one


def entries(whole: Whole) -> list[Entry]:
    """The rivals, each as it was run and withheld from new domains, and the default, which comes last."""
    sources = {"": whole["patterns"], WITHHELD: whole.get("withheld", {})}
    found = [
        Entry(_kind(name) + more, _patterns(source, name))
        for name in COMPARED
        for more, source in sources.items()
    ]
    found += [Entry(_kind(name), _patterns(whole["patterns"], name), False) for name in OTHER_WIDE]
    found += [Entry(_kind(SERVED), _patterns(whole["patterns"], SERVED))]
    return [entry for entry in found if entry.patterns]


WHY = (
    "What keeps domains from harm here is therefore less that each has an expert than that domains are known "
    "apart: adapters are withheld from a domain of which nothing was learned yet, and with the gate from one "
    "that the draft base knows better. Whoever has experts has that at once; one adapter needs the same "
    "router, and the same gate, for it. Beyond these figures, each expert can be pinned, taken back, "
    "exported or removed with its domain by itself."
)
AHEAD = (
    "**By these figures alone the default has not won**: it is behind {who}, which is surely better on some "
    "patterns and worse on none."
)
STAYS = (
    "No rival that harms nobody is surely better than the default anywhere, unless it is surely worse "
    "elsewhere. So by this order of the two the default is what won."
)
LESS_SAFE = (
    "**By safety alone the default has not won**: with {where} a domain lost more than .01 of its first "
    "guesses with it, by the mean of {seeds}, and none with {who}."
)
FOR_ITS_GAIN = " It stays the default for what it gains."
ALSO = " With {where} a domain lost more than .01 with it as well, and {others}."
NOBODY_SAFER = "no rival that harms nobody was run there"
BEHIND = "*{kind}* (in the end surely below the default on {count} of {patterns})"


def part(whole: Whole) -> str:
    """The table and what follows from it; nothing where the default stands beside no other."""
    of = entries(whole)
    if len(of) < 2 or not _patterns(whole["patterns"], SERVED):
        return ""
    rows = [_row(one, is_default=one is of[-1]) for one in of]
    about = f"{ABOUT} {_run(whole)}".rstrip()
    return f"{about}\n\n{table(HEAD, rows)}\n\n{verdict(of)}"


def _run(whole: Whole) -> str:
    """With which traffic the rivals were run withheld from new domains, and with how many of the seeds."""
    said: dict[str, list[str]] = {}
    for pattern, of in whole.get("withheld", {}).items():
        for name, one in of.items():
            if one["run"] and pattern not in POISONED:
                counted = f"{title_of(pattern)} ({one['run']} of {how_many(one['seeds'], 'seed')})"
                said.setdefault(_kind(name), []).append(counted)
    found = "; ".join(f"*{title}* with {listed(patterns)}" for title, patterns in said.items())
    return f"Run withheld: {found}." if found else "All of it is computed here."


def told(whole: Whole) -> str:
    """What follows from the table, by itself."""
    return verdict(entries(whole)) if _patterns(whole["patterns"], SERVED) else ""


def _kind(name: str) -> str:
    return ARRANGEMENTS[name].title.removesuffix(LIKE_ALL)


def _patterns(source: Whole, name: str) -> dict[str, Whole]:
    """What was found of it, by the patterns of traffic that it was run on, poisoned ones left out."""
    return {
        pattern: of[name]
        for pattern, of in source.items()
        if name in of and pattern not in POISONED and not pattern.startswith(ONLY)
    }


def harmed(one: Entry, patterns: Sequence[str]) -> list[str]:
    """The patterns on which a domain lost more than the aims allow, and surely something."""
    return [
        pattern
        for pattern in patterns
        if any(
            low["high"] < 0 and low["value"] < -lows.WORST
            for found in (lows.points(one.patterns[pattern]), came.lost(one.patterns[pattern]["came"]))
            for low in found.values()
        )
    ]


def _row(one: Entry, *, is_default: bool) -> list[str]:
    of = one.patterns
    each = [low for found in of.values() for low in lows.points(found).values()]
    lowest = min(each, key=lambda low: float(low["value"]), default=None)
    own = [gain for found in of.values() for gain in found["came"].get("domains", {}).values() if gain]
    least = min(own, key=lambda gain: float(gain["value"]), default=None)
    ends = [found["default_more"].get(SERVED) for found in of.values()]
    live = [found["came"].get("default_more", {}).get(SERVED) for found in of.values()]
    edge = of.get(boundaries.PATTERN, {}).get("boundaries", {}).get("after")
    return [
        one.kind,
        str(len(of)),
        str(len(harmed(one, list(of)))),
        difference(lowest) if lowest else DASH,
        difference(least) if least else DASH,
        DASH if is_default else _counted(ends),
        DASH if is_default else _counted(live),
        difference(edge),
    ]


def _counted(found: Sequence[Whole | None]) -> str:
    """`better 1, level 7, worse 1`: the rival beside the default; `found` is what the default has more."""
    words = {"better": "worse", "worse": "better", "open": "level"}
    counts = Counter(words[one["verdict"]] for one in found if one is not None)
    return ", ".join(f"{word} {counts[word]}" for word in ("better", "level", "worse")) if counts else DASH


def verdict(of: Sequence[Entry]) -> str:
    """On the patterns that all of them were run on: who harms nobody, and so who won. The default is last."""
    default, most = of[-1], [one for one in of if one.is_everywhere]
    common = [pattern for pattern in default.patterns if all(pattern in one.patterns for one in most)]
    if len(most) < 2 or not common:
        return ""
    hurt = {one.kind: harmed(one, common) for one in most}
    said = [f"*{kind}* on {len(found)}{_where(found)}" for kind, found in hurt.items()]
    safe = [kind for kind, found in hurt.items() if not found]
    if safe == [default.kind]:
        won = f"So only with the default no domain did. {_less_safe(of)}".rstrip()
    elif default.kind in safe:
        others = listed(f"*{kind}*" for kind in safe if kind != default.kind)
        helped = any(kind + WITHHELD in safe for kind, found in hurt.items() if found)
        won = (
            f"So none is harmed on these either with {others}. {WHY if helped else ''} {_ahead(of)}".rstrip()
        )
    else:
        won = "So the default does not keep its promise here."
    whom = "all of these were" if len(most) == len(of) else "one adapter and the default were all"
    where = f"On the {how_many(len(common), 'pattern')} of traffic that {whom} run on"
    lost = "a domain lost more than .01 of its first guesses"
    return f"{where}, {lost} with {'; with '.join(said)}. {won}".rstrip()


def _ahead(of: Sequence[Entry]) -> str:
    """The rivals that harm nobody and are surely better than the default somewhere, worse nowhere."""
    found = []
    for one in of[:-1]:
        ends = [each["default_more"].get(SERVED) for each in one.patterns.values()]
        live = [each["came"].get("default_more", {}).get(SERVED) for each in one.patterns.values()]
        verdicts = {more["verdict"] for more in (*ends, *live) if more is not None}
        if "worse" in verdicts and "better" not in verdicts and not harmed(one, list(one.patterns)):
            found.append(f"*{one.kind}*")
    return AHEAD.format(who=listed(found)) if found else _less_safe(of) or STAYS + _also(of)


def _also(of: Sequence[Entry]) -> str:
    """Where the default does harm; nothing where it does none."""
    hurt = harmed(of[-1], list(of[-1].patterns))
    there = [one for one in of[:-1] if {*hurt} & {*one.patterns}]
    too = bool(there) and all(harmed(one, _run_on(one, hurt)) for one in there)
    others = f"so with {listed(f'*{one.kind}*' for one in there)}" if too else NOBODY_SAFER
    return ALSO.format(where=listed(map(title_of, hurt)), others=others) if hurt else ""


def _run_on(one: Entry, patterns: Sequence[str]) -> list[str]:
    """Those of the patterns that it was run on."""
    return [pattern for pattern in patterns if pattern in one.patterns]


def _less_safe(of: Sequence[Entry]) -> str:
    """Where the default does harm and a rival was run that harms nobody anywhere; "" where there is none."""
    *rivals, default = of
    hurt = harmed(default, list(default.patterns))
    safe = [one for one in rivals if {*hurt} & {*one.patterns} and not harmed(one, list(one.patterns))]
    if not safe:
        return ""
    there = [pattern for pattern in hurt if any(pattern in one.patterns for one in safe)]
    said, gains = [], False
    for one in safe:
        ends = [each["default_more"].get(SERVED) for each in one.patterns.values()]
        behind = sum(more is not None and more["verdict"] == "better" for more in ends)
        patterns = how_many(len(one.patterns), "pattern")
        gains |= behind > 0
        said.append(BEHIND.format(kind=one.kind, count=behind, patterns=patterns))
    seeds = how_many(max(default.patterns[pattern]["seeds"] for pattern in there), "seed")
    where = listed(map(title_of, there))
    return LESS_SAFE.format(where=where, seeds=seeds, who=listed(said)) + (FOR_ITS_GAIN if gains else "")


def _where(patterns: Sequence[str]) -> str:
    return f" ({listed(map(title_of, patterns))})" if patterns else ""
