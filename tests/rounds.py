"""Rows and proposals made by hand, for tests of one round and of those who draft for it."""

from __future__ import annotations

from typing import Any

import torch

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.evidence import NOBODY, Evidence, Proposal, Rows
from moedraft.sampling import SamplingBatch


def row(slot: int, *token_ids: int, **options: Any) -> Sequence:
    """A request in a slot, its prompt read by nobody; options are those of its parameters and its own."""
    sampling = {key: options.pop(key) for key in list(options) if key in SamplingParams.__dataclass_fields__}
    params = SamplingParams(**sampling)
    ids, seed = list(token_ids), params.seed or 0
    return Sequence(f"request {slot}", ids, len(ids), params, seed, slot=slot, **options)


def rows_of(*sequences: Sequence) -> Rows:
    params, seeds = [one.params for one in sequences], [one.seed for one in sequences]
    return Rows(list(sequences), SamplingBatch.of(params, seeds, torch.device("cpu")))


def chain(*guesses: list[int], source: str = "script", **fields: Any) -> Proposal:
    """A proposal of these tokens by row; an empty list is no guess."""
    width = max(map(len, guesses))
    values: dict[str, Any] = {
        "token_ids": torch.tensor(
            [guess + [-1] * (width - len(guess)) for guess in guesses], dtype=torch.int64
        ).reshape(len(guesses), width),
        "lengths": [len(guess) for guess in guesses],
        "sources": [source if guess else NOBODY for guess in guesses],
        "experts": [SHARED] * len(guesses),
        "versions": [0] * len(guesses),
        "confidences": [[0.5] * len(guess) for guess in guesses],
        "steps": width,
    }
    return Proposal(**values | fields)


def evidence_of(rows: Rows, proposal: Proposal, accepted: list[int]) -> Evidence:
    """As if so many tokens had been accepted; token 0 follows. Nothing is known of the target."""
    tokens = [[*guess[:count], 0] for guess, count in zip(proposal.token_ids.tolist(), accepted, strict=True)]
    broken = [False] * len(rows)
    return Evidence(rows.sequences, proposal, tokens, accepted, broken, torch.empty(0))
