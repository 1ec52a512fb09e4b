"""Explorers: live with a kernel, precomputed without one.

Case W1 (a slider on a static page moves and nothing happens: jupyter-widgets/ipywidgets #2069 and
#2126, quarto #3016): every position of the page holds its own, right picture and caption, and the
first of them is there without JavaScript. Case N9 (outputs that change each run: nbval #6, #38):
what an explorer prints is the same every time.
"""

import gzip
import json
import random
import re
import shutil
from html.parser import HTMLParser

import pytest
from chapters import ROOT

from bookkit import plot
from bookkit.explorer import MOST_BYTES, explore
from bookkit.picture import Picture, drawing

STATIC = ROOT / "book" / "_static"
SLIDER = "application/vnd.jupyter.widget-view+json"


def picture(text: object) -> Picture:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 80 20"><text>{text}</text></svg>'
    return Picture(svg, f"a picture of {text}")


def waste(block_size, workload):
    caption = f"Blocks of {block_size} under {workload} waste {block_size // 2}."
    return picture(f"{workload} {block_size}"), caption


def shown_by_waste(block_size, workload) -> tuple[str, str]:
    drawn, caption = waste(block_size, workload)
    return drawn.svg, caption


def example(render=waste, **options):
    return explore(render, block_size=[1, 16, 256], workload=["chat", "long", "code"], **options)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])


class Elements(HTMLParser):
    """Collects every element's attributes, and checks that each one is closed."""

    EMPTY = ("input", "meta")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.found if name == tag]


# --- in the book ---------------------------------------------------------------------------------


def test_each_position_of_the_page_holds_its_own_picture_and_caption():
    explorer = example(start={"block_size": 16})
    data = data_of(explorer.static_html())
    for values, frame in zip(explorer.positions, data["frames"], strict=True):
        assert tuple(frame) == shown_by_waste(**values)
    assert explorer.positions[:2] == [
        {"block_size": 1, "workload": "chat"},
        {"block_size": 1, "workload": "long"},
    ]
    assert data["labels"] == [["1", "16", "256"], ["chat", "long", "code"]]


def test_the_starting_picture_and_caption_can_be_read_without_javascript():
    page = example(start={"block_size": 16, "workload": "long"}).static_html()
    before_scripts = page[: page.index("<script")]
    first, caption = shown_by_waste(16, "long")
    assert first in before_scripts and caption in before_scripts
    assert "the picture shows the starting values" in before_scripts
    assert "<noscript>" in before_scripts


def test_numbers_get_a_slider_and_names_a_list_both_off_until_the_script_runs():
    elements = Elements(example(start={"block_size": 256, "workload": "long"}).static_html())
    [slider], [choice] = elements.all("input"), elements.all("select")
    assert slider["type"] == "range" and "disabled" in slider and "disabled" in choice
    assert (slider["min"], slider["max"], slider["value"]) == ("0", "2", "2")
    assert slider["aria-valuetext"] == "256"
    assert [("selected" in option) for option in elements.all("option")] == [False, True, False]
    assert len(elements.all("label")) == 2
    assert {"class": "explorer-caption", "aria-live": "polite"} in elements.all("p")


def test_it_loads_nothing_by_itself_and_has_no_id_that_another_explorer_might_use():
    elements = Elements(example().static_html())
    for _tag, attributes in elements.found:
        assert not {"id", "src", "href", "for"} & set(attributes)
    assert "http" not in (STATIC / "explorer.js").read_text(encoding="utf-8")


def test_labels_write_the_values():
    explorer = explore(
        lambda watermark: picture("same"),
        watermark=[0, 0.05],
        labels={"watermark": "{:.0%}".format},
    )
    assert data_of(explorer.static_html())["labels"] == [["0%", "5%"]]


def test_its_size_is_counted():
    explorer = explore(lambda n, m: picture(n + m), n=[1, 2, 3], m=[1, 2])
    size = explorer.static_size()
    assert size.frames == 6
    assert size.compressed_bytes == len(gzip.compress(explorer.static_html().encode(), mtime=0))


def test_markup_in_pictures_and_labels_cannot_end_the_script():
    def render(name):
        return picture(f"{name}</text><!-- </script> --><text>"), "</script><b>"

    page = explore(render, name=["<script>", "</script>&'\""]).static_html()
    data = data_of(page)
    assert data["frames"][0][0] == render("<script>")[0].svg
    inside = page[page.index("<script type") :]
    assert inside.count("</script>") == 1 and "<!--" not in inside
    assert data["frames"][0][1] == "</script><b>"
    assert "&lt;/script&gt;&lt;b&gt;" in page


def test_the_page_keeps_room_for_the_largest_picture():
    def render(n):
        return drawing(50 - n, [], "Empty", "nothing", 100 * n)

    assert "max-width:337.5px;aspect-ratio:300/49" in explore(render, n=[1, 3]).static_html()


def test_two_builds_give_the_same_bytes():
    assert example().static_html() == example().static_html()


def test_an_explorer_of_pools_stays_far_below_the_limit():
    def pool(block_size, seed):
        rng = random.Random(seed)
        owners = [i for i in range(99) for _ in range(rng.randint(1, 12))][:480]
        return plot.draw_pool([*owners, None], empty=range(0, 480, block_size)), "a pool"

    explorer = explore(pool, block_size=[2, 4, 8, 16, 32, 64], seed=[1, 2, 3, 4, 5, 6, 7, 8])
    assert explorer.static_size().frames == 48
    assert explorer.static_size().compressed_bytes < 30 * 1024


def test_an_explorer_over_the_limit_is_refused_with_its_numbers():
    rng = random.Random(0)
    explorer = explore(lambda n: picture(rng.randbytes(90_000).hex()), n=[1, 2])
    assert explorer.static_size().compressed_bytes > MOST_BYTES
    with pytest.raises(
        ValueError, match=r"over n: \d+ KB compressed, at most 120 .* 2 frames.*175\.9 KB"
    ):
        explorer.static_html()


def test_in_the_book_a_failing_picture_stops_the_build_and_says_where(monkeypatch):
    monkeypatch.setenv("LABCORE_STATIC", "1")
    explorer = example(lambda block_size, workload: 1 // (block_size - 16))
    with pytest.raises((ZeroDivisionError, TypeError)) as error:
        explorer._repr_mimebundle_()
    assert error.value.__notes__ == ["while drawing block size 1, workload chat"]


def test_the_book_gets_html_and_text_only(monkeypatch):
    monkeypatch.setenv("LABCORE_STATIC", "1")
    bundle = example()._repr_mimebundle_()
    assert list(bundle) == ["text/html", "text/plain"]
    assert bundle["text/plain"] == "Blocks of 1 under chat waste 0."


# --- with a kernel -------------------------------------------------------------------------------


def parts(widget):
    controls, shown, caption = widget.children
    return list(controls.children), shown, caption


def test_a_notebook_gets_a_view_an_image_and_the_caption():
    bundle = example()._repr_mimebundle_()
    assert set(bundle) == {SLIDER, "image/svg+xml", "text/plain"}
    assert set(bundle[SLIDER]) == {"model_id", "version_major", "version_minor"}
    assert bundle["text/plain"] == repr(example()) == "Blocks of 1 under chat waste 0."
    assert example()._repr_mimebundle_()["text/plain"] == bundle["text/plain"]


def test_moving_a_slider_makes_python_draw_again():
    (size, workload), shown, caption = parts(example(start={"block_size": 16}).widget())
    assert (shown.value, caption.value) == shown_by_waste(16, "chat")
    size.value = 256
    assert (shown.value, caption.value) == shown_by_waste(256, "chat")
    workload.value = "long"
    assert (shown.value, caption.value) == shown_by_waste(256, "long")
    assert not size.continuous_update
    assert [type(control).__name__ for control in (size, workload)] == [
        "SelectionSlider",
        "Dropdown",
    ]


def test_an_error_in_render_is_shown_and_the_sliders_live_on():
    def render(n):
        return picture(6 // n)

    (slider,), shown, caption = parts(explore(render, n=[1, 0, 2]).widget())
    slider.value = 0
    assert "ZeroDivisionError" in shown.value and caption.value == "Nothing to draw for n 0."
    slider.value = 2
    assert shown.value == picture(3).svg


def test_an_error_in_the_first_picture_is_shown_too():
    bundle = explore(lambda n: picture(1 // n), n=[0, 1])._repr_mimebundle_()
    assert "image/svg+xml" not in bundle
    assert bundle["text/plain"] == "Nothing to draw for n 0."


def test_without_ipywidgets_the_starting_picture_remains(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    assert set(example()._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}


# --- what render may return ----------------------------------------------------------------------


def test_a_picture_brings_its_description_along_as_caption():
    drawn = plot.draw_pool([1, None])
    assert explore(lambda n: drawn, n=[1]).frame(n=1) == drawn
    own = explore(lambda n: (drawn, "short"), n=[1])
    assert own.frame(n=1) == Picture(drawn.svg, "short")


def test_anything_else_is_refused_by_its_type():
    with pytest.raises(TypeError, match="returned int"):
        explore(lambda n: n, n=[1]).frame(n=1)


# --- what explore refuses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "at least one axis"),
        ({"n": []}, "axis 'n' has no values"),
        ({"n": 16}, "axis 'n' is a list of values, not 16"),
        ({"n": "chat"}, "axis 'n' is a list of values, not 'chat'"),
        ({"n": [1], "start": {"m": 1}}, r"no axis 'm' among \['n'\]"),
        ({"n": [1], "labels": {"m": str}}, r"no axis 'm' among \['n'\]"),
        ({"n": [1, 2], "start": {"n": 3}}, r"start n=3 is not one of \[1, 2\]"),
        ({"n": range(21), "m": range(20)}, "21 x 20 = 420 frames, at most 400"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_their_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        explore(waste, **arguments)


def test_four_hundred_frames_are_allowed():
    assert len(explore(waste, n=range(20), m=range(20)).positions) == 400


# --- in a browser --------------------------------------------------------------------------------


FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


def opened(browser, folder, javascript=True, width=400):
    """Open a page with two explorers from the disk, on a screen as narrow as a phone's."""
    first, second = example(start={"block_size": 16}), example()
    for name in ("book.css", "explorer.js"):
        shutil.copy(STATIC / name, folder)
    head = """<meta charset="utf-8"><link rel="stylesheet" href="book.css">
    <script src="explorer.js"></script>"""
    page = f"{head}<body>{first.static_html()}{second.static_html()}"
    (folder / "page.html").write_text(page, encoding="utf-8")
    context = browser.new_context(
        java_script_enabled=javascript, viewport={"width": width, "height": 700}
    )
    tab = context.new_page()
    tab.failures = []
    tab.on("console", lambda message: tab.failures.append(message.text))
    tab.on("pageerror", lambda error: tab.failures.append(str(error)))
    tab.goto((folder / "page.html").as_uri())
    return tab


def state(tab) -> list[tuple[str, str]]:
    """Return (text in the picture, caption) of each explorer on the page."""
    shown, said = tab.locator(".explorer-view").all(), tab.locator(".explorer-caption").all()
    return [
        (view.text_content(), text.text_content()) for view, text in zip(shown, said, strict=True)
    ]


@pytest.mark.browser
def test_arrow_keys_move_one_explorer_and_leave_the_other(browser, tmp_path):
    tab = opened(browser, tmp_path)
    assert [text for text, _ in state(tab)] == ["chat 16", "chat 1"]
    slider = tab.get_by_label("block size").first
    slider.focus()
    tab.keyboard.press("ArrowRight")
    assert state(tab)[0] == ("chat 256", waste(256, "chat")[1])
    assert state(tab)[1][0] == "chat 1"
    assert slider.get_attribute("aria-valuetext") == "256"
    assert tab.locator("output").first.text_content() == "256"
    tab.get_by_label("workload").first.select_option("long")
    assert state(tab)[0] == ("long 256", waste(256, "long")[1])
    assert not tab.failures


@pytest.mark.browser
def test_every_position_shows_its_own_picture(browser, tmp_path):
    tab = opened(browser, tmp_path)
    for workload in ("chat", "long", "code"):
        tab.get_by_label("workload").last.select_option(workload)
        for at, block_size in enumerate([1, 16, 256]):
            tab.get_by_label("block size").last.fill(str(at))
            assert state(tab)[1] == (f"{workload} {block_size}", waste(block_size, workload)[1])


@pytest.mark.browser
def test_without_javascript_the_first_picture_stands_and_the_controls_are_off(browser, tmp_path):
    tab = opened(browser, tmp_path, javascript=False)
    assert state(tab)[0] == ("chat 16", waste(16, "chat")[1])
    assert tab.get_by_label("block size").first.is_disabled()
    assert tab.locator("noscript p").first.is_visible()


@pytest.mark.browser
@pytest.mark.parametrize("width", [320, 400, 1280])
def test_the_page_never_gets_wider_than_the_screen(browser, tmp_path, width):
    tab = opened(browser, tmp_path, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_a_control_may_start_at_none():
    explorer = explore(lambda n: picture(n), n=[None, 1024])
    (slider,), shown, _ = parts(explorer.widget())
    assert shown.value == picture(None).svg
    slider.index = 1
    assert shown.value == picture(1024).svg
    assert SLIDER in explorer._repr_mimebundle_()


@pytest.mark.parametrize("caption", [None, 5])
def test_a_caption_that_is_no_text_is_refused_with_its_position(caption):
    with pytest.raises(TypeError, match="a caption of type") as error:
        explore(lambda n: (picture(n), caption), n=[1]).static_html()
    assert error.value.__notes__ == ["while drawing n 1"]
