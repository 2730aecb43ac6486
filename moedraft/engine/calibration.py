"""What rounds cost on this machine, measured before the first request.

A budget that has seen nothing goes by typical costs. Where drafting is much cheaper than that, and the draft
is poor, it would find that drafting does not pay and would hardly ever try it, so it would learn the true
costs late or never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
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
FORWARD_PASSES = 4  # over all numbers of tokens; the fastest time of each counts, since noise only ever adds
FORWARD_SECONDS = 1.25  # for forwards of one row, and as long for full batches; what was begun ends
WIDTHS = (1, 2, 3, 5)  # tokens of each row that are timed of full batches, besides the most there can be
MOST_TOKENS = 256  # of one forward; all their logits are in memory at once


def calibrate(
    engine: Engine, batches: Collection[int] = (), *, seconds: float = 4.0, forwards: bool = True
) -> None:
    """Time plain and drafting rounds, and tell the engine's budget. The engine must be idle.

    batches: numbers of rows to time; by itself one row, and as many as the engine has slots. forwards: first
    time the target's forwards by how many tokens they read, for some three seconds at most. Then rounds are
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

    None where lengths are fixed, where the context has no room for it, or where forwards take too long for
    those of one row to be timed twice. A fault is logged and leaves it unknown.
    """
    longest = engine.chooser.budget.longest if engine.chooser.limits.adaptive else 0
    if not longest or engine.max_model_len < TOKENS + longest + 1:
        return None
    widths = range(1, longest + 2)
    some = [width for width in widths if width in (*WIDTHS, longest + 1) and rows * width <= MOST_TOKENS]
    times: dict[int, list[float]] = {}
    try:
        for shapes in ([(1, width) for width in widths], [(rows, width) for width in some if rows > 1]):
            _time_forwards(engine, shapes, times)
    except Exception:
        log.exception("The target's forwards could not be timed; verified tokens are taken to cost alike.")
        return None
    finally:
        for slot in range(rows):
            engine.runner.clear(slot)
    growth, known = None, {n: min(each) for n, each in times.items() if len(each) > 1}
    if widths[-1] in known:  # from part of a curve nothing can be told of the rest
        growth = Growth.through(known, longest)
    else:
        log.info("The target's forwards take too long to be timed; verified tokens are taken to cost alike.")
    return growth


def _time_forwards(engine: Engine, shapes: Sequence[tuple[int, int]], times: dict[int, list[float]]) -> None:
    """Add the milliseconds of forwards over so many rows and tokens of each to `times`, by all tokens."""
    began = monotonic()
    for _, (rows, width) in product(range(FORWARD_PASSES), shapes):
        if monotonic() - began > FORWARD_SECONDS:
            return
        start = perf_counter()
        engine.runner.rehearse(rows, width, TOKENS)
        times.setdefault(rows * width, []).append((perf_counter() - start) * 1e3)


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
