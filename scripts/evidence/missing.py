"""What there are no runs of, so that nobody takes silence for a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evidence.arrangements import ARRANGEMENTS, FURTHER, OF_WITHHELD, SERVED, STATIC, TABLED, TAUGHT
from evidence.streams import ONLY, ORDERS, POISONED, title_of
from evidence.words import listed

Whole = dict[str, Any]
ENOUGH_SEEDS = 5  # with which a row is sure for more than these seeds
NO_LEARNERS = (
    "*No draft* and *lookup* in the text are no arrangements here, since neither learns. What they reach is "
    "in [benchmarks](benchmarks.md#experts-on-a-real-model)."
)
WITH_GATE = (
    "Arrangements that others stand for publish every update, as these systems do. Those that learn "
    "online were run with the gate as well where a row says so, with one update for each window, and one "
    "wide adapter with further ones. Where one adapter was not run withheld from domains of which nothing "
    "was learned yet, [what it would give](evidence-served.md#what-decides-who-the-default-is) is computed. "
    "One adapter on the latest window, separate experts, and shared and experts in turns were not run with "
    "the gate and one update for each window; in the form that serves they were, with [some of the "
    "traffic](evidence-served.md#with-further-updates)."
)
SHARED_ALONE = (
    "*Shared alone* is no arrangement of its own: without experts, joint learning is one adapter on mixed "
    "replay, which stands here with the rank of both."
)
TIMES = (
    "Requests have an order here and no times, and nothing ran on a GPU. Learning beside traffic under load "
    "is in [benchmarks](benchmarks.md#what-learning-costs-those-who-are-served), with bursts that are drawn, "
    "not recorded."
)


def part(whole: Whole) -> str:
    """The section."""
    lines = [
        *never(whole),
        *holes(whole),
        *poisoned(whole),
        *more_seeds(whole),
        served(whole),
        NO_LEARNERS,
        WITH_GATE,
        SHARED_ALONE,
        TIMES,
        *paper(whole),
    ]
    return "## What is not measured here\n\n" + "\n".join(f"- {line}" for line in lines)


def never(whole: Whole) -> list[str]:
    """Patterns, and arrangements that were run on none."""
    traffic = [title_of(name) for name in ORDERS if name not in whole["patterns"]]
    every = {name for of in whole["patterns"].values() for name in of}
    learners = [ARRANGEMENTS[name].title for name in (*TABLED, *FURTHER) if name not in every | {SERVED}]
    said = (("patterns of traffic", traffic), ("arrangements", learners))
    return [f"Of the {what}: {'; '.join(names)}." for what, names in said if names]


def holes(whole: Whole) -> list[str]:
    """Arrangements that were run with some of the traffic here, but not with all of it."""
    run = [name for name in ORDERS if name in whole["patterns"] and name not in POISONED]
    titles: dict[str, list[str]] = {}  # by where they were run
    for name in dict.fromkeys((*TABLED, *FURTHER, *OF_WITHHELD)):
        there = [pattern for pattern in run if name in whole["patterns"][pattern]]
        if name != SERVED and 0 < len(there) < len(run):  # of that one see `served`
            titles.setdefault(_where(there, run), []).append(ARRANGEMENTS[name].title)
    said = [f"{'; '.join(names)} (with {where})" for where, names in titles.items()]
    return [f"Run with some of the traffic only: {'; '.join(said)}."] if said else []


def _where(there: Sequence[str], run: Sequence[str]) -> str:
    """The patterns of traffic that are there, or those that lack, whichever is shorter."""
    lacking = [pattern for pattern in run if pattern not in there]
    if len(lacking) < len(there):
        return f"all but {listed(map(title_of, lacking))}"
    return listed(map(title_of, there))


def poisoned(whole: Whole) -> list[str]:
    """What was run with a client that sends rubbish, since that is less than with other traffic."""
    found = [of for name in POISONED if (of := whole["patterns"].get(name))]
    names = [name for name in ARRANGEMENTS if name != STATIC and any(name in of for of in found)]
    titles = "; ".join(ARRANGEMENTS[name].title for name in names)
    return (
        [f"With a client that sends rubbish, nothing was run but the static draft and {titles}."]
        if names
        else []
    )


def more_seeds(whole: Whole) -> list[str]:
    """What it would take to run each of these arrangements with ENOUGH_SEEDS seeds."""
    few = [one for of in whole["patterns"].values() for one in of.values() if one["seeds"] < ENOUGH_SEEDS]
    hours = sum(one["seconds"] * (ENOUGH_SEEDS - one["seeds"]) for one in few) / 3600
    if hours < 1:
        return []
    return [
        f"Rows of fewer than {ENOUGH_SEEDS} seeds: for all of these to have as many would take some "
        f"{hours:.0f} hours of one core, at the times that their runs took."
    ]


def served(whole: Whole) -> str:
    """Where the default was not run with further updates."""
    title = ARRANGEMENTS[SERVED].title
    done, alone = (
        [name for name in names if SERVED in whole["patterns"].get(name, {})]
        for names in (ORDERS, sorted(name for name in whole["patterns"] if name.startswith(ONLY)))
    )
    if not done and whole["settings"].get("target") == "mini":
        return "Further updates: the default of an independent draft model makes none."
    if not done:
        but = f"on no traffic of several domains, only with {listed(map(title_of, alone))}"
        return f"The default with further updates ({title}): {but if alone else 'on no traffic at all'}."
    there = [name for name in ORDERS if name not in done and name in whole["patterns"]]
    without = f"It was not run with {listed(map(title_of, there))}." if there else ""
    return f"The default with further updates ({title}) was run with {listed(map(title_of, done))}. {without}"


def _told(whole: Whole) -> dict[str, list[Whole]]:
    """By data set that was run alone, the runs that tell which tokens are guessed right."""
    alone = {name: of for name, of in whole["patterns"].items() if name.startswith(ONLY)}
    return {title_of(name): [one for one in of.values() if one.get("told")] for name, of in alone.items()}


def paper(whole: Whole) -> list[str]:
    """Of the paper's experiments."""
    steady = whole["patterns"].get("steady", {})
    every = [one for of in whole["patterns"].values() for one in of.values()]
    nine = [name for row in TAUGHT.values() for name in row.values()]
    parts = {
        "single data sets": any(pattern.startswith(ONLY) for pattern in whole["patterns"]),
        "its fourth data set, general questions": f"{ONLY}general_en" in whole["patterns"],
        "each objective with each kind of answers, which takes an independent draft": all(
            name in steady for name in nine
        ),
        "which tokens are guessed right": any(one.get("told") for one in every),
        **{f"which tokens are guessed right with {name}": bool(told) for name, told in _told(whole).items()},
        **{
            f"the default with {title_of(name)}": SERVED in of
            for name, of in whole["patterns"].items()
            if name.startswith(ONLY)
        },
    }
    lacking = [what for what, done in parts.items() if not done]
    return [f"Of the paper's experiments: {'; '.join(lacking)}."] if lacking else []
