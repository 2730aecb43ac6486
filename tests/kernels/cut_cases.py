"""Limits of filters for tests, and what their use is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from moedraft.kernels import apply_cuts, find_cuts

LIMITS: dict[str, dict[str, float]] = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "top-k and top-p": {"top_k": 40, "top_p": 0.8},
    "top-p and min-p": {"top_p": 0.95, "min_p": 0.02},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "one token": {"top_k": 1},
    "hardly any mass": {"top_p": 1e-6},
    "more than all": {"top_k": 2**30, "top_p": 0.7},
    "the likeliest": {"min_p": 1.0},
}


def limits_of(batch: int, device: str, temperature: float = 1.0, **limits: float) -> dict[str, Tensor]:
    """The arguments of `find_cuts` for sequences that all ask for the same."""
    types = {"top_k": torch.int64}
    asked = {"temperature": temperature, **limits}
    return {
        name: torch.full((batch,), value, dtype=types.get(name, torch.float32), device=device)  # type: ignore[call-overload]
        for name, value in asked.items()
    }


def assert_same(logits: Tensor, **limits: Tensor) -> None:
    """Compiled kernels round sums in an order of their own, which may be seen where top-p ends among ties."""
    if logits.device.type == "cuda" and "top_p" in limits:
        assert_nearly_same(logits, **limits)
        return
    fused, plain = (
        apply_cuts(logits, find_cuts(logits, **limits, backend=backend))  # type: ignore[arg-type]
        for backend in ("triton", "reference")
    )
    assert torch.equal(fused.nan_to_num(nan=7.0), plain.nan_to_num(nan=7.0))


def assert_mass_met(logits: Tensor) -> None:
    """Of rows [B, V], with a top-p of nearly one: what it leaves out is as small as a rounding error."""
    probs = logits.double().softmax(-1)
    for top_p in (0.999, 0.999999):
        limits = limits_of(len(logits), str(logits.device), top_p=top_p)
        kept = ~apply_cuts(logits, find_cuts(logits, **limits, backend="triton")).isinf()  # type: ignore[arg-type]
        mass, least = (probs * kept).sum(-1), torch.where(kept, probs, 1.0).amin(-1)
        assert bool((mass >= top_p - 1e-6).all())
        assert bool((mass - least <= top_p + 1e-6).all())


def all_limits(device: str, temperature: float = 1.0) -> dict[str, Tensor]:
    """One sequence for each of LIMITS."""
    neutral = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [{**neutral, **limits} for limits in LIMITS.values()]
    return {name: torch.tensor([row[name] for row in rows], device=device) for name in neutral}


def assert_nearly_same(logits: Tensor, **limits: Tensor) -> None:
    """For rows of many equal logits: where top-p ends among them, sums of float32 may be a rounding off.

    What differs weighs a millionth, or is one token.
    """
    fused, plain = (
        ~apply_cuts(logits, find_cuts(logits, **limits, backend=backend)).isinf()  # type: ignore[arg-type]
        for backend in ("triton", "reference")
    )
    if "top_p" not in limits:
        assert torch.equal(fused, plain)
        return
    warmth = limits["temperature"].where(limits["temperature"] > 0, 1.0)
    probs = (logits.double() / warmth.view(-1, *[1] * (logits.dim() - 1))).softmax(-1).nan_to_num(1.0)
    least = torch.where(plain, probs, 1.0).amin(-1)
    assert bool(((probs * (fused != plain)).sum(-1) <= least + 1e-6).all())
