"""Turns tokens into text as they come, never showing half a character, and finds stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from moedraft.engine.stops import Beginning

BROKEN = "\ufffd"  # tokenizers decode half a character to this
WINDOW = 6  # tokens decoded together with the next one, because spaces and joined bytes depend on them
LONGEST = 4  # the most tokens that one character can take: one for each of its bytes


class Detokenizer:
    """The text of one answer. It never ends inside a multi-byte character.

    When a stop string appears, `add` says how many of the tokens belong to the answer, and `text` ends before
    the stop string. `prompt`, where given, is what the answer continues: the first token is decoded after
    it, since tokenizers drop the space before the first word of a text.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = (), prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.text = ""
        self.ids = self._context(prompt)
        self._shown = len(self.ids)  # how many of `ids` are done: those of the prompt, and those in `text`
        # Token counts at which a whole character ended. The decoding window begins at the first of them.
        self._ends = deque([0])
        self._beginnings = [Beginning(stop) for stop in stops]

    def add(self, tokens: list[int]) -> int | None:
        """Append tokens; returns how many of them complete the first stop string, None if there is none.

        With stop strings each token is decoded by itself, so that the answer does not depend on how many
        tokens come at once.
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
        """Add to the text what was held back, since the answer has ended; broken bytes become U+FFFD.

        Returns whether that completes a stop string; the text then ends before it.
        """
        seen = len(self.text)
        self._show(self._pending(len(self.ids)), len(self.ids))
        return self._stop(seen)

    def settled(self) -> int:
        """How much of the text is certain; the rest may turn out to be the beginning of a stop string."""
        return len(self.text) - max((one.length for one in self._beginnings), default=0)

    def _append(self, tokens: list[int]) -> str:
        """Append the tokens; returns the text that is held back because it ends inside a character."""
        self.ids += tokens
        count = len(self.ids)
        for end in range(count, max(self._shown, count - LONGEST), -1):
            new = self._pending(end)
            if not new.endswith(BROKEN):
                self._show(new, end)
                break
        return "" if self._shown == count else self._pending(count)

    def _pending(self, end: int) -> str:
        """The text of the tokens before `end` that is not part of `text` yet."""
        start = self._ends[0]
        known, text = self._decode(self.ids[start : self._shown]), self._decode(self.ids[start:end])
        # Some tokenizers show all bytes in a row as broken where one of them is.
        return text[len(known) :] if text.startswith(known) else self._decode(self.ids[self._shown : end])

    def _show(self, new: str, end: int) -> None:
        self.text += new
        for beginning in self._beginnings:
            beginning.read(new)
        self._ends.append(self._shown)
        while len(self._ends) > 1 and self._ends[1] <= self._shown - WINDOW:
            self._ends.popleft()
        self._shown = end

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens, beginning with a whole character; none if it ends within a character."""
        for size in range(WINDOW, WINDOW + LONGEST):
            tail = list(prompt[-size:])
            text = self._decode(tail)
            if not text.startswith(BROKEN):
                break
        return [] if BROKEN in text[:1] + text[-1:] else tail

    def _stop(self, seen: int, held: str = "") -> bool:
        """Cut the text before the first stop string in it, if there is one, and say so.

        The first `seen` characters were searched before; a stop string may begin in them and end later.
        """
        text = self.text + held
        found = [text.find(stop, max(0, seen - len(stop) + 1)) for stop in self.stops]
        hits = [at for at in found if at >= 0]
        if hits:
            self.text, self._shown = text[: min(hits)], len(self.ids)
        return bool(hits)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
