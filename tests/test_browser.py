"""The built book in a browser: wide and narrow, light and dark, with no server and no kernel."""

import gzip
import shutil
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from built_site import BUILT, HTML, PAGES, name_of
from test_accessibility import violations_in

CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)
pytestmark = [
    BUILT,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the pages are not opened"),
]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 900}
PAPER = {"width": 794, "height": 1123}  # A4
LOOKS = [("light", WIDE, NARROW), ("dark", NARROW, WIDE)]  # opened at one width, then resized
READY = "() => !window.MathJax || (window.MathJax.startup && window.MathJax.startup.promise)"
THEME = "document.documentElement.dataset.theme"
TOO_WIDE = "document.documentElement.scrollWidth - window.innerWidth"
EACH = pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "index"], ids=name_of)
EXPLORERS = [page for page in PAGES if 'class="explorer"' in page.read_text(encoding="utf-8")]
CHAPTERS = [page for page in PAGES if page.parent.name == "notebooks"]
EACH_CHAPTER = pytest.mark.parametrize("page", CHAPTERS, ids=name_of)
MAX_TRANSFER = 3 * 10**6  # bytes, compressed: a page with all that it loads
LOADED = "() => performance.getEntriesByType('resource').map(entry => entry.name)"
FIRST_RESULT = """() => Math.min(...
  [...document.querySelectorAll('figure, .claim, .cell_output :is(svg, img, table, pre)')]
    .filter(shown => shown.checkVisibility())
    .map(shown => shown.getBoundingClientRect().top + scrollY))"""
FOLDED = ".bd-article details:not([open])"
FOR_SCREENS = (
    ".bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article, .prev-next-area, .headerlink, "
    ".explorer-controls, .bd-skip-link, button, input, select"
)
IN_SIGHT = "all => all.filter(e => e.checkVisibility()).map(e => e.outerHTML.slice(0, 120))"
EACH_EXPLORER = pytest.mark.parametrize("page", EXPLORERS, ids=name_of)


@contextmanager
def chromium():
    """Start Chromium, once a file of tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@contextmanager
def opened(browser, url: str, size: dict = WIDE, scheme: str = "light", scripts: bool = True):
    """Open a page and wait for its formulas; gives the tab and a list of what goes wrong in it."""
    context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=scripts)
    tab, wrong = context.new_page(), []
    tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    tab.on("console", lambda m: m.type == "error" and wrong.append(f"console: {m.text}"))
    tab.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    tab.on("request", lambda r: is_local(r.url) or wrong.append(f"leaves the page: {r.url}"))
    tab.goto(url)
    if scripts:
        tab.evaluate(READY)
    yield tab, wrong
    context.close()


def is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:"))


@cache
def transferred(address: str) -> int:
    """The bytes of a file of the site as a server sends it."""
    return len(gzip.compress(Path(unquote(urlsplit(address).path)).read_bytes()))


def weight(tab) -> int:
    """The bytes of an open page and all that it loaded."""
    files = {a for a in [tab.url, *tab.evaluate(LOADED)] if a.startswith("file:")}
    return sum(transferred(address.partition("#")[0]) for address in files)


def state(explorer) -> tuple[str, str]:
    """What a reader sees of an explorer: the picture and the caption."""
    view, caption = explorer.locator(".explorer-view"), explorer.locator(".explorer-caption")
    return view.inner_html(), caption.inner_text()


@EACH
def test_a_page_opens_without_an_error_fits_the_window_and_can_be_heard(browser, page):
    """Source: jupyter-book #1991; sphinx-book-theme #986; MyST-NB #520."""
    for scheme, *sizes in LOOKS:
        with opened(browser, page.as_uri(), sizes[0], scheme) as (tab, wrong):
            for size in sizes:
                tab.set_viewport_size(size)
                assert tab.evaluate(TOO_WIDE) <= 1, (scheme, size)
                assert tab.locator(".search-button-field:visible").count() <= 1
            assert tab.evaluate(THEME) == scheme
            formulas = tab.locator(".bd-article .math").count()
            assert tab.locator(".bd-article mjx-container").count() == formulas
            assert not wrong, scheme
            if scheme == LOOKS[-1][0]:  # last, as it takes the page apart
                assert weight(tab) < MAX_TRANSFER
                assert not violations_in(tab)


def test_some_pages_have_formulas():
    assert [page for page in PAGES if 'class="math' in page.read_text(encoding="utf-8")]


def test_the_index_sends_a_reader_to_the_first_page(browser):
    with opened(browser, (HTML / "index.html").as_uri(), scripts=False) as (tab, _):
        tab.wait_for_url("**/book/intro.html")
        assert tab.locator("article h1").is_visible()


def test_search_finds_the_chapter_on_the_watermark(browser):
    url = f"{(HTML / 'search.html').as_uri()}?q=watermark"
    with opened(browser, url) as (tab, _):
        tab.locator("#search-results li a").first.wait_for()
        found = [link.get_attribute("href") for link in tab.locator("#search-results li a").all()]
        assert any("notebooks/ch08a_admission.html" in href for href in found)


def test_search_finds_the_terms_of_the_glossary(browser):
    for term in ["copy on write", "internal fragmentation", "watermark"]:
        with opened(browser, f"{(HTML / 'search.html').as_uri()}?q={term}") as (tab, _):
            place = f"book/glossary.html#term-{term.replace(' ', '-')}"
            tab.locator(f"#search-results li a[href*='{place}']").first.wait_for(timeout=5000)


@EACH_CHAPTER
def test_a_first_picture_or_result_is_within_two_screens(browser, page):
    with opened(browser, page.as_uri(), scripts=False) as (tab, _):
        assert tab.evaluate(FIRST_RESULT) < 2 * WIDE["height"]


def test_a_printed_chapter_has_no_controls_and_its_solutions_stay_folded(browser):
    page = next(page for page in EXPLORERS if page in CHAPTERS)
    with opened(browser, page.as_uri(), PAPER, "dark") as (tab, _):
        folded = tab.locator(FOLDED).count()
        assert folded and tab.eval_on_selector_all(".explorer-controls, .copybtn", IN_SIGHT)
        tab.emulate_media(media="print")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert tab.locator(FOLDED).count() == folded
        assert tab.evaluate(THEME) == "light"  # paper is
        assert not tab.eval_on_selector_all(FOR_SCREENS, IN_SIGHT)
        for kept in ["h1", ".explorer-view", ".explorer-caption", ".cell_input pre"]:
            assert tab.eval_on_selector_all(f".bd-article {kept}", IN_SIGHT), kept
        assert tab.evaluate(TOO_WIDE) <= 1
        tab.evaluate("dispatchEvent(new Event('afterprint'))")
        assert tab.evaluate(THEME) == "dark"


@EACH_EXPLORER
def test_each_control_of_an_explorer_moves_picture_and_caption_by_keyboard(browser, page):
    """Source: ipywidgets #2069, #2126, #1903; quarto #3016: nothing happens without a kernel."""
    with opened(browser, page.as_uri(), NARROW, "dark") as (tab, wrong):
        for explorer in tab.locator(".explorer").all():
            assert explorer.locator("[aria-live]").count() >= 1
            for control in explorer.locator("input[type=range], select").all():
                before = state(explorer)
                control.focus()
                is_list = control.evaluate("e => e.tagName") == "SELECT"
                for key in ("ArrowDown", "ArrowUp") if is_list else ("ArrowRight", "ArrowLeft"):
                    control.press(key)
                    if state(explorer) != before:
                        break
                after = state(explorer)
                assert after[0] != before[0] and after[1] != before[1]
        assert not wrong


@EACH_EXPLORER
def test_an_explorer_shows_a_picture_and_a_caption_without_scripts(browser, page):
    """Source: riemann_book #23; jupyter-book #1991."""
    with opened(browser, page.as_uri(), scripts=False) as (tab, wrong):
        for explorer in tab.locator(".explorer").all():
            assert explorer.locator(".explorer-view svg, .explorer-view img").first.is_visible()
            assert explorer.locator(".explorer-caption").inner_text().strip()
        assert not [text for text in wrong if ".js" not in text]  # scripts are not fetched


def test_there_are_two_explorers():
    texts = [page.read_text(encoding="utf-8") for page in EXPLORERS]
    assert sum(text.count('class="explorer"') for text in texts) >= 2


def test_an_outside_request_and_an_error_are_found(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='http://127.0.0.1:9/x.png'><script>throw Error('oh')</script>")
    with opened(browser, bad.as_uri()) as (tab, wrong):
        tab.wait_for_load_state("networkidle")
        assert any(text.startswith("leaves the page") for text in wrong)
        assert any(text.startswith("error") for text in wrong)
    wide = tmp_path / "wide.html"
    wide.write_text("<p style='width: 900px'>wide</p>")
    with opened(browser, wide.as_uri(), NARROW) as (tab, wrong):
        assert not wrong
        assert tab.evaluate(TOO_WIDE) > 1
