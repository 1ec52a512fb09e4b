"""Drawings of block tables, pools and memory, made by hand from live objects; curves and bars.

Every function returns a `Picture`: end a cell with it. The block drawings need no library at all;
curves and bars import matplotlib when the first of them is drawn.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import groupby

from labcore.charts import bars, curves, figure_svg
from labcore.picture import (
    CENTRED,
    COLOURS,
    FREE,
    INK,
    SMALL,
    UNKNOWN,
    WIDTH,
    Box,
    Picture,
    cells_in_rows,
    colours_of,
    counted,
    drawing,
    filled,
    hatched,
    key,
    outlined,
    rectangles,
    stacked,
    words,
)

__all__ = [
    "COLOURS",
    "Picture",
    "bars",
    "curves",
    "draw_facts",
    "draw_free_list",
    "draw_pool",
    "draw_regions",
    "draw_tables",
    "figure_svg",
    "stacked",
]

ROW = 10  # blocks of a table on one line, 39 apart
POOL_ROW, ACROSS, DOWN = 8, 60.8, 44.0  # blocks of the pool on one line, and how far apart
BLOCK_WIDTH, BLOCK_HEIGHT = 54.0, 25.0  # of a block in the pool
MOST_SLOTS = 32  # blocks of more slots are filled by proportion
STACK_ROW = 9  # entries of a free list on one line, 34 apart


def in_lines(number: int, pitch: tuple[float, float], size: tuple[float, float], start, row: int):
    ...
