"""The built book, as its tests read it."""

import re
from functools import cache
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from chapters import ROOT

HTML = ROOT / "_build" / "html"
PAGES = sorted(p for p in HTML.rglob("*.html") if not p.relative_to(HTML).parts[0].startswith("_"))
BUILT = pytest.mark.skipif(not PAGES, reason="the book is not built: run `make book`")


def name_of(page: Path) -> str:
    """notebooks/ch02_allocator.html"""
    return page.relative_to(HTML).as_posix()


@cache
def soup_of(page: Path) -> BeautifulSoup:
    """Parse one page, once."""
    return BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")


def words(node) -> str:
    """The text of a node, with single spaces."""
    return re.sub(r"\s+", " ", node.get_text()).strip()


def is_outside(address: str) -> bool:
    """Tell whether an address leads out of the site."""
    return bool(re.match(r"(?:[a-z][a-z0-9+.-]*:)?//", address, re.I))
