from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import text, update
from storage_fakes import BASE, domain, record, stats

from moedraft.core import SHARED, AdapterVersion, Domain, InvalidRequest, StorageError
from moedraft.storage import Home, Registry, ReplayBuffer, RequestLog, changes
from moedraft.storage.store import Store
from moedraft.storage.tables import adapter_versions


def version(number: int, parent: int = 0, name: str = "sql", state: str = "live") -> AdapterVersion:
    path = f"adapters/{name}/v{number}"
    return AdapterVersion(name, number, parent, path, BASE, 0.5, 2.0, state)  # type: ignore[arg-type]


def states(registry: Registry, name: str = "sql") -> dict[int, str]:
    return {v.version: v.state for v in registry.versions(name)}


@pytest.fixture
def chain(registry: Registry) -> Registry:
    """sql: v1 ← v2 ← v3, the last live."""
    for number in (1, 2, 3):
        registry.add_version(version(number, number - 1))
    return registry


def test_domains_come_back_as_they_were(registry: Registry) -> None:
    registry.add_domain(domain("python", created_at=0.5))
    assert registry.domains() == [domain("python", created_at=0.5), domain("sql")]
    assert registry.domain("sql") == domain("sql")


@pytest.mark.parametrize("name", ["../x", "", "a/b", "A", SHARED, ".", "x" * 65])
def test_bad_names_are_refused(registry: Registry, name: str) -> None:
    with pytest.raises(InvalidRequest):
        registry.add_domain(domain(name))


def test_taken_and_unknown_names_are_refused(registry: Registry) -> None:
    with pytest.raises(InvalidRequest) as taken:
        registry.add_domain(domain())
    assert str(taken.value) == (
        "A domain named 'sql' exists already; remove it first or choose another name."
    )
    for use in (registry.domain, registry.remove_domain, registry.next_version, registry.reserve_version):
        with pytest.raises(InvalidRequest, match="no domain named 'python'"):
            use("python")
    with pytest.raises(InvalidRequest, match="no domain named"):
        registry.add_version(version(1, name="python"))
    with pytest.raises(InvalidRequest, match="no domain named"):
        registry.promote("python", 0)
    with pytest.raises(InvalidRequest, match="no domain named 'shared'"):
        registry.remove_domain(SHARED)
    assert registry.generation() == 1


def test_removing_a_domain_keeps_its_statistics(home: Home, chain: Registry) -> None:
    replay, log = ReplayBuffer(home, 10), RequestLog(home)
    replay.add([record(), record(SHARED)])
    log.add([stats()])
    chain.remove_domain("sql")
    assert chain.domains() == []
    assert chain.versions() == []
    assert replay.sizes() == {SHARED: 1}
    assert chain.updates("sql") == 0
    assert log.summary()["sql"].requests == 1


def test_version_numbers_outlive_the_domain(chain: Registry) -> None:
    chain.remove_domain("sql")
    chain.add_domain(domain())
    assert chain.next_version("sql") == 4
    assert chain.live("sql") is None


def test_a_new_live_version_retires_the_former(chain: Registry) -> None:
    assert states(chain) == {1: "retired", 2: "retired", 3: "live"}
    assert chain.live("sql") == version(3, 2)
    assert chain.updates("sql") == 3
    assert chain.generation() == 4
    assert chain.versions() == chain.versions("sql")
    assert chain.live(SHARED) is None


def test_numbers_are_never_given_twice(chain: Registry) -> None:
    assert chain.next_version("sql") == 4
    assert [chain.reserve_version("sql"), chain.reserve_version("sql")] == [4, 5]
    assert chain.next_version("sql") == 6
    chain.add_version(version(5, 3))
    for taken in (0, 2, 4, 5):
        with pytest.raises(InvalidRequest, match="was given before"):
            chain.add_version(version(taken))
    for parent in (6, 7, -1):
        with pytest.raises(InvalidRequest, match="cannot descend"):
            chain.add_version(version(6, parent))
    assert chain.live("sql") == version(5, 3)


def test_promoting_makes_a_version_live(chain: Registry) -> None:
    assert chain.promote("sql", 1) == version(1)
    assert states(chain) == {1: "live", 2: "retired", 3: "retired"}
    generation = chain.generation()
    assert chain.promote("sql", 1) == version(1)
    assert chain.generation() == generation
    assert chain.promote("sql", 0) is None
    assert chain.live("sql") is None
    assert chain.lineage("sql") == []
    assert chain.generation() == generation + 1
    with pytest.raises(InvalidRequest, match="Domain 'sql' has no adapter version 7"):
        chain.promote("sql", 7)


def test_the_first_version_rolls_back_to_untrained(chain: Registry) -> None:
    assert chain.rollback("sql") == replace(version(2, 1), state="live")
    assert chain.rollback("sql") == version(1)
    generation = chain.generation()
    assert chain.rollback("sql") is None
    assert states(chain) == {1: "rolled_back", 2: "rolled_back", 3: "rolled_back"}
    assert chain.generation() == generation + 1
    with pytest.raises(InvalidRequest, match="no live adapter version"):
        chain.rollback("sql")


def test_rollback_skips_rolled_back_versions(chain: Registry) -> None:
    generation = chain.generation()
    assert chain.reject("sql", 2) == version(3, 2)
    assert chain.generation() == generation  # it was not live
    assert [v.version for v in chain.lineage("sql")] == [3, 1]
    assert chain.rollback("sql") == version(1)
    with pytest.raises(InvalidRequest, match="no adapter version 9"):
        chain.reject("sql", 9)


@pytest.mark.parametrize("parent", [2, 3], ids=["itself", "a circle"])
def test_a_circular_lineage_ends(home: Home, chain: Registry, parent: int) -> None:
    with home.write() as connection:
        second = (adapter_versions.c.domain == "sql") & (adapter_versions.c.version == 2)
        connection.execute(update(adapter_versions).where(second).values(parent=parent))
    assert [v.version for v in chain.lineage("sql")] == [3, 2]
    chain.rollback("sql")
    assert chain.rollback("sql") is None


def test_forgetting_the_live_version_leaves_none(chain: Registry) -> None:
    generation = chain.generation()
    chain.forget_versions("sql", [1])
    assert chain.generation() == generation
    assert [v.version for v in chain.lineage("sql")] == [3, 2]
    chain.forget_versions("sql", [3])
    assert chain.live("sql") is None
    assert chain.generation() == generation + 1


def test_the_shared_adapter_has_versions_too(registry: Registry) -> None:
    registry.add_version(version(1, name=SHARED))
    assert registry.live(SHARED) == version(1, name=SHARED)
    assert registry.updates(SHARED) == 1
    assert registry.updates("sql") == 0


def test_notes_are_kept_until_removed(registry: Registry) -> None:
    assert registry.get_meta("base") is None
    assert registry.get_meta("base", "none") == "none"
    registry.set_meta("base", "a")
    registry.set_meta("base", "b")
    assert registry.get_meta("base") == "b"
    registry.set_meta("base", None)
    assert registry.get_meta("base") is None


def test_a_second_registry_sees_the_same_generation(home: Home, registry: Registry) -> None:
    other = Registry(home)
    assert other.generation() == registry.generation() == 1
    other.add_domain(domain("python"))
    assert other.generation() == registry.generation() == 2


@pytest.mark.parametrize("damage", ["{", "[" * 100_000, "7", "null", '"text"', "[1]", '{"a": 1}', "x'ff'"])
def test_damaged_examples_are_reported(home: Home, registry: Registry, damage: str) -> None:
    value = damage if damage.startswith("x'") else f"'{damage}'"
    with home.write() as connection:
        connection.execute(text(f"UPDATE domains SET examples = {value}"))
    for use in (registry.domains, lambda: registry.domain("sql")):
        with pytest.raises(StorageError, match="damaged"):
            use()


# -- experts follow the shared adapter back --------------------------------------------------------


@pytest.fixture
def stacked(registry: Registry) -> Registry:
    """shared v1 … v3; sql v1, v2, v3 on these; prose v1 on v3; go v1 on v1; lua v1 on nobody knows what."""
    for name in ("prose", "go", "lua"):
        registry.add_domain(domain(name))
    for number in (1, 2, 3):
        registry.add_version(version(number, number - 1, SHARED))
        registry.add_version(replace(version(number, number - 1), stood_on=number))
    for name, stood_on in (("prose", 3), ("go", 1), ("lua", None)):
        registry.add_version(replace(version(1, name=name), stood_on=stood_on))
    return registry


def live_numbers(registry: Registry) -> dict[str, int]:
    found = {name: registry.live(name) for name in (SHARED, "sql", "prose", "go", "lua")}
    return {name: one.version if one else 0 for name, one in found.items()}


def test_experts_follow_the_shared_adapter_back(stacked: Registry) -> None:
    generation = stacked.generation()
    changed = stacked.change(SHARED, None)
    assert changed.live is not None
    assert changed.live.version == 2
    assert [(one.domain, one.before, one.version, one.pinned) for one in changed.experts] == [
        ("prose", 1, 0, False),
        ("sql", 3, 2, False),
    ]
    assert live_numbers(stacked) == {SHARED: 2, "sql": 2, "prose": 0, "go": 1, "lua": 1}
    assert states(stacked)[3] == "rolled_back"
    assert stacked.generation() > generation


def test_a_pinned_expert_stays_where_the_shared_adapter_goes_back(stacked: Registry) -> None:
    stacked.set_meta("pinned:sql", "1")
    changed = stacked.change(SHARED, 1)
    assert {one.domain: one.pinned for one in changed.experts} == {"prose": False, "sql": True}
    assert live_numbers(stacked) == {SHARED: 1, "sql": 3, "prose": 0, "go": 1, "lua": 1}


def test_experts_stay_where_the_shared_adapter_goes_forward(stacked: Registry) -> None:
    stacked.change(SHARED, 1)
    assert stacked.change(SHARED, 3).experts == ()
    assert stacked.change("sql", None).experts == ()


def test_a_failure_in_the_middle_takes_nothing_back(
    stacked: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StorageError("The database is gone.")

    before = live_numbers(stacked)
    monkeypatch.setattr("moedraft.storage.versions.version_rows._step_back", broken)
    with pytest.raises(StorageError):
        stacked.change(SHARED, None)
    assert live_numbers(stacked) == before


def test_whom_the_base_alone_serves_is_kept_and_noticed(store: Store) -> None:
    registry = store.registry
    for name in ("sql", "code"):
        registry.add_domain(Domain(name, "", ("x",), 0.0))
    before = registry.generation()
    registry.set_unadapted(["code", "sql", "unknown"])
    assert registry.unadapted() == {"code", "sql"}
    assert registry.generation() == before + 1
    registry.set_unadapted(["sql", "code"])
    assert registry.generation() == before + 1  # nothing is new
    registry.set_unadapted(["sql"])
    assert registry.unadapted() == {"sql"}
    registry.remove_domain("sql")
    registry.add_domain(Domain("sql", "", ("x",), 0.0))
    assert registry.unadapted() == frozenset()


def test_what_a_person_makes_live_serves_also_where_the_base_did(store: Store) -> None:
    registry = store.registry
    for name in ("sql", "code"):
        registry.add_domain(Domain(name, "", ("x",), 0.0))
    registry.set_unadapted(["code", "sql"])
    changes.promote(store, "code", 0)
    assert registry.unadapted() == {"sql"}
    changes.promote(store, SHARED, 0)
    assert registry.unadapted() == frozenset()
    registry.set_unadapted(["sql"])
    with pytest.raises(InvalidRequest):
        changes.rollback(store, "sql")  # nothing is live
    assert registry.unadapted() == {"sql"}


def test_a_withdrawal_puts_no_domain_back_on_adapters(stacked: Registry) -> None:
    stacked.set_unadapted(["sql", "go"])
    stacked.change("sql", None)
    stacked.change(SHARED, None)
    assert stacked.unadapted() == {"sql", "go"}
    stacked.change("sql", None, chosen=True)
    assert stacked.unadapted() == {"go"}
    stacked.change(SHARED, None, chosen=True)
    assert stacked.unadapted() == frozenset()


def test_a_pinned_version_serves_also_where_the_base_did(store: Store) -> None:
    registry = store.registry
    for name in ("sql", "code"):
        registry.add_domain(Domain(name, "", ("x",), 0.0))
    registry.set_unadapted(["code", "sql"])
    generation = registry.generation()
    changes.pin(store, "sql")
    assert registry.unadapted() == {"code"}
    assert registry.generation() > generation  # whoever serves notices
    changes.pin(store, "code", False)
    assert registry.unadapted() == {"code"}
