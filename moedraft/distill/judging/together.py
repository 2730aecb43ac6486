"""The gate for an update that several domains share: a joint update's, or a new shared adapter's.

Such an update is one candidate for everybody. All held-out records are looked at together, each standing for
a part of the traffic (`gate.decide`). If the whole is better, all of it is published, except for domains with
evidence of harm. What one domain gains is estimated with a look at all (`shrinkage`): three records of
its own prove little. A domain that is left out keeps its expert, or gets none, above the new shared adapter.
If a domain would almost surely be worse off with any of these, nothing is published. A candidate that is
not published is trained on, also where it does some harm (`gate.patient`).

Losses too small to be seen in one update add up over many. So each domain is also measured against the
draft base without any adapter. A domain that stands below that gets no new version, and its expert is taken
from it where it is better off without one. If every adapter that a published update could give a domain is
probably worse than the base, the base alone drafts for that domain, where the drafter can do so; the next
published update decides anew. For this question alone, what adapters did on new records counts too: live
adapters and, on records on which no live ones were measured, candidates that were kept (`fresh/`). A domain
that the base serves already gets adapters with a publication only where they are surely better, by nine
tenths, as soon as three records of it are known; with fewer the question is not asked. Where nothing is
published, a domain goes to the base if what serves likely stands below it, and gets its adapters back if,
by what live ones did on three new records or more, these are surely better. "Probably" is likelier than
not, less than a publication asks for: with the base alone no domain stands below it.

Simulated with five records for each of eight domains that vary as those of small homes do
(tests/distill/test_together.py): without a gain 10 % of updates pass, with a loss of .03 tokens per step
none, with gains of .02 to .05 in each domain 85 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moedraft.core import GateDecision
from moedraft.distill.judging.gate import (
    MOST_KEPT,
    SURE,
    Seen,
    Shares,
    Verdict,
    bounded,
    compare,
    decide,
    decide_again,
    is_unseen,
    patient,
)
from moedraft.distill.judging.options import (
    ENOUGH,
    KINDS,
    LIKELY_HARM,
    STAYS_ASIDE,
    Choice,
    Kind,
    Options,
    Prospect,
    is_below,
)
from moedraft.distill.judging.shrinkage import GainEstimate, estimates
from moedraft.distill.measuring.figures import FEW, Measured, joined

LARGEST_SHARE = 4.0  # most traffic that a record may stand for, as a multiple of an average record's

BELOW = "The domain is likely to stand below the draft without any adapter"


def decide_together(
    domains: Mapping[str, Options], kept: Mapping[str, int], shared: str
) -> dict[str, Verdict]:
    """The verdicts on one joint update, by adapter; `shared` is the name of the shared one.

    An expert that has not learned has no verdict, unless it is put back to none ("reset").
    """
    prospects, standing = _prospects(domains), _standing(domains)
    choices = {name: _choice(options, prospects[name]) for name, options in domains.items()}
    stopped = [name for name, choice in choices.items() if choice.stops]
    whole = _whole(domains, choices, kept.get(shared, 0), stopped)
    if is_unseen(whole.decision, whole.gain, whole.records):  # what guesses lose takes nobody's expert
        choices = {name: _as_judged(choice, prospects[name]) for name, choice in choices.items()}
    verdicts = {shared: whole}
    for name, options in domains.items():
        choice, goes = choices[name], whole.decision == "promote"
        known = options.base is not None and options.now()[0].records >= ENOUGH
        below = known and is_below(standing[name], LIKELY_HARM)
        aside = choice.kind == "base" if goes else below
        seen = options.aside and options.stood is not None and options.stood.before.records >= ENOUGH
        back = not goes and seen and standing[name].worse <= STAYS_ASIDE
        if options.new is not None or aside or back or (choice.kind == "none" and goes):
            before = kept.get(name, 0)
            found = bounded(_of_expert(options, choice, prospects[name], whole), before)
            if aside and not goes:
                why = f"{BELOW}, which serves it from now on: {_told(standing[name], options.now()[0])}."
                found = replace(found, reason=found.reason or why)
            if whole.decision != "discard":  # else the expert's weights go with those of the shared adapter
                found = patient(found, before)
            verdicts[name] = replace(found, unadapted=aside if goes or back else aside or None)
    return verdicts


def in_doubt(domains: Mapping[str, Options]) -> list[str]:
    """Domains for which neither expert is good enough, so that doing without one has to be measured too."""
    prospects = _prospects(domains)
    return [
        name
        for name, options in domains.items()
        if not any(_suits(one, options) for kind, one in prospects[name].items() if kind != "base")
    ]


def shares_of(domains: Mapping[str, Options], *, again: bool = False) -> Shares:
    """How much of the traffic each record stands for [records of all domains]; 1 on average.

    again: the records that earlier candidates were seen on follow, those of all domains.
    """
    counts = np.array([options.before.records for options in domains.values()])
    seen = np.array([_seen_records(options) if again else 0 for options in domains.values()])
    traffic = np.array([options.share for options in domains.values()], float)
    weights = traffic / np.maximum(counts + seen, 1)
    each = np.concatenate([np.repeat(weights, counts), np.repeat(weights, seen)])
    each /= each.mean() if len(each) else 1.0
    return np.asarray(np.minimum(each, LARGEST_SHARE))


def _seen_records(options: Options) -> int:
    return 0 if options.seen is None else options.seen.before.records


def _seen(domains: Mapping[str, Options]) -> Seen | None:
    """What earlier candidates of the line did in all domains; None where there was none."""
    found = [options.seen for options in domains.values() if options.seen is not None]
    if not found:
        return None
    return Seen(joined([one.before for one in found]), joined([one.after for one in found]))


def _whole(
    domains: Mapping[str, Options], choices: Mapping[str, Choice], kept: int, stopped: list[str]
) -> Verdict:
    """All records together, with every domain's expert as trained, except those that surely harm theirs.

    Experts left out on weaker evidence still count as trained here: with the best of several figures for each
    domain the whole would look better than it is.
    """
    befores = joined([options.before for options in domains.values()])
    afters = joined([options.of(choices[name].counted) for name, options in domains.items()])
    if (seen := _seen(domains)) is None:
        whole = decide(befores, afters, kept, shares_of(domains))
    else:
        whole = decide_again(befores, afters, seen, kept, shares_of(domains, again=True))
    whole = patient(whole, kept)
    if all(options.static is not None for options in domains.values()):
        statics = joined([options.static for options in domains.values() if options.static is not None])
        whole = replace(whole, static=compare(statics, afters, shares_of(domains)).gain)
    if whole.decision == "promote" and stopped:
        decision: GateDecision = "discard" if kept >= MOST_KEPT else "keep"
        reason = f"It would be published as a whole, but it harms {', '.join(stopped)} with any expert."
        return replace(whole, decision=decision, reason=reason)
    return whole


def _prospects(domains: Mapping[str, Options]) -> dict[str, dict[Kind, Prospect]]:
    """The prospects by domain and kind of expert, in the order in which these are wanted."""
    found: dict[str, dict[Kind, Prospect]] = {name: {} for name in domains}
    for kind in KINDS:
        afters = [options.of(kind) for options in domains.values()]
        gains = estimates([options.before for options in domains.values()], afters)
        statics = _compared([(one.static or one.before, after) for one, after in _pairs(domains, afters)])
        besides = statics
        if kind != "base" and any(one.with_kept or one.stood for one in domains.values()):
            besides = _compared([one.beside_static(after) for one, after in _pairs(domains, afters)])
        for number, (name, options) in enumerate(domains.items()):
            if kind in options.kinds():
                over = (statics[number], besides[number]) if options.static is not None else (None, None)
                found[name][kind] = Prospect(gains[number], over[0], over[1], options.aside)
    return found


def _standing(domains: Mapping[str, Options]) -> dict[str, GainEstimate]:
    """By domain, the gain over the draft base alone of what serves now, or of adapters that could again."""
    return dict(zip(domains, _compared([one.now() for one in domains.values()]), strict=True))


def _pairs(domains: Mapping[str, Options], afters: Sequence[Measured]) -> list[tuple[Options, Measured]]:
    return list(zip(domains.values(), afters, strict=True))


def _compared(pairs: Sequence[tuple[Measured, Measured]]) -> list[GainEstimate]:
    return estimates([static for static, _ in pairs], [after for _, after in pairs])


def _choice(options: Options, prospects: Mapping[Kind, Prospect]) -> Choice:
    """The first kind that is good enough, else that with the greatest gain; the base where that is better."""
    first = next(iter(prospects))
    adapted: list[Kind] = [kind for kind in prospects if kind != "base"]
    wanted = [kind for kind in adapted if not _will_not_do(prospects[kind])]
    if wanted and wanted[0] == "new" and _old_is_better(options):
        wanted = [kind for kind in wanted if kind != "new"] or wanted
    best: Kind = wanted[0] if wanted else max(adapted, key=lambda kind: prospects[kind].gain.gain)
    if "base" in prospects:
        best = next((kind for kind in wanted or [best] if not prospects[kind].yields_to_base), "base")
    counted = best if prospects[first].surely_harms else first
    falls = best != "base" and prospects[best].below_static and not stands_below(options)
    stops = not wanted and (prospects[best].surely_harms or falls)
    return Choice(best, counted, stops)


def _as_judged(choice: Choice, prospects: Mapping[Kind, Prospect]) -> Choice:
    """What the whole was judged with, unless the domain would stand below the base with it."""
    stays = choice.kind == "base" or prospects[choice.counted].below_static
    return choice if stays else replace(choice, kind=choice.counted)


def _will_not_do(prospect: Prospect) -> bool:
    return prospect.harms or prospect.below_static


def _suits(prospect: Prospect, options: Options) -> bool:
    """Whether it probably does the domain no harm, and is no worse than the base where that may draft."""
    return not _will_not_do(prospect) and not (options.base is not None and prospect.yields_to_base)


def stands_below(options: Options) -> bool:
    """Whether what serves now is below the draft base alone."""
    return options.static is not None and is_below(estimates([options.static], [options.before])[0])


def _old_is_better(options: Options) -> bool:
    """Whether the expert as trained does worse than the expert as it was, above the new shared adapter."""
    if options.new is None or options.before.records < FEW:
        return False
    return compare(options.old, options.new).better <= 1 - SURE


def _of_expert(
    options: Options, choice: Choice, prospects: Mapping[Kind, Prospect], whole: Verdict
) -> Verdict:
    """The verdict on one expert, which is published only with the shared adapter it was trained on."""
    first = next(iter(prospects))  # the expert as trained or, where it did not learn, as it is
    trained, taken = prospects[first], choice.kind in ("none", "base") and whole.decision == "promote"
    gain = prospects[choice.kind if taken else first].gain
    found = Verdict(
        whole.decision,
        records=options.before.records,
        gain=gain.gain,
        low=gain.low,
        high=gain.high,
        better=1 - gain.worse,
        static=None if trained.static is None else trained.static.gain,
    )
    if whole.decision != "promote":
        return found
    if choice.kind == "new":
        along = "It gains nothing by itself; it goes with the shared adapter that it was trained on."
        return found if gain.gain > 0 else replace(found, decision="along", reason=along)
    beside = _told(trained.beside, options.beside_static(options.of(first))[0])
    return _left_out(found, choice, trained, beside)


def _told(static: GainEstimate | None, base: Measured) -> str:
    """What adapters give over the draft base alone, in words; with what was seen beside held-out records."""
    return f"{static.gain if static else 0.0:+.2f} tokens per step, by {base.records} of its records"


def _left_out(found: Verdict, choice: Choice, prospect: Prospect, beside: str) -> Verdict:
    """The verdict on an expert that is not published, though the shared adapter is.

    beside: what it gives over the draft base alone, in words.
    """
    if choice.kind == "base":
        why = "The domain would probably stand below the draft without any adapter, which serves it"
        if prospect.aside and not prospect.is_below_base:
            why = "That adapters do better than the draft alone is not likely enough; it goes on serving"
        return replace(found, decision="keep", reason=f"{why}: {beside}.")
    why = "It is likely to harm this domain"
    if prospect.below_static:
        why = "The domain would stand below the draft without any adapter"
    elif not prospect.harms:
        why = "The expert as it was does better above the new shared adapter"
    if choice.kind == "none":
        return replace(found, decision="reset", reason=f"{why}; it gets no expert.")
    decision: GateDecision = "discard" if found.better <= 1 - SURE else "keep"
    return replace(found, decision=decision, reason=f"{why}; it keeps the expert that it had.")
