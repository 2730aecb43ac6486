"""The fault campaign in small: what is killed, damaged and crowded loses nothing that was acknowledged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "faults.py"), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_home_stands_kills_damage_and_a_full_disk() -> None:
    run("--only", "kills")
    run("--only", "files")


@pytest.mark.slow
def test_a_server_stands_kills_crowds_and_nonsense() -> None:
    run("--only", "server")
