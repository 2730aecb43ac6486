"""What runs on a GPU machine: in how much time, with which packages, and what is left of a run cut short."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_loader import SCRIPTS

# Runs `run` where some packages are not installed.
WITHOUT = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] in {missing} else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
{run}
"""
# What the machine for GPU runs has not.
MISSING = ["sqlalchemy", "alembic", "platformdirs", "pydantic", "pydantic_settings", "gguf"]
MISSING += ["fastapi", "starlette", "uvicorn", "sse_starlette", "nicegui", "structlog"]
COLLECT = """
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "tests/kernels"]))
"""
HELP = """
import runpy
sys.argv = ["{script}", "--help"]
sys.path.insert(0, "scripts")
runpy.run_path("scripts/{script}", run_name="__main__")
"""
TESTS = """
import os, time, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "not so"
@pytest.mark.skip(reason="no")
def test_skipped(): pass
@pytest.fixture
def broken(): raise ValueError("no device")
def test_without_its_fixture(broken): pass
def test_cut_short():
    if os.environ.get("CUT"): os._exit(9)
def test_later(): pass
"""


def test_all_slices_on_a_gpu_take_less_than_a_quarter_of_an_hour() -> None:
    """The limits of a slice's steps in gpu_check.sh, added up; and the benchmark stops before its own.

    What does not end by itself then is killed ten seconds later.
    """
    text = (SCRIPTS / "gpu_check.sh").read_text()
    assert 'timeout -k 10 "$seconds"' in text
    slices = re.findall(r"^ {8}(\w+)\)\n(.*?);;", text, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in slices] == ["kernels", "tests", "rest"]
    taken = {}
    for name, body in slices:
        limits = [int(n) for n in re.findall(r'^ +(?:step "[^"]+"|tests [\w-]+) (\d+)', body, re.MULTILINE)]
        assert limits, name
        taken[name] = sum(limit + 10 for limit in limits) + 20  # twenty seconds for what runs outside
        for limit, minutes in re.findall(r"benchmark\" (\d+) .*bench_kernels.*--minutes ([\d.]+)", body):
            assert int(limit) - 60 * float(minutes) >= 60
    assert taken["kernels"] < 8 * 60
    assert taken["kernels"] + taken["tests"] < 10 * 60  # what has a target, and all tests
    assert sum(taken.values()) < 14 * 60
    said = re.search(r"add up to (\d+), (\d+) and (\d+) seconds", text)
    assert said is not None
    assert [int(seconds) for seconds in said.groups()] == list(taken.values())


@pytest.mark.parametrize(
    ("missing", "run"),
    [
        pytest.param(MISSING, COLLECT, marks=pytest.mark.slow),  # the next one misses more
        ([*MISSING, "peft", "sklearn"], COLLECT),
        (MISSING, HELP.format(script="bench_kernels.py")),
        (MISSING, HELP.format(script="bench_engine.py")),
    ],
    ids=["tests", "tests without the engine", "kernel benchmark", "engine benchmark"],
)
def test_what_runs_on_a_gpu_needs_no_more_than_the_machine_has(missing: list[str], run: str) -> None:
    """The machine for GPU runs has torch, triton, transformers and pytest, but no library for settings."""
    ran = without(missing, run)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]


def test_control_a_package_that_is_needed_is_missed() -> None:
    ran = without(["torch"], HELP.format(script="bench_engine.py"))
    assert "No module named 'torch'" in ran.stderr


def without(missing: list[str], run: str) -> subprocess.CompletedProcess[str]:
    """What came of `run` where these packages are missing."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing, run=run)],
        capture_output=True,
        text=True,
        cwd=SCRIPTS.parent,
        timeout=120,
    )


def reported(folder: Path, workers: int = 1, **environment: str) -> dict[str, object]:
    """What is reported of `TESTS`, run as gpu_check.sh runs tests."""
    (folder / "test_some.py").write_text(TESTS)
    lines, report = folder / "lines.jsonl", folder / "report.json"
    options = [str(workers), str(lines), "test_some.py", "-q", "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, "-m", "gpu_workers", *options, "--rootdir", str(folder)],
        capture_output=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(SCRIPTS), **environment},
        timeout=120,
    )  # fmt: skip
    subprocess.run([sys.executable, str(SCRIPTS / "gpu_tests.py"), str(lines), str(report)], check=True)
    found: dict[str, object] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("workers", [1, 4])
def test_each_test_is_reported(tmp_path: Path, workers: int) -> None:
    found = reported(tmp_path, workers)
    assert (found["tests"], found["skipped"], found["finished"]) == (6, 1, True)
    assert found["broken_off_in"] == []
    failed = found["failed"]
    assert isinstance(failed, dict)
    assert sorted(failed) == ["test_some.py::test_without_its_fixture", "test_some.py::test_wrong"]
    assert "not so" in failed["test_some.py::test_wrong"]
    assert "no device" in failed["test_some.py::test_without_its_fixture"]


def test_of_a_run_that_is_cut_short_is_known_what_came_before(tmp_path: Path) -> None:
    found = reported(tmp_path, CUT="1")
    assert (found["tests"], found["finished"]) == (4, False)
    assert found["broken_off_in"] == ["test_some.py::test_cut_short"]
    assert len(found["failed"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(("tests", "status"), [("def test_right(): pass", 0), ("", 5)])
def test_a_process_without_a_test_is_no_failure(tmp_path: Path, tests: str, status: int) -> None:
    (tmp_path / "test_one.py").write_text(tests)
    ran = subprocess.run(
        [sys.executable, "-m", "gpu_workers", "2", "lines.jsonl", "test_one.py", "-q", "--rootdir", "."],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SCRIPTS)}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == status


def test_of_several_processes_all_must_have_finished(tmp_path: Path) -> None:
    """The last of three parts ends in the middle; what the others did is there."""
    found = reported(tmp_path, 3, CUT="1")
    assert (found["tests"], found["finished"]) == (4, False)
    assert found["broken_off_in"] == ["test_some.py::test_cut_short"]
