"""The built book, read as files: nothing from elsewhere, no dead link, words for every picture."""

import gzip
import re
from functools import cache
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup
from built_site import BUILT, HTML, PAGES, is_outside, name_of, soup_of
from chapters import ROOT

pytestmark = BUILT
EACH = pytest.mark.parametrize("page", PAGES, ids=name_of)
LOADING = {
    "script": ["src"], "img": ["src", "srcset"], "iframe": ["src"], "source": ["src", "srcset"],
    "video": ["src", "poster"], "audio": ["src"], "embed": ["src"], "object": ["data"],
}  # fmt: skip
LINKS_THAT_LOAD = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch"}
OF_A_MACHINE = re.compile(r"(?<![\w./:])/(?:work|root|home|tmp|opt|Users)/\w[^\s\"'<]*")
CONTENT_NETWORKS = re.compile(r"unpkg\.com|jsdelivr|cdnjs|googleapis|gstatic|mathjax\.org")
MAX_EXPLORER = 120 * 1024  # bytes, compressed


def loaded_from_outside(soup) -> list[str]:
    """List the addresses outside the site that a page would load by itself."""
    tags = soup.find_all()
    found = [
        tag[attribute]
        for tag in tags
        for attribute in LOADING.get(tag.name, ())
        if is_outside(tag.get(attribute, ""))
    ]
    for link in [tag for tag in tags if tag.name == "link"]:
        if LINKS_THAT_LOAD & set(link.get("rel", [])) and is_outside(link.get("href", "")):
            found.append(link["href"])
    code = "\n".join(tag.get_text() for tag in tags if tag.name in ("script", "style"))
    styles = code + "".join(tag.get("style", "") for tag in tags)
    found += re.findall(r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)", styles)
    return found + CONTENT_NETWORKS.findall(code)


def pictures_without_words(soup) -> list[str]:
    """List images without alt text, or with a file name there, and drawings without a name."""
    images = [
        tag for tag in soup.find_all("img")
        if not tag.get("alt", "").strip() or re.search(r"^\.\.?/|_images/|\.(svg|png)$", tag["alt"])
    ]  # fmt: skip
    drawings = [
        tag for tag in soup.find_all("svg")
        if not (tag.find("title") or tag.get("aria-label") or tag.get("role") == "img")
        and not tag.find_parent(attrs={"aria-hidden": "true"})
        and tag.get("aria-hidden") != "true"
    ]  # fmt: skip
    return [str(tag)[:120] for tag in images + drawings]


def redirection(soup):
    """Find the tag that sends a reader on, if there is one."""
    return soup.find("meta", attrs={"http-equiv": re.compile("refresh", re.I)})


def dead_links(page, soup) -> list[str]:
    """List the links into the site that lead to no file or to no element of it."""
    dead, own = [], places_in(soup)
    for link in soup.find_all("a", href=True):
        target = urlsplit(link["href"])
        if target.scheme or target.netloc:
            continue
        path = (page.parent / unquote(target.path)).resolve() if target.path else page
        if not path.is_file():
            dead.append(link["href"])
        elif target.fragment and path.suffix == ".html":
            places = own if path == page else places_of(path)
            if unquote(target.fragment) not in places:
                dead.append(link["href"])
    return dead


def places_in(soup) -> set[str]:
    """What a link may name behind its #: each id, and each name."""
    return {tag.get(key) for tag in soup.find_all() for key in ("id", "name")}


@cache
def places_of(page) -> set[str]:
    """The places in one page, looked up once."""
    return places_in(soup_of(page))


@EACH
def test_a_page_loads_nothing_from_elsewhere(page):
    """Source: jupyter-book #1991, MyST-NB #520: widgets and formulas from content networks."""
    assert not loaded_from_outside(soup_of(page))


@EACH
def test_every_picture_has_words(page):
    assert not pictures_without_words(soup_of(page))


@EACH
def test_every_link_into_the_site_leads_somewhere(page):
    assert not dead_links(page, soup_of(page))


@EACH
def test_a_page_shows_nothing_of_the_machine_that_built_it(page):
    text = page.read_text(encoding="utf-8")
    assert not OF_A_MACHINE.findall(text)
    assert "OWNER/REPO" not in text and "executablebooks" not in text and "thebe" not in text


@EACH
def test_a_page_has_one_title_and_one_search_field(page):
    """Source: executablebooks/sphinx-book-theme #986: a second search field."""
    soup = soup_of(page)
    titles = [title for title in soup.find_all("h1") if title.find_parent(class_="bd-article")]
    assert len(titles) == 1 or redirection(soup) or page.stem == "search"
    assert len(soup.find_all(class_="search-button-field")) <= 1


@EACH
def test_an_explorer_is_small(page):
    for explorer in soup_of(page).find_all(class_="explorer"):
        assert len(gzip.compress(str(explorer).encode(), mtime=0)) <= MAX_EXPLORER


def test_the_site_has_the_pages_of_the_table_of_contents_and_no_others():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    extra = {"index", "search"}
    assert {name_of(page).removesuffix(".html") for page in PAGES} - extra == {*files, toc["root"]}


def test_the_index_leads_to_the_first_page():
    target = redirection(soup_of(HTML / "index.html"))["content"].split("url=")[1].strip("'\" ")
    assert target == "book/intro.html" and (HTML / target).is_file()


def test_each_chapter_offers_its_committed_twin():
    """Source: jupyter-book #752; MyST-NB's own copy has no outputs when it has them cached."""
    for twin in sorted((ROOT / "notebooks").glob("*.ipynb")):
        offered = HTML / "_sources" / "notebooks" / twin.name
        if (HTML / "notebooks" / f"{twin.stem}.html").is_file():
            assert offered.read_bytes() == twin.read_bytes()


def test_style_sheets_load_nothing_from_elsewhere():
    for sheet in (HTML / "_static").rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text())


# The guards can fail.


@pytest.mark.parametrize(
    "markup",
    [
        '<script src="https://unpkg.com/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<img alt="a" src="http://example.org/x.png">',
        "<style>@import 'https://example.org/x.css';</style>",
        '<p style="background: url(https://example.org/x.png)">',
        "<script>load('cdn.jsdelivr.net/x')</script>",
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(markup):
    assert loaded_from_outside(BeautifulSoup(markup, "html.parser"))


@pytest.mark.parametrize(
    "markup",
    ['<img src="x.png">', '<img alt="../_images/x.png" src="x.png">', "<svg><path/></svg>"],
)
def test_a_picture_without_words_is_found(markup):
    assert pictures_without_words(BeautifulSoup(markup, "html.parser"))


def test_a_dead_link_is_found():
    page = HTML / "book" / "intro.html"
    markup = '<a id="here" href="#here"></a><a href="#nowhere"></a><a href="nothing.html"></a>'
    markup += '<a href="https://example.org/x"></a><a href="intro.html#no-such-heading"></a>'
    dead = dead_links(page, BeautifulSoup(markup, "html.parser"))
    assert dead == ["#nowhere", "nothing.html", "intro.html#no-such-heading"]
