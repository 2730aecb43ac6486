"""Which of the guessed tokens an answer keeps, so that it follows the target's distribution exactly.

Three rules do that: verification token by token (chain), of all guesses together (block; Sun et al., arXiv
2403.10444), and with the random numbers that the draft used as well (coupled; Daliri et al., arXiv
2408.07978).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from moedraft.core import Sequence
from moedraft.evidence import Proposal, Rows
from moedraft.kernels import TARGET_INVALID, round_seeds, verify_block, verify_chain, verify_coupled
from moedraft.sampling import SamplingBatch, limited

Verification = Literal["chain", "block", "coupled"]  # the rule by which sampled rows are verified


class Verifier:
    """Verifies by one rule; greedy rows are the same under all of them."""

    def __init__(self, rule: Verification = "chain") -> None:
        self.rule: Verification = rule
        self._known: tuple[list[Sequence], SamplingBatch] | None = None

    def sampling(self, sequences: list[Sequence], device: torch.device) -> SamplingBatch:
        """How the rows are sampled in the coming round: by the drafter, and by `verify`."""
        batch = self._batch(sequences, device)
        if self.rule == "block" and not batch.greedy:
            # Block verification looks at rejected tokens too, so each round needs random numbers of its own.
            return replace(batch, seed=round_seeds(batch.seed, positions(sequences, device)))
        return replace(batch, coupled=True) if self.rule == "coupled" else batch

    def _batch(self, sequences: list[Sequence], device: torch.device) -> SamplingBatch:
        """Their sampling parameters as tensors, which are kept until the batch changes."""
        # Sequences are compared as objects, since a request may have the id of one that has ended.
        if self._known is None or [id(row) for row in self._known[0]] != [id(row) for row in sequences]:
            params, seeds = [row.params for row in sequences], [row.seed for row in sequences]
            self._known = (sequences, SamplingBatch.of(params, seeds, device))
        return self._known[1]

    def verify(
        self, rows: Rows, proposal: Proposal, logits: torch.Tensor
    ) -> tuple[list[list[int]], list[int], list[bool]]:
        """By row: the tokens emitted, how many of them were drafted, whether the target's logits are broken.

        logits [B, K+1, V] are the target's. The tokens are the accepted ones and one of the target's own.
        """
        device, sampling = logits.device, rows.sampling
        check = {"chain": verify_chain, "block": verify_block, "coupled": verify_coupled}[self.rule]
        filtered, cuts = limited(logits, sampling)
        emitted, accepted, status = check(
            filtered,
            proposal.token_ids,
            proposal.logits,
            draft_lse=proposal.lse,
            num_draft=torch.tensor(proposal.lengths, device=device),
            temperature=0.0 if sampling.greedy else sampling.temperature,
            seed=sampling.seed,
            position=positions(rows.sequences, device),
            target_cuts=cuts,
            draft_cuts=proposal.cuts,
        )
        found = torch.cat((emitted, torch.stack((accepted, status.to(accepted.dtype)), 1)), 1)
        rows_found = found.tolist()  # the only time that a round waits for verification
        tokens = [row[: row[-2] + 1] for row in rows_found]
        return tokens, [row[-2] for row in rows_found], [bool(row[-1] & TARGET_INVALID) for row in rows_found]


def positions(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """By row, where its next token will stand: int64 [B]."""
    return torch.tensor([len(row.token_ids) for row in sequences], device=device)
