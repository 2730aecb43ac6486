"""What the routing tests share."""

from __future__ import annotations

import pytest
from routing_fakes import WordEmbedder, prompts


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def examples() -> dict[str, list[str]]:
    return {domain: prompts(domain, 16) for domain in ("sql", "maths", "python", "kochen", "garten")}
