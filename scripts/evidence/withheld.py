"""One adapter for all domains, withheld from those of which it has learned nothing yet: computed, not run.

The default leaves a domain to the draft base alone until a version was published when the domain had `TAUGHT`
records. An adapter for all domains can be withheld so as well, by a router. What it learns does not depend on
whom it serves, so the runs without that tell what it would have served: until then what it guessed before any
update, which is the draft base, later its own. Two things are not known: what its gate, where it has one,
would have said of such a domain's first records, and to whom the router would have sent held-out prompts.
These are told by their true domain; a router takes one of some hundred for another.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from evidence.arrangements import ONE_WIDE, ONE_WIDE_GATED, STATIC
from evidence.figures import Found, Runs
from moedraft.core import SHARED
from moedraft.distill.judging.judge import TAUGHT

RIVALS = (ONE_WIDE, ONE_WIDE_GATED)
SERVES = ("publish", "promote", "along")  # decisions on the shared adapter after which a version serves


def runs_of(runs: Runs) -> Runs:
    """All runs; those of the rivals as if they were withheld so. Without a static run they are left out."""
    found: list[Found] = []
    for (pattern, name), by_seed in runs.by_name.items():
        for seed, run in by_seed.items():
            if name not in RIVALS:
                found.append(run)
            elif still := runs.by_name.get((pattern, STATIC), {}).get(seed):
                found.append(_withheld(run, still))
    return Runs(found)


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
