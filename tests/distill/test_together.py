"""The gate for joint updates, from figures alone: what passes in a small home of eight domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moedraft.distill.judging.alone import decide_alone
from moedraft.distill.judging.gate import MOST_KEPT, RISEN, WORSE, Verdict, compare
from moedraft.distill.judging.options import Options
from moedraft.distill.judging.shrinkage import estimates
from moedraft.distill.judging.together import (
    LARGEST_SHARE,
    decide_together,
    in_doubt,
    shares_of,
)
from moedraft.distill.measuring.figures import FEW, Counts, Measured

DEPTH = 4
TOKENS = 48
TRIALS = 200
Domains = dict[str, Options]


def counts_of(right: np.ndarray) -> Counts:
    """bool [records, tokens]: hits and tries by depth, drafted from every token on."""
    counts = np.zeros((len(right), DEPTH, 2), np.int64)
    alive = np.ones_like(right)
    for step in range(DEPTH):
        tried = alive[:, : right.shape[1] - step]
        alive = tried & right[:, step:]
        counts[:, step] = np.stack([alive.sum(1), tried.sum(1)], axis=1)
    return counts


class Records:
    """Held-out records of one domain, on which several drafts are measured.

    Each token has a margin by which the draft prefers it. Above 0 it is the draft's guess, and the higher it
    is, the more probable the draft finds it. Drafts share most of a margin; the rest is chance, by token and
    by record. A gain moves all margins. At these spreads a record's gain varies by about 0.18 tokens a step,
    which is what small homes show.
    """

    SLOPE = 0.7  # tokens per step that a shift of all margins by 1 gives, about

    def __init__(self, rng: np.random.Generator, count: int) -> None:
        self.rng, self.count = rng, count
        hard = rng.normal(-0.3, 0.8, (count, 1))
        self.margins = hard + rng.normal(0, 1.5, (count, TOKENS))

    def draft(self, gain: float) -> Measured:
        """A draft that gives so many more tokens per step than the others."""
        own = self.rng.normal(0, 0.4, self.margins.shape) + self.rng.normal(0, 0.05, (self.count, 1))
        margins = self.margins + own + gain / self.SLOPE
        chances = np.stack([(1 / (1 + np.exp(-margins))).sum(1), np.full(self.count, TOKENS)], axis=1)
        return Measured(counts_of(margins > 0), None, chances)


def options(
    rng: np.random.Generator,
    new: float | None,
    old: float,
    records: int = 5,
    *,
    none: float | None = None,
    static: float | None = None,
    share: float = 1.0,
    base: bool = False,
) -> Options:
    """The gains over what serves now."""
    found = Records(rng, records)
    rest = [None if gain is None else found.draft(gain) for gain in (new, none, static)]
    alone = rest[2] if base else None
    return Options(found.draft(0.0), rest[0], found.draft(old), rest[1], rest[2], share, alone)


def eight(rng: np.random.Generator, gain: float, old: float = 0.0, records: int = 5) -> Domains:
    """The untrained draft is a little worse than what serves."""
    return {f"d{n}": options(rng, gain, old, records, static=-0.05) for n in range(8)}


def shares(
    make: Callable[[np.random.Generator], Domains], trials: int = TRIALS, kept: int = 0
) -> dict[str, float]:
    """How often the shared adapter is published, and how often thrown away, after `kept` that were not."""
    rng, before = np.random.default_rng(1), {"shared": kept}
    found = Counter(decide_together(make(rng), before, "shared")["shared"].decision for _ in range(trials))
    return {name: found[name] / trials for name in ("promote", "discard")}


def decisions(kept: dict[str, int] | None = None, **domains: Options) -> dict[str, str]:
    found = decide_together(domains, kept or {}, "shared")
    return {name: verdict.decision for name, verdict in found.items()}


def test_the_simulation_is_like_what_homes_show() -> None:
    found = Records(np.random.default_rng(0), 8000)
    before, after = found.draft(0.0), found.draft(0.04)
    gain = compare(before, after).gain
    assert gain == pytest.approx(0.04, abs=0.012)
    rng = np.random.default_rng(0)
    gains = [compare(one.draft(0.0), one.draft(0.0)).gain for one in (Records(rng, 5) for _ in range(200))]
    assert np.std([gain or 0.0 for gain in gains]) == pytest.approx(0.18 / 5**0.5, rel=0.25)


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [5, 16])
def test_without_a_gain_few_updates_pass(records: int) -> None:
    found = shares(lambda rng: eight(rng, 0.0, records=records))
    assert found["promote"] <= 0.14
    assert found["discard"] <= 0.14


@pytest.mark.parametrize(
    ("gain", "kept", "least", "most"), [(-0.1, 0, 0.0, 0.2), (-0.1, MOST_KEPT, 0.9, 1.0), (-0.5, 0, 0.9, 1.0)]
)
def test_what_clearly_harms_never_passes(gain: float, kept: int, least: float, most: float) -> None:
    """It is thrown away at once where the harm is great, and else where it goes on for long."""
    found = shares(lambda rng: eight(rng, gain, gain / 2), kept=kept)
    assert found["promote"] == 0
    assert least <= found["discard"] <= most


def test_an_update_that_helps_all_a_little_passes_most_of_the_time() -> None:
    """Five records a domain cannot prove so little of any domain; forty can prove it of all."""

    def make(rng: np.random.Generator) -> Domains:
        gains = rng.uniform(0.02, 0.05, 8)
        return {f"d{n}": options(rng, gain, gain / 2, 5, static=-0.05) for n, gain in enumerate(gains)}

    assert shares(make)["promote"] >= 0.5


def test_a_record_stands_for_its_part_of_the_traffic() -> None:
    rng = np.random.default_rng(3)
    domains = {"big": options(rng, 0, 0, 4, share=90), "small": options(rng, 0, 0, 8, share=10)}
    found = shares_of(domains)
    assert found[:4].sum() / found.sum() == pytest.approx(0.9)
    lonely = {"big": options(rng, 0, 0, 1, share=99), "small": options(rng, 0, 0, 30, share=1)}
    assert shares_of(lonely).max() == LARGEST_SHARE
    assert len(shares_of({"none": options(rng, 0, 0, 0)})) == 0
    losing = {"big": options(rng, -0.3, 0, 24, share=9), "small": options(rng, 0.3, 0.3, 24, share=1)}
    assert decide_together(losing, {}, "shared")["shared"].gain != pytest.approx(0, abs=0.02)


# -- the parts -------------------------------------------------------------------------------------


def test_what_gains_everywhere_goes_together() -> None:
    rng = np.random.default_rng(3)
    found = decisions(
        code=options(rng, 0.2, 0.1, 24), prose=options(rng, 0.2, 0.1, 24), sql=options(rng, None, 0.1, 24)
    )
    assert found == {"shared": "promote", "code": "promote", "prose": "promote"}


@pytest.mark.parametrize(("records", "least"), [(12, 0.9), (24, 0.97)])
def test_a_harmed_domain_among_helped_ones_is_held_back(records: int, least: float) -> None:
    rng = np.random.default_rng(1)
    went, held = 0, 0
    for _ in range(60):
        domains = {f"d{n}": options(rng, 0.05, 0.03, records, static=-0.05) for n in range(7)}
        domains["bad"] = options(rng, -0.3, 0.0, records, static=-0.3)
        found = decisions(**domains)
        went += found["shared"] == "promote"
        held += found["shared"] == "promote" and found["bad"] in ("keep", "discard")
    assert went >= 40
    assert held >= least * went


def test_a_domain_that_would_suffer_with_any_expert_stops_all() -> None:
    rng = np.random.default_rng(3)
    domains = {
        "code": options(rng, 0.4, 0.4, 24),
        "prose": options(rng, -0.4, -0.4, 24),
        "sql": options(rng, 0.4, 0.4, 24),
    }
    found = decide_together(domains, {}, "shared")
    assert {one.decision for one in found.values()} == {"keep"}
    assert "prose" in (found["shared"].reason or "")
    worn_out = dict.fromkeys(("shared", *domains), MOST_KEPT)
    assert set(decisions(worn_out, **domains).values()) == {"discard"}


def test_what_harms_as_a_whole_goes_back_as_a_whole() -> None:
    rng = np.random.default_rng(3)
    found = decisions(code=options(rng, -0.4, -0.4, 24), prose=options(rng, -0.4, -0.4, 24))
    assert set(found.values()) == {"discard"}


def test_an_expert_goes_with_the_shared_adapter_that_is_thrown_away() -> None:
    """Its weights mean nothing without it, however little it harms, and however new it is."""
    rng = np.random.default_rng(3)
    ruined = {"code": options(rng, -0.6, -0.6, 60), "prose": options(rng, -0.05, -0.05, 12)}
    assert set(decisions(**ruined).values()) == {"discard"}
    worn_out = {name: options(rng, -0.1, -0.1, 32) for name in ("code", "prose", "sql")}
    assert set(decisions({"shared": MOST_KEPT, "code": 1}, **worn_out).values()) == {"discard"}


def test_an_expert_that_surely_harms_is_trained_on_above_the_new_shared_adapter() -> None:
    rng = np.random.default_rng(3)
    domains = {"code": options(rng, 0.3, 0.2, 32), "prose": options(rng, 0.05, 0.4, 60)}
    found = decide_together(domains, {}, "shared")
    assert (found["shared"].decision, found["prose"].decision) == ("promote", "keep")
    assert "keeps the expert that it had" in (found["prose"].reason or "")


def test_training_goes_on_from_what_harms_a_little_for_some_time() -> None:
    rng = np.random.default_rng(3)
    domains = {name: options(rng, -0.1, -0.1, 32) for name in ("code", "prose", "sql")}
    found = decide_together(domains, {}, "shared")
    assert found["shared"].better <= 0.1
    assert {one.decision for one in found.values()} == {"keep"}
    assert found["shared"].reason == WORSE
    still = dict.fromkeys(("shared", *domains), MOST_KEPT - 1)
    assert set(decisions(still, **domains).values()) == {"keep"}
    worn_out = dict.fromkeys(("shared", *domains), MOST_KEPT)
    assert set(decisions(worn_out, **domains).values()) == {"discard"}


def test_an_expert_that_is_better_off_as_it_was_stays_behind() -> None:
    """It gains, but by the shared adapter alone."""
    rng = np.random.default_rng(3)
    found = decisions(code=options(rng, 0.3, 0.2, 24), prose=options(rng, 0.05, 0.4, 24))
    assert found["shared"] == "promote"
    assert found["prose"] in ("keep", "discard")


def test_no_loss_is_called_a_promotion() -> None:
    rng = np.random.default_rng(11)
    seen: Counter[str] = Counter()
    for _ in range(60):
        domains = {f"d{n}": options(rng, 0.1, 0.05, 12) for n in range(6)}
        domains |= {f"still{n}": options(rng, -0.005, -0.01, 24) for n in range(2)}
        for verdict in decide_together(domains, {}, "shared").values():
            seen[verdict.decision] += 1
            assert verdict.gain is not None
            assert verdict.decision != "promote" or verdict.gain > 0
            assert verdict.decision != "along" or (verdict.gain <= 0 and verdict.reason)
    assert seen["along"] > 0


def test_a_domain_without_records_goes_with_the_others() -> None:
    rng = np.random.default_rng(3)
    found = decide_together(
        {"code": options(rng, 0.2, 0.1, 24), "new": options(rng, 0.0, 0.0, 0)}, {}, "shared"
    )
    assert {name: one.decision for name, one in found.items()} == dict.fromkeys(
        ("shared", "code", "new"), "promote"
    )
    assert found["new"].records == 0
    nothing = decide_together({"new": options(rng, 0.0, 0.0, 0)}, {}, "shared")
    assert {one.decision for one in nothing.values()} == {"keep"}


# -- the draft without any adapter -----------------------------------------------------------------


def small_losses(rng: np.random.Generator, none: float | None) -> Domains:
    """One domain stands far below the untrained draft, though this update does not make it worse."""
    domains = {f"d{n}": options(rng, 0.1, 0.05, 16, static=-0.05) for n in range(5)}
    domains["low"] = options(rng, 0.0, 0.0, 24, none=none, static=0.3)
    return domains


def test_an_expert_below_the_untrained_draft_is_taken_away() -> None:
    domains = small_losses(np.random.default_rng(2), None)
    assert in_doubt(domains) == ["low"]
    found = decide_together(small_losses(np.random.default_rng(2), 0.3), {}, "shared")
    assert found["shared"].decision == "promote"
    assert found["low"].decision == "reset"
    assert found["low"].static is not None
    assert found["low"].static < 0
    assert "without any adapter" in (found["low"].reason or "")


def test_an_expert_that_did_not_learn_is_taken_away_too() -> None:
    rng = np.random.default_rng(2)
    domains = small_losses(rng, None)
    domains["low"] = options(rng, None, 0.0, 24, none=0.3, static=0.3)
    assert decisions(**domains)["low"] == "reset"


def test_a_domain_that_an_update_pushes_below_the_untrained_draft_stops_it() -> None:
    rng = np.random.default_rng(2)
    domains = {f"d{n}": options(rng, 0.2, 0.1, 16, static=-0.05) for n in range(5)}
    domains["low"] = options(rng, -0.3, -0.3, 32, none=-0.3, static=0.0)
    assert decisions(**domains)["shared"] == "keep"


def test_a_domain_that_the_shared_adapter_harms_is_left_to_the_base_and_stops_nobody() -> None:
    rng = np.random.default_rng(2)
    domains = {f"d{n}": options(rng, 0.2, 0.1, 16, static=-0.05, base=True) for n in range(5)}
    domains["low"] = options(rng, -0.3, -0.3, 32, none=-0.3, static=0.0, base=True)
    found = decide_together(domains, {}, "shared")
    assert found["shared"].decision == "promote"
    assert (found["low"].decision, found["low"].unadapted) == ("keep", True)
    assert "without any adapter" in (found["low"].reason or "")
    assert {found[name].unadapted for name in domains if name != "low"} == {False}


def test_without_a_better_update_a_domain_that_stands_below_the_base_is_left_to_it() -> None:
    rng = np.random.default_rng(2)
    domains = {f"d{n}": options(rng, -0.2, -0.2, 16, static=-0.3, base=True) for n in range(5)}
    domains["low"] = options(rng, 0.0, 0.0, 32, static=0.4, base=True)
    found = decide_together(domains, {}, "shared")
    assert found["shared"].decision != "promote"
    assert found["low"].unadapted
    assert "without any adapter" in (found["low"].reason or "")
    assert {found[name].unadapted for name in domains if name != "low"} == {None}


def test_an_update_that_is_better_than_the_base_brings_the_adapters_back() -> None:
    """What serves now is the base."""
    rng = np.random.default_rng(2)
    domains = {f"d{n}": options(rng, 0.2, 0.1, 16, static=-0.05, base=True) for n in range(5)}
    domains["back"] = options(rng, 0.3, -0.2, 32, static=0.0, base=True)
    found = decide_together(domains, {}, "shared")
    assert (found["back"].decision, found["back"].unadapted) == ("promote", False)


def test_with_the_base_to_fall_back_on_no_domain_ends_far_below_it() -> None:
    rng = np.random.default_rng(5)
    left, went = 0, 0
    for _ in range(40):
        domains = {f"d{n}": options(rng, 0.15, 0.1, 12, static=-0.05, base=True) for n in range(6)}
        domains["low"] = options(rng, -0.2, -0.2, 24, none=-0.2, static=0.0, base=True)
        found = decide_together(domains, {}, "shared")
        went += found["shared"].decision == "promote"
        left += bool(found["shared"].decision == "promote" and found["low"].unadapted)
    assert went >= 30
    assert left >= 0.85 * went


def few_of(static: float, new: float, old: float, none: float | None = None) -> dict[str, Options]:
    """Seven domains that gain, and one with thirty records, for which the base may draft."""
    rng = np.random.default_rng(3)
    domains = {f"d{n}": options(rng, 0.3, 0.1, 16, static=-0.1, base=True) for n in range(7)}
    return domains | {"last": options(rng, new, old, 30, none=none, static=static, base=True)}


def test_the_reason_is_told_why_the_base_serves() -> None:
    found = decide_together(few_of(static=0.0, new=-0.1, old=-0.1, none=-0.1), {}, "shared")["last"]
    assert found.unadapted
    assert found.reason is not None
    assert found.reason.startswith("The domain would probably stand below the draft without any adapter")
    assert found.reason.endswith(" tokens per step, by 30 of its records.")


def test_an_expert_that_is_better_than_the_base_comes_before_it() -> None:
    found = decide_together(few_of(static=0.0, new=-0.3, old=0.2), {}, "shared")["last"]
    assert (found.decision, found.unadapted) == ("discard", False)


def test_an_update_that_leaves_a_domain_only_the_base_it_was_far_above_is_not_published() -> None:
    found = decide_together(few_of(static=-0.4, new=-0.5, old=-0.5, none=-0.5), {}, "shared")
    assert found["shared"].decision != "promote"
    assert not found["last"].unadapted


def test_doing_without_an_expert_is_measured_where_the_base_would_be_better_than_any() -> None:
    assert in_doubt(few_of(static=0.0, new=-0.1, old=-0.1)) == ["last"]


@pytest.mark.parametrize(("gain", "least", "most"), [(0.1, 0.0, 0.01), (0.0, 0.0, 0.08), (-0.2, 0.45, 1.0)])
def test_in_a_small_home_the_base_serves_whom_adapters_harm_and_hardly_anybody_else(
    gain: float, least: float, most: float
) -> None:
    """Seven domains gain .3 with seven records each; the eighth gains `gain`, whatever it gets."""
    rng, aside = np.random.default_rng(1), []
    for _ in range(60):
        domains = {f"d{n}": options(rng, 0.3, 0.1, 7, none=0.1, static=0.0, base=True) for n in range(7)}
        domains["last"] = options(rng, gain, gain, 7, none=gain, static=0.0, base=True)
        found = decide_together(domains, {}, "shared")
        if found["shared"].decision == "promote":
            aside.append(bool(found["last"].unadapted))
    assert len(aside) >= 50
    assert least <= np.mean(aside) <= most


@pytest.mark.parametrize(
    ("new", "none", "static", "decision"),
    [
        (0.3, -0.1, -0.1, "promote"),
        (0.3, -0.2, 0.6, "discard"),
        (0.1, 0.5, 0.5, "reset"),
        (-0.2, 0.5, 0.5, "reset"),
    ],
)
def test_an_expert_that_learned_alone(new: float, none: float, static: float, decision: str) -> None:
    rng = np.random.default_rng(4)
    found = decide_alone(options(rng, new, 0.0, 32, none=none, static=static))
    assert found.decision == decision
    assert found.static is not None


def test_what_was_not_measured_decides_nothing() -> None:
    rng = np.random.default_rng(4)
    assert decide_alone(options(rng, 0.2, 0.0, 32)).decision == "promote"
    nothing = options(rng, 0.2, 0.0, 0, static=0.5)
    assert decide_alone(nothing) == Verdict("keep")


# -- estimates that lean on all --------------------------------------------------------------------


def test_few_records_lean_on_all_and_many_speak_for_themselves() -> None:
    rng = np.random.default_rng(5)
    sizes = (40, 40, 40, 40, 2, 40)
    gains = (0.1, 0.1, 0.1, 0.1, -0.2, -0.3)
    made = [options(rng, gain, 0.0, size) for size, gain in zip(sizes, gains, strict=True)]
    found = estimates([one.before for one in made], [one.new or one.old for one in made])
    own = compare(made[4].before, made[4].new or made[4].old).gain
    assert own is not None
    assert found[4].gain > own
    assert found[4].low < found[4].gain < found[4].high
    assert found[5].worse > 0.95
    assert found[0].worse < 0.2


def test_the_estimates_lie_nearer_the_truth_than_each_domains_own_figures() -> None:
    rng = np.random.default_rng(6)
    shrunk, plain = [], []
    for _ in range(40):
        true = rng.normal(0.04, 0.03, 8)
        made = [options(rng, gain, 0.0, 5) for gain in true]
        news = [one.new or one.old for one in made]
        found = estimates([one.before for one in made], news)
        shrunk += [one.gain - gain for one, gain in zip(found, true, strict=True)]
        own = [compare(one.before, new).gain or 0.0 for one, new in zip(made, news, strict=True)]
        plain += [one - gain for one, gain in zip(own, true, strict=True)]
    assert np.std(shrunk) < 0.7 * np.std(plain)


def test_one_domain_speaks_for_itself_and_nothing_is_unknown() -> None:
    rng = np.random.default_rng(7)
    one = options(rng, 0.1, 0.0, FEW)
    assert one.new is not None
    [found] = estimates([one.before], [one.new])
    assert found.gain == pytest.approx(compare(one.before, one.new).gain)
    empty = options(rng, 0.0, 0.0, 0)
    assert estimates([empty.before], [empty.old])[0].worse == 0.5


# -- published by the witness ----------------------------------------------------------------------


def drafted(hits: Sequence[int], chance: float) -> Measured:
    """Of 100 guesses in each record so many right, with this probability given to the right tokens."""
    counts = np.array([[[one, 100]] for one in hits], np.int64)
    swing = np.where(np.arange(len(hits)) % 2, 0.5, -0.5)
    return Measured(counts, None, np.stack([100 * chance + swing, np.full(len(hits), 100.0)], axis=1))


def test_what_the_witness_has_judged_is_what_is_published() -> None:
    """Guesses that showed no gain at all choose nobody's expert."""
    before = [50, 52, 48, 51, 49, 50]

    def domain(change: Sequence[int]) -> Options:
        new = [a + b for a, b in zip(before, change, strict=True)]
        old = drafted(before, 0.40)
        return Options(old, drafted(new, 0.43), drafted(before, 0.41), None, drafted(before, 0.38))

    found = decide_together(
        {"a": domain([-9, 2, -9, 2, -9, 2]), "b": domain([5, 0, 5, 0, 5, 0])}, {}, "shared"
    )
    assert found["shared"].reason == RISEN
    assert found["shared"].gain <= 0
    assert {name: one.decision for name, one in found.items()} == {
        "shared": "promote",
        "a": "along",
        "b": "promote",
    }
    harmed = decide_together(
        {"a": domain([-30, -31, -29, -30, -32, -28]), "b": domain([0] * 6)}, {}, "shared"
    )
    assert harmed["a"].decision not in ("promote", "along"), "a sure loss is another matter"


def test_what_the_witness_publishes_leaves_nobody_below_the_base() -> None:
    before, swing = [50, 52, 48, 51, 49, 50], [-9, 2, -9, 2, -9, 2]
    new, other = ([a + b for a, b in zip(before, change, strict=True)] for change in (swing, [5, 0] * 3))
    old = drafted(before, 0.40)

    def found(static: int) -> dict[str, Verdict]:
        base = drafted([50 + static] * 6, 0.38)
        low = Options(old, drafted(new, 0.43), drafted(before, 0.41), None, base, base=base)
        high = Options(old, drafted(other, 0.43), drafted(before, 0.41), None, drafted([30] * 6, 0.38))
        return decide_together({"a": low, "b": high}, {}, "shared")

    for static, left in ((-20, None), (20, True)):
        verdicts = found(static)
        assert verdicts["shared"].reason == RISEN
        assert bool(verdicts["a"].unadapted) == bool(left)
