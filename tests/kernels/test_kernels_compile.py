"""Every fused kernel compiles for an H100 or H200 on a machine without one, and became no worse.

That a row's sums do not depend on how many tokens were drafted has a test of its own, `test_sum_layouts.py`;
`combined` below shows that the compiler fuses none of them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import compile_offline
import compiled_code
import offline
import pytest
import triton

LESS = ("registers", "spilled", "shared", "narrow_in_loops", "narrow_in_streams", "barriers")
LESS += ("barriers_in_loops",)
MORE = ("wide_loads", "wide_stores", "asynchronous")  # accesses of 16 bytes, and copies beside computation
SWEPT = ("sweep", "sweep_coupled", "cut", "survey", "aim", "narrow", "_kl", "_mixed", "_topk")  # read rows
VERSIONS = ["3.6", "3.7", "3.9"]  # of Triton
pytestmark = pytest.mark.timeout(900)  # where everything is compiled again, on a slow machine
STREAMS = ("_kl", "_mixed", "_topk", "cut")  # block after block, so that copies can run ahead
# What does not keep a limit with one version of Triton, and by how much. Where rows begin anywhere, a thread
# that searches a cut has an address for each of its entries, and stores two words aside; of float32 rows one.
# So does one that takes a sample of such a row.
BEYOND = {
    ("3.7", "cut", "'ODD': True"): {"spilled": 8},
    ("3.6", "cut", "'NUMBERS': 'fp32'"): {"spilled": 8},
    ("3.6", "aim", "'ODD': True"): {"spilled": 8},
}
# Also goes through its list of tokens, and through those that share a lane with one of them, one by one.
NARROW = ("_topk",)
NUMBERS = re.compile(r"'NUMBERS': '(\w+)'")  # the type of logits, where it is not bfloat16
# Barriers of a kernel's loops together, at most, with any of these versions; no other kernel has any there.
BARRIERS = {"_kl": 8, "_mixed": 10, "_topk": 14, "_scale": 2, "cut": 59, "judge": 3, "aim": 3}
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
FEW = "'CHUNK': 256"  # of rows with so few entries a thread has two, which are less than 16 bytes


def stored() -> dict[str, Any]:
    """What compiled.json holds for this version of Triton."""
    found: dict[str, Any] | None = compile_offline.known().get(compile_offline.version())
    if found is None:
        pytest.skip(f"nothing is stored for Triton {compile_offline.version()}")
    return found


def compiled_now(cache: Path) -> dict[str, Any]:
    """Every kernel's resources, by name and constants."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists() or not (tools / "ptxas").exists():
        pytest.skip("this build of Triton brings no assembler for NVIDIA")
    kernels: list[dict[str, Any]] = offline.printed_by(compile_offline.__file__, cache)
    return {f"{one.pop('kernel')} {one.pop('constants')}": one for one in kernels}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every kernel's resources: those that are stored, unless a kernel has changed since."""
    known = compile_offline.known().get(compile_offline.version())
    if known is not None and known["sources"] == compile_offline.digest():
        kernels: dict[str, Any] = known["kernels"]
        return kernels
    return compiled_now(tmp_path_factory.mktemp("cache"))


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a kernel uses more of than before, or does less of."""
    grown = [name for name in LESS if now[name] > before[name]]
    return grown + [name for name in MORE if now[name] < before[name]]


def test_no_kernel_became_worse(compiled: dict[str, Any]) -> None:
    """After a change for the better, or one that is worth it: `compile_offline.py --write`."""
    before = stored()["kernels"]
    assert set(compiled) == set(before)
    assert {name: found for name, one in compiled.items() if (found := worse(one, before[name]))} == {}


@pytest.mark.slow
def test_what_is_stored_is_what_the_compiler_makes(tmp_path: Path) -> None:
    assert stored()["sources"] == compile_offline.digest()
    assert compiled_now(tmp_path) == stored()["kernels"]


def test_a_kernel_that_became_worse_is_noticed(compiled: dict[str, Any]) -> None:
    one = next(iter(compiled.values()))
    assert worse(one, one) == []
    assert worse(one | {"registers": one["registers"] + 1}, one) == ["registers"]
    assert worse(one | {"wide_loads": one["wide_loads"] - 1}, one) == ["wide_loads"]


def test_kernels_compile_for_sm_90_without_spilling(compiled: dict[str, Any]) -> None:
    assert_fit(compiled, compile_offline.version())


def test_everything_stored_is_of_the_present_sources() -> None:
    """Of all versions, not of the installed one alone: each has its own `compile_offline.py --write`."""
    found = {version: one["sources"] for version, one in compile_offline.known().items()}
    assert found == dict.fromkeys(VERSIONS, compile_offline.digest())


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_stored_fits_with_the_oldest_triton_the_usual_one_and_the_newest(version: str) -> None:
    """One environment has one version; what the other one made stands in the file."""
    assert_fit(compile_offline.known()[version]["kernels"], version)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_reads_logits_is_compiled_for_each_of_their_types(version: str) -> None:
    """Models give them in bfloat16, float16 or float32. `choose` and `combined` read none."""
    found: dict[str, set[str]] = {}
    for name in compile_offline.known()[version]["kernels"]:
        kernel, constants = name.split(" ", 1)
        found.setdefault(kernel, set()).update(NUMBERS.findall(constants) or ["bf16"])
    without = {"choose", "combined"}
    assert {kernel for kernel, types in found.items() if types == {"bf16", "fp16", "fp32"}} == set(
        found
    ) - without


def test_control_what_does_not_fit_is_noticed(compiled: dict[str, Any]) -> None:
    name = next(name for name in compiled if name.startswith("sweep "))
    more = {"wide_loads": compiled[name]["wide_loads"] + 1}
    changes: list[dict[str, int]] = [{"registers": 65}, {"spilled": 4}, {"wide_loads": 0}, more]
    for change in (*changes, {"narrow_in_loops": 1}, {"barriers_in_loops": 1}):
        with pytest.raises(AssertionError):
            assert_fit({**compiled, name: compiled[name] | change}, compile_offline.version())
    for kernel in STREAMS:
        name = next(name for name in compiled if name.startswith(f"{kernel} ") and "'STAGES': 3" in name)
        for change in ({"asynchronous": 0}, {"narrow_in_streams": 1}):
            with pytest.raises(AssertionError):
                assert_fit({**compiled, name: compiled[name] | change}, compile_offline.version())


PTX = """
$L0:
 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], {size}, %r2;
 @%p1 bra $L0;
 ld.global.b16 {{ %rs1 }}, [ %rd2 + 0 ];
"""


def test_copies_count_by_their_width() -> None:
    """One of 16 bytes is a wide load, a smaller one in a loop is narrow. What follows a loop is not in it."""
    found = []
    for ptx in (PTX.format(size="0x10"), PTX.format(size="0x4").replace(".cg.", ".ca.")):
        repeated = compiled_code.loops(ptx)
        found.append(compiled_code.accesses(ptx, repeated))
        assert compiled_code.streams(ptx) == [repeated]
    assert [one["wide_loads"] for one in found] == [1, 0]
    assert [one["narrow_in_loops"] for one in found] == [0, 1]
    assert [one["asynchronous"] for one in found] == [1, 1]


def test_a_branch_back_to_the_end_is_no_loop() -> None:
    """The compiler may put the end of a kernel before its last loop. The controls do repeat something."""
    way = "$L1:  // the end, or ret\n {way};\n$L2:\n bar.sync 0;\n @%p1 bra $L2;\n bra.uni $L1;"
    inner, outer = range(2, 5), range(6)
    assert compiled_code.spans(way.format(way="ret").splitlines()) == [inner]
    for other in ("@%p2 ret", "add.s32 %r1, %r1, 1", "@%p2 bra $L2"):
        assert compiled_code.spans(way.format(way=other).splitlines()) == [inner, outer]


def assert_fit(compiled: dict[str, Any], version: str) -> None:
    """No kernel spills, and as many blocks run at once as its launches count on."""
    kernels = [
        one | dict(zip(("kernel", "constants"), name.split(" ", 1), strict=True))
        for name, one in compiled.items()
    ]
    verification = {"sweep", "resolve", "judge", "sweep_coupled", "choose", "cut", "survey", "aim", "narrow"}
    losses = {"_kl", "_mixed", "_topk", "_scale"}
    sums = [kernel["fused"] for kernel in kernels if kernel["kernel"] == "combined"]
    # A verdict must not depend on which sums the compiler fuses in one layout and not in another; with leave
    # to fuse (the last one) it does.
    assert sums[:-1] == [0] * 4
    assert sums[-1] > 0
    kernels = [kernel for kernel in kernels if kernel["kernel"] != "combined"]
    assert verification | losses == {k["kernel"] for k in kernels}
    for kernel in kernels:
        beyond = beyond_limits(kernel, version)
        assert kernel["spilled"] <= beyond.get("spilled", 0), kernel
        # two blocks of 256 threads share a multiprocessor; of what sweeps over all logits four do, and of the
        # losses of rows that begin anywhere three
        most = 64 if kernel["kernel"] in {"sweep", "survey"} | losses else 128
        if kernel["kernel"] in losses and unaligned(kernel):
            most = 80
        assert kernel["registers"] <= beyond.get("registers", most), kernel
        assert kernel["barriers_in_loops"] <= BARRIERS.get(kernel["kernel"], 0), kernel
        # where a row has a residual its programs count themselves, in a way that orders their stores; so do
        # those that search a row for its cut
        counts = kernel["kernel"] in ("resolve", "judge") and "'HAS_DRAFT': True" in kernel["constants"]
        counts |= kernel["kernel"] == "narrow"
        assert kernel["arrivals"] == int(counts), kernel
        if not unaligned(kernel):
            assert_wide(kernel)


def beyond_limits(kernel: dict[str, Any], version: str) -> dict[str, int]:
    """What is allowed to this kernel alone."""
    for (of, name, constants), allowed in BEYOND.items():
        if (of, name) == (version, kernel["kernel"]) and constants in kernel["constants"]:
            return allowed
    return {}


def unaligned(kernel: dict[str, Any]) -> bool:
    """Whether rows begin anywhere, as with 50 257 tokens, so that each entry is loaded on its own."""
    return "'ODD': True" in kernel["constants"]


def assert_wide(kernel: dict[str, Any]) -> None:
    """Rows are read and written 16 bytes at a time, and copied ahead where they have several blocks."""
    few = FEW in kernel["constants"]
    if kernel["kernel"] in SWEPT and not few:
        assert kernel["wide_loads"], kernel
    if kernel["kernel"] in ("sweep", "sweep_coupled", "survey", "narrow"):
        assert kernel["wide_loads"] == chunk_loads(kernel), kernel
    assert kernel["narrow_in_streams"] == 0, kernel
    if kernel["kernel"] not in NARROW and not few:
        assert kernel["narrow_in_loops"] == 0, kernel
    if kernel["kernel"] in STREAMS and "'STAGES': 1" not in kernel["constants"]:
        assert kernel["asynchronous"], kernel


def chunk_loads(kernel: dict[str, Any]) -> int:
    """In how many loads of 16 bytes a thread reads its part of the chunks of its program, each entry once.

    `narrow` has code that weighs these chunks, code that counts equal logits in them, and one chunk more.
    """
    shape = ast.literal_eval(kernel["constants"])
    threads = 256 if shape["CHUNK"] == 4096 else 128
    each = shape["CHUNK"] // threads * WIDTHS[shape.get("NUMBERS", "bf16")] // 16
    if kernel["kernel"] == "narrow":
        return int(each * (2 * shape["PER"] + 1))
    return int(each * shape["PER"] * (2 if shape.get("BOTH") else 1))
