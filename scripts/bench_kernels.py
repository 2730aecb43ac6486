"""Compare the kernels of moedraft.kernels with other installed ones; write the times as JSON and as a plot.

On a CUDA device it measures median and 20 % / 80 % quantiles with a cold L2 cache (each call uses other
buffers), small batches also inside a CUDA graph; the bandwidth reached, as a share of that of a plain copy,
counting the fewest bytes that the operation must move; the peak of extra memory; and the error against
float64. Without a CUDA device it measures the PyTorch references alone. `--tune` also tries other block
sizes for the divergences.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import verify_chain

Call = Callable[[], Any]
VOCAB, LENGTH = 151_936, 4
COLD_BYTES = (
    256 * 2**20
)  # all buffers used in turn take at least this, several times the size of any L2 cache


# --- time, memory, error
# -------------------------------------------------------------------------------------------


def quantiles(samples: list[float]) -> dict[str, float]:
    """Median, 20 % and 80 % of samples in microseconds."""
    ordered = sorted(samples)
    picked = {
        name: ordered[int(share * (len(ordered) - 1))]
        for name, share in (("us", 0.5), ("p20", 0.2), ("p80", 0.8))
    }
    return {name: round(value, 2) for name, value in picked.items()}


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def time_cuda(calls: list[Call], seconds: float) -> dict[str, float]:
    """One sample is the time of one call between two events. Calls take turns, each with its own buffers."""
    for call in calls[:3] * 2:
        call()
    torch.cuda.synchronize()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < 20 or (time.perf_counter() < until and len(samples) < 2000):
        marks = [event() for _ in range(len(calls) + 1)]
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        torch.cuda.synchronize()
        samples += [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
    return quantiles(samples)


def time_graph(calls: list[Call], seconds: float) -> dict[str, float]:
    """One sample is the time of a replayed graph of all calls, divided by their number."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for _ in range(max(1, 20 // len(calls))):
            kept += [call() for call in calls]
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < 20 or (time.perf_counter() < until and len(samples) < 500):
        start, end = (event() for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(kept))
    return quantiles(samples)


def time_cpu(call: Call, seconds: float) -> dict[str, float]:
    for _ in range(3):
        call()
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while len(samples) < 20 or (time.perf_counter() < until and len(samples) < 2000):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e6)
    return quantiles(samples)


def peak_mib(call: Call) -> float:
    """The most memory that a call takes beyond its arguments."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 2 GiB."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_cuda([lambda: target.copy_(source)], 0.5)["us"] * 1e-6)


@contextmanager
def reported(name: str, result: dict[str, Any]) -> Iterator[None]:
    """Put the error of a contender that fails into the table, so that it does not end the run."""
    try:
        yield
    except ImportError:
        result[name] = {"status": "not installed"}
    except Exception as error:
        result[name] = {"status": f"failed: {type(error).__name__}: {str(error)[:200]}"}


# --- verification
# --------------------------------------------------------------------------------------------------


def chain_inputs(batch: int, vocab: int, device: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """A draft close to the target, with sampled tokens, so that rows accept different numbers of them."""
    gen = torch.Generator(device).manual_seed(seed)
    target = torch.randn(batch, LENGTH + 1, vocab, device=device, generator=gen, dtype=torch.float32).mul_(2)
    draft = (target[:, :LENGTH] + 0.7 * torch.randn(batch, LENGTH, vocab, device=device, generator=gen)).to(
        dtype
    )
    seeds = torch.arange(batch, device=device) + 1000 * seed
    position = torch.full_like(seeds, 50)
    drawn = [kernels.sample_draft(draft[:, j].contiguous(), 1.0, seeds, position + j) for j in range(LENGTH)]
    return {
        "target_logits": target.to(dtype),
        "draft_tokens": torch.stack([token for token, _ in drawn], 1),
        "draft_logits": draft,
        "draft_lse": torch.stack([lse for _, lse in drawn], 1),
        "temperature": torch.ones(batch, device=device),
        "seed": seeds,
        "position": position,
    }


def verify_call(inputs: dict[str, Tensor], with_lse: bool, **changes: Any) -> Call:
    arguments: dict[str, Any] = {**inputs, **changes}
    if not with_lse:
        arguments.pop("draft_lse", None)
    return lambda: verify_chain(**arguments)


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


def flashinfer_verify(inputs: dict[str, Tensor]) -> Call:
    sample = importlib.import_module("flashinfer.sampling").chain_speculative_sampling
    target, draft = inputs["target_logits"], inputs["draft_logits"]
    tokens = inputs["draft_tokens"].to(torch.int32)
    return lambda: sample(draft.float().softmax(-1), tokens, target.float().softmax(-1))


def vllm_verify(inputs: dict[str, Tensor]) -> Call:
    module = importlib.import_module("vllm.v1.sample.rejection_sampler")
    metadata = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
    target, draft, tokens = inputs["target_logits"], inputs["draft_logits"], inputs["draft_tokens"]
    batch, length = tokens.shape
    counts = torch.full((batch,), length, dtype=torch.int32, device=tokens.device).cumsum(
        0, dtype=torch.int32
    )
    sampling = metadata.__new__(metadata)
    sampling.__dict__.update(
        all_greedy=False, all_random=True, temperature=inputs["temperature"], generators={}
    )
    vocab = target.shape[-1]

    def call() -> Any:
        target_probs = target[:, :-1].reshape(-1, vocab).float().softmax(-1)
        draft_probs = draft.reshape(-1, vocab).float().softmax(-1)
        bonus = target[:, -1].argmax(-1, keepdim=True).to(torch.int32)
        flat = tokens.flatten().to(torch.int32)
        return module.rejection_sample(
            flat, [length] * batch, length, counts, draft_probs, target_probs, bonus, sampling
        )

    return call


def bench_verify(batch: int, with_lse: bool, bandwidth: float, seconds: float) -> dict[str, Any]:
    per_row = VOCAB * 2
    floor = batch * per_row * (LENGTH + 1 + (1 if with_lse else LENGTH))
    count = max(2, math.ceil(COLD_BYTES / floor))
    sets = [chain_inputs(batch, VOCAB, "cuda", torch.bfloat16, seed) for seed in range(min(count, 24))]
    exact = verify_chain(
        **{k: v.double() if k.endswith("logits") else v for k, v in sets[0].items() if k != "draft_lse"},
        backend="reference",
    )
    found = verify_call(sets[0], with_lse)()
    ours = [verify_call(inputs, with_lse) for inputs in sets]
    pairs = [(i["target_logits"], i["draft_tokens"], i["draft_logits"]) for i in sets]
    compiled = torch.compile(plain_verify)
    results: dict[str, Any] = {}
    with reported("moedraft", results):
        results["moedraft"] = {
            **time_cuda(ours, seconds),
            "graph": time_graph(ours, seconds),
            "extra_mib": peak_mib(ours[0]),
            "rows_unlike_float64": int((found[0] != exact[0]).any(dim=1).sum()),
            "mean_accepted": round(float(found[1].double().mean()), 3),
        }
    contenders: dict[str, Callable[[], list[Call]]] = {
        "eager PyTorch": lambda: [lambda p=p: plain_verify(*p) for p in pairs],
        "torch.compile": lambda: [lambda p=p: compiled(*p) for p in pairs],
        "flashinfer (with its softmax)": lambda: [flashinfer_verify(inputs) for inputs in sets],
        "vLLM rejection sampler (with its softmax)": lambda: [vllm_verify(inputs) for inputs in sets],
    }
    for name, make in contenders.items():
        with reported(name, results):
            calls = make()
            results[name] = {**time_cuda(calls, seconds), "extra_mib": peak_mib(calls[0])}
    add_shares(results, floor, bandwidth)
    shape = {"batch": batch, "num_draft": LENGTH, "vocab": VOCAB, "dtype": "bfloat16", "draft_lse": with_lse}
    return {"operation": "verify_chain", "shape": shape, "floor_bytes": floor, "contenders": results}


def add_shares(results: dict[str, Any], floor: float, bandwidth: float) -> None:
    for entry in results.values():
        for timing in (entry, entry.get("graph", {})):
            if "us" in timing:
                timing["share_of_copy"] = round(floor / (timing["us"] * 1e-6) / bandwidth, 4)


# --- divergences
# ---------------------------------------------------------------------------------------------------


def plain_divergence(student: Tensor, teacher: Tensor, kind: Any) -> Tensor:
    s, t = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    if kind == "fkl":
        return (t.exp() * (t - s)).sum(-1).mean()
    if kind == "rkl":
        return (s.exp() * (s - t)).sum(-1).mean()
    if kind == "tvd":
        return (s.exp() - t.exp()).abs().sum(-1).mean() / 2
    m = torch.logaddexp(s, t) - math.log(2)
    return ((t.exp() * (t - m)).sum(-1).mean() + (s.exp() * (s - m)).sum(-1).mean()) / 2


def liger_divergence(kind: Any) -> Callable[[Tensor, Tensor], Tensor]:
    module = importlib.import_module("liger_kernel.transformers")
    if kind == "tvd":
        loss = module.LigerTVDLoss(reduction="batchmean")
        return lambda s, t: loss(s.softmax(-1), t.softmax(-1))
    if kind == "jsd":
        loss = module.LigerJSD(beta=0.5)
        return lambda s, t: loss(s.log_softmax(-1), t.log_softmax(-1))
    loss = module.LigerKLDIVLoss(reduction="batchmean", log_target=True)
    if kind == "rkl":
        return lambda s, t: loss(t.log_softmax(-1), s.log_softmax(-1))
    return lambda s, t: loss(s.log_softmax(-1), t.log_softmax(-1))


def step(function: Callable[[Tensor, Tensor], Tensor], student: Tensor, teacher: Tensor) -> Call:
    """One forward and one backward. The student is a leaf; its gradient is dropped."""

    def call() -> Tensor:
        leaf = student.detach().requires_grad_()
        return torch.autograd.grad(function(leaf, teacher), leaf)[0]

    return call


def divergence_error(kind: Any) -> dict[str, float]:
    """Relative norms against float64 on 64 rows: loss and gradient, in bf16 and in float32."""
    errors = {}
    gen = torch.Generator("cuda").manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        student = (torch.randn(64, VOCAB, device="cuda", generator=gen) * 2).to(dtype)
        teacher = (student + torch.randn(64, VOCAB, device="cuda", generator=gen)).to(dtype)
        exact, given = student.double().requires_grad_(), student.requires_grad_()
        wanted = kernels.divergence(exact, teacher.double(), kind=kind, reduction="none", backend="reference")
        loss = kernels.divergence(given, teacher, kind=kind, reduction="none")
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), exact)
        (grad,) = torch.autograd.grad(loss.sum(), given)
        name = str(dtype).removeprefix("torch.")
        errors[f"loss_{name}"] = float((loss - wanted).detach().norm() / wanted.detach().norm())
        errors[f"gradient_{name}"] = float((grad.double() - wanted_grad).norm() / wanted_grad.norm())
    return errors


def bench_divergence(
    kind: Any, rows: int, bandwidth: float, seconds: float, with_liger: bool
) -> dict[str, Any]:
    student = torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    teacher = torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    floor = 3 * student.nbytes  # two reads and one write
    ours = step(lambda s, t: kernels.divergence(s, t, kind=kind), student, teacher)
    scratch = student.clone()
    inplace = step(lambda s, t: kernels.divergence(s, t, kind=kind, inplace_grad=True), scratch, teacher)
    results: dict[str, Any] = {}
    with reported("moedraft", results):
        results["moedraft"] = {
            **time_cuda([ours], seconds),
            "extra_mib": peak_mib(ours),
            **divergence_error(kind),
        }
    with reported("moedraft, gradient in place", results):
        results["moedraft, gradient in place"] = {
            **time_cuda([inplace], seconds),
            "extra_mib": peak_mib(inplace),
        }
    del scratch, inplace
    contenders: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
        "eager PyTorch": lambda: lambda s, t: plain_divergence(s, t, kind),
        "torch.compile": lambda: torch.compile(lambda s, t: plain_divergence(s, t, kind)),
        "Liger (with its log_softmax)": lambda: liger_divergence(kind),
    }
    for name, make in contenders.items():
        torch.cuda.empty_cache()
        with reported(name, results):
            call = step(make(), student, teacher)
            results[name] = {**time_cuda([call], seconds), "extra_mib": peak_mib(call)}
    add_shares(results, floor, bandwidth)
    shape = {"rows": rows, "vocab": VOCAB, "dtype": "bfloat16", "kind": kind}
    return {"operation": "divergence", "shape": shape, "floor_bytes": floor, "contenders": results}


def tune(rows: int, seconds: float) -> list[dict[str, Any]]:
    """Times of the divergences with other block sizes and numbers of warps than the usual ones."""
    fused: Any = importlib.import_module("moedraft.kernels.fused_divergence")
    student = torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    teacher, found, table = torch.randn_like(student), [], fused.tile
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32)):
        fused.tile = lambda vocab, b=block, w=warps: {**table(vocab), "BLOCK": b, "num_warps": w}
        for kind in ("fkl", "rkl", "jsd", "tvd"):
            call = step(lambda s, t, k=kind: kernels.divergence(s, t, kind=k), student, teacher)
            found.append({"kind": kind, "block": block, "warps": warps, **time_cuda([call], seconds)})
    fused.tile = table
    return found


# --- runs
# ----------------------------------------------------------------------------------------------------------


def run_cuda(quick: bool, tuning: bool) -> dict[str, Any]:
    bandwidth = copy_bandwidth()
    seconds = 0.15 if quick else 0.6
    batches = (1, 64) if quick else (1, 8, 64, 256)
    rows = 2048 if quick else 8192
    cases = [bench_verify(batch, lse, bandwidth, seconds) for batch in batches for lse in (True, False)]
    for kind in ("fkl", "rkl", "jsd", "tvd"):
        torch.cuda.empty_cache()
        cases.append(bench_divergence(kind, rows, bandwidth, seconds))
    found: dict[str, Any] = {"copy_bytes_per_second": bandwidth, "cases": cases}
    if tuning:
        found["tuning"] = tune(rows, seconds)
    return found


def run_cpu(quick: bool) -> dict[str, Any]:
    """The references, at the size of the pair that comes with the project."""
    vocab, seconds, cases = 8192, 0.3 if quick else 2.0, []
    for batch in (1,) if quick else (1, 8):
        inputs = chain_inputs(batch, vocab, "cpu", torch.float32, 1)
        calls = {
            "greedy": verify_call(inputs, False, temperature=0.0, draft_logits=None),
            "sampled": verify_call(inputs, False),
            "sampled, draft_lse": verify_call(inputs, True),
        }
        with torch.inference_mode():
            timed = {name: time_cpu(call, seconds) for name, call in calls.items()}
        shape = {"batch": batch, "num_draft": LENGTH, "vocab": vocab, "dtype": "float32"}
        cases.append({"operation": "verify_chain", "shape": shape, "contenders": timed})
    rows, k = 256, 16
    student, teacher = torch.randn(rows, vocab), torch.randn(rows, vocab)
    logprobs, ids = teacher.log_softmax(-1).topk(k)
    for kind in ("fkl", "rkl", "jsd", "tvd"):
        functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "moedraft": lambda s, t, n=kind: kernels.divergence(s, t, kind=n),
            f"moedraft, top-{k}": lambda s, t, n=kind: kernels.divergence(
                s, teacher_topk=(ids, logprobs), kind=n
            ),
            "eager PyTorch": lambda s, t, n=kind: plain_divergence(s, t, n),
        }
        timed = {
            name: time_cpu(step(function, student, teacher), seconds) for name, function in functions.items()
        }
        shape = {"rows": rows, "vocab": vocab, "dtype": "float32", "kind": kind}
        cases.append({"operation": "divergence", "shape": shape, "contenders": timed})
    return {"threads": torch.get_num_threads(), "cases": cases}


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "flashinfer", "vllm", "liger_kernel"):
        try:
            found[name] = str(getattr(importlib.import_module(name), "__version__", "installed"))
        except ImportError:
            found[name] = "not installed"
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    cases = report["cases"]
    figure, axes = pyplot.subplots(
        math.ceil(len(cases) / 2), 2, figsize=(13, 1.6 * len(cases) + 1), squeeze=False
    )
    for axis, case in zip(axes.flat, cases, strict=False):
        bars = {name: entry["us"] for name, entry in case["contenders"].items() if "us" in entry}
        axis.barh(list(bars)[::-1], list(bars.values())[::-1])
        axis.set_title(
            f"{case['operation']} " + ", ".join(str(v) for v in case["shape"].values()), fontsize=8
        )
        axis.set_xlabel("µs")
    figure.suptitle(f"{report['device']}, {report['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer shapes, less time each: under two minutes"
    )
    parser.add_argument("--tune", action="store_true", help="also try other block sizes (CUDA)")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        print("No CUDA device here: the references alone are measured.")
    device = torch.cuda.get_device_name() if cuda else "CPU"
    measured = run_cuda(options.quick, options.tune) if cuda else run_cpu(options.quick)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = {"device": device, "date": date, "quick": options.quick, "versions": versions(), **measured}
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"kernels-{device.lower().replace(' ', '-')}-{date}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report, stem.with_suffix(".png"))
    for case in report["cases"]:
        print(case["operation"], case["shape"])
        for name, entry in case["contenders"].items():
            print(f"  {name:44}", json.dumps(entry))
    print("written:", stem.with_suffix(".json"))


if __name__ == "__main__":
    main()
