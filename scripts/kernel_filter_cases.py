"""Cases of the kernel benchmark with top-k, top-p or min-p: filters, and steps that heed what they leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import kernel_peers as peers
import torch
from kernel_case import Case, Contender
from kernel_inputs import (
    TOP_P,
    Inputs,
    Rule,
    chain_inputs,
    cuts_of,
    filtered,
    filters,
    rows_unlike,
    widened,
)
from kernel_timing import Bench, Call, Data
from torch import Tensor

from moedraft import kernels
from moedraft.sampling import SamplingBatch

Choose = Callable[..., tuple[Tensor, Tensor, Tensor]]  # sample_draft or sample_coupled
Contenders = dict[str, Contender]


def what(top_k: int) -> str:
    """Which limits a peer filters by."""
    return "top-k, then top-p" if top_k else "top-p"


def filtered_case(bench: Bench, rule: Rule, batch: int, top_k: int = 0) -> Case:
    """What the engine runs for requests with top-p, before it top-k where that is not 0.

    Raw logits of both: the draft's cuts were found when its tokens were drawn, the target's are found here.
    """
    drafted = {kernels.verify_chain: 1, kernels.verify_block: bench.length}.get(rule, 0)
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1 + drafted)
    count = bench.sets(floor)

    def contenders() -> Contenders:
        sampling = filters(batch, bench.device, top_k)
        sets = [chain_inputs(bench, batch, bench.vocab, seed, rule, sampling) for seed in range(count)]
        return {
            "moedraft": Contender(
                lambda: [whole(rule, inputs, sampling) for inputs in sets],
                lambda: filtered_facts(rule, sets[0], sampling) if batch <= 64 else {},
            ),
            "moedraft, cuts found before": Contender(
                lambda: [
                    partial(rule, **inputs, target_cuts=target_cuts(inputs, sampling)) for inputs in sets
                ]
            ),
            **(chain_others(sets, sampling, top_k) if rule is kernels.verify_chain else nobody(rule)),
        }

    shape = {"batch": batch, "num_draft": bench.length, "vocab": bench.vocab, "top_p": TOP_P, "top_k": top_k}
    return Case(f"{rule.__name__}, filtered", shape, floor, count * floor, contenders)


def whole(rule: Rule, inputs: Inputs, sampling: SamplingBatch) -> Call:
    return lambda: rule(**inputs, target_cuts=target_cuts(inputs, sampling))


def target_cuts(inputs: Inputs, sampling: SamplingBatch) -> kernels.Cuts:
    return cuts_of(inputs["target_logits"], sampling)


def filtered_facts(rule: Rule, inputs: Inputs, sampling: SamplingBatch) -> dict[str, Any]:
    """Rows whose tokens differ from those that the references find and verify, in float64."""
    exact = widened(filtered(inputs, sampling, "reference"))
    return {
        "rows_unlike_float64": rows_unlike(rule, inputs, exact, target_cuts=target_cuts(inputs, sampling))
    }


def chain_others(sets: list[Inputs], sampling: SamplingBatch, top_k: int) -> Contenders:
    """What else does the same for chains. The draft's rows were filtered when its tokens were drawn."""

    def written(inputs: Inputs) -> Call:
        target, rest = inputs["target_logits"], drafts_written(inputs)
        found = partial(cuts_of, target, sampling)
        return lambda: kernels.verify_chain(**{**rest, "target_logits": kernels.apply_cuts(target, found())})

    named = f"{what(top_k)} (with its softmax)"
    return {
        "moedraft, filtered logits written": Contender(lambda: [*map(written, sets)]),
        f"FlashInfer, {named}": Contender(
            lambda: [peers.flashinfer_verify(drafts_written(inputs), top_k, TOP_P) for inputs in sets]
        ),
        f"vLLM, {named}": Contender(
            lambda: [peers.vllm_verify(drafts_written(inputs), top_k, TOP_P) for inputs in sets]
        ),
    }


def drafts_written(inputs: Inputs) -> Inputs:
    """With −inf in the draft's logits in place of its cuts."""
    written = kernels.apply_cuts(inputs["draft_logits"], inputs["draft_cuts"])
    return {**inputs, "draft_logits": written, "draft_cuts": None}


def nobody(function: Callable[..., Any]) -> Contenders:
    """Peers that have no function like this one; their entries say so."""
    return {
        name: Contender(partial(peers.skip, f"{name} has nothing like {function.__name__}"))
        for name in ("FlashInfer", "vLLM")
    }


def drawn_case(bench: Bench, choose: Choose, batch: int, top_k: int = 0) -> Case:
    """What the drafter runs for each of its tokens with the same limits: cuts are found, then heeded."""
    floor = batch * bench.vocab * bench.dtype.itemsize
    count = bench.sets(floor)

    def contenders() -> Contenders:
        data, sampling = Data(bench), filters(batch, bench.device, top_k)
        sets = [data.normal(batch, bench.vocab, scale=2) for _ in range(count)]
        seed = torch.arange(batch, device=bench.device)
        rest = (sampling.temperature, seed, seed)

        def drawn(logits: Tensor) -> Call:
            return lambda: choose(logits, *rest, cuts=cuts_of(logits, sampling))

        def ready(logits: Tensor) -> Call:
            return partial(choose, logits, *rest, cuts=cuts_of(logits, sampling))

        return {
            "moedraft": Contender(
                lambda: [*map(drawn, sets)], lambda: drawn_facts(choose, sets[0], sampling, seed)
            ),
            "moedraft, cuts found before": Contender(lambda: [*map(ready, sets)]),
            **(draw_peers(sets, top_k) if choose is kernels.sample_draft else nobody(choose)),
        }

    shape = {"batch": batch, "vocab": bench.vocab, "top_p": TOP_P, "top_k": top_k}
    return Case(f"{choose.__name__}, filtered", shape, floor, count * floor, contenders)


def drawn_facts(choose: Choose, logits: Tensor, sampling: SamplingBatch, seed: Tensor) -> dict[str, Any]:
    """Rows whose token differs from the one that the references find and draw, in float64."""
    exact = kernels.apply_cuts(logits, cuts_of(logits, sampling, "reference")).double()
    rest = (sampling.temperature, seed, seed)
    found = choose(logits, *rest, cuts=cuts_of(logits, sampling))[0]
    return {"rows_unlike_float64": int((found != choose(exact, *rest, "reference")[0]).sum())}


def draw_peers(sets: list[Tensor], top_k: int) -> Contenders:
    named = what(top_k)
    return {
        f"eager PyTorch, {named} by a full sort": Contender(
            lambda: [partial(peers.plain_filtered_sample, x, top_k, TOP_P) for x in sets]
        ),
        f"FlashInfer, {named}": Contender(lambda: [peers.flashinfer_sample(x, top_k, TOP_P) for x in sets]),
        f"vLLM, {named}": Contender(lambda: [peers.vllm_sample(x, top_k, TOP_P) for x in sets]),
    }


def filter_case(bench: Bench, batch: int, top_k: int = 0, top_p: float = TOP_P, min_p: float = 0.0) -> Case:
    """Every logit is read once at least. What stands beside ours filters by the same limits."""
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1)
    count = bench.sets(floor)

    def contenders() -> Contenders:
        shape = (batch, bench.length + 1, bench.vocab)
        data = Data(bench)
        sets = [data.normal(*shape, scale=2) for _ in range(count)]
        sampling = filters(batch, bench.device, top_k, top_p, min_p)
        return {
            "moedraft": Contender(
                lambda: [partial(cuts_of, x, sampling) for x in sets],
                lambda: filter_facts(sets[0], sampling) if batch <= 64 else {},
            ),
            "PyTorch reference": Contender(
                lambda: [partial(cuts_of, x, sampling, "reference") for x in sets], graph=False
            ),
            **(filter_peers(sets, top_k, top_p) if top_p < 1 else min_p_peers(sets, min_p)),
        }

    shape = {"batch": batch, "num_draft": bench.length, "vocab": bench.vocab}
    limits = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    return Case("find_cuts", shape | limits, floor, count * floor, contenders)


def filter_facts(logits: Tensor, sampling: SamplingBatch) -> dict[str, int]:
    """Rows of which another set is kept than the reference's, and the most tokens in which one differs.

    Where top-p ends among equal logits, the rounding of sums may move its end by a token.
    """
    fused, plain = (
        kernels.apply_cuts(logits, cuts_of(logits, sampling, backend)).isinf()
        for backend in ("auto", "reference")
    )
    differing = (fused != plain).sum(-1)
    return {"rows_kept_unlike": int((differing > 0).sum()), "tokens_unlike": int(differing.max())}


def filter_peers(sets: list[Tensor], top_k: int, top_p: float) -> Contenders:
    """Others that filter by top-p, before it by top-k where that is not 0. Their names say what they do."""
    named = what(top_k)
    return {
        f"eager PyTorch, {named} by a full sort": Contender(
            lambda: [partial(peers.plain_filter, x, top_k, top_p) for x in sets]
        ),
        f"FlashInfer, {named} (with its softmax)": Contender(
            lambda: [peers.flashinfer_filter(x, top_k, top_p) for x in sets]
        ),
        f"vLLM, {named}": Contender(lambda: [peers.vllm_filter(x, top_k, top_p) for x in sets]),
    }


def min_p_peers(sets: list[Tensor], min_p: float) -> Contenders:
    """FlashInfer is not among them: its min-p draws a token, and leaves no filtered row."""
    return {"eager PyTorch, min-p": Contender(lambda: [partial(peers.plain_min_p, x, min_p) for x in sets])}
