"""What speculation did for one answer, in counts. Knows nothing of the engine that counts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, NamedTuple


@dataclass
class SpeculationStats:
    """What speculation did for one answer. All counts but those of lookup are of the draft model.

    The three totals of the draft model equal sums of the lists by position. They are kept beside them, since
    requests of older versions were stored without the lists. Stats add up, count by count.
    """

    num_steps: int = 0  # target forwards spent on the answer, after its prompt was read
    num_drafts: int = 0  # of these, verifications of at least one token of the draft model
    num_draft_tokens: int = 0  # drafted by the model
    num_accepted_tokens: int = 0  # of these, accepted
    drafted_at: list[int] = field(default_factory=list)  # draft tokens by draft position 0, 1, …
    accepted_at: list[int] = field(default_factory=list)  # those accepted
    num_lookup_tokens: int = 0  # draft tokens that were looked up in texts instead
    num_accepted_lookup_tokens: int = 0
    num_earlier_tokens: int = 0  # of these two counts, what was looked up in earlier answers
    num_accepted_earlier_tokens: int = 0
    # Of `drafted_at` and `accepted_at`, what the shared adapter drafted: for a request without an expert, for
    # one that is not routed yet, or in place of its expert.
    shared_drafted_at: list[int] = field(default_factory=list)
    shared_accepted_at: list[int] = field(default_factory=list)
    # Tokens that were compared while another than the router's choice drafted, and how many more of them it
    # would have guessed right than that.
    overruled_tokens: int = 0
    overruled_gain: float = 0.0
    # Tokens of the answer, drafted or not, for which the first guess of who drafts was looked at afterwards;
    # those that it guesses right; and of both what the shared adapter would have drafted.
    first_guesses: int = 0
    right_first_guesses: int = 0
    shared_first_guesses: int = 0
    shared_right_first_guesses: int = 0

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        names = [one.name for one in fields(self)]
        return SpeculationStats(**{name: _sum(getattr(self, name), getattr(other, name)) for name in names})

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted draft tokens as a share of those drafted; None until the model drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Emitted tokens per verification with a draft, the bonus token included; None without a draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def expert_drafted_at(self) -> list[int]:
        """Of `drafted_at`, what an expert drafted, not the shared adapter."""
        return [n - m for n, m in zip_longest(self.drafted_at, self.shared_drafted_at, fillvalue=0)]

    @property
    def expert_accepted_at(self) -> list[int]:
        return [n - m for n, m in zip_longest(self.accepted_at, self.shared_accepted_at, fillvalue=0)]

    @property
    def first_step_share(self) -> float | None:
        """The share of first guesses that are right; None where none was looked at."""
        return self.right_first_guesses / self.first_guesses if self.first_guesses else None

    def saw(self, right: int, tokens: int, *, shared: bool) -> None:
        """Count first guesses for so many tokens; shared: the shared adapter drafts for the answer."""
        self.first_guesses += tokens
        self.right_first_guesses += right
        if shared:
            self.shared_first_guesses += tokens
            self.shared_right_first_guesses += right


class Standing(NamedTuple):
    """How the drafts of one answer stood when they were compared."""

    tokens: int  # of the answer by then; 0: only the prompt was known
    weights: dict[str, float]  # by arm; those that hardly count are left out


def _sum(one: Any, other: Any) -> Any:
    """Of two counts, or of two lists of counts by position; the shorter one is filled up with zeros."""
    if isinstance(one, list):
        return [n + m for n, m in zip_longest(one, other, fillvalue=0)]
    return one + other
