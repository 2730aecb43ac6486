"""A selector for tests of judges: it compares the experts and chooses none."""

from __future__ import annotations

from moedraft.core import Sequence
from moedraft.drafting.kept import KEPT
from moedraft.routing.selector import FixedSelector
from moedraft.selecting.selector import ArmJudge


class Looking(FixedSelector):
    """Compares the experts between two rounds; keeps the verdicts by request and entry."""

    def __init__(self) -> None:
        self.judge: ArmJudge | None = None
        self.rows: list[Sequence] = []
        self.verdicts: dict[str, dict[int, dict[str, float]]] = {}
        self.passes = 0

    def assign(self, sequences: list[Sequence]) -> None:
        self.rows += sequences

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        judge = self.judge
        assert judge is not None
        running = [one for one in self.rows if one.slot >= 0 and one.finish_reason is None]
        passages = [judge.known(one, 0, KEPT) for one in running]
        passages = [one for one in passages if one.end > one.first]
        if passages and ending is None:
            self.passes += 1
            for passage, hits in zip(passages, judge.hits(passages, judge.arms), strict=True):
                seen = self.verdicts.setdefault(passage.row.request_id, {})
                for i in range(passage.end - passage.first):
                    verdict = {arm: found[i] for arm, found in hits.items()}
                    assert seen.setdefault(passage.first + i, verdict) == verdict
        return []
