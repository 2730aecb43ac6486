"""What the kernels are compared with: plain PyTorch, and other packages where they are installed.

Each maker raises ImportError where its package is missing, LeftOut where it has nothing to compare with; the
benchmark then names it and goes on. None of
these packages is needed, and none is installed by the project.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from kernel_case import LeftOut
from kernel_timing import Call
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def plain_verify(target: Tensor, tokens: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Rejection sampling as it is usually written in PyTorch: probabilities in memory, exponential noise."""
    target_probs, draft_probs = target.float().softmax(-1), draft.float().softmax(-1)
    index = tokens[..., None]
    ratio = target_probs[:, :-1].gather(-1, index) / draft_probs.gather(-1, index)
    accepted = (torch.rand_like(ratio) < ratio)[..., 0].cumprod(1).sum(1)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    last = accepted.clamp(max=tokens.shape[1] - 1)
    residual = (target_probs[rows, last] - draft_probs[rows, last]).clamp(min=0)
    weights = torch.where((accepted < tokens.shape[1])[:, None], residual, target_probs[:, -1])
    return accepted, (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def plain_sample(logits: Tensor) -> Tensor:
    probs = logits.float().softmax(-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def plain_filter(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k, unless it is 0, and then top-p, as they are usually written: a full sort."""
    ordered, order = logits.float().sort(dim=-1, descending=True)
    if top_k:
        ordered[..., top_k:] = -torch.inf
    probs = ordered.softmax(-1)
    drop = (probs.cumsum(-1) - probs) >= top_p
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def plain_min_p(logits: Tensor, min_p: float) -> Tensor:
    """What is less than min_p times as likely as the most likely token becomes −inf."""
    least = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -torch.inf)


def flashinfer_verify(inputs: dict[str, Tensor]) -> Call:
    sample = importlib.import_module("flashinfer.sampling").chain_speculative_sampling
    target, draft = inputs["target_logits"], inputs["draft_logits"]
    tokens = inputs["draft_tokens"].to(torch.int32)
    return lambda: sample(draft.float().softmax(-1), tokens, target.float().softmax(-1))


def flashinfer_filter(logits: Tensor, top_k: int, top_p: float) -> Call:
    """The probabilities that top-k, unless it is 0, and then top-p leave, renormalised by each."""
    sampling = importlib.import_module("flashinfer.sampling")
    flat = logits.flatten(0, -2)

    def call() -> Any:
        probs = flat.float().softmax(-1)
        if top_k:
            probs = sampling.top_k_renorm_probs(probs, top_k)
        return sampling.top_p_renorm_probs(probs, top_p)

    return call


def sglang_verify(inputs: dict[str, Tensor]) -> Call:
    """SGLang verifies trees; a chain is a tree in which every token is the only child of the one before."""
    verify = importlib.import_module("sgl_kernel").tree_speculative_sampling_target_only
    tokens, device = inputs["draft_tokens"], inputs["draft_tokens"].device
    batch, length = tokens.shape
    width = length + 1
    steps = torch.arange(width, device=device)
    candidates = torch.cat((tokens.new_zeros(batch, 1), tokens), 1)
    following = torch.where(steps < length, steps + 1, -1).expand(batch, width).contiguous()
    predicts = torch.empty(batch * width, dtype=torch.int32, device=device)
    accept_index = torch.full((batch, width), -1, dtype=torch.int32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    index = torch.arange(batch * width, device=device).view(batch, width)
    target, draft = inputs["target_logits"], inputs["draft_logits"]

    def call() -> Any:
        target_probs = target.float().softmax(-1)
        draft_probs = torch.zeros_like(target_probs)
        draft_probs[:, :-1] = draft.float().softmax(-1)
        return verify(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=accepted,
            candidates=candidates,
            retrive_index=index,
            retrive_next_token=following,
            retrive_next_sibling=torch.full_like(following, -1),
            uniform_samples=torch.rand(batch, width, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device),
            target_probs=target_probs,
            draft_probs=draft_probs,
        )

    return call


def vllm_verify(inputs: dict[str, Tensor]) -> Call:
    """Older versions take the target's probabilities, newer ones its logits in float32."""
    verify = importlib.import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    metadata = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
    target, draft, tokens = inputs["target_logits"], inputs["draft_logits"], inputs["draft_tokens"]
    batch, length = tokens.shape
    lengths = torch.full((batch,), length, dtype=torch.int32, device=tokens.device)
    counts = lengths.cumsum(0, dtype=torch.int32)
    sampling = metadata.__new__(metadata)
    sampling.__dict__.update(
        all_greedy=False, all_random=True, temperature=inputs["temperature"], generators={}
    )
    vocab = target.shape[-1]
    takes_logits = "target_logits" in inspect.signature(verify).parameters

    def call() -> Any:
        rows = target[:, :-1].reshape(-1, vocab).float()
        draft_probs = draft.reshape(-1, vocab).float().softmax(-1)
        bonus = target[:, -1].argmax(-1, keepdim=True).to(torch.int32)
        flat = tokens.flatten().to(torch.int32)
        given = rows if takes_logits else rows.softmax(-1)
        return verify(flat, [length] * batch, length, counts, draft_probs, given, bonus, sampling)

    return call


def plain_divergence(kind: str) -> Loss:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        s, t = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
        if kind == "fkl":
            return (t.exp() * (t - s)).sum(-1).mean()
        if kind == "rkl":
            return (s.exp() * (s - t)).sum(-1).mean()
        if kind == "tvd":
            return (s.exp() - t.exp()).abs().sum(-1).mean() / 2
        m = torch.logaddexp(s, t) - math.log(2)
        return ((t.exp() * (t - m)).sum(-1).mean() + (s.exp() * (s - m)).sum(-1).mean()) / 2

    return loss


def plain_topk(kind: str, ids: Tensor, logprobs: Tensor) -> Loss:
    """The top-k-teacher loss with one bucket for the other tokens, in plain PyTorch; fkl and rkl."""

    def loss(student: Tensor, _: Tensor) -> Tensor:
        logs = student.float().log_softmax(-1)
        listed = logs.gather(-1, ids)
        s = torch.cat((listed, torch.log1p(-listed.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))), -1)
        t = torch.cat((logprobs, torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))), -1)
        return ((t.exp() * (t - s)) if kind == "fkl" else (s.exp() * (s - t))).sum(-1).mean()

    return loss


def liger_divergence(kind: str) -> Loss:
    if kind == "rkl":  # the student would be its second argument, y_true
        raise LeftOut("Liger's KL divergence gives no gradient for y_true")
    module = importlib.import_module("liger_kernel.transformers")
    if kind == "tvd":
        tvd = module.LigerTVDLoss(reduction="batchmean")
        return lambda s, t: tvd(s.softmax(-1), t.softmax(-1))
    if kind == "jsd":
        jsd = module.LigerJSD(beta=0.5)
        return lambda s, t: jsd(s.log_softmax(-1), t.log_softmax(-1))
    loss = module.LigerKLDIVLoss(reduction="batchmean", log_target=True)
    return lambda s, t: loss(s.log_softmax(-1), t.log_softmax(-1))


def liger_linear_jsd(hidden: Tensor, weight: Tensor, teacher: Tensor) -> Call:
    """Liger's fused linear JSD: the output layer and the divergence in one, for student and teacher.

    Its last argument, labels of the rows that count, has no default.
    """
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearJSD(jsd_beta=0.5)

    def call() -> Tensor:
        leaf = hidden.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf, weight, teacher, weight, None), leaf)[0]

    return call


def speculators_fused() -> Any:
    """The module of fused losses of speculators 0.9, without the package around it.

    The package imports data sets, servers and more; a module that is not executed stands in for it, so that
    the losses need no more than transformers and pydantic.
    """
    if "speculators" not in sys.modules:
        spec = importlib.util.find_spec("speculators")
        if spec is None:
            raise ModuleNotFoundError("No module named 'speculators'", name="speculators")
        sys.modules["speculators"] = importlib.util.module_from_spec(spec)
    return importlib.import_module("speculators.losses.fused")


def speculators_divergence(kind: str) -> Loss:
    """Of logits [1, T, V] each position's."""
    name = {"fkl": "kl_div", "rkl": "reverse_kl_div", "jsd": "js_div", "tvd": "tv"}[kind]
    loss = getattr(speculators_fused(), f"fused_{name}_loss")
    return lambda student, teacher: loss(student[None], teacher[None]).mean()
