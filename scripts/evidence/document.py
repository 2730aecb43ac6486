"""A page of evidence, written from the summary. Figures and comparisons are computed; reasons are by hand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence import aims, came, costs, decisions, growth, lows, missing, moves, paper, restarts, served, won
from evidence.arrangements import (
    ARRANGEMENTS,
    GATED,
    JOINT,
    ONLINE,
    ONLINE_GATED,
    STATIC,
    TABLED,
    TABLED_FURTHER,
)
from evidence.comparable import BEFORE_RATE, SERVER_STEPS
from evidence.figures import Runs
from evidence.parts import PARTS
from evidence.streams import ONLY, POISONED, heading_of, title_of
from evidence.summary import summary
from evidence.words import (
    COMMANDS,
    DASH,
    IN_SHORT,
    OF_INDEPENDENT,
    SERVED_RESULTS,
    cells,
    difference,
    dispute,
    disputed,
    how_many,
    interval,
    introduction,
    listed,
    method,
    short_sign,
    table,
    told_apart,
)
from moedraft.distill.assembly import TEXT_RATE

ABOUT_PICTURES = {
    "curves": "Right first guesses on held-out prompts of all domains, over the requests served.",
    "gains": "What each arrangement gained on static in the end; bars: 95 % intervals, small marks: seeds.",
    "domains": "The same by domain.",
    "by-domain": "Right first guesses over the requests served, by domain (columns) and traffic (rows).",
    "positions": "By position in a draft: how many of all drafts are right up to there.",
    "recovery": "What the requests themselves gained on static, each before it was learned from; with a new "
    "domain, its own requests alone. Dotted: turns of the traffic.",
    "forgetting": "What became of domains while they were silent; bars: 95 % intervals, small marks: seeds.",
    "updates": "Gain on static against the number of updates.",
    "seconds": "Gain on static against the seconds of one core that training had taken.",
}
AT_THE_TOP, MOVING, COSTS = (
    ("curves", "gains", "domains", "by-domain", "positions"),
    ("recovery", "forgetting"),
    ("updates", "seconds"),
)
ANSWERING = (
    " The target's answers to its 190 prompts come first: some 6 minutes of two cores that do nothing else "
    "(48 answers took 160 seconds of one core on 2026-11-26). So it needs about 12 minutes."
)
ENOUGH_PROMPTS = 40
DOCS = Path(__file__).resolve().parents[2] / "docs"  # where the documents lie that a page points to
Whole = dict[str, Any]


def write(runs: Runs, out: Path, path: Path, pictures: Sequence[str]) -> None:
    """The document, and the figures that it is made of as OUT/summary.json."""
    whole = summary(runs)
    (out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(os.path.relpath(out.resolve(), path.parent.resolve()))
    target = whole["settings"].get("target", "")

    def shown(*names: str) -> list[str]:
        there = [name for name in names if name in pictures]
        return [f"![{ABOUT_PICTURES[n]}]({folder / n}.png)\n\n{ABOUT_PICTURES[n]}" for n in there]

    first = introduction(target, named(out.resolve()))
    parts = [first, in_short(target, out), "## What was found", *findings(whole)]
    parts += [aims.part(whole), won.part(whole)]
    parts += [method(target, whole["strengths"], whole["resampled"], whole["unsure"]), settings(whole)]
    parts += [*shown(*AT_THE_TOP), growth.part(whole), served.part(whole), came.part(whole)]
    parts += [pattern_part(whole, name) for name in patterns(whole)]
    parts += [moves.part(whole), *shown(*MOVING), costs.prices(whole), *shown(*COSTS), decisions.gate(whole)]
    parts += [*paper.parts(whole), restarts.part(whole), missing.part(whole)]
    parts += [COMMANDS.format(times=times(whole))]
    text = "\n\n".join(part for part in parts if part) + "\n"
    path.write_text(pointed(text, path.parent), encoding="utf-8")


def in_short(target: str, out: Path) -> str:
    """What was found of the default as it is published now, on the other pages of the same model."""
    file = out.parent / SERVED_RESULTS / "summary.json"
    if target == "mini":
        return OF_INDEPENDENT
    if out.name == SERVED_RESULTS or not file.exists():
        return ""
    as_served = json.loads(file.read_text(encoding="utf-8"))
    return IN_SHORT.format(beside=served.in_short(as_served), verdict=won.told(as_served))


def named(out: Path) -> str:
    """A folder of results, as a page names it: from the repository on, where it lies in that."""
    root = DOCS.parent
    return (out.relative_to(root) if out.is_relative_to(root) else out).as_posix()


def pointed(text: str, folder: Path) -> str:
    """The text of a page in this folder, with links to documents that lead to where these lie."""
    way = Path(os.path.relpath(DOCS, folder.resolve()))
    return re.sub(r"\]\(([\w-]+\.md)", lambda found: f"]({(way / found[1]).as_posix()}", text)


def patterns(whole: Whole) -> list[str]:
    return [name for name in whole["patterns"] if not name.startswith(ONLY)]


def findings(whole: Whole) -> list[str]:
    """The claims that are to hold, pattern by pattern, and whether the figures bear them out."""
    lines = [line for line in (served.finding(whole), served.on_the_way(whole)) if line]
    for pattern in patterns(whole):
        of = whole["patterns"][pattern]
        sentences = [
            pays(of, GATED),
            beside_others(of, GATED),
            beside_others(of, GATED, ONLINE_GATED),
            harms(of, GATED),
            lows.sentence(of[GATED]) if GATED in of else "",
            pays(of, JOINT),
            beside_others(of, JOINT),
            gated_costs(of),
        ]
        text = " ".join(sentence for sentence in sentences if sentence)
        if text:
            lines.append(f"- **{heading_of(pattern)}.** {text}")
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


def beside_others(of: Whole, default: str, others: Sequence[str] = ONLINE) -> str:
    """Whether joint learning, in this form, is above, below or level with each of the others."""
    if default not in of:
        return ""
    found = [
        (ARRANGEMENTS[name].title, one)
        for name in others
        if (one := of.get(name, {}).get("default_more", {}).get(default)) is not None
    ]
    words = {"better": "It is above", "worse": "It is **below**", "open": "Not to be told from it are"}
    sure, split = told_apart(found, words)
    return " ".join(f"{said}." for said in [*sure, *(f"Open is {one}" for one in split)])


def harms(of: Whole, name: str) -> str:
    """Which domains ended below static."""
    if name not in of or of[name]["gain"] is None:
        return ""
    domains = of[name]["domains"].items()
    below = [f"{d} ({short_sign(one['value'])})" for d, one in domains if one["verdict"] == "worse"]
    lower = [d for d, one in domains if one["value"] < -lows.WORST and one["verdict"] != "worse"]
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
        if disputed(one):
            return f"What the gate changes is open: {dispute(one)}."
        return f"What the gate changes is open: {interval(one)} ({seeds})."
    said = {"better": "The gate brings", "worse": "The gate costs"}
    return f"{said[one['verdict']]} {interval(one)} ({seeds})."


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
        f"every {of['every']} requests, experts of rank {of['rank']}{independent(whole)}; "
        f"{of['heldout']} held-out prompts a "
        f"domain, asked before, after every {of['every'] * of['measured']} requests and at the end (and "
        f"where traffic turns, in runs that tell the commit of their code; {whole['unmarked']} do not). "
        f"{how_many(whole['runs'], 'run')}; most seeds by pattern: {counts}. Each row of a table "
        f"says how many seeds it has.{warning(of, seeds)}{precision(whole)}"
    )


def independent(whole: Whole) -> str:
    """How an independent draft model's adapters learn; nothing for a feature drafter."""
    if whole["settings"].get("target") != "mini":
        return ""
    older = BEFORE_RATE in whole["rates"]
    shared = "as wide a shared adapter" if older else "a shared adapter four times as wide, as a server's"
    rates = listed(f"{rate:g}".lstrip("0") for rate in whole["rates"])
    served = "" if older else f" (a server: {f'{TEXT_RATE:f}'.strip('0')} for {SERVER_STEPS} steps)"
    return f" and {shared}, learning rate {rates}{served}"


def precision(whole: Whole) -> str:
    """Which patterns of traffic were run on another kind of processor; nothing for the toy pair."""
    other = [title_of(pattern) for pattern, found in whole["precisions"].items() if found == ["float32"]]
    if whole["settings"].get("target") == "mini" or not other:
        return ""
    if len(other) == len(whole["precisions"]):
        return " The target ran in float32, as on a processor that has no bfloat16."
    return (
        f" With {listed(other)}, the target ran in float32, as on a processor without bfloat16; with all "
        "other traffic in bfloat16. So figures of these are compared with one another only."
    )


def warning(of: Whole, seeds: dict[str, int]) -> str:
    """Whether there is enough behind the figures to claim anything for good."""
    said = []
    if few := [title_of(pattern) for pattern, count in seeds.items() if count < missing.ENOUGH_SEEDS]:
        said.append(f"no arrangement has {missing.ENOUGH_SEEDS} seeds with {listed(few)}")
    if of["heldout"] < ENOUGH_PROMPTS:
        said.append(f"{ENOUGH_PROMPTS} held-out prompts a domain are what a claim should rest on")
    less = f" **Rows of fewer than {missing.ENOUGH_SEEDS} seeds are sure for these seeds only.**"
    return less + (f" Note that {' and that '.join(said)}." if said else "")


def pattern_part(whole: Whole, pattern: str) -> str:
    """The table of one pattern of traffic, and one by domain."""
    of = whole["patterns"][pattern]
    rows = [row(of, name) for name in TABLED if name in of]
    head = (
        "arrangement",
        "seeds",
        "first guesses",
        "tokens per step",
        "more than static",
        "joint with gate has more",
        "joint without gate has more",
        lows.HEAD,
    )
    right = f"The router sent {whole['router'][pattern]:.0%} of the requests to their true domain."
    if pattern in POISONED:
        right = (
            "Every third request is the poisoner's; what is measured are the others' held-out prompts. The "
            "others come without a key, so that no bound for each of several clients is at work, as it is in "
            "a server whose clients all have keys."
        )
    parts = [f"## {heading_of(pattern)}", right, table(head, rows) if len(rows) > 1 else "", by_domain(of)]
    return "\n\n".join(part for part in parts if part)


def row(of: Whole, name: str) -> list[str]:
    one, is_static = of[name], name == STATIC
    more = [difference(None if is_static else one["default_more"].get(other)) for other in (GATED, JOINT)]
    low = DASH if is_static else lows.cell(one)
    return [*cells(ARRANGEMENTS[name].title, one, is_static=is_static), *more, low]


def by_domain(of: Whole) -> str:
    """By domain, what was gained on static."""
    learners = (*TABLED, *TABLED_FURTHER)
    names = [name for name in learners if name in of and name != STATIC and of[name]["gain"] is not None]
    if not names:
        return ""
    domains = list(of[names[0]]["domains"])
    rows = [
        [ARRANGEMENTS[name].title, *(difference(of[name]["domains"][d]) for d in domains)] for name in names
    ]
    return "More first guesses than static, by domain:\n\n" + table(("arrangement", *domains), rows)


def times(whole: Whole) -> str:
    """How long `--quick` takes, by the times that runs of the same kind took here."""
    of = whole["patterns"]
    found = [of[p][name]["seconds"] for p, name in PARTS["quick"] if name in of.get(p, {})]
    if len(found) < len(PARTS["quick"]):
        return ""
    answering = ANSWERING if whole["settings"].get("target") == "smollm2" else ""
    return (
        f"\nThe {len(found)} runs of `--quick` took {sum(found) / 60:.0f} minutes here (medians of the "
        f"seeds, one thread of a shared machine), though with more requests and held-out prompts.{answering}"
    )
