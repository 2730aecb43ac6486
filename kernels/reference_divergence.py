"""Divergences between teacher and student in plain PyTorch, with the analytic gradient: the specification.

Knows logits and top-k lists; nothing of where they come from. The Triton twin is `divergence_kernels.py`.
Arithmetic is float32 (float64 for float64 logits). Rows are processed in blocks that fit into a processor's
cache, with a few buffers that all blocks share: no tensor of probabilities is as large as the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**18  # entries of the logits worked on at a time
TAIL_NOISE = 1e-6  # less mass than this outside a teacher's top-k is a rounding error and counts as zero

Buffers = tuple[Tensor, ...]  # six, [rows, V] each


def divergence_rows(
    student: Tensor,
    teacher: Tensor | None,
    ids: Tensor | None,
    logprobs: Tensor | None,
    weight: Tensor,
    kind: str,
    beta: float,
    temperature: float,
    grad: Tensor | None,
) -> Tensor:
    """Losses [N] of student [N, V] against teacher [N, V] or its top-k (ids and logprobs [N, k]).

    weight [N] multiplies each row's gradient (not its loss); a row of weight 0 has loss and gradient 0. The
    gradient with respect to the student's logits is written into `grad` [N, V] unless that is None; it may
    share the student's storage.
    """
    rows, vocab = student.shape
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    loss = torch.empty(rows, dtype=dtype, device=student.device)
    step = max(1, min(rows, BLOCK // vocab))
    direct = grad is not None and grad.dtype == dtype and grad.data_ptr() != student.data_ptr()
    scratch = torch.empty((6 if teacher is not None else 1, step, vocab), dtype=dtype, device=student.device)
    for start in range(0, rows, step):  # blocks of rows
        block = slice(start, start + step)
        buffers = scratch[:, : min(step, rows - start)].unbind()
        if direct and grad is not None:
            buffers = (grad[block], *buffers[1:])
        normalise = torch.softmax if kind == "tvd" and teacher is not None else torch.log_softmax
        normalise(_scaled(student[block], temperature, dtype), dim=-1, out=buffers[0])
        if teacher is not None:
            normalise(_scaled(teacher[block], temperature, dtype), dim=-1, out=buffers[1])
            loss[block] = _DENSE[kind](buffers, beta)
        else:
            assert ids is not None
            assert logprobs is not None
            loss[block] = _topk(buffers[0], ids[block], logprobs[block].to(dtype), kind, beta)
        if grad is not None:
            _weigh(buffers[0], weight[block] / temperature)
            if not direct:
                grad[block] = buffers[0]
    return loss.masked_fill_(weight == 0, 0)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    logits = logits.detach().to(dtype)
    return logits if temperature == 1.0 else logits / temperature


def _weigh(gradient: Tensor, weight: Tensor) -> None:
    """Multiply the rows by their weights; rows of weight 0 become zero even where they hold a NaN."""
    gradient.mul_(weight.unsqueeze(1))
    without = weight == 0
    if gradient.device.type != "cpu" or bool(without.any()):
        gradient.masked_fill_(without.unsqueeze(1), 0)


def _dot(probs: Tensor, logs: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Σ probs·logs of each row, where 0 times infinity is 0; such entries of logs may be set to 0."""
    total = torch.mul(probs, logs, out=scratch).sum(dim=1)
    if probs.device.type == "cpu" and not bool(total.isnan().any()):
        return total
    logs.masked_fill_(probs == 0, 0)
    return torch.mul(probs, logs, out=scratch).sum(dim=1)


def _chain(slope: Tensor, probs: Tensor, centre: Tensor, loss: Tensor) -> None:
    """slope ← probs·(slope − centre), centre = Σ probs·slope; 0 where the loss is infinite."""
    slope.sub_(centre.unsqueeze(1)).mul_(probs)
    endless = loss.isinf()
    if slope.device.type != "cpu" or bool(endless.any()):
        slope.masked_fill_(endless.unsqueeze(1), 0)


# These four functions take the log-probabilities of student and teacher in buffers 0 and 1, return the loss,
# and leave the gradient in buffer 0.


def _forward_kl(buffers: Buffers, beta: float) -> Tensor:
    student, teacher, teacher_probs, scratch = buffers[:4]
    torch.exp(teacher, out=teacher_probs)
    loss = _dot(teacher_probs, teacher.sub_(student), scratch)
    student.exp_().sub_(teacher_probs)
    return loss


def _reverse_kl(buffers: Buffers, beta: float) -> Tensor:
    student, teacher, probs = buffers[:3]
    torch.exp(student, out=probs)
    loss = _dot(probs, student.sub_(teacher), teacher)
    _chain(student, probs, loss, loss)
    return loss


def _total_variation(buffers: Buffers, beta: float) -> Tensor:
    student, teacher, probs = buffers[:3]  # probabilities here, not their logarithms
    probs.copy_(student)
    student.sub_(teacher)
    loss: Tensor = torch.linalg.vector_norm(student, ord=1, dim=1).mul_(0.5)
    student.sign_().mul_(0.5)
    _chain(student, probs, _dot(probs, student, teacher), loss)
    return loss


def _jensen_shannon(buffers: Buffers, beta: float) -> Tensor:
    student, teacher, probs, teacher_probs, mixture, scratch = buffers
    torch.exp(student, out=probs)
    torch.exp(teacher, out=teacher_probs)
    torch.lerp(probs, teacher_probs, beta, out=mixture).log_()
    loss = _dot(teacher_probs, teacher.sub_(mixture), scratch).mul_(beta)
    centre = _dot(probs, student.sub_(mixture).mul_(1 - beta), scratch)
    _chain(student, probs, centre, loss)
    return loss.add_(centre)


_DENSE = {"fkl": _forward_kl, "rkl": _reverse_kl, "tvd": _total_variation, "jsd": _jensen_shannon}


def _topk(logp: Tensor, ids: Tensor, logprobs: Tensor, kind: str, beta: float) -> Tensor:
    """Losses against a teacher of k tokens and one bucket for all other tokens, which the student gets too.

    logp [rows, V]: the student's log-probabilities, overwritten by the gradient.
    """
    present = ids >= 0
    # the scatters below must not change anything for padding, so it repeats a real entry of the row
    first = present.to(torch.int8).argmax(dim=1, keepdim=True)
    index = torch.where(present, ids, ids.gather(1, first)).clamp_(min=0)
    student_logs = logp.gather(1, index).masked_fill_(~present, -torch.inf)
    tail_probs = logp.exp_().scatter_(1, index, 0)  # summed directly: 1 − Σ of the k would lose precision
    tail = tail_probs.sum(dim=1, keepdim=True)
    teacher_probs = logprobs.exp().masked_fill_(~present, 0)
    teacher_tail = 1 - teacher_probs.sum(dim=1, keepdim=True)
    teacher_tail.masked_fill_(teacher_tail < TAIL_NOISE, 0)
    logs = torch.cat((student_logs, tail.log()), dim=1)
    loss, share = _buckets(logs, torch.cat((teacher_probs, teacher_tail), dim=1), kind, beta)
    tail_probs.mul_(torch.where(tail > 0, share[:, -1:] / tail, 0))
    tail_probs.scatter_(1, index, torch.where(present, share[:, :-1], share.gather(1, first)))
    return loss


def _buckets(logs: Tensor, teacher_probs: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Loss [N] between k+1 buckets, and the gradient [N, k+1] with respect to each bucket's total logit.

    A token's gradient is its bucket's, in proportion to the token's share of the bucket.
    """
    probs = logs.exp()
    teacher_logs = teacher_probs.log()
    if kind == "fkl":
        loss = _dot(teacher_probs, teacher_logs - logs)
        return loss, probs * teacher_probs.sum(dim=1, keepdim=True) - teacher_probs
    if kind == "tvd":
        difference = probs - teacher_probs
        loss = difference.abs().sum(dim=1) * 0.5
        slope = difference.sign_() * 0.5
    elif kind == "rkl":
        slope = logs - teacher_logs
        loss = _dot(probs, slope)
    else:
        mixture = torch.lerp(probs, teacher_probs, beta).log_()
        slope = (logs - mixture).mul_(1 - beta)
        loss = _dot(teacher_probs, teacher_logs - mixture) * beta + _dot(probs, slope)
    # relative to the largest bucket's slope, since differences of nearly equal numbers would lose precision
    # where one bucket has nearly all the mass
    slope = slope.masked_fill_(probs == 0, 0)
    slope = slope - slope.gather(1, probs.argmax(dim=1, keepdim=True))
    _chain(slope, probs, _dot(probs, slope), loss)
    return loss, slope
