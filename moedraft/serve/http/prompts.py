"""Converts between text and tokens for HTTP: chat templates, prompt lengths, single tokens.

Works on its own copy of the tokenizer, so that two threads never use the engine's.
"""

from __future__ import annotations

import asyncio
import copy
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from moedraft.chat import has_template, message_ids, prompt_ids
from moedraft.core import PromptTooLong
from moedraft.engine.tokenise import tokenise
from moedraft.serve.http.schema import ChatMessage

LONG = 20_000  # characters or tokens: a longer prompt waits for other long ones only
T = TypeVar("T")
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
        """As OpenAI spells it; bytes that are no whole text are spelt one by one, "bytes:\\xe6\\x97"."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


class PromptPreparer:
    """Prepares prompts, so that the engine's thread never tokenises one.

    `limit` is the most tokens a prompt may have (None: as many as there is room for), `room` how many of its
    tokens the engine takes. `truncate`: of a longer one its end is kept.
    """

    def __init__(
        self,
        tokenizer: Any,
        limit: int | None,
        *,
        room: int = sys.maxsize,
        vocab_size: int = sys.maxsize,
        truncate: bool = False,
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._limit = limit
        self._most_letters = _most_letters(tokenizer, limit)
        self.waiting = 0  # prompts that are being prepared, or wait for it
        self._fit: Callable[..., list[int]] = partial(
            tokenise, self._tokenizer, chat=False, vocab_size=vocab_size, room=room, truncate=truncate
        )
        # Threads of their own, since views and changes are slow; short prompts never wait for long ones.
        self._short, self._long = (ThreadPoolExecutor(1, f"prompts-{kind}") for kind in ("short", "long"))
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._spelt = spelling_of(tokenizer)
        self.piece = lru_cache(maxsize=65536)(self._piece)

    async def ids(self, prompt: str | list[int]) -> list[int]:
        """The tokens that the engine gets. Raises InvalidRequest for none, wrong ones, or too many."""
        self._check_letters(len(prompt))
        return await self._beside(len(prompt), lambda: self._ids(prompt))

    async def text(self, ids: list[int]) -> str:
        return await self._beside(len(ids), lambda: str(self._tokenizer.decode(ids)))

    async def chat(self, messages: Sequence[ChatMessage]) -> str | list[int]:
        """A conversation as a prompt: token ids by the tokenizer's chat template, or text if it has none.

        Raises InvalidRequest for one that the template refuses, and for one that is too long.
        """
        size = sum(len(message.text) for message in messages)
        self._check_letters(size)
        if not has_template(self._tokenizer):
            return plain_chat(messages)
        # other templates would drop a message of this role
        knows = "developer" in str(self._tokenizer.chat_template)
        roles = [message.role if knows or message.role != "developer" else "system" for message in messages]
        rows = [{"role": r, "content": message.text} for r, message in zip(roles, messages, strict=True)]
        return await self._beside(size, lambda: message_ids(self._tokenizer, rows))

    async def _beside(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work` on a prompt of `size` characters or tokens, done in a thread."""
        thread = self._long if size > LONG else self._short
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        finally:
            self.waiting -= 1

    def _check_letters(self, size: int) -> None:
        """Refuse a text that is too long however few tokens it makes, before a second goes on tokenising."""
        if size > self._most_letters:
            sentence = f"the prompt has {size} characters, which are more than {self._limit} tokens; "
            raise PromptTooLong(f"{sentence}at most {self._limit} are taken.")

    def _ids(self, prompt: str | list[int]) -> list[int]:
        ids = prompt_ids(self._tokenizer, prompt, chat=False) if isinstance(prompt, str) else prompt
        if self._limit is not None and len(ids) > self._limit:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens; at most {self._limit} are taken.")
        return self._fit(prompt, ids)

    def _piece(self, token: int) -> Piece:
        if (added := self._added.get(token)) is not None:
            return Piece(added.content.encode(), not added.special)
        spelt = self._tokenizer.convert_ids_to_tokens(token) if self._spelt else None
        data = self._spelt(spelt) if self._spelt and isinstance(spelt, str) else None
        return Piece(self._tokenizer.decode([token]).encode(errors="replace") if data is None else data)


def _most_letters(tokenizer: Any, limit: int | None) -> int:
    """The most characters, or token ids, that can be `limit` tokens."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return sys.maxsize if limit is None or not vocabulary else limit * max(map(len, vocabulary))


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
