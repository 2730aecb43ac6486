"""Whether learning gives back the time that it takes.

A gain in tokens per step of the target shortens the decoding of every later answer, as far as the draft model
guesses: in steps whose tokens are looked up, or for which nothing is drafted, it changes nothing. An update
pays when this saves as much time over the next `train_horizon` requests, of the length of those of late, as
the update took.
"""

from __future__ import annotations

from moedraft.storage.store import Store

OF_LATE = 100  # requests that tell how long an answer takes
LEAST = 0.1  # share of the steps that the model is taken to guess in: a better one would guess more often


class Payback:
    """Compares the seconds of updates with those that they save, in one home."""

    def __init__(self, store: Store, horizon: int) -> None:
        """horizon: over how many later requests an update's gain is counted."""
        self.store, self.horizon = store, horizon

    def is_paid(self, gain: float | None, seconds: float) -> bool:
        """Whether `seconds` of learning are saved by a gain in tokens per step; True for an unknown gain.

        Where no request tells how long decoding takes, every gain pays. Raises StorageError.
        """
        if gain is None or gain <= 0:
            return gain is None
        saved = self._seconds_saved(gain)
        return saved is None or saved >= seconds

    def _seconds_saved(self, gain: float) -> float | None:
        """By all requests of the horizon together; None where nothing is known of requests."""
        rows = self.store.requests.rows(limit=OF_LATE)
        steps = sum(row.speculation.num_steps for row in rows)
        decoding = sum(row.seconds - (row.time_to_first_token or 0.0) for row in rows)
        if not steps or decoding <= 0:
            return None
        per_step = sum(row.num_tokens for row in rows) / steps
        gain *= max(LEAST, sum(row.speculation.num_drafts for row in rows) / steps)
        return self.horizon * (decoding / len(rows)) * gain / (per_step + gain)
