"""What the demo found, in figures and in words; neither holds any prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moedraft.showcase.findings.estimates import Counts, Estimate, PairedChange, change, ratio
from moedraft.showcase.trials import EARLIER, EXPERTS, LOOKUP, PLAIN, SERVED, STATIC, SYSTEMS, Trials

LABELS = {
    "general": "General English",
    "math": "Mathematics",
    "python": "Python",
    "sql": "SQL",
    "support": "Support desk",
    "medical": "Medicine",
    "textbook": "Textbooks",
    "docs-en": "English docs",
    "docs-de": "German docs",
    "docs-fr": "French docs",
    "docs-es": "Spanish docs",
    "docs-pt": "Portuguese docs",
    "docs-ru": "Russian docs",
    "docs-ja": "Japanese docs",
    "docs-ko": "Korean docs",
    "docs-zh": "Chinese docs",
}
LEVEL = 0.98  # a full batch that is at least so fast beside plain decoding is not called slower
HARDLY = 1.05  # tokens per step, below which the experts were hardly used
FEWEST = 5  # prompts of a domain; a bootstrap of fewer is too narrow by far, so there is no interval
SAID = {
    "better": "Drafts are better than before",
    "open": "No gain yet that so few prompts could show",
    "worse": "Drafts are worse than before",
}


@dataclass(frozen=True)
class Point:
    """One answered request: its place in the stream, and its tokens for each step of the target."""

    index: int
    tokens_per_step: float


@dataclass(frozen=True)
class Row:
    """A domain on held-out prompts: the static draft before, the experts after learning."""

    domain: str
    prompts: int
    tokens_per_step: PairedChange
    first_guess: PairedChange  # share of the target's tokens that the draft's first guess hits
    alone: int = 0  # of the prompts, those answered one at a time, of which tokens per step are

    @property
    def label(self) -> str:
        return LABELS.get(self.domain, self.domain)

    @property
    def verdict(self) -> str:
        """What became of the drafts as they are served, which tokens per step show.

        Where that is open, better first guesses count too. These are of the router's choice, so worse ones
        do not: where experts are compared, another one drafts then.
        """
        served, guesses = self.tokens_per_step.verdict, self.first_guess.verdict
        return "better" if served == "open" and guesses == "better" else served

    @property
    def has_weak_expert(self) -> bool:
        """Whether the router's choice guesses worse than the static draft, though served drafts do not."""
        return self.first_guess.verdict == "worse" and self.verdict != "worse"


@dataclass(frozen=True)
class SystemRow:
    """One of the systems on the held-out prompts."""

    name: str
    seconds: Estimate  # for an answer, one prompt at a time
    speedup: Estimate  # seconds of plain decoding / own seconds, by the same prompts
    tokens_per_step: Estimate
    tokens_per_second: float  # one prompt at a time
    batched_tokens_per_second: float  # a full batch
    batched_speedups: list[float]  # in each queue of a full batch, beside plain decoding in the same queue

    @property
    def slower_batches(self) -> bool | None:
        """Whether full batches are slower; None where queues disagree, as on a machine that others use."""
        slower = {speedup < LEVEL for speedup in self.batched_speedups}
        return slower.pop() if len(slower) == 1 else None


@dataclass(frozen=True)
class Result:
    """Everything the demo found."""

    rows: list[Row]  # by domain
    whole: Row  # all domains together
    systems: list[SystemRow]  # plain decoding first
    points: list[Point]
    updates: list[int]  # stream index at which versions were published
    equal: bool  # every answer was that of plain decoding, token for token
    facts: dict[str, str]


def result_of(trials: Trials, points: list[Point], updates: list[int], facts: dict[str, str]) -> Result:
    """The figures from what was measured."""
    domains = sorted({query.domain for query in trials.queries}, key=lambda name: LABELS.get(name, name))
    indices = {d: [i for i, q in enumerate(trials.queries) if q.domain == d] for d in domains}
    rows = [_row(trials, domain, indices[domain]) for domain in domains]
    whole = _row(trials, "all", list(range(len(trials.queries))))
    systems = [_system(trials, name) for name in SYSTEMS]
    return Result(rows, whole, systems, points, updates, trials.equal, facts)


def _row(trials: Trials, domain: str, indices: list[int]) -> Row:
    def emitted(name: str) -> Counts:
        found = [trials.alone[name][i] for i in indices if i < len(trials.alone[name])]
        return [(len(trial.token_ids), trial.steps) for trial in found]

    guessed = {name: [trials.guessed[name][i] for i in indices] for name in (STATIC, EXPERTS)}
    return Row(
        domain,
        len(indices),
        change(emitted(STATIC), emitted(EXPERTS), FEWEST),
        change(guessed[STATIC], guessed[EXPERTS], FEWEST),
        len(emitted(STATIC)),
    )


def _system(trials: Trials, name: str) -> SystemRow:
    alone, plain = trials.alone[name], trials.alone[PLAIN]
    tokens = sum(len(trial.token_ids) for trial in alone)
    return SystemRow(
        name,
        ratio([(trial.seconds, 1) for trial in alone]),
        ratio([(p.seconds, own.seconds) for p, own in zip(plain, alone, strict=True)]),
        ratio([(len(trial.token_ids), trial.steps) for trial in alone]),
        tokens / sum(trial.seconds for trial in alone),
        trials.tokens_per_second(name),
        [p / own for p, own in zip(trials.seconds[PLAIN], trials.seconds[name], strict=True)],
    )


# -- in words ------------------------------------------------------------------------------------


def sentences(result: Result) -> list[str]:
    """What a user should know, good or bad, in a few sentences."""
    systems = {one.name: one for one in result.systems}
    before, after = (systems[name].tokens_per_step.value for name in (STATIC, EXPERTS))
    times = {one.name: f"{one.speedup.value:.2f}" for one in result.systems}
    found = [
        f"An answer takes {systems[PLAIN].seconds.value:.2f} s with plain decoding and "
        f"{systems[SERVED].seconds.value:.2f} s as a server gives it, with experts and lookup in the "
        f"text and in earlier answers: {times[SERVED]} times as fast. Lookup in the text alone is "
        f"{times[LOOKUP]} times as fast, with earlier answers {times[EARLIER]}, experts alone "
        f"{times[EXPERTS]} and the static draft {times[STATIC]} times.",
        f"Without lookup, each step of the target gives {after:.2f} tokens with the experts and {before:.2f} "
        f"with the static draft; with lookup as well {systems[SERVED].tokens_per_step.value:.2f}. Plain "
        "decoding gives 1.",
        *_first_guesses(result.whole),
        *_by_verdict(result.rows),
        *_full_batch(result.systems),
    ]
    if after < HARDLY:
        found.insert(
            2,
            "Hardly anything was drafted: by its own measurements the engine found that it does not pay on "
            "this machine now. Programs that use the same cores can be the reason.",
        )
    equal = "Every answer is that of plain decoding, token for token."
    unequal = "NOT every answer is that of plain decoding, token for token: this is a fault."
    return [*found, equal if result.equal else unequal]


def _first_guesses(whole: Row) -> list[str]:
    """What became of first guesses over all domains, where there are enough prompts to say it."""
    found = whole.first_guess
    if not found.has_interval:
        return []
    gain = found.difference
    figures = found.before.value, found.after.value, gain.low, gain.high
    before, after, low, high = (100 * figure for figure in figures)
    words = f"Over all domains the first guesses of the experts hit {after:.0f} % of the tokens and those of "
    words += f"the static draft {before:.0f} %: a change of {low:+.0f} to {high:+.0f} points (95 % interval)"
    return [words + ("." if found.verdict != "open" else ", so it may be chance.")]


def _by_verdict(rows: list[Row]) -> list[str]:
    """The domains by what became of tokens per step and of first guesses; a loss in either is named."""
    found = []
    for verdict, words in SAID.items():
        if names := [row.label for row in rows if row.verdict == verdict]:
            found.append(f"{words} in {joined(names)}.")
    if weak := [row.label for row in rows if row.has_weak_expert]:
        found.append(
            f"The router's own expert guesses worse than the static draft in {joined(weak)}; another one may "
            "draft there, and tokens per step show no loss."
        )
    unsure = [(row.label, row.tokens_per_step) for row in rows if not row.tokens_per_step.has_interval]
    lost = [(label, one.before.value, one.after.value) for label, one in unsure if one.difference.value < 0]
    if fewer := [f"{label} ({before:.2f} → {after:.2f})" for label, before, after in lost]:
        found.append(f"Fewer tokens per step than before, on too few prompts to be sure, in {joined(fewer)}.")
    return found


def _full_batch(systems: list[SystemRow]) -> list[str]:
    """What is slower than plain decoding in full batches, and of what that cannot be told."""
    plain, *others = systems
    slow = [one for one in others if one.slower_batches]
    found = []
    if slow:
        named = joined([f"{one.name} ({one.batched_tokens_per_second:.0f})" for one in slow])
        found = [
            "In a full batch these give fewer tokens/s than plain decoding "
            f"({plain.batched_tokens_per_second:.0f}): {named}.",
            "One step of the target serves all rows there, and each guess adds to what it computes. The "
            "drafter reads every prompt too, and the engine spends some rounds to find out what pays.",
        ]
    if unclear := joined([one.name for one in others if one.slower_batches is None]):
        found.append(
            f"Whether a full batch is slower than with plain decoding, the two queues disagree on: {unclear}."
        )
    return found


def joined(names: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def summary(result: Result) -> dict[str, Any]:
    """The result as plain data."""
    found = {
        "acceptance_before": result.whole.first_guess.before.value,
        "acceptance_after": result.whole.first_guess.after.value,
        "tokens_per_second": {one.name: one.batched_tokens_per_second for one in result.systems},
        "systems": {one.name: asdict(one) for one in result.systems},
        "domains": {row.domain: _row_data(row) for row in result.rows},
        "whole": _row_data(result.whole),
        "stream": [point.tokens_per_step for point in result.points],
        "updates": result.updates,
        "lossless": result.equal,
        "sentences": sentences(result),
        "facts": result.facts,
    }
    return {key: rounded(value) for key, value in found.items()}


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "before": row.first_guess.before.value,
        "after": row.first_guess.after.value,
        "prompts": row.prompts,
        "answered_alone": row.alone,
        "verdict": row.verdict,
        "first_guess": asdict(row.first_guess),
        "tokens_per_step": asdict(row.tokens_per_step),
    }


def rounded(data: Any) -> Any:
    """The same data with four digits behind the point."""
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value) for value in data]
    return round(data, 4) if isinstance(data, float) else data
