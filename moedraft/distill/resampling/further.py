"""Further answers of the target to what it was asked before: more of a domain's text to learn from.

What an expert can learn is limited by how many answers have come, not by time. So in spare time the trainer's
own copy of the target answers the prompts of replay records once more, sampled, and an update learns from one
of a prompt's answers each time it comes to it. At each token the target's own distribution teaches, as in the
answer that was served.

They are in memory only, answer prompts that are trained on and never those that are held out, and are used
only where their record is.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from moedraft.core import ReplayRecord
from moedraft.distill.resampling.drawing import Asked, Resampled, answers
from moedraft.models import LanguageModel

WARM = (1.0, 0.7)  # temperatures at which a greedy answer is given once more, in turns
LONGEST = 256  # tokens of a further answer
AT_ONCE = 64  # records for which one update asks, at most
LIMIT = 128 * 2**20  # bytes that are kept

Key = tuple[float, tuple[int, ...]]  # temperature and prompt of a record


class Further(Protocol):
    """Where a trainer has further answers from."""

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        """Have answers for these records, of which the first are the most urgent."""

    def of(self, record: ReplayRecord) -> Sequence[ReplayRecord]:
        """The record with each of the further answers to its prompt that are there, under no id."""

    def forget(self) -> None:
        """Drop all: to be called after records were purged."""


class NoFurther:
    """There are none."""

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        pass

    def of(self, record: ReplayRecord) -> Sequence[ReplayRecord]:
        return ()

    def forget(self) -> None:
        pass


class FurtherAnswers:
    """Those that a copy of the target gives."""

    def __init__(self, target: LanguageModel, count: int, limit_bytes: int = LIMIT) -> None:
        """count: answers to a prompt beside the one that was served."""
        self.target, self.count, self.limit_bytes = target, count, limit_bytes
        self.bytes = 0  # kept now
        self._chance = torch.Generator(target.device).manual_seed(0)
        self._known: OrderedDict[Key, list[Resampled]] = (
            OrderedDict()
        )  # what was used longest ago comes first

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        """See `Further`. Asks for AT_ONCE records at most; the others have to wait for a later update."""
        missing = {_key(one): one for one in records[::-1] if one.topk_ids and _key(one) not in self._known}
        chosen = dict([*missing.items()][::-1][:AT_ONCE])
        asked = [
            Asked(key[1], min(len(one.topk_ids), LONGEST), warmth, len(one.topk_ids[0]))
            for key, one in chosen.items()
            for warmth in warmths(one.temperature, self.count)
        ]
        keys = {key[1]: key for key in chosen}
        found: dict[Key, list[Resampled]] = {key: [] for key in chosen}
        for one, answer in answers(self.target, asked, self._chance, on_token):
            found[keys[one.prompt]].append(answer)
        for key, some in found.items():
            self._keep(key, some)

    def of(self, record: ReplayRecord) -> Sequence[ReplayRecord]:
        """See `Further`."""
        key = _key(record)
        if key not in self._known:
            return ()
        self._known.move_to_end(key)
        return [_with(record, answer) for answer in self._known[key]]

    def forget(self) -> None:
        """See `Further`."""
        self._known.clear()
        self.bytes = 0

    def _keep(self, key: Key, some: list[Resampled]) -> None:
        self._known[key] = some
        self.bytes += sum(answer.bytes for answer in some)
        while self.bytes > self.limit_bytes and self._known:
            _, oldest = self._known.popitem(last=False)
            self.bytes -= sum(answer.bytes for answer in oldest)


def one_of(record: ReplayRecord, further: Further, rng: random.Random) -> ReplayRecord:
    """The record, or the same with a further answer; each is as likely as the others."""
    return rng.choice([record, *further.of(record)])


def _key(record: ReplayRecord) -> Key:
    return record.temperature, tuple(record.token_ids[: record.num_prompt_tokens])


def warmths(temperature: float, count: int) -> list[float]:
    """What was sampled is sampled again as it was; what was greedy, at temperatures in turns."""
    return [temperature or WARM[i % len(WARM)] for i in range(count)]


def _with(record: ReplayRecord, answer: Resampled) -> ReplayRecord:
    """The record with another answer: without an id, since what is kept under it belongs to its own."""
    prompt = record.token_ids[: record.num_prompt_tokens]
    return replace(
        record,
        token_ids=[*prompt, *answer.tokens.tolist()],
        topk_ids=answer.topk_ids.tolist(),
        topk_logprobs=answer.topk_logprobs.tolist(),
        rejected=[],
        drafted=0,
        accepted=0,
        id=0,
    )
