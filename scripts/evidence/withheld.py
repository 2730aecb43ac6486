"""One adapter for all domains, withheld from those of which it has learned nothing yet: computed, not run.

The default leaves a domain without a version, and with fewer than `TAUGHT` records, to the draft base alone.
An adapter for all domains can be withheld so as well, by a router. What it learns does not depend on whom it
serves, so the runs without that tell what it would have served: until then static's guesses, later its own.
Only its gate, where it has one, would have judged such a domain's records otherwise, of which there are none
or hardly any then.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from evidence.arrangements import ONE_WIDE, ONE_WIDE_GATED, STATIC
from evidence.figures import Found, Runs
from moedraft.core import SHARED
from moedraft.distill.judging.judge import TAUGHT

RIVALS = (ONE_WIDE, ONE_WIDE_GATED)


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
    before = still["curve"][0]["counts"]  # the static draft's never change
    curve = []
    for point in run["curve"]:
        done = int(point["requests"])
        learned = Counter(routed[: done if done == len(routed) else done // every * every])
        pairs = zip(owners, before, point["counts"], strict=True)
        curve.append(point | {"counts": [own if _taught(learned, who) else base for who, base, own in pairs]})
    stream = [
        own if _taught(Counter(routed[: i // every * every]), routed[i]) else still["stream"][i]
        for i, own in enumerate(run["stream"])
    ]
    return {**run, "curve": curve, "stream": stream}


def _taught(learned: Counter[str], domain: str) -> bool:
    """Whether adapters draft for this domain, of which so many requests were learned from."""
    return domain == SHARED or learned[domain] >= TAUGHT
