"""Verification and the drawing of draft tokens in plain PyTorch: the specification, and what a CPU uses.

Knows logits, tokens and seeds; nothing of models, requests or caches. The Triton twin is `verify.py`.
Arithmetic is float32 (float64 for float64 logits); uniforms and inverse CDFs are float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .philox import PROPOSE, chain_uniforms, uniform

GREEDY_BELOW = (
    1e-5  # temperatures up to this are greedy: scaled by more than 1e5, float32 logits mean nothing
)
TARGET_INVALID, DRAFT_INVALID = 1, 2  # bits of the status

Verdict = tuple[Tensor, Tensor, Tensor]
# target_logits, drafted [B, K+1], draft_logits, draft_lse, 1/temperature [B], accept and resample uniforms
Rule = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor, tuple[Tensor, Tensor]],
    Verdict,
]


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> Verdict:
    """See `moedraft.kernels.verify_chain`; the logits here are padded, [B, K+1, V] and [B, K, V]."""
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    return verify_rows(chain_rule, target_logits, *drafts, temperature, seed, position)


def verify_rows(
    rule: Rule,
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> Verdict:
    """Greedy rows by comparison with the target's argmax, the others by `rule`."""
    drafted = drafted_rows(draft_tokens, num_draft)
    greedy = greedy_rows(temperature)
    if greedy is True:
        return verify_greedy(target_logits, drafted)
    inverse = _inverse_temperature(temperature, greedy, target_logits)
    uniforms = chain_uniforms(seed, position, draft_tokens.shape[1])
    sampled = rule(target_logits, drafted, draft_logits, draft_lse, inverse, uniforms)
    if isinstance(greedy, bool):
        return sampled
    exact = verify_greedy(target_logits, drafted)
    tokens = torch.where(greedy[:, None], exact[0], sampled[0])
    return tokens, torch.where(greedy, exact[1], sampled[1]), torch.where(greedy, exact[2], sampled[2])


def drafted_rows(draft_tokens: Tensor, num_draft: Tensor | None) -> Tensor:
    """The drafted tokens of each row, then −1: int64 [B, K+1]. The last column ends every row."""
    batch, length = draft_tokens.shape
    drafted = draft_tokens.new_full((batch, length + 1), -1)
    drafted[:, :length] = draft_tokens
    if num_draft is not None:
        steps = torch.arange(length + 1, device=drafted.device)
        drafted.masked_fill_(steps >= num_draft[:, None], -1)
    return drafted


def sample_draft(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `moedraft.kernels.sample_draft`. logits [B, V]."""
    greedy = greedy_rows(temperature)
    if greedy is True:
        best, value = argmax_rows(logits)
        lse = torch.logsumexp(computed(logits), dim=-1)
        valid = value.isfinite()
        top = (value - lse).exp_().to(torch.float32)
        return (
            best.where(valid, 0),
            lse.to(torch.float32).where(valid, torch.nan),
            top.where(valid, torch.nan),
        )
    scaled = computed(logits) * _inverse_temperature(temperature, greedy, logits)[:, None]
    maximum = scaled.amax(dim=-1, keepdim=True)
    tokens, total = inverse_cdf(scaled.sub_(maximum).exp_(), uniform(seed, position, PROPOSE))
    lse = (maximum[:, 0] + total.log()).to(torch.float32)  # NaN for a row with a NaN, +inf or only -inf
    valid = lse.isfinite()
    if not isinstance(greedy, bool):
        tokens = torch.where(greedy, argmax_rows(logits)[0], tokens)
    top = total.reciprocal().to(torch.float32)
    return tokens.masked_fill_(~valid, 0), lse, top.masked_fill_(~valid, torch.nan)


def greedy_rows(temperature: Tensor | float) -> Tensor | bool:
    """Which rows are greedy: bool [B], or one bool where all rows agree and no device must be asked."""
    if isinstance(temperature, Tensor):
        rows = ~(temperature > GREEDY_BELOW)  # NaN and negative temperatures are greedy too
        if rows.device.type != "cpu":
            return rows
        return bool(rows.all()) if rows.numel() == 1 or not bool(rows.any()) or bool(rows.all()) else rows
    return not temperature > GREEDY_BELOW


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest index of each row's maximum (or of its first NaN), and the value there."""
    if logits.device.type == "cpu":
        exact = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
        best = torch.from_numpy(exact.numpy().argmax(-1))  # 7 to 15 times as fast as torch's argmax
    else:
        best = logits.argmax(dim=-1)
    return best, logits.gather(-1, best.unsqueeze(-1)).squeeze(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose running sum of weights [B, V] exceeds u·total, u [B] in (0, 1); and the totals [B].

    An entry of weight zero is never chosen, even where the running sum, which may be computed in parallel, is
    not monotone.
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[:, -1]
    threshold = (u * total).unsqueeze(1)
    if weights.device.type == "cpu":  # summed in order, so monotone
        index = torch.searchsorted(running, threshold, right=True).squeeze(1)
        return index.clamp_(max=weights.shape[-1] - 1), total  # beyond the last entry only for NaN
    return ((running > threshold) & (weights > 0)).to(torch.int8).argmax(dim=-1), total


def verify_greedy(target_logits: Tensor, drafted: Tensor) -> Verdict:
    """drafted [B, K+1]: the draft tokens, followed by -1."""
    best, value = argmax_rows(target_logits)  # [B, K+1]
    invalid = ~value.isfinite()
    matches = (drafted == best).logical_and_(~invalid)
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    last = num_accepted.unsqueeze(1)
    tokens = best.masked_fill_(invalid, 0)  # accepted tokens are the argmax
    steps = torch.arange(drafted.shape[1], device=drafted.device)
    status = invalid.gather(1, last).squeeze(1).to(torch.int32)  # True is TARGET_INVALID
    return tokens.masked_fill_(steps > last, -1), num_accepted, status


def chain_rule(
    target_logits: Tensor,
    drafted: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    inverse: Tensor,
    uniforms: tuple[Tensor, Tensor],
) -> Verdict:
    """drafted [B, K+1] as above, inverse [B], uniforms: accept [B, K] and resample [B, K+1] (float64)."""
    batch, width = drafted.shape
    vocab = target_logits.shape[-1]
    target_logp = torch.log_softmax(computed(target_logits) * inverse[:, None, None], dim=-1)
    accepted = torch.zeros_like(drafted)
    if width > 1:
        tokens = drafted[:, :-1]
        index = tokens.clamp(0, vocab - 1)
        target_probs = target_logp[:, :-1].gather(-1, index.unsqueeze(-1)).squeeze(-1).exp_()
        draft_logp, draft_probs = _draft_rows(draft_logits, draft_lse, inverse, index.unsqueeze(-1))
        # a comparison with NaN is false, so that a row with NaNs rejects
        torch.logical_and(uniforms[0] * draft_probs < target_probs, tokens == index, out=accepted[:, :-1])
    num_accepted = accepted.cumprod(dim=1).sum(dim=1)
    last = num_accepted.unsqueeze(1)
    rows = torch.arange(0, batch * width, width, device=drafted.device) + num_accepted
    target_row = target_logp.flatten(0, 1).index_select(0, rows).exp_()  # [B, V], where each row ends
    # softmax spreads a NaN, a +inf, an all -inf row over the whole row
    target_invalid = target_row[:, 0].isnan()
    status = target_invalid.to(torch.int32)  # True is TARGET_INVALID
    weights = target_row
    if width > 1:
        stop = drafted.gather(1, last).squeeze(1)
        draft_row = _draft_row(
            draft_logp, draft_lse, inverse, num_accepted, stop.clamp(0, vocab - 1), target_row
        )
        weights, sound = _correction(target_row, draft_row, stop)
        status += ((stop >= 0) & ~(sound | target_invalid)).to(torch.int32).mul_(DRAFT_INVALID)
    token, _ = inverse_cdf(weights, uniforms[1].gather(1, last).squeeze(1))
    steps = torch.arange(width, device=drafted.device)
    emitted = drafted.masked_fill(steps >= last, -1)
    return emitted.scatter_(1, last, token.masked_fill_(target_invalid, 0).unsqueeze(1)), num_accepted, status


def _correction(target_row: Tensor, draft_row: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """What the last token of each row is drawn from [B, V], and whether the draft's row is sound [B].

    stop [B] is the rejected token, negative where all drafted tokens were accepted. draft_row is overwritten.
    """
    residual = torch.sub(target_row, draft_row, out=draft_row).clamp_(min=0)
    mass = residual.sum(dim=-1)
    sound = (stop < target_row.shape[1]) & (mass >= 0)  # False where the draft's row holds a NaN
    use_residual = (stop >= 0) & sound & (mass > 0)
    return torch.where(use_residual.unsqueeze(1), residual, target_row), sound


def _draft_rows(
    draft_logits: Tensor | None, draft_lse: Tensor | None, inverse: Tensor, index: Tensor
) -> tuple[Tensor | None, Tensor | float]:
    """Log-probabilities [B, K, V] (with draft_lse: the logits) and the drafted tokens' probabilities."""
    if draft_logits is None:
        return None, 1.0
    if draft_lse is None:
        logp = torch.log_softmax(computed(draft_logits) * inverse[:, None, None], dim=-1)
        return logp, logp.gather(-1, index).squeeze(-1).exp_()
    scaled = computed(draft_logits.gather(-1, index).squeeze(-1)) * inverse[:, None]
    return draft_logits, scaled.sub_(draft_lse).exp_()


def _draft_row(
    draft_logp: Tensor | None,
    draft_lse: Tensor | None,
    inverse: Tensor,
    num_accepted: Tensor,
    stop: Tensor,
    target_row: Tensor,
) -> Tensor:
    """The draft's distribution [B, V] where each row ends; only of use where it ends with a rejection."""
    if draft_logp is None:
        return torch.zeros_like(target_row).scatter_(1, stop.unsqueeze(1), 1.0)
    rows = torch.arange(stop.shape[0], device=stop.device)
    at = num_accepted.clamp(max=draft_logp.shape[1] - 1)
    row = draft_logp[rows, at]
    if draft_lse is None:
        return row.exp_()
    return (computed(row) * inverse.unsqueeze(1)).sub_(draft_lse[rows, at].unsqueeze(1)).exp_()


def computed(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def _inverse_temperature(temperature: Tensor | float, greedy: Tensor | bool, like: Tensor) -> Tensor:
    """1/temperature [B] in the precision that is computed in; 1 for greedy rows, whose draw is not used."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        return torch.full((like.shape[0],), 1.0 / temperature, dtype=dtype, device=like.device)
    inverse = temperature.to(dtype).reciprocal()
    return inverse if isinstance(greedy, bool) else inverse.masked_fill(greedy, 1.0)
