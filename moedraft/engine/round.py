"""One round of speculative decoding: propose → verify → commit (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import torch

from moedraft.core import Sequence
from moedraft.engine.capture import Capture
from moedraft.engine.target import TargetRunner
from moedraft.evidence import Evidence, Proposal, Reading, Rows
from moedraft.kernels import TARGET_INVALID, round_seeds, verify_block, verify_chain, verify_coupled
from moedraft.sampling import SamplingBatch, filter_logits

Commit = Callable[[Evidence, int], None]  # takes one row's verified tokens into its sequence
Verify = Callable[[Rows, Proposal, torch.Tensor], tuple[list[list[int]], list[int], list[bool]]]
Verification = Literal["chain", "block", "coupled"]  # the rule by which sampled rows are verified


class Proposer(Protocol):
    def propose(self, rows: Rows) -> Proposal: ...


class Learner(Protocol):
    def observe(self, evidence: Evidence) -> None: ...


class Round:
    """Called with the sequences in slots 0 … B−1; each of them gets at least one token."""

    def __init__(
        self,
        target: TargetRunner,
        proposer: Proposer,
        learners: Iterable[Learner],
        capture: Capture,
        verification: Verification = "chain",
    ) -> None:
        self.target, self.proposer, self.learners, self.capture = target, proposer, learners, capture
        self.verification: Verification = verification
        self.verify: Verify = partial(verify, rule=verification)
        self._last: Evidence | None = None
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    def __call__(self, sequences: list[Sequence], commit: Commit, reading: Reading | None = None) -> Evidence:
        """reading: prompts of other sequences, to be read in the same forward."""
        sampling = self._sampling_of(sequences)
        if self.verification == "block" and not sampling.greedy:
            # Block verification looks at rejected tokens too, so each round needs random numbers of its own.
            fresh = round_seeds(sampling.seed, positions(sequences, sampling.seed.device))
            sampling = replace(sampling, seed=fresh)
        if self.verification == "coupled":
            sampling = replace(sampling, coupled=True)
        rows = Rows(sequences, sampling, self._last)
        # Propose: a drafter guesses up to K tokens for each row.
        proposal = self.proposer.propose(rows)
        # Verify: one forward of the target scores them all; each row keeps those that the target agrees with.
        logits, hidden = self.target.score(sequences, proposal, reading)
        tokens, accepted, broken = self.verify(rows, proposal, logits)
        topk = self.capture.keep(sequences, logits, accepted)
        evidence = Evidence(sequences, proposal, tokens, accepted, broken, logits, hidden, topk)
        # Whoever learns from it does so before the rows move on.
        for learner in self.learners:
            learner.observe(evidence)
        # Commit: the accepted tokens, and one more from the target itself, enter the rows.
        for b in range(len(sequences)):
            commit(evidence, b)
        self._last = evidence
        return evidence

    def _sampling_of(self, sequences: list[Sequence]) -> SamplingBatch:
        """Their sampling parameters as tensors, which are kept until the batch changes."""
        known = self._sampling
        # Sequences are compared as objects, since a request may have the id of one that has ended.
        if known is None or [id(row) for row in known[0]] != [id(row) for row in sequences]:
            params, seeds = [row.params for row in sequences], [row.seed for row in sequences]
            known = self._sampling = (sequences, SamplingBatch.of(params, seeds, self.target.model.device))
        return known[1]


def positions(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    """By row, where its next token will stand: int64 [B]."""
    return torch.tensor([len(row.token_ids) for row in sequences], device=device)


def verify(
    rows: Rows, proposal: Proposal, logits: torch.Tensor, rule: Verification = "chain"
) -> tuple[list[list[int]], list[int], list[bool]]:
    """By row: the tokens emitted, how many of them were drafted, and whether the target's logits are broken.

    logits [B, K+1, V] are the target's. What is emitted follows the target's distribution exactly; by the
    rule for blocks it does so if the rows' seeds are this round's alone.
    """
    device, sampling = logits.device, rows.sampling
    check = {"chain": verify_chain, "block": verify_block, "coupled": verify_coupled}[rule]
    emitted, accepted, status = check(
        filter_logits(logits, sampling),
        proposal.token_ids,
        proposal.logits,
        draft_lse=proposal.lse,
        num_draft=torch.tensor(proposal.lengths, device=device),
        temperature=0.0 if sampling.greedy else sampling.temperature,
        seed=sampling.seed,
        position=positions(rows.sequences, device),
    )
    counts = accepted.tolist()
    tokens = [row[: count + 1] for row, count in zip(emitted.tolist(), counts, strict=True)]
    return tokens, counts, [bool(value & TARGET_INVALID) for value in status.tolist()]
