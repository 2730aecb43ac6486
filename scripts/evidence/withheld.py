"""One adapter for all domains, withheld from those of which it has learned nothing yet: computed, or as run.

The default leaves a domain to the draft base alone until a version was published when the domain had `TAUGHT`
records. An adapter for all domains can be withheld so as well, by a router. What it learns does not depend on
whom it serves, so the runs without that tell what it would have served: until then what it guessed before any
update, which is the draft base, later its own. Two things are not known so: what its gate, where it has one,
would have said of domains that can be left to the base, and to whom the router would have sent held-out
prompts. These are told by their true domain; a router takes one of some hundred for another. Where it was
run (`WITHHELD`, `WITHHELD_GATED`), the run counts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from evidence.arrangements import OF_WITHHELD, STATIC
from evidence.figures import Found, Runs
from moedraft.core import SHARED
from moedraft.distill.judging.judge import TAUGHT

RIVALS = tuple(OF_WITHHELD.values())
SERVES = ("publish", "promote", "along")  # decisions on the shared adapter after which a version serves


def runs_of(runs: Runs) -> Runs:
    """All runs; in the place of each rival's, as they are named, those where it is withheld so.

    Without a static run, and without one of its own, a rival's run is left out.
    """
    found: list[Found] = []
    done = {
        (pattern, OF_WITHHELD[name], seed)
        for (pattern, name), by_seed in runs.by_name.items()
        for seed in by_seed
        if name in OF_WITHHELD
    }
    for (pattern, name), by_seed in runs.by_name.items():
        for seed, run in by_seed.items():
            if name in OF_WITHHELD:
                found.append({**run, "arrangement": OF_WITHHELD[name]})
            elif name not in RIVALS:
                found.append(run)
            elif (pattern, name, seed) in done:
                continue
            elif still := runs.by_name.get((pattern, STATIC), {}).get(seed):
                found.append(_withheld(run, still))
    return Runs(found)


def how_many_run(runs: Runs, pattern: str, rival: str) -> int:
    """Of this rival's runs where it is withheld so, how many were run and not computed."""
    names = [name for name, other in OF_WITHHELD.items() if other == rival]
    return sum(len(runs.by_name.get((pattern, name), {})) for name in names)


def _withheld(run: Found, still: Found) -> dict[str, Any]:
    every, routed = int(run["settings"]["every"]), run["routed"]
    known = {*routed, *run["absent"]}  # a domain that nobody registered is in neither
    owners = [domain if domain in known else SHARED for domain in run["held_out"]]
    admitted = _admitted(run)
    before, curve = run["curve"][0]["counts"], []
    for point in run["curve"]:
        served = admitted[_windows(int(point["requests"]), every, len(routed))]
        pairs = zip(owners, before, point["counts"], strict=True)
        curve.append(point | {"counts": [own if who in served else base for who, base, own in pairs]})
    stream = [
        own if routed[i] in admitted[i // every] else still["stream"][i]
        for i, own in enumerate(run["stream"])
    ]
    return {**run, "curve": curve, "stream": stream}


def _windows(done: int, every: int, requests: int) -> int:
    """How many windows had ended, and been learned from, after so many requests; the last may be short."""
    return done // every if done < requests else -(-requests // every)


def _admitted(run: Found) -> list[set[str]]:
    """Whom the adapter serves, by the number of windows that have ended: those it was published for."""
    every, routed = int(run["settings"]["every"]), run["routed"]
    published = {u["requests"] for u in run["updates"] if u["shared"] in SERVES}
    admitted = [{SHARED}]
    for begin in range(0, len(routed), every):
        done = min(begin + every, len(routed))
        counts = Counter(routed[:done])
        more = {name for name, count in counts.items() if count >= TAUGHT} if done in published else set()
        admitted.append(admitted[-1] | more)
    return admitted
