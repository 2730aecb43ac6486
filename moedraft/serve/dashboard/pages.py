"""The four pages and the frame around them. The URL alone determines what a page shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import Request
from nicegui import PageArguments, ui
from nicegui.elements.sub_pages import SubPages

from moedraft.insight.tables.spans import SPANS
from moedraft.serve.dashboard.experts import experts_page
from moedraft.serve.dashboard.learning import learning_page
from moedraft.serve.dashboard.looking import Look
from moedraft.serve.dashboard.markup import Markup, join, notice, tag
from moedraft.serve.dashboard.overview import overview_page
from moedraft.serve.dashboard.router import router_page

PAGES: dict[str, tuple[str, Callable[[Look], None]]] = {
    "": ("Overview", overview_page),
    "experts": ("Experts", experts_page),
    "router": ("Router", router_page),
    "learning": ("Learning", learning_page),
}
HERE = Path(__file__).parent
STYLE = (HERE / "style.css").read_text(encoding="utf-8")
SCRIPT = (HERE / "script.js").read_text(encoding="utf-8")
MARK = Markup(
    '<svg viewBox="0 0 32 32" width="26" height="26" aria-hidden="true"><rect width="32" height="32" rx="9" '
    'fill="var(--accent)"/><path d="M8 21l5-9 4 6 3-4 4 7" fill="none" stroke="#fff" stroke-width="2.6" '
    'stroke-linecap="round" stroke-linejoin="round"/></svg>'
)


def register() -> None:
    """Register the pages with NiceGUI, once per process."""
    ui.page("/", title="moedraft")(shell)
    ui.page("/{_:path}", title="moedraft")(shell)


def shell(request: Request) -> None:
    """The frame that all pages share; links inside it replace only the page in the middle."""
    ui.add_head_html(f"<style>{STYLE}</style><script>{SCRIPT}</script>")
    CurrentPage({f"/{name}": _page(request, name) for name in PAGES})


class CurrentPage(SubPages):
    """The page that the URL names, inside the frame."""

    def _render_404(self) -> None:
        self._say("There is no such page", "The address is not one of the dashboard.")

    def _render_error(self, _: Exception) -> None:
        self._say("This page failed", "The server's log says why. The other pages may still work.")

    def _say(self, title: str, text: str) -> None:
        look = Look.of(self.client.request, "", {})
        _header(look, here=False)
        back = tag("p", tag("a", "Back to the overview", href=look.url("")))
        with ui.element("div").classes("page"):
            ui.html(notice(title, text, "quiet", back))


def _page(request: Request, name: str) -> Callable[[PageArguments], None]:
    def page(arguments: PageArguments) -> None:
        title, build = PAGES[name]
        look = Look.of(request, name, arguments.query_parameters)
        ui.page_title(f"{title} · moedraft")
        _header(look)
        ui.html(tag("h1", title, class_="unseen"))
        build(look)

    # NiceGUI reads the annotation and needs the class, not its name as text
    page.__annotations__ = {"arguments": PageArguments}
    return page


def _header(look: Look, *, here: bool = True) -> None:
    brand = tag("a", MARK, tag("span", "moedraft"), href=look.url(""), class_="brand")
    pages = [
        tag("a", title, href=look.url(name), aria_current="page" if here and name == look.page else None)
        for name, (title, _) in PAGES.items()
    ]
    spans = [
        tag("a", span.label, href=look.url(span=span), aria_current="true" if span == look.span else None)
        for span in SPANS.values()
    ]
    navigation = tag("nav", *pages, class_="pages", aria_label="Pages")
    ranges = tag("nav", *spans, class_="ranges", aria_label="Time range")
    with ui.element("header").classes("top"):
        ui.html(join([brand, navigation])).classes("top-left")
        with ui.element("div").classes("top-right"):
            ui.html(ranges)
            button = ui.element("button").classes("theme").props('type="button"')
            button.props["title"] = button.props["aria-label"] = "Light, dark or as the system"
            button.on("click", js_handler="() => moedraftTheme()")
            if look.signed_in:
                leave = tag("button", "Sign out", type="submit")
                ui.html(tag("form", leave, method="post", action="/logout", class_="leave"))
