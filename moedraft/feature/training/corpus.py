"""From prompts to what a drafter learns from: the target's own answers, or answers that are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moedraft.chat import prompt_ids
from moedraft.core import InvalidRequest
from moedraft.feature.vocabulary import ANSWER_WEIGHT
from moedraft.loading.checks import greedy_answers
from moedraft.models import LanguageModel


@dataclass(frozen=True)
class TrainingText:
    """A prompt with its answer, as the target reads them."""

    token_ids: list[int]
    num_prompt_tokens: int
    is_given: bool = False  # its answer is not the target's own


def asked(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as a user's message, where the tokenizer has a chat template. Raises InvalidRequest."""
    ids = prompt_ids(tokenizer, prompt, chat=True)
    if not ids:
        raise InvalidRequest("a prompt without any token cannot be trained on.")
    return ids


def given(model: LanguageModel, prompt: str, answer: str, longest: int) -> TrainingText:
    """A text whose answer is known; cut after `longest` tokens."""
    before = asked(model.tokenizer, prompt)
    after = model.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ends = sorted(model.eos_token_ids)[:1]
    return TrainingText([*before, *after, *ends][:longest], min(len(before), longest), is_given=True)


def answered(
    model: LanguageModel, prompts: list[list[int]], max_tokens: int, rows: int = 32
) -> list[TrainingText]:
    """Have the target answer, greedily, in batches of prompts of like length; in the prompts' order.

    A prompt that leaves less than `max_tokens` of the context is answered alone.
    """
    texts: dict[int, TrainingText] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    while order:
        fit = [i for i in order[:rows] if len(prompts[i]) + max_tokens <= model.max_len]
        chosen = fit or order[:1]
        order = order[len(chosen) :]
        answers = greedy_answers(model, [prompts[i] for i in chosen], max_tokens)
        for i, answer in zip(chosen, answers, strict=True):
            texts[i] = TrainingText(prompts[i] + answer, len(prompts[i]))
    return [texts[i] for i in range(len(prompts))]


def choose_vocabulary(
    texts: list[TrainingText], size: int, vocab_size: int, always: Iterable[int] = ()
) -> torch.Tensor:
    """The `size` most frequent tokens, int64, ascending; those of answers count most, `always` are in.

    Where the texts have fewer, the lowest ids fill up: in a byte-pair vocabulary these are the commonest.
    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.token_ids[: text.num_prompt_tokens])
        for token in text.token_ids[text.num_prompt_tokens :]:
            counts[token] += ANSWER_WEIGHT
    sure = set(always)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in sure, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]))
