"""Who drafts for which row, and how far: what the budget plans is put together in one proposal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
import torch

from moedraft.core import SHARED, Sequence
from moedraft.drafting.chooser import Chooser, DraftLimits, DraftSource, merged
from moedraft.drafting.drafter import Another, NoDrafter
from moedraft.drafting.lengths.budget import Budget, Plan
from moedraft.drafting.timer import RoundTimer
from moedraft.evidence import NOBODY, Evidence, Proposal, Rows
from moedraft.kernels import Cuts
from moedraft.kernels.cuts import NO_LAST

from rounds import chain, evidence_of, row, rows_of

VOCAB = 12
GUESS = 11  # what the model below always guesses
LOOP = [1, 2, 3, 1, 2, 3]  # a text that repeats itself: 1, 2, 3 … follow


class ScriptedModel:
    """A draft model that always guesses the same token; notes what it is asked for."""

    source = "model"
    needs: tuple[int, ...] = ()
    max_len = 64

    def __init__(self, confidence: float = 0.5) -> None:
        self.confidence = confidence
        self.caught_up: list[list[int]] = []
        self.proposed: list[list[int]] = []
        self.observed: list[Evidence] = []
        self.read: list[tuple[list[int], Mapping[int, torch.Tensor]]] = []
        self.unready: set[int] = set()  # rows that it cannot draft for yet
        self.seconds = 0.0  # that catching up takes, by the clock below

    def now(self) -> float:
        return self.seconds

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        return [one.expert for one in rows]

    def experts_changed(self, rows: list[Sequence]) -> None:
        raise AssertionError("not asked for here")

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        self.read.append(([one.slot for one, _ in pieces], hidden))

    def catch_up(self, rows: Rows, limits: list[int]) -> list[int]:
        self.caught_up.append(limits)
        self.seconds += 5
        return [0 if b in self.unready else limit for b, limit in enumerate(limits)]

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        self.proposed.append(limits)
        steps = 1
        while another([self.confidence] * len(rows)):
            steps += 1
        drawn = chain(*([GUESS] * min(limit, steps) for limit in limits), source=self.source)
        experts = self.experts_of(rows.sequences)
        drawn = replace(drawn, experts=experts, versions=[4] * len(rows), steps=steps)
        if rows.sampling.greedy:
            return drawn
        logits = torch.zeros(len(rows), drawn.width, VOCAB)
        return replace(drawn, logits=logits, lse=logits.logsumexp(-1))

    def observe(self, evidence: Evidence) -> None:
        self.observed.append(evidence)

    def forget(self, row: Sequence) -> None:
        """Nothing is kept."""

    def swap(self, a: int, b: int, length: int) -> None:
        """Nothing is kept."""

    def clear(self, slot: int) -> None:
        """Nothing is kept."""


class Planned(Budget):
    """Plans what it is told to, and wants so many steps for rows of no fixed length; notes the questions."""

    def __init__(self, plan: Plan, steps: int = 1, longest: int = 8) -> None:
        super().__init__(longest)
        self.planned, self.steps = plan, steps
        self.asked: list[
            tuple[dict[int, float], dict[int, int], int, int]
        ] = []  # of `plan`; how far is found
        self.continued = 0  # questions for one more step

    def plan(
        self, means: Mapping[int, float], found: Mapping[int, list[float]], rows: int, least: int = 0
    ) -> Plan:
        self.asked.append((dict(means), {b: len(chances) for b, chances in found.items()}, rows, least))
        return self.planned

    def another(
        self,
        means: list[float],
        survival: list[float],
        expected: float,
        steps: int,
        rows: int,
        verified: Iterable[int],
        limits: Iterable[int] = (),
    ) -> bool:
        self.continued += 1
        return steps < self.steps


def chooser(
    budget: Budget,
    model: ScriptedModel | None = None,
    source: DraftSource = "auto",
    *,
    adaptive: bool = True,
    most: int = 100,
) -> Chooser:
    limits = DraftLimits(most, num_speculative_tokens=3, adaptive=adaptive)
    return Chooser(model or NoDrafter(), budget, limits, source)


def test_some_rows_look_up_and_the_model_drafts_for_others() -> None:
    model, budget = ScriptedModel(), Planned(Plan(True, {0: 4}), steps=2)
    budget.model("code").mean = 0.9
    repeats = row(0, *LOOP, expert="sql")
    made = chooser(budget, model).propose(rows_of(repeats, row(1, 5, 6, expert="code")))
    assert made.token_ids.tolist() == [[1, 2, 3, 1], [GUESS, GUESS, -1, -1]]
    assert (made.lengths, made.sources) == ([4, 2], ["lookup", "model"])
    assert (made.experts, made.versions, made.steps) == (["sql", "code"], [4, 4], 2)
    assert (made.logits, made.lse) == (None, None)
    assert [len(chances) for chances in made.confidences] == [4, 2]
    assert budget.asked == [({0: 0.6, 1: 0.9}, {0: 8}, 2, 0)]
    assert model.caught_up == model.proposed == [[0, 8]]  # no step is spent on a row that looks up


def test_a_row_that_looks_up_less_than_the_model_drafts_is_padded() -> None:
    made = chooser(Planned(Plan(True, {0: 1}), steps=3), ScriptedModel()).propose(
        rows_of(row(0, *LOOP), row(1, 5, 6))
    )
    assert made.token_ids.tolist() == [[1, -1, -1], [GUESS] * 3]
    assert made.lengths == [1, 3]


def test_what_is_looked_up_is_certain_among_sampled_rows() -> None:
    rows = rows_of(row(0, *LOOP, temperature=1.0), row(1, 5, 6, temperature=0.5))
    made = chooser(Planned(Plan(True, {0: 3}), steps=2), ScriptedModel()).propose(rows)
    assert made.logits is not None
    assert made.lse is not None
    probs = made.logits.softmax(-1)
    assert made.logits.shape == (2, 3, VOCAB)
    for k, token in enumerate([1, 2, 3]):
        assert probs[0, k, token] == 1
    assert made.lse[0].tolist() == [0.0] * 3
    even = torch.full((2, VOCAB), 1 / VOCAB)
    torch.testing.assert_close(probs[1, :2], even)  # the model's own stay as they are
    assert made.lse[1, :2].tolist() == pytest.approx([torch.tensor(VOCAB).log().item()] * 2)


def test_cuts_exclude_nothing_of_what_is_looked_up() -> None:
    looked, drawn = chain([1, 2, 3], [], source="lookup"), chain([5, 6], [7, 8])
    cuts = Cuts(torch.full((2, 2), 0.5), torch.full((2, 2), 4, dtype=torch.int32))
    made = merged(replace(drawn, cuts=cuts), looked)
    assert made.cuts is not None
    assert made.cuts.value.tolist() == [[-torch.inf] * 3, [0.5, 0.5, -torch.inf]]
    assert made.cuts.last.tolist() == [[NO_LAST] * 3, [4, 4, NO_LAST]]
    assert cuts.value.tolist() == [[0.5, 0.5]] * 2  # a copy was made


@pytest.mark.parametrize("looked", [2, 1, 3])
def test_the_models_logits_are_copied_only_where_a_lookup_is_longer(looked: int) -> None:
    """What is looked up is written into rows of the draft's own buffer, which hold nothing of use."""
    logits = torch.randn(2, 2, VOCAB)
    before, lse = logits.clone(), logits.logsumexp(-1)
    drawn = replace(chain([5, 6], [7, 8]), logits=logits, lse=lse.clone())
    made = merged(drawn, chain([1, 2, 3][:looked], [], source="lookup"))
    assert made.logits is not None
    assert made.lse is not None
    assert (made.logits.data_ptr() == logits.data_ptr()) == (looked < 3)
    torch.testing.assert_close(made.logits[1, :2], before[1], rtol=0, atol=0)
    torch.testing.assert_close(made.lse[1, :2], lse[1], rtol=0, atol=0)
    for k in range(looked):
        assert made.logits[0, k].softmax(-1)[k + 1] == 1
        assert made.lse[0, k] == made.logits[0, k].logsumexp(-1)


def test_without_a_lookup_the_models_proposal_is_passed_on() -> None:
    model = ScriptedModel()
    made = chooser(Planned(Plan(True)), model).propose(rows_of(row(0, *LOOP), row(1, 5, 6)))
    assert made.sources == ["model", "model"]
    assert model.proposed == [[8, 8]]


def test_rows_that_the_model_cannot_draft_for_yet_get_nothing() -> None:
    model = ScriptedModel()
    one = chooser(Planned(Plan(True, {0: 2})), model)
    rows = rows_of(row(0, *LOOP), row(1, 5, 6), row(2, 7, 8))
    model.unready = {1}
    made = one.propose(rows)
    assert (model.caught_up, model.proposed) == ([[0, 8, 8]], [[0, 0, 8]])
    assert made.sources == ["lookup", NOBODY, "model"]
    model.unready = {1, 2}
    made = one.propose(rows)
    assert made.sources == ["lookup", NOBODY, NOBODY]
    assert len(model.proposed) == 1  # for nobody the model is not asked


def test_the_model_hears_of_prompts() -> None:
    model, states = ScriptedModel(), {3: torch.zeros(1, 2, 4)}
    chooser(Planned(Plan()), model).read_prompt([(row(2, 1, 2, 3), 2)], states)
    assert model.read == [([2], states)]
    chooser(Planned(Plan())).read_prompt([(row(2, 1, 2, 3), 2)], states)  # without a model: nobody


def test_where_only_the_lookup_pays_the_model_is_left_alone() -> None:
    model = ScriptedModel()
    made = chooser(Planned(Plan(False, {0: 2})), model).propose(rows_of(row(0, *LOOP), row(1, 5, 6)))
    assert made.token_ids.tolist() == [[1, 2], [-1, -1]]
    assert (made.sources, made.steps) == (["lookup", NOBODY], 0)
    assert model.caught_up == model.proposed == []


def test_where_the_budget_says_nothing_nothing_is_drafted() -> None:
    model, budget = ScriptedModel(), Planned(Plan())
    made = chooser(budget, model).propose(rows_of(row(0, *LOOP), row(1, 5, 6)))
    assert (made.drafted, made.width, made.lengths) == (False, 0, [0, 0])
    assert made.sources == [NOBODY, NOBODY]
    assert model.caught_up == model.proposed == []
    assert len(budget.asked) == 1


# -- rows of a fixed length ----------------------------------------------------------------------


@pytest.mark.parametrize("seeded", [False, True])
def test_fixed_rows_look_up_their_length_where_the_lookup_is_the_only_source(seeded: bool) -> None:
    model, budget = ScriptedModel(), Planned(Plan(), steps=0)
    rows = rows_of(row(0, *LOOP, **({"temperature": 1.0, "seed": 3} if seeded else {})), row(1, 5, 6))
    made = chooser(budget, model, "lookup", adaptive=seeded).propose(rows)
    assert (made.lengths, made.sources) == ([3, 0], ["lookup", NOBODY])
    assert budget.asked == [({}, {}, 2, 0)]
    assert model.proposed == []


def test_fixed_rows_get_their_length_from_the_model_whatever_the_budget_says() -> None:
    model, budget = ScriptedModel(), Planned(Plan(), steps=0)
    made = chooser(budget, model, adaptive=False).propose(rows_of(row(0, *LOOP), row(1, 5, 6)))
    assert (made.lengths, made.sources) == ([3, 3], ["model", "model"])
    assert budget.asked == [({}, {}, 2, 3)]
    assert budget.continued == 0


def test_a_reproducible_row_is_fixed_beside_rows_that_are_not() -> None:
    """How far it is drafted for depends on no measured time, and it looks nothing up."""
    model, budget = ScriptedModel(), Planned(Plan(True, {0: 8}), steps=1)
    seeded = row(1, *LOOP, temperature=1.0, seed=3)
    free = row(2, 5, 6, temperature=1.0)
    made = chooser(budget, model).propose(rows_of(row(0, *LOOP, temperature=1.0), seeded, free))
    assert made.sources == ["lookup", "model", "model"]
    assert (made.lengths[0], made.lengths[1]) == (8, 3)
    assert model.proposed == [[0, 3, 8]]
    assert budget.asked == [({0: 0.6, 2: 0.6}, {0: 8}, 3, 3)]


def test_under_coupled_verification_a_seeded_row_is_free() -> None:
    model, budget = ScriptedModel(), Planned(Plan(True, {0: 8}), steps=5)
    seeded = {"temperature": 1.0, "seed": 3, "coupled": True}
    made = chooser(budget, model).propose(rows_of(row(0, *LOOP, **seeded), row(1, 5, 6, **seeded)))
    assert made.sources == ["lookup", "model"]
    assert made.lengths == [8, 5]
    assert budget.asked == [({0: 0.6, 1: 0.6}, {0: 8}, 2, 0)]


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_row_that_is_free_goes_as_far_as_the_steps_that_pay_or_are_taken_anyway(steps: int) -> None:
    model, budget = ScriptedModel(), Planned(Plan(True), steps=steps)
    seeded = row(0, 7, 8, temperature=1.0, seed=3)
    made = chooser(budget, model).propose(rows_of(seeded, row(1, 5, 6, temperature=1.0)))
    assert made.lengths == [3, max(3, steps)]


# -- how far at most -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "most", "limit"),
    [
        ({}, 100, 8),
        ({"max_tokens": 5}, 100, 4),  # the last token comes from the target
        ({"max_tokens": 1}, 100, 0),
        ({}, 9, 2),
        ({}, 6, 0),
        ({"draft": False}, 100, 0),
    ],
)
@pytest.mark.parametrize("source", ["model", "lookup"])
def test_no_more_is_drafted_than_may_be_emitted(
    options: dict[str, int], most: int, limit: int, source: DraftSource
) -> None:
    lookup = source == "lookup"
    budget = Planned(Plan(not lookup, {0: 99} if lookup else {}), steps=99)
    model = ScriptedModel()
    made = chooser(budget, model, source, most=most).propose(rows_of(row(0, *LOOP, **options)))
    assert made.lengths == [limit]
    assert made.sources == [source if limit else NOBODY]


@pytest.mark.parametrize(("length", "limit"), [(60, 4), (64, 0), (70, 0)])
def test_past_the_models_own_context_it_drafts_nothing(length: int, limit: int) -> None:
    model = ScriptedModel()
    made = chooser(Planned(Plan(True), steps=99), model, "model").propose(rows_of(row(0, *[5] * length)))
    assert made.lengths == [limit]
    assert bool(model.proposed) == bool(limit)


def test_the_source_that_is_set_is_the_only_one() -> None:
    for source, asked in (("model", ({0: 0.6}, {})), ("lookup", ({}, {0: 8}))):
        budget = Planned(Plan())
        chooser(budget, ScriptedModel(), source).propose(rows_of(row(0, *LOOP)))  # type: ignore[arg-type]
        assert budget.asked == [(*asked, 1, 0)]


def test_without_a_model_nothing_is_drafted_at_all() -> None:
    budget = Planned(Plan(True, {0: 8}))
    one = chooser(budget)
    made = one.propose(rows_of(row(0, *LOOP, draft=False)))  # as the engine sets it
    assert not one.drafts
    assert not made.drafted
    assert budget.asked == []


# -- what follows from a round -------------------------------------------------------------------


def test_each_drafter_learns_from_its_own_rows() -> None:
    model, budget = ScriptedModel(0.8), Planned(Plan(True, {0: 2}), steps=2)
    one = chooser(budget, model)
    rows = rows_of(row(0, *LOOP, expert="sql"), row(1, 5, 6, expert="code"), row(2, 7, 8, draft=False))
    made = one.propose(rows)
    assert made.sources == ["lookup", "model", NOBODY]
    looked = one.lookup.find(rows.sequences[0], 1)
    assert looked is not None
    rates = one.lookup._acceptance[True, False].rates
    before = rates[looked.length]
    evidence = evidence_of(rows, made, [0, 1, 0])
    one.observe(evidence)
    assert rates[looked.length] < before  # it was refused
    assert ("code", False) in budget.acceptance
    assert [hit for _, hit in budget.model("code").seen] == [1.0, 0.0]
    assert not budget.model("sql").seen
    assert model.observed == [evidence]


def test_sampled_rows_say_nothing_of_greedy_ones() -> None:
    """Both are of one expert; its guesses are taken in greedy rows alone."""
    model, budget = ScriptedModel(0.8), Planned(Plan(True), steps=1)
    one = chooser(budget, model)
    sampled = row(1, 7, 8, expert="code")
    sampled.params = replace(sampled.params, temperature=0.7)
    rows = rows_of(row(0, 5, 6, expert="code"), sampled)
    for _ in range(30):
        one.observe(evidence_of(rows, one.propose(rows), [1, 0]))
    assert budget.model("code").mean > 0.8 > 0.3 > budget.model("code", sampled=True).mean
    for old in rows.sequences:
        one.forget(old)
    one.propose(rows)  # as new requests
    means, *_ = budget.asked[-1]
    assert means[0] > 0.8 > 0.3 > means[1]


def test_a_row_is_planned_for_by_its_own_acceptance() -> None:
    """One text is easy to guess and the other is not, though the same expert drafts for both."""
    model, budget = ScriptedModel(0.8), Planned(Plan(True), steps=1)
    one, rows = chooser(budget, model), rows_of(row(0, 5, 6), row(1, 7, 8))
    for _ in range(30):
        one.observe(evidence_of(rows, one.propose(rows), [1, 0]))
    one.propose(rows)
    means, *_ = budget.asked[-1]
    assert means[0] > 0.8 > 0.3 > means[1]
    one.forget(rows.sequences[1])
    one.propose(rows)
    assert budget.asked[-1][0][1] == budget.model(SHARED).mean  # as any new request


def test_a_confidence_that_is_no_number_counts_as_none() -> None:
    model, budget = ScriptedModel(float("nan")), Planned(Plan(True), steps=1)
    one, rows = chooser(budget, model), rows_of(row(0, 5, 6, expert="sql"))
    made = replace(one.propose(rows), confidences=[[float("nan")]])
    one.observe(evidence_of(rows, made, [0]))
    [(confidence, hit)] = budget.model("sql").seen
    assert confidence == confidence < 0
    assert hit == 0


def test_catching_up_is_no_part_of_what_a_round_costs() -> None:
    model = ScriptedModel()
    timer, limits = RoundTimer(model.now), DraftLimits(100)
    one = Chooser(model, Planned(Plan(True)), limits, catch_up=timer.apart()(model.catch_up))
    with timer.round():
        one.propose(rows_of(row(0, 5, 6)))
        model.seconds += 2
    assert (model.seconds, timer.ms) == (7, pytest.approx(2000))
