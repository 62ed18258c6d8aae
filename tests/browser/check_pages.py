"""Open every page of the built book in headless Chromium, at the width of a phone and of a laptop.

    python tests/browser/check_pages.py [--screens] [build/html]

Checks that math is rendered, images are loaded, no page scrolls sideways, no code cell does on a laptop,
nothing is asked for on the network, no script fails, and that the search finds "online softmax" in chapter
03. With --screens, screenshots go to build/screens, which takes longer than all else. Exit status 1 when
something is wrong or there is no Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from chromium import BrowserError, Tab, find

ROOT = Path(__file__).resolve().parents[2]
PHONE, LAPTOP = 390, 1280
WIDTHS = (PHONE, LAPTOP)

# MathJax's start-up promise settles when the first typesetting is done; images are given the time to arrive.
SETTLED = """(async () => {
  if (document.querySelector(".math") && window.MathJax) await MathJax.startup.promise.catch(() => {});
  document.querySelectorAll('img[loading=lazy]').forEach(image => { image.loading = 'eager'; });
  await Promise.all([...document.images].map(image => image.complete || new Promise(done => {
    image.onload = image.onerror = done; })));
  return true;
})()"""

PROBLEMS = """(() => {
  const problems = [], seen = element => (element.outerHTML || '').replace(/\\s+/g, ' ').slice(0, 120);
  for (const math of document.querySelectorAll('.math'))
    if (!math.querySelector('mjx-container svg'))
      problems.push('math not rendered: ' + math.textContent.slice(0, 80));
  for (const error of document.querySelectorAll('mjx-merror, [data-mjx-error]'))
    problems.push('math error: ' + (error.dataset.mjxError || error.textContent).slice(0, 100));
  for (const image of document.images)
    if (!image.naturalWidth) problems.push('image not loaded: ' + image.src.slice(0, 120));
  const width = window.innerWidth, page = document.documentElement.scrollWidth;
  if (page > width) {
    problems.push(`page is ${page} px wide in a window of ${width} px`);
    const scrolls = node => { for (; node && node !== document.body; node = node.parentElement)
      if (getComputedStyle(node).overflowX !== 'visible') return true; return false; };
    for (const element of [...document.querySelectorAll('main *')]
        .filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement)).slice(0, 3))
      problems.push('  sticks out: ' + seen(element));
  }
  return problems;
})()"""

# Folded cells are opened first: what is not laid out has no width.
WIDE_CODE = """(() => {
  document.querySelectorAll('main details').forEach(details => { details.open = true; });
  return [...document.querySelectorAll('main div.cell_input pre')]
    .filter(code => code.scrollWidth > code.clientWidth)
    .map(code => {
      const longest = code.textContent.split('\\n').reduce((a, b) => a.length > b.length ? a : b);
      return `code is ${code.scrollWidth} px wide in ${code.clientWidth} px: ${longest.trim().slice(0, 80)}`;
    });
})()"""

HITS = "[...document.querySelectorAll('#search-results li a')].map(link => link.getAttribute('href'))"


def check(tab: Tab, page: Path, screens: Path | None) -> dict[str, list[str]]:
    """What is wrong with one page, at each width and at any."""
    tab.open(page.as_uri(), WIDTHS[0])
    tab.evaluate(SETTLED)
    found = {}
    for width in WIDTHS:
        tab.resize(width)
        problems = tab.evaluate(PROBLEMS)
        if screens:
            tab.screenshots(screens / f"{page.stem}-{width}")
        found[f"at {width} px"] = problems + (tab.evaluate(WIDE_CODE) if width == LAPTOP else [])
    asked = [f"asked for {url[:120]}" for url in tab.requests() if url.startswith(("http:", "https:"))]
    found["at any width"] = asked + [f"script failed: {error[:200]}" for error in tab.errors()]
    return found


def check_search(tab: Tab, site: Path, screens: Path | None) -> list[str]:
    """What is wrong with the search."""
    tab.open((site / "search.html").as_uri() + "?q=online+softmax", LAPTOP)
    try:
        tab.wait(f"{HITS}.length > 0", "results of the search for 'online softmax'")
    except BrowserError as error:
        return [str(error)]
    hits = tab.evaluate(HITS)
    if screens:
        tab.screenshots(screens / f"search-results-{LAPTOP}")
    found = any("03_online_softmax" in hit for hit in hits[:5])
    return [] if found else [f"search finds {hits[:5]}, not chapter 03"]


def main(site: Path, screens: Path | None) -> int:
    executable = find()
    if not executable:
        print(
            "no Chromium: set CHROMIUM or install it (Debian, Ubuntu: apt install chromium)", file=sys.stderr
        )
        return 1
    if not (site / "index.html").exists():
        print(f"no book at {site}: make html", file=sys.stderr)
        return 1
    if screens:
        shutil.rmtree(screens, ignore_errors=True)
    found = []
    with Tab(executable) as tab:
        for page in sorted(site.glob("*.html")):
            problems = [f"{where}: {x}" for where, some in check(tab, page, screens).items() for x in some]
            print(f"{page.name:42}  {'ok' if not problems else 'WRONG'}", flush=True)
            found += [f"{page.name} {problem}" for problem in problems]
        problems = check_search(tab, site, screens)
        print(f"{'search: online softmax':42}  {'ok' if not problems else 'WRONG'}")
        found += problems
    where = f"; screenshots in {screens.relative_to(ROOT)}" if screens else ""
    print("\n".join(["", *found]) if found else f"all pages fine{where}")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Open every page of the built book in headless Chromium.")
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / "build" / "html")
    parser.add_argument("--screens", action="store_true", help="save screenshots in build/screens")
    args = parser.parse_args()
    sys.exit(main(args.site.resolve(), ROOT / "build" / "screens" if args.screens else None))
