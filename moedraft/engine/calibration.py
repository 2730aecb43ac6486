"""What rounds cost on this machine, measured before the first request.

A budget that has seen nothing goes by typical costs. Where drafting is much cheaper than that, and the draft
is poor, it would find that drafting does not pay and would hardly ever try it, so it would learn the true
costs late or never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import product
from time import monotonic, perf_counter

import torch

from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.drafting.lengths.growth import Growth
from moedraft.engine.engine import Engine

log = logging.getLogger(__name__)

PASSES = 3  # over all kinds of rounds, so that a slow moment of the machine is not all of one kind's rounds
ROUNDS = 3  # of each kind in a pass, after one that is not timed where another kind came before it
LENGTHS = (0, 1, 3)  # draft tokens of each row; 0 is plain decoding
TOKENS = 32  # of the text that stands before
GROWTH_PASSES = 4  # over all numbers of tokens; the fastest time of each counts, since noise only ever adds
GROWTH_SECONDS = 2.5  # after which no further pass is begun
WIDTHS = (1, 2, 3, 5)  # tokens of each row that are timed of full batches, besides the most there can be


def calibrate(
    engine: Engine, batches: Collection[int] = (), *, seconds: float = 4.0, forwards: bool = True
) -> None:
    """Time plain and drafting rounds, and tell the engine's budget. The engine must be idle.

    batches: numbers of rows to time; by itself one row, and as many as the engine has slots. forwards: first
    time the target's forwards by how many tokens they read, for two or three seconds at most. Then rounds are
    timed; after `seconds` no further kind of these is begun. What the guesses were worth says nothing about
    real requests, so the budget gets the times alone. A fault is logged and changes nothing.
    """
    if not engine.chooser.drafts or engine.has_work:
        return
    known, chooser = engine.chooser.budget, engine.chooser
    measured = Budget(known.longest, known.ragged)
    sizes = sorted({*batches} or {1, engine.scheduler.slots})
    try:
        growth = growth_of(engine, sizes[-1]) if forwards else None
        measured.costs = RoundCosts(growth=growth)
        began, kinds = monotonic(), product(range(PASSES), sizes, LENGTHS)
        for _, rows, length in kinds:
            if monotonic() - began < seconds and length <= known.longest:
                with chooser.using(budget=measured, source="model", fixed_length=length):
                    _run(engine, rows, length)
    except Exception:
        log.exception("What rounds cost could not be measured; the budget goes by typical costs.")
        return
    known.costs = RoundCosts(measured.costs.calibrated(), growth)


@torch.inference_mode()
def growth_of(engine: Engine, rows: int) -> Growth | None:
    """How the target's forward grows: of one row for each draft length, and of `rows` for some.

    None where the context has no room for it, or where forwards take too long for all to be timed twice.
    """
    longest = engine.chooser.budget.longest
    if engine.max_model_len < TOKENS + longest + 1:
        return None
    some = {width for width in (*WIDTHS, longest + 1) if width <= longest + 1}
    shapes = sorted({(1, width) for width in range(1, longest + 2)} | {(rows, width) for width in some})
    times: dict[int, float] = {}
    began, passes = monotonic(), 0
    while passes < GROWTH_PASSES and monotonic() - began < GROWTH_SECONDS:
        for count, width in shapes:
            start = perf_counter()
            engine.runner.rehearse(count, width, TOKENS)
            took = (perf_counter() - start) * 1e3
            times[count * width] = min(took, times.get(count * width, took))
        passes += 1
    return Growth.through(times, longest) if passes > 1 else None


def _run(engine: Engine, rows: int, length: int) -> None:
    """Rounds of so many rows that draft `length` tokens each."""
    room = engine.max_model_len - TOKENS
    most = (ROUNDS + 2) * (length + 1)
    if room <= most:  # a context this short has no place for it
        return
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    prompts = [[row % engine.vocab_size] * TOKENS for row in range(rows)]
    ids = [engine.add(ids, params, expert=SHARED, draft=length > 0, counted=False) for ids in prompts]
    try:
        while engine.has_work and engine.scheduler.num_ready < rows:
            engine.step()
        for _ in range(ROUNDS):
            engine.step()
    finally:
        for request_id in ids:
            engine.abort(request_id)
