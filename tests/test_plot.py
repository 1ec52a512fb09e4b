"""Drawings: what they show, in which role, and that they fit into any page."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bookkit import plot
from bookkit.picture import COLOURS, hatched, outlined, rectangles, short
from labcore.blocks import BlockAllocator, BlockTables

SVG = "{http://www.w3.org/2000/svg}"
BLUE, GREEN = COLOURS[0], COLOURS[2]


def tables(num_blocks=8, block_size=4, **lengths) -> BlockTables:
    made = BlockTables(BlockAllocator(num_blocks), block_size)
    for seq_id, num_tokens in lengths.items():
        made.add(seq_id, num_tokens)
    return made


def texts(picture) -> list[str]:
    return [node.text for node in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def paths(picture, **attributes) -> str:
    """Return the data of all paths with these attributes (- written _)."""
    wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
    nodes = ElementTree.fromstring(picture.svg).iter(f"{SVG}path")
    return "".join(n.get("d") for n in nodes if all(n.get(k) == v for k, v in wanted.items()))


def run_lengths(picture, pitch: float, **attributes) -> list[int]:
    """Return how many cells of this pitch each run of them has."""
    runs = paths(picture, stroke_dasharray=f"{short(pitch - 1)} 1", **attributes)
    return [round((float(length) + 1) / pitch) for length in re.findall(r"h([\d.]+)", runs)]


def all_pictures():
    shared = tables(a=6, b=9)
    shared.fork("a", "c")
    return {
        "tables": plot.draw_tables(shared),
        "tables of large blocks": plot.draw_tables(tables(4, 64, a=70)),
        "pool": plot.draw_pool([0, 0, None, 1], empty={1}),
        "regions": plot.draw_regions([("A", 0, 10, 3), ("B", 20, 5, 5)], 40),
        "free list": plot.draw_free_list([3, 0], [0, 1, 2, 0]),
        "facts": plot.draw_facts({"waste": "2.2%"}),
        "curves": plot.curves([0, 1, 2], {"a": [1, 2, 3], "b": [3, 2, 1]}, ("x", "y"), "Two"),
        "bars": plot.bars({"chat": {"maximum": 33, "paged": 98}}, "used (%)", "Use"),
    }


PICTURES = all_pictures()
every_picture = pytest.mark.parametrize("name", PICTURES)


# --- every picture -------------------------------------------------------------------------------


@every_picture
def test_it_has_a_title_a_description_and_the_role_of_an_image(name):
    root = ElementTree.fromstring(PICTURES[name].svg)
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root[0].text and root[1].text
    assert repr(PICTURES[name]) == f"{root[0].text}: {root[1].text}"


@every_picture
def test_it_shrinks_with_its_column_and_all_are_equally_wide(name):
    root = ElementTree.fromstring(PICTURES[name].svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width == 480
    assert "max-width:100%;height:auto" in root.get("style")
    assert float(root.get("height")) / float(root.get("width")) == pytest.approx(
        height / width, rel=0.01
    )


@every_picture
def test_text_and_lines_take_the_page_s_colour_and_no_ground_is_painted(name):
    colours = set(re.findall(r'(?:fill|stroke)(?:="|: ?)([#\w]+)', PICTURES[name].svg.lower()))
    assert colours - {c.lower() for c in COLOURS} == {"currentcolor", "none"} & colours
    assert "currentcolor" in colours


@every_picture
def test_it_styles_nothing_but_itself(name):
    assert "<style" not in PICTURES[name].svg
    assert "DejaVu" not in PICTURES[name].svg


@every_picture
def test_a_notebook_gets_an_image_on_paper_and_the_book_a_part_of_the_page(name, monkeypatch):
    live = PICTURES[name]._repr_mimebundle_()
    assert list(live) == ["image/svg+xml", "text/plain"]
    assert "background:#fff" in live["image/svg+xml"]
    monkeypatch.setenv("LABCORE_STATIC", "1")
    page = PICTURES[name]._repr_mimebundle_()
    assert list(page) == ["text/html", "text/plain"]
    assert PICTURES[name].svg in page["text/html"]
    assert "background" not in page["text/html"]
    HTMLParser().feed(page["text/html"])


def test_the_same_drawing_gives_the_same_bytes():
    assert {name: picture.svg for name, picture in all_pictures().items()} == {
        name: picture.svg for name, picture in PICTURES.items()
    }


def test_no_two_pictures_share_an_id():
    ids = [id for picture in PICTURES.values() for id in re.findall(r' id="([^"]+)"', picture.svg)]
    assert ids and len(set(ids)) == len(ids)


def test_every_id_is_used_and_every_reference_finds_its_id():
    for picture in PICTURES.values():
        ids = re.findall(r' id="([^"]+)"', picture.svg)
        assert set(ids) == set(re.findall(r'(?:url\(#|href="#)([^)"]+)', picture.svg))


def test_importing_plot_and_drawing_blocks_loads_no_library():
    code = (
        "import sys; from bookkit import plot; plot.draw_pool([0, None]);"
        "print({'matplotlib', 'numpy', 'IPython'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


# --- block tables --------------------------------------------------------------------------------


def test_a_table_shows_its_physical_ids_in_order():
    t = tables(a=4, b=4)
    t.append("a")
    row = texts(plot.draw_tables(t))
    assert row[row.index("a") :][:4] == ["a", "5 tokens", "0", "2"]


def test_a_shared_block_is_hatched_and_carries_its_count():
    t = tables(a=8)
    assert "×2" not in texts(plot.draw_tables(t))
    t.fork("a", "b")
    picture = plot.draw_tables(t)
    assert texts(picture).count("×2") == 2
    assert "block 0 is held 2 times; block 1 is held 2 times" in picture.description


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 32])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 17, 40])
def test_the_pool_has_one_filled_cell_a_token_and_one_outline_an_empty_slot(block_size, num_tokens):
    picture = plot.draw_tables(tables(40, block_size, a=num_tokens))
    filled = paths(picture, fill=BLUE, fill_opacity=None).count("M")
    assert filled == num_tokens + 1  # and the bar beside the name
    num_blocks = -(-num_tokens // block_size)
    outlines = paths(picture, stroke=BLUE, fill="none", stroke_width="1.2").count("M")
    assert outlines == num_blocks + num_blocks * block_size - num_tokens


@pytest.mark.parametrize(("num_tokens", "filled"), [(1, 1), (64, 32), (65, 33), (128, 64)])
def test_a_slot_of_a_large_block_stands_for_several_tokens(num_tokens, filled):
    picture = plot.draw_tables(tables(2, 64, a=num_tokens))
    assert paths(picture, fill=BLUE, fill_opacity=None).count("M") == filled + 1


def test_a_block_held_by_nobody_drawn_is_told_from_a_free_one():
    t = tables(a=4)
    assert "held elsewhere" not in texts(plot.draw_tables(t))
    t.allocator.allocate()
    assert "held elsewhere" in texts(plot.draw_tables(t))


def test_drawing_changes_nothing():
    t = tables(a=6, b=9)
    before = [(s, t.block_table(s), t.num_tokens(s)) for s in t.seq_ids()], t.allocator.num_free
    plot.draw_tables(t)
    after = [(s, t.block_table(s), t.num_tokens(s)) for s in t.seq_ids()], t.allocator.num_free
    assert before == after


def test_names_that_look_like_markup_are_written_as_text():
    assert "<b>&" in texts(plot.draw_tables(tables(**{"<b>&": 3})))


# --- pools, regions, free lists ------------------------------------------------------------------


@given(st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=90), st.integers(1, 40))
def test_a_pool_has_one_cell_for_each_entry(owners, columns):
    pitch = 481 / columns
    picture = plot.draw_pool(owners, columns=columns)
    assert sum(run_lengths(picture, pitch)) == len(owners)
    free = sum(owner is None for owner in owners)
    assert f"{len(owners) - free} cells filled, 0 held but empty, {free} free" in repr(picture)


def test_empty_cells_are_outlined():
    plain = plot.draw_pool(["a", "a", "b", None])
    marked = plot.draw_pool(["a", "a", "b", None], empty={1})
    assert not paths(plain, stroke=BLUE, stroke_width="1.2")
    assert paths(marked, stroke=BLUE, stroke_width="1.2").count("M") == 1
    assert marked.description == "Pool: 2 cells filled, 1 held but empty, 1 free"


def test_an_order_fixes_the_colours_of_owners():
    regions = plot.draw_regions([("c", 0, 4, 4)], 8, order=["a", "b", "c"])
    assert paths(regions, fill=GREEN)


def test_the_holes_between_regions_are_found_and_named():
    picture = plot.draw_regions([("B", 30, 20, 20), ("A", 0, 20, 5)], 100)
    assert "60 tokens free in 2 holes, the largest 50" in picture.description
    assert [text for text in texts(picture) if text.isdigit()] == ["10", "50"]
    assert paths(picture, fill=BLUE, fill_opacity="0.75").startswith("M0 22h24v34")


def test_memory_without_a_hole_says_so():
    assert "0 tokens free in 0 holes, the largest 0" in repr(plot.draw_regions([("A", 0, 8, 8)], 8))


@pytest.mark.parametrize(
    "regions",
    [[("A", 0, 5, 5), ("B", 4, 2, 1)], [("A", 6, 5, 1)], [("A", 0, 5, 6)], [("A", -1, 3, 1)]],
)
def test_regions_that_cannot_be_are_refused(regions):
    with pytest.raises(ValueError, match="does not fit: memory ends at 10"):
        plot.draw_regions(regions, 10)


def test_a_free_list_shows_both_rows_and_which_id_is_next():
    picture = plot.draw_free_list([3, 0], [0, 1, 2, 0])
    assert texts(picture)[:4] == ["free ids", "3", "0", "← next out"]
    assert "the last one goes out next; reference counts [0, 1, 2, 0]" in picture.description
    assert "none" in texts(plot.draw_free_list([], [1, 1]))


@pytest.mark.parametrize("num_blocks", [9, 10, 27])
def test_a_long_free_list_is_broken_into_lines_that_fit(num_blocks):
    picture = plot.draw_free_list(range(num_blocks), [0] * num_blocks)
    nodes = ElementTree.fromstring(picture.svg).iter(f"{SVG}text")
    assert max(float(node.get("x")) + 6.5 * len(node.text) for node in nodes) <= 480
    assert [text for text in texts(picture) if text == str(num_blocks - 1)]


# --- curves and bars -----------------------------------------------------------------------------


def test_each_line_is_named_at_its_end_and_its_data_are_described():
    picture = plot.curves([0, 5], {"chat": [9, 4]}, ("watermark (%)", "steps"), "Steps")
    assert {"chat", "watermark (%)", "steps"} <= set(texts(picture))
    assert picture.description == "Steps: steps over watermark (%). chat 9 at 0, 4 at 5."


@pytest.mark.parametrize("ends", [(5, 5, 5.01, 0), (0, 0, 0, 0), (9, 9, 9, 9)])
def test_labels_of_lines_that_end_together_stand_apart_and_beside_the_axis(ends):
    lines = {f"line {i}": [9, end] for i, end in enumerate(ends)}
    root = ElementTree.fromstring(plot.curves([0, 1], lines, ("x", "y"), "t").svg)
    places = sorted(float(n.get("y")) for n in root.iter(f"{SVG}text") if n.text in lines)
    assert min(b - a for a, b in pairwise(places)) > 13
    assert 24 < places[0] and places[-1] < 270 - 42 + 6


def test_the_axis_of_a_curve_starts_at_zero_and_can_be_held_fixed():
    low = plot.curves([0, 1], {"a": [90, 100]}, ("x", "y"), "t", top=200)
    assert {"0", "200"} <= set(texts(low))


def test_a_long_line_is_thinned_but_keeps_its_peak():
    y = [0.0] * 5_000
    y[3_217] = 7.0
    picture = plot.curves(range(5_000), {"a": y}, ("step", "blocks"), "t")
    assert "highest 7 at 3,217" in picture.description
    assert len(picture.svg) < 9_000
    top = plot.curves(range(5_000), {"a": [0.0] * 5_000}, ("step", "blocks"), "t", top=8)
    assert picture.svg.count("-") != top.svg.count("-")


def test_a_line_of_another_length_is_refused_by_name():
    with pytest.raises(ValueError, match="line 'a' has 2 values for 3 positions"):
        plot.curves([0, 1, 2], {"a": [1, 2]}, ("x", "y"), "t")


def test_bars_carry_their_names_and_values():
    picture = plot.bars({"chat": {"maximum": 33, "paged": 98.25}}, "used (%)", "Use")
    assert {"chat", "maximum 33", "paged 98.25", "used (%)"} <= set(texts(picture))
    assert picture.description == "Use: used (%). chat: maximum 33, paged 98.25."
    assert "reserve: 12,345" in plot.bars({"reserve": 12_345}, "steps", "t").description


def test_a_reader_s_own_style_does_not_leak_into_the_pictures():
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.edgecolor": "red"}):
        picture = plot.bars({"chat": 1}, "x", "t")
        assert matplotlib.rcParams["font.size"] == 30
    assert picture.svg == plot.bars({"chat": 1}, "x", "t").svg


def test_a_figure_made_with_pyplot_is_closed_and_keeps_its_text():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    fig, axes = pyplot.subplots()
    axes.plot([1, 2], [3, 4])
    axes.set_xlabel("block size")
    picture = plot.figure_svg(fig, "Mine", "a line")
    assert not pyplot.get_fignums()
    assert "block size" in texts(picture)
    assert "#000000" not in picture.svg


# --- strokes -------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60), st.integers(1, 60))
def test_hatching_stays_inside_its_box(x, y, width, height):
    for numbers in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", hatched([(x, y, width, height)])):
        across, down = map(float, numbers)
        assert x <= across <= x + width and y <= down <= y + height


def test_nothing_is_drawn_for_no_box():
    assert rectangles([], "") == hatched([]) == outlined([], BLUE) == ""


def test_pictures_can_be_stacked_into_one():
    parts = PICTURES["facts"], PICTURES["pool"]
    both = plot.stacked("Both", *parts)
    heights = [float(re.search(r'viewBox="0 0 480 ([\d.]+)', p.svg)[1]) for p in (*parts, both)]
    assert heights[2] == heights[0] + heights[1] + 10
    assert texts(both) == texts(parts[0]) + texts(parts[1])
    assert all(part.description in both.description for part in parts)
