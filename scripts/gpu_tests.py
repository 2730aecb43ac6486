"""What came of a run of tests on a GPU machine, also where the run is broken off.

    pytest -p gpu_tests --lines FILE …         # as a plugin: JSON when a test begins and when it ends
    python scripts/gpu_tests.py FILE REPORT    # sums them up in one JSON file

Needs pytest and torch alone. A run that ends in the middle names the tests that it ended in. The tests find
what lies in `.peers/`. Several processes may write to one file, each running its part (`gpu_workers.py`).
"""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_folder import find_peers

TOGETHER = 8  # tests that one process runs one after another, at most: neighbours use the same kernels
WORST = ("failed", "skipped", "passed")  # of a test's three parts the first of these counts


class Lines:
    """Appends to a file, so that nothing is lost with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: list[pytest.TestReport] = []

    def write(self, **fields: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.parts = []
        self.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.parts.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", seconds=0.0, why=reason(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        found = {part.outcome: part for part in self.parts}
        outcome = next(name for name in WORST if name in found)
        why = reason(found[outcome]) if outcome == "failed" else ""
        seconds = round(sum(part.duration for part in self.parts), 2)
        self.write(test=nodeid, outcome=outcome, seconds=seconds, **({"why": why} if why else {}))


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip()[:300]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, help="append a line of JSON there for each test")
    parser.addoption("--part", default="0/1", help="K/N: the K-th of N parts of the tests, counted from 0")


def pytest_configure(config: pytest.Config) -> None:
    find_peers()
    if path := config.getoption("--lines"):
        config.pluginmanager.register(Lines(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    together = max(1, min(TOGETHER, len(items) // parts))
    items[:] = [item for place, item in enumerate(items) if place // together % parts == part]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if path := session.config.getoption("--lines"):
        Lines(path).write(status=int(exitstatus))


def read(lines: Path) -> list[dict[str, Any]]:
    """What was written; a line that a process was writing when it was killed is left out."""
    found = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def summary(lines: Path) -> dict[str, Any]:
    """Counts, seconds, what failed and why, and what was running when the run ended."""
    found = read(lines)
    workers = max((line.get("workers", 1) for line in found), default=1)
    tests = [line for line in found if "test" in line]
    begun = [line["began"] for line in found if "began" in line]
    ended = {line["test"] for line in tests}
    failed = [line for line in tests if line["outcome"] == "failed"]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "finished": sum("status" in line for line in found) == workers,
        "tests": len(tests),
        "skipped": sum(line["outcome"] == "skipped" for line in tests),
        "seconds": round(sum(line["seconds"] for line in tests), 1),
        "failed": {line["test"]: line["why"] for line in failed},
        "broken_off_in": [name for name in begun if name not in ended],
    }


def main(lines: str, report: str) -> None:
    found = summary(Path(lines))
    Path(report).write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
