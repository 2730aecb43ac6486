"""Finished requests as columns of numbers, of which only new rows are read from the store.

An open dashboard page asks for sums over thousands of requests every few seconds, in the process that serves;
with columns this takes milliseconds. The only text kept is the names of experts and languages.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moedraft.core import SHARED, RequestStats

Numbers = NDArray[np.float64]
Codes = NDArray[np.int64]
Counts = NDArray[np.int32]

CAPACITY = 100_000  # the store keeps as many
POSITIONS = 32  # no draft is longer
OVERLAP = 5.0  # seconds that are read again, since rows may be written slightly out of order
NUMBERS = (
    "created_at",
    "adapter_version",
    "num_tokens",
    "num_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_lookup_tokens",
    "num_accepted_earlier_tokens",
    "seconds",
    "confidence",
    "time_to_first_token",
    "overruled",
    "overruled_tokens",
    "overruled_gain",
    "first_guesses",
    "right_first_guesses",
    "shared_first_guesses",
    "shared_right_first_guesses",
)
GUESSES = ("first_guesses", "right_first_guesses")
DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", *GUESSES)
_PLACE = {name: place for place, name in enumerate(NUMBERS)}


@dataclass(frozen=True)
class Requests:
    """Requests, oldest first. Codes are indices into the tuples of names; a missing value is NaN."""

    numbers: Numbers  # [n, len(NUMBERS)]
    experts: Codes  # [n]
    langs: Codes  # [n]
    drafted_at: Counts  # [n, POSITIONS]
    accepted_at: Counts  # [n, POSITIONS]
    shared_drafted_at: Counts  # [n, POSITIONS]; of these, what the shared adapter drafted
    shared_accepted_at: Counts  # [n, POSITIONS]
    expert_names: tuple[str, ...]
    lang_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, name: str) -> Numbers:
        """The column `name`, one of NUMBERS [n]."""
        return self.numbers[:, _PLACE[name]]

    def where(self, chosen: NDArray[np.bool_] | slice) -> Requests:
        return replace(self, **{name: getattr(self, name)[chosen] for name in _BY_ROW})

    def of(self, expert: str) -> Requests:
        """The requests of one expert."""
        return self.where(self.experts == self._code(expert))

    def _code(self, expert: str) -> int:
        return self.expert_names.index(expert) if expert in self.expert_names else -1

    def drafted_by(self, expert: str) -> Requests:
        """The requests that `expert` may have drafted for, with the drafts that it made itself alone.

        The shared adapter drafts until a request is routed, and where many experts meet in a batch: these
        drafts are its own. Read only columns about drafts from the result: tokens and steps are those of
        the whole request.
        """
        if expert != SHARED:
            own = self.of(expert)
            drafted, accepted = own.shared_drafted_at, own.shared_accepted_at
            return own._with_drafts(
                own.drafted_at - drafted, own.accepted_at - accepted, own._drafts() - own._stand_ins()
            )
        routed = self.experts == self._code(SHARED)
        some = self.where(routed | (self.shared_drafted_at[:, 0] > 0) | (self["shared_first_guesses"] > 0))
        own_rows = (some.experts == self._code(SHARED))[:, None]
        return some._with_drafts(
            np.where(own_rows, some.drafted_at, some.shared_drafted_at),
            np.where(own_rows, some.accepted_at, some.shared_accepted_at),
            np.where(own_rows, some._drafts(), some._stand_ins()),
        )

    def _drafts(self) -> Numbers:
        return self.numbers[:, [_PLACE[name] for name in DRAFTS]]

    def _stand_ins(self) -> Numbers:
        """The columns DRAFTS of what the shared adapter drafted [n, len(DRAFTS)]."""
        drafted, accepted = self.shared_drafted_at, self.shared_accepted_at
        counts = (drafted[:, 0], drafted.sum(axis=1), accepted.sum(axis=1))
        guesses = (self["shared_first_guesses"], self["shared_right_first_guesses"])
        return np.stack([*counts, *guesses], axis=1).astype(np.float64)

    def _with_drafts(self, drafted_at: Counts, accepted_at: Counts, drafts: Numbers) -> Requests:
        numbers = self.numbers.copy()
        numbers[:, [_PLACE[name] for name in DRAFTS]] = drafts
        nothing = np.zeros_like(drafted_at)
        return replace(
            self,
            numbers=numbers,
            drafted_at=drafted_at,
            accepted_at=accepted_at,
            shared_drafted_at=nothing,
            shared_accepted_at=nothing,
        )

    def between(self, since: float, until: float) -> Requests:
        """The requests that ended in [since, until)."""
        at = self["created_at"]
        return self.where((at >= since) & (at < until))

    def total(self, name: str) -> int:
        return int(self[name].sum())

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of the answers for each step of the target: 1 is plain decoding."""
        return ratio(self.total("num_tokens"), self.total("num_steps"))

    @property
    def first_step_share(self) -> float | None:
        """The share of first guesses that are right, of those that were looked at; None where none was.

        They are of tokens of whole answers, drafted or not, so that it does not depend on draft lengths.
        """
        return ratio(self.total("right_first_guesses"), self.total("first_guesses"))

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that was accepted; None if nothing was drafted."""
        return ratio(self.total("num_accepted_tokens"), self.total("num_draft_tokens"))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per verified draft, including the bonus token."""
        extra = ratio(self.total("num_accepted_tokens"), self.total("num_drafts"))
        return None if extra is None else 1 + extra

    def sums(self, groups: Codes, count: int, names: Sequence[str]) -> Codes:
        """Sums of the columns `names` by group. groups: [n], 0 … count − 1; result: [count, len(names)]."""
        columns = [np.bincount(groups, weights=self[name], minlength=count) for name in names]
        return np.stack(columns, axis=1).astype(np.int64)


_BY_ROW = tuple(field.name for field in fields(Requests) if not field.name.endswith("_names"))


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class ReadRows(Protocol):
    """A function that returns the requests that ended in [since, until), epoch seconds, oldest first."""

    def __call__(self, since: float, until: float | None) -> list[RequestStats]: ...


class RequestReader:
    """Keeps a store's requests as columns, from the earliest time that was asked for. Thread-safe."""

    def __init__(
        self, rows: ReadRows, capacity: int = CAPACITY, clock: Callable[[], float] = time.time
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._read_at = math.inf  # when rows were read last
        self._capacity = capacity
        self._lock = threading.Lock()
        self._experts: dict[str, int] = {}
        self._langs: dict[str, int] = {}
        self._kept: Requests | None = None
        self._since = 0.0  # `_kept` holds the requests from this time on

    def read(self, since: float = 0.0) -> Requests:
        """All requests of the store, at least from `since` on.

        Raises StorageError; what was read before is kept then.
        """
        with self._lock:
            kept = self._kept
            if kept is None or since < self._since:
                until = None if kept is None else self._since
                older = self._columns(self._rows(since, until))
                kept = older if kept is None else _joined(older, kept)
                self._since = since
            at = kept["created_at"]
            # A row dated in the future, by a clock that was set back since, must not hide those that come.
            now = self._clock()
            newest = min(float(at.max()), self._read_at, now) if len(at) else -math.inf
            last, self._read_at = max(self._since, newest - OVERLAP), now
            new = self._columns(self._rows(last, None))
            self._kept = _joined(kept.where(at < last), new).where(slice(-self._capacity, None))
            return self._kept

    def _columns(self, rows: list[RequestStats]) -> Requests:
        return Requests(
            numbers=np.array([[_number(_field(row, name)) for name in NUMBERS] for row in rows]).reshape(
                len(rows), len(NUMBERS)
            ),
            experts=_codes([row.expert for row in rows], self._experts),
            langs=_codes([row.lang for row in rows], self._langs),
            drafted_at=_padded([row.speculation.drafted_at for row in rows]),
            accepted_at=_padded([row.speculation.accepted_at for row in rows]),
            shared_drafted_at=_padded([row.speculation.shared_drafted_at for row in rows]),
            shared_accepted_at=_padded([row.speculation.shared_accepted_at for row in rows]),
            expert_names=tuple(self._experts),
            lang_names=tuple(self._langs),
        )


def _field(row: RequestStats, name: str) -> Any:
    """The value `name` of the request itself, or of its speculation."""
    return getattr(row if hasattr(row, name) else row.speculation, name)


def _joined(old: Requests, new: Requests) -> Requests:
    """The rows of both. The tuples of names only ever grow, so a code means the same in either."""
    rows: dict[str, Any] = {
        name: np.concatenate([getattr(old, name), getattr(new, name)]) for name in _BY_ROW
    }
    more = max(old, new, key=lambda part: len(part.expert_names) + len(part.lang_names))
    return replace(more, **rows)


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def _codes(names: list[str], known: dict[str, int]) -> Codes:
    """The code of every name; new names are added to `known`."""
    return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)


def _padded(rows: list[list[int]]) -> Counts:
    counts = np.zeros((len(rows), POSITIONS), dtype=np.int32)
    for index, row in enumerate(rows):
        kept = row[:POSITIONS]
        counts[index, : len(kept)] = kept
    return counts
