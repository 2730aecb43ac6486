"""Runs tests in several processes at once, as the plugin `gpu_tests` notes them.

    python -m gpu_workers WORKERS LINES PYTEST-ARGUMENTS …

On a GPU most of a first run is compiling, which takes one processor core for each process. Each process gets
a part of the tests that lie together, since neighbours use the same kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(workers: int, lines: Path, arguments: list[str]) -> int:
    """The highest exit status of the processes; those that a signal ended count as 1."""
    lines.write_text(json.dumps({"workers": workers}) + "\n")
    command = [sys.executable, "-m", "pytest", *arguments, "-p", "gpu_tests", "--lines", str(lines)]
    begun = [subprocess.Popen([*command, "--part", f"{k}/{workers}"]) for k in range(workers)]
    return max(abs(process.wait()) and max(process.returncode, 1) for process in begun)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
