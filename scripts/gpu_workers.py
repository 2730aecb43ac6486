"""Runs tests in several processes at once, as the plugin `gpu_tests` notes them.

    python -m gpu_workers WORKERS LINES PYTEST-ARGUMENTS …

On a GPU most of a first run is compiling, which takes one processor core for each process. Each process gets
small groups of tests that lie together, since neighbours use the same kernels.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

NONE = 5  # of pytest, where it ran no test


def run(workers: int, lines: Path, arguments: list[str]) -> int:
    """The highest exit status of the processes; those that a signal ended count as 1.

    Where there are fewer tests than processes, some have none, which is no failure.
    """
    # `timeout` tells all of them to end, and kills those that do not only while this process waits for them.
    signal.signal(signal.SIGTERM, lambda *_: None)
    lines.write_text(json.dumps({"workers": workers}) + "\n")
    command = [sys.executable, "-m", "pytest", *arguments, "-p", "gpu_tests", "--lines", str(lines)]
    begun = [subprocess.Popen([*command, "--part", f"{k}/{workers}"]) for k in range(workers)]
    found = [max(process.wait(), int(process.returncode < 0)) for process in begun]
    return max(found) if set(found) <= {NONE} else max(status for status in found if status != NONE)


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
