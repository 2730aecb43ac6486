"""Tokens → text as they come, without ever showing half a character, and where an answer must stop."""

from __future__ import annotations

from typing import Any

BROKEN = "\ufffd"  # what half a character is decoded to
WINDOW = 6  # tokens of context that decide how the next one is spelled (spaces, joined bytes)


class Detokenizer:
    """Incremental text of one answer. `text` never ends inside a multi-byte character.

    At a stop string `add` says how many of the tokens belong to the answer; `text` ends before it.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.ids: list[int] = []
        self.text = ""
        self._start = 0  # first token of the decoding window
        self._shown = 0  # tokens whose text is in `text`

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
        self._show(self._pending())
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
        new = self._pending()
        if new.endswith(BROKEN):
            return new
        self._show(new)
        return ""

    def _pending(self) -> str:
        known = len(self._decode(self.ids[self._start : self._shown]))
        return self._decode(self.ids[self._start :])[known:]

    def _show(self, new: str) -> None:
        self.text += new
        self._start = max(self._shown - WINDOW, 0)
        self._shown = len(self.ids)

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
