"""The records that the gate judges by: of each domain the newest that no update is ever trained on.

Only their ids are remembered. So records that are purged or evicted are gone from here as well, and new
traffic replaces old records. Of one prompt only the newest record counts: many copies are not much evidence.
No client decides alone what is published for the others: its records do not push out those of others, and
are at most as many as all of theirs together, or three (see `storage.retention.shares`).
"""

from __future__ import annotations

from collections.abc import Callable

from moedraft.core import ReplayRecord
from moedraft.storage.records.replay import ReplayBuffer
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.retention.shares import Held, of_many, within_shares

MOST, LEAST = 32, 8  # records of one domain
TOGETHER = 128  # records of all domains together, about: judging must not cost more than learning
LEAST_JUDGED = 3  # records of one client, though all others have fewer together
USABLE = 2  # tokens of an answer at least; the first is never guessed from the target's states


class HeldOut:
    """Finds held-out records; each record of the home is looked at once."""

    def __init__(self, replay: ReplayBuffer) -> None:
        self.replay = replay
        # by domain and hash of the prompt, oldest first
        self._known: dict[str, dict[int, Held]] = {}
        self._seen: dict[str, int] = {}  # the newest id that was looked at
        self._target: str | None = None

    def records(
        self, domain: str, domains: int, target: str | None, on_record: Callable[[], None] = lambda: None
    ) -> list[ReplayRecord]:
        """The newest held-out records of `domain`, newest first; fewer where many `domains` are judged."""
        if target != self._target:
            self._known, self._seen, self._target = {}, {}, target
        self._look(domain, on_record)
        wanted = max(LEAST, min(MOST, TOGETHER // max(domains, 1)))
        while True:
            known = self._known.get(domain, {})
            chosen = of_many([*reversed(known.values())], wanted, LEAST_JUDGED)
            found = list(self.replay.by_ids(sorted(chosen, reverse=True)))
            gone = set(chosen) - {record.id for record in found}
            if not gone:
                return found
            self._known[domain] = {prompt: one for prompt, one in known.items() if one.id not in gone}

    def _look(self, domain: str, on_record: Callable[[], None]) -> None:
        """Take in the held-out records that came since the last call."""
        known = self._known.setdefault(domain, {})
        for record in self.replay.since(domain, self._seen.get(domain, 0) + 1, self._target):
            on_record()
            if is_held_out(record) and len(record.topk_ids) >= USABLE:
                prompt = hash(tuple(record.token_ids[: record.num_prompt_tokens]))
                known.pop(prompt, None)  # the newest stands last
                known[prompt] = Held(record.id, record.source, record.pinned)
            self._seen[domain] = record.id
        kept = set(within_shares(reversed(known.values()), 2 * MOST))
        self._known[domain] = {prompt: one for prompt, one in known.items() if one.id in kept}
