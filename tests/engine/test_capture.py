"""The target's top-k, gone through in batches: the same numbers whoever does it, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moedraft.engine import capture as capture_module
from moedraft.engine.capture import Capture, LogitStack

VOCAB, K = 50, 4
RNG = torch.Generator().manual_seed(0)


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=RNG)


def expected(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = rows.float().log_softmax(-1).topk(K, dim=-1)
    return ids, values


@pytest.fixture(params=[False, True], ids=["inline", "beside"])
def capture(request: pytest.FixtureRequest) -> Iterator[Capture]:
    made = Capture(K)
    if request.param:
        made.work_beside()
        made.work_beside()  # once is enough
    yield made
    made.close()
    made.close()
    assert not any("capture" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("batch_bytes", [1, 3000, 10**9])
def test_each_row_gets_its_own_whenever_it_asks(
    capture: Capture, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "BATCH_BYTES", batch_bytes)
    kept, wanted = [], []
    for number in range(40):
        counts = [1 + (number + row) % 3 for row in range(1 + number % 4)]
        rows = logits(sum(counts))
        for top, part in zip(capture.stack(rows.clone(), counts), torch.split(rows, counts), strict=True):
            kept.append(top)
            wanted.append(part)
        if number % 7 == 3:
            kept[-1].top()  # one that ends in the middle of a batch
    for top, part in zip(kept, wanted, strict=True):
        ids, logprobs = top.top()
        assert torch.equal(ids, expected(part)[0])
        torch.testing.assert_close(logprobs, expected(part)[1])


def test_a_small_vocabulary_and_half_precision() -> None:
    [top] = Capture(200).stack(logits(3).bfloat16(), [3])
    ids, logprobs = top.top()
    assert (ids.shape, logprobs.shape, logprobs.dtype) == ((3, VOCAB), (3, VOCAB), torch.float32)
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(3))


def test_logits_are_let_go_of(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two stacks of them wait, however slow the thread is that searches them."""
    monkeypatch.setattr(capture_module, "BATCH_BYTES", 4 * 10 * VOCAB * 4)  # four rounds
    batches: set[LogitStack] = set()
    for _ in range(40):
        [top] = capture.stack(logits(10), [10])
        batches.add(top.stack)
        assert sum(not batch.searched for batch in batches) <= 2
    assert len(batches) == 10


def test_the_engine_does_not_wait_for_a_batch_that_is_gone_through() -> None:
    batch = LogitStack(K)
    assert batch.add(logits(2)) == 0
    assert batch.add(logits(3)) == 2
    with batch._lock:  # as while another thread goes through it
        assert batch.add(logits(1)) is None
    batch.top()
    assert batch.add(logits(1)) is None


def test_many_ask_at_once() -> None:
    capture = Capture(K)
    rows = logits(64)
    kept = capture.stack(rows.clone(), [1] * 64)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda top: top.top()[0], kept))
    assert torch.equal(torch.cat(found), expected(rows)[0])
