"""From a prompt to token ids: through the chat template that an instruct model comes with, or as it is.

An instruct model that is asked without its template does not know that it is asked: it goes on with the text.
"""

from __future__ import annotations

from typing import Any

from moedraft.core import InvalidRequest


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Of a text: as a user's only message where `chat` is wished and the tokenizer has a template."""
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
