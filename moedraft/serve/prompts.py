"""Between text and tokens on the side of HTTP: chat templates, lengths, single tokens. Knows no engine.

Works on a tokenizer of its own, so that the engine's is never used by two threads.
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
from moedraft.serve.schema import Message

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2 writes as they are
UNPRINTED = (byte for byte in range(256) if byte not in PRINTED)  # those from U+0100 on
BYTE_OF = {chr(b): b for b in PRINTED} | {chr(256 + i): b for i, b in enumerate(UNPRINTED)}


class Piece(NamedTuple):
    """One token by itself, which may be a part of a character."""

    data: bytes
    shown: bool = True  # special tokens are not in the text

    @property
    def text(self) -> str:
        """As OpenAI spells it: what is no whole text byte by byte, "bytes:\\xe6\\x97"."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class Prompts:
    """`limit`: the most tokens a prompt may have; None: as many as the engine takes."""

    def __init__(self, tokenizer: Any, limit: int | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limit = limit
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._spelt = spelling_of(tokenizer)
        self.piece = lru_cache(maxsize=65536)(self._piece)

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
        if not has_template(self._tokenizer):
            return plain_chat(messages)
        knows = "developer" in str(self._tokenizer.chat_template)  # others drop the role they do not know
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
    """From a token as the vocabulary has it to its bytes; None where only the tokenizer can tell."""
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


def plain_chat(messages: Sequence[Message]) -> str:
    """The prompt for a tokenizer without a chat template.

    A lone message of the user is the prompt, as it is. A longer conversation is written out as
    `Role: text`, the messages apart by an empty line, and ends with `Assistant:`.
    """
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].text
    said = [f"{message.role.capitalize()}: {message.text}" for message in messages]
    return "\n\n".join([*said, "Assistant:"])
