"""`moedraft route`: shows which domain a text belongs to. Loads the embedder, but no language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moedraft.cli.common import (
    HomeOption,
    JsonOption,
    busy,
    emit,
    note,
    note_missing,
    print_table,
    rate,
    reading,
    settings_for,
    shorten,
)
from moedraft.cli.files import check_prompt
from moedraft.config import Settings
from moedraft.core import SHARED

if TYPE_CHECKING:
    from moedraft.routing.router import Route


def route(
    ctx: typer.Context,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="What to route.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which domain each TEXT belongs to, and how probable each domain is."""
    for text in texts:
        check_prompt(text, "the text")
    routes = _routes(settings_for(ctx, home=home), texts)
    if as_json:
        for text, found in zip(texts, routes, strict=True):
            emit(
                {
                    "text": text,
                    "domain": found.domain,
                    "confidence": found.confidence,
                    "probabilities": found.probabilities,
                }
            )
        return
    rows = [
        (shorten(text), found.domain, rate(found.confidence), _best(found.probabilities))
        for text, found in zip(texts, routes, strict=True)
    ]
    print_table("Routes", ["text", "domain", "confidence", "most probable"], rows)


def _routes(settings: Settings, texts: list[str]) -> list[Route]:
    from moedraft.routing.router import Route
    from moedraft.system.build import open_router

    with reading(settings) as store:
        if store is None:
            note_missing(settings)
            return [Route(SHARED, 0.0, {SHARED: 1.0}) for _ in texts]
        with busy("Routing"):
            router = open_router(settings, store)
            registered = {name for name, _ in store.registry.domain_names()}
            routes = router.route(texts)
    if set(router.domains) != registered:
        note("The router does not know all registered domains; the next command that writes fits it again.")
    return routes


def _best(probabilities: dict[str, float], count: int = 3) -> str:
    ranked = sorted(probabilities.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {p:.2f}" for name, p in ranked)
