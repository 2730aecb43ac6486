"""scripts/gpu_check.sh itself, all of it, without a device: its limits, reports, going on, and exit status.

The interpreter that it is given stands between: tests are made-up ones, and the benchmarks run a few cases.
Each limit is over as soon as something hangs, by the signal that `timeout` gives itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_loader import SCRIPTS

TIMEOUT = shutil.which("timeout")
pytestmark = pytest.mark.skipif(TIMEOUT is None, reason="needs timeout of the GNU core utilities")

# Ends what it runs at its limit, which comes as soon as $HANGS is there. $LIMITS: what was asked for.
LIMIT = """#!/usr/bin/env bash
echo "$*" >> "$LIMITS"
( while [ ! -e "$HANGS" ]; do sleep 0.1; kill -0 $$ || exit; done
  rm -f "$HANGS"; kill -ALRM $$ ) > /dev/null 2>&1 &
exec {timeout} "$@"
"""
# Stands for python3. {folder}: where the made-up tests are, and a torch that costs no time to import.
PYTHON = """#!{python} -IS
import os, sys
python, folder, arguments = "{python}", "{folder}", sys.argv[1:]
path = os.environ["PYTHONPATH"]
if arguments[0] == "-c":
    sys.exit(1)  # there is no device
if arguments[0].endswith("bench_kernels.py"):
    arguments = [folder + "/few_cases.py", *arguments[1:]]
    path += ":" + os.getcwd() + "/scripts"
elif arguments[0].endswith("bench_engine.py"):
    arguments = [folder + "/engine.py", *arguments[1:]]
else:
    path = folder + "/light:" + path
    if arguments[0] == "-m":
        os.chdir(folder)
os.execve(python, [python, *arguments], {{**os.environ, "PYTHONPATH": path}})
"""
MADE_UP = """
import os, time
def hang():
    open(os.environ["HANGS"], "w").close()
    time.sleep(100)
HANGING = bool(os.environ.get("HANGING"))
"""
FEW = """
import bench_kernels, torch
from kernel_case import Case, Contender
from kernel_cases import cases
from kernel_timing import Bench
from made_up import HANGING, hang

def contenders():
    call = lambda: torch.zeros(4)
    return {"moedraft": Contender(lambda: [call]), "theirs": Contender(lambda: [hang if HANGING else call]),
            "last": Contender(lambda: [call])}

torch.compile = lambda function, **_: function
bench = Bench(device="cpu", cuda=False, seconds=0.0, cold_bytes=0, dtype=torch.float32, vocab=96, vocabs=(),
              batches=(1,), rows=8)
made = [*cases(bench)[:2], Case("sample_draft", {"batch": 7}, 100, 100, contenders)]
bench_kernels.cases = lambda bench: made
bench_kernels.plot = lambda *_: None
bench_kernels.main(None, bench)
"""
# What it leaves behind keeps its output open.
ENGINE = """
import os, subprocess, sys
from made_up import HANGING, hang
print("engine:", *sys.argv[1:], flush=True)
if HANGING:
    left = subprocess.Popen(["sleep", "200"], start_new_session=True)
    open(os.environ["LEFT"], "w").write(str(left.pid))
    hang()
"""
TESTS = """
import os
from made_up import HANGING, hang
def test_first(): pass
def test_second():
    if HANGING: hang()
def test_third(): assert not os.environ.get("WRONG"), "not so"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With everything that stands in for something."""
    texts = {
        "bin/timeout": LIMIT.format(timeout=TIMEOUT),
        "bin/python": PYTHON.format(python=sys.executable, folder=tmp_path),
        "made_up.py": MADE_UP,
        "few_cases.py": FEW,
        "engine.py": ENGINE,
        "light/torch.py": "__version__ = '0'\nclass cuda:\n    is_available = lambda: False\n",
        "tests/kernels/test_kernels_gpu.py": TESTS,
        "tests/kernels/test_kernels_compile.py": "raise ValueError('is compiled elsewhere')\n",
        "tests/kernels/test_more.py": TESTS,
        "tests/kernels/test_bench_some.py": "raise ValueError('needs no GPU')\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("timeout", "python"):
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def check(folder: Path, *arguments: str, home: Path = SCRIPTS.parent, **environment: str) -> tuple[int, str]:
    """The script's exit status and what it printed."""
    ran = subprocess.run(
        [str(home / "scripts" / "gpu_check.sh"), "--out", str(folder / "out"), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, timeout=250,
        env={
            **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHON": f"{folder}/bin/python",
            "PYTHONPATH": str(folder), "HANGS": f"{folder}/hangs", "LIMITS": f"{folder}/limits",
            "LEFT": f"{folder}/left", "TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **environment,
        },
    )  # fmt: skip
    return ran.returncode, ran.stdout


def found(folder: Path, name: str) -> Any:
    return json.loads((folder / "out" / name).read_text())


def test_what_is_broken_off_is_reported_and_gone_on_with(folder: Path) -> None:
    """All slices, in each of which something hangs; and again, where nothing does."""
    status, text = check(folder, HANGING="1")
    assert status == 1
    os.kill(int((folder / "left").read_text()), signal.SIGKILL)  # was left behind, and not waited for
    assert "No CUDA device here" in text
    for step in ("kernel-tests-gpu", "kernel benchmark", "kernel-tests", "engine benchmark"):
        assert f"== {step}: failed with status 124" in text
    for report, home in (("kernel-tests-gpu", "test_kernels_gpu"), ("kernel-tests", "test_more")):
        tests = found(folder, f"{report}.json")
        assert (tests["tests"], tests["finished"], tests["failed"]) == (1, False, {})
        assert tests["broken_off_in"] == [f"tests/kernels/{home}.py::test_second"]
    cases = found(folder, "kernels-cpu.json")["cases"]
    assert [case["left"] for case in cases] == [0, 0, 0]  # the last slice has gone on
    assert cases[2]["contenders"]["theirs"] == {"status": "failed: did not return"}
    assert all("us" in next(iter(case["contenders"].values())) for case in cases)

    status, text = check(folder, "tests", "rest")
    assert status == 0, text
    assert found(folder, "kernels-cpu.json")["cases"] == cases  # nothing is measured again
    tests = found(folder, "kernel-tests.json")
    assert (tests["tests"], tests["finished"], tests["broken_off_in"]) == (3, True, [])
    assert f"engine: --quick --out {folder}/out" in text
    kept = [path.name for path in (folder / "out").iterdir()]
    assert not [name for name in kept if name.endswith((".jsonl", ".tmp"))]
    assert "rest-engine-benchmark.log" in kept
    assert not list(folder.glob("tmp.*"))  # the package that it laid out


def test_limits_are_handed_on_as_they_are_written(folder: Path) -> None:
    check(folder, "tests")
    text = (SCRIPTS / "gpu_check.sh").read_text()
    (limit,) = [
        line.split()[2] for line in text.splitlines() if line.strip().startswith("tests kernel-tests ")
    ]
    assert (folder / "limits").read_text().startswith(f"-k 10 {limit} env ")


def test_a_test_that_fails_shows_in_the_status(folder: Path) -> None:
    status, text = check(folder, "tests", WRONG="1")
    assert (status, "not so" in text) == (1, True)
    assert list(found(folder, "kernel-tests.json")["failed"]) == ["tests/kernels/test_more.py::test_third"]


def test_peers_beside_the_repositorys_files_are_found(folder: Path) -> None:
    """In a copy of the repository, so far as the script needs it. What is installed comes before them."""
    copy = folder / "copy"
    (copy / "scripts").mkdir(parents=True)
    for name in ("gpu_check.sh", "gpu_tests.py", "gpu_workers.py", "peer_folder.py"):
        shutil.copy(SCRIPTS / name, copy / "scripts" / name)
    for name in ("moedraft", "kernels", "data"):
        (copy / name).mkdir()
    given = "import some_peer, made_up, sys\ndef test_it(): assert sys.path[-1].endswith('/.peers')\n"
    (folder / "tests/kernels/test_more.py").write_text(given)
    assert check(folder, "tests", home=copy)[0] == 1  # the control: there is none
    (copy / ".peers").mkdir()
    (copy / ".peers" / "some_peer.py").touch()
    status, text = check(folder, "tests", home=copy)
    assert status == 0, text


def test_lines_of_an_earlier_run_are_not_taken_for_this_ones(folder: Path) -> None:
    """Where the tests cannot even begin."""
    (folder / "out").mkdir()
    (folder / "out" / "kernel-tests.jsonl").write_text('{"test": "old", "outcome": "passed", "seconds": 1}\n')
    status, _ = check(folder, "tests", PYTEST_ADDOPTS="--no-such-option")
    tests = found(folder, "kernel-tests.json")
    assert (status, tests["tests"], tests["finished"]) == (1, 0, False)


def test_what_it_does_not_know_is_refused(folder: Path) -> None:
    for arguments in (["all"], ["tests", "--quick"]):
        status, text = check(folder, *arguments)
        assert (status, "usage: " in text) == (2, True)
    assert not (folder / "out").exists()
