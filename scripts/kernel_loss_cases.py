"""Cases of the kernel benchmark that training runs: divergences between a teacher and a student."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kernel_peers as peers
import torch
from kernel_case import Case, Contender
from kernel_peers import Loss
from kernel_timing import Bench, Call, Data
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import Kind

LINEAR = "linear and divergence"


def step(function: Loss, student: Tensor, teacher: Tensor) -> Call:
    """One forward and one backward. The student is a leaf; its gradient is dropped."""

    def call() -> Tensor:
        leaf = student.detach().requires_grad_()
        return torch.autograd.grad(function(leaf, teacher), leaf)[0]

    return call


def relative_errors(bench: Bench, vocab: int, loss: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
    """Relative norms against float64 on a few rows: loss and gradient. `loss` gives one loss a row."""
    data, errors = Data(bench, 5), {}
    for dtype in {torch.float32, bench.dtype}:
        size = (min(64, bench.rows), vocab)
        student = data.normal(*size, scale=2, dtype=dtype)
        teacher = student + data.normal(*size, dtype=dtype)
        exact, given = student.double().requires_grad_(), student.requires_grad_()
        wanted, found = loss(exact, teacher.double()), loss(given, teacher)
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), exact)
        (grad,) = torch.autograd.grad(found.sum(), given)
        name = str(dtype).removeprefix("torch.")
        errors[f"loss_{name}"] = float((found - wanted).detach().norm() / wanted.detach().norm())
        errors[f"gradient_{name}"] = float((grad.double() - wanted_grad).norm() / wanted_grad.norm())
    return errors


def backend_of(logits: Tensor) -> Any:
    """Float64 is for the reference alone."""
    return "reference" if logits.dtype == torch.float64 else "auto"


def topk_of(teacher: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities of each row's most likely tokens, a few rows at a time."""
    parts = [rows.float().log_softmax(-1).topk(count) for rows in torch.split(teacher, 256)]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def topk_case(
    bench: Bench,
    kind: Kind,
    vocab: int,
    rows: int,
    plain: bool = False,
    divided: bool = False,
    dtype: torch.dtype | None = None,
) -> Case:
    """The loss that the trainer lowers. The logits are read once at least, the gradient is written once.

    divided: the rows' sum is divided by their number, as joint updates have it done; otherwise it is their
    mean, as where one expert learns after the other. dtype: of the logits, where it is not the benchmark's.
    """
    read = rows * vocab * (dtype or bench.dtype).itemsize
    count = bench.sets(read, 1)

    def contenders() -> dict[str, Contender]:
        data = Data(bench)
        students = [data.normal(rows, vocab, dtype=dtype) for _ in range(count)]
        some = topk_of(data.normal(rows, vocab), bench.top_k)
        return topk_contenders(bench, kind, students, some, plain, divided)

    shape: dict[str, Any] = {"rows": rows, "vocab": vocab, "top_k": bench.top_k, "kind": kind}
    shape["upstream"] = "1"
    if dtype is not None:
        shape["dtype"] = str(dtype).removeprefix("torch.")
    return Case("topk divergence", shape, 2 * read, count * read, contenders)


def topk_contenders(
    bench: Bench,
    kind: Kind,
    students: list[Tensor],
    some: tuple[Tensor, Tensor],
    plain: bool,
    divided: bool,
) -> dict[str, Contender]:
    """Our own and with `plain` PyTorch's, for each of these logits and the teacher's list `some`."""
    rows, vocab = students[0].shape

    def ours(s: Tensor, _: Tensor) -> Tensor:
        if divided:
            return kernels.divergence(s, teacher_topk=some, kind=kind, reduction="sum", divisor=rows)
        return kernels.divergence(s, teacher_topk=some, kind=kind)

    def rowwise(s: Tensor, t: Tensor) -> Tensor:
        few = topk_of(t, bench.top_k)
        return kernels.divergence(s, teacher_topk=few, kind=kind, reduction="none", backend=backend_of(s))

    def timed(loss: Callable[[], Loss]) -> Contender:
        return Contender(lambda: [step(one, s, s) for one in [loss()] for s in students])

    found = {
        "moedraft": Contender(
            lambda: [step(ours, s, s) for s in students], lambda: relative_errors(bench, vocab, rowwise)
        )
    }
    if plain:
        loss = peers.plain_topk(kind, *some)
        found |= {
            "eager PyTorch": timed(lambda: loss),
            "torch.compile": timed(lambda: torch.compile(loss)),
        }
    return found


def dense_case(bench: Bench, kind: Kind, upstream: float = 1.0) -> Case:
    """The loss of base training, fkl unless another kind is chosen; there it is that of each block of rows.

    upstream: its factor, which is 1 in a drafter's first step and less later. Both sides' logits are read
    once at least, the gradient is written once.
    """
    read = 2 * bench.rows * bench.vocab * bench.dtype.itemsize
    count = bench.sets(read, 1)

    def contenders() -> dict[str, Contender]:
        data = Data(bench)
        pairs = [[data.normal(bench.rows, bench.vocab) for _ in range(2)] for _ in range(count)]
        plain = peers.plain_divergence(kind)

        def ours(s: Tensor, t: Tensor) -> Tensor:
            return upstream * kernels.divergence(s, t, kind=kind)

        def rowwise(s: Tensor, t: Tensor) -> Tensor:
            return kernels.divergence(s, t, kind=kind, reduction="none", backend=backend_of(s))

        def timed(loss: Callable[[], Loss], facts: Callable[[], dict[str, Any]] = dict) -> Contender:
            return Contender(lambda: [step(one, *pair) for one in [loss()] for pair in pairs], facts)

        found = {"moedraft": timed(lambda: ours, lambda: relative_errors(bench, bench.vocab, rowwise))}
        if upstream == 1:
            found |= {
                "eager PyTorch": timed(lambda: plain),
                "torch.compile": timed(lambda: torch.compile(plain)),
                "Liger (with its log_softmax)": replace(
                    timed(lambda: peers.liger_divergence(kind)), graph=False
                ),
                "speculators": timed(lambda: peers.speculators_divergence(kind)),
            }
        return found

    shape = {"rows": bench.rows, "vocab": bench.vocab, "kind": kind, "upstream": f"{upstream:g}"}
    return Case("divergence", shape, read * 3 // 2, count * read, contenders)


def linear_topk_case(bench: Bench, rows: int, width: int) -> Case:
    """From hidden states: the output layer and the divergence from a list of tokens.

    Fused, the logits of a few rows exist at a time; kernels and products are per block of rows. Each product
    with the weights counts 2 · rows · vocab · width operations: the logits and their gradient's way back.
    """

    def contenders() -> dict[str, Contender]:
        data, hidden, weight = layer(bench, rows, width)
        some = topk_of(data.normal(rows, bench.vocab), bench.top_k)

        def fused(s: Tensor, _: Tensor) -> Tensor:
            return kernels.linear_divergence(s, weight, teacher_topk=some, reduction="sum", divisor=rows)

        def apart(s: Tensor, _: Tensor) -> Tensor:  # the logits are nobody else's
            how: dict[str, Any] = {"reduction": "sum", "divisor": rows}
            return kernels.divergence(s @ weight.T, teacher_topk=some, inplace_grad=True, **how)

        return {
            "moedraft": Contender(lambda: [step(fused, hidden, hidden)]),
            "moedraft after the product": Contender(lambda: [step(apart, hidden, hidden)]),
        }

    shape = {"rows": rows, "width": width, "vocab": bench.vocab, "top_k": bench.top_k, "kind": "fkl"}
    weights = bench.vocab * width * bench.dtype.itemsize
    return Case(LINEAR, shape, 2 * weights, weights, contenders, 4 * rows * bench.vocab * width)


def linear_dense_case(bench: Bench, rows: int, width: int) -> Case:
    """The same from a teacher's hidden states: its logits are a third product, which all contenders make.

    Nothing calls it so; it stands here for a peer that does.
    """

    def contenders() -> dict[str, Contender]:
        data, hidden, weight = layer(bench, rows, width)
        teacher = data.normal(rows, width)

        def fused(s: Tensor, t: Tensor) -> Tensor:
            return kernels.linear_divergence(s, weight, teacher_logits=t @ weight.T, kind="jsd")

        def apart(s: Tensor, t: Tensor) -> Tensor:
            return kernels.divergence(s @ weight.T, t @ weight.T, kind="jsd", inplace_grad=True)

        return {
            "moedraft": Contender(lambda: [step(fused, hidden, teacher)]),
            "moedraft after the product": Contender(lambda: [step(apart, hidden, teacher)]),
            "Liger, fused": Contender(lambda: [peers.liger_linear_jsd(hidden, weight, teacher)], graph=False),
        }

    shape = {"rows": rows, "width": width, "vocab": bench.vocab, "kind": "jsd"}
    weights = bench.vocab * width * bench.dtype.itemsize
    return Case(LINEAR, shape, 3 * weights, weights, contenders, 6 * rows * bench.vocab * width)


def layer(bench: Bench, rows: int, width: int) -> tuple[Data, Tensor, Tensor]:
    """Where more data comes from, hidden states, and an output layer's weight."""
    data = Data(bench)
    return data, data.normal(rows, width), data.normal(bench.vocab, width, scale=width**-0.5)
