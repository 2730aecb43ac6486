"""From prompts to what a drafter learns from: the target's own answers, or answers that are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from moedraft.chat import prompt_ids
from moedraft.core import InvalidRequest
from moedraft.models import LanguageModel

ANSWER_WEIGHT = 8  # of an answer's token beside a prompt's, when the draft vocabulary is counted


@dataclass(frozen=True)
class TrainingText:
    """A prompt with its answer, as the target reads them."""

    token_ids: list[int]
    num_prompt_tokens: int


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
    return TrainingText([*before, *after, *ends][:longest], min(len(before), longest))


def answered(
    model: LanguageModel,
    prompts: list[list[int]],
    max_tokens: int,
    rows: int = 32,
    on_batch: Callable[[int], None] = lambda count: None,
) -> list[TrainingText]:
    """Have the target answer, greedily, in batches of prompts of like length; in the prompts' order."""
    texts: dict[int, TrainingText] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), rows):
        chosen = order[first : first + rows]
        for i, answer in zip(
            chosen, answer_batch(model, [prompts[i] for i in chosen], max_tokens), strict=True
        ):
            texts[i] = TrainingText(prompts[i] + answer, len(prompts[i]))
        on_batch(len(chosen))
    return [texts[i] for i in range(len(prompts))]


@torch.inference_mode()
def answer_batch(model: LanguageModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers, with the token that ends each."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ends = model.eos_token_ids
    made = model.hf.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=min(ends) if ends else 0,
    )
    return [until_end(row, ends) for row in made[:, width:].tolist()]


def until_end(tokens: list[int], ends: Iterable[int]) -> list[int]:
    """Up to and with the first token that ends an answer."""
    stops = [i for i, token in enumerate(tokens) if token in set(ends)]
    return tokens[: stops[0] + 1] if stops else tokens


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
