"""What a gate has in memory beside what it can measure anew, in plain figures, and back into memory."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, model_validator

from moedraft.distill.fresh.beside_base import SeenRecord
from moedraft.distill.judging.gate import Seen
from moedraft.distill.judging.judge import Judge
from moedraft.distill.measuring.figures import Measured
from moedraft.storage.retention.shares import Held


def _hits_of_tries(found: list[list[float]]) -> list[list[float]]:
    """Pairs of hits and tries. Raises ValueError where they are none."""
    pairs = np.array(found, float)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs):
        raise ValueError("hits and tries come in pairs")
    if not np.isfinite(pairs).all() or bool((pairs < 0).any()):
        raise ValueError("hits and tries are counts")
    return found


Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Pairs = Annotated[list[list[float]], AfterValidator(_hits_of_tries)]


class Figures(BaseModel):
    """What was measured of one record under one set of adapters."""

    counts: Pairs  # of the draft's tokens number 1 … depth
    chances: tuple[Amount, Amount] | None = None

    @classmethod
    def of(cls, measured: Measured) -> Figures:
        found = None if measured.chances is None else measured.chances[0]
        known = found is not None and bool(np.isfinite(found).all())
        chances = (float(found[0]), float(found[1])) if found is not None and known else None
        return cls(counts=measured.counts[0].tolist(), chances=chances)

    def measured(self) -> Measured:
        chances = None if self.chances is None else np.array([self.chances])
        counts: NDArray[np.float64] = np.array([self.counts], float)
        return Measured(counts, None, chances)


class SeenFigures(BaseModel):
    """A `SeenRecord` of `BesideBase`."""

    id: int
    source: str
    pinned: bool
    versions: tuple[int, int]
    before: Figures
    after: Figures

    @model_validator(mode="after")
    def _of_one_depth(self) -> SeenFigures:
        if len(self.before.counts) != len(self.after.counts):
            raise ValueError("both are of drafts of one length")
        return self

    @classmethod
    def of(cls, row: SeenRecord) -> SeenFigures:
        one, seen = row.record, row.figures
        return cls(
            id=one.id,
            source=one.source,
            pinned=one.pinned,
            versions=row.versions,
            before=Figures.of(seen.before),
            after=Figures.of(seen.after),
        )

    def row(self) -> SeenRecord:
        seen = Seen(self.before.measured(), self.after.measured())
        return SeenRecord(Held(self.id, self.source, self.pinned), self.versions, seen)


class OfGate(BaseModel):
    """What a gate has in memory between two updates."""

    kept: dict[str, tuple[int, int]] = {}  # counts of candidates that it kept, see `Judge.kept`
    beside: dict[str, list[SeenFigures]] = {}  # how adapters stood beside the draft base, see `BesideBase`
    learned: list[str] = []  # the domains that the live version has learned

    @classmethod
    def taken(cls, judge: Judge) -> OfGate:
        if judge.beside_base is None:
            return cls(kept=judge.kept)
        rows, learned = judge.beside_base.rows, judge.beside_base.learned
        beside = {name: [SeenFigures.of(one) for one in found] for name, found in rows.items() if found}
        return cls(kept=judge.kept, beside=beside, learned=sorted(learned))

    def restore(self, judge: Judge, base_hash: str, last_id: int) -> None:
        """Give it to a gate that has nothing in memory.

        base_hash: of the draft base that is trained on. last_id: the newest record that may have been trained
        on; those after it are new to what serves.
        """
        judge.kept |= self.kept
        if judge.beside_base is not None:
            rows = {name: [one.row() for one in found] for name, found in self.beside.items()}
            judge.beside_base.restore(rows, self.learned, base_hash, last_id)

    def of_same(self, same: Sequence[str], others: Set[str]) -> OfGate:
        """What concerns the adapters of which the `same` version serves still, and domains without one.

        others: the adapters of which another one does.
        """
        kept = {name: one for name, one in self.kept.items() if name in same}
        beside = {name: rows for name, rows in self.beside.items() if name not in others}
        return OfGate(kept=kept, beside=beside, learned=self.learned)
