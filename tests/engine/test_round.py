"""One round: what a drafter proposes is verified by the target, shown to those who learn, and committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moedraft.core import Sequence
from moedraft.engine.capture import Capture
from moedraft.engine.port import Learner
from moedraft.engine.round import Round
from moedraft.engine.target import TargetRunner
from moedraft.engine.verification import Verifier
from moedraft.evidence import Evidence, Proposal, Reading, Rows

from rounds import chain, row, rows_of
from tiny import TinyLM, random_table

VOCAB = 12
Guess = Callable[[Rows], Proposal]


class Script:
    """A proposer that says what it is told to, round after round; remembers what it was given."""

    def __init__(self, *guesses: Guess) -> None:
        self.guesses, self.seen = list(guesses), list[Rows]()

    def propose(self, rows: Rows) -> Proposal:
        self.seen.append(rows)
        return self.guesses.pop(0)(rows)


def take(evidence: Evidence, b: int) -> None:
    """The verified tokens enter the row, as in an answer without end."""
    one = evidence.rows[b]
    one.target_cached = len(one.token_ids) + evidence.accepted[b]
    one.token_ids += evidence.tokens[b]


class Rig:
    """A target that has read the rows' prompts, and a round of it with scripted guesses."""

    def __init__(
        self,
        rows: list[Sequence],
        *guesses: Guess,
        table: torch.Tensor | None = None,
        hidden: tuple[int, ...] = (),
        ragged: bool = False,
        learners: tuple[Learner, ...] = (),
    ) -> None:
        self.rows = rows
        self.target = TinyLM(random_table(VOCAB, 1) if table is None else table)
        self.target.ragged = ragged
        runner = TargetRunner(self.target, len(rows), hidden)
        for one in rows:
            if len(one.token_ids) > 1:
                runner.read(Reading([(one, len(one.token_ids) - 1)]))
                one.target_cached = len(one.token_ids) - 1
        self.target.forwards.clear()
        self.script = Script(*guesses)
        self.round = Round(runner, self.script, Verifier(), Capture(3), *learners)

    def __call__(self) -> Evidence:
        return self.round(self.rows, take)

    def greedy(self, context: list[int], count: int) -> list[int]:
        """The target's own next tokens."""
        text = list(context)
        for _ in range(count):
            text.append(int(self.target.logits_after(text).argmax()))
        return text[len(context) :]


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def prompts() -> list[Sequence]:
    return [row(0, 1, 2), row(1, 3), row(2, 4, 5, 6), row(3, 7, 8)]


def mixed(rig: Rig) -> Guess:
    """All right; a wrong one after the first; no guess; wrong from the start."""

    def guess(rows: Rows) -> Proposal:
        own = [rig.greedy(one.token_ids, 4) for one in rows.sequences]
        return chain(own[0][:3], [own[1][0], wrong(own[1][1]), own[1][2]], [], [wrong(own[3][0])])

    return guess


def test_accepted_rejected_and_bonus_tokens() -> None:
    rig = Rig(prompts())
    rig.script.guesses = [mixed(rig)]
    before = [list(one.token_ids) for one in rig.rows]
    own = [rig.greedy(text, 4) for text in before]
    evidence = rig()
    assert evidence.accepted == [3, 1, 0, 0]
    assert evidence.tokens == [own[0], own[1][:2], own[2][:1], own[3][:1]]
    assert evidence.broken == [False] * 4
    assert [one.token_ids for one in rig.rows] == [
        text + tokens for text, tokens in zip(before, evidence.tokens, strict=True)
    ]
    assert rig.target.forwards == [(4, 4)]  # one forward for all of it


def text_after(rounds: int, *, honest: bool = True) -> bool:
    """Whether so many rounds, with guesses right and wrong, give the target's own text."""
    rig = Rig(prompts())
    rig.script.guesses = [mixed(rig)] * rounds
    if not honest:
        verify = rig.round.verify

        def believing(rows: Rows, proposal: Proposal, logits: torch.Tensor) -> object:
            _, _, broken = verify(rows, proposal, logits)
            guesses = [
                guess[:n] for guess, n in zip(proposal.token_ids.tolist(), proposal.lengths, strict=True)
            ]
            return [[*guess, 0] for guess in guesses], proposal.lengths, broken

        rig.round.verify = believing  # type: ignore[assignment]
    for _ in range(rounds):
        rig()
    return all(
        one.generated == rig.greedy(one.token_ids[: one.num_prompt_tokens], one.num_generated)
        for one in rig.rows
    )


def test_round_after_round_gives_the_targets_own_text() -> None:
    """What was rejected stays in the cache until it is overwritten; no row ever reads it."""
    assert text_after(6)
    assert not text_after(1, honest=False)


@pytest.mark.parametrize("seed", range(8))
def test_filters_hold_in_verification(seed: int) -> None:
    """With one token left by the filter, a sampled row says what a greedy one does."""
    free = row(0, 1, 2, temperature=1.0, seed=seed)
    filtered = row(1, 1, 2, temperature=1.0, seed=seed, top_k=1)
    rig = Rig([free, filtered], lambda rows: chain([], own))
    own = rig.greedy([1, 2], 3)
    evidence = rig()
    assert evidence.tokens[1] == rig.greedy([1, 2], 4)


def test_without_a_filter_sampling_is_no_greedy_choice() -> None:
    """The control of the test above: it would not pass for every seed without the filter."""
    said = set()
    for seed in range(20):
        rig = Rig([row(0, 1, 2, temperature=1.0, seed=seed)], lambda rows: chain([]))
        said.add(rig().tokens[0][0])
    assert len(said) > 1


class Witness:
    """Notes how the rows stood when it was shown the evidence."""

    def __init__(self, diary: list[object]) -> None:
        self.diary = diary

    def observe(self, evidence: Evidence) -> None:
        self.diary.append((id(self), [list(one.token_ids) for one in evidence.rows], evidence))


def test_observers_see_the_evidence_before_its_tokens_enter_the_rows() -> None:
    diary: list[object] = []
    first, second = Witness(diary), Witness(diary)
    rig = Rig(prompts(), learners=(first, second))
    rig.script.guesses = [mixed(rig)]
    before = [list(one.token_ids) for one in rig.rows]

    def commit(evidence: Evidence, b: int) -> None:
        diary.append((b, len(evidence.rows[b].token_ids)))
        take(evidence, b)

    evidence = rig.round(rig.rows, commit)
    assert diary == [
        (id(first), before, evidence),
        (id(second), before, evidence),
        *((b, len(text)) for b, text in enumerate(before)),
    ]
    assert [one.token_ids for one in rig.rows] != before


def test_a_token_tree_is_refused_by_name_and_nothing_has_changed() -> None:
    diary: list[object] = []
    tree = chain([1, 2], [], parents=torch.tensor([[-1, -1], [-1, -1]]))
    rig = Rig([row(0, 1, 2), row(1, 3)], lambda rows: tree, lambda rows: chain([1, 2], []))
    rig.round.learners = [Witness(diary)]
    before = [list(one.token_ids) for one in rig.rows]
    with pytest.raises(ValueError, match=r"token tree .*parents=None"):
        rig()
    assert [one.token_ids for one in rig.rows] == before
    assert (diary, rig.target.forwards) == ([], [])
    rig()  # a chain is verified after that
    assert len(diary) == 1


def test_a_row_without_a_distribution_is_broken_alone() -> None:
    table = random_table(VOCAB, 1)
    table[9] = torch.nan
    rig = Rig([row(0, 1, 2), row(1, 3, 9)], lambda rows: chain([], []), table=table)
    [own] = rig.greedy([1, 2], 1)
    evidence = rig()
    assert evidence.broken == [False, True]
    assert evidence.tokens[0] == [own]


def test_hidden_states_are_those_of_the_verified_positions() -> None:
    rig = Rig([row(0, 1, 2), row(1, 3)], lambda rows: chain([5, 6], [7]), hidden=(1, 4))
    evidence = rig()
    assert set(evidence.hidden) == {1, 4}
    pairs = evidence.hidden[4].tolist()  # of TinyLM: the token at a position and the one before it
    assert pairs[0] == [[2, 1], [5, 2], [6, 5]]
    assert pairs[1][:2] == [[3, 3], [7, 3]]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_ragged_target_is_told_the_lengths(ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig([row(0, 1, 2), row(1, 3)], lambda rows: chain([5, 6], []), ragged=ragged)
    forward, told = rig.target.forward, list[object]()

    def watched(*arguments: object, lengths: list[int] | None = None, **rest: object) -> torch.Tensor:
        told.append(lengths)
        return forward(*arguments, lengths=lengths, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.target, "forward", watched)
    rig()
    assert told == [[3, 1] if ragged else None]


def test_what_may_be_learned_from_is_kept_where_tokens_were_emitted() -> None:
    rig = Rig([row(0, 1, 2), row(1, 3, capture=True)])
    own = rig.greedy([3], 4)
    rig.script.guesses = [lambda rows: chain([0], [own[0], own[1], wrong(own[2])])]
    evidence = rig()
    assert set(evidence.topk) == {1}
    ids, logprobs = evidence.topk[1].top()
    exact = torch.stack([rig.target.logits_after([3, *own[:n]]) for n in range(3)]).log_softmax(-1)
    values, tokens = exact.topk(3)
    assert torch.equal(ids, tokens)
    torch.testing.assert_close(logprobs, values.float())


def test_parameters_are_those_of_the_rows_even_where_an_id_comes_again() -> None:
    """The tensors of a batch are kept from round to round, but never for another request."""
    guesses: list[Guess] = [lambda rows: chain([])] * 3
    one, other = row(0, 1, 2, temperature=1.0, seed=1), row(0, 1, 2, temperature=0.5, seed=2)
    rig = Rig([one], *guesses)
    rig()
    rig()
    rig.rows = [other]
    other.token_ids = list(one.token_ids)
    rig()
    first, second, third = (rows.sampling for rows in rig.script.seen)
    assert first is second
    assert (third.temperature.tolist(), third.seed.tolist()) == ([0.5], [2])


class Waits(TorchFunctionMode):
    """Counts what makes the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verification_waits_once(temperature: float) -> None:
    rows = rows_of(row(0, 1, 2, temperature=temperature, seed=1), row(1, 3, temperature=temperature, seed=2))
    logits = torch.randn(2, 3, VOCAB)
    logits[1, 0] = torch.nan
    proposal = chain([4, 5], [6])
    if temperature == 0:
        proposal = chain([int(logits[0, 0].argmax()), 5], [6])
    with Waits() as waits:
        tokens, counts, broken = Verifier().verify(rows, proposal, logits)
    assert waits.count == 1
    assert [len(one) for one in tokens] == [count + 1 for count in counts]
    assert (tokens[1], broken) == ([0], [False, True])
    if temperature == 0:
        assert counts[0] >= 1
