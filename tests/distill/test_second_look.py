"""The second look: evidence of a line of candidates, on records that none of them was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from candidates import candidate
from distill_rig import record
from numpy.typing import NDArray
from test_judge import Figures, Together, by_tensors, loop_of
from test_together import TOKENS, counts_of

from moedraft.core import SHARED, Domain, GateDecision, StorageError
from moedraft.distill.fresh.beside_base import BesideBase, SeenRecord, some_of
from moedraft.distill.fresh.new_records import MOST
from moedraft.distill.fresh.second_look import SecondLook
from moedraft.distill.judging.gate import DOUBTFUL, Seen, Verdict, compare, decide, decide_again
from moedraft.distill.measuring.figures import Measured, joined
from moedraft.storage import changes
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.retention.shares import Held
from moedraft.storage.store import TARGET_ID, Store

Pair = tuple[Measured, Measured]
EVERY, HELD_OUT = 16, 8  # records of an update, one in so many held out


# -- simulated lines ---------------------------------------------------------------------------


class Pool:
    """Records of one kind that came between two updates; each draft has noise of its own on them."""

    SLOPE = 0.7  # as of `test_together.Records`

    def __init__(self, rng: np.random.Generator, count: int) -> None:
        self.rng, self.count = rng, count
        self.margins = rng.normal(-0.3, 0.8, (count, 1)) + rng.normal(0, 1.5, (count, TOKENS))

    def noise(self) -> NDArray[np.float64]:
        return self.rng.normal(0, 0.4, self.margins.shape) + self.rng.normal(0, 0.05, (self.count, 1))

    def measured(self, draft: Draft) -> Measured:
        margins = self.margins + draft.noise(self) + draft.quality / self.SLOPE
        chances = np.stack([(1 / (1 + np.exp(-margins))).sum(1), np.full(self.count, TOKENS)], axis=1)
        return Measured(counts_of(margins > 0), None, chances)


class Draft:
    """A candidate guesses much like the one that it was trained on from."""

    NEW = 0.6  # weight of the noise that an update adds

    def __init__(self, quality: float, parent: Draft | None = None) -> None:
        self.quality, self.parent = quality, parent
        self._noise: dict[Pool, NDArray[np.float64]] = {}

    def noise(self, pool: Pool) -> NDArray[np.float64]:
        if pool not in self._noise:
            old = None if self.parent is None else self.parent.noise(pool)
            new = pool.noise()
            self._noise[pool] = new if old is None else old * (1 - self.NEW**2) ** 0.5 + self.NEW * new
        return self._noise[pool]


def pair(live: Draft, new: Draft, pools: Sequence[Pool]) -> Pair:
    return joined([one.measured(live) for one in pools]), joined([one.measured(new) for one in pools])


class Home:
    """Ten updates in a row; `again`: with the second look."""

    def __init__(self, seed: int, again: bool) -> None:
        self.rng, self.again = np.random.default_rng(seed), again
        self.live = Draft(0.0)
        self.kept: list[Draft] = []
        self.held: list[Pool] = []
        self.line: list[Pair] = []
        self.gains: list[float] = []  # of each version that was published over the one before
        self.served: list[float] = []  # quality of what served after each update

    def update(self, gain: float) -> None:
        held = int(self.rng.binomial(EVERY, 1 / HELD_OUT))
        fresh = Pool(self.rng, EVERY - held)
        if self.kept and self.again:
            self.line.append(pair(self.live, self.kept[-1], [fresh]))
        self.held += [Pool(self.rng, held)] if held else []
        parent = self.kept[-1] if self.kept else self.live
        new = Draft(parent.quality + gain, parent)
        decision = self.judged(new)
        if decision == "promote":
            self.gains.append(new.quality - self.live.quality)
            self.live = new
        self.kept = [*self.kept, new] if decision == "keep" else []
        self.line = self.line if decision == "keep" else []
        self.served.append(self.live.quality)

    def judged(self, new: Draft) -> str:
        if not self.held and not self.line:
            return "keep"
        before, after = pair(self.live, new, self.held or [Pool(self.rng, 0)])
        if not self.line:
            return decide(before, after, len(self.kept)).decision
        seen = Seen(joined([one for one, _ in self.line]), joined([one for _, one in self.line]))
        return decide_again(before, after, seen, len(self.kept)).decision


def homes(again: bool, gain: float, spread: float, trials: int) -> list[Home]:
    found = [Home(seed, again) for seed in range(trials)]
    for seed, home in enumerate(found):
        for one in np.random.default_rng((1, seed)).normal(gain, spread, 10):
            home.update(float(one))
    return found


def published(found: Sequence[Home]) -> float:
    """Versions by home."""
    return sum(len(home.gains) for home in found) / len(found)


def served(found: Sequence[Home]) -> float:
    """Tokens per step that learning brings while it goes on, on average."""
    return float(np.mean([home.served for home in found]))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # six kinds of lines, 600 homes each
def test_less_is_published_by_chance_and_true_gains_sooner() -> None:
    """The figures of docs/experiments.md; `always` would serve the mean of `gain` times 1 … 10."""
    trials = 300
    for gain, spread in ((0.0, 0.0), (0.0, 0.02), (-0.02, 0.01), (0.005, 0.005), (0.015, 0.01), (0.03, 0.01)):
        once, twice = (homes(again, gain, spread, trials) for again in (False, True))
        bad = [sum(one < 0 for home in found for one in home.gains) / trials for found in (once, twice)]
        print(
            f"{gain:+.3f} ± {spread:.3f}: versions {published(once):.2f} → {published(twice):.2f}, "
            f"worse ones {bad[0]:.2f} → {bad[1]:.2f}, serves {served(once):+.4f} → {served(twice):+.4f}"
        )
        if gain == spread == 0:
            assert published(twice) < published(once)
        elif gain > 0:
            assert served(twice) > served(once)
        else:
            assert served(twice) > served(once) - 0.001


def test_small_gains_are_published_sooner_and_nothing_more_often_by_chance() -> None:
    assert published(homes(True, 0.0, 0.0, 25)) <= published(homes(False, 0.0, 0.0, 25))
    assert served(homes(True, 0.015, 0.005, 12)) > served(homes(False, 0.015, 0.005, 12))


# -- the decision ------------------------------------------------------------------------------


def figures(right: Sequence[int], tries: int = 100) -> Measured:
    return Measured(np.array([[[one, tries]] for one in right], np.int64).reshape(-1, 1, 2))


def test_a_line_makes_sure_what_few_records_leave_open() -> None:
    before, after = figures([50, 52, 48, 51, 50]), figures([52, 48, 53, 51, 50])
    assert decide(before, after).decision == "keep"
    line = Seen(figures([50, 51, 49] * 5), figures([56, 55, 57] * 5))
    assert decide_again(before, after, line, 0).decision == "promote"
    harm = Seen(line.after, line.before)
    assert decide_again(before, after, harm, 0).decision == "discard"


def test_a_candidate_that_lost_what_its_line_had_is_not_published() -> None:
    before, after = figures([50, 52, 48, 51, 50]), figures([46, 47, 45, 46, 50])
    assert compare(before, after).better < DOUBTFUL
    found = decide_again(before, after, Seen(figures([50] * 20), figures([56, 57] * 10)), 0)
    assert found.decision == "keep"
    assert found.reason


# -- a home ------------------------------------------------------------------------------------


def fresh(count: int, domain: str = "code", first: int = 100_000) -> list[Any]:
    found = (record(first + n, domain) for n in range(10 * count))
    return [replace(one, held_out=False) for one in found if not is_held_out(one)][:count]


@pytest.fixture
def store(store: Store) -> Store:
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    store.registry.set_meta(TARGET_ID, "tiny")
    return store


def kept(look: SecondLook, *names: str, value: float = 0.1, better: float = 0.5) -> None:
    made = [candidate(name, value) for name in names]
    verdicts = {name: Verdict("keep", better=better) for name in names}
    look.settled(made, verdicts, look.store.replay.last_id())


def seen_records(look: SecondLook, name: str) -> dict[str, int]:
    return {domain: one.before.records for domain, one in look.seen(candidate(name, 0.0)).items()}


def test_new_records_are_measured_once_before_they_are_trained_on(store: Store) -> None:
    store.replay.add(fresh(5))
    look = SecondLook(Figures(by_tensors), store)
    kept(look, SHARED, "code", "prose")
    look.gather()
    assert seen_records(look, SHARED) == {}  # nothing came since
    new = fresh(6, first=200_000)
    held_out = [one for one in (record(300_000 + n) for n in range(200)) if is_held_out(one)][:3]
    store.replay.add([*new, *new[:3], *held_out, *fresh(2, "prose", 400_000)])
    look.gather()
    assert seen_records(look, SHARED) == {"code": 6, "prose": 2}
    look.gather()
    assert seen_records(look, SHARED) == {"code": 6, "prose": 2}
    seen = look.seen(candidate(SHARED, 0.0))["code"]
    assert compare(seen.before, seen.after).gain == pytest.approx(0.2)  # the shared one's and the expert's
    store.replay.add(fresh(4, first=500_000))
    kept(look, SHARED, "code")  # what came is trained on now
    store.replay.add(fresh(2, first=600_000))
    look.gather()
    assert seen_records(look, SHARED) == {"code": 8, "prose": 2}


def beside(look: SecondLook) -> dict[str, tuple[int, float]]:
    """By domain: records, and the gain of kept candidates over the base alone."""
    assert look.beside is not None
    seen = {name: look.beside.seen(name, with_kept=True) for name in ("code", "prose")}
    return {
        n: (one.before.records, round(compare(one.before, one.after).gain, 2))
        for n, one in seen.items()
        if one
    }


def test_kept_candidates_are_measured_beside_the_base(store: Store) -> None:
    store.adapters.publish(candidate(SHARED, 0.05))
    store.registry.set_unadapted({"prose"})  # there the base is what serves
    figures = Figures(by_tensors)
    look = SecondLook(figures, store, BesideBase(figures, store))
    store.replay.add([*fresh(5), *fresh(5, "prose", 400_000)])
    kept(look, SHARED, "code", "prose")
    store.replay.add([*fresh(4, first=200_000), *fresh(3, "prose", 500_000)])
    look.gather()
    assert beside(look) == {}, "a candidate of an older version than the one that serves"
    look.settled(
        [candidate(name, 0.1, parent=int(name == SHARED)) for name in (SHARED, "code", "prose")],
        dict.fromkeys((SHARED, "code", "prose"), Verdict("keep")),
        store.replay.last_id(),
    )
    store.replay.add([*fresh(4, first=600_000), *fresh(3, "prose", 700_000)])
    before = len(figures.asked)
    look.gather()
    assert beside(look) == {"code": (4, 0.2), "prose": (3, 0.2)}
    assert len(figures.asked) == before + 3 + 2, "where the base serves it is measured once"


@pytest.mark.parametrize("end", ["promote", "discard", "harm", "pinned", "failed"])
def test_what_was_seen_beside_the_base_outlives_a_publication_and_nothing_else(
    store: Store, end: str
) -> None:
    look = SecondLook(Figures(by_tensors), store, BesideBase(Figures(by_tensors), store))
    store.replay.add(fresh(5))
    kept(look, SHARED, "code")
    store.replay.add(fresh(4, first=200_000))
    look.gather()
    assert beside(look) == {"code": (4, 0.2)}
    made = [candidate(SHARED, 0.1)]
    if end == "failed":
        look.forget()
    elif end == "harm":
        kept(look, SHARED, "code", better=0.05)
    else:
        verdicts = {} if end == "pinned" else {SHARED: Verdict(end)}  # type: ignore[arg-type]
        look.settled(made, verdicts, store.replay.last_id())
    assert beside(look) == ({"code": (4, 0.2)} if end == "promote" else {})


def test_where_live_adapters_were_measured_candidates_are_not_measured_again_beside_the_base(
    store: Store,
) -> None:
    figures = Figures(by_tensors)
    look = SecondLook(figures, store, BesideBase(figures, store))
    assert look.beside is not None
    store.replay.add(fresh(5))
    kept(look, SHARED, "code")
    store.replay.add(fresh(4, first=200_000))
    seen = store.replay.records("code", limit=3)
    figure = figures({SHARED: candidate(SHARED, -0.3)}, "code", seen, lambda: None)
    base = figures({SHARED: None}, "code", seen, lambda: None)
    for i, one in enumerate(seen):
        row = SeenRecord(Held(one.id, "", False), (0, 0), Seen(some_of(base, [i]), some_of(figure, [i])))
        look.beside.rows.setdefault("code", []).append(row)
    look.gather()
    assert [row.record.id for row in look.beside.of_kept["code"]] == [seen[-1].id - 1]
    assert beside(look)["code"][0] == 4


def test_what_an_expert_did_that_is_thrown_away_does_not_count(store: Store) -> None:
    """The shared adapter's line goes on; the next expert is trained on from another."""
    look = SecondLook(Figures(by_tensors), store, BesideBase(Figures(by_tensors), store))
    store.replay.add([*fresh(5), *fresh(5, "prose", 400_000)])
    kept(look, SHARED, "code", "prose")
    store.replay.add([*fresh(4, first=200_000), *fresh(3, "prose", 500_000)])
    look.gather()
    assert beside(look) == {"code": (4, 0.2), "prose": (3, 0.2)}
    made = [candidate(name, 0.1) for name in (SHARED, "code", "prose")]
    verdicts = {SHARED: Verdict("keep"), "code": Verdict("discard"), "prose": Verdict("keep")}
    look.settled(made, verdicts, store.replay.last_id())
    assert beside(look) == {"prose": (3, 0.2)}
    store.replay.add([*fresh(2, first=600_000), *fresh(2, "prose", 700_000)])
    look.gather()
    assert beside(look) == {"code": (2, 0.1), "prose": (5, 0.2)}, "of code the shared adapter's alone"


def test_nor_does_what_it_did_where_a_domain_loses_its_expert_without_having_learned(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store, BesideBase(Figures(by_tensors), store))
    store.replay.add([*fresh(5), *fresh(5, "prose", 400_000)])
    kept(look, SHARED, "code", "prose")
    store.replay.add([*fresh(4, first=200_000), *fresh(3, "prose", 500_000)])
    look.gather()
    verdicts = {SHARED: Verdict("promote"), "prose": Verdict("reset")}
    look.settled([candidate(SHARED, 0.1)], verdicts, store.replay.last_id())
    assert beside(look) == {"code": (4, 0.2)}


@pytest.mark.parametrize(("decision", "better"), [("discard", 0.5), ("keep", 0.05)])
def test_an_expert_that_learns_alone_takes_no_other_domains_figures_along(
    store: Store, decision: GateDecision, better: float
) -> None:
    look = SecondLook(Figures(by_tensors), store, BesideBase(Figures(by_tensors), store))
    store.replay.add([*fresh(5), *fresh(5, "prose", 400_000)])
    kept(look, SHARED, "code", "prose")
    store.replay.add([*fresh(4, first=200_000), *fresh(3, "prose", 500_000)])
    look.gather()
    verdict = Verdict(decision, better=better)
    look.settled([candidate("code", 0.1)], {"code": verdict}, store.replay.last_id())
    assert beside(look) == {"prose": (3, 0.2)}


def test_a_domain_that_the_line_has_not_learned_says_nothing_of_it(store: Store) -> None:
    """When traffic moves, weights that do not know the new domain must not speak against those that do."""
    look = SecondLook(Figures(by_tensors), store)
    kept(look, SHARED, "code")
    store.replay.add([*fresh(4), *fresh(5, "prose", 400_000), *fresh(5, SHARED, 500_000)])
    look.gather()
    assert seen_records(look, SHARED) == {"code": 4}
    kept(look, SHARED, "code", "prose")  # the next candidates have learned from these
    store.replay.add([*fresh(3, "prose", 600_000), *fresh(2, SHARED, 700_000)])
    look.gather()
    assert seen_records(look, SHARED) == {"code": 4, "prose": 3, SHARED: 2}


def test_a_shared_adapter_that_learns_in_turns_is_seen_on_all_that_it_learned(store: Store) -> None:
    store.replay.add([*fresh(5), *fresh(2, "prose", 400_000)])
    look = SecondLook(Figures(by_tensors), store)
    kept(look, SHARED)
    store.replay.add([*fresh(3, first=200_000), *fresh(3, "prose", 500_000)])
    look.gather()
    assert seen_records(look, SHARED) == {"code": 3}
    store.adapters.publish(candidate("prose", 0.0))  # it was learned from before, as its expert shows
    kept(look, SHARED)
    store.replay.add(fresh(2, "prose", 600_000))
    look.gather()
    assert seen_records(look, SHARED) == {"code": 3, "prose": 2}


def test_known_domains_are_seen_though_most_records_are_of_a_new_one(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, SHARED, "code")
    store.replay.add([*fresh(4), *fresh(2 * MOST, "prose", 400_000)])
    look.gather()
    assert seen_records(look, SHARED) == {"code": 4}


def test_prompts_that_were_trained_on_are_not_new_when_they_come_again(store: Store) -> None:
    """Else a flood of one prompt, or a client that tries again, would show what was learned by heart."""
    trained = fresh(5)
    store.replay.add(trained)
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    store.replay.add([*trained, *fresh(2, first=200_000)])
    look.gather()
    assert seen_records(look, "code") == {"code": 2}


def test_an_expert_that_learns_alone_is_seen_on_its_own_domain(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    store.replay.add([*fresh(3), *fresh(3, "prose", 400_000)])
    look.gather()
    assert seen_records(look, "code") == {"code": 3}
    assert seen_records(look, SHARED) == {}


@pytest.mark.parametrize("end", ["promote", "discard"])
def test_a_line_ends_with_a_decision(store: Store, end: Any) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    store.replay.add(fresh(3))
    look.gather()
    assert seen_records(look, "code")
    look.settled([candidate("code", 0.1)], {"code": Verdict(end)}, 0)
    assert not seen_records(look, "code")


def test_what_did_harm_says_nothing_of_what_is_trained_on_from_it(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    store.replay.add(fresh(3))
    look.gather()
    look.settled([candidate("code", -0.1)], {"code": Verdict("keep", better=0.3)}, store.replay.last_id())
    assert seen_records(look, "code")
    look.settled([candidate("code", -0.1)], {"code": Verdict("keep", better=0.05)}, store.replay.last_id())
    assert not seen_records(look, "code")
    store.replay.add(fresh(2, first=200_000))
    look.gather()
    assert seen_records(look, "code") == {"code": 2}  # the line itself goes on


def test_a_line_ends_when_something_else_serves(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    store.adapters.publish(candidate(SHARED, 0.0))
    store.replay.add(fresh(3))
    look.gather()
    assert not seen_records(look, "code")


def test_no_more_records_are_measured_than_an_update_has(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    store.replay.add(fresh(5, first=500_000))
    kept(look, SHARED)
    store.replay.add(fresh(2 * MOST))
    look.gather()
    assert seen_records(look, SHARED) == {"code": MOST}


def test_one_client_does_not_decide_what_is_seen(store: Store) -> None:
    look = SecondLook(Figures(by_tensors), store)
    kept(look, "code")
    flood = [replace(one, source="flood") for one in fresh(40, first=200_000)]
    store.replay.add([*[replace(one, source="others") for one in fresh(5)], *flood])
    look.gather()
    assert seen_records(look, "code") == {"code": 10}


def test_a_pinned_expert_is_seen_as_it_is(store: Store) -> None:
    """Its candidate is never published, so what it would do says nothing."""
    look = SecondLook(Figures(by_tensors), store)
    kept(look, SHARED, "code")
    changes.pin(store, "code")
    store.replay.add(fresh(4))
    look.gather()
    seen = look.seen(candidate(SHARED, 0.0))["code"]
    assert compare(seen.before, seen.after).gain == pytest.approx(0.1)  # the shared one's alone
    changes.pin(store, SHARED)
    look.gather()
    assert not seen_records(look, SHARED)


def with_second_look(loop: Any) -> Any:
    loop.second_look = loop.judge.second_look
    return loop


def test_a_kept_update_is_published_with_what_came_since(store: Store) -> None:
    """The held-out records alone would keep it for ever, until it is thrown away."""
    loop, _ = loop_of(store, Together, shared=0.004, code=0.0)
    with_second_look(loop)
    assert loop.run_once(SHARED) is None
    assert [one.decision for one in store.updates.recent() if one.expert == SHARED] == ["keep"]
    loop.judge.measure.share = better_on_new(loop.judge.measure.share)
    store.replay.add([*fresh(16), *fresh(16, "prose", 400_000)])
    assert loop.run_once(SHARED) is not None
    last = [one for one in store.updates.recent() if one.expert == SHARED][-1]
    assert last.decision == "promote"
    assert last.gate_records > 16


def better_on_new(share: Callable[..., float]) -> Callable[..., float]:
    return lambda serving, domain: share(serving, domain) + 0.1 * (serving[SHARED] is not None)


def test_a_publication_that_fails_leaves_nothing_of_a_line(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person changed meanwhile what serves, so the candidates are thrown away."""
    loop, _ = loop_of(store, Together, shared=0.1, code=0.1)
    with_second_look(loop)
    loop.second_look.beside = BesideBase(loop.judge.measure, store)
    loop.second_look.beside.note_kept("code", *kept_rows(loop))

    def overtaken(*_: Any, **__: Any) -> None:
        changes.pin(store, "code")
        raise StorageError("code is pinned")

    monkeypatch.setattr(loop.outlet, "publish", overtaken)
    assert loop.run_once(SHARED) is None
    assert not loop.failures
    assert loop.second_look.beside.of_kept == {}


def kept_rows(loop: Any) -> tuple[list[Any], Seen]:
    """A record, and what the base and a candidate did on it."""
    one = [record(900_000)]
    measured = [
        loop.judge.measure({SHARED: made}, "code", one, lambda: None)
        for made in (None, candidate(SHARED, 0.1))
    ]
    return one, Seen(*measured)


def test_after_a_failure_nothing_is_left_of_a_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, trainer = loop_of(store, code=0.0)
    with_second_look(loop)
    loop.run_once("code")
    store.replay.add(fresh(3))
    loop.second_look.gather()
    assert seen_records(loop.second_look, "code")

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(trainer, "update", fail)
    loop.run_once("code")
    assert not seen_records(loop.second_look, "code")
