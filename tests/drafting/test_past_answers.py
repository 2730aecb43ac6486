"""Guesses from earlier answers: the longest match, what followed it most often, and how much is kept."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moedraft.core import SHARED
from moedraft.drafting.lookup import past_answers
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.drafting.lookup.matches import LONGEST, Match
from moedraft.drafting.lookup.past_answers import NewestAnswers, PastAnswers
from moedraft.evidence import NOBODY

from rounds import chain, evidence_of, row, rows_of

A, B = [1, 2, 3, 4, 5], [9, 2, 3, 7, 8]


def past(*answers: tuple[str, list[int]], most: int = 1000) -> PastAnswers:
    one = PastAnswers(most)
    for domain, answer in answers:
        one.add(domain, answer)
    return one


def brute(answers: list[list[int]], text: list[int], count: int) -> tuple[int, set[int]]:
    """How many tokens agree at best, and the next tokens that most often followed there."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        for place in range(len(answer) - 1):
            length = 0
            while length < min(LONGEST, place + 1, len(text)) and answer[place - length] == text[-1 - length]:
                length += 1
            found.setdefault(length, []).append(answer[place + 1])
    best = max(found, default=0)
    if not best:
        return 0, set()
    often = max(found[best].count(token) for token in found[best])
    return best, {token for token in found[best] if found[best].count(token) == often}


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_looking_everywhere_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_answers, "CANDIDATES", 10_000)
    rng = random.Random(seed)
    answers = [rng.choices(range(5), k=rng.randint(1, 12)) for _ in range(8)]
    one = NewestAnswers(10_000)
    for answer in answers:
        one.add(answer)
    for _ in range(30):
        text = rng.choices(range(6), k=rng.randint(1, 10))
        match, (length, nexts) = one.find(text, 3), brute(answers, text, 3)
        assert (match.length if match else 0) == length
        if match:
            assert match.past
            assert match.tokens[0] in nexts
            assert 1 <= len(match.tokens) <= 3
            joined = text[len(text) - length :] + match.tokens
            assert any(
                answer[i : i + len(joined)] == joined for answer in answers for i in range(len(answer))
            )


def test_what_followed_most_often_is_guessed_and_the_newest_of_these() -> None:
    one = past(("a", [1, 2, 3, 4]), ("a", [1, 2, 5, 6]), ("a", [1, 2, 3, 7]))
    assert one.find("a", [1, 2], 3) == Match(2, [3, 7], past=True)


def test_a_guess_ends_with_the_answer_that_it_is_from() -> None:
    one = past(("a", A), ("a", B))
    assert one.find("a", [4], 9) == Match(1, [5], past=True)
    assert one.find("a", [5], 9) is None, "nothing follows the end of an answer"
    assert one.find("a", [5, 9], 9) == Match(1, [2, 3, 7, 8], past=True), "two answers are not one text"


def test_the_domains_own_answers_come_first_and_longer_matches_of_all_then() -> None:
    one = past(("a", A), ("b", B))
    assert one.find("a", [2, 3], 1) == Match(2, [4], past=True)
    assert one.find("b", [2, 3], 1) == Match(2, [7], past=True)
    assert one.find("a", [9, 2, 3], 1) == Match(2, [4], past=True), "a pair of its own suffices"
    assert one.find("a", [9, 2], 2) == Match(2, [3, 7], past=True)
    assert one.find("nobody's", [3, 4], 2) == Match(2, [5], past=True)
    assert one.find(SHARED, [3, 7], 2) == Match(2, [8], past=True)


def test_old_answers_make_room() -> None:
    one = past(*(("a", [100 + i, i, 200]) for i in range(50)), most=60)
    kept = [i for i in range(50) if one.find("a", [100 + i], 1)]
    assert kept == list(range(kept[0], 50))
    assert 30 // 4 - 1 <= len(kept) <= 60 // 4


def test_a_very_long_answer_takes_no_more_room_than_others() -> None:
    one = past(("a", list(range(10_000))), ("a", [20_000, 20_001]), most=100)
    assert one.find("a", [20_000], 1) == Match(1, [20_001], past=True)
    assert one.find("a", [9_000], 1) is None


def test_the_same_answer_again_and_again_pushes_no_others_out() -> None:
    one = past(("a", A), *[("a", B)] * 50, most=60)
    assert one.find("a", [1, 2], 1) == Match(2, [3], past=True)


def test_nothing_is_kept_where_nothing_is_wanted() -> None:
    one = past(("a", A), most=0)
    assert one.find("a", [1], 1) is None


def test_forgotten_answers_guess_nothing() -> None:
    one = past(("a", A))
    one.clear()
    assert one.find("a", [2], 1) is None
    assert one.find(SHARED, [2], 1) is None


class TestDrafter:
    def test_own_text_comes_first_where_as_much_agrees(self) -> None:
        drafter = LookupDrafter(past(("sql", [5, 6, 1, 2])))
        own = row(0, 5, 6, 7, 5, 6, expert="sql")
        assert drafter.find(own, 2, True) == Match(2, [7, 5])
        new = row(1, 7, 5, 6, expert="sql")
        assert drafter.find(new, 2, True) == Match(2, [1, 2], past=True)
        single = row(2, 6, 8, 9, 6, expert="sql")
        assert drafter.find(single, 2, True) == Match(1, [8, 9])

    def test_only_own_text_where_nothing_is_weighed(self) -> None:
        """The answer to a seed must not depend on what others asked."""
        drafter = LookupDrafter(past(("sql", [5, 6, 1, 2])))
        rows = rows_of(row(0, 7, 5, 6, expert="sql"), row(1, 6, 8, 9, 6, expert="sql"))
        assert drafter.propose(rows, [3, 3]).sources == [NOBODY, NOBODY]
        assert drafter.propose(rows, [3, 3], weighed=[False, True]).sources == [NOBODY, "lookup"]

    def test_both_kinds_of_matches_are_judged_apart(self) -> None:
        drafter = LookupDrafter(past(("sql", [5, 6, 1, 2])))
        rows = rows_of(row(0, 5, 6, 7, 5, 6, expert="sql"), row(1, 7, 5, 6, expert="sql"))
        made = drafter.propose(rows, [2, 2], weighed=[True, True])
        assert made.lengths == [2, 2]
        assert made.confidences[0][0] > made.confidences[1][0]
        for _ in range(50):
            made = drafter.propose(rows, [2, 2], weighed=[True, True])
            drafter.observe(evidence_of(rows, made, [0, 2]))
        made = drafter.propose(rows, [2, 2], weighed=[True, True])
        assert made.confidences[0][0] < 0.2
        assert made.confidences[1][0] > 0.8

    def test_what_was_found_and_not_used_teaches_as_well(self) -> None:
        """Else a kind of match that is rarely right at first would never be tried again."""
        drafter = LookupDrafter(past(("sql", [5, 6, 1, 2])))
        rows = rows_of(row(0, 7, 5, 6, expert="sql"))
        first = drafter.propose(rows, [2], weighed=[True]).confidences[0][0]
        for said in ([1, 2, 9], [1, 2]):
            drafter.propose(rows, [2], weighed=[True])
            drafter.observe(replace(evidence_of(rows, chain([8]), [0]), tokens=[said]))
        made = drafter.propose(rows, [2], weighed=[True])
        assert made.confidences[0][0] > first + 0.1
        drafter.observe(replace(evidence_of(rows, made, [0]), broken=[True]))
        drafter.observe(replace(evidence_of(rows, made, [0]), tokens=[[3]]))
        assert drafter.propose(rows, [2], weighed=[True]).confidences == made.confidences
