"""How likely a drafted token is accepted where the target's answer was sampled.

A token drawn from the draft's distribution q is accepted with the probability Σ min(p, q), where p is what
the target draws from (verification = chain). Of p a record keeps the likeliest tokens, which say most of that
sum, with far less chance in it than in whether the likeliest guess was the token that happened to be drawn.
What the other tokens would add is left out.

Temperatures above 1 count as 1: what tokens have there that no record keeps is not known.
"""

from __future__ import annotations

import torch

COLDEST = 1e-4  # a lower temperature is as good as greedy, and dividing by it would overflow


def at_temperature(logprobs: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [N, k] of the likeliest tokens at temperature 1 → probabilities at temperatures [N].

    What all other tokens have together at temperature 1 is known, but not how many share it. They count as if
    each were as likely as the last one that is kept; below temperature 1 they have less than that.
    """
    power = 1 / temperatures.clamp(COLDEST, 1.0).double()[:, None]
    known = logprobs.double()
    top = known.amax(-1, keepdim=True)
    least = torch.where(known.isfinite(), known, torch.inf).amin(-1, keepdim=True)
    others = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=0)
    rest = others * ((least - top) * (power - 1) - top).exp()
    raised = ((known - top) * power).exp()
    return (raised / (raised.sum(-1, keepdim=True) + rest)).nan_to_num(0.0)


def accepted(
    logits: torch.Tensor, ids: torch.Tensor, probabilities: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """The probability [N] that a token drawn from a draft is accepted, as far as the tokens `ids` tell.

    logits: [N, V] of the draft. ids: int64 [N, k], the target's likeliest tokens as columns of these logits,
    −1 for one that the draft lacks, with the target's probabilities [N, k]. temperatures: [N], of both.
    Logits that are no numbers draw nothing that is accepted.
    """
    warmth = temperatures.clamp(COLDEST, 1.0).float()[:, None]
    whole = (logits.float() / warmth).logsumexp(-1, keepdim=True)
    drawn = (logits.gather(1, ids.clamp(min=0)).float() / warmth - whole).exp().double()
    return torch.minimum(drawn.masked_fill(ids < 0, 0.0), probabilities).nan_to_num(0.0).sum(-1)
