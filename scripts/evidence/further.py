"""Further answers to the requests, each computed once and kept in a folder, where a trainer draws its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from evidence.answers import Answers
from moedraft.core import ReplayRecord
from moedraft.distill.resampling.further import LEAST, WARM, warmths


class KeptFurther:
    """See `moedraft.distill.resampling.further.Further`."""

    def __init__(self, answers: Answers, wanted: int) -> None:
        """answers: those that are served. wanted: further answers to each prompt."""
        self.served = answers
        self.more = [
            Answers(
                answers.target,
                answers.states,
                answers.folder,
                answers.max_tokens,
                warmth,
                answers.topk,
                # Answers that are sampled are served themselves: another draw than theirs.
                i // len(WARM) if not answers.temperature else i + 1,
            )
            for i, warmth in enumerate(warmths(answers.temperature, wanted))
        ]
        self._found: dict[tuple[int, ...], list[ReplayRecord]] = {}  # by prompt

    def prepare(self, records: Sequence[ReplayRecord], on_token: Callable[[], None]) -> None:
        """See `Further`."""
        prompts = {tuple(one.token_ids[: one.num_prompt_tokens]) for one in records} - self._found.keys()
        each = [one.to([list(prompt) for prompt in prompts]) for one in self.more]
        for prompt, *found in zip(prompts, *each, strict=True):
            self._found[prompt] = [one for one in found if len(one.topk_ids) >= LEAST]
        for one in self.more:
            self.served.know(one)

    def count(self, record: ReplayRecord) -> int:
        """See `Further`."""
        return len(self._of(record))

    def get(self, record: ReplayRecord, number: int) -> ReplayRecord:
        """See `Further`."""
        parts = "token_ids", "topk_ids", "topk_logprobs"
        one = self._of(record)[number]
        return replace(record, id=0, **{part: getattr(one, part) for part in parts})

    def _of(self, record: ReplayRecord) -> Sequence[ReplayRecord]:
        return self._found.get(tuple(record.token_ids[: record.num_prompt_tokens]), ())

    def forget(self) -> None:
        """Do nothing: no record of these homes is ever purged."""
