"""Compiles every fused kernel for sm_90 without a GPU and prints its resources as JSON. A test runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moedraft.kernels import block_kernels, coupled_kernels, fused_divergence, verify, verify_kernels
from moedraft.kernels.primitives import combine

TYPES = {
    **dict.fromkeys(["tokens", "counts", "seed", "position", "out", "num_accepted", "ids"], "*i64"),
    **dict.fromkeys(["t_arg", "arguments", "arrivals", "status"], "*i32"),
    **dict.fromkeys(["t_max", "t_sum", "d_max", "d_sum", "mass", "lses", "scaled", "sums"], "*fp32"),
    **dict.fromkeys(["draft_lse", "temperature", "weight", "losses", "logprobs", "upstream"], "*fp32"),
    **dict.fromkeys(["logits", "target", "draft", "student", "teacher", "grad"], "*bf16"),
    **dict.fromkeys(["starts", "target_starts", "draft_starts"], "*i64"),
    "maxima": "*fp64",
    **dict.fromkeys(["inverse", "beta"], "fp32"),
}
FUSION = bool(verify.shared_constants(1000, False, False)["enable_fp_fusion"])  # in verification
ALIGNED = re.compile(r"V|.*_(n|k|b)$")  # strides and vocabularies of real models divide by 16


@triton.jit
def combined(t_max, t_sum, losses, ROWS: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: N803
    """`combine` and nothing else."""
    rows, chunks = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    cells = rows[:, None] * CHUNKS + chunks[None, :]
    _, _, total = combine(tl.load(t_max + cells), tl.load(t_sum + cells), ROWS, CHUNKS)
    tl.store(losses + rows, total)


def compile_kernel(
    kernel: Any, warps: int, absent: tuple[str, ...] = (), fusion: bool | None = None, **constants: Any
) -> dict[str, Any]:
    """fusion: whether the compiler may make one operation of a product and a sum; None: as it is launched."""
    if fusion is None:
        fusion = FUSION or kernel.__module__ == fused_divergence.__name__
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in absent or name.endswith("_v"):
            signature[name] = "constexpr"
            values[(index,)] = constants.get(name, 1 if name.endswith("_v") else None)
            continue
        signature[name] = TYPES.get(name, "i32")
        if signature[name].startswith("*") or (signature[name] == "i32" and ALIGNED.fullmatch(name)):
            hints[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": fusion},
    )
    return {"kernel": kernel.__name__, **resources(compiled), "constants": repr(constants)}


def resources(compiled: Any) -> dict[str, int]:
    """Registers, bytes of local memory (a spill shows there) and 16-byte loads."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]
    wide = len(re.findall(r"ld\.global[^;]*v4", compiled.asm["ptx"]))
    ordered = len(re.findall(r"atom[^;]*acq_rel[^;]*", compiled.asm["ptx"]))
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "wide_loads": wide,
        "arrivals": ordered,
        "fused": len(re.findall(r"fma\.rn(?:\.ftz)?\.f32", compiled.asm["ptx"])),
    }


def verification(width: int, warps: int) -> list[dict[str, Any]]:
    """The kernels of verification for one width of chunks, in each of their variants."""
    results = []
    flags = {"HAS_COUNTS": False, "PACKED": False, "CHUNK": width}
    ragged = {"HAS_COUNTS": True, "PACKED": True, "CHUNK": width}
    rows = ("target_starts", "draft_starts", "counts")
    swept = ("d_max", "d_sum")
    sweep = verify_kernels.sweep
    results.append(
        compile_kernel(
            sweep, warps, (*rows, *swept, "draft"), PER=2, BOTH=False, SKIP_GREEDY_SUM=True, **flags
        )
    )
    results.append(compile_kernel(sweep, warps, PER=1, BOTH=True, SKIP_GREEDY_SUM=True, **ragged))
    drafting = (*rows, *swept, "draft", "arrivals")
    results.append(
        compile_kernel(sweep, warps, drafting, PER=1, BOTH=False, K=0, SKIP_GREEDY_SUM=False, **flags)
    )
    for has_draft, has_lse in ((True, True), (True, False), (False, False)):
        absent = rows + (swept if has_lse or not has_draft else ("draft_lse",))
        absent += () if has_draft else ("draft", "draft_lse", "mass", "arrivals")
        shape = {"HAS_DRAFT": has_draft, "HAS_LSE": has_lse, "NCP": 64, "KP": 8, "PER": 1, **flags}
        chain = (*absent, "lses") if has_draft else absent
        results.append(compile_kernel(verify_kernels.resolve, warps, chain, PURPOSE=3, **shape))
        results.append(compile_kernel(block_kernels.judge, warps, absent, **shape))
    coupled = coupled_kernels.sweep_coupled
    results.append(compile_kernel(coupled, warps, (), PER=1, WANT_LSE=True, **ragged))
    unasked = ("starts", "counts", "scaled", "sums")
    results.append(compile_kernel(coupled, warps, unasked, PER=4, WANT_LSE=False, **flags))
    choices = {"HAS_COUNTS": True, "WANT_LSE": True, "KP": 16, "NCP": 64}
    results.append(compile_kernel(coupled_kernels.choose, 4, (), **choices))
    return results


def main() -> None:
    results = []
    for width, warps in ((4096, 8), (1024, 4), (256, 4)):
        results += verification(width, warps)
    for fusion, rows in ((None, 2), (None, 4), (None, 8), (None, 16), (True, 4)):
        results.append(compile_kernel(combined, 4, (), fusion, ROWS=rows, CHUNKS=64))
    longest = {"HAS_DRAFT": True, "HAS_LSE": False, "NCP": 64, "KP": 16, "PER": 2, "HAS_COUNTS": True}
    for kernel, more in ((verify_kernels.resolve, {"PURPOSE": 3}), (block_kernels.judge, {})):
        absent = ("lses", "draft_lse")
        results.append(compile_kernel(kernel, 8, absent, PACKED=True, CHUNK=4096, **longest, **more))
    for vocab in (151_936, 1000):
        tile = dict(fused_divergence.tile(vocab))
        warps, shape = tile["num_warps"], {"V": vocab, "BLOCK": tile["BLOCK"]}
        for reverse in (False, True):
            loss = {"REVERSE": reverse, "WANT_GRAD": True, **shape}
            results.append(compile_kernel(fused_divergence._kl, warps, **loss))
        for kind in ("jsd", "tvd"):
            results.append(compile_kernel(fused_divergence._mixed, warps, KIND=kind, WANT_GRAD=True, **shape))
        for kind in ("fkl", "rkl", "jsd", "tvd"):
            loss = {"KIND": kind, "WANT_GRAD": True, "KP": 64, **shape}
            results.append(compile_kernel(fused_divergence._topk, warps, **loss))
        results.append(compile_kernel(fused_divergence._scale, warps, **shape))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
