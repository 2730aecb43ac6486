"""Makes the tables of sampled answers, of the file that `bench_sampled.py` writes."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS, JOINT, STATIC
from expert_tables import WAYS, mean, shown
from markdown_tables import table

from moedraft.distill.joint.plan import JointPlan
from moedraft.showcase.findings.estimates import change

LIKE = {"mixed-replay": JOINT, "mixed-replay:jsd": "joint:jsd"}  # one adapter, and experts that learn so
BESIDE = {
    "experts / static": "experts, × the drafter as it is shipped",
    "experts / lookup in answers": "experts alone, × both lookups",
    "experts + lookup in answers / lookup in answers": "both lookups and experts, × both lookups",
    "experts + lookup in answers / static + lookup in answers": "the same, × lookups and shipped drafter",
    "experts / one adapter": "experts alone, × one adapter alone",
    "experts + lookup in answers / one adapter + lookup in answers": "with both lookups each",
}


def sampled(found: dict[str, Any]) -> str:
    """What each way of drafting brings at each temperature."""
    temperatures = list(found["seeds"][0]["temperatures"])
    names = list(found["seeds"][0]["temperatures"][temperatures[0]]["batch"])
    rows = []
    for name in names:
        row = [WAYS[name]]
        for temperature in temperatures:
            path = ("temperatures", temperature)
            row += [
                shown(mean(found, *path, "all", name, "tokens_per_step")),
                shown(mean(found, *path, "all", name, "times_plain")),
                shown(mean(found, *path, "batch", name)),
            ]
        rows.append(row)
    head = ["who guesses"]
    for temperature in temperatures:
        said = f"temperature {temperature}"
        head += [f"{said}: tokens per target step", "batch 1, × plain", "batch 8, × plain"]
    return f"{table(head, rows)}\n\n{note(found)}"


def note(found: dict[str, Any]) -> str:
    """On what it was measured."""
    seed, settings = found["seeds"][0], found["settings"]
    prompts = next(iter(seed["temperatures"].values()))["prompts"]
    seeds = "one seed" if len(found["seeds"]) == 1 else f"{len(found['seeds'])} seeds"
    domains, most = len(settings["domains"].split(",")), settings["max_tokens"]
    learned, drawn = seed["learning"], float(settings["learned_at"])
    other = seed.get("learning of one adapter")
    queues = "one timing" if int(settings["queue_rounds"]) == 1 else f"{settings['queue_rounds']} timings"
    rounds = int(settings.get("rounds", 1))
    again = f" Each prompt was answered {rounds} times alone." if rounds > 1 else ""
    beside = (
        f" One adapter learned from a stream of the same prompts whose answers were drawn anew, in "
        f"{other['updates']} updates."
        if other
        else ""
    )
    return (
        f"SmolLM2-135M-Instruct on {seed['threads']} threads of a shared machine, {prompts} held-out prompts "
        f"of {domains} domains that the shipped drafter had not read, answers of at most {most} tokens, "
        f"after {learned['requests']} requests sampled at temperature {drawn:g} and {learned['updates']} "
        f"updates; {seeds}, {found['date']}.{beside}{again} Intervals are 95 %, over the prompts, at batch "
        f"1; at batch 8 over {queues} of a queue, which say little."
    )


def beside(found: dict[str, Any]) -> str:
    """Speed of one way against another at each temperature, and the drafter's acceptance."""
    temperatures = list(found["seeds"][0]["temperatures"])
    rows = []
    for key, words in BESIDE.items():
        rows.append([words, *(shown(mean(found, "temperatures", t, "all", key)) for t in temperatures)])
    for key, words in {
        "static": "first drafted token accepted, as shipped",
        "experts": "with experts",
        "one adapter": "with one adapter",
        "more than one adapter": "experts more than one adapter",
    }.items():
        rows.append(
            [
                words,
                *(shown(mean(found, "temperatures", t, "all", "acceptance", key), 3) for t in temperatures),
            ]
        )
    for domain in found["seeds"][0]["temperatures"][temperatures[0]]["by_domain"]:
        places = [("temperatures", temperature, "by_domain", domain) for temperature in temperatures]
        rows.append([f"{domain}, as shipped → with experts", *(_moved(found, place) for place in places)])
    return table(["", *(f"temperature {t}" for t in temperatures)], [row for row in rows if any(row[1:])])


def _moved(found: dict[str, Any], place: tuple[str, ...]) -> str:
    """`0.37 → 0.41 (+0.02 to +0.06)`: the acceptance of a domain's drafts, and the interval of the gain."""
    before, after, gain = (mean(found, *place, key) for key in ("static", "experts", "gain"))
    if not before or not after:
        return ""
    sure = f" ({gain[1]:+.2f} to {gain[2]:+.2f})" if gain else ""
    return f"{before[0]:.2f} → {after[0]:.2f}{sure}"


def updates(found: dict[str, Any]) -> str:
    """Each joint update that is still known against the one before it, counted in both ways."""
    rows = []
    ways = found["ways"]
    for number in range(len(ways["sampled"]["updates"])):
        row = [str(number + 1)]
        for way in ("sampled", "as greedy"):
            one = ways[way]["updates"][number]
            row += [f"{one['gain']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})", f"{one['better']:.2f}"]
        rows.append(row)
    head = [
        "update",
        "gain, tokens per step",
        "probability of a gain",
        "gain by the token that was drawn",
        "probability of a gain",
    ]
    return f"{table(head, rows)}\n\n{found['records']} held-out records, {found['date']}; 80 % intervals."


def factors(found: dict[str, Any]) -> str:
    """First guesses accepted where what the published adapters add is multiplied by factors."""
    ways = found["ways"]
    names = list(ways["sampled"]["factors"])
    rows = []
    for way, words in {"sampled": "drawn guesses accepted", "as greedy": "likeliest guess was drawn"}.items():
        figures = [ways[way]["static"], *(ways[way]["factors"][name] for name in names)]
        rows.append([words, *(f"{figure:.3f}" for figure in figures)])
    return table(["", "none (as shipped)", *(f"× {name}" for name in names)], rows)


def objectives(found: dict[str, Any]) -> str:
    """How likely a first drafted token is accepted, by what adapters learned by, and tokens per step."""
    published = str(JointPlan.strength)
    counts = {run["arrangement"]: run["counts"][published] for run in found["runs"]}
    rows = []
    for name in sorted(counts, key=lambda name: (name != STATIC, name != JOINT)):
        mine = counts[name]
        tried, first = (sum(row[i] for row in mine) for i in (0, 1))
        length = 1 + sum(sum(row[1:]) for row in mine) / tried
        row = [ARRANGEMENTS[name].title, f"{first / tried:.3f}", f"{length:.3f}"]
        for of in (_first, _all):
            one = change([of(r) for r in counts[JOINT]], [of(r) for r in mine]).difference
            row.append("—" if name == JOINT else f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})")
        rows.append(row)
    head = ["arrangement", "first drafted token accepted", "tokens per step", "accepted, beside joint by fkl"]
    head.append("tokens per step, beside it")
    one = found["runs"][0]
    note = (
        f"{len(one['counts'][published])} held-out prompts, answers sampled at temperature "
        f"{one['temperature']:g}, {one['requests']} requests, one seed, {found['date']}. Drafts of three "
        "tokens, and no gate. Intervals are 95 %, paired, over the prompts."
    )
    return f"{table(head, rows)}\n\n{note}"


def _first(row: list[float]) -> tuple[float, float]:
    """First drafted tokens of a prompt that are accepted, and drafted."""
    return row[1], row[0]


def _all(row: list[float]) -> tuple[float, float]:
    """Tokens of drafts that are accepted, and drafts."""
    return sum(row[1:]), row[0]


def over_all(found: dict[str, Any]) -> str:
    """How likely a first drafted token is accepted, over all tokens of the target's distribution."""
    runs = {(run["arrangement"], run["resampled"], run["seed"]): run["rows"] for run in found["runs"]}
    rows = []
    for (name, further, seed), mine in runs.items():
        base, alike = runs.get((JOINT, 0, seed)), runs.get((LIKE.get(name, ""), further, seed))
        tokens = sum(row[0] for row in mine)
        kept = sum(row[2][0] for row in mine) / tokens
        row = [ARRANGEMENTS[name].title, str(further), str(seed)]
        row += [f"{sum(row[1] for row in mine) / tokens:.3f}", f"{kept:.3f}"]
        rows.append([*row, _more(base, mine), _more(mine, alike)])
    head = ["arrangement", "further answers", "seed", "first drafted token accepted", "by kept tokens alone"]
    head += ["accepted, beside joint by fkl", "what experts have more, that learned alike"]
    one = found["runs"][0]
    note = (
        f"{len(one['rows'])} held-out prompts, answers sampled at temperature {one['temperature']:g}, "
        f"{one['requests']} requests, {found['date']}. Adapters as they are published; no gate unless it is "
        "named. Intervals are 95 %, paired, over the prompts."
    )
    return f"{table(head, rows)}\n\n{note}"


def _more(before: list[Any] | None, after: list[Any] | None) -> str:
    """How much more is accepted, by rows [tokens, accepted, ...] of the same prompts."""
    if before is None or after is None or before is after:
        return "—"
    one = change([(r[1], r[0]) for r in before], [(r[1], r[0]) for r in after]).difference
    return f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
