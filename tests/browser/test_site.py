"""The documentation site: it builds without warnings, and every page of it opens in a browser and on a phone."""

from __future__ import annotations

import functools
import http.server
import threading
import urllib.parse
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.conftest import Browser

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; in this process, because a new one would spend half of its time on imports."""
    from sphinx.cmd.build import build_main

    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in ("TERM", "NO_COLOR", "COLUMNS"):  # which the settings of the site change
            patch.setenv(name, "")
        code = build_main(["--fail-on-warning", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)])
    assert code == 0, "the build has warnings, see the output above"
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site behind a web server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Links(HTMLParser):
    """The ids of a page, and what it refers to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        self.targets += [value for name in ("href", "src") if (value := found.get(name))]


def pages_of(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)


def test_no_link_is_dead(site: Path) -> None:
    parsed = {page.resolve(): Links(page) for page in pages_of(site)}
    dead = []
    for page, links in parsed.items():
        for target in links.targets:
            url = urllib.parse.urlsplit(target)
            if url.scheme:
                continue
            file = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page
            if not file.exists() or (url.fragment and file in parsed and url.fragment not in parsed[file].ids):
                dead.append(f"{page.relative_to(site.resolve())}: {target}")
    assert dead == []


def test_every_page_of_the_docs_is_there(site: Path) -> None:
    """Also the results with their figures, and the API."""
    assert [page.name for page in DOCS.glob("*.md") if not (site / f"{page.stem}.html").exists()] == []
    assert "skyformer_attention" in (site / "api" / "skyformer.html").read_text()
    assert "<img" in (site / "measured" / "efficiency.html").read_text()


def test_every_page_opens_on_a_phone_without_complaints(browser: Browser, site: Path, address: str) -> None:
    look = """
    const broken = [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src);
    return [document.documentElement.scrollWidth, document.querySelectorAll("article").length, broken]
    """
    browser.resize(390)
    wrong = []
    for page in pages_of(site):
        name = page.relative_to(site).as_posix()
        browser.open(f"{address}/{name}")
        width, articles, broken = browser.run(look)  # type: ignore[misc]
        complaints = browser.complaints()
        if width > 390 or not articles or broken or complaints:
            wrong.append((name, width, articles, broken, complaints))
    browser.resize(1280)
    assert wrong == []


def test_search_finds_a_function(browser: Browser, address: str) -> None:
    browser.open(f"{address}/search.html?q=skyformer_attention")
    found = "return [...document.querySelectorAll('#search-results li a')].map(link => link.getAttribute('href'))"
    WebDriverWait(browser.driver, 30).until(lambda _: browser.run(found))
    assert any("api/skyformer.html" in link for link in browser.run(found))  # type: ignore[attr-defined]
    assert browser.complaints() == []
