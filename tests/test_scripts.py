"""The commands of the repository say what they do before they do anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    ".ci/run": "continuous integration",
    "scripts/test": "All checks, then all tests",
    "scripts/check": "Lint (ruff)",
    "scripts/demo": "run its demo",
}


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which comes at once where nothing is started."""
    return subprocess.run(
        [str(ROOT / command), *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
        timeout=5,
    )


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does_and_starts_nothing(command: str, asked: str) -> None:
    result = run(command, asked)
    assert (result.returncode, result.stderr) == (0, "")
    assert COMMANDS[command] in result.stdout
    assert "==>" not in result.stdout
    assert "source" not in result.stdout
    assert "set -" not in result.stdout


@pytest.mark.parametrize("command", [".ci/run", "scripts/check"])
def test_arguments_that_nothing_takes_are_refused(command: str) -> None:
    result = run(command, "--fast")
    assert (result.returncode, result.stdout) == (2, "")
    assert "takes no arguments, not --fast" in result.stderr
