"""What one round carries: a drafter's proposal, and the evidence that its verification leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from moedraft.core import SHARED, CapturedTopK, Sequence, TokenLogprobs

if TYPE_CHECKING:
    from moedraft.kernels import Cuts
    from moedraft.sampling import SamplingBatch

NOBODY = ""  # the source of a row for which nothing was drafted


@dataclass
class HiddenStates:
    """A request for the input of these layers; the target's forward fills in `states`, [B, T, H] by layer."""

    layers: tuple[int, ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Reading:
    """Prompt tokens to be read: so many more of each of these rows, whose slots are neighbours.

    The target's forward fills in `states`: what drafters read of its hidden states, [B, T, H] by layer.
    """

    pieces: list[tuple[Sequence, int]]
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """Whether there is a token to read: all but a prompt's last one are."""
        return any(count for _, count in self.pieces)


@dataclass(frozen=True)
class Beside:
    """Tokens [P, T] of other slots that a forward reads along with its own; nobody wants their logits."""

    first: int
    token_ids: torch.Tensor
    starts: list[int]
    lengths: list[int]
    hidden: HiddenStates | None = None


@dataclass(frozen=True)
class Rows:
    """The sequences of one round, in the slots 0 … B−1, and how their next tokens are sampled."""

    sequences: list[Sequence]
    sampling: SamplingBatch

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def device(self) -> torch.device:
        return self.sampling.seed.device


@dataclass(frozen=True)
class Proposal:
    """What is guessed for B rows: at most K tokens each, one after another (a chain).

    Padded positions hold token −1. `logits` are what the tokens were drawn from, filtered as the target's
    will be; None where nobody asks: every row is greedy, or sampling is coupled. Where the filter is in
    `cuts` it is not in them. `lse` is their log-sum-exp at the row's temperature, filtered.
    """

    token_ids: torch.Tensor  # int64 [B, K]
    lengths: list[int]  # tokens by row
    sources: list[str]  # by row, the drafter that guessed; NOBODY where there is no guess
    experts: list[str]  # by row, the expert that the draft model used
    versions: list[int]  # by row, of that expert's adapter
    confidences: list[list[float]]  # by row and token, the drafter's own chance that it is accepted
    steps: int = 0  # forwards of the draft model that were spent
    logits: torch.Tensor | None = None  # [B, K, V]
    lse: torch.Tensor | None = None  # float32 [B, K]
    cuts: Cuts | None = None  # [B, K]
    parents: torch.Tensor | None = None  # int64 [B, K], a token tree; None is a chain, token after token

    @classmethod
    def nothing(cls, rows: int, device: torch.device) -> Proposal:
        """No guess for any row: plain decoding."""
        none = torch.empty(rows, 0, dtype=torch.int64, device=device)
        return cls(none, [0] * rows, [NOBODY] * rows, [SHARED] * rows, [0] * rows, [[] for _ in range(rows)])

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]

    @property
    def drafted(self) -> bool:
        return any(self.lengths)

    def verified(self, ragged: bool) -> int:
        """How many draft tokens the target reads, with the padding unless it skips that (`ragged`)."""
        return sum(self.lengths) if ragged else len(self.lengths) * self.width

    def cut(self, lengths: Mapping[int, int]) -> Proposal:
        """The same with at most `lengths[b]` tokens in row b, none in other rows; only without logits."""
        assert self.logits is None, "a proposal with logits is never cut"
        wanted = [min(lengths.get(b, 0), length) for b, length in enumerate(self.lengths)]
        width = max(wanted, default=0)
        keep = torch.arange(width, device=self.token_ids.device) < torch.tensor(
            wanted, device=self.token_ids.device
        ).unsqueeze(1)
        return replace(
            self,
            token_ids=self.token_ids[:, :width].masked_fill(~keep, -1),
            lengths=wanted,
            sources=[source if n else NOBODY for source, n in zip(self.sources, wanted, strict=True)],
            confidences=[chances[:n] for chances, n in zip(self.confidences, wanted, strict=True)],
        )


@dataclass(frozen=True)
class Evidence:
    """What one verification showed. Built once a round, for everybody who learns from it."""

    rows: list[Sequence]
    proposal: Proposal
    tokens: list[list[int]]  # by row: the accepted draft tokens and the one after them
    accepted: list[int]  # by row: draft tokens accepted
    broken: list[bool]  # by row: the target gave no usable distribution; its tokens mean nothing
    logits: torch.Tensor  # [B, K+1, V] of the target, before temperature and filters
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by target layer [B, K+1, H], as asked
    topk: Mapping[int, CapturedTopK] = field(default_factory=dict)  # by row that may be learned from

    @property
    def width(self) -> int:
        return self.proposal.width

    def drafted_by(self, source: str) -> list[int]:
        """The rows for which this drafter guessed."""
        return [b for b, each in enumerate(self.proposal.sources) if each == source]

    def logprobs(self, b: int) -> list[TokenLogprobs]:
        """The target's log-probabilities at row b's tokens; an empty list if the request asks for none."""
        count, tokens = self.rows[b].params.logprobs, self.tokens[b]
        if count is None or not all(0 <= token < self.logits.shape[-1] for token in tokens):
            return []
        logprobs = self.logits[b, : len(tokens)].float().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
        values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        tops = (tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
        return [TokenLogprobs(one, top) for one, top in zip(own, tops, strict=True)]


@dataclass(frozen=True)
class Passage:
    """A piece of a row's text that is verified, by the entries of a drafter's cache that stand for it."""

    row: Sequence
    first: int
    end: int  # the entry behind the last one
