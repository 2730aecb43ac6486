"""In which layouts kernels add floating-point numbers, for chains of different lengths; read from TTGIR.

    TRITON_INTERPRET=0 python tests/kernels/compile_sums.py    # prints them as JSON

How Triton adds the entries of a block follows the block's shape, type and layout: where these are the same,
so is the order. Nothing here needs a GPU.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import offline
import triton
import triton.language as tl

from moedraft.kernels import block_kernels, coupled_kernels, primitives, team_kernels, verify_kernels

# An operation with the region that says how two entries become one, the types of its blocks, its location.
COMBINING = re.compile(
    r'"tt\.(reduce|scan)"\([^)]*\) <\{[^}]*\}> \(\{(.*?)\}\) : \((.*?)\) -> .*? loc\((#loc\w*)\)$',
    re.S | re.M,
)
ATTRIBUTES = re.compile(r"^(#\w+) = (#ttg\..*)$", re.M)
LOCATIONS = re.compile(r"^(#loc\w*) = loc\((.*)\)$", re.M)
NAME = re.compile(r"#(?!ttg\b)\w+")
WORDS = re.compile(r"tensor<|#ttg\.|\w+ = |[>}]")  # which say nothing that its place does not say
# Rows of the block (drafted tokens and one more, padded to a power of two and to 4 at least).
LENGTHS = [{"KP": rows, "PER": 1} for rows in (4, 8, 16)]
# Of the longest chains, too, and with more chunks for a program, which is so where there are many rows.
ALL = [*LENGTHS, {"KP": 32, "PER": 1}, {"KP": 64, "PER": 1}, {"KP": 16, "PER": 4}]
Family = tuple[Any, tuple[str, ...], list[dict[str, int]], dict[str, Any]]


@triton.jit
def control(t_sum, losses, KP: tl.constexpr, NCP: tl.constexpr):  # noqa: N803
    """A sum of NCP numbers in a layout that they have from a block with KP rows."""
    cells = tl.arange(0, KP)[:, None] * NCP + tl.arange(0, NCP)[None, :]
    tl.store(losses, tl.sum(tl.max(tl.load(t_sum + cells), axis=0), axis=0))


def by_size() -> dict[str, dict[str, list[str]]]:
    """For each kernel and what it is compiled for, by size: its sums, each kind and layout once."""
    found = {}
    for kernel, absent, sizes, more in [*chains(), *sweeps(), (control, (), LENGTHS, {"NCP": 64})]:
        results = {}
        for size in sizes:
            given = {name: value for name, value in size.items() if name in kernel.arg_names}
            source, options, shown = offline.prepared(kernel, 8, absent, **more, **given)
            results[repr(given)] = sorted(set(sums(offline.ttgir(source, options))))
        fixed = {name: value for name, value in shown.items() if name not in given}
        found[f"{kernel.__name__} {fixed}"] = results
    return found


def chains() -> Iterator[Family]:
    """What finds the end of a chain, for 262 144, 131 072 and 50 257 entries; without a draft; and packed."""
    rows = ("target_starts", "draft_starts", "counts", *offline.CUTS)
    plain = {"HAS_COUNTS": False, "PACKED": False, "CHUNK": 4096}
    packed = {"HAS_COUNTS": True, "PACKED": True, "CHUNK": 4096}
    both, certain = {"HAS_DRAFT": True, "HAS_LSE": True}, {"HAS_DRAFT": False, "HAS_LSE": False}
    unasked, undrafted = ("lses", "tops"), ("draft", "draft_lse", "mass", "arrivals")
    for kernel, more in ((verify_kernels.resolve, {"PURPOSE": 3}), (block_kernels.judge, {})):
        given = (*rows, *unasked, "d_max", "d_sum")
        yield kernel, given, ALL, {**more, **both, **plain, "NCP": 64}
        yield kernel, given, LENGTHS, {**more, **both, **plain, "NCP": 32}
        yield kernel, given, ALL, {**more, **both, **plain, "NCP": 16, "odd": True}
        yield kernel, (*given, *undrafted), LENGTHS, {**more, **certain, **plain, "NCP": 64}
        swept = {"HAS_DRAFT": True, "HAS_LSE": False}
        yield kernel, ("draft_lse", *unasked), LENGTHS, {**more, **swept, **packed, "NCP": 64}


def sweeps() -> Iterator[Family]:
    """What reads whole rows."""
    packed = {"HAS_COUNTS": True, "PACKED": True, "CHUNK": 4096}
    sizes = [{"PER": per} for per in (1, 2, 4)]
    for odd in (False, True):
        both = {"BOTH": True, "SKIP_GREEDY_SUM": True}
        yield verify_kernels.sweep, (), sizes, {**both, **packed, "odd": odd}
        yield coupled_kernels.sweep_coupled, (), sizes, {"WANT_LSE": True, **packed, "odd": odd}
        shared = {"SHIFT": 16, "CHUNK": 4096, "NCP": 16 if odd else 64, "BINS": 512, "odd": odd}
        yield team_kernels.survey, (), sizes, {"CHUNK": 4096, "odd": odd}
        yield team_kernels.narrow, (), sizes, shared


def sums(ttgir: str) -> list[str]:
    """Every reduction and scan that adds floating-point numbers, in turn: kind, shape, layout.

    Without those of `at`, which add zeros to a single entry: no order changes what comes out.
    """
    layouts, locations = dict(ATTRIBUTES.findall(ttgir)), dict(LOCATIONS.findall(ttgir))
    found = COMBINING.findall(ttgir)
    assert len(found) == len(re.findall(r'"tt\.(?:reduce|scan)"', ttgir))
    added = [
        (kind, types)
        for kind, body, types, place in found
        if "arith.addf" in body and not picks(origin(locations, place))
    ]
    return [f"{kind} {shortened(NAME.sub(lambda name: layouts[name[0]], types))}" for kind, types in added]


def shortened(types: str) -> str:
    """`tensor<64xf64, #ttg.blocked<{sizePerThread = [1], …}>>` as `64xf64, blocked [1], …`."""
    return WORDS.sub("", types).replace("<{", " ")


def origin(locations: dict[str, str], place: str) -> list[tuple[str, int]]:
    """The lines of source that lead to an operation, the innermost first: file and number."""
    text = locations[place]
    if line := re.match(r'"([^"]*)":(\d+)', text):
        return [(line[1], int(line[2]))]
    return [line for name in re.findall(r"#loc\w*", text) for line in origin(locations, name)]


def picks(lines: list[tuple[str, int]]) -> bool:
    """Whether one of these lines is in `at`."""
    assert lines
    kernel = primitives.at
    numbers = range(kernel.starting_line_number, kernel.starting_line_number + len(kernel.raw_src))
    return any(file == primitives.__file__ and number in numbers for file, number in lines)


if __name__ == "__main__":
    json.dump(by_size(), sys.stdout)
