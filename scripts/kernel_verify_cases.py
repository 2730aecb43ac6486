"""Cases of the kernel benchmark that every step of the engine runs: verification, filters, drawing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import kernel_peers as peers
import torch
from kernel_case import Case, Contender
from kernel_timing import Bench, Call, Data
from torch import Tensor

from moedraft import kernels
from moedraft.core import SamplingParams
from moedraft.kernels import verify_chain
from moedraft.sampling import SamplingBatch, filter_logits

TOP_P, TOP_K, MIN_P = 0.95, 50, 0.05


def chain_inputs(bench: Bench, batch: int, vocab: int, seed: int, top_p: float = 1.0) -> dict[str, Tensor]:
    """A draft close to the target, with sampled tokens, so that rows accept different numbers of them."""
    device, length = bench.device, bench.length
    data = Data(bench, seed)
    target = data.normal(batch, length + 1, vocab, scale=2, dtype=torch.float32)
    noise = data.normal(batch, length, vocab, scale=0.7, dtype=torch.float32)
    draft = (target[:, :length] + noise).to(bench.dtype)
    seeds = torch.arange(batch, device=device) + 1000 * seed
    position = torch.full_like(seeds, 50)
    if top_p < 1:
        draft = filter_logits(draft, filters(batch, device))
    drawn = [kernels.sample_draft(draft[:, j].contiguous(), 1.0, seeds, position + j) for j in range(length)]
    return {
        "target_logits": target.to(bench.dtype),
        "draft_tokens": torch.stack([token for token, _, _ in drawn], 1),
        "draft_logits": draft,
        "draft_lse": torch.stack([lse for _, lse, _ in drawn], 1),
        "temperature": torch.ones(batch, device=device),
        "seed": seeds,
        "position": position,
    }


def filters(
    batch: int, device: str, top_k: int = 0, top_p: float = TOP_P, min_p: float = 0.0
) -> SamplingBatch:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    return SamplingBatch.of([params] * batch, [0] * batch, torch.device(device))


def verify_call(inputs: dict[str, Tensor], with_lse: bool = True, **changes: Any) -> Call:
    arguments: dict[str, Any] = {**inputs, **changes}
    if not with_lse:
        arguments.pop("draft_lse")
    return lambda: verify_chain(**arguments)


def verify_facts(inputs: dict[str, Tensor], with_lse: bool) -> dict[str, Any]:
    """Rows whose tokens differ from those computed in float64, and how many tokens are accepted."""
    wide = {name: t.double() if name.endswith("logits") else t for name, t in inputs.items()}
    exact = verify_call(wide, False, backend="reference")()
    found = verify_call(inputs, with_lse)()
    return {
        "rows_unlike_float64": int((found[0] != exact[0]).any(dim=1).sum()),
        "mean_accepted": round(float(found[1].double().mean()), 3),
    }


def filtered_facts(inputs: dict[str, Tensor], sampling: SamplingBatch) -> dict[str, Any]:
    """Rows whose tokens differ from those that the references find and verify, in float64."""
    target = inputs["target_logits"]
    wide = {name: t.double() if name.endswith("logits") else t for name, t in inputs.items()}
    wide["target_logits"] = kernels.apply_cuts(target, cuts_of(target, sampling, "reference")).double()
    exact = verify_call(wide, False, backend="reference")()
    found = verify_call(inputs, target_cuts=cuts_of(target, sampling))()
    return {"rows_unlike_float64": int((found[0] != exact[0]).any(dim=1).sum())}


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


def verify_case(bench: Bench, batch: int, vocab: int, with_lse: bool = True, many_peers: bool = True) -> Case:
    row = vocab * bench.dtype.itemsize
    floor = batch * row * (bench.length + 1 + (1 if with_lse else bench.length))
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        sets = [chain_inputs(bench, batch, vocab, seed) for seed in range(count)]
        plain = [(i["target_logits"], i["draft_tokens"], i["draft_logits"]) for i in sets]
        found = {
            "moedraft": Contender(
                lambda: [verify_call(inputs, with_lse) for inputs in sets],
                lambda: verify_facts(sets[0], with_lse) if batch <= 64 else {},
            ),
            "eager PyTorch": Contender(lambda: [partial(peers.plain_verify, *p) for p in plain]),
        }
        if many_peers:
            compiled = torch.compile(peers.plain_verify, dynamic=False)  # each shape on its own
            found |= {
                "torch.compile": Contender(lambda: [partial(compiled, *p) for p in plain]),
                "FlashInfer (with its softmax)": Contender(lambda: [*map(peers.flashinfer_verify, sets)]),
                "SGLang, chain (with its softmax)": Contender(lambda: [*map(peers.sglang_chain, sets)]),
                "SGLang, tree (with its softmax)": Contender(lambda: [*map(peers.sglang_tree, sets)]),
                "vLLM (with its softmax)": Contender(lambda: [*map(peers.vllm_verify, sets)]),
            }
        return found

    shape = {"batch": batch, "num_draft": bench.length, "vocab": vocab, "draft_lse": with_lse}
    return Case("verify_chain", shape, floor, count * floor, contenders)


def rule_case(bench: Bench, rule: Callable[..., object], batch: int) -> Case:
    """Another rule than chain's, fused and as its PyTorch reference. Both read each row at least once."""
    drafted = bench.length if rule is kernels.verify_block else 0
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1 + drafted)
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        sets = [chain_inputs(bench, batch, bench.vocab, seed) for seed in range(count)]
        return {
            "moedraft": Contender(lambda: [partial(rule, **inputs) for inputs in sets]),
            "PyTorch reference": Contender(
                lambda: [partial(rule, **inputs, backend="reference") for inputs in sets], graph=False
            ),
        }

    shape = {"batch": batch, "num_draft": bench.length, "vocab": bench.vocab}
    return Case(rule.__name__, shape, floor, count * floor, contenders)


def greedy_case(bench: Bench, batch: int) -> Case:
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1)
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        sets = [chain_inputs(bench, batch, bench.vocab, seed) for seed in range(count)]
        changes: dict[str, Any] = {"draft_logits": None, "temperature": 0.0}
        return {
            "moedraft": Contender(lambda: [verify_call(inputs, False, **changes) for inputs in sets]),
            "argmax alone": Contender(lambda: [partial(torch.argmax, i["target_logits"], -1) for i in sets]),
        }

    shape = {"batch": batch, "num_draft": bench.length, "vocab": bench.vocab}
    return Case("verify_chain, greedy", shape, floor, count * floor, contenders)


def filtered_case(bench: Bench, batch: int) -> Case:
    """What the engine runs for requests with top-p: cuts are found for the target's rows, then heeded."""
    row = bench.vocab * bench.dtype.itemsize
    floor = batch * row * (bench.length + 2)
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        sets = [chain_inputs(bench, batch, bench.vocab, seed, TOP_P) for seed in range(count)]
        sampling = filters(batch, bench.device)

        def whole(inputs: dict[str, Tensor]) -> Call:
            return lambda: verify_call(inputs, target_cuts=cuts_of(inputs["target_logits"], sampling))()

        def ready(inputs: dict[str, Tensor]) -> Call:
            return verify_call(inputs, target_cuts=cuts_of(inputs["target_logits"], sampling))

        def written(inputs: dict[str, Tensor]) -> Call:
            target = inputs["target_logits"]
            return lambda: verify_call(inputs, target_logits=filter_logits(target, sampling))()

        return {
            "moedraft": Contender(
                lambda: [*map(whole, sets)],
                lambda: filtered_facts(sets[0], sampling) if batch <= 64 else {},
            ),
            "moedraft, cuts found before": Contender(lambda: [*map(ready, sets)]),
            "moedraft, filtered logits written": Contender(lambda: [*map(written, sets)]),
        }

    shape = {"batch": batch, "num_draft": bench.length, "vocab": bench.vocab, "top_p": TOP_P}
    return Case("verify_chain, filtered", shape, floor, count * floor, contenders)


def cuts_of(logits: Tensor, sampling: SamplingBatch, backend: Any = "auto") -> kernels.Cuts:
    """As the engine calls it."""
    return kernels.find_cuts(
        logits,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        backend=backend,
    )


def filter_case(bench: Bench, batch: int, top_k: int = 0, top_p: float = TOP_P, min_p: float = 0.0) -> Case:
    """Every logit is read once at least. What stands beside ours filters by the same limits."""
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1)
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
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


def filter_peers(sets: list[Tensor], top_k: int, top_p: float) -> dict[str, Contender]:
    """Others that filter by top-p, before it by top-k where that is not 0. Their names say what they do."""
    what = "top-k, then top-p" if top_k else "top-p"
    return {
        f"eager PyTorch, {what} by a full sort": Contender(
            lambda: [partial(peers.plain_filter, x, top_k, top_p) for x in sets]
        ),
        f"FlashInfer, {what} (with its softmax)": Contender(
            lambda: [peers.flashinfer_filter(x, top_k, top_p) for x in sets]
        ),
    }


def min_p_peers(sets: list[Tensor], min_p: float) -> dict[str, Contender]:
    """FlashInfer is not among them: its min-p draws a token, and leaves no filtered row."""
    return {"eager PyTorch, min-p": Contender(lambda: [partial(peers.plain_min_p, x, min_p) for x in sets])}


def sample_case(bench: Bench, batch: int) -> Case:
    floor = batch * bench.vocab * bench.dtype.itemsize
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        data = Data(bench)
        sets = [data.normal(batch, bench.vocab) for _ in range(count)]
        seed, warm = torch.arange(batch, device=bench.device), torch.ones(batch, device=bench.device)
        return {
            "moedraft": Contender(lambda: [partial(kernels.sample_draft, x, warm, seed, seed) for x in sets]),
            "eager PyTorch": Contender(lambda: [partial(peers.plain_sample, x) for x in sets]),
        }

    return Case("sample_draft", {"batch": batch, "vocab": bench.vocab}, floor, count * floor, contenders)


def sample_coupled_case(bench: Bench, batch: int) -> Case:
    floor = batch * bench.vocab * bench.dtype.itemsize
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        data = Data(bench)
        sets = [data.normal(batch, bench.vocab) for _ in range(count)]
        seed, choose = torch.arange(batch, device=bench.device), kernels.sample_coupled
        warm = torch.ones(batch, device=bench.device)
        return {
            "moedraft": Contender(lambda: [partial(choose, x, warm, seed, seed) for x in sets]),
            "PyTorch reference": Contender(
                lambda: [partial(choose, x, warm, seed, seed, "reference") for x in sets], graph=False
            ),
        }

    return Case("sample_coupled", {"batch": batch, "vocab": bench.vocab}, floor, count * floor, contenders)
