"""Which arrangements are run on which traffic, by part of the whole."""

from __future__ import annotations

from evidence.arrangements import (
    BOUNDS,
    EQUAL_COST,
    GATED,
    JOINT,
    LATEST,
    LEAN,
    MAIN,
    ONE_ADAPTER,
    ONE_WIDE,
    ONE_WIDE_GATED,
    ONLINE_GATED,
    OTHER_WIDE,
    RESTARTED,
    RESUMED,
    SERVED,
    SERVED_EQUAL_COST,
    STATIC,
    TAUGHT,
    WITHHELD,
    WITHHELD_GATED,
)
from evidence.arrangements import FURTHER as MORE
from evidence.streams import FAMILIAR, ONLY, ORDERS, POISONED

QUICK = {"requests": 128, "heldout": 12, "seeds": 1, "resampled": 0}  # further answers take as long again
PAPER = ("sql_en", "math_en", "code_python", "general_en")  # its Spider, GSM8K, CodeSearchNet and Alpaca
OBJECTIVES = (JOINT, "joint:rkl", "joint:jsd", "joint:tvd", "joint:missed")
DATA = (STATIC, *(name for row in TAUGHT.values() for name in row.values()))
INTERVALS = (JOINT, "joint:half", "joint:double")
FURTHER = (STATIC, *MORE)
FURTHER_EQUAL_COST = (STATIC, ONE_WIDE, SERVED, SERVED_EQUAL_COST)
AS_SERVED = (STATIC, ONE_WIDE, ONE_WIDE_GATED, SERVED)
OWN = [pattern for pattern in ORDERS if pattern not in POISONED]
USUAL = [pattern for pattern in OWN if pattern != FAMILIAR]
FURTHER_ON = ("steady", "reworded", "drift", "new-domain")
ONE = (STATIC, LATEST, "one-offline", "one-both", SERVED)
Job = tuple[str, str]  # pattern, arrangement
PARTS: dict[str, list[Job]] = {
    "quick": [(p, a) for p in ("steady", "one-by-one") for a in (STATIC, ONE_WIDE, SERVED)],
    "main": [(pattern, name) for pattern in USUAL for name in MAIN],
    "served": [
        *((pattern, name) for pattern in OWN for name in AS_SERVED),
        *(("new-domain", name) for name in BOUNDS),
    ],
    "gated": [(pattern, name) for pattern in USUAL for name in (STATIC, *ONLINE_GATED, GATED)],
    "withheld": [
        (pattern, name)
        for pattern in ORDERS
        for name in (STATIC, WITHHELD, WITHHELD_GATED, *OTHER_WIDE, SERVED)
    ],
    "poison": [(pattern, name) for pattern in POISONED for name in (STATIC, JOINT, GATED, ONE_WIDE, SERVED)],
    "objectives": [("steady", n) for n in (STATIC, *OBJECTIVES, "mixed-replay:jsd", "joint+gate:jsd")],
    "interval": [("steady", name) for name in (STATIC, *INTERVALS)],
    "lean": [("steady", name) for name in (STATIC, JOINT, *LEAN)],
    "data": [("steady", name) for name in DATA],
    "paper": [(ONLY + domain, name) for domain in PAPER for name in ONE],
    "further": [(pattern, name) for pattern in USUAL for name in FURTHER],
    "restart": [("crossed", name) for name in (STATIC, JOINT, RESTARTED, RESUMED)],
    "equal-cost": [
        *(("steady", name) for name in (STATIC, ONE_ADAPTER, JOINT, EQUAL_COST)),
        *((pattern, name) for pattern in FURTHER_ON for name in FURTHER_EQUAL_COST),
    ],
    "gate": [(p, a) for p in ("steady", "drift", "one-by-one") for a in (GATED, "joint+gate-once")],
}
