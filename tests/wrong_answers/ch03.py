"""Answers that the checks of chapter 3 must refuse."""

from bookkit.exercises.ch03 import check_accident, check_eager, check_invariant, check_samples
from labcore.blocks import BlockAllocator, BlockTables, DoubleFree


def lazy(tables, parent, child):
    tables.fork(parent, child)
    return []


def other_way(tables, parent, child):
    tables.add(child, tables.num_tokens(parent))
    return list(zip(tables.block_table(child), tables.block_table(parent), strict=True))


def last_only(tables, parent, child):
    tables.add(child, tables.num_tokens(parent))
    return list(zip(tables.block_table(parent), tables.block_table(child), strict=True))[-1:]


def one_short(tables, parent, child):
    tables.add(child, max(0, tables.num_tokens(parent) - 1))
    return list(zip(tables.block_table(parent), tables.block_table(child), strict=False))


def returns_nothing(tables, parent, child):
    tables.add(child, tables.num_tokens(parent))


def one_more(tables, parent, child):
    tables.fork(parent, child)
    return tables.reserve(child, 1)


def honest_sharing():
    tables = BlockTables(BlockAllocator(8), 4)
    tables.add("x", 6)
    tables.fork("x", "y")
    return tables


def p_stays():
    tables = BlockTables(BlockAllocator(8), 4)
    tables.add("p", 6)
    return tables


def nothing_shared():
    return BlockTables(BlockAllocator(8), 4)


def caught():
    raise DoubleFree("block 1 has 0 holders")


def reads(tables, texts, memory):
    return all([memory[i] for i in tables.slot_mapping(s)] == text for s, text in texts.items())


def lengths(tables, texts, memory):
    size = tables.block_size
    return all(len(tables.block_table(s)) == -(-len(text) // size) for s, text in texts.items())


def never_waits(tables, texts, memory):
    return all(tables.can_append(seq_id) for seq_id in texts)


WRONG = {
    check_samples: [
        [0, 6, 0, 10, 3, 7, 3, 11],
        [0, 6, 0, 10, 4, 6, 4, 10],
        [0] * 8,
        [0, 6, 0, 10],
    ],
    check_eager: [lazy, other_way, last_only, one_short, returns_nothing, one_more],
    check_accident: [honest_sharing, p_stays, nothing_shared, caught, lambda: 1],
    check_invariant: [
        reads,
        lengths,
        never_waits,
        lambda tables, *_: tables.check_invariants(),
        lambda *_: True,
    ],
}
