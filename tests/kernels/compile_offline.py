"""Compiles every fused kernel for sm_90 without a GPU and prints its resources as JSON. A test runs it.

    TRITON_INTERPRET=0 python tests/kernels/compile_offline.py --write    # stores them in compiled.json

The stored resources are what a later state of the kernels is compared with, for each version of Triton apart.
Beside them stands a digest of the sources that they come from: while it is the same, nothing needs compiling.
"""

from __future__ import annotations

import hashlib
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

from moedraft.kernels import (
    block_kernels,
    coupled_kernels,
    cut_kernels,
    fused_cut,
    fused_divergence,
    verify,
    verify_kernels,
)
from moedraft.kernels.primitives import combine

TYPES = {
    **dict.fromkeys(["tokens", "counts", "seed", "position", "out", "num_accepted", "ids"], "*i64"),
    **dict.fromkeys(["t_arg", "arguments", "arrivals", "status", "lasts", "t_lasts", "d_lasts"], "*i32"),
    **dict.fromkeys(["values", "t_values", "d_values", "tops", "top_p", "min_p"], "*fp32"),
    "top_k": "*i64",
    **dict.fromkeys(["t_max", "t_sum", "d_max", "d_sum", "mass", "lses", "scaled", "sums"], "*fp32"),
    **dict.fromkeys(["draft_lse", "temperature", "weight", "losses", "logprobs", "upstream"], "*fp32"),
    **dict.fromkeys(["logits", "target", "draft", "student", "teacher", "grad"], "*bf16"),
    **dict.fromkeys(["starts", "target_starts", "draft_starts"], "*i64"),
    "maxima": "*fp64",
    **dict.fromkeys(["inverse", "beta"], "fp32"),
}
KNOWN = Path(__file__).with_name("compiled.json")
CUTS = ("t_values", "t_lasts", "d_values", "d_lasts")
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
    kernel: Any,
    warps: int,
    absent: tuple[str, ...] = (),
    fusion: bool | None = None,
    most: int | None = None,
    odd: bool = False,
    **constants: Any,
) -> dict[str, Any]:
    """fusion: whether the compiler may make one operation of a product and a sum; None: as it is launched.

    most: registers of a thread, where the launch says so. odd: vocabulary and strides do not divide by 16.
    """
    shown = constants | ({} if fusion is None else {"FUSION": fusion}) | ({"ODD": True} if odd else {})
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
        divides = signature[name] == "i32" and ALIGNED.fullmatch(name) and not odd
        if signature[name].startswith("*") or divides:
            hints[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, values, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": fusion, **({"maxnreg": most} if most else {})},
    )
    return {"kernel": kernel.__name__, **resources(compiled), "constants": repr(shown)}


def resources(compiled: Any) -> dict[str, int]:
    """What the compiled kernel uses: see `test_kernels_compile.py`, which says what each may be."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(re.search(rf"{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL")}  # type: ignore[index]
    ptx = compiled.asm["ptx"]
    repeated = loops(ptx)
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "shared": compiled.metadata.shared,
        **accesses(ptx, repeated),
        "narrow_in_streams": sum(accesses(ptx, body)["narrow_in_loops"] for body in streams(ptx)),
        "barriers": len(re.findall(r"bar\.sync", ptx)),
        "barriers_in_loops": len(re.findall(r"bar\.sync", repeated)),
        "arrivals": len(re.findall(r"atom[^;]*acq_rel[^;]*", ptx)),
        "fused": len(re.findall(r"fma\.rn(?:\.ftz)?\.f32", ptx)),
    }


def accesses(ptx: str, repeated: str) -> dict[str, int]:
    """Loads and stores of global memory. Wide ones move 16 bytes; a copy to shared memory is a load, too.

    Narrow ones move a single number, or as a copy less than 16 bytes.
    """
    copies = re.findall(r"cp\.async\.c[ag][^;]*, (?:0x)?(\w+)(?:, %\w+)?;", ptx)
    assert len(copies) == len(re.findall(r"cp\.async\.c[ag]", ptx))
    narrow = r"(?:ld|st)\.global(?![^;]*\.v[248])|cp\.async\.c[ag](?![^;]*, 0x10\b)"
    return {
        "wide_loads": len(re.findall(r"ld\.global[^;]*\.v4", ptx)) + copies.count("10"),
        "wide_stores": len(re.findall(r"st\.global[^;]*\.v4", ptx)),
        "narrow_in_loops": len(re.findall(narrow, repeated)),
        "asynchronous": len(copies),
    }


def spans(lines: list[str]) -> list[range]:
    """Where loops lie in these lines of PTX: between a label and a branch back to it."""
    labels = {line.split(":")[0].strip(): i for i, line in enumerate(lines) if re.match(r"\s*\$\w+:", line)}
    branches = [(i, re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) for i, line in enumerate(lines)]
    found = [(labels.get(branch[1], i), i) for i, branch in branches if branch]
    return [range(first, last + 1) for first, last in found if first < last]


def loops(ptx: str) -> str:
    """The lines that lie in a loop."""
    lines = ptx.splitlines()
    return "\n".join(lines[i] for i in sorted({i for span in spans(lines) for i in span}))


def streams(ptx: str) -> list[str]:
    """The loops that read or write a row: those in which 16 bytes are moved at a time."""
    lines = ptx.splitlines()
    bodies = ["\n".join(lines[i] for i in span) for span in spans(lines)]
    return [body for body in bodies if re.search(r"(?:ld|st)\.global[^;]*\.v4|cp\.async", body)]


def verification(width: int, warps: int) -> list[dict[str, Any]]:
    """The kernels of verification for one width of chunks, in each of their variants."""
    results = []
    flags = {"HAS_COUNTS": False, "PACKED": False, "CHUNK": width}
    ragged = {"HAS_COUNTS": True, "PACKED": True, "CHUNK": width}
    rows = ("target_starts", "draft_starts", "counts", *CUTS)
    swept = ("d_max", "d_sum")
    sweep = verify_kernels.sweep
    results.append(
        compile_kernel(
            sweep, warps, (*rows, *swept, "draft"), PER=2, BOTH=False, SKIP_GREEDY_SUM=True, **flags
        )
    )
    results.append(compile_kernel(sweep, warps, CUTS, PER=1, BOTH=True, SKIP_GREEDY_SUM=True, **ragged))
    drafting = (*rows, *swept, "draft", "arrivals")
    results.append(
        compile_kernel(sweep, warps, drafting, PER=1, BOTH=False, K=0, SKIP_GREEDY_SUM=False, **flags)
    )
    for has_draft, has_lse in ((True, True), (True, False), (False, False)):
        absent = rows + (swept if has_lse or not has_draft else ("draft_lse",))
        absent += () if has_draft else ("draft", "draft_lse", "mass", "arrivals")
        shape = {"HAS_DRAFT": has_draft, "HAS_LSE": has_lse, "NCP": 64, "KP": 8, "PER": 1, **flags}
        chain = (*absent, "lses", "tops") if has_draft else absent
        results.append(compile_kernel(verify_kernels.resolve, warps, chain, PURPOSE=3, **shape))
        results.append(compile_kernel(block_kernels.judge, warps, absent, **shape))
    coupled = coupled_kernels.sweep_coupled
    results.append(compile_kernel(coupled, warps, (), PER=1, WANT_LSE=True, **ragged))
    unasked = ("starts", "counts", "values", "lasts", "scaled", "sums")
    results.append(compile_kernel(coupled, warps, unasked, PER=4, WANT_LSE=False, **flags))
    choices = {"HAS_COUNTS": True, "WANT_LSE": True, "KP": 16, "NCP": 64}
    results.append(compile_kernel(coupled_kernels.choose, 4, (), **choices))
    return results


def summation() -> list[dict[str, Any]]:
    """The order of one sum, in layouts of different widths; the last one with leave to fuse."""
    cases = ((None, 2), (None, 4), (None, 8), (None, 16), (True, 4))
    return [compile_kernel(combined, 4, (), fusion, ROWS=rows, CHUNKS=64) for fusion, rows in cases]


def chains() -> list[dict[str, Any]]:
    """Verification of chains of other lengths, and with more logits than 64 chunks hold."""
    ragged = {"HAS_DRAFT": True, "HAS_LSE": False, "HAS_COUNTS": True, "PACKED": True, "CHUNK": 4096}
    shapes = [{"NCP": 64, "KP": length, "PER": 2} for length in (4, 16)]
    shapes.append({"NCP": 128, "KP": 8, "PER": 4})  # beyond 262 144 entries
    results = []
    for kernel, more in ((verify_kernels.resolve, {"PURPOSE": 3}), (block_kernels.judge, {})):
        for shape in shapes:
            results.append(
                compile_kernel(kernel, 8, ("lses", "tops", "draft_lse", *CUTS), **ragged, **shape, **more)
            )
    return results


def filters() -> list[dict[str, Any]]:
    """The search for what filters leave, of bfloat16 rows and of a short float32 one; and its users."""
    results = []
    for vocab, shift in ((151_936, 16), (50_257, 16), (32_000, 16), (1024, 0)):
        tile = fused_cut.tile(vocab)
        warps, most = tile.pop("num_warps"), tile.pop("maxnreg", None)
        shape = {"BINS": fused_cut.BINS, "SHIFT": shift, **tile}
        results.append(compile_kernel(cut_kernels.cut, warps, (), True, most, vocab % 16 > 0, **shape))
    flags = {"HAS_COUNTS": True, "PACKED": False, "CHUNK": 4096}
    absent = ("target_starts", "draft_starts", "d_max", "d_sum")
    sweep = verify_kernels.sweep
    results.append(compile_kernel(sweep, 8, absent, PER=4, BOTH=False, SKIP_GREEDY_SUM=True, **flags))
    shape = {"HAS_DRAFT": True, "HAS_LSE": True, "NCP": 64, "KP": 8, "PER": 2, **flags}
    drafting = (*absent, "lses", "tops")
    results.append(compile_kernel(verify_kernels.resolve, 8, drafting, PURPOSE=3, **shape))
    results.append(compile_kernel(block_kernels.judge, 8, absent, **shape))
    return results


def unaligned() -> list[dict[str, Any]]:
    """Verification where rows begin anywhere: with 50 257 entries, say, which are 13 chunks."""
    rows = ("target_starts", "draft_starts", "counts", *CUTS)
    flags = {"HAS_COUNTS": False, "PACKED": False, "CHUNK": 4096}
    shape = {"HAS_DRAFT": True, "HAS_LSE": True, "NCP": 16, "KP": 8, "PER": 1, **flags}
    absent = (*rows, "d_max", "d_sum")
    found = {
        verify_kernels.sweep: (
            (*absent, "draft"),
            {"PER": 1, "BOTH": False, "SKIP_GREEDY_SUM": True, **flags},
        ),
        verify_kernels.resolve: ((*absent, "lses", "tops"), {"PURPOSE": 3, **shape}),
        block_kernels.judge: (absent, shape),
    }
    return [compile_kernel(kernel, 8, left, odd=True, **more) for kernel, (left, more) in found.items()]


def losses(
    vocab: int, kinds: tuple[str, ...] = ("fkl", "rkl", "jsd", "tvd"), lists: tuple[int, ...] = (16,)
) -> list[dict[str, Any]]:
    """The kernels of the divergences, each with its gradient; `lists`: tokens of a top-k teacher, padded."""
    tile = dict(fused_divergence.tile(vocab))
    size = {"V": vocab, "BLOCK": tile["BLOCK"], "STAGES": tile["STAGES"]}

    def of(kernel: Any, **more: Any) -> dict[str, Any]:
        return compile_kernel(
            kernel, tile["num_warps"], most=tile["maxnreg"], odd=vocab % 16 > 0, **more, **size
        )

    results = []
    for kind in kinds:
        if kind in ("fkl", "rkl"):
            results.append(of(fused_divergence._kl, REVERSE=kind == "rkl", WANT_GRAD=True))
        else:
            results.append(of(fused_divergence._mixed, KIND=kind, WANT_GRAD=True))
        for count in lists:
            results.append(of(fused_divergence._topk, KIND=kind, KP=count, WANT_GRAD=True))
    return [*results, of(fused_divergence._scale)]


def known() -> dict[str, Any]:
    """By version of Triton, resources by variant and what they come from; {} where the file is missing."""
    found: dict[str, Any] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    return found


def version() -> str:
    """Of Triton, without its last number."""
    return ".".join(triton.__version__.split(".")[:2])


def digest() -> str:
    """Of the kernels' sources and of this file, which says what of them is compiled."""
    folder = Path(verify.__file__).parent
    sources = [*sorted(folder.glob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def as_text(stored: dict[str, Any]) -> str:
    """As JSON with a line for each kernel."""
    parts = []
    for name, found in sorted(stored.items()):
        lines = [f"   {json.dumps(kernel)}: {json.dumps(one)}" for kernel, one in found["kernels"].items()]
        head = f' {json.dumps(name)}: {{\n  "sources": {json.dumps(found["sources"])},\n  "kernels": {{\n'
        parts.append(head + ",\n".join(lines) + "\n  }\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    results = []
    for width, warps in ((4096, 8), (1024, 4), (256, 4)):
        results += verification(width, warps)
    results += summation() + chains() + filters() + unaligned()
    results += losses(151_936, lists=(16, 64)) + losses(
        1000
    )  # the trainer's lists have 16 tokens, unless told
    for vocab in (50_257, 262_144):
        results += losses(vocab, ("fkl",), (16, 64))
    if sys.argv[1:] == ["--write"]:
        stored = known()
        kernels = {f"{one.pop('kernel')} {one.pop('constants')}": one for one in results}
        stored[version()] = {"sources": digest(), "kernels": kernels}
        KNOWN.write_text(as_text(stored))
    else:
        json.dump({"triton": version(), "kernels": results}, sys.stdout)


if __name__ == "__main__":
    main()
