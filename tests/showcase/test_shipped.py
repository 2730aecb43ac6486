"""The prompts of the demo: which domains, how many, and that none is used twice."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.showcase import shipped
from moedraft.showcase.demo import Demo, affordable
from moedraft.showcase.findings.report import Point


def test_the_real_model_gets_eight_domains_with_forty_requests_each() -> None:
    prompts = shipped.chosen()
    assert sorted(prompts.examples) == sorted(shipped.CHOSEN)
    assert Counter(q.domain for q in prompts.stream) == dict.fromkeys(shipped.CHOSEN, 40)
    assert Counter(q.domain for q in prompts.heldout) == dict.fromkeys(shipped.CHOSEN, 8)
    for first in range(0, 320, 8):
        assert len({q.domain for q in prompts.stream[first : first + 8]}) == 8


def test_no_prompt_is_registered_streamed_and_held_out() -> None:
    for prompts in (shipped.chosen(), shipped.everything()):
        texts = [text for group in prompts.examples.values() for text in group]
        texts += [query.prompt for query in prompts.stream + prompts.heldout]
        assert len(texts) == len(set(texts))


def test_a_shorter_demo_still_has_every_domain() -> None:
    prompts = shipped.chosen().shortened(24, 1)
    assert len(prompts.stream) == 24
    assert {q.domain for q in prompts.stream} == set(shipped.CHOSEN)
    assert sorted(q.domain for q in prompts.heldout) == sorted(shipped.CHOSEN)


@pytest.mark.parametrize(("each", "rounds"), [(0.1, 8), (0.5, 3), (9.0, 2)])
def test_a_slow_machine_times_fewer_held_out_prompts(each: float, rounds: int) -> None:
    """`each`: seconds that a request of the stream took; six systems answer each held-out prompt."""
    prompts = shipped.chosen()
    demo = Demo(SimpleNamespace(), prompts)
    demo.points = [Point(n, 1.0) for n in range(128)]
    pace = SimpleNamespace(serving_seconds=each * 128)
    assert demo.timed(pace) == 8 * rounds


def test_the_embedded_pair_gets_all_fifteen_domains() -> None:
    prompts = shipped.everything()
    assert len(prompts.examples) == 15
    assert (len(prompts.stream), len(prompts.heldout)) == (360, 60)


@pytest.mark.parametrize(
    ("slopes", "drafted"),  # of a plain round: to draft at all, each token drafted, each verified by a row
    [((0.05, 0.05, 0.1), 3), ((0.0, 0.05, 0.24), 2), ((0.2, 0.3, 0.5), 1)],
)
def test_the_stream_drafts_less_where_verifying_is_expensive(
    slopes: tuple[float, float, float], drafted: int
) -> None:
    assert affordable(RoundCosts({8: np.array(slopes)}), 8) == drafted
