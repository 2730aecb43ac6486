"""Makes the tables of experts on a real model, of the files that `bench_experts.py` and others write.

Where several seeds were measured, a figure is the mean of the seeds' estimates, and its interval goes from
the mean of their lower ends to the mean of their upper ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from evidence.arrangements import ARRANGEMENTS
from evidence.streams import title_of
from markdown_tables import table

from moedraft.showcase.findings.estimates import change, ratio

SINGLE, JOINT = "mixed-replay:wide", "joint:wide"  # arrangements of scripts/bench_records.py
FULL = "1.0"  # the factor of adapters that are as they were learned
WAYS = {
    "plain": "nobody (plain decoding)",
    "static": "the drafter as it is shipped",
    "experts": "the drafter with experts",
    "one adapter": "the drafter with one adapter as large, for all domains",
    "lookup": "lookup in the text alone",
    "lookup in answers": "lookup in the text and in earlier answers",
    "static + lookup in answers": "both lookups, and the drafter as it is shipped",
    "experts + lookup": "lookup in the text, and experts",
    "one adapter + lookup": "lookup in the text, and one adapter",
    "experts + lookup in answers": "both lookups, and experts, as a server has it",
    "one adapter + lookup in answers": "both lookups, and one adapter",
}


def mean(found: dict[str, Any], *path: str) -> list[float] | None:
    """[estimate, low, high] at this place of every seed, averaged; None where it was not measured."""
    parts = []
    for seed in found["seeds"]:
        for name in path:
            seed = seed.get(name, {})
        parts.append(seed)
    if not all(parts):
        return None
    return [sum(part[i] for part in parts) / len(parts) for i in range(3)]


def shown(figure: list[float] | None, digits: int = 2) -> str:
    """The estimate, with its interval where it has one."""
    if figure is None:
        return ""
    value, low, high = (f"{each:.{digits}f}" for each in figure)
    return value if low == high else f"{value} ({low}–{high})"


def summary(found: dict[str, Any]) -> str:
    """What each way of drafting brings on all prompts together."""
    rows = []
    for name, words in WAYS.items():
        rows.append(
            [
                words,
                shown(mean(found, "all", name, "tokens_per_step")),
                shown(mean(found, "all", "first_step", name)),
                shown(mean(found, "all", name, "times_plain")),
                _in_batches(found, name) or "not measured",
            ]
        )
    head = [
        "who guesses",
        "tokens per target step",
        "first guess right",
        "batch 1, × plain",
        "batch 8, × plain",
    ]
    return f"{table(head, rows)}\n\n{note(found)}"


def note(found: dict[str, Any]) -> str:
    """On what it was measured; what was said by hand of the runs comes first."""
    seeds = found["seeds"]
    learned, prompts = seeds[0]["learning"], seeds[0]["prompts"]
    domains = len(seeds[0]["by_domain"])
    same = "all answers equal" if all(seed["same_answers"] for seed in seeds) else "NOT all answers equal"
    count = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    said = f"{found['note']} " if "note" in found else ""
    other = seeds[0].get("learning of one adapter", learned)["updates"]
    updates = f"{learned['updates']} updates" + (
        f" ({other} of the one adapter)" if other != learned["updates"] else ""
    )
    return (
        f"{said}SmolLM2-135M-Instruct on {seeds[0]['threads']} threads of a shared machine, {prompts} "
        f"held-out prompts of {domains} domains that the shipped drafter had not read, after "
        f"{learned['requests']} requests and {updates}; {count}, {found['date']}, "
        f"{same} token for token. Intervals are 95 %, over the prompts, at batch 1; batch 8 is queues of "
        f"these prompts, {_timed(found)}. The true domain "
        "of each prompt is given, so routing and the comparing of experts, both on by default, are not in "
        "these figures."
    )


def _timed(found: dict[str, Any]) -> str:
    """How often queues were answered."""
    rounds = int(found["settings"]["queue_rounds"])
    if rounds == 1:
        return "each answered once, which is too few timings for an interval"
    return f"each answered {rounds} times, and its interval is over these timings"


def _in_batches(found: dict[str, Any], name: str) -> str:
    """Times plain decoding; without an interval where each queue was answered only once."""
    figure = mean(found, "batch", name, "times_plain")
    if figure is not None and found["settings"]["queue_rounds"] == "1":
        figure = [figure[0]] * 3
    return shown(figure)


def by_domain(found: dict[str, Any]) -> str:
    """Each domain before and after."""
    rows = []
    for domain in ("all", *found["seeds"][0]["by_domain"]):
        path = ("all",) if domain == "all" else ("by_domain", domain)
        rows.append(
            [
                domain,
                shown(mean(found, *path, "first_step", "static")),
                shown(mean(found, *path, "first_step", "experts")),
                signed(mean(found, *path, "first_step", "gain")),
                shown(mean(found, *path, "experts / static", "tokens_per_step")),
                shown(mean(found, *path, "static", "times_plain")),
                shown(mean(found, *path, "experts", "times_plain")),
                shown(mean(found, *path, "experts / one adapter", "tokens_per_second")),
                shown(mean(found, *path, "lookup in answers", "times_plain")),
                shown(mean(found, *path, "experts + lookup in answers", "times_plain")),
            ]
        )
    head = [
        "domain",
        "first guess right, static",
        "with experts",
        "gain",
        "tokens per step, × static",
        "static, × plain",
        "experts, × plain",
        "experts, × one adapter",
        "both lookups, × plain",
        "both lookups and experts, × plain",
    ]
    return f"{table(head, rows)}\n\n{note(found)} {costs(found)}"


def costs(found: dict[str, Any]) -> str:
    """What drafting and checking cost at batch 1, by themselves and in whole rounds."""
    ms = {
        name: sum(seed["step_ms"][name] for seed in found["seeds"]) for name in found["seeds"][0]["step_ms"]
    }
    draft, five = (ms[f"{name}_ms"] / ms["target_ms"] for name in ("draft", "verify5"))
    own = ""
    if "draft_own_list_ms" in ms:
        own = f", {ms['draft_own_list_ms'] / ms['target_ms']:.3f} with an expert's own"
    tokens, times = (mean(found, "all", "experts", what) for what in ("tokens_per_step", "times_plain"))
    assert tokens is not None
    assert times is not None
    return (
        f"At batch 1 a draft step costs {draft:.3f} target steps by itself with the shared list of tokens"
        f"{own}; checking five tokens costs {five:.2f}; a round of the experts takes"
        f" {tokens[0] / times[0]:.2f} plain ones, drafting included."
    )


def signed(figure: list[float] | None) -> str:
    """As `shown`, with signs and three digits."""
    return "" if figure is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*figure)


def own_tokens(found: dict[str, Any]) -> str:
    """By domain: what its own list of tokens covers and brings beside the draft base's, and their costs."""
    own, generic, static = found["joint"], found["generic"], found["static"]
    rows = []
    for domain in found["own_coverage"]:
        covered = f"{found['coverage'][domain]:.2f} → {found['own_coverage'][domain]:.2f}"
        firsts = [f"{one[domain]['first_step']:.3f}" for one in (static, generic, own)]
        tokens = [f"{one[domain]['tokens_per_step'][2]:.2f}" for one in (static, generic, own)]
        time = f"{found['product_ms']['generic']:.2f} → {found['product_ms'][domain]:.2f}"
        rows.append([domain, covered, *firsts, *tokens, time])
    settings = found["settings"]
    head = ["domain", "tokens covered", "first guess: no experts", "generic list", "own list"]
    head += ["tokens per step: no experts", "generic list", "own list", "output product, ms"]
    note = (
        f"Experts of rank {settings['rank']} that learned jointly from {settings['requests']} requests of "
        f"each domain in {settings['updates']} updates, once with the draft base's list of tokens and once "
        f"with {int(settings['own']):,} of each domain's own; {settings['heldout']} held-out prompts a "
        "domain, one seed. Covered: the share of the held-out answers' tokens that are in the base's list, "
        "and in the domain's own. Tokens per step at three drafted tokens. The product is that of one row "
        f"with the output rows of each list, {settings['threads']} thread(s), float32, in turns; a draft "
        "step is that and the layer."
    )
    return f"{table(head, rows)}\n\n{note}"


def mixtures(found: dict[str, Any]) -> str:
    """First guesses by way of guessing and traffic, means over the seeds."""
    patterns = [name for name, runs in found.items() if isinstance(runs, list)]
    rows = []
    for way in found[patterns[0]][0]:
        shares = [sum(run[way] for run in found[name]) / len(found[name]) for name in patterns]
        rows.append([way, *(f"{share:.3f}".removeprefix("0") for share in shares)])
    seeds = ", ".join(f"{name} {len(found[name])}" for name in patterns)
    note = f"{found['requests']} requests; seeds: {seeds}; {found['date']}."
    return table(["first guesses", *patterns], rows) + f"\n\n{note}"


def strength(found: dict[str, Any]) -> str:
    """First guesses of adapters at full strength, and how many more there are when they are weaker."""
    groups: dict[tuple[str, str, int, str], list[dict[str, list[list[int]]]]] = {}
    for run in found["runs"]:
        title = ARRANGEMENTS[run["arrangement"]].title
        key = f"{run['target']}, {run['dtype']}", title, run["requests"], title_of(run["pattern"])
        groups.setdefault(key, []).append(run["counts"])
    factors = [factor for factor in found["runs"][0]["counts"] if factor != FULL]
    rows = []
    for (target, title, requests, pattern), runs in sorted(groups.items()):
        full = _pairs(runs, FULL)
        level = sum(right for right, _ in full) / sum(tried for _, tried in full)
        more = [change(full, _pairs(runs, factor)).difference for factor in factors]
        signs = [f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})" for one in more]
        rows.append([target, title, f"{requests}", pattern, f"{len(runs)}", f"{level:.3f}", *signs])
    head = ["target", "arrangement", "requests", "traffic", "seeds", "first guesses at full strength"]
    head += [f"more, × {one}" for one in factors]
    prompts = len(found["runs"][0]["counts"][FULL])
    note = f"{prompts} held-out prompts; {found['date']}. Intervals are 95 %, paired, over the prompts."
    return f"{table(head, rows)}\n\n{note}"


def _pairs(runs: list[dict[str, list[list[int]]]], factor: str) -> list[tuple[float, float]]:
    """By prompt: first guesses that are right, and tried ones, added up over the runs."""
    rows = np.array([run[factor] for run in runs]).sum(0)
    return [(float(row[1]), float(row[0])) for row in rows]


def records(found: dict[str, Any]) -> str:
    """By requests and steps, what one adapter guesses and what shared adapter and experts have more."""
    alike = ("target", "dtype", "domains", "strength", "own_tokens", "steps")
    settings = {str([run[key] for key in alike]) for run in found["runs"]}
    assert len(settings) == 1, "runs of several settings are not comparable"
    arms: dict[tuple[int, str], dict[int, Any]] = {}
    for run in found["runs"]:
        arms.setdefault((run["requests"], run["arrangement"]), {})[run["seed"]] = run["counts"]
    rows = []
    for requests in sorted({number for number, _ in arms}):
        ones, joint = (arms.get((requests, name), {}) for name in (SINGLE, JOINT))
        seeds = sorted(ones.keys() & joint.keys())
        for steps in joint[seeds[0]] if seeds else ():
            single = _added([ones[seed] for seed in seeds], steps, "own")
            more = [_added([joint[seed] for seed in seeds], steps, by) for by in ("same", "own")]
            level = [f"{ratio(_first(single)).value:.3f}", f"{1 + ratio(_further(single)).value:.3f}"]
            changes = [change(of(single), of(one)).difference for one in more for of in (_first, _further)]
            signs = [f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})" for one in changes]
            rows.append([f"{requests}", f"{len(seeds)}", steps, *level, *signs])
    head = ["requests", "seeds", "steps", "one adapter: first guesses", "tokens per step"]
    head += ["experts from all tokens: first guesses", "tokens per step"]
    head += ["experts as they serve: first guesses", "tokens per step"]
    run = found["runs"][0]
    prompts = len(next(iter(run["counts"].values()))["own"])
    note = (
        f"{run['target']}, {run['dtype']}, {run['domains'].replace(',', ', ')}; {prompts} held-out prompts; "
        f"{found['date']}. Intervals are 95 %, paired, over the prompts. Tokens per step: with a draft of "
        "three tokens begun at every place of an answer."
    )
    return f"{table(head, rows)}\n\n{note}"


def _added(runs: list[Any], steps: str, by: str) -> np.ndarray:
    """Added up over the runs, by prompt: first guesses tried, and drafts with a right token 1, 2 and 3."""
    total: np.ndarray = np.array([run[steps][by] for run in runs]).sum(0)
    return total


def _first(rows: np.ndarray) -> list[tuple[float, float]]:
    """By prompt, first guesses that are right, and tried ones."""
    return [(float(row[1]), float(row[0])) for row in rows]


def _further(rows: np.ndarray) -> list[tuple[float, float]]:
    """By prompt, the tokens that drafts add to those of the steps, and steps."""
    return [(float(row[1:].sum()), float(row[0])) for row in rows]


COUNTED = {"came": "tokens that came", "possible": "tokens that the target held possible, too"}


def lists(found: dict[str, Any]) -> str:
    """By what counts for a list, and its length, which share of held-out answers' tokens it holds."""
    rows = []
    for counts, words in COUNTED.items():
        for size in sorted({run["size"] for run in found["runs"]}):
            runs = [run for run in found["runs"] if (run["counts"], run["size"]) == (counts, size)]
            held = {
                domain: np.sum([run["domains"][domain] for run in runs], 0) for domain in runs[0]["domains"]
            }
            held["all"] = np.sum([*held.values()], 0)
            shared = round(np.mean([run["lengths"]["shared"] for run in runs]))
            every = [f"{own / tokens:.3f}" for tokens, own, _ in held.values()]
            rows.append([words, f"{size}", *every, f"{held['all'][2] / held['all'][0]:.3f} of {shared}"])
    head = ["what counts", "tokens of a list", *held, "all, the shared adapter's list"]
    note = (
        f"{found['target']}, {found['requests']} requests of a steady mix; {found['date']}. Share of the "
        "tokens of held-out answers, which no list was chosen by. Here all records that came until then "
        "choose a list; a trainer reads some of them in each update, and none that are held out."
    )
    return f"{table(head, rows)}\n\n{note}"
