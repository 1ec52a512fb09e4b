"""Checks of chapter 3: block tables."""

from collections import Counter
from collections.abc import Callable

from bookkit.check import Verdict, check, expect
from bookkit.zoo import hunt
from labcore.blocks import BlockAllocator, BlockTables, OutOfBlocks


def check_samples(guess: list[int] | None) -> Verdict:
    """Exercise 1: copies and blocks of four samples, for two prompts and two lengths.  Given."""

    def test(numbers):
        answer = []
        for prompt in (8, 11):
            for stored in (1, 5):
                private = -(-(prompt % 4 + stored) // 4)
                answer += [3 if prompt % 4 else 0, prompt // 4 + 4 * private]
        expect(len(numbers), 8, "the length of the list")
        for i, (mine, right) in enumerate(zip(numbers, answer, strict=True)):
            what = f"prompt {8 if i < 4 else 11}, {5 if i % 4 > 1 else 1} each"
            kind = "blocks" if i % 2 else "copies"
            assert mine == right, (
                f"{what}: {mine} {kind} are too {'few' if mine < right else 'many'}."
            )

    return check(guess, test, "all eight: the blocks agree, and only the copies differ.")


def check_eager(fork: Callable | None) -> Verdict:
    """Exercise 2: a fork that gives the child blocks of its own and returns the copies.  Given."""

    def one(fork, length, size):
        case, tables = f"{length} tokens in blocks of {size}", BlockTables(BlockAllocator(40), size)
        tables.allocator.free_many(tables.allocator.allocate_many(40))
        tables.add("p", length)
        before = tables.block_table("p")
        copies = fork(tables, "p", "c")
        table = tables.block_table("c")
        assert copies is not None, f"{case}: the copies were not returned."
        expect(tables.num_tokens("c"), length, f"{case}, tokens of the child")
        expect(len(table), len(before), f"{case}, blocks of the child")
        expect(tables.block_table("p"), before, f"{case}, the parent's table")
        assert not set(before) & set(table), f"{case}: {before} and {table} have a block in common."
        expect(sorted(copies), sorted(zip(before, table, strict=True)), f"{case}, the copies")
        tables.check_invariants()
        expect(tables.append("c") + tables.append("p"), [], f"{case}, copies at the next write")

    def test(fork):
        for size in (1, 4, 16):
            for length in (0, size - 1, size, size + 1, 3 * size + 2):
                one(fork, length, size)
        tables = BlockTables(BlockAllocator(3), 4)
        tables.add("p", 5)
        try:
            fork(tables, "p", "c")
        except OutOfBlocks:
            expect((tables.seq_ids(), tables.allocator.num_free), (["p"], 1), "after a refusal")
        else:
            raise AssertionError("1 block free and 2 needed: expected OutOfBlocks.")

    return check(fork, test, "15 lengths about the boundaries, and a refusal that changes nothing.")


def check_accident(accident: Callable | None) -> Verdict:
    """Exercise 3: tables in which two sequences hold a block and its count is one.  Given."""

    def test(accident):
        tables = accident()
        kind = type(tables).__name__  # the page's BlockTables is not labcore's
        assert hasattr(tables, "seq_ids"), f"tables are asked for, got {kind}."
        living = {seq_id: tables.block_table(seq_id) for seq_id in tables.seq_ids()}
        assert not {"p", "c"} & set(living), f"p and c have to leave, and here are {living}."
        holders = Counter(block for table in living.values() for block in table)
        shared = [block for block in holders if holders[block] > 1]
        assert shared, f"no two hold the same block: {living}."
        counts = {block: tables.allocator.ref_count(block) for block in shared}
        known = all(counts[block] >= holders[block] for block in shared)
        assert not known, f"in {living} the allocator knows who shares: counts {counts}."

    return check(accident, test, "nothing was raised, and two strangers write into one block.")


def check_invariant(invariant: Callable | None) -> Verdict:
    """Exercise 4: an invariant of (tables, texts, memory) that catches six mutants.  Given."""
    return hunt(invariant, "ch03")
