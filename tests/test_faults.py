"""The fault campaign in small: what is killed, damaged and crowded loses nothing that was acknowledged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "faults.py"


def run(*arguments: str) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", ["kills", "moments", "files"])
def test_a_home_stands_kills_and_damage(part: str) -> None:
    run("--only", part)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["disks", "killed", "trainer", "server", "crowd"])
def test_a_server_stands_kills_full_disks_crowds_and_nonsense(part: str) -> None:
    run("--only", part)


def test_a_broken_promise_ends_it_with_1_and_stands_in_the_file(tmp_path: Path) -> None:
    """What was found before is not tried again, and it still counts."""
    out = tmp_path / "faults.json"
    row = {
        "fault": "x",
        "must": "y",
        "cases": 1,
        "broken": ["z"],
        "figures": "",
        "seconds": 1.0,
        "kept": False,
    }
    parts = ["kills", "moments", "files", "disks", "killed", "trainer", "server", "crowd"]
    found: dict[str, Any] = {
        "cores": 2,
        "python": "3",
        "parts": {
            one: {"quick": True, "date": "today", "rows": [row] if one == "kills" else []} for one in parts
        },
    }
    out.write_text(json.dumps(found), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(out.read_text(encoding="utf-8")) == found
