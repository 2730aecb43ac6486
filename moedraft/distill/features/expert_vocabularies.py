"""Which tokens each expert of a joint trainer drafts: those that its domain's traffic holds, or might hold.

The shared adapter, which drafts where no expert is known, has the draft base's own list, and what all experts
and its own traffic have beside it, up to a bound. Lists live as long as the trainer, and come back from the
stored versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features.list_lengths import FIRST, LENGTHS, ListLengths
from moedraft.feature.vocabulary import UNIT, counted, own_ranked, ranked, union

OWN_TOKENS = 8192  # of an expert at most, unless the draft base has fewer
MOST_SHARED = 16_384  # of the shared adapter, unless the draft base has more


class Vocabularies:
    """The lists of all adapters, int64 and ascending."""

    def __init__(
        self, general: torch.Tensor, vocab_size: int, always: Iterable[int] = (), *, own: bool = True
    ) -> None:
        """general: the draft base's list. always: tokens that no list may lack, as those that end answers.

        own: whether experts have lists of their own.
        """
        self.general, self.vocab_size, self.always = general.cpu(), vocab_size, sorted(always)
        self.size = min(OWN_TOKENS, len(general))
        self.useful = own and self.size < vocab_size  # else every list would hold all tokens
        self._lists: dict[str, torch.Tensor] = {}
        # By expert, the `size` tokens that come first; its list is as many of them as `lengths` says.
        self._ranked: dict[str, list[int]] = {}
        self.lengths = ListLengths()
        # By adapter, how often its domain's traffic held a token, or might have.
        self._came: dict[str, Counter[int]] = {}

    def of(self, name: str) -> torch.Tensor | None:
        """The list of the adapter `name`; None where it uses the draft base's list."""
        return self._lists.get(name)

    def nested(self, name: str) -> list[torch.Tensor]:
        """Lists that an expert might have, by LENGTHS; none where nothing is known of its traffic."""
        return [self._first_of(name, length) for length in LENGTHS] if name in self._ranked else []

    def _first_of(self, name: str, length: int) -> torch.Tensor:
        return torch.tensor(sorted(self._ranked[name][:length]), dtype=torch.int64)

    def counts(self, name: str) -> torch.Tensor | None:
        """int64 [2, n]: tokens that the domain's traffic held, and how often; None where none is known."""
        came = self._came.get(name)
        return torch.tensor([[*came.keys()], [*came.values()]]) if came else None

    def restore(self, name: str, vocabulary: torch.Tensor | None, counts: torch.Tensor | None = None) -> None:
        """The list of the version that `name` goes on from; counts: as `counts` gave them."""
        self._came.pop(name, None)
        self._ranked.pop(name, None)
        if counts is not None:
            tokens, often = counts.tolist()
            self._came[name] = Counter(dict(zip(tokens, often, strict=True)))
        if vocabulary is not None:
            self._lists[name] = vocabulary.to(torch.int64)
        else:
            self._lists.pop(name, None)

    def forget(self) -> None:
        """Forget which tokens earlier records held; the lists stay."""
        self._came.clear()
        self._ranked.clear()
        self.lengths.forget()

    def choose(self, records: Mapping[str, Iterable[ReplayRecord]]) -> None:
        """New lists for the experts with these records, by domain, and for the shared adapter.

        The tokens that the domain's records hold, or might hold, come first, those of earlier updates too,
        then the others of the list before, then the commonest general ones.
        """
        if not self.useful:
            return
        counts = {name: self._counted(some) for name, some in records.items()}
        together = sum(counts.values(), Counter[int]())
        general, known = ranked(self.general, together), set(self.general.tolist())
        for name, found in counts.items():
            if found:
                self._came[name] = remembered(self._came.get(name, Counter()), found)
            if name != SHARED and found:
                before = self._ranked.get(name, self._lists.get(name, self.general[:0]).tolist())
                learned = [
                    token for token in before if token not in known
                ]  # else the domain's rarest would go
                preferred = [*learned, *before, *general]
                self._ranked[name] = own_ranked(self._came[name], self.size, preferred, self.always)
                now = len(self._lists[name]) if name in self._lists else FIRST
                self._lists[name] = self._first_of(name, self.lengths.of(name, now))
        others = [token for token in sorted({*self.all().tolist(), *together}) if token not in known]
        room = max(MOST_SHARED - len(known), 0)
        came = sum(self._came.values(), Counter[int]())  # that of earlier updates, too
        chosen = ranked(torch.tensor(others, dtype=torch.int64), came)[:room]
        self._lists[SHARED] = union([self.general, torch.tensor(chosen, dtype=torch.int64)])

    def _counted(self, records: Iterable[ReplayRecord]) -> Counter[int]:
        """As `counted`, without what is no token."""
        found = counted(records)
        return Counter({token: found[token] for token in found if 0 <= token < self.vocab_size})

    def all(self) -> torch.Tensor:
        """Every token that some adapter or the draft base drafts, or an expert might with a longer list."""
        longest = [torch.tensor(found, dtype=torch.int64) for found in self._ranked.values()]
        return union([self.general, *self._lists.values(), *longest])


def remembered(before: Counter[int], now: Counter[int]) -> Counter[int]:
    """Counts after further records: what was before counts half; the larger one is taken.

    None falls below UNIT by that, so what came comes before what was hardly possible, however long ago.
    """
    return Counter({token: max(count // 2, min(count, UNIT)) for token, count in before.items()}) | now
