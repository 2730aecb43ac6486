"""The document's fixed words, and how figures are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.streams import title_of

MODELS = {
    "smollm2": "SmolLM2 with the feature drafter that is shipped",
    "mini": "the embedded toy pair, whose draft is an independent model of a million weights that has "
    "read such texts already",
}
OTHER_PAGES = {  # by the target; what stands on them, and their names
    "smollm2": {
        "evidence-served": "What the default does as it is published now",
        "evidence-turns": "More arrangements with nearly this gate, at full strength",
        "evidence": "Arrangements without a gate, and the paper's experiments",
        "evidence-long": "A stream of 960 requests",
        "evidence-mini-served": "The same with an independent draft model",
    },
    "mini": {
        "evidence-mini-served": "As such a draft learns now",
        "evidence-mini": "Older runs, with the paper's objectives and answers",
        "evidence-served": "On a real model, as the default is published now",
    },
}
TITLES = {  # by the folder of the results
    "evidence-served": "Does learning pay? The default as it is published now",
    "evidence": "Does learning pay? Many arrangements without a gate, and the paper's experiments",
    "evidence-turns": "Does learning pay? Arrangements with a gate, from long lists",
    "evidence-long": "Does learning pay? A long stream of requests",
    "evidence-mini-served": "Does learning pay? An independent draft model, as it learns now",
    "evidence-mini": "Does learning pay? An independent draft model, older runs",
}


def introduction(target: str, results: str) -> str:
    """The first lines; `results` is the folder of the runs."""
    return (
        f"# {TITLES.get(Path(results).name, 'Does learning pay, and does it do harm?')}\n\n"
        f"This page is written by `scripts/evidence.py` from the files in `{results}`: figures and "
        "comparisons are computed from them, reasons and how it was measured are written by hand. "
        "Arrangements of adapters learn from the same requests, in the same order "
        f"and with as many updates, on {MODELS.get(target, target)}. They differ in who learns from what."
        + other_pages(target, Path(results).name)
    )


def other_pages(target: str, page: str) -> str:
    """Where else to read, without the page that is being written."""
    pages = OTHER_PAGES.get(target, {})
    return "".join(f" {what}: [{name}]({name}.md)." for name, what in pages.items() if name != page)


SERVED_RESULTS = "evidence-served"
IN_SHORT = """## In short

What follows is of the default as it is published now, from [evidence-served](evidence-served.md); the rest of
this page is of other arrangements. {beside} {verdict}

Here experts guess from long lists, without the tokens of the text, and then they guess hardly more than one
adapter does: level with most traffic, .012 more where languages tell the domains apart (without a gate,
five seeds, [evidence](evidence.md)). The likely reason: a feature drafter reads the target's own states,
which tell the domain by themselves, so one adapter that replays all domains can learn them all without one
disturbing another, and experts have nothing to separate (separate experts, without a shared adapter, guess
less [on three of nine kinds of traffic](evidence.md), where prompts are of two domains, of none, or shift,
and as much on the others, with one seed). It cannot be the whole reason: an independent draft reads no such
states, and there experts bring no more than one adapter either
([evidence-mini-served](evidence-mini-served.md); the single adapter has more weights there). What knowing
the domain does bring is a short list of its own words ([tokens of the
text](experiments.md#tokens-of-the-text))."""

OF_INDEPENDENT = """## In short

With an independent draft model experts bring no more than one adapter does. As such a draft learns now
([evidence-mini-served](evidence-mini-served.md)), both gain some .02 of first guesses; with the same gate
they are level or nearly so, and one adapter without a gate has a little more with a steady mix. Such a
draft has no list of tokens of its own for each domain, which is what experts of a feature drafter gain by
([tokens of the text](experiments.md#tokens-of-the-text)). So by guesses nothing decides here who the
default is. It is joint learning all the same, because no domain ended below the draft as it is shipped, and
because each domain's version can be pinned, taken back, exported or removed by itself. `selector = "fixed"`
is one adapter."""

METHOD_TEXT = """## How it was measured

- **First guesses**: the share of the target's own greedy tokens that the drafter's most likely token hits, on
  held-out prompts that no arrangement learns from, read along the target's cached answers. **Tokens per
  step**: what one step of the target gives at a draft length of three, with a draft begun at every token.
  Neither depends on the speed or the load of the machine.
- **Intervals** are 95 %, by a paired bootstrap over held-out prompts; a prompt's counts are added up over the
  seeds. A seed changes the order of the requests, what is drawn from replay, and the adapters' first weights.
  A difference is called *better* or *worse* only where the interval excludes zero and every seed agrees; all
  else is *open*. With one seed the words are not in bold: nothing is known of others. Intervals
  are not corrected for their number: of twenty that hide no difference, one is expected to exclude zero.
- **Labels are hidden**: domains are the router's answer, after it was fitted on 40 example prompts a domain
  that are neither served nor held out. *True labels* is the exception.
{weights}
- **Equal updates**: the same number of updates and steps, unless a title says otherwise. About one record
  in eight is held back from training in every arrangement, since the gate needs it; arrangements without a
  gate publish every update.
- **With gate**: the gate, after each update once. A server also makes *further updates* from the same
  records while they still bring something, of an independent draft model none; arrangements with some of
  these, fewer than a server's, have a section of their own where they were run. Not in these figures: a
  server changes the interval between updates, takes versions back that later requests show to be worse, and
  lets what an answer shows of the experts decide who drafts on (`selector = "evidence"`); here the router
  alone does. A server's gate judges drafts of four tokens (`num_speculative_tokens`), the one in these runs
  drafts of three. The default and the one adapter with a gate have an older form of the gate on
  [evidence-served](evidence-served.md) in all seeds of one domain after another and of the sharp shift, in
  the first three of the steady mix and in the first one of the other orders, but for the one with a domain
  that the drafter was trained on; every other run of that page that has a gate has the present form (lists
  for each domain but for the first seed of the steady mix). The older form does not count what kept
  candidates did, where it asks whether a domain is better left to the draft base, but [what live adapters do
  on new records](experiments.md#a-domain-that-the-drafter-knows), and gives such a domain adapters sooner;
  where one domain follows another, the present one had .002 less in the end with the one seed that was run
  anew. The base of an independent draft model serves no domain alone, so in the runs of
  [evidence-mini-served](evidence-mini-served.md) the gate does not ask it. That of
  [evidence-turns](evidence-turns.md) decides alike on what is published, but throws joint candidates away
  sooner. All others were made with the forms that the gate had at their time, which publish
  [later](experiments.md#what-the-gate-goes-by).
- **Lowest point of a domain**: of all measurements on the way and at the end, and of all domains, the one
  that stood lowest against static, and after how many requests. As the lowest of several is picked, a little
  of it is chance. The gate judges by one record in eight of those that came, so that it can hardly protect a
  domain of which few have come yet.
- *Offline bound*: all requests are known beforehand and learned from with three times the updates."""

EQUAL_WEIGHTS = """\
- **Equal weights**: an adapter that stands alone has the rank of two that stand on each other, so as
  many weights take part in each guess. One adapter drafts the tokens that any domain's traffic held, and the
  base's, some 16 000; an expert [those of its own list](experiments.md#how-long-an-experts-own-list-is). On
  [evidence-served](evidence-served.md) that is as long as guesses best on new records (512 to 8 192 tokens),
  and every arrangement, static too, guesses
  [the tokens of a prompt's own text](experiments.md#tokens-of-the-text) beside it. All other runs were made
  before that, from lists of 4 096 tokens alone, and before lists counted what the target held possible, a
  domain's share of the records was held out, and training went on from candidates that do some harm
  ([what that changed](experiments.md#what-the-gate-threw-away)).
- **Experts as they are published**: with the
  [rank that they need](experiments.md#what-an-expert-needs-of-its-rank) in the runs of
  [evidence-served](evidence-served.md) and [evidence-turns](evidence-turns.md), but for poisoned traffic of
  the latter; whole in runs from before 2026-11-26; cut further, which cost about .005 of first guesses, in
  all others.{strength}
- **Further answers**: {further}
- **Unsure routing**: {unsure}"""
UNEQUAL_WEIGHTS = """\
- **Weights**: an adapter that stands alone has the rank of two that stand on each other. It changes all
  layers, an expert the last layer and the output layer only, so one adapter has more weights at work."""


FULL_STRENGTH = """ Adapters are published
  at full strength (`--strength 1`), as all were until 2026-11-28; a trainer now publishes those of a feature
  drafter [a little weaker](experiments.md#how-strong-adapters-are-published)."""


FURTHER = "a trainer learns from [further answers](experiments.md#further-answers) to each prompt as well. "


def further_answers(resampled: Mapping[str, Sequence[int]]) -> str:
    """What all that learns in these runs learns from. resampled: further answers to a prompt, by traffic."""
    with_them = {pattern: max(counts) for pattern, counts in resampled.items() if counts and max(counts)}
    if not with_them:
        return f"{FURTHER}In these runs nothing does."
    counts = sorted(set(with_them.values()))
    said = f"{FURTHER}With {listed(map(title_of, with_them))} all that learns here does, from "
    said += f"{listed(map(str, counts))} of them; "
    how = (
        " These are all there before the first update, and as long as served ones; a trainer draws those of "
        "32 records in an update, of 64 to 256 tokens."
    )
    without = [title_of(pattern) for pattern in resampled if pattern not in with_them]
    return said + (f"with {listed(without)} nothing does." if without else "there is no other traffic.") + how


def unsure_routing(unsure: Mapping[str, Sequence[int | None]]) -> str:
    """Whom a request teaches that the router does not know well. unsure: how many, by traffic and run."""
    said = (
        "where the router is less than 95 % sure, a record teaches each expert as often as the router "
        "believes the text to be its"
    )
    counted = {pattern: [n for n in counts if n is not None] for pattern, counts in unsure.items()}
    some = [f"{title_of(name)} (up to {max(of)} requests)" for name, of in counted.items() if any(of)]
    if not some:
        return f"{said}; in these runs, which are older, it teaches the one that it was routed to."
    older = [title_of(pattern) for pattern, counts in unsure.items() if None in counts]
    rest = f" In older runs ({listed(older)}) it teaches the one that it was routed to." if older else ""
    return f"{said}: with {listed(some)}.{rest}"


def method(
    target: str,
    strengths: Sequence[float],
    resampled: Mapping[str, Sequence[int]],
    unsure: Mapping[str, Sequence[int | None]],
) -> str:
    """strengths: with which the runs' adapters were published. The others: see the functions above."""
    if target == "mini":
        return METHOD_TEXT.format(weights=UNEQUAL_WEIGHTS)
    found = listed(f"{one:g}" for one in strengths)
    said = FULL_STRENGTH if [*strengths] == [1.0] else f" Adapters are published at a strength of {found}."
    more = {"further": further_answers(resampled), "unsure": unsure_routing(unsure)}
    weights = EQUAL_WEIGHTS.format(strength=said, **more)
    return METHOD_TEXT.format(weights=weights)


COMMANDS = """## Run it again

Answers of the target are kept in a folder (`--cache`), each run in a file of its own; a command that was
stopped goes on where it was. These commands make what is missing in the results of
[evidence-served](evidence-served.md) and [evidence-mini-served](evidence-mini-served.md), one seed more with
each `--seeds`; where a run would be made otherwise than those that are there, a message says what to change.
All arrangements with all traffic would be some hundred runs a seed, of three to six minutes each, so
`--patterns` and `--arrangements` choose.

    python scripts/evidence.py --data ../shared/data --out results/evidence-served --dtype float32 \\
        --doc docs/evidence-served.md --parts withheld
    python scripts/evidence.py --data ../shared/data --out results/evidence-served --dtype float32 \\
        --doc docs/evidence-served.md --parts served \\
        --arrangements static,offline,offline:wide,mixed-replay:wide
    python scripts/evidence.py --data ../shared/data --out results/evidence-mini-served --target mini \\
        --doc docs/evidence-mini-served.md --parts main,gated --patterns steady,one-by-one,new-domain \\
        --arrangements static,latest-window,mixed-replay,mixed-replay+gate,joint+gate

The runs of [evidence](evidence.md), [evidence-turns](evidence-turns.md) and
[evidence-long](evidence-long.md) are of older forms of moedraft, from before drafters guessed the tokens of a
request's own text, and those of [evidence-mini](evidence-mini.md) learned at a rate of .001, where it is
[.00015 now, of longer updates](experiments.md#joint-updates-of-an-independent-draft-model). So the present
code adds none to them; newer files name the commit of their code. What they show is made in the present
form in a folder of its own, and so is its page, `evidence.md` in that folder. The first of these commands
takes a quarter of an hour, the others hours.{times}

    python scripts/evidence.py --data ../shared/data --out /tmp/quick --quick  # the default and one adapter
    python scripts/evidence.py --data ../shared/data --out /tmp/evidence --parts main,gated,further,poison
    python scripts/evidence.py --data ../shared/data --out /tmp/mini --target mini --parts main,gated
    python scripts/evidence.py --data ../shared/data --out /tmp/costs --parts lean,equal-cost,restart
    python scripts/evidence.py --data ../shared/data --out /tmp/long --parts main --patterns steady \\
        --requests 960 --measured 10 --seeds 2

The paper's own experiments, one command each: offline, online and both, and which tokens are guessed right;
objectives, and these with each kind of answers; the update interval; data sets one after another; by language
and by topic; the speed-up predicted and measured:

    python scripts/evidence.py --data ../shared/data --out /tmp/paper --parts paper
    python scripts/evidence.py --data ../shared/data --out /tmp/paper --parts objectives
    python scripts/evidence.py --data ../shared/data --out /tmp/paper-mini --target mini --parts data
    python scripts/evidence.py --data ../shared/data --out /tmp/paper --parts interval
    python scripts/evidence.py --data ../shared/data --out /tmp/paper --parts main --patterns one-by-one
    python scripts/evidence.py --data ../shared/data --out /tmp/paper --parts main --patterns steady
    moedraft bench --target smollm2

With `--parts` only a part is run: `main`, `further` (with further updates), `served` (the default as a
trainer publishes, and one adapter as large, with the gate and without), `withheld` (one adapter as large
that is withheld from domains of which nothing was learned), `poison` (a client that sends rubbish), `paper`
(offline, online, and both), `objectives` (forward KL and others), `interval` (how often to update), `lean`
(with an eighth and a quarter of the steps), `equal-cost` (as many operations as one adapter takes), `gated`
(the other online arrangements with the gate), `restart` (what a trainer has lost that is started again),
`gate` (without its second look) or `data` (whose answers are learned from; an independent draft model
only). `--patterns` and `--arrangements` choose from it; `--only-write` runs nothing and writes the page."""

DASH = "—"
NOT_MEASURED = "not measured"


def number(one: dict[str, Any] | None, digits: int = 3) -> str:
    """`.412 [.390, .433]`"""
    if one is None:
        return DASH
    return f"{short(one['value'], digits)} [{short(one['low'], digits)}, {short(one['high'], digits)}]"


def difference(one: dict[str, Any] | None, digits: int = 3) -> str:
    """As `number`, with signs and, where it is sure, the verdict."""
    if one is None:
        return DASH
    value, low, high = (
        f"{'+' if one[key] >= 0 else '−'}{short(abs(one[key]), digits)}" for key in ("value", "low", "high")
    )
    sure = "**" if len(one.get("seeds", "..")) > 1 else ""
    mark = {"better": f" {sure}better{sure}", "worse": f" {sure}worse{sure}"}.get(one["verdict"], "")
    return f"{value} [{low}, {high}]{mark}"


def short(value: float, digits: int = 3) -> str:
    """`.412`, `−.012`, `1.61`"""
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) else ""
    return sign + (text.removeprefix("0") if digits == 3 else text)


def short_sign(value: float) -> str:
    return ("+" if value >= 0 else "") + short(value)


def cells(title: str, one: dict[str, Any], *, is_static: bool) -> list[str]:
    """An arrangement's first cells: title, seeds, both figures, and what it has more than static."""
    gain = DASH if is_static else difference(one["gain"])
    return [title, str(one["seeds"]), number(one["first_guess"]), number(one["tokens"], 2), gain]


def listed(names: Iterable[str]) -> str:
    """`a, b and c`"""
    names = list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def how_many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def waits(found: Sequence[int | str | None] | None) -> str:
    """Requests by seed."""
    if not found:
        return DASH
    if all(one is None for one in found):
        return NOT_MEASURED
    return ", ".join(NOT_MEASURED if one is None else str(one) for one in found)


def interval(one: dict[str, Any]) -> str:
    """`+.012 [−.003, +.020]`"""
    return f"{short_sign(one['value'])} [{short_sign(one['low'])}, {short_sign(one['high'])}]"


def disputed(one: dict[str, Any]) -> bool:
    """Whether a difference is open though its interval excludes zero: the seeds disagree."""
    return bool(one["verdict"] == "open" and (one["low"] > 0 or one["high"] < 0))


def dispute(one: dict[str, Any]) -> str:
    return f"its interval says {interval(one)}, but the {how_many(len(one['seeds']), 'seed')} disagree"


def told_apart(
    found: Iterable[tuple[str, dict[str, Any]]], words: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Sorted by their verdicts, one phrase for each of `words`; then those on which the seeds disagree."""
    by_verdict: dict[str, list[str]] = {verdict: [] for verdict in words}
    split = []
    for title, one in found:
        if disputed(one):
            split.append(f"{title}: {dispute(one)}")
        else:
            seeds = how_many(len(one["seeds"]), "seed")
            by_verdict[one["verdict"]].append(f"{title} ({short_sign(one['value'])}, {seeds})")
    return [f"{words[key]} {listed(names)}" for key, names in by_verdict.items() if names], split
