"""Every fused kernel compiles for an H100 or H200 on a machine without one, and became no worse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

SCRIPT = Path(__file__).with_name("compile_offline.py")
KNOWN = Path(__file__).with_name("compiled.json")
LESS = ("registers", "spilled", "shared", "narrow_in_loops", "barriers", "barriers_in_loops")
MORE = ("wide_loads", "wide_stores", "asynchronous")  # accesses of 16 bytes, and copies beside computation


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The version of Triton, and every kernel's resources. Made in a process of its own: this one may have
    chosen the interpreter."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "cuobjdump").exists() or not (tools / "ptxas").exists():
        pytest.skip("this build of Triton brings no assembler for NVIDIA")
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a kernel uses more of than before, or does less of."""
    grown = [name for name in LESS if now[name] > before[name]]
    return grown + [name for name in MORE if now[name] < before[name]]


def test_no_kernel_became_worse(compiled: dict[str, Any]) -> None:
    """After a change for the better, or one that is worth it: `compile_offline.py --write`."""
    before = json.loads(KNOWN.read_text()).get(compiled["triton"])
    if before is None:
        pytest.skip(f"nothing is stored for Triton {compiled['triton']}")
    now = {f"{one['kernel']} {one['constants']}": one for one in compiled["kernels"]}
    assert set(now) == set(before)
    assert {name: found for name, one in now.items() if (found := worse(one, before[name]))} == {}


def test_a_kernel_that_became_worse_is_noticed(compiled: dict[str, Any]) -> None:
    one = compiled["kernels"][0]
    assert worse(one, one) == []
    assert worse(one | {"registers": one["registers"] + 1}, one) == ["registers"]
    assert worse(one | {"wide_loads": one["wide_loads"] - 1}, one) == ["wide_loads"]


def test_kernels_compile_for_sm_90_without_spilling(compiled: dict[str, Any]) -> None:
    kernels = compiled["kernels"]
    verification = {"sweep", "resolve", "judge", "sweep_coupled", "choose", "cut"}
    losses = {"_kl", "_mixed", "_topk", "_scale"}
    sums = [kernel["fused"] for kernel in kernels if kernel["kernel"] == "combined"]
    # A verdict must not depend on which sums the compiler fuses in one layout and not in another; with leave
    # to fuse (the last one) it does.
    assert sums[:-1] == [0] * 4
    assert sums[-1] > 0
    kernels = [kernel for kernel in kernels if kernel["kernel"] != "combined"]
    assert verification | losses == {k["kernel"] for k in kernels}
    for kernel in kernels:
        assert kernel["spilled"] == 0, kernel
        # two blocks of 256 threads share a multiprocessor; of what sweeps over all logits four do
        most = 64 if kernel["kernel"] in {"sweep"} | losses else 128
        assert kernel["registers"] <= most, kernel
        # where a row has a residual its programs count themselves, in a way that orders their stores
        counts = kernel["kernel"] in ("resolve", "judge") and "'HAS_DRAFT': True" in kernel["constants"]
        assert kernel["arrivals"] == int(counts), kernel
    swept = [
        kernel
        for kernel in kernels
        if kernel["kernel"] in ("sweep", "sweep_coupled", "cut", "_kl", "_mixed", "_topk")
    ]
    narrow = [
        kernel for kernel in swept if not kernel["wide_loads"] and "'CHUNK': 256" not in kernel["constants"]
    ]
    # Rows of a vocabulary that is no multiple of eight do not begin at multiples of 16 bytes.
    unaligned = ("1000", "50257")
    assert [k["constants"] for k in narrow if not any(v in k["constants"] for v in unaligned)] == []
