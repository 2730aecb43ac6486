"""What the kernel benchmark takes a call's time in a graph to be, and which times the targets are held to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scripts_loader import load_script


class Clock:
    """Stands for a device on which each call of a graph takes 5 µs, and for the time that events read."""

    now, building = 0.0, 0

    def call(self) -> None:
        self.building += 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The sizes of the graphs that are made."""
        sizes: list[int] = []
        clock = self

        class Built:
            def replay(self) -> None:
                clock.now += 5e-6 * sizes[-1]

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now

            def elapsed_time(self, later: Event) -> float:
                return (later.at - self.at) * 1e3

        @contextmanager
        def capture(graph: Built) -> Iterator[None]:
            clock.building = 0
            yield
            sizes.append(clock.building)

        stubs = {"CUDAGraph": Built, "graph": capture, "Event": Event, "synchronize": lambda: None}
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)
        monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
        return sizes


def test_a_graph_lasts_two_milliseconds_however_slow_python_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often it holds the calls follows from a replay, in which Python has no part."""
    timing, clock = load_script("kernel_timing"), Clock()
    sizes = clock.install(monkeypatch)
    found = timing.time_graph([clock.call] * 3, 0.01)
    assert found["us"] == pytest.approx(5.0)
    assert sizes[0] == 3
    assert 2000 <= 5 * sizes[1] <= 2000 + 5 * 3
    monkeypatch.setattr(timing, "GRAPH_US", 10.0)
    sizes.clear()
    timing.time_graph([clock.call] * 3, 0.01)
    assert sizes == [3]  # long enough as it is


def test_targets_are_looked_up() -> None:
    """Each names one case of the benchmark on a GPU; the time between events is not taken for a graph's."""
    tables, timing = load_script("kernel_tables"), load_script("kernel_timing")
    bench = timing.cuda_bench(quick=False, cache=tables.H200_CACHE)
    cases = [
        {"operation": case.operation, "shape": case.shape}
        for case in load_script("kernel_cases").cases(bench)
    ]
    for target in tables.TARGETS:
        matching = [
            case
            for case in cases
            if target.case.items() <= {"operation": case["operation"], **case["shape"]}.items()
        ]
        assert len(matching) == 1, target.name
        whole = {"us": 70.0, "graph": {"us": 7.0}, "extra_mib": 0.5}
        for entry, value in ((whole, 0.5 if target.memory else 7.0), ({"us": 70.0}, None)):
            report = {"cases": [{**matching[0], "contenders": {"moedraft": entry}}]}
            assert tables.measured(report, target) == value


def test_all_targets_are_measured_before_everything_else() -> None:
    tables, script = load_script("kernel_tables"), load_script("bench_kernels")
    bench = load_script("kernel_timing").cuda_bench(quick=False, cache=tables.H200_CACHE)
    every = load_script("kernel_cases").cases(bench)
    plan = script.planned(every)
    count = sum(map(tables.has_target, every))
    first = [case for number, case in plan[:count] if number == 0]
    assert [case for case in first if tables.has_target(case)] == first
    assert len({case.key for case in first}) == count
    for target in tables.TARGETS:
        said = [{"operation": case.operation, **case.shape} for case in first]
        assert any(target.case.items() <= one.items() for one in said), target.name
    assert not all(map(tables.has_target, every[:count]))  # the control: not by the order of the cases
    assert [number for number, _ in plan] == sorted(number for number, _ in plan)
    assert len(plan) == 3 * len(every)


def test_targets_are_compared_with_their_device(tmp_path: Path) -> None:
    """Another device's report, though newer, stands among the times alone."""
    tables = load_script("kernel_tables")
    target = next(target for target in tables.TARGETS if target.memory)
    shape = {name: value for name, value in target.case.items() if name != "operation"}
    for device, mib in (("NVIDIA H200", 0.25), ("NVIDIA H100", 0.75)):
        case = {"operation": target.case["operation"], "shape": shape}
        case["contenders"] = {"moedraft": {"us": 9.0, "extra_mib": mib}}
        report = {"device": device, "date": f"2026-01-0{mib * 4:.0f}", "quick": False, "cases": [case]}
        (tmp_path / f"kernels-{mib}.json").write_text(json.dumps(report))
    targets, times = tables.tables(tmp_path).split("\n\n| operation | shape")
    assert f"| {target.name} | 1.0 MiB | 0.2 MiB |" in targets
    assert "NVIDIA H200, 2026-01-01" in targets
    assert "NVIDIA H100, 2026-01-03, median time:" in targets + times
    (tmp_path / "kernels-0.25.json").unlink()
    assert "no H200 yet" in tables.tables(tmp_path)
