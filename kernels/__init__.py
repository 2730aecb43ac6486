"""Verification and divergences for speculative decoding, each in PyTorch and, for CUDA, in Triton.

    verify_chain   accept drafted tokens, correct the first wrong one, add one more; the target's distribution
                   is kept exactly (Leviathan et al., arXiv 2211.17192)
    verify_block   the same with a rule that judges a draft as a whole and keeps more of it on average (Sun et
                   al., arXiv 2403.10444)
    verify_coupled, sample_coupled  draft and target choose with the same random numbers, so that a seed fixes
                   the answer whatever the draft (Daliri et al., arXiv 2408.07978)
    round_seeds    random numbers of their own for each round, which verify_block needs
    sample_draft   draw a draft token; returns the log-sum-exp, too, which verification needs
    divergence     forward and reverse KL, JSD, TVD between teacher and student; loss and gradient in one call
    linear_divergence  the same from hidden states and the output layer, without the logits of all rows

`backend`: "reference" (any device), "triton" (CUDA, or TRITON_INTERPRET=1), "auto" (Triton for CUDA
tensors if it is installed, else the reference). Knows nothing of models, requests or training loops.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch
from torch import Tensor

from . import reference, reference_block, reference_coupled
from .autograd import evaluate
from .chain_inputs import check_chain, check_draft, padded
from .divergence_inputs import check_layer, problem_of
from .linear import Layer, computed_type, evaluate_linear
from .philox import round_seeds
from .reference import DRAFT_INVALID, GREEDY_BELOW, TARGET_INVALID

__all__ = [
    "DRAFT_INVALID",
    "GREEDY_BELOW",
    "TARGET_INVALID",
    "Kind",
    "divergence",
    "linear_divergence",
    "round_seeds",
    "sample_coupled",
    "sample_draft",
    "verify_block",
    "verify_chain",
    "verify_coupled",
]

Backend = Literal["auto", "reference", "triton"]
Kind = Literal["fkl", "rkl", "jsd", "tvd"]
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each row's drafted tokens and emit one more, distributed as the target's own tokens.

    target_logits  [B, K+1, V] floating; or packed, [Σ (num_draft+1), V], row after row (num_draft required)
    draft_tokens   int64 [B, K]; the first -1 ends the row, the rest is padding; K may be 0
    draft_logits   [B, K, V] (packed: [Σ num_draft, V]); None: the draft gave each token probability 1
    draft_lse      float32 [B, K], logsumexp(draft_logits / temperature), as `sample_draft` returns it
    num_draft      int [B], drafted tokens per row, 0 ≤ num_draft ≤ K; None: up to the first -1
    temperature    float32 [B] or one float; a row with at most 1e-5 is greedy
    seed, position int64 [B]; position is the absolute position of the first token emitted

    Returns tokens int64 [B, K+1] (those accepted, one more, then -1), num_accepted int64 [B], and status
    int32 [B].

    Probabilities are softmax(logits / temperature). Tokens excluded by top-k or top-p have logits of -inf; in
    draft_logits those excluded when the token was drawn. Token x at position j of a row is accepted when
    u·draft_probs(x) < target_probs(x), with u from Philox at (seed, position + j, accept). At the first
    rejection the token is drawn from max(0, target − draft), normalised, or from the target's row where this
    is zero everywhere. When all are accepted it is drawn from the target's row. Both draws are inverse CDFs
    at (seed, position + j, resample). Greedy rows are compared with the target's argmax, the lowest index on
    ties, and do not read draft_logits.

    status, for the position at which the row ends:
      TARGET_INVALID  the target's row holds a NaN or +inf, or nothing but -inf. Token 0 stands there as a
                      placeholder, nothing after it; num_accepted counts the valid positions before it.
      DRAFT_INVALID   (sampled rows) the draft's row holds such values, or its token is outside the
                      vocabulary. It is rejected, and one is drawn from the target's row, which is exact.
    Positions behind a row's end are not read. Raises ValueError for shapes, types or a backend that does not
    fit.
    """
    packed = target_logits.dim() == 2
    check_chain(target_logits, draft_tokens, draft_logits, draft_lse, num_draft, packed)
    if _use_triton(backend, target_logits):
        from . import verify  # imported on first use: Triton is optional, and slow to import

        return verify.verify_chain(
            target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
        )
    if packed:
        target_logits, draft_logits = padded(target_logits, draft_tokens, draft_logits, num_draft)
    return reference.verify_chain(
        target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
    )


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_chain`, by another rule: on average it accepts at least as many tokens, often more.

    Arguments, results, greedy rows and status are `verify_chain`'s; what is emitted is distributed as the
    target's own tokens. There is one condition more. Which tokens are accepted depends on all of the draft,
    on tokens that are then thrown away too, so nothing of a round may return in a later one: `seed` must be a
    round's own, as `round_seeds` makes them, for this function and for `sample_draft` alike.

    With M the target and S the draft: p_0 = 1, p_i = min(1, p_(i-1)·M(x_i)/S(x_i)); the longest prefix i is
    accepted whose u_i < h_i, where h_i = m_i / (m_i + 1 − p_i), m_i = Σ max(0, p_i·M − S) over the position
    after it, and h = p at the draft's end. The next token is drawn from max(0, p_i·M − S), normalised, or
    from the target's row at the draft's end. A row whose draft is not valid at some position ends there at
    the latest (DRAFT_INVALID if it does).

    Unlike `verify_chain` it reads all of the draft's rows, and the target's twice. Raises ValueError as that
    does.
    """
    packed = target_logits.dim() == 2
    check_chain(target_logits, draft_tokens, draft_logits, draft_lse, num_draft, packed)
    if _use_triton(backend, target_logits):
        from . import block

        return block.verify_block(
            target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
        )
    if packed:
        target_logits, draft_logits = padded(target_logits, draft_tokens, draft_logits, num_draft)
    return reference_block.verify_block(
        target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
    )


def verify_coupled(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_chain`, for drafts of `sample_coupled`: a seed fixes the answer, whatever the draft.

    Each position's token is the one that `sample_coupled` draws from the target's row with the row's seed at
    that position, distributed as the target's own (Daliri et al., arXiv 2408.07978). Drafted tokens are kept
    as long as they are these, so that neither the draft's tokens nor its distribution, length or version can
    change what is emitted; draft_logits and draft_lse are checked and not read. Greedy rows and
    TARGET_INVALID are `verify_chain`'s. Raises ValueError as `verify_chain` does.
    """
    packed = target_logits.dim() == 2
    check_chain(target_logits, draft_tokens, draft_logits, draft_lse, num_draft, packed)
    if _use_triton(backend, target_logits):
        from . import coupled

        return coupled.verify_coupled(target_logits, draft_tokens, num_draft, temperature, seed, position)
    if packed:
        target_logits, _ = padded(target_logits, draft_tokens, None, num_draft)
    return reference_coupled.verify_coupled(
        target_logits, draft_tokens, num_draft, temperature, seed, position
    )


def sample_coupled(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """As `sample_draft`, for `verify_coupled`: argmax of logits/temperature + Gumbel(seed, position, token).

    Two rows with the same seed and position tend to give the same token, the more alike they are.
    """
    check_draft(logits)
    if _use_triton(backend, logits):
        from . import coupled

        return coupled.sample_coupled(logits, temperature, seed, position)
    return reference_coupled.sample_coupled(logits, temperature, seed, position)


def sample_draft(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of logits [B, V], by an inverse CDF at Philox (seed, position, propose).

    logits are filtered (-inf) but not divided by the temperature; temperature float32 [B] or one float; seed,
    position int64 [B], the position of the token that is drawn. Returns tokens int64 [B], and lse float32 [B]
    = logsumexp(logits / temperature), which `verify_chain` takes as draft_lse. Greedy rows (temperature up to
    1e-5) give the argmax, lowest index on ties, and the lse of the unscaled logits. A row with a NaN, a
    +inf or nothing but -inf gives token 0 and an lse of NaN. Raises ValueError for shapes or a backend
    that do not fit.
    """
    check_draft(logits)
    if _use_triton(backend, logits):
        from . import verify

        return verify.sample_draft(logits, temperature, seed, position)
    return reference.sample_draft(logits, temperature, seed, position)


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    kind: Kind = "fkl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    inplace_grad: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Divergence between teacher and student in nats, differentiable once in student_logits [..., V].

    teacher_logits [..., V], or teacher_topk = (ids int64 [..., k], logprobs [..., k]): log-probabilities of k
    distinct tokens. All other tokens then count as one bucket, for teacher and student; padding has id -1 and
    logprob -inf. An id outside the vocabulary is refused on a CPU; on a GPU, where the host does not wait to
    read it, it counts as padding.
    kind, with t = softmax(teacher_logits / temperature) and s = softmax(student_logits / temperature):
      fkl  KL(t ‖ s)            rkl  KL(s ‖ t)            tvd  ½ Σ |t − s|
      jsd  beta·KL(t ‖ m) + (1 − beta)·KL(s ‖ m), m = beta·t + (1 − beta)·s, 0 < beta < 1: the convention of
           GKD, arXiv 2306.13649 (beta near 0 tends to beta·fkl, near 1 to (1 − beta)·rkl)
    The loss is not multiplied by temperature²; the gradient is that of the loss as stated. Top-k
    log-probabilities are used as they are and must belong to `temperature`; where they leave less than 1e-6
    for the other tokens, that counts as zero. Rows that mask [...] (bool, or 0 and 1) excludes, and rows
    whose top-k is all padding, have exactly zero loss and gradient. reduction "mean" divides by the number of
    rows that count (with none the loss is 0), "none" returns [...]. Results are float32, or float64 for
    float64 logits.

    0·(−inf) is 0: tokens that both sides exclude cost nothing. Where for fkl the teacher gives a token some
    probability and the student none (rkl: the other way round) the row's loss is +inf; its gradient is s − t
    for fkl, zero for rkl. inplace_grad=True overwrites student_logits with the gradient at once (it has no
    effect under torch.compile). With it, and always with Triton, one backward per call is allowed. Raises
    ValueError for shapes, types or a backend that do not fit, RuntimeError for a second backward or a second
    derivative.
    """
    # float16 cannot hold small entries divided by the number of rows: they are divided in the backward
    late = reduction == "mean" and student_logits.dtype == torch.float16
    summed = "sum" if late else reduction
    problem = problem_of(student_logits, teacher_logits, teacher_topk, kind, beta, temperature, mask, summed)
    loss = evaluate(problem, "triton" if _use_triton(backend, student_logits) else "reference", inplace_grad)
    if late:
        return loss / problem.weight.sum().clamp(min=1)
    return loss.reshape(student_logits.shape[:-1]) if reduction == "none" else loss


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor] | None = None,
    teacher_logits: Tensor | None = None,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    kind: Kind = "fkl",
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`divergence` of the logits hidden · weightᵀ + bias, which never exist for all rows at once.

    hidden [..., H], weight [V, H], bias [V]; lora = (a [r, H], b [V, r]) adds hidden · aᵀ · bᵀ: an adapter's
    factor belongs into a or b already. All are of one floating type, or autocast is on, whose type then is
    computed in. The loss is differentiable once in all of them; gradients are summed in float32. Everything
    else is as for `divergence`. block_rows: rows of the logits that exist at a time; None: as many as fill
    32 MiB on a CPU and 256 MiB (bfloat16) on a GPU. Beside these it needs the gradients of what learns.

    With reduction "none", and in a second backward, the logits are computed once more. torch.compile does not
    look inside. Raises as `divergence` does.
    """
    check_layer(hidden, weight, bias, lora)
    fused = "triton" if _use_triton(backend, hidden) else "reference"
    late = reduction == "mean" and computed_type(hidden) == torch.float16  # as in `divergence`
    shape = hidden.new_zeros(()).expand(*hidden.shape[:-1], weight.shape[0])  # holds one number
    summed = "sum" if late else reduction
    problem = problem_of(shape, teacher_logits, teacher_topk, kind, beta, temperature, mask, summed)
    layer = Layer(weight, bias, *(lora or (None, None)))
    loss = evaluate_linear(hidden.reshape(-1, hidden.shape[-1]), layer, problem, fused, block_rows)
    if late:
        return loss / problem.weight.sum().clamp(min=1)
    return loss.reshape(hidden.shape[:-1]) if reduction == "none" else loss


def _use_triton(backend: str, logits: Tensor) -> bool:
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f'backend must be "auto", "reference" or "triton", not {backend!r}.')
    if backend == "triton" and not _HAS_TRITON:
        raise ValueError('backend="triton" needs the package triton; install moedraft[triton].')
    if backend == "triton" and not logits.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError('backend="triton" needs tensors on a CUDA device.')
    return backend == "triton" or (backend == "auto" and logits.is_cuda and _HAS_TRITON)
