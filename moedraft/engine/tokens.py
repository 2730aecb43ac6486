"""A prompt as the target's token ids, checked and, where asked for, truncated."""

from __future__ import annotations

from typing import Any

from moedraft.core import InvalidRequest, PromptTooLong


def token_ids_of(
    prompt: str | list[int], tokenizer: Any, vocab_size: int, room: int, *, truncate: bool
) -> list[int]:
    """At most `room` token ids of the prompt, from its end where it is truncated.

    Raises InvalidRequest for a prompt that is empty or has ids outside the vocabulary, PromptTooLong.
    """
    if isinstance(prompt, str) and not prompt.strip():
        raise InvalidRequest("the prompt is empty.")
    ids = list(tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise InvalidRequest("the prompt is empty or has token ids outside the vocabulary.")
    if len(ids) <= room:
        return ids
    if not truncate:
        sentence = f"the prompt has {len(ids)} tokens and the context takes {room}; "
        raise PromptTooLong(f"{sentence}shorten it or set long_prompts to 'truncate'.")
    begins = isinstance(prompt, str) and ids[0] == getattr(tokenizer, "bos_token_id", None)
    head = ids[:1] if begins and room > 1 else []  # models need the mark of a beginning
    return [*head, *ids[len(head) - room :]]
