"""Divergences between teacher and student in Triton: loss and gradient from logits, one program per row.

    kl      forward and reverse KL: the logits are read twice, the gradient is written the second time; rows
            whose loss is infinite are read once more
    mixed   JSD and TVD: the logits are read three times, the gradient is written the third time
    topk    any kind against a teacher's top-k with one bucket for all other tokens: the student's logits are
            read twice, a few of them once more

Sums are float32. Each reading goes through the row in the opposite direction of the one before, so that it
starts with what the cache still holds. `reference_divergence.py` is the specification, and
`fused_divergence.py` launches them.
"""
# ruff: noqa: N803, N806 (Triton's compile-time constants are written in capitals)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import BIG, INF, at, fours
from .reference_divergence import TAIL_NOISE

NOISE = tl.constexpr(TAIL_NOISE)
LOWEST = tl.constexpr(-3.0e38)  # start of a running maximum; finite, so that differences are finite too


@triton.jit
def _load(row, offsets, stride, inverse, V: tl.constexpr):
    return tl.load(row + offsets.to(tl.int64) * stride, mask=offsets < V, other=-INF).to(tl.float32) * inverse


@triton.jit
def _store(row, offsets, stride, values, V: tl.constexpr):
    tl.store(row + offsets.to(tl.int64) * stride, values.to(row.dtype.element_ty), mask=offsets < V)


@triton.jit
def _clear(row, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, V, BLOCK):
        _store(row, start + tl.arange(0, BLOCK), stride, tl.zeros([BLOCK], tl.float32), V)


@triton.jit
def _corrected(a, x_sum, y_sum, x_step, y_step):
    """The sums of `_kl` after the running maxima have grown by these steps."""
    fade = tl.exp(-x_step)
    a = tl.where(a == INF, INF, fade * (a + x_sum * (y_step - x_step)))
    return a, x_sum * fade, y_sum * tl.exp(-y_step)


@triton.jit
def _settled(
    loss, s_row, s_stride, t_row, t_stride, x_lse, y_lse, inverse, REVERSE: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of `_kl`; where it is infinite, from the row once more.

    A token that y alone excludes had some probability against the maximum of its time. Against the whole row
    it may have none; then it costs nothing.
    """
    if loss == INF:
        total = tl.zeros([BLOCK // 4], tl.float32)
        for start in range(0, V, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x, y = _load(t_row, offsets, t_stride, inverse, V), _load(s_row, offsets, s_stride, inverse, V)
            if REVERSE:
                x, y = y, x
            probs = tl.exp(x - x_lse)
            total += fours(probs * tl.where(probs == 0, 0.0, (x - x_lse) - (y - y_lse)))
        loss = tl.sum(total, axis=0)
    return loss


@triton.jit
def _kl(
    student, student_n, student_v, teacher, teacher_n, teacher_v, grad, grad_n, grad_v, weight, losses,
    inverse, REVERSE: tl.constexpr, WANT_GRAD: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N). a = Σ e^(x−m)·((x−m)−(y−n)) is corrected whenever the running maxima m and n change."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row)
    s_row, t_row = student + row * student_n, teacher + row * teacher_n
    if scale == 0:
        tl.store(losses + row, 0.0)
        if WANT_GRAD:
            _clear(grad + row * grad_n, grad_v, V, BLOCK)
    else:
        x_top, y_top, a = LOWEST, LOWEST, tl.zeros([BLOCK // 4], tl.float32)  # x: the mean is taken over it
        x_sum, y_sum = tl.zeros([BLOCK // 4], tl.float32), tl.zeros([BLOCK // 4], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offsets = start + tl.arange(0, BLOCK)
            x, y = _load(t_row, offsets, teacher_v, inverse, V), _load(s_row, offsets, student_v, inverse, V)
            if REVERSE:
                x, y = y, x
            x_new, y_new = tl.maximum(x_top, tl.max(x, axis=0)), tl.maximum(y_top, tl.max(y, axis=0))
            x_step, y_step = x_new - x_top, y_new - y_top
            if (x_step > 0) | (y_step > 0):  # in the first blocks of a row, and seldom later
                a, x_sum, y_sum = _corrected(a, x_sum, y_sum, x_step, y_step)
            x_top, y_top = x_new, y_new
            y -= y_new
            y_sum += fours(tl.exp(y))
            x -= x_new
            probs = tl.exp(x)
            x_sum += fours(probs)
            gap = tl.maximum(x, LOWEST) - y  # a NaN of x is in probs
            a += fours(probs * tl.where(probs == 0, 0.0, gap))  # 0·(−inf) = 0
        x_total, y_total = tl.sum(x_sum, axis=0), tl.sum(y_sum, axis=0)
        x_log, y_log = tl.log(x_total), tl.log(y_total)
        x_lse, y_lse = x_top + x_log, y_top + y_log
        loss = tl.sum(a, axis=0) / x_total - x_log + y_log
        loss = _settled(loss, s_row, student_v, t_row, teacher_v, x_lse, y_lse, inverse, REVERSE, V, BLOCK)
        tl.store(losses + row, loss)
        if WANT_GRAD:
            for start in tl.range(0, V, BLOCK, num_stages=STAGES):
                offsets = (V - 1) // BLOCK * BLOCK - start + tl.arange(0, BLOCK)
                s = _load(s_row, offsets, student_v, inverse, V)
                t = _load(t_row, offsets, teacher_v, inverse, V)
                if REVERSE:
                    probs = tl.exp(s - x_lse)
                    gap = (tl.where(probs > 0, s, 0.0) - x_lse) - (t - y_lse) - loss
                    values = tl.where(loss == INF, 0.0, probs * tl.where(probs == 0, 0.0, gap))
                else:
                    values = tl.exp(s - y_lse) - tl.exp(t - x_lse)
                _store(grad + row * grad_n, offsets, grad_v, values * (scale * inverse), V)


@triton.jit
def _lse(row, stride, inverse, V: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    top, total = LOWEST, tl.zeros([BLOCK // 4], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        x = _load(row, start + tl.arange(0, BLOCK), stride, inverse, V)
        new = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(-(new - top)) + fours(tl.exp(x - new))
        top = new
    return top + tl.log(tl.sum(total, axis=0))


@triton.jit
def _terms(log_s, log_t, beta, KIND: tl.constexpr):
    """For tokens or buckets with these log-probabilities: terms of the loss, and probability times slope."""
    s, t = tl.exp(log_s), tl.exp(log_t)
    if KIND == "tvd":
        loss = 0.5 * tl.abs(s - t)
        push = 0.5 * s * tl.where(s > t, 1.0, tl.where(s < t, -1.0, s - t))
    else:
        low_s, low_t = tl.where(s == 0, 0.0, log_s), tl.where(t == 0, 0.0, log_t)
        if KIND == "fkl":
            loss = tl.where(t == 0, 0.0, t * (low_t - tl.where(t == 0, 0.0, log_s)))
            push = -t
        elif KIND == "rkl":
            loss = tl.where(s == 0, 0.0, s * (low_s - tl.where(s == 0, 0.0, log_t)))
            push = loss
        else:
            mixture = beta * t + (1 - beta) * s
            log_m = tl.log(tl.where(mixture == 0, 1.0, mixture))
            push = (1 - beta) * s * (low_s - log_m)
            loss = beta * t * (low_t - log_m) + push
    return loss, push


@triton.jit
def _mixed(
    student, student_n, student_v, teacher, teacher_n, teacher_v, grad, grad_n, grad_v, weight, losses,
    inverse, beta, KIND: tl.constexpr, WANT_GRAD: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N)."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row)
    s_row, t_row = student + row * student_n, teacher + row * teacher_n
    if scale == 0:
        tl.store(losses + row, 0.0)
        if WANT_GRAD:
            _clear(grad + row * grad_n, grad_v, V, BLOCK)
    else:
        s_lse = _lse(s_row, student_v, inverse, V, BLOCK, STAGES)
        t_lse = _lse(t_row, teacher_v, inverse, V, BLOCK, STAGES)
        loss, centre = tl.zeros([BLOCK // 4], tl.float32), tl.zeros([BLOCK // 4], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offsets = (V - 1) // BLOCK * BLOCK - start + tl.arange(0, BLOCK)
            log_s = _load(s_row, offsets, student_v, inverse, V) - s_lse
            term, push = _terms(log_s, _load(t_row, offsets, teacher_v, inverse, V) - t_lse, beta, KIND)
            loss += fours(term)
            centre += fours(push)
        tl.store(losses + row, tl.sum(loss, axis=0))
        if WANT_GRAD:
            middle, factor = tl.sum(centre, axis=0), scale * inverse
            for start in tl.range(0, V, BLOCK, num_stages=STAGES):
                offsets = start + tl.arange(0, BLOCK)
                log_s = _load(s_row, offsets, student_v, inverse, V) - s_lse
                _, push = _terms(log_s, _load(t_row, offsets, teacher_v, inverse, V) - t_lse, beta, KIND)
                values = (push - tl.exp(log_s) * middle) * factor
                _store(grad + row * grad_n, offsets, grad_v, values, V)


@triton.jit
def _places(tokens, ids, K, KP: tl.constexpr):
    """How many of the K sorted ids are below each token, and whether it is one of them."""
    places, step = tl.zeros_like(tokens), tl.full([], KP // 2, tl.int32)
    while step > 0:
        below = tl.load(ids + places + step - 1, mask=places + step <= K, other=BIG).to(tl.int32) < tokens
        places = tl.where(below, places + step, places)
        step //= 2
    return places, tl.load(ids + places, mask=places < K, other=BIG).to(tl.int32) == tokens


@triton.jit
def _others(tail, row, stride, inverse, top, ids, K, V: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr):
    """The sum of `tail` [BLOCK] without the listed tokens. Lane i holds the tokens i, i + BLOCK, and so on.

    Nothing is subtracted, which would lose a small tail: the lanes that hold a listed token are cleared, and
    their other tokens read and added again, as many lanes at a time as make half a block.
    """
    DEPTH: tl.constexpr = triton.next_power_of_2(triton.cdiv(V, BLOCK))
    LANES: tl.constexpr = min(KP, max(1, BLOCK // DEPTH // 2))
    slot, first = 0, 0
    while slot < K:
        token = tl.load(ids + slot)
        tail = tl.where((token >= 0) & (tl.arange(0, BLOCK) == token % BLOCK), 0.0, tail)
        slot += 1
    total = tl.sum(tail, axis=0)
    while first < K:
        slots = first + tl.arange(0, LANES)
        listed = tl.load(ids + slots, mask=slots < K, other=-1).to(tl.int32)
        tokens = (listed % BLOCK)[:, None] + (BLOCK * tl.arange(0, DEPTH))[None, :]
        places, found = _places(tokens, ids, K, KP)
        again = tl.max((found & (places < slots[:, None])).to(tl.int32), axis=1)  # an earlier slot's lane
        wanted = ((listed >= 0) & (again == 0))[:, None] & (found == 0)
        x = _load(row, tl.where(wanted, tokens, V), stride, inverse, V)
        total += tl.sum(tl.sum(tl.exp(x - top), axis=1), axis=0)
        first += LANES
    return total


@triton.jit
def _topk(
    student, student_n, student_v, ids, logprobs, grad, grad_n, grad_v, weight, losses, inverse, beta, K,
    KIND: tl.constexpr, WANT_GRAD: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (N). ids [N, K] are sorted, -1 first."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(weight + row)
    s_row, id_row = student + row * student_n, ids + row * K
    if scale == 0:
        tl.store(losses + row, 0.0)
        if WANT_GRAD:
            _clear(grad + row * grad_n, grad_v, V, BLOCK)
    else:
        slots = tl.arange(0, KP)
        listed = tl.load(id_row + slots, mask=slots < K, other=-1)
        present = (listed >= 0) & (listed < V)
        x_listed = tl.load(s_row + listed * student_v, mask=present, other=-INF).to(tl.float32) * inverse
        top, tail = LOWEST, tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            x = _load(s_row, start + tl.arange(0, BLOCK), student_v, inverse, V)
            new = tl.maximum(top, tl.max(x, axis=0))
            tail = tail * tl.exp(-(new - top)) + tl.exp(x - new)
            top = new
        tail_sum = _others(tail, s_row, student_v, inverse, top, id_row, K, V, BLOCK, KP)
        lse = top + tl.log(tail_sum + tl.sum(tl.exp(x_listed - top), axis=0))
        log_t = tl.where(present, tl.load(logprobs + row * K + slots, mask=slots < K, other=-INF), -INF)
        t_tail = 1.0 - tl.sum(tl.exp(log_t), axis=0)
        t_tail = tl.where(t_tail < NOISE, 0.0, t_tail)
        loss, push = _terms(x_listed - lse, log_t, beta, KIND)
        log_tail = tl.where(tail_sum == 0, -INF, tl.log(tl.where(tail_sum == 0, 1.0, tail_sum)) + top - lse)
        log_t_tail = tl.where(t_tail == 0, -INF, tl.log(tl.where(t_tail == 0, 1.0, t_tail)))
        tail_loss, tail_push = _terms(log_tail, log_t_tail, beta, KIND)
        total = tl.sum(loss, axis=0) + tail_loss
        tl.store(losses + row, total)
        if WANT_GRAD:
            # slopes are taken relative to the largest bucket's, since differences of nearly equal numbers
            # would lose precision where one bucket has nearly all the mass
            s_listed, s_tail = tl.exp(x_listed - lse), tl.exp(log_tail)
            largest = tl.maximum(tl.max(s_listed, axis=0), s_tail)
            tail_leads = s_tail == largest
            leader = tl.min(tl.where(s_listed == largest, slots, KP), axis=0)
            leads = (slots == leader) & (tail_leads == 0)
            slope = tl.where(tail_leads, tail_push, at(leads, push)) / largest
            push = tl.where(leads, 0.0, push - s_listed * slope)
            tail_push = tl.where(tail_leads, 0.0, tail_push - s_tail * slope)
            middle = tl.sum(push, axis=0) + tail_push
            factor = tl.where((total == INF) & (KIND == "rkl"), 0.0, scale * inverse)
            share = tl.where(factor == 0, 0.0, (push - s_listed * middle) * factor)
            tail_share = tl.where((factor == 0) | (s_tail == 0), 0.0, (tail_push - s_tail * middle) * factor)
            tail_factor = tail_share / tl.where(s_tail == 0, 1.0, s_tail)
            g_row = grad + row * grad_n
            for start in tl.range(0, V, BLOCK, num_stages=STAGES):
                offsets = (V - 1) // BLOCK * BLOCK - start + tl.arange(0, BLOCK)
                values = tl.exp(_load(s_row, offsets, student_v, inverse, V) - lse) * tail_factor
                _store(g_row, offsets, grad_v, values, V)
            tl.debug_barrier()  # of what threads store in the same place, the next line comes last
            tl.store(g_row + listed * grad_v, share.to(grad.dtype.element_ty), mask=present)


@triton.jit
def _scale(
    grad, grad_n, grad_v, upstream, upstream_n, V: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Grid (N). In place. With a factor of 1, the usual one, nothing is read or written."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(upstream + row * upstream_n).to(tl.float32)
    if factor != 1.0:
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            offsets = start + tl.arange(0, BLOCK)
            values = _load(grad + row * grad_n, offsets, grad_v, 1.0, V)
            _store(grad + row * grad_n, offsets, grad_v, tl.where(factor == 0, 0.0, values * factor), V)
