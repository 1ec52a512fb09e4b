"""Checks of chapter 5: attention and copies through a block table."""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from bookkit.check import Verdict, check, expect
from bookkit.zoo import hunt
from labcore.attention import causal_attention, token_slots
from labcore.blocks import blocks_needed

SIZES = (1, 3, 16)


class FreshMemory(TorchFunctionMode):
    """Counts the bytes of floats in memory of their own, and the longest index used.  Given."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.num_bytes, self.longest_index = 0, 0
        self.kept = list(known)  # and alive: an address has one owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run an operation; look at what it takes and what it returns."""
        for taken in args:
            if isinstance(taken, torch.Tensor) and taken.dtype in (torch.int32, torch.int64):
                self.longest_index = max(self.longest_index, taken.numel())
        out = func(*args, **(kwargs or {}))
        is_tensor = isinstance(out, torch.Tensor) and out.layout is torch.strided
        if is_tensor and out.is_floating_point():
            place = out.untyped_storage().data_ptr()
            if all(place != known.untyped_storage().data_ptr() for known in self.kept):
                self.num_bytes += out.nbytes
                self.kept.append(out)
        return out


class Layout:
    """Sequences of given lengths in blocks, and NaN, or a number, in every slot not theirs.

    Tables are at random (0), or take one block after the other (1), or every second one (2);
    block 0 is nobody's, and short tables are filled up with it.  Given.
    """

    def __init__(self, lens: list[int], block_size: int, stride: int = 0) -> None:
        torch.manual_seed(sum(lens) + block_size)
        counts = [blocks_needed(n, block_size) for n in lens]
        num_blocks = max(stride, 1) * sum(counts) + 3
        order = range(1, num_blocks, stride) if stride else 1 + torch.randperm(num_blocks - 1)
        ids = iter(map(int, order))
        tables = [[next(ids) for _ in range(n)] for n in counts]
        if not stride and counts[0] > 1:
            tables[0].sort(reverse=True)  # never in order by chance
        rows = [table + [0] * (max(counts) - len(table)) for table in tables]
        self.tables, self.seq_lens = torch.tensor(rows), torch.tensor(lens)
        slots, valid = token_slots(self.tables, self.seq_lens, block_size)
        self.own = [row[real] for row, real in zip(slots, valid, strict=True)]
        shape = 2, num_blocks, block_size, 2, 4
        self.pools = torch.full(shape, torch.nan, dtype=torch.float64)
        self.pools.flatten(1, 2)[:, torch.cat(self.own)] = torch.randn(2, sum(lens), 2, 4).double()
        self.queries = torch.randn(len(lens), 2, 4, dtype=torch.float64)

    def fill(self, rubbish: float) -> None:
        """Put other rubbish where no token is."""
        nobody = torch.ones(self.pools.flatten(1, 2).shape[1], dtype=torch.bool)
        nobody[torch.cat(self.own)] = False
        self.pools.flatten(1, 2)[:, nobody] = rubbish

    def errors(self, attention: Callable) -> list[float]:
        """How far each sequence's result is from dense attention over its tokens, inf if NaN."""
        found = attention(self.tables, self.seq_lens, self.pools[0])(self.queries, *self.pools)
        rows = []
        for query, own in zip(self.queries, self.own, strict=True):
            keys, values = self.pools.flatten(1, 2)[:, None, own]
            rows.append(causal_attention(query[None, None], keys, values)[0, 0])
        expect(found.shape, self.queries.shape, f"{len(rows)} queries: the shape of the result")
        return torch.nan_to_num((found - torch.stack(rows)).abs().amax((1, 2)), torch.inf).tolist()


def check_rows_copied(rows: Callable | None) -> Verdict:
    """Exercise 1: the rows of keys that `gather` copies in a layer.  Given."""

    def test(rows):
        torch.manual_seed(5)
        batches = [[1], [16], [17], [6, 20, 41, 78], [16, 16, 16], [1, 64], [1, 65, 3]]
        batches += [torch.randint(1, 200, (n,)).tolist() for n in (2, 5, 9)]
        for lens in batches:
            for size in (*SIZES, 64):
                table = torch.zeros(len(lens), blocks_needed(max(lens), size), dtype=torch.long)
                answer = token_slots(table, torch.tensor(lens), size)[0].numel()
                expect(rows(list(lens), size), answer, f"lengths {lens}, blocks of {size}")

    return check(rows, test, "ten batches of 1 to 9 sequences, blocks of 1, 3, 16 and 64.")


def check_views(attention: Callable | None) -> Verdict:
    """Exercise 2: attention that slices the pool where a sequence's blocks are in order.  Given."""

    def test(attention):
        for size in SIZES:
            lengths = {1, max(1, size - 1), size, size + 1, 3 * size + 2}
            batches = [([n], stride) for n in sorted(lengths) for stride in (1, 0, 2)]
            for lens, stride in [*batches, ([size + 1, 1], 1), ([2 * size, size, 3], 0)]:
                layout = Layout(lens, size, stride)
                case = f"lengths {lens}, blocks of {size}, tables {layout.tables.tolist()}"
                error = max(layout.errors(attention))
                assert error < torch.inf, f"{case}: NaN, from a slot that is not the sequence's."
                assert error < 1e-9, f"{case}: off by {error:.2g}."
        for stride, order in (0, "out of order"), (1, "in order"):
            layout, case = Layout([50], 16, stride), f"50 tokens, blocks {order}"
            attend = attention(layout.tables, layout.seq_lens, layout.pools[0])
            with FreshMemory(layout.pools) as fresh:
                attend(layout.queries, *layout.pools)
            copied = fresh.num_bytes >= layout.pools[0].nbytes / 2
            assert not copied, f"{case}: right, but the keys are copied."
        assert fresh.longest_index < 50, f"{case}: right, but by an index."

    return check(attention, test, "blocks in order and not, a full last block and one short of it.")


def check_copy(copy: Callable | None) -> Verdict:
    """Exercise 3: a copy of blocks through an index, into memory that is there.  Given."""

    def test(copy):
        for num_blocks in (1, 2, 17):
            torch.manual_seed(num_blocks)
            pool, order = torch.randn(num_blocks, 4, 6), torch.randperm(num_blocks)
            kept, before = torch.full_like(pool, torch.nan), pool.clone()
            with FreshMemory(pool, order, kept) as fresh:
                copy(pool, order, kept)
            case = f"blocks in the order {order.tolist()}"
            assert pool.equal(before), f"{case}: the pool itself has changed."
            expect([i for i in range(num_blocks) if not kept[i].equal(pool[order[i]])], [],
                   f"{case}: places in `kept` with another block")  # fmt: skip
            large = num_blocks > 2 and fresh.num_bytes >= pool.nbytes
            assert not large, f"{case}: right, by way of {fresh.num_bytes:,} bytes of fresh memory."

    return check(copy, test, "1, 2 and 17 blocks at random: each in its place, nothing fresh.")


def check_careless(attention: Callable | None) -> Verdict:
    """Exercise 4: attention that masks what lies past a sequence's end, and reads it.  Given."""

    def test(attention):
        for lens, size in (([6, 3], 4), ([1, 16, 17, 50], 16), ([7, 2, 3], 1)):
            layout = Layout(lens, size)
            for rubbish in (0.0, 1e4, torch.nan):
                layout.fill(rubbish)
                off = [error > 1e-9 for error in layout.errors(attention)]
                wrong = [n for n, is_off in zip(lens, off, strict=True) if is_off]
                betrayed = []
                if rubbish != rubbish:  # the longest may read its last block to the end, or not
                    wrong, betrayed = ([n for n in ns if n < max(lens)] for ns in (wrong, lens))
                expect(wrong, betrayed, f"lengths {lens}, {rubbish} past the ends: which are off")

    return check(attention, test, "0 and 10,000 do not show; NaN betrays each shorter sequence.")


def check_zoo(invariant: Callable | None) -> Verdict:
    """Exercise 5: an invariant of the cache, against the mutants of the zoo.  Given."""
    return hunt(invariant, "ch05")
