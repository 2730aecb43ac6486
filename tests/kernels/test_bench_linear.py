"""The benchmark of the output layer with its loss measures what it says, and calculates what it measures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from scripts_loader import load_script

SIZES = ["--rows", "2048", "--width", "16", "--vocab", "8192", "--threads", "1", "--calls", "1"]
RESETS = os.access("/proc/self/clear_refs", os.W_OK)


@pytest.mark.skipif(not RESETS, reason="the peak of a process's memory cannot be set back here")
def test_it_measures_less_memory_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("bench_linear")
    monkeypatch.setattr(script, "apart", script.measure)  # without a process for each
    monkeypatch.setattr(sys, "argv", ["bench_linear.py", *SIZES, "--out", str(tmp_path)])
    script.main()
    found = json.loads((tmp_path / "linear_divergence.json").read_text())
    logits = 2048 * 8192 * 4 / 2**20
    for learns in script.LEARNS:
        ways = {way: one["peak_mib"] for way, one in found["measured"][learns].items()}
        assert ways["plain PyTorch"] > 2 * logits
        assert ways["linear_divergence"] < 1.5 * found["calculated_mib"][learns] < logits


def test_what_is_calculated_for_a_gpu() -> None:
    """Rows of bfloat16: 2^29 / (4 · 1000) rows of a block are more than there are."""
    found = load_script("bench_linear").calculated(100, 10, 1000, 2, "cuda")
    hidden, weight, adapter = 100 * 10, 10 * 1000, 16 * 1010
    block, states = 2 * 100 * 1000, 2 * 100 * 10
    mib = {
        "hidden states": 4 * hidden + block + states,
        "and an adapter": 4 * (hidden + adapter) + block + 2 * adapter,
        "and the weight": 4 * (hidden + weight) + block + 2 * weight,
    }
    assert found == {learns: round(value / 2**20, 1) for learns, value in mib.items()}
