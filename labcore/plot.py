"""Drawings of block tables, pools and memory, made by hand from live objects; curves and bars.

Every function returns a `Picture`: end a cell with it. The block drawings need no library at all;
curves and bars import matplotlib when the first of them is drawn.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import groupby

from labcore.charts import bars, curves
from labcore.figure import figure_svg
from labcore.picture import (
    CENTRED,
    COLOURS,
    FREE,
    SMALL,
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
from labcore.table_drawing import draw_tables

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


def draw_pool(
    owners: Sequence[Hashable | None],
    *,
    columns: int = 32,
    empty: Collection[int] = (),
    shared: Collection[int] = (),
    order: Sequence[Hashable] = (),
) -> Picture:
    """Draw one cell for each slot or block; `owners[i]` is its holder, None where it is free.

    `empty` and `shared` are cell numbers: held but unused (outlined), held by several (hatched).
    Owners get their colours in the order of `order`, then of appearance; six colours, then again.
    Given.
    """
    empty, shared = frozenset(empty), frozenset(shared)
    colours = {**colours_of([*order, *(who for who in owners if who is not None)]), None: ""}
    kinds = [(colours[who], i in empty, i in shared) for i, who in enumerate(owners)]
    pitch = (WIDTH + 1) / columns
    height = min(pitch, 24)
    runs: dict[tuple, list[Box]] = {}  # cells that look alike become one path
    for (line, kind), cells in groupby(
        enumerate(kinds), lambda cell: (cell[0] // columns, cell[1])
    ):
        places = [place % columns for place, _ in cells]
        box = (places[0] * pitch, line * height, len(places) * pitch - 1, height - 1)
        runs.setdefault(kind, []).append(box)
    body = [_cells(kind, boxes, pitch - 1) for kind, boxes in runs.items()]
    bottom = -(-len(owners) // columns) * height + 20
    body.append(key(bottom, "free", "empty", *["shared"] * bool(shared)))
    return drawing(bottom + 6, body, "Pool", _describe_pool(owners, empty, shared))


def _cells(kind: tuple[str, bool, bool], boxes: list[Box], cell: float) -> str:
    """Draw all cells of one kind: (colour, is it empty, is it shared), no colour for free ones."""
    colour, is_empty, is_shared = kind
    if not colour:
        return cells_in_rows(boxes, cell, "currentColor", 0.13)
    if is_empty:
        return outlined(boxes, colour)
    return cells_in_rows(boxes, cell, colour) + (hatched(boxes) if is_shared else "")


def _describe_pool(owners, empty: Collection[int], shared: Collection[int]) -> str:
    held = sum(owner is not None for owner in owners)
    parts = [
        f"{held - len(empty):,} cells filled",
        f"{len(empty):,} held but empty",
        f"{len(owners) - held:,} free",
    ]
    return ", ".join(parts + [f"{len(shared):,} shared"] * bool(shared))


def draw_regions(
    regions: Sequence[tuple[Hashable, int, int, int]],
    size: int,
    *,
    unit: str = "tokens",
    order: Sequence[Hashable] = (),
) -> Picture:
    """Draw contiguous memory of `size` as one bar, from regions (owner, start, reserved, stored).

    Stored is filled, reserved but empty outlined, and each hole is grey with its length below it.
    Owners get their colours in the order of `order`, then of place.
    Raises ValueError for regions that overlap or leave the memory.  Given.
    """
    regions = sorted(regions, key=lambda region: region[1])
    holes = _holes(regions, size)
    scale, colours = WIDTH / size, colours_of([*order, *(owner for owner, *_ in regions)])
    body = [rectangles([(start * scale, 22, length * scale, 34) for start, length in holes], FREE)]
    for owner, start, reserved, stored in regions:
        body += [
            filled([(start * scale, 22, stored * scale, 34)], colours[owner], 0.75),
            outlined([(start * scale + 0.5, 22, reserved * scale - 1, 34)], colours[owner]),
        ]
        if reserved * scale > 7.5 * len(str(owner)):
            body.append(words((start + reserved / 2) * scale, 16, owner, CENTRED))
    body += [
        words((start + n / 2) * scale, 71, n, CENTRED)
        for start, n in holes
        if n * scale > 7 * len(str(n))
    ]
    body += [
        words(0, 92, f"{size:,} {unit}; numbers below the bar: holes", SMALL),
        key(112, "free", "empty"),
    ]
    return drawing(118, body, "Contiguous memory", _describe_regions(regions, holes, unit))


def _holes(regions, size: int) -> list[tuple[int, int]]:
    """Return (start, length) of what lies between the regions, which are sorted by start."""
    holes, end = [], 0
    for owner, start, reserved, stored in [*regions, (None, size, 0, 0)]:
        if start < end or start + reserved > size or not 0 <= stored <= reserved:
            raise ValueError(
                f"region {owner!r} ({start=}, {reserved=}, {stored=}) does not fit: "
                f"memory ends at {size} and is taken up to {end}"
            )
        holes += [(end, start - end)] * (start > end)
        end = start + reserved
    return holes


def _describe_regions(regions, holes, unit: str) -> str:
    rows = [
        f"{owner}: {stored} of {reserved} {unit} filled from {start}"
        for owner, start, reserved, stored in regions
    ]
    free = [length for _, length in holes]
    largest = f"the largest {max(free, default=0)}"
    rows.append(f"{sum(free)} {unit} free in {counted(len(free), 'hole')}, {largest}")
    return "; ".join(rows)


def draw_free_list(free_ids: Sequence[int], ref_counts: Sequence[int]) -> Picture:
    """Draw the stack of free ids, whose last entry goes out next, and every block's count.

    Both are plain lists; `ref_counts[i]` belongs to block i. A count of 0 is grey, above 1 hatched.
    Given.
    """
    body = [*_stack(free_ids), *_counts(ref_counts, 44 + 32 * _lines(free_ids))]
    bottom = 44 + 32 * _lines(free_ids) + 46 * _lines(ref_counts)
    text = f"free ids {list(free_ids)}, the last one goes out next; reference counts "
    return drawing(bottom + 4, body, "Free list", text + str(list(ref_counts)))


def _lines(items: Sequence) -> int:
    return max(1, -(-len(items) // 12))


def _stack(free_ids: Sequence[int]) -> list[str]:
    boxes = [(74 + 34 * (i % 12), 22.0 + 32 * (i // 12), 30.0, 26.0) for i in range(len(free_ids))]
    ids = [
        words(x + 15, y + 18, block, CENTRED)
        for (x, y, *_), block in zip(boxes, free_ids, strict=True)
    ]
    if not boxes:
        return [words(0, 40, "free ids"), words(74, 40, "none", SMALL)]
    x, y, *_ = boxes[-1]
    arrow = (
        words(x + 37, y + 18, "← next out")
        if len(boxes) % 12
        else words(x + 15, 14, "next out ↓", CENTRED)
    )
    edge = outlined([boxes[-1]], "currentColor")
    return [words(0, 40, "free ids"), rectangles(boxes, FREE), edge, *ids, arrow]


def _counts(ref_counts: Sequence[int], top: float) -> list[str]:
    boxes = [(74 + 34 * (i % 12), top + 46 * (i // 12), 30.0, 26.0) for i in range(len(ref_counts))]
    free, held, shared, numbers = [], [], [], []
    for block, ((x, y, w, h), count) in enumerate(zip(boxes, ref_counts, strict=True)):
        (held if count else free).append((x, y, w, h))
        if count > 1:
            shared += [(x, y, 8.0, h), (x + w - 8, y, 8.0, h)]
        numbers += [
            words(x + 15, y + 18, count, CENTRED),
            words(x + 15, y + 39, block, f"{CENTRED} {SMALL}"),
        ]
    names = [words(0, top + 18, "ref counts"), words(0, top + 39, "block id", SMALL)]
    blue = COLOURS[0]
    drawn = [
        rectangles(free, FREE),
        filled(held, blue, 0.35),
        hatched(shared),
        outlined(held, blue),
    ]
    return [*names, *drawn, *numbers]


def draw_facts(facts: Mapping[str, object]) -> Picture:
    """Draw named numbers, three to a line, each under its name: the figures beside a picture.

    Values are shown as they are: format them first.  Given.
    """
    body = []
    for i, (name, value) in enumerate(facts.items()):
        x, y = 165.0 * (i % 3), 46 * (i // 3)
        body += [words(x, y + 12, name, SMALL), words(x, y + 33, value, 'font-size="18"')]
    text = "; ".join(f"{name} {value}" for name, value in facts.items())
    return drawing(46 * -(-len(facts) // 3), body, "Numbers", text)
