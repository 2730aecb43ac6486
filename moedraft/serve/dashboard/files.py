"""The numbers of every chart as a CSV file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from fastapi import Request, Response

from moedraft.core import SHARED, InvalidRequest, StorageError
from moedraft.insight.observe import Observer
from moedraft.insight.tables.spans import TimeSpan, find_span
from moedraft.insight.tables.table import Table
from moedraft.insight.views import ExpertView
from moedraft.serve.dashboard.looking import LOOKING, Looking

Find = Callable[[Observer, TimeSpan, str], Table]


def _closely(observer: Observer, span: TimeSpan, expert: str) -> ExpertView:
    view = observer.expert(expert, span)
    if view is None:
        raise InvalidRequest("There is no such expert.")
    return view


FILES: dict[str, Find] = {
    "throughput": lambda observer, span, _: observer.overview(span).throughput,
    "sources": lambda observer, span, _: observer.overview(span).sources,
    "tokens_per_step": lambda observer, span, _: observer.overview(span).by_expert,
    "experts": lambda observer, span, _: observer.overview(span).by_figures,
    "progress": lambda observer, span, expert: _closely(observer, span, expert).progress,
    "by_position": lambda observer, span, expert: _closely(observer, span, expert).by_position,
    "by_language": lambda observer, span, expert: _closely(observer, span, expert).by_language,
    "versions": lambda observer, span, expert: _closely(observer, span, expert).versions,
    "shares": lambda observer, span, _: observer.router(span).shares,
    "confidences": lambda observer, span, _: observer.router(span).histogram,
    "unknown": lambda observer, span, _: observer.router(span).unknown_share,
    "updates": lambda observer, span, _: observer.learning(span).updates,
    "updates_by_expert": lambda observer, span, _: observer.learning(span).by_expert,
}


def csv_file(request: Request, table: str, range: str | None = None, expert: str = SHARED) -> Response:
    """The table as a CSV file; 404 for an unknown table or expert, 400 for an unknown time range."""
    looking = cast(Looking, request.scope[LOOKING])
    find = FILES.get(table)
    if find is None:
        return Response("There is no such table.\n", 404, media_type="text/plain")
    try:
        span = find_span(range)
    except InvalidRequest as error:
        return Response(f"{error}\n", 400, media_type="text/plain")
    try:
        found = find(looking.observer, span, expert)
    except InvalidRequest as error:
        return Response(f"{error}\n", 404, media_type="text/plain")
    except StorageError:  # its message names the home's path, which is not shown
        return Response("The figures cannot be read now.\n", 503, media_type="text/plain")
    name = re.sub(r"[^\w-]+", "-", f"moedraft-{table}-{span.key}", flags=re.ASCII)
    headers = {"content-disposition": f'attachment; filename="{name}.csv"', "cache-control": "no-store"}
    return Response(found.to_csv(), media_type="text/csv; charset=utf-8", headers=headers)
