"""From a prompt to token ids and back: through the chat template of an instruct model, or as it is.

An instruct model that is asked without its template does not know that it is asked: it goes on with the text.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from moedraft.core import InvalidRequest


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Token ids of a text; with `chat`, as a user's only message, where the tokenizer has a template."""
    if chat and has_template(tokenizer):
        return message_ids(tokenizer, [{"role": "user", "content": prompt}])
    return list(tokenizer(prompt)["input_ids"])


def message_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Of a conversation, up to where the assistant begins. Raises InvalidRequest where the template does."""
    try:
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as error:  # the template's own: it may refuse what it likes, in Jinja
        raise InvalidRequest("the chat template of the model refuses these messages.") from error


def asked_text(tokenizer: Any, ids: list[int]) -> str:
    """What the user wrote last in a prompt of these tokens, as far as the template lets that be told."""
    opening, closing = _marks(tokenizer) if has_template(tokenizer) else ("", "")
    if not opening:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
    return str(tokenizer.decode(ids)).removesuffix(closing).rpartition(opening)[2].strip()


def _marks(tokenizer: Any) -> tuple[str, str]:
    """What the template puts before each message of a user, and behind the last one; "" if unknown."""
    said = [f"{word}{word}" for word in ("alpha", "beta", "gamma")]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    try:
        whole = str(tokenizer.decode(message_ids(tokenizer, messages)))
    except InvalidRequest:
        return "", ""
    if not all(text in whole for text in said):
        return "", ""
    first, second = whole.partition(said[0])[0], whole.partition(said[1])[2].partition(said[2])[0]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(first), reversed(second), strict=False))
    opening = "".join(letter for letter, _ in alike)[::-1]
    return opening, whole.rpartition(said[2])[2]
