"""Converts between text and tokens for HTTP: chat templates, prompt lengths, single tokens.

Works on its own copy of the tokenizer, so that two threads never use the engine's. Does not know the engine.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from moedraft.chat import has_template, message_ids
from moedraft.core import PromptTooLong
from moedraft.serve.http.schema import ChatMessage

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# bytes that GPT-2's vocabulary writes as the character itself
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
# the others are written as characters from U+0100 on
UNPRINTED = (byte for byte in range(256) if byte not in PRINTED)
BYTE_OF = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(UNPRINTED)}


class Piece(NamedTuple):
    """The bytes of one token, which may be only a part of a character."""

    data: bytes
    shown: bool = True  # special tokens are left out of the text

    @property
    def text(self) -> str:
        """As OpenAI spells it: what is no whole text byte by byte, "bytes:\\xe6\\x97"."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class Prompts:
    """Prepares prompts. `limit` is the most tokens a prompt may have; None: as many as the engine accepts."""

    def __init__(self, tokenizer: Any, limit: int | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limit = limit
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._spelt = spelling_of(tokenizer)
        self.piece = lru_cache(maxsize=65536)(self._piece)

    async def check(self, prompt: str | list[int]) -> None:
        """Raises InvalidRequest for too many tokens. A long text is counted in another thread."""
        if self._limit is None:
            return
        # A text has at most as many tokens as bytes, apart from a few special tokens.
        if isinstance(prompt, str) and len(prompt.encode()) + 8 > self._limit:
            count = await asyncio.to_thread(self._count, prompt)
        else:
            count = 0 if isinstance(prompt, str) else len(prompt)
        if count > self._limit:
            raise PromptTooLong(f"the prompt has {count} tokens; at most {self._limit} are taken.")

    async def chat(self, messages: Sequence[ChatMessage]) -> str | list[int]:
        """A conversation as a prompt: token ids by the tokenizer's chat template, or text if it has none."""
        if not has_template(self._tokenizer):
            return plain_chat(messages)
        # other templates would drop a message of this role
        knows = "developer" in str(self._tokenizer.chat_template)
        roles = [message.role if knows or message.role != "developer" else "system" for message in messages]
        rows = [{"role": r, "content": message.text} for r, message in zip(roles, messages, strict=True)]
        return await asyncio.to_thread(message_ids, self._tokenizer, rows)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])

    def _piece(self, token: int) -> Piece:
        if (added := self._added.get(token)) is not None:
            return Piece(added.content.encode(), not added.special)
        spelt = self._tokenizer.convert_ids_to_tokens(token) if self._spelt else None
        data = self._spelt(spelt) if self._spelt and isinstance(spelt, str) else None
        return Piece(self._tokenizer.decode([token]).encode(errors="replace") if data is None else data)


def spelling_of(tokenizer: Any) -> Callable[[str], bytes | None] | None:
    """The function that turns a vocabulary entry into bytes; None if only the tokenizer can decode it."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    kinds = set(re.findall(r'"type":"(\w+)"', decoder.__getstate__().decode())) if decoder else set()
    if "ByteLevel" in kinds:
        return _of_letters
    return _of_words if kinds & {"ByteFallback", "Metaspace"} else None


def _of_letters(token: str) -> bytes | None:
    return bytes(BYTE_OF[letter] for letter in token) if all(letter in BYTE_OF for letter in token) else None


def _of_words(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def plain_chat(messages: Sequence[ChatMessage]) -> str:
    """The prompt for a conversation if the tokenizer has no chat template.

    A single message of the user is the prompt itself. A longer conversation is written as `Role: text`, with
    an empty line between messages, and ends with `Assistant:`.
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].text
    said = [f"{message.role.capitalize()}: {message.text}" for message in messages]
    return "\n\n".join([*said, "Assistant:"])
