"""When and whom to compare, and what follows from it, with a judge made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import pytest

from moedraft import core
from moedraft.core import SHARED
from moedraft.evidence import Passage
from moedraft.routing.router import Route
from moedraft.selecting.contest import ALL_ARMS, NEAR_ARMS, NOBODY, Contest, arms_to_compare
from moedraft.selecting.prior.confusion import Confusion
from moedraft.selecting.selector import LEAST_PART, SAVED, TIME_SHARE, EvidenceSelector

from rounds import row

ARMS = [SHARED, "sql", "python", "french"]


class Judged:
    """Says that one arm would have guessed every token, and the others none."""

    most_rows, comparable = 4, True

    def __init__(self, best: str, arms: list[str] = ARMS) -> None:
        self.best, self.arms = best, arms
        self.asked: list[tuple[list[Passage], list[str]]] = []

    @property
    def ready(self) -> list[str]:
        return self.arms

    def known(self, row: core.Sequence, since: int, most: int) -> Passage:
        end = len(row.token_ids) - 2
        return Passage(row, max(0, since, end - most), end)

    def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
        self.asked.append((list(passages), list(arms)))
        return [{arm: [float(arm == self.best)] * (p.end - p.first) for arm in arms} for p in passages]


class Answering:
    """A router that always says the same."""

    fits = 0

    def __init__(self, route: Route) -> None:
        self.answer = route
        self.domains = tuple(name for name in route.probabilities if name != SHARED)

    def route(self, texts: Sequence[str]) -> list[Route]:
        return [self.answer] * len(texts)


SQL = Route("sql", 0.9, {"sql": 0.9, "python": 0.05, "french": 0.0, SHARED: 0.05})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made() -> Iterator[list[EvidenceSelector]]:
    kept: list[EvidenceSelector] = []
    yield kept
    for one in kept:
        one.close()


def selector_of(
    made: list[EvidenceSelector], judge: Judged, route: Route = SQL, **options: object
) -> EvidenceSelector:
    made.append(EvidenceSelector(Answering(route), judge, **options))  # type: ignore[arg-type]
    return made[-1]


def begun(selector: EvidenceSelector, *rows: core.Sequence) -> None:
    """Admit the rows, have their prompts read and the router answer."""
    for one in rows:
        one.target_cached = one.num_prompt_tokens - 1
    selector.assign(list(rows))
    for routed, _ in selector._open:
        routed.result()


def question(slot: int = 0, tokens: int = 40, **options: object) -> core.Sequence:
    one = row(slot, *range(tokens), prompt="how many", **options)
    one.speculation.num_drafts = 1
    return one


def goes_on(one: core.Sequence, *tokens: int) -> None:
    """The row gets these tokens, after a draft of the model was verified."""
    one.token_ids += tokens
    one.speculation.num_drafts += 1
    one.draft_cached = len(one.token_ids) - 1


def test_the_prompt_alone_may_overrule_the_router(made: list[EvidenceSelector]) -> None:
    one, selector = question(), selector_of(made, Judged("french"))
    begun(selector, one)
    assert selector.settle() == [one]
    assert (one.expert, one.routed, one.overruled, one.confidence) == ("french", "sql", True, 0.9)
    assert one.domain == "french"
    selector.settle(one)
    assert one.weights["french"] > 0.8


def test_what_overruling_gains_is_counted_on_tokens_that_came_afterwards(
    made: list[EvidenceSelector],
) -> None:
    judge = Judged("french")
    one, selector = question(max_tokens=500), selector_of(made, judge, time_share=None)
    begun(selector, one)
    selector.settle()
    assert (one.overruled, one.speculation.overruled_tokens) == (True, 0), "the prompt itself made the choice"
    for _ in range(20):  # the router's choice is compared by chance, once it is far behind
        goes_on(one, *[1] * 6)
        one.rejected += range(16)
        selector.settle()
    told = copy(one.speculation)
    assert told.overruled_tokens == told.overruled_gain > 0
    judge.best = "sql"
    goes_on(one, *[1] * 6)
    while one.expert == "french":
        one.rejected += range(16)
        selector.settle()
        goes_on(one, *[1] * 6)
    assert one.speculation.overruled_gain < told.overruled_gain, "then the router's choice guessed better"


def test_a_router_that_is_right_is_left_alone(made: list[EvidenceSelector]) -> None:
    one, selector = question(), selector_of(made, Judged("sql"))
    begun(selector, one)
    selector.settle()
    assert (one.expert, one.overruled) == ("sql", False)
    for _ in range(10):
        goes_on(one, *[1] * 6)
        assert selector.settle() == []
    assert one.speculation.overruled_tokens == 0


def test_the_answer_is_followed(made: list[EvidenceSelector]) -> None:
    """The text turns from one domain to another, and back."""
    judge = Judged("sql")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    begun(selector, one)
    selector.settle()
    for best in ("python", "sql", "french"):
        judge.best = best
        for _ in range(10):
            goes_on(one, *[1] * 6)
            selector.settle()
        assert one.expert == best


@pytest.mark.parametrize(
    ("right", "times"),
    [
        (lambda generated: False, [0, 8, *range(24, 200, 16)]),
        (lambda generated: True, [0, 34, 66, 98, 130, 162, 194]),
        (lambda generated: generated >= 12, [0, 8, 40, 72, 104, 136, 168]),
    ],
    ids=["all refused", "none refused", "refused at first"],
)
def test_arms_are_compared_when_guesses_were_refused(
    made: list[EvidenceSelector], right: Callable[[int], bool], times: list[int]
) -> None:
    judge = Judged("sql")
    one, selector = question(max_tokens=500), selector_of(made, judge, time_share=None)
    begun(selector, one)
    at = []
    for generated in range(200):
        before = len(judge.asked)
        selector.settle()
        at += [generated] * (len(judge.asked) - before)
        one.rejected += [] if right(generated) else [generated]
        goes_on(one, 1)
    assert at == times
    assert judge.asked[0][0][0].end - judge.asked[0][0][0].first == 24
    assert all(p.end - p.first <= 8 for passages, _ in judge.asked[1:] for p in passages)


def test_where_nothing_is_drafted_prompts_alone_are_compared(made: list[EvidenceSelector]) -> None:
    """In full batches drafting may not pay with this arm, and yet with another; its answer tells no more."""
    judge = Judged("french")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    one.speculation.num_drafts = 0
    begun(selector, one)
    for generated in range(200):
        selector.settle()
        assert len(judge.asked) == (1 if generated < 50 else 2)
        one.token_ids.append(1)
        one.speculation.num_drafts = int(generated >= 49)  # a single draft
    assert one.expert == "french"


def test_only_one_arm_is_compared_that_has_to_be_made_ready_first() -> None:
    contest, chance = Contest(question(), arms := [SHARED, "a", "b", "c", "d"], Confusion()), random.Random(0)
    chosen = arms_to_compare([contest], arms, chance, [SHARED, "c"])
    assert {SHARED, "c"} < set(chosen)
    assert len(chosen) == 3


def test_where_the_router_is_sure_the_prompt_is_not_compared(made: list[EvidenceSelector]) -> None:
    """The answer is, after the first refusals."""
    judge = Judged("french")
    sure = Route("sql", 0.99, {"sql": 0.99, "python": 0.01, "french": 0.0, SHARED: 0.0})
    one, selector = question(max_tokens=500), selector_of(made, judge, sure)
    begun(selector, one)
    at = []
    for generated in range(12):
        before = len(judge.asked)
        selector.settle()
        at += [generated] * (len(judge.asked) - before)
        one.rejected.append(generated)
        goes_on(one, 1)
    assert at == [4, 8]
    [passage], arms = judge.asked[0]
    assert (passage.end - passage.first, sorted(arms)) == (8, sorted(ARMS))
    assert one.expert == "french"


def test_the_router_is_waited_for_but_not_for_long(made: list[EvidenceSelector]) -> None:
    judge = Judged("french")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    one.target_cached = one.num_prompt_tokens - 1
    selector.assign([one])
    [(routed, _)] = selector._open
    selector._open.clear()  # the router does not answer
    at = []
    for generated in range(8):
        before = len(judge.asked)
        selector.settle()
        at += [generated] * (len(judge.asked) - before)
        goes_on(one, 1)
    assert at == [4]
    assert one.expert == "french"
    routed.result()


def test_arms_are_compared_more_often_where_it_changes_something(made: list[EvidenceSelector]) -> None:
    """With every comparison another arm is the best; all guesses are refused."""
    judge = Judged("sql")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    begun(selector, one)
    at = []
    for generated in range(60):
        before = len(judge.asked)
        selector.settle()
        if len(judge.asked) > before:
            at.append(generated)
            judge.best = ARMS[1 + len(at) % 3]
        one.rejected.append(generated)
        goes_on(one, 1)
    assert at == [0, 8, 12, 16, 24, 28, 36, 40, 48, 52]  # the prompt agreed with the router


def test_who_is_left_alone(made: list[EvidenceSelector]) -> None:
    """What the user chose, reproducible sampling, plain decoding, and what is not read yet."""
    judge = Judged("french")
    selector = selector_of(made, judge)
    pinned = question(0, expert="python", pinned=True)
    seeded = question(1, temperature=1.0, seed=3)
    plain = question(2, draft=False, capture=True)
    unread = question(3)
    begun(selector, pinned, seeded, plain, unread)
    unread.target_cached = 5
    selector.settle()
    assert judge.asked == []
    assert [one.expert for one in (pinned, seeded, plain, unread)] == ["python", "sql", "sql", "sql"]
    unread.target_cached = unread.num_prompt_tokens - 1
    selector.settle()
    assert [one.expert for one in (pinned, seeded, plain, unread)] == ["python", "sql", "sql", "french"]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "coupled": True}], ids=["greedy", "coupled"])
def test_a_request_whose_seed_depends_on_no_draft_may_switch(
    options: dict[str, Any], made: list[EvidenceSelector]
) -> None:
    one, selector = question(seed=3, **options), selector_of(made, Judged("french"))
    begun(selector, one)
    selector.settle()
    assert one.expert == "french"


def test_without_experts_the_router_decides(made: list[EvidenceSelector]) -> None:
    judge = Judged(SHARED, [SHARED])
    one, selector = question(), selector_of(made, judge)
    begun(selector, one)
    selector.settle()
    assert one.expert == "sql"
    assert judge.asked == []


def test_a_domain_that_never_learned_keeps_its_requests(made: list[EvidenceSelector]) -> None:
    """Its expert is the shared draft in all but name. Another one may draft better, and yet the text is not
    that one's: the domain would never learn otherwise, and the other expert learn what is not its own."""
    route = Route("maths", 0.9, {"maths": 0.9, "sql": 0.05, SHARED: 0.05})
    for best, expected in ((SHARED, "maths"), ("sql", "sql")):
        one, selector = question(), selector_of(made, Judged(best), route)
        begun(selector, one)
        selector.settle()
        selector.settle(one)
        assert (one.expert, one.domain) == (expected, "maths")
        assert one.weights == one.heard == {}  # nobody can tell how the domain's own expert would stand


def test_what_the_shared_draft_takes_over_is_still_learned_by_the_domain(
    made: list[EvidenceSelector],
) -> None:
    one, selector = question(), selector_of(made, Judged(SHARED))
    begun(selector, one)
    selector.settle()
    assert (one.expert, one.domain, one.overruled) == (SHARED, "sql", True)


def test_above_the_threshold_the_domain_is_tried_first(made: list[EvidenceSelector]) -> None:
    route = Route("sql", 0.4, {"sql": 0.4, "python": 0.05, SHARED: 0.55})
    one, judge = question(tokens=2), Judged("sql")
    begun(selector := selector_of(made, judge, route), one)
    selector.settle()
    assert judge.asked == []  # two tokens tell nothing
    assert one.expert == "sql"


def test_an_answer_of_the_router_that_comes_late_counts(made: list[EvidenceSelector]) -> None:
    one, judge = question(), Judged("nobody")
    one.target_cached = one.num_prompt_tokens - 1
    contest = Contest(one, ARMS, Confusion())
    contest.learn({"sql": [0.0] * 8, "french": [1.0] * 8, "python": [0.0] * 8, SHARED: [0.0] * 8}, 8)
    assert one.expert == "french"
    one.expert = "sql"  # as the router has set it now
    contest.believe(SQL.probabilities)
    assert one.expert == "french"
    assert judge.asked == []


def test_time_is_limited(made: list[EvidenceSelector]) -> None:
    """A comparison that takes long is paid for before the next one; what is saved up is bounded."""
    clock = Clock()

    class Slow(Judged):
        def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
            clock.now += 0.05
            return super().hits(passages, arms)

    judge = Slow("sql")
    selector = selector_of(made, judge, clock=clock, time_share=0.03)
    clock.now = 1000.0
    rows = [question(slot, max_tokens=10_000) for slot in range(4)]
    begun(selector, *rows)
    began = clock.now
    for _ in range(400):
        clock.now += 0.02
        for one in rows:
            goes_on(one, 1, 1)
        selector.settle()
    spent = 0.05 * len(judge.asked)
    assert spent <= 0.03 * (clock.now - began) + SAVED + 0.05
    assert len(judge.asked) > 3


def test_comparing_takes_less_time_where_it_changes_nothing(made: list[EvidenceSelector]) -> None:
    judge, clock = Judged("sql"), Clock()
    selector = selector_of(made, judge, clock=clock)

    def served(best: tuple[str, str]) -> float:
        """The share of the time that comparing may take, after some more answers."""
        for _ in range(60):
            clock.now += 10.0
            one = question()
            begun(selector, one)
            for name in best:
                judge.best = name
                for _ in range(4):
                    goes_on(one, *[1] * 4)
                    one.rejected += [len(one.token_ids)] * 4
                    selector.settle()
            selector.settle(one)
        selector._balance = 0.0
        selector._earn(0.1)
        return selector._balance / 0.1

    assert served(("sql", "sql")) == pytest.approx(TIME_SHARE * LEAST_PART)
    assert served(("python", "french")) == pytest.approx(TIME_SHARE)
    assert served(("sql", "sql")) == pytest.approx(TIME_SHARE * LEAST_PART)


def test_a_judge_that_fails_is_given_up_for_these_rows(
    made: list[EvidenceSelector], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Judged):
        def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
            raise RuntimeError("no memory")

    one, selector = question(), selector_of(made, Broken("french"))
    begun(selector, one)
    selector.settle()
    assert one.expert == "sql"
    assert "could not be compared" in caplog.text
    assert selector.failures == 1


def test_nothing_is_kept_of_what_has_ended(made: list[EvidenceSelector]) -> None:
    selector = selector_of(made, Judged("sql"))
    one, other = question(0), question(1)
    begun(selector, one, other)
    selector.settle(one)
    other.finish_reason, other.slot = "abort", -1
    selector.settle()
    assert not selector._contests


def contests_of(count: int) -> tuple[list[str], Contest]:
    arms = [f"arm {i}" for i in range(count)]
    return arms, Contest(row(0, *range(9)), arms, Confusion())


def test_whom_to_compare() -> None:
    chance = random.Random(0)
    arms, contest = contests_of(ALL_ARMS)
    assert sorted(arms_to_compare([contest], arms, chance, arms)) == arms  # at the prompt, everybody
    many, crowd = contests_of(64)
    crowd.standings.believe({"arm 40": 0.9})
    chosen = arms_to_compare([crowd], many, chance, many)
    assert chosen[0] == "arm 40"
    assert len(chosen) == len(set(chosen)) == ALL_ARMS - 1
    contest.learn({arm: [float(arm == "arm 3")] * 6 for arm in arms}, 6)
    later = arms_to_compare([contest], arms, chance, arms)
    assert later[0] == "arm 3"
    assert 2 <= len(later) <= NEAR_ARMS + 1


def test_an_expert_that_came_later_does_not_count() -> None:
    arms, contest = contests_of(3)
    contest.learn({arm: [float(arm == "arm 1")] * 6 for arm in [*arms, "new"]}, 6)
    assert contest.standings.leader == "arm 1"
    assert set(contest.standings.weights) == set(arms)


def test_an_expert_that_is_removed_in_mid_answer_leaves_the_contest(made: list[EvidenceSelector]) -> None:
    """However well it stood; what is left is shared among the others."""
    judge = Judged("french")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    begun(selector, one)
    selector.settle()
    assert one.expert == "french"
    judge.arms = [SHARED, "sql", "python"]
    assert selector.settle() == [one]
    assert one.expert == "sql"  # of the others, the one that the router had chosen
    goes_on(one, *[1] * 12)
    selector.settle(one)
    assert one.heard.keys() <= {SHARED, "sql", "python"}
    assert "french" not in {**one.weights, **one.heard}
    assert sum(one.weights.values()) == pytest.approx(1, abs=0.02)


def test_where_only_the_shared_draft_is_left_it_drafts(made: list[EvidenceSelector]) -> None:
    judge = Judged("sql")
    one, selector = question(max_tokens=500), selector_of(made, judge)
    begun(selector, one)
    selector.settle()
    judge.arms = [SHARED]
    selector.settle()
    assert (one.expert, one.domain) == (SHARED, "sql")
    selector.settle(one)
    assert (one.weights, one.heard) == ({SHARED: 1.0}, {})


def test_in_time_everybody_is_compared_again() -> None:
    chance = random.Random(0)
    arms, contest = contests_of(12)
    contest.learn({arm: [float(arm == "arm 3")] * 20 for arm in arms}, 20)
    assert {arm for _ in range(100) for arm in arms_to_compare([contest], arms, chance, arms)} == set(arms)


def test_the_final_standings_stay_with_the_row(made: list[EvidenceSelector]) -> None:
    """With the router's prior and, apart from that, by the evidence alone."""
    one, selector = question(max_tokens=500), selector_of(made, Judged("french"))
    begun(selector, one)
    selector.settle()
    assert not one.weights
    goes_on(one, *[1] * 12)
    one.rejected += [2, 5, 7, 9]
    selector.settle()
    selector.settle(one)
    assert max(one.weights, key=lambda arm: one.weights[arm]) == "french"
    assert one.heard["french"] > 0.95
    assert sum(one.weights.values()) == pytest.approx(1, abs=0.02)
    assert [standing.tokens for standing in one.standings] == [0, 12]
    assert one.standings[0].weights["french"] > 0.9
    assert one.standings[-1].weights == one.weights


def test_the_evidence_alone_knows_nothing_of_the_prior(made: list[EvidenceSelector]) -> None:
    """Where all arms guess alike, the router's word stays in the weights and is not in the evidence."""
    one, selector = question(), selector_of(made, Judged("none of them"))
    begun(selector, one)
    selector.settle()
    selector.settle(one)
    assert one.weights["sql"] > 0.6
    assert one.heard == pytest.approx(dict.fromkeys(ARMS, 0.25), abs=0.01)


def test_among_many_arms_the_best_one_is_heard(made: list[EvidenceSelector]) -> None:
    """Arms that were never compared say nothing, so they take nothing from those that were."""
    arms = [SHARED, *(f"expert {i}" for i in range(15))]
    route = Route("expert 3", 0.5, dict.fromkeys(arms, 0.5 / 15) | {"expert 3": 0.5})
    judge = Judged("expert 3", arms)
    one, selector = question(max_tokens=500), selector_of(made, judge, route)
    begun(selector, one)
    selector.settle()
    selector.settle(one)
    [(_, compared)] = judge.asked
    assert len(compared) == ALL_ARMS - 1
    assert one.heard["expert 3"] > 0.99
    assert set(one.heard) <= set(compared)
    assert sum(one.heard.values()) == pytest.approx(1, abs=0.01)


def test_many_arms_that_guess_alike_are_heard_alike(made: list[EvidenceSelector]) -> None:
    arms = [SHARED, *(f"expert {i}" for i in range(15))]
    judge, route = Judged("nobody", arms), Route("expert 1", 0.9, {"expert 1": 0.9, SHARED: 0.1})
    one, selector = question(max_tokens=500), selector_of(made, judge, route)
    begun(selector, one)
    for _ in range(3):
        selector.settle()
        goes_on(one, *[1] * 12)
    selector.settle(one)
    compared = {arm for _, some in judge.asked for arm in some}
    assert len(compared) < len(arms)
    assert one.heard == pytest.approx(dict.fromkeys(compared, 1 / len(compared)), abs=0.02)


def test_a_row_that_was_never_compared_has_no_standings(made: list[EvidenceSelector]) -> None:
    one, selector = question(), selector_of(made, Judged(SHARED, [SHARED]))
    begun(selector, one)
    selector.settle()
    selector.settle(one)
    assert one.weights == one.heard == {}


CERTAIN = Route("sql", 0.99, {"sql": 0.99, "python": 0.01, "french": 0.0, SHARED: 0.0})


@pytest.mark.parametrize(
    ("route", "drafts", "refused", "tokens", "why"),
    [
        (CERTAIN, 9, 2, 30, "sure, and few of its expert's guesses were refused"),
        (CERTAIN, 0, 0, 30, "guessed nothing"),
        (CERTAIN, 9, 4, 60, "only at its end"),
        (SQL, 0, 0, 3, "too short"),
    ],
)
def test_why_an_answer_was_not_compared_is_told(
    made: list[EvidenceSelector], route: Route, drafts: int, refused: int, tokens: int, why: str
) -> None:
    judge = Judged("french")
    one, selector = question(max_tokens=64), selector_of(made, judge, route)
    if "short" in why:  # the prompt was not read before the answer ended
        one.target_cached = 0
        selector.assign([one])
    else:
        begun(selector, one)
    selector.settle()
    goes_on(one, *[1] * tokens)
    one.speculation.num_drafts = drafts
    one.rejected += range(refused)
    selector.settle()
    selector.settle(one)
    assert judge.asked == []
    assert why in one.uncompared


@pytest.mark.parametrize("waited", [False, True])
def test_that_a_draft_model_read_nothing_is_told(made: list[EvidenceSelector], waited: bool) -> None:
    """Whether there was time or not: an independent draft reads a prompt when it first drafts for it."""

    class Unread(Judged):
        def known(self, row: core.Sequence, since: int, most: int) -> Passage:
            return Passage(row, since, since)

    one, selector = question(max_tokens=64), selector_of(made, Unread("french"), clock=Clock())
    selector._balance = -1.0 if waited else 1.0
    begun(selector, one)
    goes_on(one, *[1] * 30)
    one.draft_cached = one.speculation.num_drafts = 0
    selector.settle()
    selector.settle(one)
    assert "has read nothing of it" in one.uncompared


def test_arms_that_cannot_be_compared_leave_it_to_the_router(made: list[EvidenceSelector]) -> None:
    class Apart(Judged):
        comparable = False

    one, selector = question(), selector_of(made, judge := Apart("french"))
    begun(selector, one)
    selector.settle()
    selector.settle(one)
    assert (one.expert, judge.asked, selector.compares) == ("sql", [], False)
    assert one.standings == []


def test_as_many_rows_are_compared_at_once_as_the_judge_takes(made: list[EvidenceSelector]) -> None:
    class One(Judged):
        most_rows = 1

    rows = [question(slot) for slot in range(3)]
    selector = selector_of(made, judge := One("french"))
    begun(selector, *rows)
    for count in (1, 2, 3):
        selector.settle()
        assert [len(passages) for passages, _ in judge.asked] == [1] * count


def test_that_time_was_used_up_and_that_a_comparison_failed_is_told(made: list[EvidenceSelector]) -> None:
    class Broken(Judged):
        def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
            raise RuntimeError("no memory")

    one, selector = question(max_tokens=64), selector_of(made, Judged("french"), clock=Clock())
    selector._balance = -1.0
    begun(selector, one)
    for _ in range(3):
        selector.settle()
        goes_on(one, *[1] * 4)
    selector.settle(one)
    assert "time for comparing was used up" in one.uncompared
    other, selector = question(max_tokens=64), selector_of(made, Broken("french"))
    begun(selector, other)
    selector.settle()
    selector.settle(other)
    assert "failed" in other.uncompared


def test_what_was_compared_has_no_reason_why_not(made: list[EvidenceSelector]) -> None:
    one, selector = question(max_tokens=64), selector_of(made, Judged("french"))
    begun(selector, one)
    selector.settle()
    goes_on(one, *[1] * 12)
    selector.settle(one)
    assert one.standings
    assert one.uncompared == ""


def answered(
    selector: EvidenceSelector, judge: Judged, refusals: int = 16, *, ends: bool = True, **options: object
) -> core.Sequence:
    """A request whose answer was compared while it went on; it has ended unless `ends` is False."""
    one = question(**{"max_tokens": 500, "capture": True} | options)
    begun(selector, one)
    selector.settle()
    for _ in range(4):
        goes_on(one, *[1] * 6)
        one.rejected += range(refusals)
        selector.settle()
    if ends:
        selector.settle(one)
    return one


SURE_SQL = Route("sql", 0.99, {"sql": 0.99, "python": 0.005, "french": 0.005, SHARED: 0.0})


def misled(
    made: list[EvidenceSelector], route: Route = SURE_SQL, times: int = 10
) -> tuple[Judged, EvidenceSelector]:
    """A selector whose router has said the same of some answers, in all of which french guessed best."""
    judge = Judged("french")
    selector = selector_of(made, judge, route, time_share=None)
    for _ in range(times):
        answered(selector, judge)
    return judge, selector


def begins(selector: EvidenceSelector, **options: object) -> core.Sequence:
    """A request of whose answer nothing is known yet; two tokens of a prompt tell nothing."""
    one = question(tokens=2, capture=True, **options)
    begun(selector, one)
    selector.settle()
    return one


def test_a_router_that_was_wrong_before_is_corrected_before_the_first_token(
    made: list[EvidenceSelector],
) -> None:
    judge = Judged("french")
    selector = selector_of(made, judge, SURE_SQL, time_share=None)
    assert begins(selector).expert == "sql"
    for _ in range(10):
        answered(selector, judge)
    assert begins(selector).expert == "french"


def test_whose_text_it_is_does_not_follow_from_other_answers(made: list[EvidenceSelector]) -> None:
    """Else an expert would learn another domain's texts because it had learned some of them before."""
    judge, selector = misled(made)
    one = begins(selector)
    assert (one.expert, one.domain, one.routed, one.overruled) == ("french", "sql", "sql", False)
    selector.settle(one)
    assert (one.domain, one.heard) == ("sql", {})
    other = answered(selector, judge)
    assert (other.expert, other.domain, other.overruled) == ("french", "french", True)
    judge.best = "nobody"
    third = answered(selector, judge)
    assert (third.expert, third.domain, third.overruled) == ("french", "sql", False)
    assert third.weights["sql"] > 0.8


def test_an_answer_whose_owner_is_in_doubt_is_compared_until_it_is_known(
    made: list[EvidenceSelector],
) -> None:
    """The router's choice stays near by this answer alone, though earlier answers leave it nothing."""
    judge, selector = misled(made, times=30)
    judge.asked.clear()
    one = answered(selector, judge, ends=False)
    assert (one.expert, one.domain) == ("french", "french")
    assert "sql" in judge.asked[0][1]


def test_a_record_of_an_answer_that_nobody_compared_is_believed_less_where_others_speak_against_it(
    made: list[EvidenceSelector],
) -> None:
    _, selector = misled(made)
    one = begins(selector)
    selector.settle(one)
    assert (one.domain, one.expert) == ("sql", "french")
    assert one.weights.get("sql", 0) < 0.5 < one.weights[NOBODY]
    assert "french" not in one.weights, "an expert would learn another's texts because it drafted for them"


def test_a_record_of_an_answer_that_nobody_compared_is_believed_as_the_router_believes(
    made: list[EvidenceSelector],
) -> None:
    said = {"sql": 0.6, "python": 0.0, "french": 0.2, "new": 0.2, SHARED: 0.0}
    unsure = Route("sql", 0.6, said)  # "new" has no trained expert, so it is no arm
    selector = selector_of(made, Judged("french"), unsure, time_share=None)
    one = begins(selector)
    selector.settle(one)
    assert one.domain == "sql"
    assert one.weights == {"sql": 0.6, "french": 0.2, "new": 0.2}
    sure = begins(selector_of(made, Judged("french"), SURE_SQL, time_share=None))
    made[-1].settle(sure)
    assert sure.weights == {}


def test_a_router_that_is_fitted_anew_is_believed_again(made: list[EvidenceSelector]) -> None:
    """Answers that began with the former router say nothing of the new one."""
    judge, selector = misled(made)
    running = [answered(selector, judge, ends=False, slot=i) for i in range(4)]
    assert selector.mistakes()
    selector.router.fits += 1
    assert selector.mistakes() == []
    for one in running:
        selector.settle(one)
    assert begins(selector).expert == "sql"
    assert selector.confusion.corrected(SURE_SQL.probabilities) == pytest.approx(SURE_SQL.probabilities)


def test_who_may_not_depend_on_other_answers_keeps_the_choice_of_the_router(
    made: list[EvidenceSelector],
) -> None:
    _, selector = misled(made)
    one = begins(selector, seed=1, temperature=1.0)
    assert one.reproducible
    assert one.expert == "sql"


@pytest.mark.parametrize("options", [{"capture": False}, {"pinned": True, "expert": "sql"}, {"draft": False}])
def test_answers_that_say_nothing_of_the_router_or_may_not_be_learned_from_leave_no_trace(
    options: dict[str, Any], made: list[EvidenceSelector]
) -> None:
    judge = Judged("french")
    selector = selector_of(made, judge, SURE_SQL, time_share=None)
    for _ in range(10):
        answered(selector, judge, **options)
    assert begins(selector).expert == "sql"


def test_a_domain_that_never_learned_says_nothing_of_the_router(made: list[EvidenceSelector]) -> None:
    route = Route("maths", 0.99, {"maths": 0.99, "sql": 0.01, SHARED: 0.0})
    _, selector = misled(made, route)
    nothing_fits = {**dict.fromkeys(ARMS, 0.0), SHARED: 1.0}
    assert selector.confusion.corrected(nothing_fits) == pytest.approx(nothing_fits)


def test_a_domain_that_never_learned_begins_as_the_router_says(made: list[EvidenceSelector]) -> None:
    """Prompts that fit no domain, which stand for it otherwise, may all be best drafted by one expert."""
    unknown = Route(SHARED, 0.0, {"sql": 0.0, "python": 0.0, "french": 0.0, SHARED: 1.0})
    _, selector = misled(made, unknown)
    assert begins(selector).expert == "french"
    selector.router.answer = Route("maths", 1.0, {"maths": 1.0, SHARED: 0.0})  # type: ignore[attr-defined]
    assert begins(selector).expert == "maths"


def test_an_arm_that_goes_while_an_answer_runs_is_no_longer_counted(made: list[EvidenceSelector]) -> None:
    judge, selector = misled(made)
    running = answered(selector, judge, ends=False)
    judge.arms = [SHARED, "sql", "python"]
    assert begins(selector, slot=1).expert == "sql"
    selector.settle(running)
    assert selector.confusion.arms == judge.arms
    assert running.domain in judge.arms
