"""Guesses out of the text itself: the longest match, the newest of several, and what they are worth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from moedraft.core import SamplingParams, Sequence
from moedraft.drafting.lengths.budget import survival_of
from moedraft.drafting.lookup import own_text
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.drafting.lookup.matches import LONGEST, SHORTEST, Match, MatchAcceptance
from moedraft.drafting.lookup.own_text import REACH, SuffixIndex
from moedraft.evidence import NOBODY, Evidence, Rows
from moedraft.sampling import SamplingBatch


def rows_of(*sequences: Sequence) -> Rows:
    params = [row.params for row in sequences]
    return Rows(list(sequences), SamplingBatch.of(params, [0] * len(params), torch.device("cpu")))


def brute(tokens: list[int], count: int) -> Match | None:
    """The same by looking everywhere."""
    end, best, where = len(tokens) - 1, 0, -1
    for at in range(end - 1, 0, -1):
        length = 0
        while length < LONGEST and at - length >= 0 and tokens[at - length] == tokens[end - length]:
            length += 1
        if length >= SHORTEST and length > best:
            best, where = length, at
    if not best:
        return None
    grown = list(tokens)
    for i in range(count):
        grown.append(grown[where + 1 + i])
    return Match(best, grown[len(tokens) :])


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_looking_everywhere_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "CANDIDATES", 10_000)
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
    index = SuffixIndex(len(tokens))
    for _ in range(80):
        assert index.find(tokens, 5) == brute(tokens, 5)
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]


def test_nothing_is_found_in_a_text_without_repetition() -> None:
    assert SuffixIndex(50).find(list(range(50)), 4) is None
    assert SuffixIndex(1).find([7], 4) is None


def test_a_loop_is_guessed_beyond_its_end() -> None:
    assert SuffixIndex(6).find([1, 2, 3, 1, 2, 3], 5) == Match(3, [1, 2, 3, 1, 2])
    assert SuffixIndex(4).find([9, 9, 9, 9], 3) == Match(3, [9, 9, 9])


def test_few_candidates_are_compared_and_only_the_near_past() -> None:
    """A text of one pair over and over costs no more than any other; what stands far back is not searched."""
    far = [1, 2, 3, 4] + [5] * REACH + [1, 2]
    assert SuffixIndex(len(far)).find(far, 2) is None
    near = [1, 2, 3, 4] + [5] * (REACH - 6) + [1, 2]
    assert SuffixIndex(len(near)).find(near, 2) == Match(2, [3, 4])


def test_worth_follows_what_verification_shows() -> None:
    rng = random.Random(0)
    worth = MatchAcceptance()
    before = survival_of(worth.rates_after(2, 4))
    assert before == sorted(before, reverse=True)
    for _ in range(400):
        worth.observe(2, 3, 3 if rng.random() < 0.2 else 0)
    chances = worth.rates_after(2, 3)
    assert chances[0] == pytest.approx(0.2, abs=0.12)
    assert worth.rates_after(LONGEST, 1)[0] == pytest.approx(LONGEST / (LONGEST + 1))  # never seen
    worth.observe(2, 1, 1)
    assert len(worth.rates_after(LONGEST, 6)) == 6


def test_greedy_and_sampled_rows_are_judged_apart() -> None:
    found = LookupDrafter()
    greedy = Sequence("g", [1, 2, 3, 1, 2], 5, SamplingParams(), 0)
    sampled = Sequence("s", [1, 2, 3, 1, 2], 5, SamplingParams(temperature=1.0), 0)
    rows = rows_of(greedy, sampled)
    proposal = found.propose(rows, [2, 2])
    assert proposal.token_ids.tolist() == [[3, 1], [3, 1]]
    assert proposal.sources == ["lookup", "lookup"]
    before = proposal.confidences[0]
    used = replace(proposal, sources=[NOBODY, "lookup"])
    for _ in range(50):
        found.propose(rows, [2, 2])
        said = [[3, 1, 0], [0]]
        found.observe(Evidence(rows.sequences, used, said, [0, 0], [False] * 2, torch.zeros(2, 3, 9)))
    after = found.propose(rows, [2, 2]).confidences
    assert after[0][0] > before[0]
    assert after[1][0] < 0.2


def test_only_rows_with_a_limit_and_a_match_are_drafted_for() -> None:
    found = LookupDrafter()
    again, other = [1, 2, 3, 1, 2], [1, 2, 3, 4, 5]
    rows = rows_of(
        *(Sequence(str(i), ids, 5, SamplingParams(), 0) for i, ids in enumerate([again, other, again]))
    )
    proposal = found.propose(rows, [3, 3, 0])
    assert proposal.lengths == [3, 0, 0]
    assert proposal.token_ids.tolist() == [[3, 1, 2], [-1] * 3, [-1] * 3]
    assert proposal.sources == ["lookup", NOBODY, NOBODY]
    assert proposal.cut({0: 1}).token_ids.tolist() == [[3], [-1], [-1]]
    assert not proposal.cut({}).drafted
    assert proposal.cut({}).sources == [NOBODY] * 3


def test_an_id_may_be_used_again() -> None:
    found = LookupDrafter()
    found.find(Sequence("a", [1, 2, 3, 1, 2], 5, SamplingParams(), 0), 2)
    found.forget(Sequence("a", [1, 2], 2, SamplingParams(), 0))
    again = Sequence("a", [4, 5, 6, 4, 5], 5, SamplingParams(), 0)
    assert found.find(again, 1) == Match(2, [6])
    assert found.find(again, 0) is None
