"""What a compiled kernel uses, read from its PTX and from what the assembler made of it. Runs nothing."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton


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
    """Where loops lie in these lines of PTX: between a label and a branch back to it.

    A branch back to where the kernel ends, which the compiler may put in the middle, repeats nothing.
    """
    labels = {line.split(":")[0].strip(): i for i, line in enumerate(lines) if re.match(r"\s*\$\w+:", line)}
    branches = [(i, re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) for i, line in enumerate(lines)]
    found = [(labels.get(branch[1], i), i) for i, branch in branches if branch]
    return [range(first, last + 1) for first, last in found if first < last and not ends(lines[first:])]


def ends(lines: list[str]) -> bool:
    """Whether the kernel returns from the first of these lines on, without another branch."""
    way = next(line for line in lines if re.search(r"\b(bra|ret)\b", line.split("//")[0]))
    return re.search(r"\bret\b", way) is not None and not way.lstrip().startswith("@")


def loops(ptx: str) -> str:
    """The lines that lie in a loop."""
    lines = ptx.splitlines()
    return "\n".join(lines[i] for i in sorted({i for span in spans(lines) for i in span}))


def streams(ptx: str) -> list[str]:
    """The loops that read or write a row: those in which 16 bytes are moved at a time."""
    lines = ptx.splitlines()
    bodies = ["\n".join(lines[i] for i in span) for span in spans(lines)]
    return [body for body in bodies if re.search(r"(?:ld|st)\.global[^;]*\.v4|cp\.async", body)]
