"""How adapters stand beside the draft base: on new records, before these are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from candidates import candidate
from distill_rig import record
from test_judge import Figures, Together, by_tensors
from test_second_look import fresh
from test_together import Records

from moedraft.core import SHARED, Domain, ReplayRecord
from moedraft.distill.fresh.beside_base import MOST_COUNTED, BesideBase
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.judging.gate import Seen
from moedraft.distill.judging.judge import Judge
from moedraft.distill.judging.options import Options
from moedraft.distill.judging.together import decide_together
from moedraft.distill.measuring.figures import Measured, expected_tokens
from moedraft.distill.outlet import HomeOutlet
from moedraft.storage import changes
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store


@pytest.fixture
def store(store: Store) -> Store:
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("example",) * 2, 0.0))
    return store


def learned(store: Store, *records: Sequence[ReplayRecord], **live: float) -> BesideBase:
    """With these records, from which live versions that add so much were trained."""
    for each in records:
        store.replay.add(list(each))
    looked = BesideBase(Figures(by_tensors), store)
    looked.gather()
    looked.base_hash = candidate(SHARED, 0.0).base_hash
    for name, value in ({"shared": 0.0} | live).items():
        store.adapters.publish(candidate(name, value))
    looked.published(store.replay.last_id())
    return looked


def note_kept(looked: BesideBase, records: list[ReplayRecord], value: float) -> None:
    """As after a second look at candidates that add so much to the base."""
    base, adapted = (
        Figures(by_tensors)({SHARED: weights}, "code", records, lambda: None)
        for weights in (None, candidate(SHARED, value))
    )
    looked.note_kept("code", records, Seen(base, adapted))


def gains(looked: BesideBase) -> dict[str, tuple[int, float]]:
    """By domain: records, and tokens per step that the adapters give more than the base alone."""
    found = {name: looked.seen(name) for name in ("code", "prose", SHARED)}
    return {name: (one.after.records, round(more(one), 2)) for name, one in found.items() if one}


def more(seen: Seen) -> float:
    base, live = (expected_tokens(one.counts.sum(0).astype(float)) for one in (seen.before, seen.after))
    return float(live - base)


# -- what is seen ----------------------------------------------------------------------------------


def test_what_serves_is_measured_beside_the_base_on_records_that_are_new_to_it(store: Store) -> None:
    looked = learned(store, fresh(5), shared=0.1, code=-0.3)
    looked.gather()
    assert not gains(looked), "nothing came since"
    held = [one for one in (record(300_000 + n) for n in range(200)) if is_held_out(one)][:3]
    new = fresh(6, first=200_000)
    store.replay.add([*new, *new[:2], *fresh(5)[:2], *held])
    looked.gather()
    assert gains(looked) == {"code": (6, -0.2)}, "each prompt once, none trained on, none held out"
    looked.gather()
    assert gains(looked) == {"code": (6, -0.2)}, "and no record twice"


def test_what_came_while_an_update_waited_and_was_trained_on_is_not_new(store: Store) -> None:
    looked = learned(store, fresh(5), code=-0.2)
    looked.gather()
    store.replay.add(fresh(4, first=200_000))  # after `gather`, and before the update draws
    store.adapters.publish(candidate(SHARED, 0.0, parent=1))
    looked.published(store.replay.last_id())
    store.replay.add(fresh(2, first=600_000))
    looked.gather()
    assert gains(looked) == {"code": (2, -0.2)}


def test_a_domain_that_the_live_version_has_not_learned_says_nothing(store: Store) -> None:
    looked = learned(store, fresh(5), fresh(2, "prose", 400_000), shared=0.1, code=0.1)
    known = store.replay.last_id()
    store.replay.add([*fresh(3, first=200_000), *fresh(4, "prose", 500_000)])
    looked.gather()
    assert gains(looked) == {"code": (3, 0.2)}
    looked.published(known)  # what came since was not learned from
    store.replay.add(fresh(2, "prose", 600_000))
    looked.gather()
    assert gains(looked) == {"code": (3, 0.2)}
    looked.published(store.replay.last_id())  # now it has
    store.replay.add(fresh(2, "prose", 700_000))
    looked.gather()
    assert gains(looked) == {"code": (3, 0.2), "prose": (2, 0.1)}


def test_after_a_restart_domains_with_a_version_are_measured_as_soon_as_the_base_is_known(
    store: Store,
) -> None:
    learned(store, fresh(5), code=-0.2)
    looked = BesideBase(Figures(by_tensors), store)
    looked.gather()
    looked.base_hash = candidate(SHARED, 0.0).base_hash
    store.replay.add(fresh(2, first=200_000))
    looked.gather()
    assert gains(looked) == {"code": (2, -0.2)}


def test_adapters_are_measured_while_the_base_serves_alone(store: Store) -> None:
    """Else they could never get their domain back."""
    looked = learned(store, fresh(5), code=-0.2)
    store.registry.set_unadapted({"code"})
    store.replay.add(fresh(3, first=200_000))
    looked.gather()
    assert gains(looked) == {"code": (3, -0.2)}


def test_the_newest_records_count_and_purged_ones_are_forgotten(store: Store) -> None:
    looked = learned(store, fresh(5), code=-0.2)
    store.replay.add(fresh(MOST_COUNTED + 4, first=200_000))
    looked.gather()
    store.adapters.publish(candidate("code", 0.3, parent=1))
    store.replay.add(fresh(MOST_COUNTED // 2, first=600_000))
    looked.gather()
    assert gains(looked) == {"code": (MOST_COUNTED, pytest.approx(0.05, abs=0.01))}
    looked.forget()
    assert not gains(looked)


def test_what_was_seen_of_a_version_that_was_taken_back_counts_no_more(store: Store) -> None:
    looked = learned(store, fresh(5), code=0.1)
    store.replay.add(fresh(3, first=200_000))
    looked.gather()
    store.adapters.publish(candidate("code", -0.3, parent=1))
    store.replay.add(fresh(4, first=600_000))
    looked.gather()
    assert gains(looked)["code"][0] == 7
    changes.rollback(store, "code")
    looked.gather()
    assert gains(looked) == {"code": (3, 0.1)}


def test_one_client_does_not_decide_who_stands_below_the_base(store: Store) -> None:
    """Neither at once nor one after another."""
    looked = learned(store, fresh(5), code=-0.2)
    for first in (200_000, 300_000):
        store.replay.add([replace(one, source="flood") for one in fresh(12, first=first)])
        looked.gather()
    store.replay.add([replace(one, source="others") for one in fresh(4, first=600_000)])
    looked.gather()
    assert gains(looked) == {"code": (8, -0.2)}


def test_kept_candidates_count_where_live_adapters_were_not_measured(store: Store) -> None:
    looked = learned(store, fresh(5), code=-0.2)
    store.replay.add(fresh(3, first=200_000))
    looked.gather()
    both = store.replay.records("code", limit=3)
    none = [replace(one, id=one.id + 100) for one in both[:2]]
    note_kept(looked, [*none, *both], 0.3)
    assert gains(looked) == {"code": (3, -0.2)}, "what serves did nothing of it"
    shown = looked.seen("code", with_kept=True)
    assert shown is not None
    assert shown.before.records == 5
    assert more(shown) == pytest.approx((2 * 0.3 - 3 * 0.2) / 5, abs=0.01)


def test_the_newest_of_both_count_and_one_client_gives_no_more_than_all_others(store: Store) -> None:
    looked = learned(store, fresh(5), code=-0.2)
    store.replay.add(fresh(MOST_COUNTED, first=200_000))
    looked.gather()
    live = store.replay.records("code", limit=1)[0]
    later = [replace(live, id=live.id + 1 + n, source="others") for n in range(3)]
    note_kept(looked, later, 0.3)
    shown = looked.seen("code", with_kept=True)
    assert shown is not None
    assert shown.before.records == MOST_COUNTED
    assert more(shown) == pytest.approx((3 * 0.3 - (MOST_COUNTED - 3) * 0.2) / MOST_COUNTED, abs=0.01)
    looked.forget()
    note_kept(looked, [replace(live, id=live.id + 50 + n, source="flood") for n in range(MOST_COUNTED)], 0.3)
    note_kept(looked, [replace(one, id=one.id + 200) for one in later], -0.2)
    shown = looked.seen("code", with_kept=True)
    assert shown is not None
    assert shown.before.records == 6
    assert more(shown) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("back", ["code", SHARED])
def test_kept_candidates_count_no_more_where_a_version_was_taken_back(store: Store, back: str) -> None:
    """Training goes on from another version, whichever the candidates came from."""
    looked = learned(store, fresh(5), code=0.1)
    note_kept(looked, [replace(record(900_000), id=100)], -0.2)
    store.adapters.publish(candidate(back, -0.3, parent=1))
    looked.published(store.replay.last_id())
    looked.gather()
    assert more_with_kept(looked) == {"code": (1, -0.2)}, "a publication changes little of it"
    changes.rollback(store, back)
    looked.gather()
    assert more_with_kept(looked) == {}


def more_with_kept(looked: BesideBase) -> dict[str, tuple[int, float]]:
    found = {name: looked.seen(name, with_kept=True) for name in ("code", "prose", SHARED)}
    return {name: (one.after.records, round(more(one), 2)) for name, one in found.items() if one}


def test_a_flood_pushes_out_neither_other_clients_nor_the_newest(store: Store) -> None:
    looked = learned(store, fresh(5))
    one = record(900_000)
    note_kept(looked, [replace(one, id=100 + n, source="others") for n in range(6)], 0.3)
    note_kept(looked, [replace(one, id=200 + n, source="flood") for n in range(40)], -0.2)
    assert more_with_kept(looked) == {"code": (12, pytest.approx(0.05, abs=0.01))}
    looked.forget_kept("code")
    assert more_with_kept(looked) == {}
    note_kept(looked, [replace(one, id=number) for number in reversed(range(100, 132))], -0.2)
    note_kept(looked, [replace(one, id=number) for number in reversed(range(132, 142))], 0.3)
    assert [row.record.id for row in looked.of_kept["code"]] == [*range(110, 142)]
    looked.forget()
    assert more_with_kept(looked) == {}


def test_before_anything_was_published_nothing_is_measured(store: Store) -> None:
    figures = Figures(by_tensors)
    looked = BesideBase(figures, store)
    looked.base_hash = candidate(SHARED, 0.0).base_hash
    store.replay.add(fresh(5))
    looked.gather()
    store.replay.add(fresh(5, first=200_000))
    looked.gather()
    assert not figures.asked


# -- what the gate makes of it ---------------------------------------------------------------------


def home(rng: np.random.Generator, loss: float, stood: int) -> dict[str, Options]:
    """Six domains gain .3 tokens per step over the base; another, with two held-out records, loses."""
    found = {f"d{n}": of_domain(rng, 0.3, 5, 12) for n in range(6)}
    return found | {"known": of_domain(rng, -loss, 2, stood)}


def of_domain(rng: np.random.Generator, gain: float, held: int, stood: int) -> Options:
    records, others = Records(rng, held), Records(rng, max(stood, 1))
    static, live, new, old = (records.draft(value) for value in (0.0, gain - 0.05, gain, gain - 0.05))
    seen = Seen(others.draft(0.0), others.draft(gain - 0.05)) if stood else None
    return Options(live, new, old, None, static, 1.0, static if held + stood >= 3 else None, None, seen)


def left_to_base(loss: float, stood: int, trials: int = 60) -> dict[str, float]:
    """In which share of the published updates the base serves the domain that loses, or another one."""
    rng, found = np.random.default_rng(3), list[frozenset[str]]()
    for _ in range(trials):
        verdicts = decide_together(home(rng, loss, stood), {}, SHARED)
        if verdicts[SHARED].is_published:
            found.append(frozenset(name for name, one in verdicts.items() if one.unadapted))
    assert len(found) > trials / 2
    known = sum("known" in aside for aside in found) / len(found)
    return {"known": known, "others": sum(bool(aside - {"known"}) for aside in found) / len(found)}


def test_a_domain_that_adapters_harm_is_left_to_the_base_by_what_was_seen_of_them() -> None:
    assert left_to_base(0.2, 0)["known"] == 0, "two held-out records alone are too few"
    few, some = left_to_base(0.2, 5), left_to_base(0.1, 10)
    assert few["known"] >= 0.6
    assert some["known"] >= 0.6
    assert few["others"] == some["others"] == 0
    assert left_to_base(-0.1, 10)["known"] <= 0.05, "one that gains a little is left its adapters"


def left_with(kept: tuple[float, int] | None, *, aside: bool = False, gain: float = 0.1) -> float:
    """How often the base serves a domain with two held-out records on which candidates gain by chance."""
    rng, found = np.random.default_rng(5), list[bool]()
    for _ in range(60):
        one = of_domain(rng, gain, 2, 0)
        seen = shown(rng, *kept) if kept else None
        serves = one.static if aside and one.static else one.before
        known = replace(one, before=serves, base=one.static, with_kept=seen, aside=aside)
        verdicts = decide_together(home(rng, 0.0, 0) | {"known": known}, {}, SHARED)
        if verdicts[SHARED].is_published:
            found.append(bool(verdicts["known"].unadapted))
    assert len(found) > 15
    return sum(found) / len(found)


def shown(rng: np.random.Generator, gain: float, count: int) -> Seen:
    others = Records(rng, count)
    return Seen(others.draft(0.0), others.draft(gain))


def harmed(rng: np.random.Generator) -> dict[str, Options]:
    """Domains that an update would harm, so that it is not published."""
    found = {f"d{n}": of_domain(rng, -0.3, 5, 0) for n in range(4)}
    return {name: replace(one, before=one.static or one.before) for name, one in found.items()}


def test_what_kept_candidates_did_says_what_the_next_would_do() -> None:
    assert left_with(None) == 0
    assert left_with((-0.2, 12)) >= 0.7
    assert left_with((0.2, 12)) <= 0.05


def test_a_domain_that_the_base_serves_gets_adapters_where_they_are_surely_better() -> None:
    """Whoever serves goes on, where lucky held-out records stand against new ones."""
    waits, goes = (left_with((-0.15, 8), aside=aside) for aside in (True, False))
    assert waits >= goes + 0.2
    assert left_with((0.2, 5), aside=True, gain=0.15) <= 0.1, "one that gains does not wait"


def test_what_kept_candidates_did_says_nothing_of_what_serves() -> None:
    """Adapters that serve well are not taken away where nothing is published, and do not come back by it."""
    rng = np.random.default_rng(1)

    def unadapted(one: Options) -> bool | None:
        verdicts = decide_together(harmed(rng) | {"known": one}, {}, SHARED)
        assert not verdicts[SHARED].is_published
        return verdicts["known"].unadapted

    well, badly, none = (of_domain(rng, gain, held, 0) for gain, held in ((0.3, 5), (-0.3, 5), (-0.3, 0)))
    assert not unadapted(replace(well, with_kept=shown(rng, -0.3, 14), base=well.static))
    back = replace(badly, before=badly.static or badly.before, base=badly.static, aside=True)
    bad = shown(rng, -0.3, 14)
    assert unadapted(replace(back, stood=bad, with_kept=shown(rng, 0.3, 14))) is not False
    assert unadapted(replace(back, stood=shown(rng, 0.3, 14))) is False
    few = replace(none, with_kept=shown(rng, -0.3, 14), base=none.static)
    assert not unadapted(replace(few, stood=shown(rng, -0.3, 2))), "two records of what serves are too few"
    assert unadapted(replace(few, stood=shown(rng, -0.3, 8)))


def test_why_the_base_goes_on_serving_is_told() -> None:
    """Where adapters may be a little better, it is not said that they are worse."""
    rng, told = np.random.default_rng(3), set[str]()
    for _ in range(40):
        one = of_domain(rng, 0.1, 2, 0)
        known = replace(one, before=one.static or one.before, base=one.static, with_kept=shown(rng, -0.1, 5))
        verdicts = decide_together(home(rng, 0.0, 0) | {"known": replace(known, aside=True)}, {}, SHARED)
        found = verdicts["known"]
        if verdicts[SHARED].is_published and found.unadapted and found.reason:
            told.add(found.reason)
    doubtful = [one for one in told if "not likely enough" in one]
    below = [one for one in told if "probably stand below" in one]
    assert doubtful
    assert below
    assert len(doubtful) + len(below) == len(told)
    assert all(": -" in one for one in below)


def test_what_was_seen_counts_beside_held_out_records() -> None:
    rng = np.random.default_rng(0)
    one = of_domain(rng, -0.2, 4, 8)
    base, after = one.beside_static(one.old)
    assert base.records == after.records == 12
    base, after = replace(one, with_kept=shown(rng, 0.1, 11)).beside_static(one.old)
    assert base.records == after.records == 15
    assert replace(one, with_kept=shown(rng, 0.1, 11)).now()[0].records == 12
    plain = replace(one, stood=None)
    assert plain.beside_static(one.old) == (one.static, one.old)


def test_a_domain_gets_its_adapters_back_without_a_publication_where_they_are_better_again() -> None:
    """Nothing is published, since nobody gains; the base serves `known` alone."""

    def decided(gain: float, stood: int = 12) -> bool | None:
        rng = np.random.default_rng(2)
        others = {f"d{n}": replace(of_domain(rng, 0.1, 8, 8), new=None) for n in range(5)}
        worse = {name: replace(one, old=Records(rng, 8).draft(-0.3)) for name, one in others.items()}
        one = of_domain(rng, gain, 8, stood)
        known = replace(one, before=one.static, new=None, aside=True)
        verdicts = decide_together({**worse, "known": known}, {}, SHARED)
        assert not verdicts[SHARED].is_published
        return verdicts["known"].unadapted if "known" in verdicts else None

    assert decided(0.3) is False
    assert decided(-0.3) in (True, None), "it stays with the base"
    assert decided(0.04) in (True, None), "also where adapters seem to do as well"
    assert decided(0.3, stood=2) in (True, None), "two lucky records prove nothing"
    assert decided(0.3, stood=4) is False


class Harmed(Figures):
    """Adapters give more on prose, and less on code than the base."""

    def __init__(self, gain: float = 0.2) -> None:
        super().__init__(lambda serving, domain: self.of(serving, domain))
        self.gain = gain  # on prose

    def of(self, serving: object, domain: str) -> float:
        adapted = any(one is not None for one in serving.values())  # type: ignore[attr-defined]
        return 0.5 + adapted * (self.gain if domain == "prose" else -0.15)

    def __call__(self, *given: object, **named: object) -> Measured:
        return replace(super().__call__(*given, **named), loss=0.1)  # type: ignore[arg-type]


def test_the_reason_counts_what_was_seen_beside_the_base() -> None:
    found = decide_together(home(np.random.default_rng(0), 0.15, 10), {}, SHARED)["known"]
    assert found.unadapted
    assert (found.reason or "").endswith(" -0.12 tokens per step, by 12 of its records."), "two are held out"


def test_a_trainers_loop_leaves_a_domain_to_the_base_by_its_new_records(store: Store) -> None:
    prose = [one for one in (record(5000 + n, "prose") for n in range(300)) if is_held_out(one)][:8]
    store.replay.add([*prose, *fresh(5, "prose", 500_000), *fresh(6)])
    judge = Judge(Harmed(), store, base_serves=True)
    loop = JointLoop(Together({"shared": 0.1, "code": 0.1}), store, HomeOutlet(store), 4, judge)  # type: ignore[arg-type]
    loop.beside_base = judge.beside_base
    loop.run_once()
    assert store.registry.live(SHARED) is not None
    assert store.registry.unadapted() == set(), "of code nothing is held out, so nothing is known of it"
    store.replay.add(fresh(12, first=800_000))
    loop.run_once()
    assert judge.beside_base is not None
    assert judge.beside_base.seen("code") is not None
    assert judge.beside_base.seen("prose") is None
    assert store.registry.unadapted() == {"code"}
    loop.trainer.last_id = 0
    store.replay.purge("code")
    loop.run_once()
    assert judge.beside_base.seen("code") is None


@pytest.mark.parametrize("looked", [True, False])
def test_what_a_kept_candidate_did_counts_at_the_first_publication(store: Store, looked: bool) -> None:
    """Before anything serves, only candidates can show whom adapters would harm."""
    prose = [one for one in (record(5000 + n, "prose") for n in range(300)) if is_held_out(one)][:8]
    store.replay.add([*prose, *fresh(5, "prose", 500_000), *fresh(6)])
    figures = Harmed(gain=0.0)
    judge, trainer = Judge(figures, store, base_serves=True), Together({"shared": 0.0, "code": 0.0})
    loop = JointLoop(trainer, store, HomeOutlet(store), 4, judge)  # type: ignore[arg-type]
    loop.beside_base, loop.second_look = judge.beside_base, judge.second_look if looked else None
    assert loop.run_once() is None
    assert [one.decision for one in store.updates.recent() if one.expert == SHARED] == ["keep"]
    trainer.value, figures.gain = {"shared": 0.1, "code": 0.1}, 0.2
    store.replay.add([*fresh(5, first=800_000), *fresh(14, "prose", 700_000)])
    loop.run_once()
    assert store.registry.live(SHARED) is not None
    assert store.registry.unadapted() == ({"code"} if looked else set())
