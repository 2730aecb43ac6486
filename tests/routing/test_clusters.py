"""Groups of texts, and domains that lie into one another."""

from __future__ import annotations

import numpy as np
import pytest
from routing_fakes import WordEmbedder, prompts

from moedraft.core import Domain
from moedraft.routing.clusters import clusters, overlaps, swallowed_by
from moedraft.routing.embedder import Floats, features
from moedraft.routing.router import MAX_EXAMPLES, Router
from moedraft.storage.store import Store
from moedraft.system.domains.suggest import overlaps_data

EMBEDDER = WordEmbedder()


def rows_of(texts: list[str]) -> Floats:
    return features(EMBEDDER.embed(texts), texts)


def test_texts_of_one_topic_are_a_group() -> None:
    odd = ["quasar nebula 17", "xylophone telescope", "zzz %%% 99"]
    texts = [*prompts("sql", 14), *odd, *prompts("garten", 9)]
    first, second = clusters(rows_of(texts), 8)
    assert sorted(first) == list(range(14))
    assert sorted(second) == list(range(17, 26))


def test_the_most_typical_comes_first() -> None:
    x = np.array([[1, 0], [0.8, 0.6], [0.96, 0.28], [0.94, 0.34]], dtype=np.float32)
    (group,) = clusters(x, 4)
    assert group[-1] in (0, 1)
    assert group[0] in (2, 3)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_are_no_group(count: int) -> None:
    assert clusters(rows_of(prompts("sql", 5))[:count], 8) == []


def test_domains_that_hold_the_same_should_merge() -> None:
    sql = prompts("sql", 24)
    rows = {"a": rows_of(sql[:12]), "b": rows_of(sql[12:]), "garten": rows_of(prompts("garten", 12))}
    found = overlaps(rows)
    assert (found[0].first, found[0].second, found[0].should_merge) == ("a", "b", True)
    assert not any(one.should_merge for one in found[1:])


def test_examples_that_both_have_are_counted() -> None:
    first, second = rows_of(prompts("sql", 12)), rows_of(prompts("maths", 12))
    (found,) = overlaps({"a": first, "b": np.vstack([second, first[:3]])})
    assert found.duplicates == 3
    assert found.duplicates_share == 0.25
    assert not found.should_merge
    assert found.first_in_second == pytest.approx(3 / 12)


def test_nothing_overlaps_with_nothing() -> None:
    assert overlaps({}) == []
    assert overlaps({"a": rows_of(prompts("sql", 4))}) == []
    apart = overlaps({"a": rows_of(prompts("sql", 12)), "b": rows_of(prompts("garten", 12))})
    assert not any(one.should_merge for one in apart)


def test_a_domain_that_lies_in_another_one_is_known_by_itself() -> None:
    sql = prompts("sql", 24)
    rows = {"old": rows_of(sql[:12]), "garten": rows_of(prompts("garten", 12)), "new": rows_of(sql[12:])}
    assert swallowed_by(rows, "new") == ["old"]
    assert swallowed_by(rows, "garten") == []
    assert swallowed_by({"old": rows["old"]}, "old") == []


def test_of_a_large_domain_so_many_examples_are_compared_as_the_router_knows(store: Store) -> None:
    """An answer to an operator's question must not embed or multiply ten thousand rows."""
    texts = {"sql": prompts("sql", 1000), "garten": prompts("garten", 40)}
    for name, some in texts.items():
        store.registry.add_domain(Domain(name, "", tuple(dict.fromkeys(some)), 1.0))
    router = Router(EMBEDDER, store.home.path / "router")
    EMBEDDER.embedded.clear()
    overlaps_data(store, router)
    assert len(EMBEDDER.embedded) == MAX_EXAMPLES + len(set(texts["garten"]))
