"""The feature drafter alone, with rows made by hand: what it proposes, and what it keeps in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.feature import FeatureDrafter
from moedraft.evidence import NOBODY, Proposal, Rows
from moedraft.feature.model import FeatureDraft

from random_features import LAYERS, best_of, draft_for
from random_models import VOCAB, random_model
from rounds import chain, evidence_of, row, rows_of

TARGET = random_model("llama", 0)
DRAFT = draft_for(TARGET)
TOKENS = DRAFT.vocabulary.tolist()


def hidden_of(texts: Sequence[list[int]]) -> dict[int, torch.Tensor]:
    """By layer, what the target's forward over these texts leaves [B, T, H]; short ones are padded."""
    width = max(map(len, texts))
    states = TARGET.hf(
        torch.tensor([[*text, *[0] * (width - len(text))] for text in texts]), output_hidden_states=True
    ).hidden_states
    return {layer: states[layer] for layer in LAYERS}


def drafter_of(rows: Rows) -> FeatureDrafter:
    """One that has read the rows' texts, as it would after their prompts and one round each."""
    made = FeatureDrafter(DRAFT, NoExperts(), 4, VOCAB)
    before = [one.token_ids[:-1] for one in rows.sequences]
    made.read_prompt(
        [(one, len(text)) for one, text in zip(rows.sequences, before, strict=True)], hidden_of(before)
    )
    return made


def propose(made: FeatureDrafter, rows: Rows, limits: list[int], most: int = 99) -> Proposal:
    told: list[list[float]] = []

    def another(chances: list[float]) -> bool:
        told.append(chances)
        return len(told) < min(most, max(limits))

    return made.propose(rows, made.catch_up(rows, limits), another)


def guesses(draft: FeatureDraft, text: list[int], count: int) -> list[int]:
    """One pass over the features of a whole text; from then on the layer reads its own output."""
    states = torch.cat([hidden_of([text])[layer] for layer in LAYERS], dim=-1)[:, : len(text) - 1]
    cache, found, start = draft.new_cache(1), list[int](), 0
    fused, tokens = draft.fuse(states), torch.tensor([text[1:]])
    for _ in range(count):
        out = draft.advance(cache, 0, fused, tokens, [start])[:, -1:]
        found.append(best_of(draft, out[0, 0], text))
        start += tokens.shape[1]
        fused, tokens = out, torch.tensor([[found[-1]]])
    return found


def some_rows(**options: float) -> Rows:
    return rows_of(row(0, 5, 6, 7, 9, **options), row(1, 11, 3, **options), row(2, 8, 8, 20, **options))


def test_each_row_gets_what_one_pass_over_its_text_guesses_up_to_its_limit() -> None:
    rows = some_rows()
    drawn = propose(drafter_of(rows), rows, [3, 2, 1])
    assert drawn.lengths == [3, 2, 1]
    for b, one in enumerate(rows.sequences):
        kept = drawn.token_ids[b, : drawn.lengths[b]].tolist()
        assert kept == guesses(DRAFT, one.token_ids, drawn.lengths[b])
    assert (drawn.steps, drawn.sources) == (3, ["feature"] * 3)
    assert drawn.logits is None  # greedy rows need none


def test_a_row_without_a_limit_is_not_drafted_for_and_loses_nothing() -> None:
    rows = some_rows()
    made = drafter_of(rows)
    drawn = propose(made, rows, [2, 0, 2])
    assert (drawn.lengths, drawn.sources[1]) == ([2, 0, 2], NOBODY)
    follow(made, rows, drawn, [0, 0, 0])
    again = propose(made, rows, [2, 2, 2])
    assert again.token_ids[1].tolist() == guesses(DRAFT, rows.sequences[1].token_ids, 2)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_after_a_verification_it_goes_on_from_what_was_accepted(accepted: int) -> None:
    """Entries that it read from its own output are replaced by those of the target's features."""
    rows = some_rows()
    made = drafter_of(rows)
    drawn = propose(made, rows, [3, 3, 3])
    follow(made, rows, drawn, [accepted, 3 - accepted, 1])
    again = propose(made, rows, [3, 3, 3])
    for b, one in enumerate(rows.sequences):
        assert again.token_ids[b].tolist() == guesses(DRAFT, one.token_ids, 3)


def follow(made: FeatureDrafter, rows: Rows, drawn: Proposal, accepted: list[int]) -> None:
    """A verification that accepts so many tokens; the tokens enter the rows, as `commit` has them do."""
    drawn = drawn if drawn.width else chain([], [], [])
    evidence = evidence_of(rows, drawn, accepted)
    texts = [
        [*one.token_ids, *(token for token in guess if token >= 0)]
        for one, guess in zip(rows.sequences, drawn.token_ids.tolist(), strict=True)
    ]
    states = hidden_of(texts)
    width = drawn.width + 1
    shown = {
        layer: torch.stack(
            [
                torch.nn.functional.pad(each[b], (0, 0, 0, width))[len(one.token_ids) - 1 :][:width]
                for b, one in enumerate(rows.sequences)
            ]
        )
        for layer, each in states.items()
    }
    made.observe(replace(evidence, hidden=shown))
    for one, tokens in zip(rows.sequences, evidence.tokens, strict=True):
        one.token_ids.extend(tokens)


def test_it_stops_when_it_is_told_to() -> None:
    rows = some_rows()
    drawn = propose(drafter_of(rows), rows, [4, 4, 4], most=2)
    assert (drawn.steps, drawn.lengths) == (2, [2, 2, 2])


def test_sampled_rows_come_with_logits_over_the_targets_vocabulary() -> None:
    """What it cannot guess has no probability, and the log-sum-exp is that of the row."""
    rows = some_rows(temperature=0.8, seed=3)
    drawn = propose(drafter_of(rows), rows, [2, 2, 2])
    assert drawn.logits is not None
    assert drawn.lse is not None
    assert drawn.logits.shape == (3, 2, VOCAB)
    for one, logits in zip(rows.sequences, drawn.logits, strict=True):
        known = {*TOKENS, *one.token_ids}
        unknown = [token for token in range(VOCAB) if token not in known]
        assert (logits[:, unknown] == -torch.inf).all()
        assert logits[:, sorted(known)].isfinite().all()
    torch.testing.assert_close(drawn.lse, (drawn.logits / 0.8).logsumexp(-1).float())
    assert all(
        {*tokens} <= {*TOKENS, *one.token_ids}
        for one, tokens in zip(rows.sequences, drawn.token_ids.tolist(), strict=True)
    )


def test_after_a_prompt_of_one_token_there_is_nothing_to_guess_from() -> None:
    rows = rows_of(row(0, 5), row(1, 11, 3))
    made = FeatureDrafter(DRAFT, NoExperts(), 4, VOCAB)
    assert made.catch_up(rows, [3, 3]) == [0, 0]


def test_a_row_that_has_ended_leaves_nothing_behind() -> None:
    rows = some_rows()
    made = drafter_of(rows)
    for one in rows.sequences:
        made.forget(one)
    assert made.catch_up(rows, [1, 1, 1]) == [0, 0, 0]
