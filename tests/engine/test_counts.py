"""What a round adds to a request's statistics, and for whom its drafts count."""

from __future__ import annotations

from moedraft.core import SHARED
from moedraft.engine.commit import count_round, keep_for_learning
from moedraft.speculation import SpeculationStats

from rounds import chain, evidence_of, row, rows_of


def test_first_guesses_are_counted_by_who_drafted() -> None:
    """The expert in one round, the shared adapter in two, nobody in one, a lookup in one."""
    one = row(0, 1, 2, expert="sql")
    for drafter, guess, accepted in (
        ("sql", [5, 6], 1),
        (SHARED, [7, 8, 9], 2),
        (SHARED, [3], 0),
        (SHARED, [], 0),
    ):
        rows = rows_of(one)
        proposal = chain(guess, experts=[drafter])
        count_round(evidence_of(rows, proposal, [accepted]), 0, accepted + 1)
    rows = rows_of(one)
    count_round(evidence_of(rows, chain([4, 4], source="lookup", experts=[SHARED]), [2]), 0, 3)
    rows = rows_of(one)
    count_round(evidence_of(rows, chain([6, 7, 8], source="earlier answers", experts=[SHARED]), [2]), 0, 3)
    found = one.speculation
    assert (found.num_steps, found.num_drafts, found.num_lookup_tokens) == (6, 3, 5)
    assert (found.num_accepted_lookup_tokens, found.num_earlier_tokens) == (4, 3)
    assert found.num_accepted_earlier_tokens == 2
    assert (found.drafted_at, found.accepted_at) == ([3, 2, 1], [2, 1])
    assert (found.shared_drafted_at, found.shared_accepted_at) == ([2, 1, 1], [1, 1])
    assert (found.expert_drafted_at, found.expert_accepted_at) == ([1, 1, 0], [1, 0])


def test_first_guesses_are_those_that_were_looked_at() -> None:
    found = SpeculationStats()
    assert found.first_step_share is None
    found.saw(2, 3, shared=False)
    found.saw(1, 3, shared=True)
    assert found.first_step_share == 1 / 2
    assert (found.shared_first_guesses, found.shared_right_first_guesses) == (3, 1)


def test_stats_of_several_answers_add_up() -> None:
    one = SpeculationStats(2, 2, 3, 1, [2, 1], [1], 4, 3, 2, 1, [1], [1])
    other = SpeculationStats(1, 1, 3, 2, [1, 1, 1], [1, 1], 0, 0, 0, 0, [], [])
    both = SpeculationStats(3, 3, 6, 3, [3, 2, 1], [2, 1], 4, 3, 2, 1, [1], [1])
    assert one + other == other + one == both
    assert sum([one, other], SpeculationStats()) == both
    assert (one.drafted_at, other.drafted_at) == ([2, 1], [1, 1, 1])


def test_what_is_kept_for_learning_is_no_count() -> None:
    one = row(0, 1, 2, expert="sql")
    evidence = evidence_of(rows_of(one), chain([5, 6, 7], experts=["sql"], versions=[3]), [1])
    keep_for_learning(evidence, 0, 2)
    assert (one.adapter_version, one.rejected, one.speculation) == (3, [1], SpeculationStats())
    keep_for_learning(evidence, 0, 1)  # the refused token lies behind the end of the answer
    assert one.rejected == [1]
    for source in ("lookup", "earlier answers"):
        looked = chain([4, 4], source=source, experts=["sql"], versions=[9])
        keep_for_learning(evidence_of(rows_of(one), looked, [0]), 0, 1)
    assert (one.adapter_version, one.rejected) == (3, [1])
