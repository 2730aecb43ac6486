"""A process that holds prompts and keys leaves no core file when it dies."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

PATTERN = Path("/proc/sys/kernel/core_pattern")
DIE = "import os; os.abort()"
SILENT = f"from moedraft.privacy import write_no_core_file; write_no_core_file(); {DIE}"


def core_files(folder: Path, code: str) -> list[Path]:
    """Those that a process running `code` leaves in its folder; it may write some as far as this user may."""
    folder.mkdir()
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=120)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert done.returncode == -6, done.stderr
    return list(folder.iterdir())


def test_a_process_with_secrets_leaves_no_core_file(tmp_path: Path) -> None:
    assert core_files(tmp_path / "silent", SILENT) == []


def test_another_process_leaves_one(tmp_path: Path) -> None:
    """So the test above can fail."""
    if not PATTERN.exists() or PATTERN.read_text()[:1] in "|/\n":
        pytest.skip("core files of this machine go elsewhere")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("this user may write no core files")
    assert core_files(tmp_path / "plain", DIE)
