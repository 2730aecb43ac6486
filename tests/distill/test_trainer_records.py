"""What an update reads, what it keeps in memory, and that it says that it lives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_rig import Rig, record

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.single.trainer import Trainer
from moedraft.distill.text.batches import RecordBatch, grouped, shuffled_groups
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import TARGET_ID

from random_models import random_model

LENGTH = len(record(0).token_ids)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    yield rig
    rig.store.close()


def trainer_of(rig: Rig, tokens_per_step: int) -> Trainer:
    draft = random_model("llama", 1, layers=2)
    return Trainer(draft, rig.store, rank=4, shared_rank=4, steps=2, tokens_per_step=tokens_per_step)


def records_of(trainer: Trainer, expert: str, steps: int) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    return trainer.draw(expert, steps, lambda: None)


@pytest.mark.parametrize("expert", [SHARED, "code"])
def test_the_records_of_the_present_target_are_found_among_many_others(rig: Rig, expert: str) -> None:
    rig.store.replay.add([record(n, target_id="old") for n in range(1000)])
    rig.store.replay.add([record(2000 + n, target_id="new") for n in range(16)])
    rig.store.registry.set_meta(TARGET_ID, "new")
    train, held_out = records_of(trainer_of(rig, 512), expert, 16)
    assert len(train) + len(held_out) == 16
    assert train
    rig.store.registry.set_meta(TARGET_ID, None)  # before any engine opened the home
    assert {one.target_id for one in records_of(trainer_of(rig, 512), expert, 16)[0]} == {"old", "new"}


def test_no_more_is_read_than_the_steps_can_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store.replay.add([record(n) for n in range(600)])
    sample, read = rig.store.replay.sample, list[ReplayRecord]()

    def counted(*args: Any) -> Iterator[ReplayRecord]:
        for one in sample(*args):
            read.append(one)
            yield one

    monkeypatch.setattr(rig.store.replay, "sample", counted)
    trainer = trainer_of(rig, 4 * LENGTH)
    train, held_out = records_of(trainer, "code", 2)
    assert len(train) == len(held_out) == 8
    assert len(read) < 300
    assert not any(is_held_out(one) for one in train)
    assert all(is_held_out(one) for one in held_out)
    groups = shuffled_groups(train, 2, trainer.tokens_per_step, seed=1)
    assert sum(map(len, groups)) == 8  # they are all used, and once
    train, held_out = records_of(trainer, "code", 1000)
    assert len(train) > 400
    assert len(held_out) == 32


@pytest.mark.parametrize("expert", [SHARED, "code"])
def test_what_is_asked_again_and_again_teaches_and_measures_once(rig: Rig, expert: str) -> None:
    rig.store.replay.add([record(n % 20) for n in range(200)])
    train, held_out = records_of(trainer_of(rig, 512), expert, 16)
    assert sorted(one.token_ids for one in [*train, *held_out]) == [record(n).token_ids for n in range(20)]


def test_measuring_takes_no_more_memory_than_learning(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve("code", 40, seed=1)
    held_out = [one for one in rig.store.replay.records("code") if is_held_out(one)]
    assert len(held_out) >= 3

    def measure(tokens: int) -> tuple[float | None, int]:
        trainer, largest = trainer_of(rig, tokens), 0
        trainer.student.activate("code")
        logits = trainer.student.logits

        def watched(batch: RecordBatch) -> torch.Tensor:
            nonlocal largest
            largest = max(largest, batch.token_ids.numel())
            return logits(batch)

        monkeypatch.setattr(trainer.student, "logits", watched)
        return trainer.measure(held_out, lambda: None), largest

    (small, few), (large, many) = measure(80), measure(10_000)
    assert few <= 80 < many
    assert small == large is not None


def test_every_batch_is_a_sign_of_life(rig: Rig) -> None:
    """Between any two batches, learning or measuring, and while records are read; never within one."""
    rig.serve("code", 40, seed=1)
    trainer, events = trainer_of(rig, 80), list[Any]()
    assert trainer.student._ends_there()  # its own forward of a few tokens is not a batch
    trainer.student.draft.hf.register_forward_pre_hook(lambda *_: events.append("batch"))
    update = trainer.update("code", on_step=lambda done, loss: events.append((done, loss)))
    assert update is not None
    first = events.index("batch")
    assert first > 8
    assert set(events[:first]) == {(0, None)}
    batches, signs = events[first::2], events[first + 1 :: 2]
    assert set(batches) == {"batch"}
    measured = (len(signs) - 2) // 2
    assert measured >= 2
    assert [done for done, _ in signs] == [0] * measured + [1] + [2] * (1 + measured)
    assert [loss for _, loss in signs][measured + 1 :] == [update.loss] * (1 + measured)


def test_a_long_record_does_not_thin_out_the_batches_after_it() -> None:
    long = replace(record(0), token_ids=[1] * (4 * LENGTH), topk_ids=[[1]] * (4 * LENGTH - 10))
    batches = grouped([long, *(record(n) for n in range(1, 9))], 4 * LENGTH)
    assert list(map(len, batches)) == [1, 4, 4]
