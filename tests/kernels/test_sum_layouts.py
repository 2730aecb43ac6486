"""However many tokens were drafted, and programs share a row, the compiler lays out the same sums alike.

That is sums of floating-point numbers along a chunk, and along the NCP chunks of a row. Blocks of [KP, NCP]
numbers have layouts that follow KP, but there the compiler has no sum to order: `sum_chunks` adds column to
column, as `test_sum_order.py` shows.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import compile_offline
import compile_sums
import offline
import pytest
from test_kernels_compile import VERSIONS

BySize = dict[str, list[str]]
KERNELS = ("resolve", "judge", "sweep", "sweep_coupled", "survey", "narrow", "control")
ENTRY = "reduce 4096xf32, blocked [8], [32], [8], [0]"


def stored(version: str) -> dict[str, BySize]:
    """By kernel and what it is compiled for, its sums in kernels of several sizes."""
    found: dict[str, BySize] = compile_offline.known()[version]["sums"]
    return found


def unlike(by_size: BySize) -> dict[str, set[str]]:
    """Sums that have several layouts, or that not every size has, by kind and shape."""
    layouts: dict[str, set[str]] = {}
    for found in by_size.values():
        for name, layout in (entry.split(", ", 1) for entry in found):
            layouts.setdefault(name, set()).add(layout)
    everywhere = {name for name in layouts if all(name in shapes(found) for found in by_size.values())}
    return {name: seen for name, seen in layouts.items() if len(seen) > 1 or name not in everywhere}


def shapes(found: list[str]) -> set[str]:
    return {entry.split(",")[0] for entry in found}


def expected(kernel: str, constants: dict[str, Any]) -> set[str]:
    """The floating-point sums of a kernel: those of a residual's chunks, and those that draw from a row.

    And those of a row's chunks and intervals that end the search for its cut.
    """
    width, chunks = constants["CHUNK"], constants.get("NCP")
    if kernel in ("sweep", "sweep_coupled", "survey"):
        return {f"reduce {width}xf32"}
    if kernel == "narrow":
        bins = constants["BINS"]
        return {f"reduce {width}xf32", f"reduce {chunks}xf64", f"reduce {bins}xf64", f"scan {bins}xf64"}
    return {f"reduce {width}xf32", f"reduce {chunks}xf64", f"scan {chunks}xf64", f"scan {width}xf64"}


@pytest.mark.parametrize("version", VERSIONS)
def test_sums_have_one_layout_for_all_lengths(version: str) -> None:
    """What is stored is of the present sources: see `test_kernels_compile.py`."""
    kernels = set()
    for name, by_size in stored(version).items():
        kernel, constants = name.split(" ", 1)
        kernels.add(kernel)
        if kernel == "control":
            continue
        assert len(by_size) >= 3
        assert unlike(by_size) == {}, name
        for found in by_size.values():
            assert shapes(found) == expected(kernel, ast.literal_eval(constants)), name
    assert kernels == set(KERNELS)


@pytest.mark.parametrize("version", VERSIONS)
def test_control_a_layout_that_follows_the_length_is_noticed(version: str) -> None:
    """`control` adds as many numbers whatever the length, laid out as a block with KP rows has them."""
    by_size = next(found for name, found in stored(version).items() if name.startswith("control "))
    assert [shapes(found) for found in by_size.values()] == [{"reduce 64xf32"}] * 3
    assert len(unlike(by_size)["reduce 64xf32"]) == 3


def test_control_one_changed_layout_or_a_missing_sum_is_noticed() -> None:
    other = ENTRY.replace("[8]", "[4]", 1)
    assert unlike({"4": [ENTRY], "8": [ENTRY]}) == {}
    assert set(unlike({"4": [ENTRY], "8": [other]})) == {"reduce 4096xf32"}
    assert set(unlike({"4": [ENTRY], "8": [ENTRY, other]})) == {"reduce 4096xf32"}
    assert set(unlike({"4": [ENTRY], "8": []})) == {"reduce 4096xf32"}


TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
#loc1 = loc("/standard.py":314:1)
#loc2 = loc("PRIMITIVES":LINE:1)
#loc3 = loc(callsite(#loc1 at #loc2))
  %1 = "tt.reduce"(%0) <{axis = 0 : i32}> ({
  ^bb0(%a: f32 loc(#loc1), %b: f32 loc(#loc1)):
    %2 = arith.OPERATION %a, %b : f32 loc(#loc3)
    tt.reduce.return %2 : f32 loc(#loc3)
  }) : (tensor<64xf32, #ttg.slice<{dim = 1, parent = #blocked}>>) -> f32 loc(#loc3)
"""


@pytest.mark.parametrize(
    ("operation", "inside", "counted"), [("addf", 0, 0), ("addf", 99, 1), ("maxnumf", 99, 0)]
)
def test_sums_are_read_save_those_of_a_single_entry(
    operation: str, inside: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No order changes a maximum, or the sum of one number and zeros."""

    class At:
        starting_line_number = 100
        raw_src = ("@triton.jit", "def at(): ...")

    monkeypatch.setattr(compile_sums.primitives, "at", At)
    text = TTGIR.replace("PRIMITIVES", str(compile_sums.primitives.__file__)).replace("OPERATION", operation)
    found = compile_sums.sums(text.replace("LINE", str(At.starting_line_number + inside)))
    assert found == ["reduce 64xf32, slice 1, blocked [1], [32], [8], [0]"] * counted


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_layouts_that_are_stored_are_the_compilers(tmp_path: Path) -> None:
    known = compile_offline.known().get(compile_offline.version())
    if known is None:
        pytest.skip(f"nothing is stored for Triton {compile_offline.version()}")
    assert offline.printed_by(compile_sums.__file__, tmp_path) == known["sums"]
