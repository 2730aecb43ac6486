"""What a later run of the kernel benchmark makes of contenders that did not return or were not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts_loader import SCRIPTS, load_script

# Measures two cases again and again, each time in a process of its own. Something in them ends it twice.
RUN = """
import json, os, sys
from pathlib import Path
import bench_kernels, torch
from kernel_case import Case, Contender
from kernel_timing import Bench

def end():
    os._exit(9)

def contenders():
    call = lambda: torch.zeros(4)
    return {{"moedraft": Contender(lambda: [call]), "theirs": Contender(lambda: [end]),
            "last": Contender(lambda: [call])}}

bench = Bench(
    device="cpu", cuda=False, seconds=0.0, cold_bytes=0, dtype=torch.float32, vocab=96, vocabs=(),
    batches=(1,), rows=8,
)
made = [
    Case("sample_draft", {{"batch": batch}}, 100, 100, make)
    for batch, make in enumerate([{first}, contenders])
]
bench_kernels.cases = lambda bench: made
bench_kernels.plot = lambda *_: None
while True:
    if not (child := os.fork()):
        bench_kernels.main(["--out", sys.argv[1], "--resume", sys.argv[1]], bench)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (file,) = Path(sys.argv[1]).glob("kernels-*.json")
    print("now:", json.dumps([status, json.loads(file.read_text())["cases"]]), flush=True)
    if status != 9:
        sys.exit(status)
"""
US = {"moedraft": "us", "theirs": "failed: did not return", "last": "us"}


def processes(folder: Path, first: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """With which status each process that measured ended, and the cases in its file then."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN.format(first=first), str(folder)],
        cwd=SCRIPTS, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = [line.removeprefix("now: ") for line in ran.stdout.splitlines() if line.startswith("now: ")]
    return [(status, cases) for status, cases in map(json.loads, said)]


def short(case: dict[str, Any]) -> dict[str, str]:
    return {name: entry.get("status", "us") for name, entry in case["contenders"].items()}


def test_what_ends_the_process_is_begun_once(tmp_path: Path) -> None:
    begun, again, whole = processes(tmp_path, "contenders")
    first = [{"moedraft": "us", "theirs": "begun"}, {"moedraft": "us"}]
    assert (begun[0], [short(case) for case in begun[1]]) == (9, first)
    assert again[0] == 9  # in the second case
    assert (whole[0], [short(case) for case in whole[1]]) == (0, [US, US])
    assert [case["left"] for case in whole[1]] == [0, 0]


def test_data_whose_making_ends_the_process_is_begun_once(tmp_path: Path) -> None:
    begun, _, whole = processes(tmp_path, "end")
    assert begun[1][0]["contenders"] == {"data": {"status": "begun"}}
    assert (whole[0], [short(case) for case in whole[1]]) == (0, [{"data": "failed: did not return"}, US])


@pytest.fixture
def case() -> ModuleType:
    return load_script("kernel_case")


def contender(case: ModuleType, **how: Any) -> dict[str, Any]:
    """What is found of one on a CPU."""
    bench = load_script("kernel_timing").Bench(
        device="cpu", cuda=False, seconds=0.0, cold_bytes=0, dtype=torch.float32, vocab=96, vocabs=(),
        batches=(1,), rows=8,
    )  # fmt: skip
    make: Callable[[], Any] = how.pop("make", lambda: [lambda: torch.zeros(4)])
    found: dict[str, Any] = case.run_contender(case.Contender(make, **how), bench)
    return found


def test_a_package_that_is_there_by_now_is_measured(
    case: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Any:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    entry = contender(case, make=absent)
    assert entry == {
        "status": "not installed: No module named 'no_such_package'",
        "missing": "no_such_package",
    }
    assert not case.failed(entry)
    known = {"contenders": {"ours": {"us": 1.0}, "theirs": dict(entry)}, "waiting": [], "left": 0}
    case.settle_case(known)
    assert (list(known["contenders"]), known["left"]) == (["ours", "theirs"], 0)  # type: ignore[call-overload]
    monkeypatch.setattr(case, "find_spec", lambda name: name == "no_such_package")
    case.settle_case(known)
    assert (list(known["contenders"]), known["left"]) == (["ours"], 1)  # type: ignore[call-overload]


def test_versions_are_those_that_were_installed(no_peers: None) -> None:
    found = load_script("bench_kernels").versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["vllm"] == "not installed"


def test_facts_that_fail_leave_the_times(case: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def facts() -> dict[str, Any]:
        raise ValueError("no facts")

    entry = contender(case, facts=facts)
    assert entry["facts"] == {"status": "failed: ValueError: no facts"}
    assert entry["us"] > 0
    assert "status" not in entry
    assert case.failed(entry)  # what it did to the device is not known
    assert contender(case, facts=lambda: {"rows": 3})["rows"] == 3
