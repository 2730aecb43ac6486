"""The tokens that a draft model draws, step by step, put together into one proposal."""

from __future__ import annotations

import numpy as np
import torch

from moedraft.evidence import NOBODY, Proposal, Rows
from moedraft.kernels import Cuts, sample_coupled, sample_draft
from moedraft.sampling import SamplingBatch, limited


class LogitBuffer:
    """Holds the logits that tokens were drawn from, [B, K, V]; its memory is used again each round."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, 0, 0)

    def put(self, logits: torch.Tensor, step: int, most: int) -> None:
        """Keep logits [B, V] of one step of a round that has at most `most` steps."""
        self._place(logits, logits.shape[1], step, most).copy_(logits)

    def put_listed(self, logits: torch.Tensor, names: torch.Tensor, vocab: int, step: int, most: int) -> None:
        """The same of logits [B, v] that stand for the tokens names int64 [B, v] of V = `vocab`.

        All other tokens get −inf.
        """
        _spread(logits, names, self._place(logits, vocab, step, most))

    def _place(self, logits: torch.Tensor, vocab: int, step: int, most: int) -> torch.Tensor:
        """Memory for one step, [B, V]."""
        rows, kept = len(logits), self._kept
        fits = kept.dtype == logits.dtype and kept.device == logits.device and kept.shape[2] == vocab
        if not fits or self._kept.shape[0] < rows or self._kept.shape[1] < most:
            assert step == 0, "the buffer was made for the whole round"
            self._kept = logits.new_empty(rows, most, vocab)
        return self._kept[:rows, step]

    def of(self, rows: int, steps: int) -> torch.Tensor:
        return self._kept[:rows, :steps]


class Drawing:
    """What one round draws for its rows. `limits`: the most tokens of each row."""

    def __init__(self, rows: Rows, limits: list[int], buffer: LogitBuffer) -> None:
        self.rows, self.limits, self.buffer = rows, limits, buffer
        self.tokens: list[torch.Tensor] = []  # by step, int64 [B]
        self.lses: list[torch.Tensor] = []
        self.cuts: list[Cuts | None] = []
        self.confidences: list[list[float]] = []
        self._given = self._ascending = self._order = torch.empty(0)  # of a list; the same in all steps

    @property
    def steps(self) -> int:
        return len(self.tokens)

    @property
    def keeps(self) -> bool:
        """Whether verification asks what the tokens were drawn from."""
        return not (self.rows.sampling.greedy or self.rows.sampling.coupled)

    @property
    def positions(self) -> list[int]:
        """By row, the position of the token that is drawn next."""
        return [len(row.token_ids) + self.steps for row in self.rows.sequences]

    def draw(self, logits: torch.Tensor, names: torch.Tensor | None = None, vocab_size: int = 0) -> None:
        """Draw one token a row from logits [B, V].

        names int64 [v], or [B, v] where they differ from row to row: the token ids that logits [B, v] stand
        for, in a vocabulary of `vocab_size`; no other token can be drawn then. What is −inf has any name.
        """
        sampling = self.rows.sampling
        if names is not None and not sampling.greedy:
            logits, names = self._sampled_from(logits, names, vocab_size)
        filtered, cuts = limited(logits, sampling)
        drawn, lse, chances = draw(filtered, cuts, sampling, self.positions, is_listed=names is not None)
        if self.keeps:
            self._keep(filtered, names, vocab_size)
        self.tokens.append(
            drawn if names is None else names.expand_as(logits).gather(1, drawn[:, None])[:, 0]
        )
        self.lses.append(lse)
        self.cuts.append(cuts)
        self.confidences.append(chances)

    def _sampled_from(
        self, logits: torch.Tensor, names: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits and names to sample from: on a CPU the list with its tokens in ascending order.

        In this order a seed draws what it would draw from the whole vocabulary, which takes far longer to
        read. Kernels would have to be compiled for each length of a list, and coupled sampling has a random
        number for each token of the vocabulary, so both get that.
        """
        if self.rows.sampling.coupled or logits.device.type != "cpu":
            return _spread(logits, names, logits.new_empty(len(logits), vocab_size)), None
        if names is not self._given:
            self._given, every = names, names.expand_as(logits)
            self._order = torch.from_numpy(every.numpy().argsort(-1, kind="stable"))
            self._ascending = every.gather(1, self._order)
        return logits.gather(1, self._order), self._ascending

    def _keep(self, logits: torch.Tensor, names: torch.Tensor | None, vocab_size: int) -> None:
        step, most = self.steps, max(self.limits)
        if names is None:
            self.buffer.put(logits, step, most)
        else:
            self.buffer.put_listed(logits, names, vocab_size, step, most)

    def proposal(self, source: str, experts: list[str], versions: list[int]) -> Proposal:
        """Everything that was drawn; a row keeps no more than its limit."""
        lengths = [min(limit, self.steps) for limit in self.limits]
        token_ids = torch.stack(self.tokens, dim=1)
        drafted = torch.tensor(lengths, device=token_ids.device)
        padding = torch.arange(self.steps, device=token_ids.device) >= drafted[:, None]
        return Proposal(
            token_ids=token_ids.masked_fill_(padding, -1),
            lengths=lengths,
            sources=[source if length else NOBODY for length in lengths],
            experts=experts,
            versions=versions,
            confidences=[[step[b] for step in self.confidences[:n]] for b, n in enumerate(lengths)],
            steps=self.steps,
            logits=self.buffer.of(len(lengths), self.steps) if self.keeps else None,
            lse=torch.stack(self.lses, dim=1) if self.keeps else None,
            cuts=stacked(self.cuts) if self.keeps else None,
        )


def _spread(logits: torch.Tensor, names: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Logits [B, v] of the tokens names [v] or [B, v], written to `whole` [B, V]; −inf for all others."""
    # Of equal names all but one have −inf.
    return whole.fill_(-torch.inf).scatter_reduce_(1, names.expand_as(logits), logits, "amax")


def stacked(cuts: list[Cuts | None]) -> Cuts | None:
    """Those of every step [B] as one [B, K]; None where nothing is filtered so."""
    steps = [step for step in cuts if step is not None]
    if not steps:
        return None
    return Cuts(torch.stack([one.value for one in steps], 1), torch.stack([one.last for one in steps], 1))


def draw(
    logits: torch.Tensor,
    cuts: Cuts | None,
    sampling: SamplingBatch,
    positions: list[int],
    *,
    is_listed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Tokens int64 [B], their log-sum-exps [B] and, by row, the mass of the most likely token.

    The mass belongs to the prefix alone, whichever token was drawn: drafting may stop because of it.
    is_listed: the logits are those of a list of tokens, which can have any length; kernels would be compiled
    for it in the middle of a request.
    """
    if sampling.greedy and (is_listed or (logits.device.type == "cpu" and not sampling.coupled)):
        return most_likely(logits) if logits.device.type == "cpu" else most_likely_there(logits)
    where = torch.tensor(positions, device=logits.device)
    temperature = 0.0 if sampling.greedy else sampling.temperature
    choose = sample_coupled if sampling.coupled else sample_draft
    drawn, lse, top = choose(logits, temperature, sampling.seed, where, cuts=cuts)
    return drawn, lse, top.tolist()


def most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """What `draw` gives for greedy rows on a CPU, in a third of the time of `sample_draft`."""
    rows = logits.float().numpy()
    best = rows.argmax(-1)  # of the first NaN, where there is one; in a quarter of PyTorch's time
    value = rows[np.arange(len(rows)), best]
    with np.errstate(all="ignore"):
        total = np.exp(rows - value[:, None]).sum(-1)
        found = value + np.log(total), 1 / total
    valid = np.isfinite(value)
    lse, top = (np.where(valid, each, np.float32(np.nan)) for each in found)
    return torch.from_numpy(np.where(valid, best, 0)), torch.from_numpy(lse), top.tolist()


def most_likely_there(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """The same on the device of the logits, by PyTorch's own operations."""
    rows = logits.float()
    best = rows.argmax(-1)
    value = rows.gather(1, best[:, None])
    total = (rows - value).exp().sum(-1)
    value = value[:, 0]
    valid = value.isfinite()
    lse, top = (torch.where(valid, each, torch.nan) for each in (value + total.log(), 1 / total))
    return torch.where(valid, best, 0), lse, top.tolist()


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token, int64 [B], of each row of logits [B, V]."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))
