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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moedraft.kernels import fused_divergence, verify_kernels

TYPES = {
    **dict.fromkeys(
        ["tokens", "counts", "seed", "position", "drafted", "out", "num_accepted", "ids"], "*i64"
    ),
    **dict.fromkeys(["t_arg", "arguments", "modes", "status"], "*i32"),
    **dict.fromkeys(["t_max", "t_sum", "d_max", "d_sum", "maxima", "sums", "mass", "scales"], "*fp32"),
    **dict.fromkeys(["draft_lse", "temperature", "weight", "losses", "logprobs", "upstream"], "*fp32"),
    **dict.fromkeys(["logits", "target", "draft", "student", "teacher", "grad"], "*bf16"),
    **dict.fromkeys(["starts", "target_starts", "draft_starts"], "*i64"),
    **dict.fromkeys(["inverse", "beta"], "fp32"),
    "uniforms": "*fp64",
}
ALIGNED = re.compile(r"V|.*_(n|k|b)$")  # strides and vocabularies of real models divide by 16


def compile_kernel(kernel: Any, warps: int, absent: tuple[str, ...] = (), **constants: Any) -> dict[str, Any]:
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
        options={"num_warps": warps, "enable_fp_fusion": True},
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
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"], "wide_loads": wide}


def main() -> None:
    results = []
    flags = {
        "EXTRA": 1,
        "HAS_COUNTS": False,
        "PACKED": False,
        "NEED_ARGUMENTS": True,
        "SKIP_GREEDY_SUM": True,
    }
    rows = ("target_starts", "draft_starts", "counts")
    for width, warps in ((4096, 8), (1024, 4), (256, 4)):
        plain = {**flags, "CHUNK": width}
        results.append(compile_kernel(verify_kernels.sweep, warps, ("starts", "counts"), PER=2, **plain))
        ragged = {**plain, "HAS_COUNTS": True, "PACKED": True, "SKIP_GREEDY_SUM": False, "WIDTH": 1}
        results.append(compile_kernel(verify_kernels.sweep, warps, PER=1, **ragged))
        no_arguments = {**plain, "EXTRA": 0, "NEED_ARGUMENTS": False}
        results.append(
            compile_kernel(
                verify_kernels.sweep, warps, ("starts", "counts", "arguments"), PER=1, **no_arguments
            )
        )
        for has_draft, has_lse in ((True, True), (True, False), (False, False)):
            absent = rows + (("d_max", "d_sum") if has_lse or not has_draft else ("draft_lse",))
            if not has_draft:
                absent += ("draft", "draft_lse", "mass")
            shape = {"HAS_DRAFT": has_draft, "PACKED": False, "NCP": 64, "CHUNK": width}
            chain = {"HAS_LSE": has_lse, "HAS_COUNTS": False, "PURPOSE": 3, "KP": 8, "PER": 1}
            results.append(compile_kernel(verify_kernels.resolve, warps, absent, **shape, **chain))
            results.append(compile_kernel(verify_kernels.draw, warps, absent, **shape))
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
