"""Learning as a server paces it: requests that tell how long decoding takes, so that a trainer can reckon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from moedraft.core import SHARED, RequestStats
from moedraft.models import LanguageModel
from moedraft.speculation import SpeculationStats

TIMED = 15  # steps of the target whose median time counts


@torch.no_grad()
def step_seconds(target: LanguageModel, depth: int) -> float:
    """Of one step of the target that verifies `depth` drafted tokens of one request, here and now."""
    ids = torch.zeros((1, depth + 1), dtype=torch.long, device=target.device)
    found = []
    for _ in range(TIMED):
        began = time.perf_counter()
        target.hf(ids).logits.argmax(-1).tolist()
        found.append(time.perf_counter() - began)
    return median(found)


def request_of(owner: str, counts: Sequence[int], prompt: int, tokens: int, step: float) -> RequestStats:
    """What a server would have kept of a request, had it drafted at every token.

    counts: as `Run.counts` has them of this request. prompt, tokens: tokens that were read and answered.
    step: seconds of one step of the target.
    """
    tried, first, *_ = counts
    steps = max(1, round(tokens * tried / max(1, sum(counts))))
    speculation = SpeculationStats(num_steps=steps, first_guesses=tried, right_first_guesses=first)
    if owner == SHARED:
        speculation.shared_first_guesses, speculation.shared_right_first_guesses = tried, first
    return RequestStats(
        request_id="",
        expert=owner,
        adapter_version=0,
        lang="",
        num_prompt_tokens=prompt,
        num_tokens=tokens,
        speculation=speculation,
        seconds=steps * step,
        finish_reason="stop",
        time_to_first_token=0.0,
    )
