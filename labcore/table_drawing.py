"""The picture of live block tables: what each sequence sees, and the pool it really is.

Import `draw_tables` from `labcore.plot`.
"""

from collections.abc import Hashable, Sequence

from labcore.picture import (
    CENTRED,
    FREE,
    SMALL,
    UNKNOWN,
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
    words,
)

CELLS_A_LINE, BLOCKS_A_LINE = 10, 8
BLOCK_WIDTH, BLOCK_HEIGHT = 54, 25
MOST_SLOTS = 32  # blocks of more slots are filled by proportion


def draw_tables(tables, seq_ids: Sequence[Hashable] | None = None) -> Picture:
    """Draw live `BlockTables`: each sequence's blocks by their physical ids, and below, the pool.

    `seq_ids` picks the sequences and fixes their order and colours; one that is not in `tables`
    keeps its colour and an empty row, so that a series of pictures stays comparable. Best with 1 to
    6 sequences and 8 to 64 blocks. Reads seq_ids(), block_table(), num_tokens(), block_size and the
    allocator's num_blocks and ref_count(), and changes nothing.  Given.
    """
    seq_ids = list(tables.seq_ids() if seq_ids is None else seq_ids)
    colours = colours_of(seq_ids)
    body, y = [words(0, 12, "block tables", SMALL)], 18.0
    for seq_id in seq_ids:
        body += _name(tables, seq_id, colours[seq_id], y) + _row(tables, seq_id, colours[seq_id], y)
        y += 4 + 28 * max(1, -(-len(_blocks(tables, seq_id)) // CELLS_A_LINE))
    size = "token" if tables.block_size == 1 else f"{tables.block_size} tokens"
    num_blocks = tables.allocator.num_blocks
    body.append(words(0, y + 18, f"pool: {counted(num_blocks, 'block')} of {size}", SMALL))
    body += _pool(tables, colours, y + 40)
    y += 40 + 44 * -(-num_blocks // BLOCKS_A_LINE)
    body.append(key(y, "free", "empty slot", "shared", *_elsewhere(tables, seq_ids)))
    return drawing(y + 6, body, "Block tables", _describe(tables, seq_ids))


def _name(tables, seq_id: Hashable, colour: str, y: float) -> list[str]:
    """Write who the row belongs to, and how long it is."""
    name = str(seq_id) if len(str(seq_id)) < 12 else f"{str(seq_id)[:10]}…"
    known = seq_id in tables.seq_ids()
    length = counted(tables.num_tokens(seq_id), "token") if known else "not there"
    bold = 'font-weight="600"'
    bar = filled([(0, y, 4, 24)], colour)
    return [bar, words(10, y + 10, name, bold), words(10, y + 23, length, SMALL)]


def _row(tables, seq_id: Hashable, colour: str, y: float) -> list[str]:
    """Draw a cell for each logical block: the physical id inside, filled as far as it is used."""
    blocks = _blocks(tables, seq_id)
    boxes = [
        (92.0 + 39 * (i % CELLS_A_LINE), y + 28 * (i // CELLS_A_LINE), 34.0, 24.0)
        for i in range(len(blocks))
    ]
    used, sides = [], []
    for i, (x, top, width, height) in enumerate(boxes):
        part = _stored_in(tables, seq_id, i) / tables.block_size
        used.append((x, top, width * part, height))
        if tables.allocator.ref_count(blocks[i]) > 1:  # the middle stays clear: an id is there
            sides += [(x, top, 9.0, height), (x + width - 9, top, 9.0, height)]
    ids = [
        words(x + 17, y + 17, block, CENTRED)
        for block, (x, y, _, _) in zip(blocks, boxes, strict=True)
    ]
    return [filled(used, colour, 0.35), hatched(sides), outlined(boxes, colour), *ids]


def _pool(tables, colours: dict, top: float) -> list[str]:
    """Draw every physical block with its slots; `top` is the upper edge of the first line."""
    holders, size = _holders(tables, colours), tables.block_size
    looks: dict[str, list[tuple[Box, int]]] = {}  # "free", "shared", ... or a colour
    labels = []
    for block in range(tables.allocator.num_blocks):
        x, y = 60.8 * (block % BLOCKS_A_LINE), top + 44.0 * (block // BLOCKS_A_LINE)
        count, stored = tables.allocator.ref_count(block), holders.get(block, {})
        look = _look(count, stored, colours)
        box = (x, y, float(BLOCK_WIDTH), float(BLOCK_HEIGHT))
        looks.setdefault(look, []).append((box, max(stored.values(), default=0)))
        labels.append(words(x, y - 4, block))
        if count > 1:
            labels.append(
                words(x + BLOCK_WIDTH, y - 4, f"×{count}", 'text-anchor="end" font-weight="600"')
            )
    drawn = [part for look, blocks in looks.items() for part in _blocks_alike(look, blocks, size)]
    return [*drawn, f'<g font-size="11.5">{"".join(labels)}</g>']


def _look(count: int, stored: dict, colours: dict) -> str:
    """Say how a block is drawn, from its reference count and the sequences that hold it."""
    if not stored:
        return "unknown" if count else "free"
    return "shared" if count > 1 else colours[next(iter(stored))]


def _blocks_alike(look: str, blocks: list[tuple[Box, int]], block_size: int) -> list[str]:
    """Draw all blocks that look the same, each (box, number of stored tokens)."""
    boxes = [box for box, _ in blocks]
    if look in ("free", "unknown"):
        return [rectangles(boxes, FREE if look == "free" else UNKNOWN)]
    colour, opacity = ("currentColor", 0.2) if look == "shared" else (look, 1)
    hatch = [hatched(boxes)] if look == "shared" else []
    if block_size > MOST_SLOTS:
        used = [(x, y, w * stored / block_size, h) for (x, y, w, h), stored in blocks]
        return [filled(used, colour, opacity), outlined(boxes, colour), *hatch]
    runs = [run for box, stored in blocks for run in _slots(box, block_size, 0, stored)]
    empty = [
        slot
        for box, stored in blocks
        for i in range(stored, block_size)
        for slot in _slots(box, block_size, i, i + 1)
    ]
    cell = _slot_size(block_size)[0] - 1
    return [cells_in_rows(runs, cell, colour, opacity), outlined(empty, colour), *hatch]


def _slot_size(block_size: int) -> tuple[float, float, int]:
    """Return pitch across, pitch down, and slots in a line, for the slots of one block."""
    in_line = min(block_size, 8)
    return (BLOCK_WIDTH + 1) / in_line, (BLOCK_HEIGHT + 1) / -(-block_size // in_line), in_line


def _slots(box: Box, block_size: int, first: int, end: int) -> list[Box]:
    """Return slots first..end-1 of the block in `box`, as one run for each line they touch."""
    across, down, in_line = _slot_size(block_size)
    runs = []
    for line in range(first // in_line, -(-end // in_line)):
        start = max(first - line * in_line, 0)
        stop = min(end - line * in_line, in_line)
        width = (stop - start) * across - 1
        runs.append((box[0] + start * across, box[1] + line * down, width, down - 1))
    return runs


def _blocks(tables, seq_id: Hashable) -> list[int]:
    return list(tables.block_table(seq_id)) if seq_id in tables.seq_ids() else []


def _stored_in(tables, seq_id: Hashable, index: int) -> int:
    """Return how many slots of a sequence's logical block `index` hold a token."""
    before = index * tables.block_size
    return max(0, min(tables.block_size, tables.num_tokens(seq_id) - before))


def _holders(tables, seq_ids) -> dict[int, dict[Hashable, int]]:
    """Return for each block who holds it, and how many of its slots each has filled."""
    holders: dict[int, dict[Hashable, int]] = {}
    for seq_id in seq_ids:
        for i, block in enumerate(_blocks(tables, seq_id)):
            holders.setdefault(block, {})[seq_id] = _stored_in(tables, seq_id, i)
    return holders


def _elsewhere(tables, seq_ids) -> list[str]:
    """Return the key's extra entry when some block is held by none of the sequences drawn."""
    holders, allocator = _holders(tables, seq_ids), tables.allocator
    held = [block for block in range(allocator.num_blocks) if allocator.ref_count(block)]
    return ["held elsewhere"] if any(block not in holders for block in held) else []


def _describe(tables, seq_ids) -> str:
    rows = [
        f"{seq_id} has {counted(tables.num_tokens(seq_id), 'token')} in {_blocks(tables, seq_id)}"
        for seq_id in seq_ids
        if seq_id in tables.seq_ids()
    ]
    counts = [tables.allocator.ref_count(block) for block in range(tables.allocator.num_blocks)]
    shared = [f"block {block} is held {n} times" for block, n in enumerate(counts) if n > 1]
    return "; ".join([*rows, *shared, f"{counts.count(0)} of {counted(len(counts), 'block')} free"])
