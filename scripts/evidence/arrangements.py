"""Who learns from what: the arrangements that are compared, each a variation of moedraft's joint trainer.

All of them learn in the same steps from as many records, and as many adapter weights take part in each guess:
where one adapter stands alone it has the rank of the two that stand on each other. That one drafts every
token that some expert does, an expert those of its own list; `bench_records.py` compares them on the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.rows.drawn import Drawn


class OneTrainer(JointTrainer):
    """One adapter learns from everybody's records; the domains only even out which are drawn again."""

    labelled: Drawn

    def draw(self, *args: Any, **keywords: Any) -> Drawn:
        self.labelled = super().draw(*args, **keywords)
        parts = (self.labelled.fresh, self.labelled.replayed, self.labelled.held_out)
        return Drawn(*([replace(record, domain=SHARED) for record in part] for part in parts))

    def _choose_vocabularies(self, records: Sequence[ReplayRecord]) -> None:
        """The one adapter drafts what the experts would; see `Vocabularies.choose`."""
        super()._choose_vocabularies(self.labelled.train)


class SeparateTrainer(JointTrainer):
    """Experts without a shared adapter: that one stays as it was, zero."""

    def _learners(self, owners: Sequence[str]) -> list[str]:
        return [name for name in super()._learners(owners) if name != SHARED]


class TurnsTrainer(JointTrainer):
    """Every second update teaches the shared adapter, the others teach the experts on top of it."""

    def _learners(self, owners: Sequence[str]) -> list[str]:
        shared = self.seed % 2 == 1  # `draw` counts the updates
        return [name for name in super()._learners(owners) if (name == SHARED) == shared]


Data = Literal["target", "draft", "mixed"]


@dataclass(frozen=True)
class Arrangement:
    """One way to learn."""

    name: str
    title: str
    trainer: type[JointTrainer] | None = JointTrainer  # None: nothing learns
    experts: bool = True  # whether a domain's own expert drafts; else the shared adapter alone
    alone: bool = False  # whether one adapter stands alone, with the rank of two that stand on each other
    true_labels: bool = False  # else the classifier's
    gate: bool = False
    second_look: bool = True  # whether the gate looks again at what it kept
    beforehand: float = 0.0  # share of the requests that are known before the first one is served
    plan: Mapping[str, Any] = field(default_factory=dict)  # changes of the trainer's plan
    every: float = 1.0  # requests and steps of an update, as a multiple of the usual
    data: Data = "target"  # whose answers are learned from, see `Answers.drafted`
    shared: int = 1  # rank of the shared adapter, as a multiple of an expert's
    least: bool = False  # whether experts have a rank of 1, and the shared adapter all that is left
    further: int = 0  # updates without new requests after each window, as many as the gate sees a use in
    restarted: bool = False  # whether the trainer is started again after each update
    resumed: bool = False  # and then has what the one before it had in memory; else that is lost
    withheld: bool = False  # whether one adapter is kept from domains of which nothing was learned yet

    def ranks(self, usual: int) -> tuple[int, int]:
        """Of an expert and of the shared adapter; together the same for all. usual: of an expert."""
        shared = usual * self.shared
        if self.least:
            return 1, usual + shared - 1
        if not self.alone:
            return usual, shared
        # Among separate experts the shared adapter stays zero, as small as can be.
        return usual + shared, 1 if self.experts else usual + shared


STATIC, JOINT, GATED, LATEST = "static", "joint", "joint+gate", "latest-window"
OFFLINE, OFFLINE_WIDE = "offline", "offline:wide"
BOUNDS = (OFFLINE, OFFLINE_WIDE)  # what has learned from all requests before the first one is served
ONE_ADAPTER, ONE_GATED = "mixed-replay", "mixed-replay+gate"
RESTARTED, RESUMED = "joint:restarted", "joint:resumed"
EQUAL_COST = "joint:equal-cost"
# Steps whose operations are about those of 8 steps of one adapter, with experts' lists of 4 096 tokens; see
# `growth.at_equal_cost`.
EQUAL_STEPS = 13
SAYERS: dict[Data, str] = {"draft": "the draft's own answers", "mixed": "answers of both"}
WIDE = 4  # rank of the shared adapter, as a multiple of an expert's, where nothing else is set
ONE_WIDE, ONE_WIDE_GATED = "mixed-replay:wide", "mixed-replay+gate:wide"
WITHHELD, WITHHELD_GATED = f"{ONE_WIDE}:withheld", f"{ONE_WIDE_GATED}:withheld"
OF_WITHHELD = {
    WITHHELD: ONE_WIDE,
    WITHHELD_GATED: ONE_WIDE_GATED,
}  # the same, serving everybody
LISTS = "lists+gate:wide"  # one adapter in all but name: its domains have lists of their own
LATEST_WIDE, SEPARATE_WIDE, TURNS_WIDE = "latest-window+gate:wide", "separate+gate:wide", "turns+gate:wide"
OTHER_WIDE = (LATEST_WIDE, SEPARATE_WIDE, TURNS_WIDE, LISTS)
WIDE_RIVALS = (*OF_WITHHELD.values(), *OF_WITHHELD, *OTHER_WIDE)  # of the default
SERVED = "joint+gate:wide"  # the default; a server makes more of the further updates, see `served.fewer`
SERVED_EQUAL_COST = "joint+gate:wide:equal-cost"
_ALL = (
    Arrangement(STATIC, "static", trainer=None, experts=False),
    Arrangement(LATEST, "one adapter, latest window", OneTrainer, False, True, plan={"replayed": 0.0}),
    Arrangement(ONE_ADAPTER, "one adapter, mixed replay", OneTrainer, False, True),
    Arrangement("separate-true", "separate experts, true labels", SeparateTrainer, True, True, True),
    Arrangement("separate", "separate experts, classifier", SeparateTrainer, True, True),
    Arrangement("turns", "shared and experts in turns", TurnsTrainer),
    Arrangement(JOINT, "joint, no gate"),
    Arrangement(GATED, "joint, with gate", gate=True),
    Arrangement("joint+gate-once", "joint, gate of one look", gate=True, second_look=False),
    Arrangement(
        "latest-window+gate",
        "one adapter, latest window, with gate",
        OneTrainer,
        False,
        True,
        gate=True,
        plan={"replayed": 0.0},
    ),
    Arrangement(ONE_GATED, "one adapter, mixed replay, with gate", OneTrainer, False, True, gate=True),
    Arrangement(
        "separate+gate", "separate experts, classifier, with gate", SeparateTrainer, True, True, gate=True
    ),
    Arrangement("turns+gate", "shared and experts in turns, with gate", TurnsTrainer, gate=True),
    Arrangement(OFFLINE, "offline bound", beforehand=1.0),
    Arrangement(OFFLINE_WIDE, "offline bound, wide", shared=WIDE, beforehand=1.0),
    Arrangement("one-offline", "one adapter, offline", OneTrainer, False, True, beforehand=1.0),
    Arrangement("one-both", "one adapter, offline then online", OneTrainer, False, True, beforehand=0.5),
    *(Arrangement(f"joint:{kind}", f"joint, {kind}", plan={"kind": kind}) for kind in ("rkl", "jsd", "tvd")),
    Arrangement("mixed-replay:jsd", "one adapter, jsd", OneTrainer, False, True, plan={"kind": "jsd"}),
    Arrangement("joint+gate:jsd", "joint, with gate, jsd", gate=True, plan={"kind": "jsd"}),
    Arrangement("joint:missed", "joint, fkl, refused guesses count twice", plan={"missed": 2.0}),
    Arrangement("joint:draft-data", "joint, the draft's own answers", data="draft"),
    Arrangement("joint:mixed-data", "joint, answers of both", data="mixed"),
    *(
        Arrangement(f"joint:{kind}+{data}-data", f"joint, {kind}, {whose}", plan={"kind": kind}, data=data)
        for kind in ("rkl", "jsd")
        for data, whose in SAYERS.items()
    ),
    Arrangement(RESTARTED, "joint, no gate, restarted with nothing in memory", restarted=True),
    Arrangement(RESUMED, "joint, no gate, restarted with its file", restarted=True, resumed=True),
    Arrangement(EQUAL_COST, "joint, no gate, 13 steps where others make 8", plan={"steps": EQUAL_STEPS}),
    Arrangement("joint:1-step", "joint, no gate, 1 step where others make 8", plan={"steps": 1}),
    Arrangement("joint:2-steps", "joint, no gate, 2 steps where others make 8", plan={"steps": 2}),
    Arrangement("joint:half", "joint, updates twice as often", every=0.5),
    Arrangement("joint:double", "joint, updates half as often", every=2.0),
    Arrangement("mixed-replay:further", "one adapter, further updates", OneTrainer, False, True, further=2),
    Arrangement("joint:further", "joint, no gate, further updates", further=2),
    Arrangement("joint+gate:further", "joint, with gate, further updates", gate=True, further=2),
    Arrangement(
        ONE_WIDE,
        "one wide adapter, further updates",
        OneTrainer,
        False,
        True,
        shared=WIDE,
        further=2,
    ),
    Arrangement(
        ONE_WIDE_GATED,
        "one wide adapter, with gate, further updates",
        OneTrainer,
        False,
        True,
        gate=True,
        shared=WIDE,
        further=2,
    ),
    Arrangement("joint:wide", "joint, no gate, wide, further updates", shared=WIDE, further=2),
    Arrangement(
        LISTS,
        "one wide adapter, a list for each domain, with gate, further updates",
        gate=True,
        shared=WIDE,
        least=True,
        further=2,
    ),
    Arrangement(
        LATEST_WIDE,
        "one wide adapter, latest window, with gate, withheld from new domains, further updates",
        OneTrainer,
        False,
        True,
        gate=True,
        plan={"replayed": 0.0},
        shared=WIDE,
        further=2,
        withheld=True,
    ),
    Arrangement(
        SEPARATE_WIDE,
        "separate wide experts, with gate, further updates",
        SeparateTrainer,
        True,
        True,
        gate=True,
        shared=WIDE,
        further=2,
    ),
    Arrangement(
        TURNS_WIDE,
        "shared and experts in turns, with gate, wide, further updates",
        TurnsTrainer,
        gate=True,
        shared=WIDE,
        further=2,
    ),
    Arrangement(SERVED, "joint, with gate, wide, further updates", gate=True, shared=WIDE, further=2),
    Arrangement(
        SERVED_EQUAL_COST,
        "joint, with gate, wide, further updates, 13 steps where others make 8",
        gate=True,
        shared=WIDE,
        further=2,
        plan={"steps": EQUAL_STEPS},
    ),
)
LEAN = ("joint:1-step", "joint:2-steps")
# The arrangement, by objective and whose answers teach it.
TAUGHT: dict[str, dict[Data, str]] = {
    "fkl": {"target": JOINT, "draft": "joint:draft-data", "mixed": "joint:mixed-data"},
    **{
        kind: {"target": f"joint:{kind}", **{data: f"joint:{kind}+{data}-data" for data in SAYERS}}
        for kind in ("rkl", "jsd")
    },
}
_RUN = {one.name: one for one in _ALL}
ARRANGEMENTS = _RUN | {
    name: replace(
        _RUN[rival],
        name=name,
        title=_RUN[rival].title.replace(", further", ", withheld from new domains, further"),
        withheld=True,
    )
    for name, rival in OF_WITHHELD.items()
}
MAIN = (STATIC, LATEST, ONE_ADAPTER, "separate-true", "separate", "turns", JOINT, GATED, OFFLINE)
ONLINE = (LATEST, ONE_ADAPTER, "separate", "turns")  # what joint learning stands beside
ONLINE_GATED = tuple(f"{name}+gate" for name in ONLINE)  # the same with the gate that the default has
TABLED = (*MAIN[:-2], *ONLINE_GATED, *MAIN[-2:])  # in the tables by traffic
FURTHER = (
    "mixed-replay:further",
    "joint:further",
    "joint+gate:further",
    ONE_WIDE,
    ONE_WIDE_GATED,
    "joint:wide",
    SERVED,
)
TABLED_FURTHER = (*FURTHER[:-1], *OF_WITHHELD, *OTHER_WIDE, SERVED)  # the default comes last


def at_full_strength(name: str) -> Arrangement:
    """This arrangement, publishing all of what it learned."""
    one = ARRANGEMENTS[name]
    return replace(one, plan={**one.plan, "strength": 1.0})
