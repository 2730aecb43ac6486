"""Which texts belong together, and which domains lie into one another, by the router's own features.

Knows unit vectors and names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering

from moedraft.routing.embedder import Floats

Places = NDArray[np.intp]

APART = 0.6  # cosine distance, on average, up to which two groups of texts are one
SAME = 0.97  # cosine from which two examples say the same
MERGE = 0.35  # the share of examples from which two domains should rather be one; translations share .27


def clusters(x: Floats, least: int) -> list[Places]:
    """Unit rows [n, F] → the rows of each group of at least `least`, the largest group first.

    Within a group the most typical rows come first, the nearest to its mean.
    """
    if len(x) < max(2, least):
        return []
    found = AgglomerativeClustering(
        n_clusters=None, distance_threshold=APART, metric="cosine", linkage="average"
    ).fit(x)
    groups = [np.flatnonzero(found.labels_ == label) for label in range(found.n_clusters_)]
    large = [group for group in groups if len(group) >= least]
    return [_typical_first(x, group) for group in sorted(large, key=len, reverse=True)]


def _typical_first(x: Floats, group: Places) -> Places:
    near = x[group] @ x[group].mean(axis=0)
    return group[np.argsort(-near, kind="stable")]


@dataclass(frozen=True)
class Overlap:
    """How far two domains lie into one another. The shares are those of their examples."""

    first: str
    second: str
    first_in_second: float  # of the first's examples, how many lie nearest to one of the second's
    second_in_first: float
    duplicates: int  # examples of the domain with fewer of them that the other one has too, nearly
    duplicates_share: float  # of the domain with fewer examples

    @property
    def should_merge(self) -> bool:
        """Whether the router can hardly tell them apart."""
        mixed = (self.first_in_second + self.second_in_first) / 2
        return mixed >= MERGE or self.duplicates_share >= MERGE


def swallowed_by(rows: Mapping[str, Floats], name: str) -> list[str]:
    """{name: unit rows of its examples} → the domains in which many of this one's examples lie.

    That is, so many lie nearest to one of theirs that the router can hardly tell them apart.
    """
    names = list(rows)
    x, owner = np.vstack(list(rows.values())), np.repeat(np.arange(len(names)), list(map(len, rows.values())))
    _, lies_in = _beside(x, owner, names.index(name))
    return [other for other, part in zip(names, lies_in, strict=True) if other != name and part >= MERGE]


def _beside(x: Floats, owner: Places, own: int) -> tuple[Floats, NDArray[np.float64]]:
    """The cosines of domain `own`'s rows to all rows, [m, n], and the share of them nearest to each domain.

    x: unit rows [n, F] of all domains; owner [n]: whose each is. No row is near to itself.
    """
    places = np.flatnonzero(owner == own)
    near = x[places] @ x.T
    near[np.arange(len(near)), places] = -1.0
    return near, np.bincount(owner[near.argmax(axis=1)], minlength=int(owner.max()) + 1) / len(near)


def overlaps(rows: Mapping[str, Floats]) -> list[Overlap]:
    """{name: unit rows of its examples} → the pairs that share anything, those that share most first."""
    names = list(rows)
    x = np.vstack([rows[name] for name in names]) if names else np.zeros((0, 1), dtype=np.float32)
    owner = np.repeat(np.arange(len(names)), [len(rows[name]) for name in names])
    lies_in = np.zeros((len(names), len(names)))
    alike: dict[tuple[int, int], int] = {}
    for a in range(len(names)):  # one domain after the other, so that all beside all are never in memory
        near, lies_in[a] = _beside(x, owner, a)
        for b in range(a + 1, len(names)):
            between = near[:, owner == b]
            fewer = 1 if between.shape[0] <= between.shape[1] else 0
            alike[a, b] = int((between.max(axis=fewer) >= SAME).sum())
    found = []
    for (a, b), same in alike.items():
        shares = float(lies_in[a, b]), float(lies_in[b, a])
        if same or any(shares):
            size = min(len(rows[names[a]]), len(rows[names[b]]))
            found.append(Overlap(names[a], names[b], *shares, same, same / size))
    return sorted(
        found, key=lambda one: -max(one.first_in_second + one.second_in_first, one.duplicates_share)
    )
