"""The whole kernel benchmark on a CPU, with stubs for CUDA's events and graphs: nothing breaks or is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from device_stub import Device, Event, Graph
from scripts_loader import load_script
from slow_cases import slow

PEERS = {"FlashInfer", "SGLang", "vLLM", "Liger", "speculators"}


class Again(Exception):
    """Stands for the new process that takes over."""


def stand_in(until: float) -> None:
    raise Again


@pytest.fixture
def bench_kernels(monkeypatch: pytest.MonkeyPatch, no_peers: None) -> ModuleType:
    device = Device()
    stubs: dict[str, Any] = {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": device.capture,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 0,
        "max_memory_allocated": lambda: 0,
        "get_device_name": lambda: "Stub",
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(load_script("kernel_timing"), "MIN_SAMPLES", 2)
    monkeypatch.setattr(load_script("kernel_timing"), "GRAPH_US", 0.0)  # a stub's replay takes no time
    script = load_script("bench_kernels")
    monkeypatch.setattr(script, "plot", lambda report, path: None)
    monkeypatch.setattr(script, "begin_again", stand_in)
    monkeypatch.setattr(torch, "randn", device.guarded)
    return script


def tiny() -> Any:
    return load_script("kernel_timing").Bench(
        device="cpu", cuda=True, seconds=0.0, cold_bytes=4000, dtype=torch.float32, vocab=96,
        vocabs=(64, 33), batches=(1, 2, 3), rows=8, top_k=4,
    )  # fmt: skip


def run(script: ModuleType, folder: Path, *more: str) -> dict[str, Any]:
    path = script.main(["--out", str(folder), "--resume", str(folder / "none"), *more], tiny())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_case_runs_and_only_missing_packages_are_named(
    bench_kernels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(bench_kernels, tmp_path, "--tune")
    printed = capsys.readouterr().out
    assert "MB; launches: 2; replaces: softmax, a draw; called by: drafting/drawing.py\n" in printed
    operations = [case["operation"] for case in report["cases"]]
    assert operations[:3] == ["topk divergence", "verify_chain", "verify_chain"]
    assert set(operations) == set(load_script("kernel_case").ABOUT)
    assert len(report["tuning"]) == len(load_script("kernel_cases").TILES) * 5
    for case in report["cases"]:
        assert case["floor_bytes"] > 0
        assert case["data_bytes"] >= tiny().cold_bytes, case["key"]
        for name, entry in case["contenders"].items():
            if "us" in entry:
                waits = name == "PyTorch reference"  # for the device
                wanted = {"host_us", "extra_mib"} | (set() if waits else {"graph"})
                wanted |= set() if case["floor_operations"] else {"share_of_copy"}
                assert wanted <= set(entry), (case["key"], name)
                assert "us" in entry.get("graph", {"us": None}), (case["key"], name, entry)
                assert "status" not in entry, (case["key"], name, entry)
            elif (case["shape"].get("kind"), name) == ("rkl", "Liger (with its log_softmax)"):
                assert entry["status"].startswith("skipped: "), entry
            elif "filtered" in case["operation"] and entry["status"].startswith("skipped: "):
                assert entry["status"].endswith(f"{name} has nothing like {case['operation'].split(',')[0]}")
            else:
                assert entry["status"].startswith("not installed: No module named "), entry
                assert name.split()[0].rstrip(",") in PEERS
        assert "us" in next(iter(case["contenders"].values())), case["key"]
    ours = {case["operation"]: next(iter(case["contenders"].values())) for case in report["cases"]}
    assert all("facts" not in entry for entry in ours.values())
    assert ours["find_cuts"]["rows_kept_unlike"] == 0
    limited = [name for name in operations if name.endswith(", filtered")]
    assert len(set(limited)) == 5
    assert {ours[name]["rows_unlike_float64"] for name in limited} == {0}
    for one in ("verify_chain", "verify_chain, greedy", "verify_block", "sample_draft", "sample_coupled"):
        batches = {case["shape"]["batch"] for case in report["cases"] if case["operation"] == one}
        assert batches == {1, 2, 3}, one
    check_filters([case for case in report["cases"] if case["operation"] == "find_cuts"])


def check_filters(filters: list[dict[str, Any]]) -> None:
    """All sizes of a batch are there, and nobody is compared in what it does not do."""
    assert {case["shape"]["batch"] for case in filters} == {1, 2, 3}
    for case in filters:
        by_rank = case["shape"]["top_k"] > 0
        others = [name for name in case["contenders"] if "moedraft" not in name and "reference" not in name]
        assert others
        assert [("top-k" in name) == by_rank for name in others] == [True] * len(others), others


def after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which the run is broken off at after so many calls."""
    calls = iter(range(count))

    def limited(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return function(*arguments)

    return limited


@pytest.mark.parametrize("most", [5, slow(1000)])
def test_a_run_that_is_broken_off_keeps_its_cases_and_is_gone_on_with(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A run of the first five cases, or of all."""
    every, real = bench_kernels.cases, bench_kernels.run_case
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: every(bench)[:most])
    monkeypatch.setattr(bench_kernels, "run_case", after(2, real))
    with pytest.raises(KeyboardInterrupt):
        run(bench_kernels, tmp_path)
    kept = json.loads((tmp_path / "kernels-stub.json").read_text())["cases"]
    assert len(kept) == 2
    ran: list[tuple[int, str]] = []

    def recorded(case: Any, bench: Any, bandwidth: Any, number: int, *rest: Any) -> Any:
        ran.append((number, case.key))
        return real(case, bench, bandwidth, number, *rest)

    monkeypatch.setattr(bench_kernels, "run_case", recorded)
    report = run(bench_kernels, tmp_path)
    plan = [(number, case.key) for number, case in bench_kernels.planned(every(tiny())[:most])]
    count = len(report["cases"])
    assert ran[: count - 2] == plan[2:count]  # our own
    assert not set(plan[:2]) & set(ran)
    assert len(set(ran)) == len(ran)
    for before, now in zip(kept, report["cases"], strict=False):
        assert before["contenders"].items() <= now["contenders"].items()
        assert set(before["waiting"]) == set(now["contenders"]) - set(before["contenders"])
    assert {case["left"] for case in report["cases"]} == {0}
    ran.clear()
    run(bench_kernels, tmp_path)
    assert ran == []
    monkeypatch.setattr(bench_kernels, "code", lambda: "other code")
    run(bench_kernels, tmp_path, "--minutes", "1e9")
    assert ran[:count] == plan[:count]  # the control: after a change everything is measured again


def test_a_case_that_is_broken_off_keeps_its_contenders(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = made_up("moedraft", "theirs", "last")
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: cases)
    case = load_script("kernel_case")
    real = case.run_contender
    monkeypatch.setattr(case, "run_contender", after(3, real))  # one of ours in each case, then theirs
    with pytest.raises(KeyboardInterrupt):
        run(bench_kernels, tmp_path)
    kept, other = json.loads((tmp_path / "kernels-stub.json").read_text())["cases"]
    assert list(kept["contenders"]) == ["moedraft", "theirs", "last"]
    assert kept["contenders"]["last"] == {"status": "begun"}
    assert (kept["left"], kept["waiting"]) == (1, ["last"])
    assert (list(other["contenders"]), other["waiting"]) == (["moedraft"], ["theirs", "last"])
    monkeypatch.setattr(case, "run_contender", real)
    report = run(bench_kernels, tmp_path)
    assert [list(one["contenders"]) for one in report["cases"]] == [["moedraft", "theirs", "last"]] * 2
    first, second = (one["contenders"] for one in report["cases"])
    assert first == kept["contenders"] | {"last": {"status": "failed: did not return"}}
    assert "us" in second["last"]


def test_no_contender_begins_after_the_time_that_was_given(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the case is measured later, and nothing counts as lost."""
    cases, case = made_up("moedraft", "theirs"), load_script("kernel_case")
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: cases)
    real, now = case.run_contender, [0.0]

    def slow(*arguments: Any) -> Any:
        now[0] += 100
        return real(*arguments)

    monkeypatch.setattr(case, "run_contender", slow)
    monkeypatch.setattr(bench_kernels, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (kept,) = run(bench_kernels, tmp_path, "--minutes", "1")["cases"]
    assert (list(kept["contenders"]), kept["left"]) == (["moedraft"], 1)
    report = run(bench_kernels, tmp_path)
    assert all("us" in entry for one in report["cases"] for entry in one["contenders"].values())


def made_up(*names: str, fails: str = "", made: list[tuple[int, str]] | None = None) -> list[Any]:
    """Two cases of `sample_draft` with these contenders; what is called `fails` cannot be captured.

    made: is told which contender's turn it is, of which batch.
    """
    case = load_script("kernel_case")

    def contender(batch: int, name: str) -> Any:
        def make() -> list[Callable[[], Any]]:
            if made is not None:
                made.append((batch, name))
            wrong = lambda: torch.tensor(1.0, device="cpu")  # noqa: E731
            return [wrong if name == fails else lambda: torch.zeros(4)]

        return case.Contender(make)

    def contenders(batch: int) -> dict[str, Any]:
        torch.randn(3)
        return {name: contender(batch, name) for name in names}

    return [
        case.Case("sample_draft", {"batch": batch}, 100, 100, partial(contenders, batch)) for batch in (1, 2)
    ]


def test_ours_come_first_and_of_them_what_has_a_target(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run is broken off again and again."""
    made: list[tuple[int, str]] = []
    cases = made_up("moedraft", "torch.compile", "theirs", "moedraft after it", made=made)
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: cases)
    monkeypatch.setattr(bench_kernels, "has_target", lambda case: case.shape["batch"] == 2)
    ours = [(batch, name) for batch in (2, 1) for name in ("moedraft", "moedraft after it")]
    order = [*ours, *((batch, name) for name in ("theirs", "torch.compile") for batch in (1, 2))]
    whole = run(bench_kernels, tmp_path / "whole")
    assert made == order
    made.clear()
    for _ in order:
        report = run_for_one(bench_kernels, tmp_path / "parts", monkeypatch)
    assert made == order
    assert [case["key"] for case in report["cases"]] == [case["key"] for case in whole["cases"]]
    assert [case["contenders"].keys() for case in report["cases"]] == [
        case["contenders"].keys() for case in whole["cases"]
    ]


def run_for_one(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run whose time is over when one contender has been measured."""
    case, now = load_script("kernel_case"), [0.0]
    real = case.run_contender

    def slow(*arguments: Any) -> Any:
        now[0] += 100
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(case, "run_contender", slow)
        patch.setattr(script, "time", SimpleNamespace(monotonic=lambda: now[0]))
        return run(script, folder, "--minutes", "1")


def test_after_a_failed_capture_a_new_process_goes_on(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = made_up("moedraft", "theirs", "last", fails="theirs")
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: cases)
    with pytest.raises(Again):
        run(bench_kernels, tmp_path)
    kept, _ = json.loads((tmp_path / "kernels-stub.json").read_text())["cases"]
    assert list(kept["contenders"]) == ["moedraft", "theirs"]
    assert kept["left"] == 1
    assert "us" in kept["contenders"]["theirs"]  # what was found before the capture is kept
    assert "not permitted" in kept["contenders"]["theirs"]["graph"]["status"]
    device = torch.cuda.graph.__self__  # type: ignore[attr-defined]
    assert device.broken
    with pytest.raises(RuntimeError, match="Offset increment"):
        cases[1].contenders()  # the control: this process could not have gone on
    device.broken = False
    with pytest.raises(Again):  # for the second case's capture
        run(bench_kernels, tmp_path)
    device.broken = False
    report = run(bench_kernels, tmp_path)
    assert [list(case["contenders"]) for case in report["cases"]] == [["moedraft", "theirs", "last"]] * 2
    assert report["cases"][0]["contenders"]["moedraft"]["us"] == kept["contenders"]["moedraft"]["us"]


def test_a_case_whose_data_cannot_be_made_is_reported(
    bench_kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = made_up("moedraft")

    def broken() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no room")

    cases = [replace(first, contenders=broken), second]
    monkeypatch.setattr(bench_kernels, "cases", lambda bench: cases)
    with pytest.raises(Again):
        run(bench_kernels, tmp_path)
    report = run(bench_kernels, tmp_path)
    assert report["cases"][0]["contenders"] == {"data": {"status": "failed: OutOfMemoryError: no room"}}
    assert "us" in report["cases"][1]["contenders"]["moedraft"]


def test_a_new_process_has_the_rest_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    script, began = load_script("bench_kernels"), []
    monkeypatch.setattr(script.os, "execv", lambda *command: began.append(command))
    monkeypatch.setattr(script.sys, "orig_argv", ["python", "-u", "bench_kernels.py", "--minutes", "4.5"])
    script.begin_again(time.monotonic() + 60)
    program, command = began[0]
    assert program == sys.executable
    assert command[:5] == sys.orig_argv
    assert 0.7 < script.parse(command[3:]).minutes <= 0.75  # what its start takes is off
    script.begin_again(float("inf"))
    assert began[1][1] == sys.orig_argv


def test_no_case_begins_after_the_time_that_was_given(bench_kernels: ModuleType, tmp_path: Path) -> None:
    assert run(bench_kernels, tmp_path, "--minutes", "-1")["cases"] == []


def test_data_sets_take_several_times_the_cache() -> None:
    timing = load_script("kernel_timing")
    bench = tiny()
    for size in (1, 999, 4000, 10**9):
        assert bench.sets(size) * size >= bench.cold_bytes
        assert bench.sets(size) >= 2
    assert timing.COLD_FACTOR >= 4
