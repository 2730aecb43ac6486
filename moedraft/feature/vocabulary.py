"""The tokens that an expert drafts: a list of its own, chosen by what its domain's traffic holds.

A token outside it is guessed only where it stands in the row's own text (`feature.text_tokens`), and no
adapter repairs that. The output rows are the target's, so a list costs its ids alone. It lies in the
adapter's folder as a file of its own, because PEFT takes nothing but adapters in its own
(`moedraft.storage.versions.candidate.VOCABULARY`). Row n of what the adapter adds to the output rows belongs
to the list's token number n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from moedraft.core import CorruptAdapter, ReplayRecord

ANSWER_WEIGHT = 8  # of an answer's token beside a prompt's, when tokens are counted for a list
UNIT = 128  # what a prompt's token counts, so that tokens that are hardly probable still count 1


def counted(records: Iterable[ReplayRecord]) -> Counter[int]:
    """How often each token comes in this traffic, or may come, in parts of UNIT.

    Answers count most, since they are what is drafted. At each of their places all tokens count that the
    target held possible, by their probability: a domain's next answers hold many of those that its answers
    until now could have held (docs/experiments.md, "How long an expert's own list is").
    """
    ids, weights = [np.zeros(0, np.int64)], [np.zeros(0)]
    for record in records:
        prompt = record.num_prompt_tokens
        possible = np.exp(np.minimum(np.asarray(record.topk_logprobs, np.float64), 0)).ravel()
        ids += [np.asarray(record.token_ids, np.int64), np.asarray(record.topk_ids, np.int64).ravel()]
        weights += [np.ones(prompt), np.full(len(record.token_ids) - prompt, ANSWER_WEIGHT)]
        weights.append(ANSWER_WEIGHT * possible)
    tokens, places = np.unique(np.concatenate(ids), return_inverse=True)
    sums = np.ceil(UNIT * np.bincount(places, np.concatenate(weights), len(tokens))).astype(np.int64)
    return Counter(
        {token: count for token, count in zip(tokens.tolist(), sums.tolist(), strict=True) if count}
    )


def own_vocabulary(
    counts: Counter[int], size: int, general: Sequence[int], always: Iterable[int] = ()
) -> torch.Tensor:
    """The `size` most frequent tokens, int64, ascending; see `own_ranked`."""
    return torch.tensor(sorted(own_ranked(counts, size, general, always)), dtype=torch.int64)


def own_ranked(
    counts: Counter[int], size: int, general: Sequence[int], always: Iterable[int] = ()
) -> list[int]:
    """The `size` most frequent tokens, these first; `always` are in, and `general` ones fill up.

    general: in the order in which they are taken; see `ranked`.
    """
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    return [*dict.fromkeys([*sorted(set(always)), *frequent, *general])][:size]


def ranked(vocabulary: torch.Tensor, counts: Counter[int]) -> list[int]:
    """The tokens of a general vocabulary, those first that all traffic together (`counts`) holds most often.

    Of those that never came the lowest ids are first: in a byte-pair vocabulary these are the commonest.
    """
    return sorted(vocabulary.tolist(), key=lambda token: (-counts[token], token))


def union(lists: Iterable[torch.Tensor]) -> torch.Tensor:
    """All tokens of these lists, int64, ascending."""
    found: torch.Tensor = torch.unique(torch.cat(list(lists)))
    return found


def places(wanted: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Where each token of `wanted` stands in the ascending list `among`; −1 where it does not."""
    found = torch.searchsorted(among, wanted.contiguous()).clamp(max=len(among) - 1)
    return torch.where(among[found] == wanted, found, -1)


def rows_for(rows: torch.Tensor, among: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """rows [len(among), n], one for each token of `among` → [len(wanted), n]; zeros where there is none."""
    found = places(wanted, among)
    picked = rows[found.clamp(min=0)]
    return picked.masked_fill((found < 0)[:, None], 0)


def checked(tensor: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """A list as it was stored, int64. Raises CorruptAdapter where it is none for `vocab_size` tokens."""
    if (
        tensor is None
        or tensor.dtype not in (torch.int32, torch.int64)
        or tensor.dim() != 1
        or not len(tensor)
    ):
        raise CorruptAdapter("the adapter's vocabulary is no list of token ids.")
    ids = tensor.to(torch.int64)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids.diff() > 0).all()):
        raise CorruptAdapter("the adapter's vocabulary is no ascending list of the target's token ids.")
    return ids
