"""How many prompts a router refuses though their likeliest domain is right, and how many strangers it takes.

There are three kinds of examples, 60 of each domain, from which unseen prompts lie more or less far: drawn at
random from all that there are; the first ones of the list, which come from one or two sources and in a few
wordings only, as those of a person who registers a domain often do; and those of the most frequent wording.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from reworded import KINDS

from moedraft.core import SHARED
from moedraft.routing.router import Router

Prompts = dict[str, list[str]]
Fit = Callable[[Prompts], Router]

OPENING = 2  # words of a prompt that tell its wording
PER_DOMAIN = 24  # prompts that are routed of each domain and wording
FEWER = 8  # domains of the second round, in which each is left out in turn


def one_wording(texts: list[str], count: int) -> list[str]:
    """The first `count` prompts that begin with the most frequent words; others where there are too few."""
    openings = [" ".join(text.split()[:OPENING]) for text in texts]
    common = Counter(openings).most_common(1)[0][0]
    alike = [text for text, opening in zip(texts, openings, strict=True) if opening == common]
    rest = [text for text, opening in zip(texts, openings, strict=True) if opening != common]
    return (alike + rest)[:count]


def example_sets(train: Prompts, count: int, seed: int) -> dict[str, Prompts]:
    """The examples to fit on, by kind and domain."""
    rng = random.Random(seed)
    return {
        "random": {name: rng.sample(texts, count) for name, texts in train.items()},
        "first": {name: texts[:count] for name, texts in train.items()},
        "one_wording": {name: one_wording(texts[:2000], count) for name, texts in train.items()},
    }


def reworded(tests: Prompts, kind: str) -> Prompts:
    rng = random.Random(0)
    return {name: [KINDS[kind](text, rng) for text in texts] for name, texts in tests.items()}


def outcome(router: Router, tests: Prompts) -> dict[str, Any]:
    """Counts of the prompts that reach their domain, another one and none, and of those refused wrongly."""
    right = wrong = refused = refused_right = best = 0
    by_domain: dict[str, int] = {}
    for domain, texts in tests.items():
        routes = router.route(texts)
        rows = router.probabilities(texts)[1]
        likeliest = [router.domains[i] == domain for i in rows.argmax(axis=1)]
        strange = [route.domain == SHARED for route in routes]
        right += sum(route.domain == domain for route in routes)
        refused += sum(strange)
        refused_right += sum(s and b for s, b in zip(strange, likeliest, strict=True))
        best += sum(likeliest)
        wrong += sum(route.domain not in (domain, SHARED) for route in routes)
        by_domain[domain] = sum(strange)
    return {
        "prompts": sum(map(len, tests.values())),
        "right": right,
        "wrong": wrong,
        "refused": refused,
        "refused_though_right": refused_right,
        "best_domain_right": best,
        "refused_by_domain": by_domain,
    }


def strangers_refused(fit: Fit, examples: Prompts, tests: Prompts) -> float:
    """The share of prompts that are refused while their own domain is not registered."""
    shares = []
    for left_out in examples:
        router = fit({name: texts for name, texts in examples.items() if name != left_out})
        shares.append(np.mean([route.domain == SHARED for route in router.route(tests[left_out])]))
    return round(float(np.mean(shares)), 4)


def outside_refused(router: Router, external: Mapping[str, list[str]]) -> dict[str, float]:
    """The share refused of prompts that belong to no domain, by their origin."""
    return {
        name: round(float(np.mean([route.domain == SHARED for route in router.route(texts)])), 4)
        for name, texts in external.items()
    }


def refusals(fit: Fit, sets: dict[str, Prompts], tests: Prompts, external: Prompts) -> dict[str, Any]:
    """For each kind of examples: unseen prompts as they are and reworded, and strangers."""
    found: dict[str, Any] = {}
    for name, examples in sets.items():
        router = fit(examples)
        own = {kind: outcome(router, reworded(tests, kind)) for kind in KINDS}
        found[name] = {
            **own,
            "strangers_refused": strangers_refused(fit, examples, tests),
            "strangers_refused_of_few_domains": strangers_refused(
                fit, dict(list(examples.items())[:FEWER]), tests
            ),
            "outside_refused": outside_refused(router, external),
        }
    return found
