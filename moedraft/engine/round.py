"""One round of speculative decoding: propose → verify → commit (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

from moedraft.core import Sequence
from moedraft.engine.capture import Capture
from moedraft.engine.port import Commit, Learner, Proposer, Verify
from moedraft.engine.target import TargetRunner
from moedraft.engine.verification import Verifier
from moedraft.evidence import Evidence, Reading, Rows


class Round:
    """One call is one round of the sequences in slots 0 … B−1; each of them gets at least one token."""

    def __init__(
        self,
        target: TargetRunner,
        proposer: Proposer,
        verifier: Verifier,
        capture: Capture,
        *learners: Learner,
        verify: Verify | None = None,
    ) -> None:
        """learners: are shown the evidence. verify: the verifier's own, or that with a timer around it."""
        self.target, self.proposer, self.verifier = target, proposer, verifier
        self.learners, self.capture = learners, capture
        self.verify: Verify = verify or verifier.verify

    def __call__(self, sequences: list[Sequence], commit: Commit, reading: Reading | None = None) -> Evidence:
        """reading: prompts of other sequences, to be read in the same forward."""
        rows = Rows(sequences, self.verifier.sampling(sequences, self.target.model.device))
        # Propose: drafters guess up to K tokens for each row.
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
        return evidence
