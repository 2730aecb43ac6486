"""Measures a record once under the same adapters.

The gate compares with what serves after every update, and for as long as the same adapters serve, only the
records are new that came since. What was measured of a candidate is known too when it serves.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.measuring.figures import FEW, Measured
from moedraft.distill.measuring.measures import Measure, Serving
from moedraft.storage.versions.candidate import Weights

SEVERAL = 8  # sets of adapters whose figures are kept for a domain

Row = tuple[np.ndarray, np.ndarray | None]  # counts and chances of one record
RecordKey = tuple[int, int]  # its id, and a hash of its tokens: an id can be given anew after a purge


@dataclass
class Remembered:
    """A `Measure` that asks another one for records that it has not measured under these adapters.

    Of a set of adapters it keeps the figures of those records that were asked for last. Where there are so
    few records that the loss is wanted too, nothing is remembered.
    """

    measure: Measure
    _known: dict[str, OrderedDict[bytes, dict[RecordKey, Row]]] = field(default_factory=dict)  # by domain

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        if len(records) < FEW:
            return self.measure(serving, domain, records, on_batch)
        assert {SHARED, domain} <= serving.keys(), "else an adapter that is not named drafts as it is"
        of_domain, which = self._known.setdefault(domain, OrderedDict()), _fingerprint(serving, domain)
        known = of_domain.get(which, {})
        missing = [record for record in records if _key(record) not in known]
        if missing:
            known = known | _rows(missing, self.measure(serving, domain, missing, on_batch))
        rows = {_key(record): known[_key(record)] for record in records}
        of_domain[which] = rows
        of_domain.move_to_end(which)
        while len(of_domain) > SEVERAL:
            of_domain.popitem(last=False)
        return _joined([rows[_key(record)] for record in records])

    def forget(self) -> None:
        """Forget all figures, since records were purged."""
        self._known.clear()


def _key(record: ReplayRecord) -> RecordKey:
    return record.id, hash(tuple(record.token_ids))


def _rows(records: Sequence[ReplayRecord], found: Measured) -> dict[RecordKey, Row]:
    chances = [None] * len(records) if found.chances is None else list(found.chances)
    counts = zip(found.counts, chances, strict=True)
    return {_key(record): row for record, row in zip(records, counts, strict=True)}


def _joined(rows: Sequence[Row]) -> Measured:
    chances = [chance for _, chance in rows if chance is not None]
    whole = np.stack(chances) if len(chances) == len(rows) else None
    return Measured(np.stack([counts for counts, _ in rows]), None, whole)


def _fingerprint(serving: Serving, domain: str) -> bytes:
    """Of the numbers of the adapters that draft for the domain."""
    digest = blake2b(digest_size=16)
    for name in dict.fromkeys((SHARED, domain)):
        digest.update(_content(serving.get(name)))
    return digest.digest()


def _content(weights: Weights | None) -> bytes:
    if weights is None:
        return bytes(16)
    digest = blake2b(json.dumps(dict(weights.config), sort_keys=True).encode(), digest_size=16)
    parts = dict(weights.tensors)
    if weights.vocabulary is not None:
        parts["vocabulary"] = weights.vocabulary
    for name, tensor in sorted(parts.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
