"""Cases of the kernel benchmark that every step of the engine runs without limits: verification, drawing."""

from __future__ import annotations

from functools import partial
from typing import Any

import kernel_peers as peers
import torch
from kernel_case import Case, Contender
from kernel_inputs import Inputs, Rule, chain_inputs, rows_unlike, widened
from kernel_timing import Bench, Call, Data
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import verify_chain


def verify_call(inputs: Inputs, with_lse: bool = True, **changes: Any) -> Call:
    arguments: dict[str, Any] = {**inputs, **changes}
    if not with_lse:
        arguments.pop("draft_lse")
    return partial(verify_chain, **arguments)


def verify_facts(inputs: Inputs, with_lse: bool) -> dict[str, Any]:
    """Rows whose tokens differ from those computed in float64, and how many tokens are accepted."""
    given = inputs if with_lse else {**inputs, "draft_lse": None}
    return {
        "rows_unlike_float64": rows_unlike(verify_chain, given, widened(inputs)),
        "mean_accepted": round(float(verify_chain(**given)[1].double().mean()), 3),
    }


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
            found |= {
                "torch.compile": Contender(lambda: compiled(plain)),
                "FlashInfer (with its softmax)": Contender(lambda: [*map(peers.flashinfer_verify, sets)]),
                "SGLang, chain (with its softmax)": Contender(lambda: [*map(peers.sglang_chain, sets)]),
                "SGLang, tree (with its softmax)": Contender(lambda: [*map(peers.sglang_tree, sets)]),
                "vLLM (with its softmax)": Contender(lambda: [*map(peers.vllm_verify, sets)]),
            }
        return found

    shape = {"batch": batch, "num_draft": bench.length, "vocab": vocab, "draft_lse": with_lse}
    return Case("verify_chain", shape, floor, count * floor, contenders)


def compiled(given: list[tuple[Tensor, Tensor, Tensor]]) -> list[Call]:
    """The plain way, for each shape on its own. Made late, since the compiler is slow to import."""
    verify = torch.compile(peers.plain_verify, dynamic=False)
    return [partial(verify, *one) for one in given]


def rule_case(bench: Bench, rule: Rule, batch: int) -> Case:
    """Another rule than chain's, fused and as its PyTorch reference. Both read each row at least once."""
    drafted = bench.length if rule is kernels.verify_block else 0
    floor = batch * bench.vocab * bench.dtype.itemsize * (bench.length + 1 + drafted)
    count = bench.sets(floor)

    def contenders() -> dict[str, Contender]:
        sets = [chain_inputs(bench, batch, bench.vocab, seed, rule) for seed in range(count)]
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
