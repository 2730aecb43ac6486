"""The default with further updates from the same requests, as a server makes them, but fewer."""

from __future__ import annotations

from typing import Any

from evidence import lows
from evidence.arrangements import (
    ARRANGEMENTS,
    BOUNDS,
    EQUAL_STEPS,
    FURTHER,
    GATED,
    LISTS,
    ONE_GATED,
    ONE_WIDE,
    ONE_WIDE_GATED,
    OTHER_WIDE,
    SERVED,
    SERVED_EQUAL_COST,
    STATIC,
    TABLED_FURTHER,
    WITHHELD_GATED,
)
from evidence.streams import ONLY, title_of
from evidence.words import (
    DASH,
    cells,
    difference,
    how_many,
    interval,
    listed,
    short_sign,
    table,
    told_apart,
    waits,
)
from moedraft.config import Settings
from moedraft.distill.joint.joint_loop import MOST_AGAIN

Whole = dict[str, Any]
REASONS = (
    "Where one adapter without a gate is ahead, part of it is the gate of the default, which publishes "
    "joint updates late for safety's sake{gated}, part that an expert drafts from [a list of its own, "
    "shorter than that adapter's](experiments.md#how-long-an-experts-own-list-is), without the tokens of the "
    "text beside it in these runs, and part that a step of one adapter computes "
    "more: with about as many operations both are level over [a long stream](evidence-long.md). With "
    "twelve domains, where an expert learns from few rows of each step, one adapter stays ahead "
    "([why](experiments.md#the-rank-of-the-shared-adapter-and-of-an-expert)); with many records of each "
    "of four domains experts are, from the same tokens ([one "
    "seed](experiments.md#where-there-are-many-records)); as they serve, they are level there. Why "
    "experts are the default all the same: [what decides "
    "it](evidence-served.md#what-decides-who-the-default-is)."
)
LISTS_DECIDE = (
    "Where experts are ahead of one adapter with one list for all, most of that is their lists, as one "
    "adapter with a list for each domain shows: each guesses from the words of its own domain, so a "
    "short list leaves wrong guesses out, and what it lacks stands mostly in the prompt's own text. One "
    "adapter needs a list of the words of all domains ([how this was "
    "found](experiments.md#tokens-of-the-text))."
)
DELAYED_LESS = " (the single adapter's, further down, it delays less)"
OLDER = (
    " The experts of wide runs are cut to the directions that matter, as a server's are since 2026-11-26. In "
    "some of the runs whose files do not tell the commit of their code, the base drafts for a domain "
    "[of which nothing was learned yet](experiments.md#before-anything-was-learned-of-a-domain): by the "
    "first form of that rule in the wide runs of the slow drift and of the new domain, as it is now in all "
    "runs with gate of prompts whose second half is of another domain. All other such runs with gate in this "
    "table were made before the rule."
)
NARROW = "joint+gate:further"
RIVALS = (WITHHELD_GATED, ONE_WIDE, ONE_WIDE_GATED, *OTHER_WIDE)


def patterns(whole: Whole) -> list[str]:
    return [name for name, of in whole["patterns"].items() if SERVED in of and not name.startswith(ONLY)]


def fewer(whole: Whole) -> str:
    """How much less is learned here than by a server."""
    steps = Settings.model_fields["update_steps"].default
    return (
        f"at most {ARRANGEMENTS[SERVED].further} after each update, of {whole['settings']['steps']} steps, "
        f"where a server makes up to {MOST_AGAIN} of {steps}"
    )


def finding(whole: Whole) -> str:
    """One sentence for each thing that is claimed of the default with further updates."""
    gains = {p: of for p in patterns(whole) if (of := whole["patterns"][p][SERVED]["gain"]) is not None}
    if not gains:
        return ""
    said = [
        "**With further updates** from the same requests while the gate sees a use in them "
        f"({fewer(whole)}), joint learning with the gate gains first guesses on the static draft: "
        f"{gained(gains)}."
    ]
    said.append(below(whole))
    equal = beside(whole, ONE_WIDE, SERVED_EQUAL_COST)
    others = [beside(whole, one) for one in RIVALS]
    others += [f"With {EQUAL_STEPS} steps an update: {equal}" if equal else "", beside(whole, NARROW)]
    lines = [f"  - {one}" for one in others if one]
    if lines:
        lines.insert(0, f"- **Beside others**, which make as many updates. {reasons(whole)}".rstrip())
    return "\n".join(["- " + " ".join(said), *lines])


def in_short(whole: Whole) -> str:
    """The default beside one adapter as large with gate and router, and with a list for each domain."""
    return " ".join(found for one in (WITHHELD_GATED, LISTS) if (found := beside(whole, one)))


def reasons(whole: Whole) -> str:
    """Why the single adapter may be ahead, or experts are, and what these are the default for."""
    if beside(whole, WITHHELD_GATED):
        return LISTS_DECIDE
    if not beside(whole, ONE_WIDE):
        return ""
    has_gated = any(ONE_GATED in of for of in whole["patterns"].values())
    return REASONS.format(gated=DELAYED_LESS if has_gated else "")


def gained(gains: Whole) -> str:
    """The least and the most of the patterns with several seeds, and those of a single seed by name."""
    several = {p: one for p, one in gains.items() if len(one["seeds"]) > 1}
    said = []
    if several:
        least, most = (pick(one["value"] for one in several.values()) for pick in (min, max))
        seeds = min(len(one["seeds"]) for one in several.values())
        doubts = [
            f"; {word} with {listed(found)}"
            for verdict, word in (("open", "not sure"), ("worse", "**worse**"))
            if (found := [title_of(p) for p, one in several.items() if one["verdict"] == verdict])
        ]
        where = f"on {how_many(len(several), 'pattern')} of traffic with {how_many(seeds, 'seed')} or more"
        sure = ", each of them sure"
        said.append(f"{short_sign(least)} to {short_sign(most)} {where}{''.join(doubts) or sure}")
    single = [f"{title_of(p)} ({interval(one)})" for p, one in gains.items() if p not in several]
    if single:
        said.append(f"with one seed, which tells nothing of others, {listed(single)}")
    return "; ".join(said)


def beside(whole: Whole, other: str, name: str = SERVED) -> str:
    """Where it is above and below another arrangement; `name`: the default, or a variation of it."""
    found = [
        (title_of(pattern), one)
        for pattern in patterns(whole)
        for one in [whole["patterns"][pattern].get(other, {}).get("default_more", {}).get(name)]
        if one is not None
    ]
    level = "level, as far as can be told, with"
    sure, split = told_apart(found, {"better": "better with", "worse": "**worse** with", "open": level})
    said = [*sure, *(f"open with {one}" for one in split)]
    return f"Against {ARRANGEMENTS[other].title}: {'; '.join(said)}." if said else ""


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
    said = [text for name in (SERVED, ONE_WIDE_GATED, NARROW) for text in _lows(whole, name)]
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
        counts = {len(lows.each_at(of[traffic])) for traffic in kept}
        some = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
        said.append(f"with {listed(kept)}, no domain by more than .01 at any of {some} measurements")
    title = ARRANGEMENTS[name].title
    return [f"{title[0].upper()}{title[1:]}, on the way below static: {'; '.join(said)}."] if said else []


def part(whole: Whole) -> str:
    """The table."""
    rows = []
    for pattern, of in whole["patterns"].items():
        if pattern.startswith(ONLY) or not any(name in of for name in FURTHER):
            continue
        for name in (STATIC, GATED, *TABLED_FURTHER, SERVED_EQUAL_COST, *BOUNDS):
            if name in of:
                rows.append([title_of(pattern), *_row(of, name)])
    if not rows:
        return ""
    head = (
        "traffic",
        "arrangement",
        "seeds",
        "first guesses",
        "tokens per step",
        "more than static",
        "joint, with gate, wide, has more",
        lows.HEAD,
        "until at home",
    )
    return f"## With further updates\n\n{about(whole)}\n\n{table(head, rows)}"


def about(whole: Whole) -> str:
    """How the table is to be read."""
    return (
        "A server does not stop at one update for its new requests: while it has time to spare, it makes "
        "further ones from the records that are there, until the gate throws one away or they save less time "
        "than they take. Here too, but "
        f"fewer: {fewer(whole)}. So there are at most as many updates as the offline bound has; arrangements "
        "without a gate make all of them. *Wide*: the shared adapter has four times an expert's rank, as a "
        "server's has by default, and one adapter that stands alone as much as both."
        f"{OLDER if whole['unmarked'] else ''} *Until at home*: requests after a new domain came until it "
        "had 80 % of what it gains offline, at the first measurement that shows it, by seed."
    )


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
