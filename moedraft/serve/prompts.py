"""Between text and tokens on the side of HTTP: chat templates, lengths, single tokens. Knows no engine.

Works on a tokenizer of its own, so that the engine's is never used by two threads.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from moedraft.core import InvalidRequest, PromptTooLong
from moedraft.serve.schema import Message


class Prompts:
    """`limit`: the most tokens a prompt may have; None: as many as the engine takes."""

    def __init__(self, tokenizer: Any, limit: int | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limit = limit
        self.token_text = lru_cache(maxsize=65536)(self._token_text)

    async def check(self, prompt: str | list[int]) -> None:
        """Raises InvalidRequest for too many tokens. A long text is counted beside the event loop."""
        if self._limit is None:
            return
        # No tokenizer makes more tokens of a text than it has bytes, give or take the special ones.
        if isinstance(prompt, str) and len(prompt.encode()) + 8 > self._limit:
            count = await asyncio.to_thread(self._count, prompt)
        else:
            count = 0 if isinstance(prompt, str) else len(prompt)
        if count > self._limit:
            raise PromptTooLong(f"the prompt has {count} tokens; at most {self._limit} are taken.")

    async def chat(self, messages: Sequence[Message]) -> str | list[int]:
        """The prompt of a conversation: by the tokenizer's template, as ids, or else by ours, as text."""
        if not getattr(self._tokenizer, "chat_template", None):
            return plain_chat(messages)
        rows = [{"role": message.role, "content": message.text} for message in messages]
        return await asyncio.to_thread(self._templated, rows)

    def _templated(self, rows: list[dict[str, str]]) -> list[int]:
        try:
            ids = self._tokenizer.apply_chat_template(
                rows, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # the template's own: it may refuse what it likes, in Jinja
            raise InvalidRequest("the chat template of the model refuses these messages.") from error
        return list(ids)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def plain_chat(messages: Sequence[Message]) -> str:
    """The prompt for a tokenizer without a chat template.

    A lone message of the user is the prompt, as it is. A longer conversation is written out as
    `Role: text`, the messages apart by an empty line, and ends with `Assistant:`.
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].text
    said = [f"{message.role.capitalize()}: {message.text}" for message in messages]
    return "\n\n".join([*said, "Assistant:"])
