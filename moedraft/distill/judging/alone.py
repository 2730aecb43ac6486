"""The gate for an expert that learned alone, above a shared adapter that stays as it is."""

from __future__ import annotations

from dataclasses import replace

from moedraft.distill.judging.gate import Verdict, compare, decide, decide_again
from moedraft.distill.judging.options import HARMFUL, Options, is_below
from moedraft.distill.judging.shrinkage import estimates
from moedraft.distill.judging.together import stands_below


def decide_alone(options: Options, kept: int = 0) -> Verdict:
    """The verdict on an expert that learned alone, above the shared adapter that serves.

    `options.old` is what serves now; `options.none` is the shared adapter alone.
    """
    assert options.new is not None
    if options.seen is None:
        found = decide(options.before, options.new, kept)
    else:
        found = decide_again(options.before, options.new, options.seen, kept)
    if options.static is None or not options.before.records:
        return found
    over = estimates([options.static], [options.new])[0]
    found = replace(found, static=over.gain)
    if found.decision == "promote" and not is_below(over):
        return found
    if stands_below(options) and _is_better_off_without(options):
        reason = "The domain stands below the draft without any adapter; it gets no expert."
        return replace(found, decision="reset", reason=reason)
    if found.decision == "promote":
        reason = "The domain would stand below the draft without any adapter; nothing is published."
        return replace(found, decision="discard", reason=reason)
    return found


def _is_better_off_without(options: Options) -> bool:
    """Whether the shared adapter alone gives more than the expert that serves above it."""
    return options.none is not None and compare(options.before, options.none).better > 1 - HARMFUL
