"""Drawings of block tables, pools and memory, made by hand from live objects; curves and bars.

Every function returns a `Picture`: end a cell with it. The block drawings need no library; curves
and bars import matplotlib when the first is drawn.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import groupby
from math import ceil

from bookkit.charts import bars, curves, figure_svg
from bookkit.picture import (
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
    "COLOURS", "Picture", "bars", "curves", "draw_facts", "draw_free_list", "draw_pool",
    "draw_regions", "draw_tables", "drawing", "figure_svg", "filled", "outlined", "stacked", "words"
]  # fmt: skip


def _grid(number: int, in_line: int, first: Box, pitch: tuple[float, float]) -> list[Box]:
    """Return boxes like `first`, so many in a line, `pitch` apart across and down."""
    (x, y, w, h), (across, down) = first, pitch
    return [(x + across * (i % in_line), y + down * (i // in_line), w, h) for i in range(number)]


def _inside(box: Box, number: int) -> str:
    x, y, w, h = box
    return words(x + w / 2, y + h / 2 + 5, number, CENTRED)


def _held(cells: list[tuple[Box, float, bool]], colour: str) -> list[str]:
    """Draw cells (box, part of it that is filled, is it shared), hatched left and right if so."""
    used, sides = [], []
    for (x, y, w, h), part, is_shared in cells:  # the middle stays clear: a number is there
        used.append((x, y, w * part, h))
        side = w // 4 + 1
        sides += [(x, y, side, h), (x + w - side, y, side, h)] * is_shared
    boxes = [box for box, *_ in cells]
    return [filled(used, colour, 0.35), hatched(sides), outlined(boxes, colour)]


def draw_pool(
    owners: Sequence[Hashable | None], *, columns: int = 32, empty: Collection[int] = ()
) -> Picture:
    """Draw one cell for each slot or block; `owners[i]` is its holder, None where it is free.

    Cells whose numbers are in `empty` are held but unused: outlined. Owners get their colours in
    order of appearance; six colours, then again.  Given.
    """
    empty = frozenset(empty)
    colours = {**colours_of(who for who in owners if who is not None), None: INK}
    pitch = (WIDTH + 1) / columns
    height = min(pitch, 24)
    runs: dict[tuple[str, bool], list[Box]] = {}  # cells that look alike become one path
    looks = [(i // columns, colours[who], i in empty) for i, who in enumerate(owners)]
    for (line, *look), cells in groupby(range(len(owners)), looks.__getitem__):
        first, *more = cells
        box = (first % columns * pitch, line * height, (1 + len(more)) * pitch - 1, height - 1)
        runs.setdefault(tuple(look), []).append(box)
    body = []
    for (colour, is_empty), boxes in runs.items():
        full = cells_in_rows(boxes, pitch - 1, colour, 0.13 if colour == INK else 1)
        body.append(outlined(boxes, colour) if is_empty else full)
    bottom = ceil(len(owners) / columns) * height + 20
    free = sum(owner is None for owner in owners)
    used = len(owners) - free - len(empty)
    text = f"{used:,} cells filled, {len(empty):,} held but empty, {free:,} free"
    return drawing(bottom + 6, [*body, key(bottom, "free", "empty")], "Pool", text)


def draw_regions(
    regions: Sequence[tuple[Hashable, int, int, int]], size: int, *, order: Sequence[Hashable] = ()
) -> Picture:
    """Draw contiguous memory of `size` tokens as a bar: regions (owner, start, reserved, stored).

    Stored is filled, reserved but empty outlined, and each hole is grey with its length below it.
    Owners get their colours in the order of `order`, then of place.
    Raises ValueError for regions that overlap or leave the memory.  Given.
    """
    regions = sorted(regions, key=lambda region: region[1])
    holes = _holes(regions, size)
    scale, colours = WIDTH / size, colours_of([*order, *(owner for owner, *_ in regions)])
    body = [rectangles([(start * scale, 22, length * scale, 34) for start, length in holes], FREE)]
    for owner, start, reserved, stored in regions:
        x, width = start * scale, reserved * scale
        body.append(filled([(x, 22, stored * scale, 34)], colours[owner], 0.75))
        body.append(outlined([(x + 0.5, 22, width - 1, 34)], colours[owner]))
        if width > 7.5 * len(str(owner)):
            body.append(words(x + width / 2, 16, owner, CENTRED))
    for start, length in holes:
        if length * scale > 7 * len(str(length)):
            body.append(words((start + length / 2) * scale, 71, length, CENTRED))
    below = "; numbers below the bar: holes" if holes else ""
    body.append(words(0, 92, f"{size:,} tokens{below}", SMALL))
    body.append(key(112, *["free"] * bool(holes), "empty"))
    rows = [f"{who}: {n} of {room} tokens filled from {at}" for who, at, room, n in regions]
    free = [length for _, length in holes]
    rows.append(f"{sum(free)} tokens free in {counted(len(free), 'hole')}")
    text = f"{'; '.join(rows)}, the largest {max(free, default=0)}"
    return drawing(118, body, "Contiguous memory", text)


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


def draw_free_list(free_ids: Sequence[int], ref_counts: Sequence[int]) -> Picture:
    """Draw the stack of free ids, whose last entry goes out next, and every block's count.

    `ref_counts[i]` belongs to block i; a count of 0 is grey, above 1 hatched.  Given.
    """
    stack = _grid(len(free_ids), 9, (74, 22, 30, 26), (34, 32))
    body = [words(0, 40, "free ids"), rectangles(stack, FREE), outlined(stack[-1:], INK)]
    body += map(_inside, stack, free_ids)
    body += [words(x + 37, y + 18, "← next out") for x, y, *_ in stack[-1:]]
    body += [words(74, 40, "none", SMALL)] * (not stack)
    top = 44 + 32 * max(1, ceil(len(stack) / 9))
    boxes = _grid(len(ref_counts), 9, (74, top, 30, 26), (34, 46))
    cells = list(zip(boxes, ref_counts, strict=True))
    body += [words(0, top + 18, "ref counts"), words(0, top + 39, "block id", SMALL)]
    body.append(rectangles([box for box, count in cells if not count], FREE))
    body += _held([(box, 1, count > 1) for box, count in cells if count], COLOURS[0])
    for block, (box, count) in enumerate(cells):
        body += [_inside(box, count), words(box[0] + 15, box[1] + 39, block, f"{CENTRED} {SMALL}")]
    height = top + 46 * max(1, ceil(len(boxes) / 9)) + 4
    text = f"free ids {list(free_ids)}, the last one goes out next; reference counts "
    return drawing(height, body, "Free list", text + str(list(ref_counts)))


def draw_facts(facts: Mapping[str, object]) -> Picture:
    """Draw named numbers, three to a line, each under its name; format them first.  Given."""
    body = []
    for i, (name, value) in enumerate(facts.items()):
        x, y = 165 * (i % 3), 46 * (i // 3)
        body += [words(x, y + 12, name, SMALL), words(x, y + 33, value, 'font-size="18"')]
    text = "; ".join(f"{name} {value}" for name, value in facts.items())
    return drawing(46 * ceil(len(facts) / 3), body, "Numbers", text)


def draw_tables(tables) -> Picture:
    """Draw live `BlockTables`: each sequence's blocks by their physical ids, and below, the pool.

    Best with 1 to 6 sequences and 8 to 64 blocks. Changes nothing.  Given.
    """
    counts = [tables.allocator.ref_count(block) for block in range(tables.allocator.num_blocks)]
    body, y, rows = [words(0, 12, "block tables", SMALL)], 18, []
    for seq_id, colour in colours_of(tables.seq_ids()).items():
        body += _sequence(tables, seq_id, colour, y)
        table, length = list(tables.block_table(seq_id)), tables.num_tokens(seq_id)
        rows.append(f"{seq_id} has {counted(length, 'token')} in {table}")
        y += 4 + 28 * max(1, ceil(len(table) / 10))
    size, num_blocks = counted(tables.block_size, "token"), counted(len(counts), "block")
    body.append(words(0, y + 18, f"pool: {num_blocks} of {size}", SMALL))
    looks = _looks(tables, counts)
    body += _pool(looks, counts, tables.block_size, y + 40)
    y += 40 + 44 * ceil(len(counts) / 8)
    elsewhere = ["held elsewhere"] * any(look == "held elsewhere" for look, _ in looks)
    body.append(key(y, "free", "empty slot", "shared", *elsewhere))
    rows += [f"block {block} is held {n} times" for block, n in enumerate(counts) if n > 1]
    text = "; ".join([*rows, f"{counts.count(0)} of {num_blocks} free"])
    return drawing(y + 6, body, "Block tables", text)


def _stored(tables, seq_id: Hashable) -> list[tuple[int, int]]:
    """Return for each block of a table its id, and how many of its slots hold a token."""
    size, num_tokens = tables.block_size, tables.num_tokens(seq_id)
    table = tables.block_table(seq_id)
    return [(block, max(0, min(size, num_tokens - i * size))) for i, block in enumerate(table)]


def _sequence(tables, seq_id: Hashable, colour: str, y: float) -> list[str]:
    """Draw a table: whose it is, and each block by its id, filled as far as it is used."""
    name = str(seq_id) if len(str(seq_id)) < 12 else f"{str(seq_id)[:10]}…"
    length = counted(tables.num_tokens(seq_id), "token")
    body = [filled([(0, y, 4, 24)], colour), words(10, y + 10, name, 'font-weight="600"')]
    body.append(words(10, y + 23, length, SMALL))
    boxes = _grid(len(tables.block_table(seq_id)), 10, (92, y, 34, 24), (39, 28))
    cells, ids = [], []
    for box, (block, stored) in zip(boxes, _stored(tables, seq_id), strict=True):
        cells.append((box, stored / tables.block_size, tables.allocator.ref_count(block) > 1))
        ids.append(_inside(box, block))
    return [*body, *_held(cells, colour), *ids]


def _looks(tables, counts: list[int]) -> list[tuple[str, int]]:
    """Return each block's look, free, shared, held elsewhere or a colour, and its filled slots."""
    looks = [("held elsewhere" if count else "free", 0) for count in counts]
    for seq_id, colour in colours_of(tables.seq_ids()).items():
        for block, stored in _stored(tables, seq_id):
            look = "shared" if counts[block] > 1 else colour
            looks[block] = look, max(stored, looks[block][1])
    return looks


def _pool(looks, counts: list[int], block_size: int, top: float) -> list[str]:
    """Draw every physical block with its slots, its id above it, and its count if it is shared."""
    boxes = _grid(len(counts), 8, (0, top, 54, 25), (60.8, 44))
    blocks, labels = [], []
    for block, ((x, y, w, h), count) in enumerate(zip(boxes, counts, strict=True)):
        blocks += _block((x, y, w, h), *looks[block], block_size)
        labels.append(words(x, y - 4, block))
        bold = 'text-anchor="end" font-weight="600"'
        labels += [words(x + w, y - 4, f"×{count}", bold)] * (count > 1)
    return [*blocks, f'<g font-size="11.5">{"".join(labels)}</g>']


def _block(box: Box, look: str, stored: int, block_size: int) -> list[str]:
    """Draw a block with its slots, as `_looks` says."""
    if look in ("free", "held elsewhere"):
        return [rectangles([box], FREE if look == "free" else UNKNOWN)]
    colour, opacity = (INK, 0.2) if look == "shared" else (look, 1)
    slots, in_line = min(block_size, 32), min(block_size, 8)  # a larger block's stand for several
    x, y, w, h = box
    across, down = (w + 1) / in_line, (h + 1) / ceil(slots / in_line)
    cells = _grid(slots, in_line, (x, y, across - 1, down - 1), (across, down))
    full = ceil(stored * slots / block_size)
    hatch = hatched([box] * (look == "shared"))
    return [filled(cells[:full], colour, opacity), outlined(cells[full:], colour), hatch]
