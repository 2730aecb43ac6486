"""What a domain can have under a new shared adapter, and what each of it would do to the domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moedraft.distill.judging.gate import SURE, Seen
from moedraft.distill.judging.shrinkage import GainEstimate
from moedraft.distill.measuring.figures import Measured, joined

ENOUGH = 3  # records of a domain that may be left to the base alone
NEGLIGIBLE = 0.01  # tokens per step that a domain may lose
HARMFUL = 0.5  # probability of a loss from which a domain is left out, or to the draft base alone …
LIKELY_HARM = 0.75  # … or, where no update is published, from which it is left to the base …
STAYS_ASIDE = 0.1  # … or above which a domain that the base alone serves stays with it …
SURE_HARM = 0.95  # … and from which a domain without a better choice stops the whole update

# The domain's expert as trained, as it was, no expert above the shared adapter, or no adapter at all.
Kind = Literal["new", "old", "none", "base"]
KINDS: tuple[Kind, ...] = ("new", "old", "none", "base")  # in the order in which they are wanted


@dataclass(frozen=True)
class Options:
    """A domain under a new shared adapter, measured on the same records."""

    before: Measured  # what serves now
    new: Measured | None  # its expert as trained; None: it has not learned, or is pinned
    old: Measured  # its expert as it was
    none: Measured | None = None  # without an expert; None: it has none, it is pinned, or it was not measured
    static: Measured | None = None  # the draft base without any adapter
    share: float = 1.0  # of the traffic, in any unit
    base: Measured | None = None  # as `static`, where the base alone may draft for the domain
    seen: Seen | None = None  # what the candidates before this one did for the domain, of the same line
    stood: Seen | None = None  # the draft base alone, and adapters that were live, on other records
    with_kept: Seen | None = None  # `stood`, and kept candidates where no live ones were seen; None: `stood`
    aside: bool = False  # whether the base alone serves now, so that `before` is `static`

    def kinds(self) -> list[Kind]:
        """What the domain can have, in the order in which it is wanted."""
        return [kind for kind in KINDS if getattr(self, kind) is not None]

    def of(self, kind: Kind) -> Measured:
        """The figures of `kind` or, where there is no such expert, of what the domain would have instead."""
        return {"new": self.new, "old": None, "none": self.none, "base": self.base}[kind] or self.old

    def beside_static(self, after: Measured) -> tuple[Measured, Measured]:
        """The draft base alone, and adapters that do as `after` says, with what earlier ones have shown."""
        return _with(self.static or self.before, after, self.with_kept or self.stood)

    def now(self) -> tuple[Measured, Measured]:
        """The draft base alone, and the live adapters, whether these serve or not.

        What candidates did that never served says nothing of these.
        """
        if not self.aside:
            return _with(self.static or self.before, self.before, self.stood)
        seen = self.stood or Seen(self.before, self.before)
        return seen.before, seen.after


@dataclass(frozen=True)
class Prospect:
    """What one kind of expert would do to a domain."""

    gain: GainEstimate  # over what serves now
    static: GainEstimate | None  # over the draft base alone, by held-out records
    beside: GainEstimate | None  # the same, by what earlier adapters have shown on new records as well
    aside: bool = False  # whether the base alone serves now

    @property
    def harms(self) -> bool:
        return self.gain.worse > HARMFUL and self.gain.gain < -NEGLIGIBLE

    @property
    def surely_harms(self) -> bool:
        return self.gain.worse >= SURE_HARM and self.gain.gain < -NEGLIGIBLE

    @property
    def below_static(self) -> bool:
        return is_below(self.static)

    @property
    def is_below_base(self) -> bool:
        """Whether a domain would probably stand below the base alone."""
        return is_below(self.beside, HARMFUL)

    @property
    def yields_to_base(self) -> bool:
        """Whether the base alone should draft instead, or go on drafting."""
        if self.aside:
            return self.beside is not None and self.beside.worse > STAYS_ASIDE
        return self.is_below_base


@dataclass(frozen=True)
class Choice:
    kind: Kind
    counted: Kind  # the kind it counts as where the whole is judged
    stops: bool  # the domain is worse off whatever it gets, so nobody gets the update


def _with(static: Measured, after: Measured, seen: Seen | None) -> tuple[Measured, Measured]:
    """Both, each followed by what was seen of it on other records."""
    if seen is None:
        return static, after
    return joined([static, seen.before]), joined([after, seen.after])


def is_below(static: GainEstimate | None, sure: float = SURE) -> bool:
    """Whether a domain stands below the draft base alone, with a probability of at least `sure`."""
    return static is not None and static.worse >= sure and static.gain < -NEGLIGIBLE
