"""Threads that work beside the engine compute alone and take nothing from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moedraft.cpu.threads import compute_alone


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """PyTorch's number of threads is 2 in the test, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_new_thread() -> int:
    """The number of threads that a thread which begins now computes with."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_pool_computes_alone() -> None:
    with ThreadPoolExecutor(1, initializer=compute_alone) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        pool.submit(torch.ones, 8).result()
        assert pool.submit(torch.get_num_threads).result() == 1


def test_other_threads_keep_their_number() -> None:
    ready, ask = threading.Event(), threading.Event()
    seen: list[int] = []

    def older() -> None:
        torch.get_num_threads()
        ready.set()
        ask.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=older)
    thread.start()
    ready.wait()
    with ThreadPoolExecutor(1, initializer=compute_alone) as pool:
        pool.submit(torch.get_num_threads).result()
    ask.set()
    thread.join()
    assert seen == [2]
    assert torch.get_num_threads() == 2
    assert in_new_thread() == 2
