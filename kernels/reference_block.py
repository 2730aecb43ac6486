"""Block verification in plain PyTorch: a whole draft is judged at once, and more of it is kept on average.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, algorithm 2. Names here
and there: p is `keep`, h is `chance`, τ is `num_accepted`. Knows logits, tokens and random numbers only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import (
    DRAFT_INVALID,
    Verdict,
    chain_rule,
    computed,
    inverse_cdf,
    verify_rows,
)


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> Verdict:
    """See `moedraft.kernels.verify_block`; the logits here are padded, [B, K+1, V] and [B, K, V]."""
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    return verify_rows(block_rule, target_logits, *drafts, temperature, seed, position)


def block_rule(
    target_logits: Tensor,
    drafted: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    inverse: Tensor,
    uniforms: tuple[Tensor, Tensor],
) -> Verdict:
    """drafted [B, K+1]: the draft tokens, then -1; inverse [B]; uniforms accept [B, K], resample [B, K+1].

    A row is cut before the first position whose logits cannot be used; which that is does not depend on the
    token drafted there, so the shorter draft is verified exactly, too.
    """
    if drafted.shape[1] == 1:
        return chain_rule(target_logits, drafted, draft_logits, draft_lse, inverse, uniforms)
    target_probs = torch.softmax(computed(target_logits) * inverse[:, None, None], dim=-1)
    draft_probs = _draft_probs(draft_logits, draft_lse, inverse, drafted, target_probs)
    keep = _kept_shares(target_probs, draft_probs, drafted)
    residual = target_probs[:, :-1] * keep[:, :-1, None]
    residual = residual.sub_(draft_probs).clamp_(min=0)  # [B, K, V]
    mass = residual.sum(dim=-1)
    invalid = target_probs[..., 0].isnan()  # softmax spreads a NaN, a +inf, an all -inf row over the row
    unsound = mass.isnan() | (drafted[:, :-1] >= target_probs.shape[-1])
    unsound = torch.nn.functional.pad(unsound, (0, 1)) & ~invalid & (drafted >= 0)
    ends = invalid | unsound | (drafted < 0)
    limit = ends.to(torch.int8).argmax(dim=1)  # [B]: tokens that can be accepted
    num_accepted = _longest_accepted(keep, mass, limit, uniforms[0])
    weights = _last_weights(target_probs, residual, mass, num_accepted, limit)
    last = num_accepted.unsqueeze(1)
    token, _ = inverse_cdf(weights, uniforms[1].gather(1, last).squeeze(1))
    broken = invalid.gather(1, last).squeeze(1)
    status = broken.to(torch.int32)  # True is TARGET_INVALID
    status += unsound.gather(1, last).squeeze(1).logical_and_(num_accepted == limit) * DRAFT_INVALID
    steps = torch.arange(drafted.shape[1], device=drafted.device)
    emitted = drafted.masked_fill(steps >= last, -1)
    return emitted.scatter_(1, last, token.masked_fill_(broken, 0).unsqueeze(1)), num_accepted, status


def _draft_probs(
    draft_logits: Tensor | None, draft_lse: Tensor | None, inverse: Tensor, drafted: Tensor, like: Tensor
) -> Tensor:
    """The distributions [B, K, V] that the drafted tokens were drawn from; certain without draft_logits."""
    if draft_logits is None:
        index = drafted[:, :-1].clamp(0, like.shape[-1] - 1).unsqueeze(-1)
        return torch.zeros_like(like[:, :-1]).scatter_(-1, index, 1.0)
    scaled = computed(draft_logits) * inverse[:, None, None]
    if draft_lse is None:
        return torch.softmax(scaled, dim=-1)
    return scaled.sub_(draft_lse.unsqueeze(-1)).exp_()


def _kept_shares(target_probs: Tensor, draft_probs: Tensor, drafted: Tensor) -> Tensor:
    """p [B, K+1]: of the first i tokens' probability under the draft, the share that may be accepted.

    p_0 = 1 and p_i = min(1, p_(i-1) · target_probs(x_i) / draft_probs(x_i)): unlike in chain verification a
    token that the target likes better makes up for one that it likes less.
    """
    index = drafted[:, :-1].clamp(0, target_probs.shape[-1] - 1).unsqueeze(-1)
    ratio = target_probs[:, :-1].gather(-1, index) / draft_probs.gather(-1, index)
    keep = target_probs.new_ones(drafted.shape)
    for i in range(1, drafted.shape[1]):
        # NaN where the draft cannot have drawn this token, or a row is broken: nothing is kept from there on
        keep[:, i] = (keep[:, i - 1] * ratio[:, i - 1, 0]).clamp(max=1).nan_to_num_(nan=0.0)
    return keep


def _longest_accepted(keep: Tensor, mass: Tensor, limit: Tensor, uniforms: Tensor) -> Tensor:
    """The longest prefix [B] for which a uniform number falls below its chance h; 0 where none does.

    h_i = mass_i / (mass_i + 1 − p_i), with the residual's mass at the position after it; p_i at the end.
    """
    lengths = torch.arange(1, keep.shape[1], device=keep.device)
    shares = keep[:, 1:]
    after = torch.nn.functional.pad(mass[:, 1:], (0, 1))
    chance = torch.where(shares >= 1, torch.ones_like(after), after / (after + 1 - shares))
    chance = torch.where(lengths == limit.unsqueeze(1), shares, chance)
    accepted = (uniforms < chance) & (lengths <= limit.unsqueeze(1))
    return (accepted * lengths).amax(dim=1)


def _last_weights(
    target_probs: Tensor, residual: Tensor, mass: Tensor, num_accepted: Tensor, limit: Tensor
) -> Tensor:
    """What the last token is drawn from [B, V]: the residual, or the target's row where all were accepted.

    A residual without mass, which only rounding makes reachable, gives way to the target's row.
    """
    rows = torch.arange(num_accepted.shape[0], device=num_accepted.device)
    at = num_accepted.clamp(max=mass.shape[1] - 1)
    use_residual = (num_accepted < limit) & (mass[rows, at] > 0)
    return torch.where(use_residual.unsqueeze(1), residual[rows, at], target_probs[rows, num_accepted])
