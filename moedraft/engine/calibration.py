"""What rounds cost on this machine, measured before the first request.

A budget that has seen nothing goes by typical costs. Where drafting is much cheaper than that, and the draft
is poor, it would find that drafting does not pay and would hardly ever try it, so it would learn the true
costs late or never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import product
from time import monotonic

from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.engine.engine import Engine

log = logging.getLogger(__name__)

PASSES = 3  # over all kinds of rounds, so that a slow moment of the machine is not all of one kind's rounds
ROUNDS = 3  # of each kind in a pass, after one that is not timed where another kind came before it
LENGTHS = (0, 1, 3)  # draft tokens of each row; 0 is plain decoding
TOKENS = 32  # of the text that stands before


def calibrate(engine: Engine, batches: Collection[int] = (), *, seconds: float = 4.0) -> None:
    """Time plain and drafting rounds, and tell the engine's budget. The engine must be idle.

    batches: numbers of rows to time; by itself one row, and as many as the engine has slots. After `seconds`
    no further kind of round is begun. What the guesses were worth says nothing about real requests, so the
    budget gets the times alone. A fault is logged and changes nothing.
    """
    if not engine.chooser.drafts or engine.has_work:
        return
    began, known, chooser = monotonic(), engine.chooser.budget, engine.chooser
    measured = Budget(known.longest, known.ragged)
    try:
        kinds = product(range(PASSES), sorted({*batches} or {1, engine.scheduler.slots}), LENGTHS)
        for _, rows, length in kinds:
            if monotonic() - began < seconds and length <= known.longest:
                with chooser.using(budget=measured, source="model", fixed_length=length):
                    _run(engine, rows, length)
    except Exception:
        log.exception("What rounds cost could not be measured; the budget goes by typical costs.")
        return
    known.costs = RoundCosts(measured.costs.calibrated())


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
