"""How a kernel is given to Triton's compiler on a machine without a GPU, and how a test has that done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import ir

from moedraft.kernels import divergence_kernels, verify

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    **dict.fromkeys(["tokens", "counts", "seed", "position", "out", "num_accepted", "ids"], "*i64"),
    **dict.fromkeys(["t_arg", "arguments", "arrivals", "status", "lasts", "t_lasts", "d_lasts"], "*i32"),
    **dict.fromkeys(["numbers", "tables", "stages"], "*i32"),
    **dict.fromkeys(["peaks", "masses"], "*fp32"),
    "spans": "*i64",
    "goals": "*fp64",
    **dict.fromkeys(["values", "t_values", "d_values", "tops", "top_p", "min_p"], "*fp32"),
    "top_k": "*i64",
    **dict.fromkeys(["t_max", "t_sum", "d_max", "d_sum", "mass", "lses", "scaled", "sums"], "*fp32"),
    **dict.fromkeys(["draft_lse", "temperature", "weight", "losses", "logprobs", "upstream"], "*fp32"),
    **dict.fromkeys(["starts", "target_starts", "draft_starts"], "*i64"),
    "maxima": "*fp64",
    **dict.fromkeys(["inverse", "beta"], "fp32"),
}
LOGITS = ("logits", "target", "draft", "student", "teacher", "grad")
CUTS = ("t_values", "t_lasts", "d_values", "d_lasts")
FUSION = bool(verify.shared_constants(1000, False, False)["enable_fp_fusion"])  # in verification
ALIGNED = re.compile(r"V|.*_(n|k|b)$")  # strides and vocabularies of real models divide by 16

Prepared = tuple[ASTSource, dict[str, Any], dict[str, Any]]


def prepared(
    kernel: Any,
    warps: int,
    absent: tuple[str, ...] = (),
    fusion: bool | None = None,
    most: int | None = None,
    odd: bool = False,
    numbers: str = "bf16",
    draft: str | None = None,
    **constants: Any,
) -> Prepared:
    """A kernel's source, the compiler's options, and what tells this variant from others.

    fusion: whether the compiler may make one operation of a product and a sum; None: as it is launched.
    most: registers of a thread, where the launch says so. odd: vocabulary and strides do not divide by 16.
    numbers: the type of all logits and gradients; draft: that of the draft's logits, where it is another one.
    """
    shown = constants | ({} if fusion is None else {"FUSION": fusion}) | ({"ODD": True} if odd else {})
    shown |= ({} if numbers == "bf16" else {"NUMBERS": numbers}) | ({} if draft is None else {"DRAFT": draft})
    without = sorted(set(absent) & set(kernel.arg_names))
    shown |= {"WITHOUT": " ".join(without)} if without else {}
    types = TYPES | dict.fromkeys(LOGITS, f"*{numbers}") | {"draft": f"*{draft or numbers}"}
    if fusion is None:
        fusion = FUSION or kernel.__module__ == divergence_kernels.__name__
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    hints: dict[tuple[int], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in absent or name.endswith("_v"):
            signature[name] = "constexpr"
            values[(index,)] = constants.get(name, 1 if name.endswith("_v") else None)
            continue
        signature[name] = types.get(name, "i32")
        divides = signature[name] == "i32" and ALIGNED.fullmatch(name) and not odd
        if signature[name].startswith("*") or divides:
            hints[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "enable_fp_fusion": fusion, **({"maxnreg": most} if most else {})}
    return ASTSource(kernel, signature, values, hints), options, shown


def ttgir(source: ASTSource, options: dict[str, Any]) -> str:
    """The kernel with its layouts, which is as far as the compiler goes here: a fraction of the whole way."""
    backend = make_backend(TARGET)
    chosen = backend.parse_options(options | source.parse_options())
    stages: dict[str, Any] = {}
    backend.add_stages(stages, chosen, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(chosen), backend.get_module_map()
    module = source.make_ir(TARGET, chosen, *functions, context)
    metadata = {"target": TARGET, **chosen.__dict__}
    for name in ("ttir", "ttgir"):
        module = stages[name](module, metadata)
    return str(module)


def printed_by(script: str, cache: Path) -> Any:
    """What a script that compiles prints as JSON, in a process of its own: this one may interpret kernels."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    changes = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | changes)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
