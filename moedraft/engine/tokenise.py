"""Turns a request's prompt into token ids that the engine can take."""

from __future__ import annotations

from typing import Any

from moedraft.chat import prompt_ids
from moedraft.core import InvalidRequest, PromptTooLong


def tokenise(
    tokenizer: Any,
    prompt: str | list[int],
    ids: list[int] | None = None,
    *,
    chat: bool,
    vocab_size: int,
    room: int,
    truncate: bool,
) -> list[int]:
    """Token ids of a prompt, at most `room`. Raises InvalidRequest for an empty, a wrong or a long one.

    ids: what the tokenizer makes of the prompt, where that is known.
    truncate: of a long one keep the end, and before it the token that marks the beginning of a text (BOS),
    without which models answer badly.
    """
    if isinstance(prompt, str) and not prompt.strip():
        raise InvalidRequest("the prompt is empty.")
    if ids is None:
        ids = prompt_ids(tokenizer, prompt, chat=chat) if isinstance(prompt, str) else prompt
    ids = list(ids)  # of its own: an answer is appended to it
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise InvalidRequest("the prompt is empty or has token ids outside the vocabulary.")
    if len(ids) > room and not truncate:
        sentence = f"the prompt has {len(ids)} tokens and the context takes {room}; "
        raise PromptTooLong(f"{sentence}shorten it or set long_prompts to 'truncate'.")
    begins = isinstance(prompt, str) and ids[0] == getattr(tokenizer, "bos_token_id", None)
    head = ids[:1] if begins and room > 1 else []
    return ids if len(ids) <= room else [*head, *ids[len(head) - room :]]
