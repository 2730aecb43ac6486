"""How a divergence takes part in autograd and torch.compile. Knows nothing of how the rows are computed.

One call computes loss and gradient, so a backward pass only multiplies that gradient by the one it gets from
above. Eager code runs `FusedDivergence`; under torch.compile the custom op `moedraft::divergence` takes its
place, with the same arithmetic. Neither can be differentiated twice: both raise then. What no graph can hold
runs as it is, `untraced`, between the graphs of its caller. Gradients in float16 are kept enlarged until the
backward pass (`enlargement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import reference_divergence

Given = ParamSpec("Given")
Found = TypeVar("Found")
ENLARGED = 2.0**11  # keeps gradients down to 1.5e-11 in float16, which ends at 3e-8 and at 65 504


class Problem(NamedTuple):
    """One call, flattened to rows: student [N, V], teacher [N, V] or ids and logprobs [N, k].

    weight float32 [N] multiplies each row's gradient (0 excludes the row). With `reduce` the loss is the
    weighted sum of the rows' losses, without it the rows' losses [N].
    """

    student: Tensor
    teacher: Tensor | None
    ids: Tensor | None
    logprobs: Tensor | None
    weight: Tensor
    kind: str
    beta: float
    temperature: float
    reduce: bool


def untraced(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """`function`, which torch.compile neither looks into nor compiles again for inputs of another size."""
    reason = "It has a loop over blocks and takes part in autograd itself."
    hidden: Callable[Given, Found] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return hidden


def evaluate(problem: Problem, backend: str, inplace_grad: bool) -> Tensor:
    """The loss, scalar or [N], taking part in autograd."""
    if torch.compiler.is_compiling():
        loss: Tensor = _divergence_op(*problem, backend)[0]
        return loss
    if not (torch.is_grad_enabled() and problem.student.requires_grad):
        return _compute(problem, backend, None)[0]
    result: Tensor = FusedDivergence.apply(backend, inplace_grad, *problem)  # type: ignore[no-untyped-call]
    return result


def _compute(problem: Problem, backend: str, grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The loss; the gradient goes into `grad` unless that is None.

    Beside it what each row [N] of `grad` is still to be multiplied by; None: by nothing.
    """
    larger = enlargement(problem, backend, grad)
    stored = problem if larger is None else problem._replace(weight=problem.weight * larger)
    rows = block_rows(stored, backend, grad)
    loss = rows.mul_(problem.weight).sum() if problem.reduce else rows
    return loss, None if larger is None else 1 / larger


def enlargement(problem: Problem, backend: str, grad: Tensor | None) -> Tensor | None:
    """What rows' gradients [N] are multiplied by while they are kept in float16; None in any other type.

    Most tokens of a large vocabulary have gradients that float16 rounds to 0, and a loss scaler's factor
    comes too late for these. Nor may a large one overflow. With s and t a token's probabilities, m their
    mixture, S, T and M the distributions, and a temperature of 1, an entry is at most
      fkl  |s − t| ≤ 1
      tvd  ½ s |±1 − Σ ±s| ≤ s·(1 − s) ≤ ¼
      jsd  (1 − beta)·|s·log(s/m) − s·KL(S ‖ M)| ≤ 2/e, as −s·log s ≤ 1/e and m ≥ (1 − beta)·s
      rkl  |s·log(s/t) − s·KL(S ‖ T)| ≤ KL(S ‖ T) + 1/e, as s·log(s/t) of all others is −1/e at least
    and so of a list's tokens and the bucket beside them. Only reverse KL has no bound but the row's own loss,
    which is computed first: from 15 nats on it is enlarged less, so that nothing is above 2^15. Gradients are
    divided by the temperature; the factor is multiplied by it, rounded down to a power of two.
    """
    if grad is None or grad.dtype != torch.float16:
        return None
    factor = ENLARGED * 2.0 ** (math.frexp(problem.temperature)[1] - 1)
    if problem.kind != "rkl":
        return torch.full_like(problem.weight, factor)
    losses = block_rows(problem, backend, None).nan_to_num(nan=0.0, posinf=0.0)  # +inf: it is zero
    return factor / ((1 + losses) / 16).clamp(min=1)


def block_rows(problem: Problem, backend: str, grad: Tensor | None) -> Tensor:
    """The rows' losses [N], not weighed; the gradient, weighed, goes into `grad` unless that is None."""
    if backend == "reference":
        rows = reference_divergence.divergence_rows(*problem[:8], grad)
    else:
        from . import fused_divergence  # imported on first use: Triton is optional, and slow to import

        with torch.cuda.device_of(problem.student):  # type: ignore[no-untyped-call]
            rows = fused_divergence.divergence_rows(*problem[:8], grad)
    return rows.to(problem.weight.dtype)  # the fused kernels compute in float32 whatever they are given


class FusedDivergence(torch.autograd.Function):
    """Forward gives the loss and computes the gradient, too; backward returns that. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, backend: str, inplace_grad: bool, *fields: Any) -> Tensor:
        problem = Problem(*fields)
        ctx.grad = problem.student.detach() if inplace_grad else torch.empty_like(problem.student)
        ctx.fused, ctx.once = backend == "triton", inplace_grad or backend == "triton"
        loss, ctx.smaller = _compute(problem, backend, ctx.grad)
        if inplace_grad:  # tell autograd that the logits, which earlier operations may need, were overwritten
            torch.autograd.graph.increment_version(problem.student)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grad is None:
            raise RuntimeError("The first backward took the gradient; call divergence again for another.")
        grad = ctx.grad
        if ctx.once:
            ctx.grad = None
        with torch.no_grad():
            factor = upstream if ctx.smaller is None else upstream * ctx.smaller
            grad = _times(grad, factor, ctx.fused, ctx.once)
        if torch.is_grad_enabled():  # create_graph=True
            grad = NoSecondDerivative.apply(grad.detach().requires_grad_())  # type: ignore[no-untyped-call]
        return (None, None, grad, *[None] * 8)


class NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on. Raises where it is differentiated again, which would silently be wrong."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        raise RuntimeError("divergence can be differentiated once, not twice.")


def _times(grad: Tensor, upstream: Tensor, fused: bool, inplace: bool) -> Tensor:
    """grad [N, V] times upstream (scalar or [N]); on a CPU nothing is computed where upstream is 1."""
    if fused:
        from . import fused_divergence

        with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
            return fused_divergence.scale_rows(grad, upstream.expand(grad.shape[0]))
    if upstream.device.type == "cpu" and bool((upstream == 1).all()):
        return grad
    # the factor keeps its own precision: a gradient scaler's 65 536 is more than float16 holds
    factor = upstream.expand(grad.shape[0])[:, None]
    return torch.mul(grad, factor, out=grad if inplace else torch.empty_like(grad))


@torch.library.custom_op(
    "moedraft::divergence",
    mutates_args=(),
    schema="(Tensor student, Tensor? teacher, Tensor? ids, Tensor? logprobs, Tensor weight, str kind, "
    "float beta, float temperature, bool reduce, str backend) -> (Tensor, Tensor, Tensor)",
)
def _divergence_op(
    student: Tensor,
    teacher: Tensor | None,
    ids: Tensor | None,
    logprobs: Tensor | None,
    weight: Tensor,
    kind: str,
    beta: float,
    temperature: float,
    reduce: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the gradient [N, V], and what its rows are still to be multiplied by [N]; all new tensors."""
    grad = torch.empty_like(student, memory_format=torch.contiguous_format)
    problem = Problem(student, teacher, ids, logprobs, weight, kind, beta, temperature, reduce)
    loss, smaller = _compute(problem, backend, grad)
    return loss, grad, torch.ones_like(weight) if smaller is None else smaller


@_divergence_op.register_fake
def _(
    student: Tensor,
    teacher: Tensor | None,
    ids: Tensor | None,
    logprobs: Tensor | None,
    weight: Tensor,
    kind: str,
    beta: float,
    temperature: float,
    reduce: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    grad = torch.empty_like(student, memory_format=torch.contiguous_format)
    return student.new_empty(() if reduce else student.shape[:1], dtype=dtype), grad, torch.empty_like(weight)


@torch.library.custom_op(
    "moedraft::scale_rows", mutates_args=(), schema="(Tensor grad, Tensor upstream) -> Tensor"
)
def _scale_rows_op(grad: Tensor, upstream: Tensor) -> Tensor:
    """grad [N, V] · upstream. This op has no derivative, so that differentiating twice raises."""
    factor = upstream.expand(grad.shape[0])[:, None]
    return torch.mul(grad, factor, out=torch.empty_like(grad))


@_scale_rows_op.register_fake
def _(grad: Tensor, upstream: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _hand_over(ctx: Any, upstream: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grad, smaller = ctx.saved_tensors
    return (_scale_rows_op(grad, upstream * smaller), *[None] * 9)


_divergence_op.register_autograd(_hand_over, setup_context=_keep_gradient)
