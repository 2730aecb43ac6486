"""docs/evidence.md, written from the summary. What a sentence claims is computed, never written by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import paper, served
from evidence.arrangements import ARRANGEMENTS, GATED, JOINT, MAIN, ONLINE, STATIC
from evidence.figures import Runs
from evidence.streams import ONLY, ORDERS, POISONED, title_of
from evidence.summary import summary
from evidence.words import (
    COMMANDS,
    cells,
    difference,
    how_many,
    introduction,
    listed,
    method,
    short_sign,
    table,
    waits,
)

ABOUT_PICTURES = {
    "curves": "Right first guesses on held-out prompts of all domains, over the requests served.",
    "gains": "What each arrangement gained on static in the end; bars: 95 % intervals, small marks: seeds.",
    "domains": "The same by domain.",
}
ENOUGH_SEEDS, ENOUGH_PROMPTS = 5, 40
WORST = 0.01  # of first guesses, that no domain is to lose
Whole = dict[str, Any]


def write(runs: Runs, out: Path, path: Path, pictures: Sequence[str]) -> None:
    """The document, and the figures that it is made of as OUT/summary.json."""
    whole = summary(runs)
    (out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(os.path.relpath(out, path.parent))
    shown = "\n\n".join(
        f"![{ABOUT_PICTURES[name]}]({folder / name}.png)\n\n{ABOUT_PICTURES[name]}" for name in pictures
    )
    target = whole["settings"].get("target", "")
    first = introduction(target, f"results/{out.name}")
    parts = [first, "## What was found", *findings(whole), method(target), settings(whole), shown]
    parts.append(served.part(whole))
    parts += [pattern_part(whole, name) for name in patterns(whole)]
    parts += [moving(whole), prices(whole), gate(whole), *paper.parts(whole), COMMANDS]
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def patterns(whole: Whole) -> list[str]:
    return [name for name in whole["patterns"] if not name.startswith(ONLY)]


def findings(whole: Whole) -> list[str]:
    """The claims that are to hold, pattern by pattern, and whether the figures bear them out."""
    lines = [line for line in [served.finding(whole)] if line]
    for pattern in patterns(whole):
        of = whole["patterns"][pattern]
        sentences = [
            pays(of, GATED),
            beside_others(of, GATED),
            harms(of, GATED),
            pays(of, JOINT),
            beside_others(of, JOINT),
            gated_costs(of),
        ]
        text = " ".join(sentence for sentence in sentences if sentence)
        if text:
            lines.append(f"- **{title_of(pattern).capitalize()}.** {text}")
    return ["\n".join(lines)] if lines else ["No run of the default has finished yet."]


def pays(of: Whole, name: str) -> str:
    """Whether it is better than nothing learned."""
    if name not in of or of[name]["gain"] is None:
        return ""
    one = of[name]["gain"]
    seeds = how_many(len(one["seeds"]), "seed")
    said = {
        "better": "is better than the static draft",
        "worse": "is worse than the static draft",
        "open": "cannot be told from the static draft",
    }
    title = ARRANGEMENTS[name].title
    return f"{title[0].upper()}{title[1:]} {said[one['verdict']]}: {interval(one)} first guesses ({seeds})."


def beside_others(of: Whole, default: str) -> str:
    """Whether joint learning, in this form, is above, below or level with each other online arrangement."""
    if default not in of:
        return ""
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "open": []}
    for name in ONLINE:
        one = of.get(name, {}).get("default_more", {}).get(default)
        if one is not None:
            seeds = how_many(len(one["seeds"]), "seed")
            by_verdict[one["verdict"]].append(
                f"{ARRANGEMENTS[name].title} ({short_sign(one['value'])}, {seeds})"
            )
    said = (("better", "It is above"), ("worse", "It is **below**"), ("open", "Not to be told from it are"))
    return " ".join(f"{words} {listed(by_verdict[key])}." for key, words in said if by_verdict[key])


def harms(of: Whole, name: str) -> str:
    """Which domains ended below static."""
    if name not in of or of[name]["gain"] is None:
        return ""
    domains = of[name]["domains"].items()
    below = [f"{d} ({short_sign(one['value'])})" for d, one in domains if one["verdict"] == "worse"]
    lower = [d for d, one in domains if one["value"] < -WORST and one["verdict"] != "worse"]
    text = (
        f"Below static by its interval: {listed(below)}."
        if below
        else "No domain ends below static by its interval."
    )
    return text + (f" {listed(lower)} lost more than .01 within the noise." if lower else "")


def gated_costs(of: Whole) -> str:
    """What the gate costs or brings."""
    one = of.get(JOINT, {}).get("default_more", {}).get(GATED)
    if one is None:
        return ""
    seeds = how_many(len(one["seeds"]), "seed")
    if one["verdict"] == "open":
        if one["low"] > 0 or one["high"] < 0:
            return (
                f"What the gate changes is open: its interval says {interval(one)}, but the {seeds} disagree."
            )
        return f"What the gate changes is open: {interval(one)} ({seeds})."
    said = {"better": "The gate brings", "worse": "The gate costs"}
    return f"{said[one['verdict']]} {interval(one)} ({seeds})."


def forgets(of: Whole, name: str) -> str:
    """Whether domains lost something while others came."""
    one = of.get(name, {}).get("forgotten")
    if one is None:
        return ""
    said = {"better": "gained", "worse": "**lost**", "open": "changed by no more than chance"}[one["verdict"]]
    return f"{ARRANGEMENTS[name].title.capitalize()}: domains {said} while they were silent, {interval(one)}."


def interval(one: Whole) -> str:
    return f"{short_sign(one['value'])} [{short_sign(one['low'])}, {short_sign(one['high'])}]"


def settings(whole: Whole) -> str:
    """What a run consisted of, and how many there were."""
    of, seeds = (
        whole["settings"],
        {p: max(a["seeds"] for a in names.values()) for p, names in whole["patterns"].items()},
    )
    counts = ", ".join(f"{title_of(p)} {n}" for p, n in seeds.items())
    return (
        f"A run: {of['requests']} requests of the domains {of['domains'].replace(',', ', ')}, with answers "
        f"of up to {of['max_tokens']} tokens; an update of {of['steps']} steps of {of['rows']} records after "
        f"every {of['every']} requests, experts of rank {of['rank']}; {of['heldout']} held-out prompts a "
        f"domain. {how_many(whole['runs'], 'run')}; most seeds by pattern: {counts}. Each row of a table "
        f"says how many seeds it has.{warning(of, seeds)}{missing(whole)}"
    )


def warning(of: Whole, seeds: dict[str, int]) -> str:
    """Whether there is enough behind the figures to claim anything for good."""
    said = []
    if few := [title_of(pattern) for pattern, count in seeds.items() if count < ENOUGH_SEEDS]:
        said.append(f"no arrangement has {ENOUGH_SEEDS} seeds with {listed(few)}")
    if of["heldout"] < ENOUGH_PROMPTS:
        said.append(f"{ENOUGH_PROMPTS} held-out prompts a domain are what a claim should rest on")
    less = f" **Rows of fewer than {ENOUGH_SEEDS} seeds are sure for these seeds only.**"
    return less + (f" Note that {' and that '.join(said)}." if said else "")


def missing(whole: Whole) -> str:
    """What there are no runs of."""
    traffic = [title_of(name) for name in ORDERS if name not in whole["patterns"]]
    every = {name for of in whole["patterns"].values() for name in of}
    learners = [ARRANGEMENTS[name].title for name in MAIN if name not in every]
    said = [("patterns of traffic", traffic), ("arrangements", learners)]
    return "".join(f" Not measured yet, of the {what}: {listed(names)}." for what, names in said if names)


def pattern_part(whole: Whole, pattern: str) -> str:
    """The table of one pattern of traffic, and one by domain."""
    of = whole["patterns"][pattern]
    rows = [row(of, name) for name in MAIN if name in of]
    head = (
        "arrangement",
        "seeds",
        "first guesses",
        "tokens per step",
        "more than static",
        "with gate has more",
        "joint without gate has more",
    )
    right = f"The router sent {whole['router'][pattern]:.0%} of the requests to their true domain."
    if pattern in POISONED:
        right = "Every third request is the poisoner's; what is measured are the others' held-out prompts."
    return "\n\n".join([f"## {title_of(pattern).capitalize()}", right, table(head, rows), by_domain(of)])


def row(of: Whole, name: str) -> list[str]:
    one, is_static = of[name], name == STATIC
    more = [difference(None if is_static else one["default_more"].get(other)) for other in (GATED, JOINT)]
    return [*cells(ARRANGEMENTS[name].title, one, is_static=is_static), *more]


def by_domain(of: Whole) -> str:
    """By domain, what was gained on static."""
    names = [name for name in MAIN if name in of and name != STATIC and of[name]["gain"] is not None]
    if not names:
        return ""
    domains = list(of[names[0]]["domains"])
    rows = [
        [ARRANGEMENTS[name].title, *(difference(of[name]["domains"][d]) for d in domains)] for name in names
    ]
    return "More first guesses than static, by domain:\n\n" + table(("arrangement", *domains), rows)


def moving(whole: Whole) -> str:
    """Recovery, forgetting and new domains, where the traffic moves."""
    rows = []
    for pattern in ("one-by-one", "shift", "new-domain"):
        of = whole["patterns"].get(pattern, {})
        for name in MAIN:
            if name in of and name not in (STATIC, "offline"):
                one = of[name]
                cells = difference(one["forgotten"]), waits(one.get("recovery")), waits(one.get("arrival"))
                rows.append([title_of(pattern), ARRANGEMENTS[name].title, str(one["seeds"]), *cells])
    if not rows:
        return ""
    every = whole["settings"]["every"] * whole["settings"]["measured"]
    head = (
        "traffic",
        "arrangement",
        "seeds",
        "change while silent",
        "requests until back",
        "requests until at home",
    )
    return (
        "## Where traffic moves\n\n*Change while silent*: first guesses on domains that stopped coming, in "
        "the end against when they were last served; with a return, at the moment before it. *Until back*: "
        "after the return, until the domains are within .02 of what they had. *Until at home*: after a new "
        "domain came, until it has 80 % of what it gains offline. By seed; measured every "
        f"{every} requests.\n\n{table(head, rows)}"
    )


def prices(whole: Whole) -> str:
    """What learning costs, by arrangement, on the first pattern that has it."""
    rows = []
    for name in MAIN:
        found = next(
            (whole["patterns"][p][name] for p in patterns(whole) if name in whole["patterns"][p]), None
        )
        if found is None or not found["updates"] or "gain_per_update" not in found:
            continue
        rows.append(
            [
                ARRANGEMENTS[name].title,
                f"{found['gain_per_update']:+.4f}",
                f"{found['gain_per_minute']:+.4f}",
                f"{found['cost']:.1%}",
            ]
        )
    head = ("arrangement", "gain per update", "gain per minute of one core", "operations, of the target's")
    reading = (
        " The trainer also has its own copy of the target read each record once, which is another 100 % here "
        "and would be saved by keeping the states."
    )
    if whole["settings"].get("target") == "mini":
        reading = ""  # an independent draft model reads no states
    about = (
        "## What it costs\n\nGains are first guesses on all held-out prompts. Operations are those of all "
        "updates, with measuring and judging, out of the target's for the requests that fed them: two for "
        "each weight and token. (A target that decodes reads all its weights for each token, which these do "
        "not show.)" + reading + " Minutes are of a core that others used "
        "as well, without what the trainer measures for its log. The aim was 5 % of the target's operations: "
        "it is missed by far, since each request is learned from many times and answers here are short. That "
        "work is done in time that the engine leaves idle, or within `train_cpu_share`.\n\n"
    )
    return about + table(head, rows) if rows else ""


def gate(whole: Whole) -> str:
    """What the gate decided."""
    rows = []
    for pattern in patterns(whole):
        found = whole["patterns"][pattern].get(GATED)
        if found:
            shared, every = found["shared"], found["decisions"]
            cells = [
                f"{part.get(key, 0)}" for part in (shared, every) for key in ("promote", "keep", "discard")
            ]
            rows.append([title_of(pattern), str(found["seeds"]), *cells])
    head = (
        "traffic",
        "seeds",
        *(f"{who} {what}" for who in ("shared:", "all:") for what in ("published", "kept", "discarded")),
    )
    return f"## What the gate decided\n\n{table(head, rows)}" if rows else ""
