"""What the cases of steps hand to the kernels: the same tensors as the engine does on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_timing import Bench, Data
from torch import Tensor

from moedraft import kernels
from moedraft.core import SamplingParams
from moedraft.kernels import Cuts
from moedraft.sampling import SamplingBatch

TOP_P, TOP_K, MIN_P = 0.95, 50, 0.05
Rule = Callable[..., tuple[Tensor, Tensor, Tensor]]  # verify_chain and what has its arguments
Inputs = dict[str, Any]  # a rule's arguments, by name


def chain_inputs(
    bench: Bench,
    batch: int,
    vocab: int,
    seed: int,
    rule: Rule = kernels.verify_chain,
    sampling: SamplingBatch | None = None,
) -> Inputs:
    """A draft close to the target, with sampled tokens, so that rows accept different numbers of them.

    sampling: with limits, the draft's logits stay as they are, as on a GPU: its tokens are drawn with cuts,
    which are handed on. Coupled verification is told nothing of the draft but its tokens.
    """
    device, length = bench.device, bench.length
    data = Data(bench, seed)
    target = data.normal(batch, length + 1, vocab, scale=2, dtype=torch.float32)
    noise = data.normal(batch, length, vocab, scale=0.7, dtype=torch.float32)
    draft = (target[:, :length] + noise).to(bench.dtype)
    seeds = torch.arange(batch, device=device) + 1000 * seed
    inputs: Inputs = {
        "target_logits": target.to(bench.dtype),
        "num_draft": torch.full((batch,), length, device=device),
        "temperature": torch.ones(batch, device=device),
        "seed": seeds,
        "position": torch.full_like(seeds, 50),
    }
    tokens, lse, cuts = drawn(draft, inputs, rule, sampling)
    inputs["draft_tokens"] = tokens
    if rule is not kernels.verify_coupled:
        inputs |= {"draft_logits": draft, "draft_lse": lse, "draft_cuts": cuts}
    return inputs


def drawn(
    draft: Tensor, inputs: Inputs, rule: Rule, sampling: SamplingBatch | None
) -> tuple[Tensor, Tensor, Cuts | None]:
    """Tokens, log-sum-exps and cuts [B, K] of drafts drawn one after another, as the drafter draws them."""
    choose = kernels.sample_coupled if rule is kernels.verify_coupled else kernels.sample_draft
    tokens, lses, cuts = [], [], []
    for step in range(draft.shape[1]):
        rows = draft[:, step].contiguous()
        cut = None if sampling is None else cuts_of(rows, sampling)
        place = inputs["position"] + step
        token, lse, _ = choose(rows, inputs["temperature"], inputs["seed"], place, cuts=cut)
        tokens.append(token)
        lses.append(lse)
        cuts += [] if cut is None else [cut]
    stacked = Cuts(*(torch.stack(parts, 1) for parts in zip(*cuts, strict=True))) if cuts else None
    return torch.stack(tokens, 1), torch.stack(lses, 1), stacked


def filters(
    batch: int, device: str, top_k: int = 0, top_p: float = TOP_P, min_p: float = 0.0
) -> SamplingBatch:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    return SamplingBatch.of([params] * batch, [0] * batch, torch.device(device))


def cuts_of(logits: Tensor, sampling: SamplingBatch, backend: Any = "auto") -> Cuts:
    """As the engine calls it."""
    return kernels.find_cuts(
        logits,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        backend=backend,
    )


def widened(inputs: Inputs) -> Inputs:
    """The same with logits in float64, of which the log-sum-exps are computed anew."""
    wide = {name: t.double() if name.endswith("logits") else t for name, t in inputs.items()}
    wide.pop("draft_lse", None)
    return wide


def filtered(inputs: Inputs, sampling: SamplingBatch, backend: Any = "auto") -> Inputs:
    """The same with filtered logits in place of cuts: what is excluded is −inf in them."""
    written = dict(inputs)
    written.pop("draft_cuts", None)
    for name in {"target_logits", "draft_logits"} & set(inputs):
        written[name] = kernels.apply_cuts(inputs[name], cuts_of(inputs[name], sampling, backend))
    return written


def rows_unlike(rule: Rule, inputs: Inputs, exact: Inputs, **changes: Any) -> int:
    """Rows whose tokens differ from those that the reference finds with `exact`."""
    wanted = rule(**exact, backend="reference")[0]
    return int((rule(**inputs, **changes)[0] != wanted).any(dim=1).sum())
