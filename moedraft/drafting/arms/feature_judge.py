"""What each expert of a feature drafter would have guessed where the tokens are known by now.

All experts share the drafter's keys and values, so what it has read of a text serves them all: the states
that went into its layer at the last positions are kept, and each expert needs only its own queries, MLP and
output rows on them. Nothing in the cache is written. Only verified tokens are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.functional import scaled_dot_product_attention

from moedraft import core
from moedraft.core import SHARED
from moedraft.drafting.drawing import best_tokens
from moedraft.drafting.experts.adapter import HEAD, Delta
from moedraft.drafting.experts.layer import Multiplies
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.evidence import Passage
from moedraft.feature.text_tokens import GrowingText, ListAndText


class FeatureJudge:
    """Compares the experts of `bank` on what `drafter` has read, which keeps its last states."""

    most_rows = 4  # all of them are compared in one pass
    comparable = True

    def __init__(self, drafter: FeatureDrafter, bank: ExpertBank) -> None:
        assert drafter.states is not None, "the drafter must keep the states that it reads"
        self.drafter, self.bank, self.states = drafter, bank, drafter.states

    @property
    def arms(self) -> list[str]:
        """Whoever can draft otherwise than others: the shared draft and every expert that was trained."""
        return [SHARED, *self.bank.experts]

    @property
    def ready(self) -> set[str]:
        """Those whose output rows are kept; for others they are made first, which takes 20 to 40 ms."""
        heads = self.bank.heads
        return {SHARED, *self.bank.unadapted, *(heads.kept if heads is not None else ())}

    def known(self, row: core.Sequence, since: int, most: int) -> Passage:
        """The last `most` entries from `since` on that are kept and whose guesses the text can answer.

        Entry i guesses the token at i + 2.
        """
        first, end = self.states.span(row)
        end = min(end, len(row.token_ids) - 2)
        return Passage(row, max(first, since, end - most), end)

    @torch.inference_mode()
    def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
        """By passage and arm, for each of its entries: 1 where the arm's first guess is the text's token."""
        draft, device = self.drafter.draft, self.drafter.draft.fc.weight.device
        states = torch.cat([self.states.of(p.row, p.first, p.end) for p in passages])  # [P, H]
        texts = [p.row.token_ids[p.first + 1 : p.end + 2] for p in passages]
        ids = torch.tensor([token for text in texts for token in text[:-1]], device=device)
        truth = torch.tensor([token for text in texts for token in text[1:]], device=device)
        with self._every(arms):
            hidden = self._outputs(passages, states.expand(len(arms), -1, -1), ids)
        right = torch.stack(
            [guess == truth for guess in self._guesses(draft.normed(hidden), arms, passages)]
        ).float()  # [N, P]
        parts = torch.split(right, [len(text) - 1 for text in texts], dim=1)
        return [dict(zip(arms, part.tolist(), strict=True)) for part in parts]

    def _outputs(self, passages: Sequence[Passage], states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The layer's outputs [N, P, H], by arm, from states [N, P, H] and token ids int64 [P]."""
        draft, count = self.drafter.draft, len(states)
        places = torch.cat([torch.arange(p.first, p.end) for p in passages]).to(ids.device)
        # All arms read the same, so what they have in common is computed once.
        queries, _, _ = draft.layer.project(draft.embed(ids, states)[None], states[:1], places[None])
        queries = queries.expand(count, -1, -1, -1)  # [N, heads, P, d]
        sizes = [passage.end - passage.first for passage in passages]
        parts = zip(torch.split(queries, sizes, 2), passages, torch.split(places, sizes), strict=True)
        mixed = [self._attended(*part) for part in parts]
        return draft.fed_back(draft.layer.finish(states, torch.cat(mixed, dim=2)))

    def _attended(self, queries: torch.Tensor, passage: Passage, places: torch.Tensor) -> torch.Tensor:
        """queries [N, heads, T, d] of one row over what the cache holds of it → the same shape."""
        config, layer = self.drafter.draft.config, self.drafter.cache.layers[0]
        slot, end = passage.row.slot, passage.end
        keys, values = (each[slot : slot + 1, :, :end] for each in (layer.keys, layer.values))
        arms, heads, size, _ = queries.shape
        # All arms' queries stand in one row behind each other, since they look at the same keys and values.
        folded = queries.transpose(0, 1).reshape(1, heads, arms * size, -1)
        mask = (torch.arange(end, device=places.device) <= places[:, None]).repeat(arms, 1)
        grouped = config.num_heads != config.num_kv_heads
        mixed = scaled_dot_product_attention(folded, keys, values, mask, enable_gqa=grouped)
        return mixed.view(heads, arms, size, -1).transpose(0, 1)

    def _guesses(
        self, normed: torch.Tensor, arms: Sequence[str], passages: Sequence[Passage]
    ) -> Iterator[torch.Tensor]:
        """By arm, the likeliest token int64 [P] after each of its states [N, P, H].

        Each can be one of the arm's list, or of the text before it, as when the arm drafts.
        """
        heads, experts, shared = self.bank.heads, self.bank.experts, self.bank.shared
        assert heads is not None, "the experts of a feature drafter have output rows of their own"
        sizes = [passage.end - passage.first for passage in passages]
        texts = [GrowingText(self.drafter.draft, p.row.token_ids[: p.end + 1], p.first + 2) for p in passages]
        for states, arm in zip(normed, arms, strict=True):
            vocabulary, product = heads.base if arm in self.bank.unadapted else heads.shared
            if arm in experts and arm not in self.bank.unadapted:
                found = heads.kept.needed({arm: experts[arm]}, lambda one: {HEAD: heads.made(shared, one)})
                vocabulary, product = heads.vocabulary(experts[arm]), found[arm][HEAD]
            parts = [torch.split(each, sizes) for each in (product(states[None])[0], states)]
            likeliest = [
                self._likeliest(passage, text.beside(vocabulary), *part)
                for passage, text, *part in zip(passages, texts, *parts, strict=True)
            ]
            yield torch.cat(likeliest)

    def _likeliest(
        self, passage: Passage, text: ListAndText, logits: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        """Tokens int64 [T]. logits [T, v] of the arm's list, computed from normed [T, H]."""
        known = torch.arange(passage.first + 2, passage.end + 2, device=logits.device)
        return text.names[best_tokens(text.add(logits, normed, known))]

    @contextmanager
    def _every(self, arms: Sequence[str]) -> Iterator[None]:
        """Inside, the layers take [N, P, in], where part n is multiplied with the weights of arm n.

        Afterwards they are as the bank has set them for the batch.
        """
        before = {name: layer.product for name, layer in self.bank.body.items()}
        plain, experts = self.bank.common, [self.bank.experts.get(arm) for arm in arms]
        try:
            for name, layer in self.bank.body.items():
                deltas = [None if one is None else one.deltas.get(name) for one in experts]
                layer.product = EachArm(plain.get(name) or layer.base, deltas)
            yield
        finally:
            for name, layer in self.bank.body.items():
                layer.product = before[name]


class EachArm:
    """x [N or 1, P, in] → x Wᵀ + (x Aₙᵀ) Bₙᵀ in part n of N: the same rows once for every arm.

    With x [1, P, in] all parts begin with the same rows.
    """

    def __init__(self, plain: Multiplies, deltas: Sequence[Delta | None]) -> None:
        """plain: x → x Wᵀ, what all arms have in common. deltas: by arm; None adds nothing."""
        self.plain, self.deltas = plain, deltas

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, count = self.plain(x), len(self.deltas)
        if len(x) < count:
            x, y = x.expand(count, -1, -1), y.repeat(count, 1, 1)
        for n, delta in enumerate(self.deltas):
            if delta is not None:
                y[n] += x[n] @ delta[0].T @ delta[1].T
        return y
