"""The divergences as callers see them: arguments checked, a backend chosen, the loss reduced."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .autograd import evaluate, untraced
from .backends import Backend, use_triton
from .divergence_inputs import check_layer, check_overwritable, problem_of
from .linear import Layer, computed_type, evaluate_linear

Kind = Literal["fkl", "rkl", "jsd", "tvd"]


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
    divisor: float = 1.0,
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
    rows that count (with none the loss is 0), "none" returns [...], "sum" divides by `divisor`: a caller that
    divides the loss itself has the backward multiply the whole gradient once more. Results are float32, or
    float64 for float64 logits.

    0·(−inf) is 0: tokens that both sides exclude cost nothing. Where for fkl the teacher gives a token some
    probability and the student none (rkl: the other way round) the row's loss is +inf; its gradient is s − t
    for fkl, zero for rkl. inplace_grad=True overwrites student_logits with the gradient at once (in float16
    with a multiple of it, until the backward; it has no effect under torch.compile); their entries may not
    share memory, as expanded ones do. With it, and always with Triton, one backward per call is allowed.
    Raises ValueError for shapes, types or a backend that do not fit, RuntimeError for a second backward or a
    second derivative.
    """
    if inplace_grad and not torch.compiler.is_compiling():
        check_overwritable(student_logits)
    # float16 cannot hold small entries divided by the number of rows: they are divided in the backward, where
    # the factor is float32 (and where what they are stored enlarged by is taken back)
    late = reduction != "none" and student_logits.dtype == torch.float16
    how = ("sum" if late else reduction), (1.0 if late else divisor)
    problem = problem_of(student_logits, teacher_logits, teacher_topk, kind, beta, temperature, mask, *how)
    loss = evaluate(problem, "triton" if use_triton(backend, student_logits) else "reference", inplace_grad)
    if late:
        return loss / (divisor if reduction == "sum" else problem.weight.sum().clamp(min=1))
    return loss.reshape(student_logits.shape[:-1]) if reduction == "none" else loss


@untraced
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
    divisor: float = 1.0,
    block_rows: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`divergence` of the logits hidden · weightᵀ + bias, which never exist for all rows at once.

    hidden [..., H], weight [V, H], bias [V]; lora = (a [r, H], b [V, r]) adds hidden · aᵀ · bᵀ: an adapter's
    factor belongs into a or b already. All are of one floating type, or autocast is on, whose type then is
    computed in. The loss is differentiable once in all of them; gradients are summed in float32. Everything
    else is as for `divergence`. block_rows: rows of the logits that exist at a time; None: as many as fill
    32 MiB on a CPU and 256 MiB (bfloat16) on a GPU. Beside these it needs the gradients of what learns.

    With reduction "none", and in a second backward (retain_graph=True), the logits are computed once more:
    RuntimeError where an argument has been changed in place since. torch.compile does not look inside: its
    graph ends before the call, and the next one begins after it; with fullgraph=True it refuses. Raises as
    `divergence` does.
    """
    check_layer(hidden, weight, bias, lora, block_rows)
    fused = "triton" if use_triton(backend, hidden) else "reference"
    late = reduction != "none" and computed_type(hidden) == torch.float16  # as in `divergence`
    shape = hidden.new_zeros(()).expand(*hidden.shape[:-1], weight.shape[0])  # holds one number
    how = ("sum" if late else reduction), (1.0 if late else divisor)
    problem = problem_of(shape, teacher_logits, teacher_topk, kind, beta, temperature, mask, *how)
    layer = Layer(weight, bias, *(lora or (None, None)))
    loss = evaluate_linear(hidden.reshape(-1, hidden.shape[-1]), layer, problem, fused, block_rows)
    if late:
        return loss / (divisor if reduction == "sum" else problem.weight.sum().clamp(min=1))
    return loss.reshape(hidden.shape[:-1]) if reduction == "none" else loss
