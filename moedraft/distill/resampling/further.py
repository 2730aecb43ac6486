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
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch

from moedraft.core import ReplayRecord
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.resampling.drawing import Asked, Resampled, answers
from moedraft.models import LanguageModel

WARM = (1.0, 0.7)  # temperatures at which a greedy answer is given once more, in turns
# Tokens of a further answer: as many as were served, but no fewer and no more than these.
SHORTEST, LONGEST = 64, 256
LEAST = 2  # tokens of one that is learned from; the first is never guessed from the target's states
AT_ONCE = 32  # records for which one update asks, at most
LIMIT = 128 * 2**20  # bytes that are kept
OF_A_TOKEN = 40  # bytes of a prompt's token in a key, about

Key = tuple[float, tuple[int, ...]]  # temperature, 1 at most, and prompt of a record


class Further(Protocol):
    """Where a trainer has further answers from."""

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        """Have answers for these records, of which the first are the most urgent."""

    def count(self, record: ReplayRecord) -> int:
        """How many further answers to its prompt there are."""

    def get(self, record: ReplayRecord, number: int) -> ReplayRecord:
        """The record with that answer; without its id, which names states of the served answer."""

    def forget(self) -> None:
        """Drop all: to be called after records were purged."""


class NoFurther:
    """For a trainer that learns from the served answers alone."""

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        pass

    def count(self, record: ReplayRecord) -> int:
        return 0

    def get(self, record: ReplayRecord, number: int) -> ReplayRecord:
        raise IndexError(number)

    def forget(self) -> None:
        pass


class FurtherAnswers:
    """Further answers that a copy of the target gives when an update asks for them."""

    def __init__(
        self, target: LanguageModel, wanted: int, states: RecordStates | None = None, limit_bytes: int = LIMIT
    ) -> None:
        """wanted: answers to a prompt beside the one that was served. states: take what was read for them."""
        self.target, self.wanted, self.limit_bytes, self.states = target, wanted, limit_bytes, states
        self.bytes = 0  # kept now
        self._chance = torch.Generator(target.device).manual_seed(0)
        self._known = OrderedDict[Key, list[Resampled]]()  # what was used longest ago comes first

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        """See `Further`. Asks for AT_ONCE records at most; the others have to wait for a later update."""
        missing: dict[Key, ReplayRecord] = {}
        for record in records:
            if record.topk_ids and _key(record) not in self._known:
                missing.setdefault(_key(record), record)
        keys, asked = list[Key](), list[Asked]()
        for key, record in islice(missing.items(), AT_ONCE):
            most = min(max(len(record.topk_ids), SHORTEST), LONGEST)
            for warmth in warmths(record.temperature, self.wanted):
                keys.append(key)
                asked.append(Asked(key[1], most, warmth, len(record.topk_ids[0])))
        left = Counter(keys)
        found: dict[Key, list[Resampled]] = {key: [] for key in left}
        layers = self.states.layers if self.states is not None else ()
        for number, answer, read in answers(self.target, asked, self._chance, on_token, layers):
            key = keys[number]
            if self.states is not None and layers:
                self.states.take((*key[1], *answer.tokens.tolist()), read)
            left[key] -= 1
            if len(answer.tokens) >= LEAST:
                found[key].append(answer)
            if not left[key]:
                self._keep(key, found.pop(key))
        for key, some in found.items():  # there is no room for an answer
            self._keep(key, some)

    def count(self, record: ReplayRecord) -> int:
        """See `Further`."""
        return len(self._known.get(_key(record), ()))

    def get(self, record: ReplayRecord, number: int) -> ReplayRecord:
        """See `Further`."""
        key = _key(record)
        answer = self._known[key][number]
        self._known.move_to_end(key)
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

    def forget(self) -> None:
        """See `Further`."""
        self._known.clear()
        self.bytes = 0

    def _keep(self, key: Key, some: list[Resampled]) -> None:
        self._known[key] = some
        self.bytes += _size(key, some)
        while self.bytes > self.limit_bytes and self._known:
            self.bytes -= _size(*self._known.popitem(last=False))


def with_further(records: Iterable[ReplayRecord], further: Further) -> Iterator[ReplayRecord]:
    """Each record, and after it the same with each further answer to its prompt."""
    for record in records:
        yield record
        for number in range(further.count(record)):
            yield further.get(record, number)


def one_of(record: ReplayRecord, further: Further, rng: random.Random) -> ReplayRecord:
    """The record, or the same with a further answer; each is as likely as the others."""
    number = rng.randrange(further.count(record) + 1)
    return further.get(record, number - 1) if number else record


def warmths(temperature: float, count: int) -> list[float]:
    """What was sampled is sampled again as it was; what was greedy, at temperatures in turns.

    Nothing is sampled above 1, where a model says what is hardly likely, and without the request's top-k,
    top-p or min-p, which no record tells.
    """
    return [min(temperature, 1.0) or WARM[i % len(WARM)] for i in range(count)]


def _key(record: ReplayRecord) -> Key:
    return min(record.temperature, 1.0), tuple(record.token_ids[: record.num_prompt_tokens])


def _size(key: Key, some: Sequence[Resampled]) -> int:
    return OF_A_TOKEN * (len(key[1]) + 10) + sum(answer.bytes for answer in some)
