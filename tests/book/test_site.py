"""The built book, as files: every chapter is there, nothing is fetched from the network, no link is dead.

`make site` builds it first. In a plain `pytest` run without build/html these tests are skipped, and say so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from attnlib.bench.paths import NOTEBOOKS, ROOT
from attnlib.book import hygiene

SITE = ROOT / "build" / "html"
CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no build/html: make html")

# Elements whose address the browser fetches by itself; an <a href> is fetched only on a click.
FETCHED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "link": "href",
    "object": "data",
    "script": "src",
    "source": "src",
    "track": "src",
    "video": "src",
    "image": "href",
    "use": "href",
}


class Page(HTMLParser):
    """Addresses, ids and inline styles of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched, self.links, self.ids, self.styles = [], [], set(), []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.ids |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        self.styles.append(attributes.get("style", ""))
        address = FETCHED.get(tag)
        if address and attributes.get(address) and attributes.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(attributes[address])
        if "srcset" in attributes:
            self.fetched += [part.split()[0] for part in attributes["srcset"].split(",") if part.strip()]
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)
            self._in_style = False


@cache
def page(path: Path) -> Page:
    parsed = Page()
    parsed.feed(path.read_text(encoding="utf-8"))
    return parsed


def pages() -> list[Path]:
    return sorted(path for path in SITE.rglob("*.html") if "_static" not in path.parts)


def remote(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def test_every_chapter_has_a_page():
    names = [*CHAPTERS, "index", "api", "results", "features", "transformers", "search"]
    missing = [name for name in names if not (SITE / f"{name}.html").exists()]
    assert not missing


def test_pages_fetch_nothing_from_the_network():
    found = {
        f"{path.relative_to(SITE)}: {address}"
        for path in pages()
        for address in page(path).fetched
        if remote(address)
    }
    for path in pages():
        for style in page(path).styles:
            found |= {f"{path.relative_to(SITE)}: {url}" for url in css_urls(style) if remote(url)}
    assert not found


def css_urls(style: str) -> list[str]:
    return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", style)


def test_styles_fetch_nothing_from_the_network():
    styles = {path: path.read_text(encoding="utf-8", errors="replace") for path in SITE.rglob("*.css")}
    assert styles
    assert not {
        f"{path.name}: {url}" for path, text in styles.items() for url in css_urls(text) if remote(url)
    }


def test_math_is_local():
    """Pages with math load the vendored MathJax, which is one file."""
    with_math = [path for path in pages() if 'class="math' in path.read_text(encoding="utf-8")]
    for path in with_math:
        scripts = [address.split("?")[0] for address in page(path).fetched]
        assert "_static/mathjax/tex-svg-full.js" in scripts, path
    assert (SITE / "_static" / "mathjax" / "tex-svg-full.js").stat().st_size > 1_000_000
    assert (SITE / "_static" / "mathjax" / "LICENSE").exists()


def test_local_addresses_lead_somewhere():
    dead = set()
    for path in pages():
        for address in [*page(path).fetched, *page(path).links]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or address.startswith("#__"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                dead.add(f"{path.relative_to(SITE)} -> {address}")
            elif (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in page(target).ids
            ):
                dead.add(f"{path.relative_to(SITE)} -> {address}")
    assert not dead


def test_images_have_alternative_text():
    bare = set()
    for path in pages():
        for tag in re.findall(r"<img\b[^>]*>", path.read_text(encoding="utf-8")):
            if not re.search(r'\balt="[^"]', tag) and "logo" not in tag:
                bare.add(f"{path.relative_to(SITE)}: {tag[:90]}")
    assert not bare


@pytest.mark.parametrize("name", CHAPTERS)
def test_plumbing_is_folded_and_kernels_are_not(name):
    """Each cell tagged `hide-input` is a fold of its page, and no other cell is."""
    tags = [hygiene.tags(c) for c in hygiene.Notebook.read(NOTEBOOKS / f"{name}.ipynb").code]
    text = (SITE / f"{name}.html").read_text(encoding="utf-8")
    cells = re.split(r'<div class="cell (?:tag_\S+ )*docutils container">', text)[1:]
    folds = ['<details class="admonition hide above-input">' in cell for cell in cells]
    assert folds == [hygiene.FOLDED in found for found in tags]


def test_search_index_knows_online_softmax():
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    assert "03_online_softmax" in index and '"softmax"' in index or "softmax:" in index


def test_in_a_browser():
    """Math, figures, search and width in headless Chromium; `make browser` fails where this is skipped."""
    sys.path.insert(0, str(ROOT / "tests" / "browser"))
    try:
        from chromium import find
    finally:
        sys.path.pop(0)
    if not find():
        pytest.skip("no Chromium here: pages were not opened (make browser)")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "browser" / "check_pages.py"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
