"""What the kernels are compared with: plain PyTorch, and other packages where they are installed.

Each maker raises ImportError where its package is missing, Skipped where it has nothing to compare with or
its kernels cannot be built; the benchmark then names it and goes on. None of these packages is needed, and
none is installed by the project.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_case import Skipped
from kernel_timing import Call
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
Inputs = dict[str, Any]  # of a verification: its arguments by name


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


def plain_filtered_sample(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    return plain_sample(plain_filter(logits, top_k, top_p))


def plain_min_p(logits: Tensor, min_p: float) -> Tensor:
    """What is less than min_p times as likely as the most likely token becomes −inf."""
    least = logits.amax(-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -torch.inf)


def skip(reason: str) -> list[Call]:
    """Stands for the calls of a peer that has nothing to compare with."""
    raise Skipped(reason)


def flashinfer_sampling() -> Any:
    """FlashInfer's module. Where no package brings its kernels, they are built here, which needs nvcc."""
    sampling = importlib.import_module("flashinfer.sampling")
    try:
        sampling.get_sampling_module()
    except Exception as error:
        raise Skipped(f"its kernels cannot be built: {type(error).__name__}: {str(error)[:200]}") from error
    return sampling


def random_state(device: torch.device) -> dict[str, Tensor]:
    """A seed in memory: asked for its state, a generator would refuse to be captured in a graph."""
    return {name: torch.zeros(1, dtype=torch.int64, device=device) for name in ("seed", "offset")}


def flashinfer_verify(inputs: Inputs, top_k: int = 0, top_p: float = 1.0) -> Call:
    """With limits, those are heeded of the target; the draft's logits are filtered already."""
    sampling = flashinfer_sampling()
    target, draft = inputs["target_logits"], inputs["draft_logits"]
    tokens, state = inputs["draft_tokens"].to(torch.int32), random_state(target.device)

    def call() -> Any:
        left = flashinfer_left(sampling, target, top_k, top_p).view(target.shape)
        return sampling.chain_speculative_sampling(draft.float().softmax(-1), tokens, left, **state)

    return call


def flashinfer_left(sampling: Any, logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """The probabilities [rows, V] that top-k, unless it is 0, and then top-p, unless it is 1, leave."""
    probs: Tensor = logits.flatten(0, -2).float().softmax(-1)
    if top_k:
        probs = sampling.top_k_renorm_probs(probs, top_k)
    return sampling.top_p_renorm_probs(probs, top_p) if top_p < 1 else probs


def flashinfer_filter(logits: Tensor, top_k: int, top_p: float) -> Call:
    return partial(flashinfer_left, flashinfer_sampling(), logits, top_k, top_p)


def flashinfer_sample(logits: Tensor, top_k: int, top_p: float) -> Call:
    """One token a row of what top-k, unless it is 0, and then top-p leave."""
    sampling, state = flashinfer_sampling(), random_state(logits.device)
    if top_k:
        draw = sampling.top_k_top_p_sampling_from_logits
        return lambda: draw(logits.float(), top_k, top_p, filter_apply_order="top_k_first", **state)
    return lambda: sampling.top_p_sampling_from_probs(logits.float().softmax(-1), top_p, **state)


def module_of_file(package: str, file: str) -> Any:
    """One file of a package as a module, without what the package imports beside it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    path = Path(spec.submodule_search_locations[0]) / file
    if not path.exists():
        raise Skipped(f"this version of {package} has no {file}")
    found = importlib.util.spec_from_file_location(f"{package}_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def sglang_chain(inputs: Inputs) -> Call:
    """SGLang's kernel for chains, with the draft's probabilities."""
    file = "kernels/ops/speculative/reject_sampling.py"
    return sglang_call(module_of_file("sglang", file).chain_speculative_sampling_triton, inputs, True)


def sglang_tree(inputs: Inputs) -> Call:
    """SGLang's kernel for trees, which accepts by the target alone, and notes what it refuses in zeros."""
    verify = importlib.import_module("sgl_kernel").tree_speculative_sampling_target_only
    return sglang_call(verify, inputs, False)


def sglang_call(verify: Callable[..., None], inputs: Inputs, drafted: bool) -> Call:
    """A chain is a tree in which every token is the only child of the one before."""
    tokens, device = inputs["draft_tokens"], inputs["draft_tokens"].device
    batch, length = tokens.shape
    width = length + 1
    steps = torch.arange(width, device=device)
    following = torch.where(steps < length, steps + 1, -1).expand(batch, width).contiguous()
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    chain: dict[str, Any] = {
        "predicts": torch.empty(batch * width, dtype=torch.int32, device=device),
        "accept_index": torch.full((batch, width), -1, dtype=torch.int32, device=device),
        "accept_token_num": accepted,
        "candidates": torch.cat((tokens.new_zeros(batch, 1), tokens), 1),
        "retrive_index": torch.arange(batch * width, device=device).view(batch, width),
        "retrive_next_token": following,
        "retrive_next_sibling": torch.full_like(following, -1),
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }
    target, draft = inputs["target_logits"], inputs["draft_logits"]

    def call() -> Any:
        probs = target.float().softmax(-1)
        verify(
            **chain,
            uniform_samples=torch.rand(batch, width, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device),
            target_probs=probs,
            draft_probs=draft.float().softmax(-1) if drafted else torch.zeros_like(probs),
        )
        return accepted

    return call


def vllm_verify(inputs: Inputs, top_k: int = 0, top_p: float = 1.0) -> Call:
    """Older versions take the target's probabilities, newer ones its logits in float32.

    With limits, those are heeded of the target; the draft's logits are filtered already.
    """
    verify = importlib.import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    target, draft, tokens = inputs["target_logits"], inputs["draft_logits"], inputs["draft_tokens"]
    (batch, length), vocab = tokens.shape, target.shape[-1]
    lengths = torch.full((batch,), length, dtype=torch.int32, device=tokens.device)
    counts = lengths.cumsum(0, dtype=torch.int32)
    sampling = vllm_sampling(inputs["temperature"])
    limited = vllm_filter(target, top_k, top_p) if top_p < 1 else lambda: target
    takes_logits = "target_logits" in inspect.signature(verify).parameters

    def call() -> Any:
        left = limited().view(target.shape)
        rows = left[:, :-1].reshape(-1, vocab).float()
        draft_probs = draft.reshape(-1, vocab).float().softmax(-1)
        bonus = left[:, -1].argmax(-1, keepdim=True).to(torch.int32)
        flat = tokens.flatten().to(torch.int32)
        given = rows if takes_logits else rows.softmax(-1)
        return verify(flat, [length] * batch, length, counts, draft_probs, given, bonus, sampling)

    return call


def vllm_sampling(temperature: Tensor) -> Any:
    """What vLLM is told of how rows are sampled: all by chance, without seeds of their own."""
    metadata = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
    sampling = metadata.__new__(metadata)
    sampling.__dict__.update(all_greedy=False, all_random=True, temperature=temperature, generators={})
    return sampling


def vllm_filter(logits: Tensor, top_k: int, top_p: float) -> Call:
    """Logits [rows, V] in float32 with −inf for what top-k, unless it is 0, and then top-p exclude.

    vLLM writes into the logits that it is given, so that it is given a copy each time.
    """
    limit = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    rows = logits.flatten(0, -2)
    k = torch.full((len(rows),), top_k, dtype=torch.int32, device=rows.device) if top_k else None
    p = torch.full((len(rows),), top_p, device=rows.device)
    return lambda: limit(rows.to(torch.float32, copy=True), k, p)


def vllm_sample(logits: Tensor, top_k: int, top_p: float) -> Call:
    """One token a row of what these limits leave."""
    limited = vllm_filter(logits, top_k, top_p)
    draw = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").random_sample
    return lambda: draw(limited().softmax(-1), {})


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
        raise Skipped("Liger's KL divergence gives no gradient for y_true")
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
