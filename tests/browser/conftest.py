"""A page in Debian's Chromium, with everything it asks for and complains about written down."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.page import lesson_html

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WAIT_MS = 60_000


class Opened:
    """A page that is shown, and what came of it."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.file = file
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))

    def show(self, fragment: str = "") -> "Opened":
        """Load the file anew, at a view."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.file.as_uri()}{fragment}")
        self.page.wait_for_selector("body[data-ready]")
        return self

    def assert_quiet(self) -> None:
        """It asked for itself alone, and nothing went wrong."""
        assert self.complaints == []
        assert {url.partition("#")[0] for url in self.requests} <= {self.file.as_uri(), "about:blank"}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine; apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT_MS)
        yield started
        started.close()


OpenPage = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Show a text as a page, or a file that is there."""
    contexts = []

    def opened(source: str | Path, fragment: str = "", **options: Any) -> Opened:
        file = source if isinstance(source, Path) else tmp_path / f"page{len(contexts)}.html"
        if isinstance(source, str):
            file.write_text(source, encoding="utf-8")
        size = {"width": options.pop("width", 1440), "height": 900}
        context = browser.new_context(viewport=size, **options)
        contexts.append(context)
        return Opened(context.new_page(), file).show(fragment)

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def lesson_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lesson") / "lesson.html"
    file.write_text(lesson_html(), encoding="utf-8")
    return file
