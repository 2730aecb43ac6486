"""Has every kernel that a round can need compiled before the first request.

Triton compiles a kernel when it is first launched with arguments of a kind: within a request that would take
a second or more. What kinds there are follows from the rule of verification, the filters, the lengths of the
drafts, the number of rows and the models' types; so rounds of all kinds are run.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Any

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.chooser import DraftSource
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.drafting.lookup.matches import SHORTEST, Match
from moedraft.engine.engine import Engine

log = logging.getLogger(__name__)

TOKENS = 4  # of the text that stands before
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01}


class SureDrafter(LookupDrafter):
    """As if something were found for every row in its own text, whatever that is."""

    def find(self, row: Sequence, count: int, widely: bool = False) -> Match | None:
        return Match(SHORTEST, [0] * count) if count else None


def warm_up(engine: Engine, *, compiles: bool | None = None) -> None:
    """Run a round of every kind. The engine must be idle.

    compiles: whether there is anything to compile; None: on a GPU. A fault is logged and changes nothing:
    what is missing is compiled when it is needed.
    """
    if compiles is None:
        compiles = engine.target.device.type == "cuda"
    if not compiles or engine.has_work:
        return
    began = monotonic()
    try:
        for rows in batches(engine.scheduler.slots):
            _rounds(engine, rows)
    except Exception:
        log.exception("Not all kernels could be compiled at the start; the others are when they are needed.")
    log.info("kernels were compiled in %.1f s", monotonic() - began)


def batches(slots: int) -> list[int]:
    """Numbers of rows: how many chunks a program reads grows with it, in steps of four times at least."""
    return sorted({1 << power for power in range(slots.bit_length())} | {slots})


def lengths(longest: int, vocab_size: int) -> list[int]:
    """Draft lengths: kernels are compiled for the next power of two of the positions, one more than tokens.

    Whether a sequence's logits begin at a multiple of 16 entries depends on each length, where the vocabulary
    is no such multiple.
    """
    if vocab_size % 16:
        return list(range(longest + 1))
    full = {(1 << power) - 1 for power in range(longest.bit_length() + 1)}
    return sorted({length for length in full if length <= longest} | {longest})


def _rounds(engine: Engine, rows: int) -> None:
    longest = engine.chooser.longest if engine.chooser.drafts else 0
    for length in lengths(longest, engine.vocab_size):
        for sampling in (GREEDY, SAMPLED, FILTERED):
            _run(engine, rows, length, sampling)
        if length:  # in rows that are not filtered, what verifies these is what verifies greedy rows
            _run(engine, rows, length, FILTERED, source="lookup")


def _run(
    engine: Engine, rows: int, length: int, sampling: dict[str, Any], source: DraftSource = "model"
) -> None:
    """A round of so many rows that draft `length` tokens each."""
    params = SamplingParams(max_tokens=3 * (length + 1), ignore_eos=True, **sampling)
    if engine.max_model_len < TOKENS + params.max_tokens:  # no place for it, and none for such a draft
        return
    budget = Budget(engine.chooser.budget.longest, engine.chooser.budget.ragged)
    prompts = [[row % engine.vocab_size] * TOKENS for row in range(rows)]
    ids = [engine.add(prompt, params, expert=SHARED, counted=False) for prompt in prompts]
    try:
        lookup = SureDrafter()
        with engine.chooser.using(budget, source, fixed_length=length, lookup=lookup):
            while engine.has_work and engine.scheduler.num_ready < rows:
                engine.step()
            engine.step()
    finally:
        for request_id in ids:
            engine.abort(request_id)
