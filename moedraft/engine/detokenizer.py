"""Tokens → text as they come, without ever showing half a character, and where an answer must stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what half a character is decoded to
WINDOW = 6  # tokens of context that decide how the next one is spelled (spaces, joined bytes)
LONGEST = 4  # tokens of one character, where each is a byte


class Detokenizer:
    """Incremental text of one answer. `text` never ends inside a multi-byte character.

    At a stop string `add` says how many of the tokens belong to the answer; `text` ends before it. After
    `prompt` the text goes on as in one text with it, with the space that a tokenizer takes from a beginning.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.text = ""
        self.ids = self._context(prompt)
        self._shown = len(self.ids)  # tokens whose text is in `text`, or the prompt's
        self._ends = deque([0])  # of whole characters: where the decoding window may begin, and begins

    def add(self, tokens: list[int]) -> int | None:
        """Append; returns how many of `tokens` complete the first stop string, None when there is none.

        With stop strings token by token, so that the answer is the same however it comes in blocks.
        """
        if not self.stops:
            self._append(tokens)
            return None
        for number, token in enumerate(tokens, 1):
            seen = len(self.text)
            held = self._append([token])
            if self._stop(seen, held.rstrip(BROKEN)):
                return number
        return None

    def flush(self) -> bool:
        """Show what was held back, at the end of an answer; broken bytes become U+FFFD.

        True where that completes a stop string; the text then ends before it.
        """
        seen = len(self.text)
        self._show(self._pending(len(self.ids)), len(self.ids))
        return self._stop(seen)

    def settled(self) -> int:
        """Length of the text that no stop string can take back any more."""
        longest = max((len(stop) for stop in self.stops), default=0)
        for size in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.stops):
                return len(self.text) - size
        return len(self.text)

    def _append(self, tokens: list[int]) -> str:
        """Take the tokens in; returns the text that is held back since it ends inside a character."""
        self.ids += tokens
        count = len(self.ids)
        for end in range(count, max(self._shown, count - LONGEST), -1):
            new = self._pending(end)
            if not new.endswith(BROKEN):
                self._show(new, end)
                break
        return "" if self._shown == count else self._pending(count)

    def _pending(self, end: int) -> str:
        """Of the tokens before `end`, what is not shown."""
        start = self._ends[0]
        known, text = self._decode(self.ids[start : self._shown]), self._decode(self.ids[start:end])
        # Some tokenizers show all bytes in a row as broken where one of them is.
        return text[len(known) :] if text.startswith(known) else self._decode(self.ids[self._shown : end])

    def _show(self, new: str, end: int) -> None:
        self.text += new
        self._ends.append(self._shown)
        while len(self._ends) > 1 and self._ends[1] <= self._shown - WINDOW:
            self._ends.popleft()
        self._shown = end

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, from a whole character on; none where it ends within one."""
        for size in range(WINDOW, WINDOW + LONGEST):
            tail = list(prompt[-size:])
            text = self._decode(tail)
            if not text.startswith(BROKEN):
                break
        return [] if BROKEN in text[:1] + text[-1:] else tail

    def _stop(self, seen: int, held: str = "") -> bool:
        """Cut before the earliest stop string that ends after the first `seen` characters, if any."""
        text = self.text + held
        found = [text.find(stop, max(0, seen - len(stop) + 1)) for stop in self.stops]
        hits = [at for at in found if at >= 0]
        if hits:
            self.text, self._shown = text[: min(hits)], len(self.ids)
        return bool(hits)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
