"""Labels from the traffic beside a person's examples: which are taken, how much they count, and who decides.

A label is a prompt with the domain whose expert guessed its answer best. Such labels are noisy: an expert
that has learned much may beat a new one on the new one's own text. So a label counts less than an example, a
domain's labels together never more than half of its examples, a label that contradicts what the examples say
with confidence is dropped, and of a domain with few labels none is taken. Whether a router that was fitted on
them too is better is decided by the examples alone. Knows arrays and texts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moedraft.routing.classifier import Opinions
from moedraft.routing.embedder import Floats
from moedraft.routing.fitting import Copies

MOST_LABELS = 64  # of a domain
LEAST_LABELS = 4  # of a domain: fewer may all be one client's oddity
TRAFFIC_SHARE = 0.5  # what a domain's labels may weigh together, in parts of its examples
CONTRADICTED = 0.5  # the probability of another domain, by the examples alone, from which a label is dropped
LOST_LIKELIHOOD = 0.02  # nats per example that a refit may lose where it sends as many to their domain
# Of the examples whose domain was left out, the part that a refit may send to an expert in addition. A
# wrong expert costs little, a missing one all that it would gain.
LOST_STRANGERS = 0.05


@dataclass(frozen=True)
class Label:
    """A prompt of the traffic, and whose it is."""

    text: str
    domain: str
    sure: float  # 0 to 1


@dataclass(frozen=True)
class Refit:
    """What came of a fit on examples and labels, by what it says of examples that were left out."""

    taken: bool  # whether it is to serve; otherwise nothing changes
    labels: dict[str, int]  # how many were fitted on, by domain; domains without any are left out
    examples: int  # that were left out in turn
    right_before: int  # of these, how many the examples alone send to their domain
    right_after: int


def loses(before: Opinions, after: Opinions, threshold: float) -> bool:
    """Whether the examples are worse off with the labels than without."""
    (right, refused), (now_right, now_refused) = before.right(threshold), after.right(threshold)
    bound = refused - LOST_STRANGERS * int((~before.known).sum())
    less = after.likelihood() < before.likelihood() - LOST_LIKELIHOOD
    return now_right < right or now_refused < bound or less


def plausible(
    labels: Sequence[Label], probabilities: Floats, names: Sequence[str]
) -> list[tuple[int, Label]]:
    """The labels to use, with their places. probabilities [n, D]: by the examples alone.

    MOST_LABELS of each domain at most, the first ones; none of one with fewer than LEAST_LABELS.
    """
    number = {name: i for i, name in enumerate(names)}
    kept: dict[str, list[tuple[int, Label]]] = {}
    for place, (label, row) in enumerate(zip(labels, probabilities, strict=True)):
        own = number.get(label.domain)
        if own is not None and (row.argmax() == own or row.max() < CONTRADICTED):
            kept.setdefault(label.domain, []).append((place, label))
    enough = (found[:MOST_LABELS] for found in kept.values() if len(found) >= LEAST_LABELS)
    return [pair for found in enough for pair in found]


def beside(examples: Floats, x: Floats, sure: Floats) -> Copies:
    """Labelled prompts of one domain, features [m, F], beside its examples [n, F].

    Each lies where the example that it is most like lies, so that it is left out together with that one.
    """
    weight = sure * min(1.0, TRAFFIC_SHARE * len(examples) / max(float(sure.sum()), 1e-6))
    return Copies(x, (x @ examples.T).argmax(axis=1).astype(np.int64), weight.astype(np.float32))


def counted(chosen: Sequence[tuple[int, Label]]) -> dict[str, int]:
    """How many labels there are, by domain."""
    counts: dict[str, int] = {}
    for _, label in chosen:
        counts[label.domain] = counts.get(label.domain, 0) + 1
    return counts


def joined(first: Mapping[str, Copies], second: Mapping[str, Copies]) -> dict[str, Copies]:
    """Both, domain by domain; every domain of the second is among those of the first."""
    return {name: one.joined(second[name]) if name in second else one for name, one in first.items()}
