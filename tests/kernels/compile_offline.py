"""Compiles every fused kernel for sm_90 without a GPU and prints its resources as JSON. A test runs it.

    TRITON_INTERPRET=0 python tests/kernels/compile_offline.py --write    # stores them in compiled.json

The stored resources are what a later state of the kernels is compared with, for each version of Triton apart,
and with them the layouts in which blocks are added. Beside them stands a digest of the sources that they come
from: while it is the same, nothing needs compiling.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import compile_sums
import compiled_code
import offline
import triton
import triton.language as tl
from offline import CUTS

from moedraft.kernels import (
    block_kernels,
    coupled_kernels,
    cut_kernels,
    divergence_kernels,
    fused_cut,
    fused_divergence,
    team_kernels,
    verify,
    verify_kernels,
)
from moedraft.kernels.primitives import combine

KNOWN = Path(__file__).with_name("compiled.json")


@triton.jit
def combined(t_max, t_sum, losses, ROWS: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: N803
    """`combine` and nothing else."""
    rows, chunks = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    cells = rows[:, None] * CHUNKS + chunks[None, :]
    _, _, total = combine(tl.load(t_max + cells), tl.load(t_sum + cells), ROWS, CHUNKS)
    tl.store(losses + rows, total)


def compile_kernel(
    kernel: Any, warps: int, absent: tuple[str, ...] = (), fusion: bool | None = None, **more: Any
) -> dict[str, Any]:
    """What it uses. See `offline.prepared`."""
    source, options, shown = offline.prepared(kernel, warps, absent, fusion, **more)
    compiled = triton.compile(source, target=offline.TARGET, options=options)
    return {"kernel": kernel.__name__, **compiled_code.resources(compiled), "constants": repr(shown)}


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
    results = [*shared(151_936, "bf16", 2), *shared(50_257, "bf16", 4), *shared(32_000, "bf16", 1)]
    results += shared(151_936, "bf16", 2, ("top_k", "min_p"))
    for vocab, shift in ((151_936, 16), (50_257, 16), (8000, 16), (1024, 0)):
        tile = fused_cut.tile(vocab)
        warps, most = tile.pop("num_warps"), tile.pop("maxnreg", None)
        shape = {"BINS": fused_cut.BINS, "SHIFT": shift, **tile}
        alone = () if vocab > fused_cut.LONG else ("stages",)
        results.append(
            compile_kernel(cut_kernels.cut, warps, alone, True, most=most, odd=vocab % 16 > 0, **shape)
        )
    flags = {"HAS_COUNTS": True, "PACKED": False, "CHUNK": 4096}
    absent = ("target_starts", "draft_starts", "d_max", "d_sum")
    sweep = verify_kernels.sweep
    results.append(compile_kernel(sweep, 8, absent, PER=4, BOTH=False, SKIP_GREEDY_SUM=True, **flags))
    shape = {"HAS_DRAFT": True, "HAS_LSE": True, "NCP": 64, "KP": 8, "PER": 2, **flags}
    drafting = (*absent, "lses", "tops")
    results.append(compile_kernel(verify_kernels.resolve, 8, drafting, PURPOSE=3, **shape))
    results.append(compile_kernel(block_kernels.judge, 8, absent, **shape))
    return results


def shared(vocab: int, numbers: str, per: int, absent: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The kernels of rows that several programs share, which read `per` chunks each.

    absent: limits that no row has.
    """
    shape = fused_cut.team_tile(vocab) | {"SHIFT": {"bf16": 16, "fp16": 13, "fp32": 0}[numbers]}
    warps, fusion = shape.pop("num_warps"), shape.pop("enable_fp_fusion")
    assert fusion == offline.FUSION
    of = {"numbers": numbers, "odd": vocab % 16 > 0}
    return [
        compile_kernel(team_kernels.survey, warps, absent, **of, PER=per, CHUNK=shape["CHUNK"]),
        compile_kernel(team_kernels.aim, warps, absent, **of, **shape),
        compile_kernel(team_kernels.narrow, warps, absent, **of, PER=per, **shape),
    ]


def served() -> list[dict[str, Any]]:
    """What an engine launches: filtered or not, with drafts that were drawn and with certain ones.

    `test_warm_up.py` compares with an engine that serves.
    """
    results = []
    rows = {"CHUNK": 4096, "PACKED": False}
    chunks = {"KP": 8, "NCP": 64, "PER": 1, **rows}
    starts, summed = ("target_starts", "draft_starts"), ("d_max", "d_sum")
    undrafted = ("draft", "draft_lse", "mass", "arrivals", "d_values", "d_lasts", *starts, *summed)

    def add(kernel: Any, absent: tuple[str, ...], **more: Any) -> None:
        results.append(compile_kernel(kernel, 8, absent, **more))

    for cuts in ((), CUTS):
        drafted = (*starts, *summed, *cuts)
        certain, drawing = (*undrafted, *cuts), (*undrafted, *cuts, "counts")
        checked = {"PER": 2, "BOTH": False, "SKIP_GREEDY_SUM": True, "HAS_COUNTS": True, **rows}
        add(verify_kernels.sweep, drafted, **checked)
        add(verify_kernels.sweep, certain, **checked)
        add(verify_kernels.sweep, drawing, **checked | {"SKIP_GREEDY_SUM": False, "HAS_COUNTS": False})
        for absent, has_draft in ((drafted, True), (certain, False)):
            shape = {"HAS_DRAFT": has_draft, "HAS_LSE": has_draft, "HAS_COUNTS": True, **chunks}
            add(verify_kernels.resolve, (*absent, "lses", "tops"), PURPOSE=3, **shape)
            add(block_kernels.judge, absent, **shape)
        shape = {"HAS_DRAFT": False, "HAS_LSE": False, "HAS_COUNTS": False, **chunks}
        add(verify_kernels.resolve, drawing, PURPOSE=1, **shape)
        unfiltered = ("values", "lasts") if cuts else ()
        coupled = coupled_kernels.sweep_coupled
        unasked = ("starts", "scaled", "sums", *unfiltered)
        add(coupled, unasked, PER=2, WANT_LSE=False, HAS_COUNTS=True, **rows)
        add(coupled, ("starts", "counts", *unfiltered), PER=2, WANT_LSE=True, HAS_COUNTS=False, **rows)
    for absent, has_counts in ((("lses", "scaled", "sums", "tops"), True), (("counts",), False)):
        choices = {"HAS_COUNTS": has_counts, "WANT_LSE": not has_counts, "KP": 8, "NCP": 64}
        results.append(compile_kernel(coupled_kernels.choose, 4, absent, **choices))
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
    results = [compile_kernel(kernel, 8, left, odd=True, **more) for kernel, (left, more) in found.items()]
    coupled = coupled_kernels.sweep_coupled
    ragged = {"HAS_COUNTS": True, "PACKED": True, "CHUNK": 4096}
    results.append(compile_kernel(coupled, 8, (), odd=True, PER=1, WANT_LSE=True, **ragged))
    unasked = ("starts", "counts", "values", "lasts", "scaled", "sums")
    results.append(compile_kernel(coupled, 8, unasked, odd=True, PER=4, WANT_LSE=False, **flags))
    return results


def losses(
    vocab: int,
    kinds: tuple[str, ...] = ("fkl", "rkl", "jsd", "tvd"),
    lists: tuple[int, ...] = (16,),
    numbers: str = "bf16",
) -> list[dict[str, Any]]:
    """The kernels of the divergences, each with its gradient; `lists`: tokens of a top-k teacher, padded."""
    tile = dict(fused_divergence.tile(vocab))
    size = {"V": vocab, "BLOCK": tile["BLOCK"], "STAGES": tile["STAGES"]}

    def of(kernel: Any, **more: Any) -> dict[str, Any]:
        launch = {"most": tile["maxnreg"], "odd": vocab % 16 > 0, "numbers": numbers}
        return compile_kernel(kernel, tile["num_warps"], **launch, **more, **size)

    results = []
    for kind in kinds:
        if kind in ("fkl", "rkl"):
            results.append(of(divergence_kernels._kl, REVERSE=kind == "rkl", WANT_GRAD=True))
        else:
            results.append(of(divergence_kernels._mixed, KIND=kind, WANT_GRAD=True))
        for count in lists:
            results.append(of(divergence_kernels._topk, KIND=kind, KP=count, WANT_GRAD=True))
    return [*results, of(divergence_kernels._scale)]


def precisions() -> list[dict[str, Any]]:
    """Each kernel that reads logits, for float16 and float32, which models in these types give.

    A draft that learns is in float32, whatever its target is in.
    """
    results = []
    flags = {"HAS_COUNTS": False, "PACKED": False, "CHUNK": 4096}
    shape = {"HAS_DRAFT": True, "HAS_LSE": True, "NCP": 64, "KP": 8, "PER": 1, **flags}
    rows = ("target_starts", "draft_starts", "counts", *CUTS, "d_max", "d_sum")
    swept = {"PER": 2, "BOTH": False, "SKIP_GREEDY_SUM": True, **flags}
    coupled = {"PER": 1, "WANT_LSE": True, "HAS_COUNTS": True, "PACKED": True, "CHUNK": 4096}
    tile = fused_cut.tile(151_936)
    warps, search = tile.pop("num_warps"), {"BINS": fused_cut.BINS, **tile}
    for numbers, shift in (("fp16", 13), ("fp32", 0)):
        of = {"numbers": numbers}
        results.append(compile_kernel(verify_kernels.sweep, 8, (*rows, "draft"), **of, **swept))
        results.append(compile_kernel(coupled_kernels.sweep_coupled, 8, (), **of, **coupled))
        results.append(compile_kernel(cut_kernels.cut, warps, (), True, **of, SHIFT=shift, **search))
        results += shared(151_936, numbers, 2)
        results += losses(151_936, ("fkl", "jsd"), numbers=numbers)
    for types in ({"numbers": "fp16"}, {"numbers": "fp32"}, {"draft": "fp32"}):
        results.append(
            compile_kernel(verify_kernels.resolve, 8, (*rows, "lses", "tops"), PURPOSE=3, **types, **shape)
        )
        results.append(compile_kernel(block_kernels.judge, 8, rows, **types, **shape))
    return results


def known() -> dict[str, Any]:
    """By version of Triton, resources by variant and what they come from; {} where the file is missing."""
    found: dict[str, Any] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    return found


def version() -> str:
    """Of Triton, without its last number."""
    return ".".join(triton.__version__.split(".")[:2])


def digest() -> str:
    """Of the kernels' sources, and of the files that say what of them is compiled, and that read it."""
    here = [Path(__file__), *(Path(one.__file__) for one in (compiled_code, compile_sums, offline))]
    sources = [*sorted(Path(verify.__file__).parent.glob("*.py")), *here]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def as_text(stored: dict[str, Any]) -> str:
    """As JSON with a line for each kernel."""
    parts = []
    for name, found in sorted(stored.items()):
        inner = [f'  "sources": {json.dumps(found["sources"])}']
        for part in ("sums", "kernels"):
            lines = [f"   {json.dumps(kernel)}: {json.dumps(one)}" for kernel, one in found[part].items()]
            inner.append(f'  "{part}": {{\n' + ",\n".join(lines) + "\n  }")
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    results = []
    for width, warps in ((4096, 8), (1024, 4), (256, 4)):
        results += verification(width, warps)
    results += summation() + chains() + filters() + served() + unaligned()
    results += losses(151_936, lists=(16, 64)) + losses(1000)  # a trainer's lists have 16 tokens, unless told
    for vocab in (50_257, 262_144):
        results += losses(vocab, lists=(16, 64))
    results += precisions()
    if sys.argv[1:] == ["--write"]:
        stored = known()
        kernels = {f"{one.pop('kernel')} {one.pop('constants')}": one for one in results}
        sums = compile_sums.by_size()
        stored[version()] = {"sources": digest(), "sums": sums, "kernels": kernels}
        KNOWN.write_text(as_text(stored))
    else:
        json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
