"""Block verification: the target's law whatever the draft, never fewer tokens than a chain, and edges.

The statistics are those of chain verification's tests, with controls that they must catch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from chain_cases import Chain, chi_square, chi_square_limit, make_chain
from law_cases import BATCH, VOCAB, decode, worst_excess
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import philox, reference, reference_block, round_seeds, verify_block

Verdict = tuple[Tensor, Tensor, Tensor]


def run(chain: Chain, **changes: object) -> Verdict:
    arguments = {
        "draft_lse": chain.lse,
        "num_draft": chain.num_draft,
        "temperature": chain.temperature,
        "seed": chain.seed,
        "position": chain.position,
        **changes,
    }
    return verify_block(chain.target, chain.tokens, chain.draft, **arguments)  # type: ignore[arg-type]


def decode_blocks(device: str, batch: int = BATCH, **changes: object) -> tuple[Tensor, int, int]:
    how = {"verify": verify_block, "seeds": round_seeds, **changes}
    return decode(batch, "reference", device, **how)  # type: ignore[arg-type]


# -- the law


def test_it_follows_the_target(device: str) -> None:
    text, _, _ = decode_blocks(device)
    assert worst_excess(text) < 1


def test_certain_drafts_follow_the_target(device: str) -> None:
    """Drafts of probability 1, all pairs of tokens that can come of them."""
    gen = torch.Generator().manual_seed(3)
    target = torch.randn(VOCAB, VOCAB, generator=gen).to(device)
    batch = BATCH * 4
    seed = torch.arange(batch, device=device)
    drafted = torch.tensor([5, 2, 7], device=device).expand(batch, 3).contiguous()
    context = torch.cat((torch.zeros_like(drafted[:, :1]), drafted), 1)
    tokens, count, _ = verify_block(target[context], drafted, temperature=1.3, seed=seed, position=seed * 0)
    probs = torch.softmax(target.double().cpu() / 1.3, -1)
    statistic, freedom = chi_square(torch.bincount(tokens[:, 0].cpu(), minlength=VOCAB), probs[0])
    assert statistic < chi_square_limit(freedom)
    second = tokens[tokens[:, 0] == 5][:, 1]
    emitted = second[second >= 0].cpu()
    assert int((count > 0).sum()) > 1000
    later, _, _ = verify_block(  # rows that end after one token get their second by a round of its own
        target[torch.full((batch, 1), 5, device=device)], drafted[:, :0], temperature=1.3,
        seed=round_seeds(seed, seed * 0 + 1), position=seed * 0 + 1,
    )  # fmt: skip
    rest = later[(tokens[:, 0] == 5) & (tokens[:, 1] < 0)][:, 0].cpu()
    observed = torch.bincount(torch.cat((emitted, rest)), minlength=VOCAB)
    statistic, freedom = chi_square(observed, probs[5])
    assert statistic < chi_square_limit(freedom)


def test_control_a_wrong_draft_distribution_shows(device: str) -> None:
    text, _, _ = decode_blocks(device, draft_seen=lambda table: table * 0.5)
    assert worst_excess(text) > 3


def test_control_random_numbers_used_again_by_the_next_round_show(device: str) -> None:
    """Why `round_seeds` is needed: with a request's own seed in every round the law is broken a little."""
    many = 6 * BATCH
    text, _, _ = decode_blocks(device, many, seeds=lambda seed, position: seed)
    assert worst_excess(text) > 1.5
    text, _, _ = decode_blocks(device, many)
    assert worst_excess(text) < 1


def test_control_a_chain_needs_no_seeds_of_its_own(device: str) -> None:
    for seeds in (round_seeds, lambda seed, position: seed):
        text, _, _ = decode(BATCH, "reference", device, seeds=seeds)
        assert worst_excess(text) < 1


@pytest.mark.parametrize("fault", ["residual", "chance"])
def test_controls_of_the_rule_show(device: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A residual that forgets the share that was kept; a prefix taken although none of it may be."""
    real_weights, real_longest = reference_block._last_weights, reference_block._longest_accepted

    def forgetful(target: Tensor, residual: Tensor, mass: Tensor, count: Tensor, limit: Tensor) -> Tensor:
        return real_weights(target, target[:, :-1].clone(), mass, count, limit)

    def eager(keep: Tensor, mass: Tensor, limit: Tensor, uniforms: Tensor) -> Tensor:
        return real_longest(keep.sqrt(), mass, limit, uniforms)

    if fault == "residual":
        monkeypatch.setattr(reference_block, "_last_weights", forgetful)
    else:
        monkeypatch.setattr(reference_block, "_longest_accepted", eager)
    text, _, _ = decode_blocks(device)
    assert worst_excess(text) > 3


# -- how much is accepted


def example(batch: int, device: str) -> Chain:
    """The paper's: two tokens, M = (1/3, 2/3), S = (2/3, 1/3), two drafted tokens."""
    target = torch.tensor([1 / 3, 2 / 3], device=device).log().expand(batch, 3, 2)
    draft = torch.tensor([2 / 3, 1 / 3], device=device).log().expand(batch, 2, 2)
    seed = torch.arange(batch, device=device)
    position = torch.full_like(seed, 10)
    drawn = [kernels.sample_draft(draft[:, j], 1.0, seed, position + j, "reference")[0] for j in range(2)]
    return Chain(target, torch.stack(drawn, 1), draft, torch.ones(batch, device=device), seed, position)


def test_the_papers_example(device: str) -> None:
    """11/9 tokens accepted on average, where a chain accepts 10/9."""
    chain = example(300_000, device)
    for verdict, expected in ((run(chain), 11 / 9), (chain.run("reference"), 10 / 9)):
        accepted = verdict[1].double()
        error = float(accepted.std()) / accepted.numel() ** 0.5
        assert abs(float(accepted.mean()) - expected) < 5 * error
        assert error < (11 / 9 - 10 / 9) / 20


def exact_lengths(target: Tensor, draft: Tensor) -> tuple[float, float]:
    """Expected accepted tokens of block and chain, summed over all drafts; target [K+1, V], draft [K, V]."""
    block = chain = 0.0
    for tokens in product(range(target.shape[1]), repeat=draft.shape[0]):
        chance, keep, run_of = 1.0, 1.0, 1.0
        kept, runs = [], []
        for j, token in enumerate(tokens):
            ratio = float(target[j, token] / draft[j, token])
            chance *= float(draft[j, token])
            keep, run_of = min(1.0, keep * ratio), run_of * min(1.0, ratio)
            kept.append(keep)
            runs.append(run_of)
        block += chance * sum(kept)
        chain += chance * sum(runs)
    return block, chain


def test_the_mean_equals_the_sum_over_all_drafts_and_is_never_below_a_chains(device: str) -> None:
    gen = torch.Generator().manual_seed(2)
    for spread in (0.3, 1.0, 2.0):
        target = torch.randn(4, 4, generator=gen)
        draft = target[:3] + spread * torch.randn(3, 4, generator=gen)
        batch = 60_000
        seed = torch.arange(batch, device=device)
        position = torch.full_like(seed, 10)
        rows = [row.expand(batch, 4) for row in draft.to(device)]
        drawn = [
            kernels.sample_draft(row, 1.0, seed, position + j, "reference")[0] for j, row in enumerate(rows)
        ]
        chain = Chain(
            target.to(device).expand(batch, 4, 4), torch.stack(drawn, 1), torch.stack(rows, 1),
            torch.ones(batch, device=device), seed, position,
        )  # fmt: skip
        block, plain = exact_lengths(target.double().softmax(-1), draft.double().softmax(-1))
        assert block >= plain
        for verdict, expected in ((run(chain), block), (chain.run("reference"), plain)):
            accepted = verdict[1].double()
            assert abs(float(accepted.mean()) - expected) < 5 * float(accepted.std()) / batch**0.5


def test_paired_it_accepts_more_than_a_chain(device: str) -> None:
    """The same drafts, of a larger vocabulary, judged by both: the difference's interval is above 0."""
    chain = make_chain(4000, 6, 300, device=device, spread=0.8)
    difference = (run(chain)[1] - chain.run("reference")[1]).double()
    error = float(difference.std()) / difference.numel() ** 0.5
    assert float(difference.mean()) - 2.6 * error > 0


# -- what it shares with a chain


def test_one_drafted_token_is_a_chain(device: str) -> None:
    chain = make_chain(500, 1, 60, device=device, temperature=[1.0, 0.0, 0.6])
    assert all(torch.equal(a, b) for a, b in zip(run(chain), chain.run("reference"), strict=True))


def test_greedy_rows_equal_a_chains(device: str) -> None:
    chain = make_chain(12, 4, 50, device=device, temperature=[0.0, 1.0])
    whole, plain = run(chain), chain.run("reference")
    assert all(torch.equal(a[::2], b[::2]) for a, b in zip(whole, plain, strict=True))
    greedy = {"temperature": 0.0}
    for a, b in zip(run(chain, **greedy), chain.run("reference", **greedy), strict=True):
        assert torch.equal(a, b)


def test_nothing_drafted_is_a_draw_from_the_target(device: str) -> None:
    chain = make_chain(5, 0, 40, device=device)
    assert all(torch.equal(a, b) for a, b in zip(run(chain), chain.run("reference"), strict=True))


def test_draft_lse_ragged_rows_and_packed_rows_agree(device: str) -> None:
    chain = make_chain(40, 4, 200, device=device, temperature=[1.0, 0.7])
    expected = run(chain)
    chain.lse = chain.extra["lse"]
    assert all(torch.equal(a, b) for a, b in zip(run(chain), expected, strict=True))
    counts = torch.arange(40, device=device) % 5
    ragged = run(chain, num_draft=counts)
    for b in range(40):
        length = int(counts[b])
        alone = verify_block(
            chain.target[b : b + 1, : length + 1], chain.tokens[b : b + 1, :length],
            chain.draft[b : b + 1, :length] if chain.draft is not None else None,
            temperature=chain.temperature[b : b + 1], seed=chain.seed[b : b + 1],
            position=chain.position[b : b + 1],
        )  # fmt: skip
        assert torch.equal(alone[0][0], ragged[0][b, : length + 1])
        assert int(alone[1]) == int(ragged[1][b])
    target = torch.cat([chain.target[b, : int(c) + 1] for b, c in enumerate(counts)])
    draft = torch.cat([chain.draft[b, : int(c)] for b, c in enumerate(counts)])  # type: ignore[index]
    packed = verify_block(
        target, chain.tokens, draft, num_draft=counts, temperature=chain.temperature, seed=chain.seed,
        position=chain.position,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(packed, ragged, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_target_row_ends_its_row(device: str, value: float) -> None:
    chain = make_chain(64, 3, 30, device=device, spread=0.1)
    chain.target[:, 2, 4] = value
    tokens, count, status = run(chain)
    reached = count == 2
    assert bool(reached.any())
    assert int(count.max()) == 2
    assert torch.equal(status, reached.to(torch.int32) * kernels.TARGET_INVALID)
    assert bool((tokens[reached, 2] == 0).all())
    assert bool((tokens[~reached] < 30).all())


@pytest.mark.parametrize("how", ["row", "token"])
def test_a_broken_draft_ends_its_row_with_a_draw_from_the_target(device: str, how: str) -> None:
    chain = make_chain(20_000, 3, 8, device=device, spread=0.1)
    chain.target[:] = chain.target[:1].clone()
    if how == "row":
        chain.draft[:, 1, 3] = float("nan")  # type: ignore[index]
    else:
        chain.tokens[:, 1] = 8
    tokens, count, status = run(chain)
    reached = count == 1
    assert int(count.max()) == 1
    assert torch.equal(status, reached.to(torch.int32) * kernels.DRAFT_INVALID)
    probs = torch.softmax(chain.target[0, 1].double().cpu(), -1)
    statistic, freedom = chi_square(torch.bincount(tokens[reached, 1].cpu(), minlength=8), probs)
    assert statistic < chi_square_limit(freedom)


def test_tokens_that_a_filter_excludes_are_never_emitted(device: str) -> None:
    chain = make_chain(400, 4, 24, device=device)
    chain.target[..., ::2] = -torch.inf
    tokens, _, status = run(chain)
    assert not status.any()
    assert bool(((tokens % 2 == 1) | (tokens == -1)).all())


def test_float64_gives_the_same_tokens(device: str) -> None:
    chain = make_chain(300, 4, 100, device=device)
    wide = Chain(
        chain.target.double(), chain.tokens, chain.draft.double() if chain.draft is not None else None,
        chain.temperature, chain.seed, chain.position,
    )  # fmt: skip
    assert int((run(chain)[0] != run(wide)[0]).any(dim=1).sum()) == 0


def test_backends_and_wrong_shapes_are_refused(device: str) -> None:
    chain = make_chain(2, 2, 10, device=device)
    with pytest.raises(ValueError, match="backend must be"):
        run(chain, backend="cuda")
    with pytest.raises(ValueError, match="num_draft must be"):
        run(chain, num_draft=torch.ones(3, dtype=torch.int64))


# -- the seeds of rounds


def test_round_seeds_are_the_same_on_every_path_and_differ_by_round() -> None:
    gen = torch.Generator().manual_seed(0)
    seed = torch.randint(-(2**63), 2**63 - 1, (500,), generator=gen)
    position = torch.randint(0, 2**40, (500,), generator=gen)
    high, low = philox.philox_torch(seed, position, philox.ROUND)[:2]
    assert torch.equal(round_seeds(seed, position), (high << 32) | low)
    assert len(set(round_seeds(seed[:1], torch.arange(1000)).tolist())) == 1000


def test_the_rule_is_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both functions share everything else; neither ran the other's rule above."""
    chain = make_chain(3, 2, 10)
    called: list[str] = []

    def recorded(name: str, rule: Callable[..., Verdict]) -> Callable[..., Verdict]:
        return lambda *arguments: called.append(name) or rule(*arguments)  # type: ignore[func-returns-value]

    monkeypatch.setattr(reference, "chain_rule", recorded("chain", reference.chain_rule))
    monkeypatch.setattr(reference_block, "block_rule", recorded("block", reference_block.block_rule))
    run(chain)
    chain.run("reference")
    assert called == ["block", "chain"]
