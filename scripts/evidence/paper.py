"""The experiments of Online Speculative Decoding (arXiv 2310.07177) in small, beside what the paper gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evidence import boundaries
from evidence.arrangements import ARRANGEMENTS, GATED, JOINT, LATEST, ONE_ADAPTER, SERVED, STATIC, TAUGHT
from evidence.streams import ONLY, title_of
from evidence.words import DASH, difference, listed, number, table

# Acceptance of its online draft in the first and the last tenth of the stream, and of its offline bound;
# Vicuna-7B with LLaMA-160M, version 4.
PUBLISHED = {
    "sql_en": ("Spider", ".59 → .75", ".76"),
    "math_en": ("GSM8K", ".68 → .76", ".75"),
    "code_python": ("CodeSearchNet (Python)", ".54 → .67", ".65"),
    "general_en": ("Alpaca (finance)", ".62 → .70", ".67"),
}
NO_FIGURES = "The paper's figures for its objectives could not be verified and are left out."
NEVER_SEEN = (
    " Where reverse KL or total variation gain less than forward KL, it is most likely because a drafter "
    "that has seen few records often gives the target's next token next to no probability, and there they "
    "hardly pull."
)
SPEED_UP = (
    "**Speed-up predicted against measured.** The paper's online draft reaches .95 to 2.55 times the speed "
    "of plain decoding with a 7B target, where its formula says .98 to 3.00, and 1.28 to 2.63 with a 33B "
    "target, where it says 1.31 to 3.12. Ours stands in [benchmarks](benchmarks.md#speed-at-batch-1) (the "
    "columns *theory* and *× transformers*). The formula takes the checking of several tokens to cost one "
    "step of the target. On a GPU with a large target that is nearly so; on two cores each further token "
    "costs some per cent of a step, and a target of 135 million weights hides less of what the draft takes."
)
GROUPED = (ONE_ADAPTER, "separate-true", "separate", JOINT, GATED)
Whole = dict[str, Any]


def parts(whole: Whole) -> list[str]:
    ways = (single, top_tokens, shift, boundaries.part, routed, objectives, data, interval)
    found = [way(whole) for way in ways]
    shown = [part for part in found if part]
    return ["## The paper's experiments in small", *shown, SPEED_UP] if shown else []


def single(whole: Whole) -> str:
    """One data set at a time: offline, online and both."""
    rows = []
    for domain, (title, online, offline) in PUBLISHED.items():
        of = whole["patterns"].get(ONLY + domain, {})
        for name in (STATIC, LATEST, "one-offline", "one-both", SERVED):
            if name in of:
                theirs = {LATEST: f"{title} {online}", "one-offline": f"{title} {offline}"}.get(name, DASH)
                gain = difference(of[name]["gain"]) if name != STATIC else DASH
                moved = _moved(of[name])
                cells = [
                    domain,
                    ARRANGEMENTS[name].title,
                    str(of[name]["seeds"]),
                    number(of[name]["first_guess"]),
                ]
                rows.append([*cells, gain, moved, theirs])
    if not rows:
        return ""
    head = (
        "data",
        "arrangement",
        "seeds",
        "first guesses",
        "more than static",
        "first → last tenth",
        "the paper, α",
    )
    return (
        "**Offline, online, and both.** The paper trains an independent draft of 160 M weights, all of them, "
        "on other data sets with longer streams, and counts α, the overlap of the two distributions. Here a "
        "drafter of 5 M weights learns through adapters, and greedy guesses are counted. So figures compare "
        "within a column. The paper's abstract claims a rise of the acceptance rate by .10 to .65."
        f"{harmed(whole)}\n\n{table(head, rows)}"
    )


def harmed(whole: Whole) -> str:
    """Where learning without a gate ends below static; nothing where it does so nowhere."""
    found = {domain: whole["patterns"].get(ONLY + domain, {}) for domain in PUBLISHED}
    gained = {d: {n: one["gain"] for n, one in of.items() if one["gain"]} for d, of in found.items()}
    worse = [d for d, of in gained.items() if any(of[n]["verdict"] == "worse" for n in of if n != SERVED)]
    if not worse:
        return ""
    gated = [f"{domain} {difference(gained[domain][SERVED])}" for domain in worse if SERVED in gained[domain]]
    beside = f" With the gate and further updates: {'; '.join(gated)}." if gated else ""
    return (
        f" With {listed(worse)}, adapters that learn without a gate end below static: what the drafter "
        "guesses well already, because it was trained on such text, a few hundred requests make worse."
        f"{beside}"
    )


def top_tokens(whole: Whole) -> str:
    """The tokens that are said most often: how they are guessed before and after learning."""
    rows = []
    for pattern, name, one in _each(whole, "told"):
        for what, of in one["told"].items():
            cells = [pattern.removeprefix(ONLY), ARRANGEMENTS[name].title, what, f"{of['share']:.2f}"]
            rates = (of[key][when] for key in ("precision", "recall") for when in ("before", "after"))
            rows.append([*cells, *(f"{rate:.2f}" for rate in rates)])
    if not rows:
        return ""
    head = ("data", "arrangement", "tokens", "of all", "precision", "after", "recall", "after")
    return (
        "**Which tokens are guessed right**, by how often the target says them in the answers to the "
        "held-out prompts. Precision: of the places where one of these tokens is guessed, at how many the "
        "target says it. Recall: of the places where the target says it, at how many it is guessed. Of one "
        "seed. The paper shows this as a figure without numbers, of its hundred most frequent tokens, so "
        "there is no figure to compare with.\n\n" + table(head, rows)
    )


def routed(whole: Whole) -> str:
    """One adapter for all, and one for each language or topic."""
    rows = []
    for name, of in whole["patterns"].get("steady", {}).items():
        if name not in GROUPED or "groups" not in of:
            continue
        for group, one in of["groups"].items():
            more = DASH if one["more"] is None else difference(one["more"])
            rows.append([group, ARRANGEMENTS[name].title, seeds_of(one), difference(one["gain"]), more])
    rows.sort(key=lambda row: row[0])
    if not rows:
        return ""
    head = (
        "what tells the domains apart",
        "arrangement",
        "seeds",
        "more than static",
        "more than one adapter",
    )
    return (
        "**Routed by language and by topic**, in the steady mix. The domains of documentation differ in "
        "their language, the others in their topic and are English. *One adapter* learns from all of them "
        "with as many weights. The paper trains one draft for each language or topic. Its languages rise "
        "by .11 (Japanese, .53 → .64) to .01 (Russian, .47 → .48), and its separate drafts have some .06 "
        "more than a single one, read off its figure; they are whole models, so five of them have five times "
        "the weights.\n\n" + table(head, rows)
    )


def seeds_of(one: Whole) -> str:
    """Of the first comparison, and of the second one where it has fewer."""
    fewer = one["more"] is not None and len(one["more"]["seeds"]) < one["seeds"]
    return f"{one['seeds']}, {len(one['more']['seeds'])}" if fewer else str(one["seeds"])


def shift(whole: Whole) -> str:
    """α over the stream while data sets follow one another."""
    of = whole["patterns"].get("one-by-one", {})
    rows = [[ARRANGEMENTS[n].title, str(of[n]["seeds"]), _moved(of[n])] for n in of if "first_tenth" in of[n]]
    if not rows:
        return ""
    head = ("arrangement", "seeds", "first → last tenth of the stream")
    return (
        "**Distribution shift.** Data sets one after another, in an order that changes with the seed; first "
        "guesses on the requests themselves, each before it was learned from. The tenths hold different "
        "domains, so only rows compare. The paper shows this as a figure, without a table, for its four data "
        "sets; here general questions are not among the data sets, French and Japanese documentation are. In "
        "its figure α rises within each data set and falls at each boundary, since its one draft learns from "
        "the latest requests alone.\n\n" + table(head, rows)
    )


def objectives(whole: Whole) -> str:
    """Forward KL, which is the default, against the others."""
    return variants(
        whole,
        ("joint:rkl", "joint:jsd", "joint:tvd", "joint:missed"),
        f"**Objectives**, on the {title_of('steady')}; the default is forward KL. *Refused guesses count "
        "twice*: places where the drafter's most likely token is wrong at that moment, so that verification "
        f"would refuse its draft. {NO_FIGURES}{NEVER_SEEN if whole['settings']['target'] != 'mini' else ''}",
    )


def data(whole: Whole) -> str:
    """Each objective with each kind of answers."""
    of = whole["patterns"].get("steady", {})
    names = [name for row in TAUGHT.values() for name in row.values() if name in of]
    if not any(ARRANGEMENTS[name].data != "target" for name in names):
        return ""
    about = (
        "**Objectives and whose answers** are learned from: the target's, those that the draft gives to the "
        "same prompts when it answers alone, with what the target says of each of their tokens, or half of "
        "each. A server has the target's answers for nothing; the draft's need a forward of the target more. "
        "What verification itself computes of a draft's tokens is no third kind: after the first refused "
        "token nothing of the draft counts, and up to there its tokens are the target's. The paper compares "
        f"the same nine. {NO_FIGURES}"
    )
    return variants(whole, [name for name in names if name != JOINT], about)


def interval(whole: Whole) -> str:
    """How often there is an update, for the same number of steps."""
    every = whole["settings"]["every"]
    about = (
        "**Update interval**, with as many steps in all; the default is an update after every "
        f"{every} requests. The paper fixed 8; of others no figure of it could be verified. Here it matters "
        "little: an update learns from all records that are kept, not from the latest ones alone, so what "
        "comes a little later is learned from all the same."
    )
    return variants(whole, ("joint:half", "joint:double"), about)


def _each(whole: Whole, key: str) -> Iterator[tuple[str, str, Whole]]:
    """Pattern, arrangement and figures of all runs that have this figure."""
    for pattern, arrangements in whole["patterns"].items():
        for name, one in arrangements.items():
            if one.get(key):
                yield pattern, name, one


def variants(
    whole: Whole,
    wanted: Sequence[str],
    about: str,
    pattern: str = "steady",
    more: str = "the default has more",
) -> str:
    """A table of these arrangements beside joint learning; nothing where none of them was run."""
    of = whole["patterns"].get(pattern, {})
    names = [name for name in wanted if name in of]
    if not names or JOINT not in of:
        return ""
    rows = [
        [
            ARRANGEMENTS[name].title,
            str(of[name]["seeds"]),
            number(of[name]["first_guess"]),
            difference(of[name]["gain"]),
            difference(of[name]["default_more"].get(JOINT)) if name != JOINT else DASH,
        ]
        for name in (JOINT, *names)
    ]
    head = ("arrangement", "seeds", "first guesses", "more than static", more)
    return f"{about}\n\n{table(head, rows)}"


def _moved(one: Whole) -> str:
    if "first_tenth" not in one:
        return DASH
    return f"{number(one['first_tenth'])} → {number(one['last_tenth'])}"
