"""Checks what a request brings, and turns its prompt into token ids that the engine can take."""

from __future__ import annotations

from typing import Any

from moedraft.chat import prompt_ids
from moedraft.core import InvalidRequest, PromptTooLong, SamplingParams


def check_request(request_id: object, prompt: object, params: object, expert: object) -> None:
    """InvalidRequest where one of them is not of its type; what they mean is looked at elsewhere."""
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequest("a request id must be a string that is not empty.")
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"sampling parameters must be SamplingParams, not {type(params).__name__}.")
    if expert is not None and not isinstance(expert, str):
        raise InvalidRequest("an expert is chosen by its name, a string.")
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            sentence = "the prompt is not valid Unicode text: it holds half a surrogate pair."
            raise InvalidRequest(sentence) from error
    elif not isinstance(prompt, list | tuple) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in prompt
    ):
        raise InvalidRequest("the prompt must be a string or a list of token ids (whole numbers).")


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
