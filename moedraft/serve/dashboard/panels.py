"""The building blocks of pages: a part that updates itself, a chart with its numbers, a changing text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nicegui import ui

from moedraft.core import StorageError
from moedraft.insight.tables.table import Table
from moedraft.serve.dashboard.charts import Options
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, legend, notice, numbers, tag

V = TypeVar("V")
Legend = Iterable[tuple[str, str, str]]  # (name, colour, last figure)

VIEWS = ThreadPoolExecutor(2, "dashboard-views")  # of its own: prompts must not queue behind slow views
log = logging.getLogger(__name__)

SKELETON = tag(
    "div", *(tag("div", class_=f"bone {kind}") for kind in ("low", "tall", "tall")), class_="bones"
)
TROUBLE = "The figures cannot be read now. What is shown may be old; the page tries again by itself."


class Text:
    """HTML that can be replaced; it is sent to the browser only if it has changed."""

    def __init__(self, class_: str = "") -> None:
        self._element = ui.html("", sanitize=True).classes(class_)

    def show(self, content: Markup) -> None:
        if self._element.content != content:
            self._element.set_content(content)


class Live(Generic[V]):
    """The part of a page that updates itself.

    `see` reads the figures, in a thread. `build` lays the page out and returns a function that updates it; it
    is called again if `shape(view)` changes. Before the first figures a grey outline of the page is shown,
    and if figures cannot be read, a notice. A reader whose access has ended is shown nothing more.
    """

    def __init__(
        self,
        look: Look,
        see: Callable[[], V],
        build: Callable[[V], Callable[[V], None]],
        shape: Callable[[V], Hashable] = lambda view: None,
    ) -> None:
        self._look, self._see, self._build, self._shape = look, see, build, shape
        self._trouble = Text("trouble")
        self._body = ui.element("div").classes("page").props('aria-busy="true"')
        with self._body:
            ui.html(SKELETON)
        self._update: Callable[[V], None] | None = None
        self._built: Hashable = None
        self._timer = ui.timer(look.span.refresh, self._tick)

    async def _tick(self) -> None:
        if not self._look.allowed:
            self._timer.cancel()
            show_out()
            return
        try:
            view = await asyncio.get_running_loop().run_in_executor(VIEWS, self._see)
        except Exception as error:  # whatever went wrong, a notice must say that the figures are old
            expected = isinstance(error, StorageError)
            log.warning("The dashboard has no new figures: %s", error, exc_info=None if expected else error)
            self._trouble.show(notice("No connection to the figures", TROUBLE, "bad"))
            return
        self._trouble.show(Markup())
        shape = self._shape(view)
        if self._update is None or shape != self._built:
            self._body.clear()
            with self._body:
                self._update, self._built = self._build(view), shape
            self._body.props(remove="aria-busy")
        self._update(view)


class Panel:
    """A chart with a title and an explanation, its legend, its numbers and its CSV file."""

    def __init__(
        self,
        look: Look,
        key: str,
        title: str,
        note: str,
        empty: str,
        *,
        wide: bool = False,
        height: int = 240,
    ) -> None:
        self._table: Table | None = None
        with ui.element("section").classes("card wide" if wide else "card").props(f"data-panel={key}"):
            ui.html(join_title(title, note))
            self._legend = Text("legend-slot")
            self._chart = ui.echart({}, renderer="svg").style(f"height:{height}px").classes("chart")
            self._chart.props('role="img"').props["aria-label"] = f"Chart: {title}. {note}"
            self._empty = Text("empty-slot")
            self._empty_text = empty
            self._numbers = foot(look, key)

    def show(
        self,
        table: Table,
        draw: Callable[[], Options],
        entries: Legend = (),
        *,
        some: bool = True,
        written: Markup | None = None,
    ) -> None:
        """Draw the chart if `table` has changed. some=False: show the text for an empty chart instead.

        written: the table's numbers as HTML, if the caller has built them already.
        """
        if table == self._table:
            return
        self._table = table
        self._numbers.show(written or numbers(table))
        self._legend.show(legend(entries) if some else Markup())
        self._empty.show(Markup() if some else tag("div", tag("p", self._empty_text), class_="nothing"))
        self._chart.set_visibility(some)
        if some:
            self._chart.options.clear()
            self._chart.options.update(draw())
            self._chart.update()


@dataclass(frozen=True)
class Small:
    """One of many small charts: its name, a link, its colour, the newest figure, and how it is drawn."""

    name: str
    href: str
    paint: str
    figure: str
    draw: Callable[[], Options]


class SmallPanels:
    """A card with one small chart for each of several names, all with the same axes."""

    def __init__(self, look: Look, key: str, title: str, note: str, empty: str) -> None:
        self._table: Table | None = None
        self._title, self._empty_text = title, empty
        self._charts: list[tuple[ui.element, Text, ui.echart]] = []
        with ui.element("section").classes("card wide").props(f"data-panel={key}"):
            ui.html(join_title(title, note))
            self._body = ui.element("div").classes("small-ones")
            self._empty, self._rest = Text("empty-slot"), Text("rest hint")
            self._numbers = foot(look, key)

    def show(self, table: Table, charts: Sequence[Small], rest: str = "") -> None:
        """Draw the charts anew if `table` has changed. rest: a line below them."""
        if table == self._table:
            return
        self._table = table
        self._numbers.show(numbers(table))
        self._empty.show(Markup() if charts else tag("div", tag("p", self._empty_text), class_="nothing"))
        self._rest.show(tag("p", rest) if rest else Markup())
        while len(self._charts) < len(charts):
            self._charts.append(self._another())
        for place, (box, head, chart) in enumerate(self._charts):
            box.set_visibility(place < len(charts))
            if place < len(charts):
                self._draw(charts[place], head, chart)

    def _another(self) -> tuple[ui.element, Text, ui.echart]:
        with self._body, ui.element("div").classes("small-one") as box:
            head = Text()
            chart = ui.echart({}, renderer="svg").classes("chart small").props('role="img"')
        return box, head, chart

    def _draw(self, one: Small, head: Text, chart: ui.echart) -> None:
        dot = tag("i", style=f"background:{one.paint}")
        head.show(tag("p", dot, tag("a", one.name, href=one.href), tag("b", one.figure)))
        chart.props["aria-label"] = f"Chart: {self._title}, {one.name}"
        chart.options.clear()
        chart.options.update(one.draw())
        chart.update()


class NumbersPanel:
    """A card that shows a table as a table instead of a chart."""

    def __init__(self, look: Look, key: str, title: str, note: str, empty: str) -> None:
        self._empty = empty
        with ui.element("section").classes("card wide").props(f"data-panel={key}"):
            ui.html(join_title(title, note))
            self._body = Text()
            with ui.element("div").classes("foot end"):
                ui.html(tag("a", "CSV", href=look.csv(key), download="", class_="csv"))

    def show(self, table: Table, body: Markup | None = None) -> None:
        """Show `body` instead of the plain table, if it is given."""
        nothing = tag("div", tag("p", self._empty), class_="nothing")
        self._body.show((body or numbers(table)) if table.rows else nothing)


def foot(look: Look, key: str) -> Text:
    """The lower edge of a card with a chart: its numbers to be opened, and its CSV file."""
    with ui.element("div").classes("foot"):
        with ui.element("details"):
            with ui.element("summary"):
                ui.html("As numbers", tag="span")
            found = Text()
        ui.html(tag("a", "CSV", href=look.csv(key), download="", class_="csv"))
    return found


def show_out() -> None:
    """Reload a page whose reader has lost access; the guard then redirects to the sign-in form."""
    ui.navigate.reload()


def join_title(title: str, note: str) -> Markup:
    return Markup(tag("h2", title) + tag("p", note, class_="note"))


def last_figures(table: Table, keys: Iterable[str], write: Callable[[Any], str]) -> list[str]:
    """The newest figure of each column, as text."""
    columns = (table.column(key) for key in keys)
    return [write(next((v for v in reversed(column) if v is not None), None)) for column in columns]
