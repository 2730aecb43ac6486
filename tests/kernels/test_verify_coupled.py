"""Coupled sampling: the target's law, the same answer whatever the draft, and how much is accepted."""

from __future__ import annotations

import pytest
import torch
from chain_cases import chi_square, chi_square_limit, make_chain
from law_cases import BATCH, LENGTH, POSITIONS, VOCAB, tables, worst_excess
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import philox, reference_coupled, sample_coupled, verify_coupled


def decode(
    batch: int, device: str, draft: Tensor, length: int = LENGTH, shift: int = 0
) -> tuple[Tensor, float]:
    """First POSITIONS tokens of `batch` requests, and the share of first drafts that were accepted.

    shift: added to the positions at which the draft is drawn; other than 0 nothing is coupled.
    """
    target = tables(device)[0]
    seed = torch.arange(batch, device=device) * 7919 + 13
    text = torch.zeros(batch, POSITIONS + length + 2, dtype=torch.int64, device=device)
    done = torch.zeros(batch, dtype=torch.int64, device=device)
    rows, share = torch.arange(batch, device=device), -1.0
    while int(done.min()) < POSITIONS:
        position, context = done + 100, [text[rows, done]]
        for j in range(length):
            context.append(sample_coupled(draft[context[-1]], 1.0, seed, position + j + shift)[0])
        seen = torch.stack(context, 1)
        tokens, count, status = verify_coupled(
            target[seen], seen[:, 1:].contiguous(), temperature=1.0, seed=seed, position=position
        )
        assert not status.any()
        share = share if share >= 0 else float((count > 0).double().mean())
        going = done < POSITIONS
        for j in range(length + 1):
            write = going & (j <= count)
            text[rows[write], (done + 1 + j)[write].clamp(max=text.shape[1] - 1)] = tokens[write, j]
        done = torch.where(going, done + count + 1, done)
    return text[:, 1 : POSITIONS + 1], share


def test_it_follows_the_target(device: str) -> None:
    text, _ = decode(BATCH, device, tables(device)[1])
    assert worst_excess(text) < 1


def test_the_answer_is_the_same_with_another_draft_and_length(device: str) -> None:
    target, opposite = tables(device)
    texts = [
        decode(2000, device, draft, length)[0]
        for draft, length in ((opposite, 3), (opposite, 0), (target, 5), (target * 0.3, 1))
    ]
    assert all(torch.equal(texts[0], text) for text in texts[1:])
    assert len({tuple(row) for row in texts[0].tolist()}) > 1500


def test_control_a_chains_answers_do_depend_on_the_draft(device: str) -> None:
    chain = make_chain(500, 3, 60, device=device)
    with_draft, without = chain.run("reference")[0], chain.run("reference", num_draft=chain.seed * 0)[0]
    assert not torch.equal(with_draft[:, 0], without[:, 0])


def test_as_much_is_accepted_as_the_theory_says(device: str) -> None:
    """Σ 1/Σ max(p_y/p_x, q_y/q_x), which lies between (1 − D)/(1 + D) and a chain's 1 − D."""
    target, draft = (torch.softmax(table[0].double().cpu(), -1) for table in tables(device))
    ratio = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
    expected = float((1 / ratio.sum(1)).sum())
    _, share = decode(BATCH, device, tables(device)[1])
    distance = 1 - float(torch.minimum(target, draft).sum())
    assert abs(share - expected) < 5 * (expected * (1 - expected) / BATCH) ** 0.5
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance


def test_control_other_noise_for_the_draft_accepts_less(device: str) -> None:
    """And is exact all the same: the draft cannot spoil the answer."""
    draft = tables(device)[1]
    text, share = decode(BATCH, device, draft, shift=10_000)
    assert torch.equal(text, decode(BATCH, device, draft)[0])
    assert share < 0.8 * decode(BATCH, device, draft)[1]


@pytest.mark.parametrize("fault", ["few bits", "one number for four tokens"])
def test_control_bad_noise_shows(device: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    real = philox.gumbel

    def bad(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
        noise = real(seed, position, vocab)
        return noise.round() if fault == "few bits" else noise[..., ::4].repeat_interleave(4, -1)[..., :vocab]

    monkeypatch.setattr(reference_coupled, "gumbel", bad)
    text, _ = decode(BATCH, device, tables(device)[1])
    assert worst_excess(text) > 3


def test_temperatures_and_filters(device: str) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    logits[::3] = -torch.inf
    seed = torch.arange(BATCH, device=device)
    tokens, lse, _ = sample_coupled(logits.expand(BATCH, VOCAB), 1.3, seed, seed * 0 + 7)
    probs = torch.softmax(logits.double().cpu() / 1.3, -1)
    kept = probs > 0
    counts = torch.bincount(tokens.cpu(), minlength=VOCAB)
    assert int(counts[~kept].sum()) == 0
    statistic, freedom = chi_square(counts[kept], probs[kept])
    assert statistic < chi_square_limit(freedom)
    assert torch.allclose(lse, (logits / 1.3).logsumexp(-1))


def test_greedy_rows_broken_rows_and_lengths(device: str) -> None:
    chain = make_chain(30, 3, 20, device=device, temperature=[0.0, 0.9])
    how = {"temperature": chain.temperature, "seed": chain.seed, "position": chain.position}
    plain = chain.run("reference")
    found = verify_coupled(chain.target, chain.tokens, chain.draft, **how)
    assert all(torch.equal(a[::2], b[::2]) for a, b in zip(found, plain, strict=True))
    drawn, _, _ = sample_coupled(chain.target[:, 0], chain.temperature, chain.seed, chain.position)
    assert torch.equal(drawn, found[0][:, 0])
    broken = chain.target.clone()
    broken[:, 0, 3] = float("nan")
    tokens, count, status = verify_coupled(broken, chain.tokens, **how)
    assert bool((status == kernels.TARGET_INVALID).all())
    assert not count.any()
    assert not tokens[:, 0].any()
    short = verify_coupled(chain.target, chain.tokens, num_draft=chain.seed * 0 + 1, **how)
    assert int(short[1].max()) <= 1
    assert bool((short[0] == found[0])[:, 0].all())


def test_the_noise_is_gumbels_and_counts_every_token_once() -> None:
    seed = torch.arange(400)
    noise = philox.gumbel(seed, seed * 0 + 3, 1001)
    assert noise.shape == (400, 1001)
    assert torch.equal(noise[:, :10], philox.gumbel(seed, seed * 0 + 3, 10))
    assert len(noise.unique()) > 0.999 * noise.numel()
    error = 1.2825 / noise.numel() ** 0.5
    assert abs(float(noise.mean()) - 0.5772) < 5 * error
    assert abs(float(noise.std()) - 1.2825) < 0.01


def test_what_does_not_fit_is_refused() -> None:
    chain = make_chain(2, 2, 10)
    with pytest.raises(ValueError, match="backend must be"):
        chain.run("cuda", verify_coupled)
    with pytest.raises(ValueError, match="backend must be"):
        sample_coupled(chain.target[:, 0], 1.0, chain.seed, chain.position, "cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be floating"):
        sample_coupled(chain.target, 1.0, chain.seed, chain.position)
