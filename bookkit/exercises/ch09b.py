"""Checks of chapter 9b: blocks that are found again."""

import random
from collections.abc import Callable

import torch

from bookkit.check import Verdict, check, expect
from labcore.blocks import BlockTables
from labcore.caches import PagedKV
from labcore.gpt2 import GPT2Config
from labcore.prefix import PrefixCache


def check_missed(missed: Callable | None) -> Verdict:
    """Exercise 1: how many shared tokens are computed again.  Given."""

    def test(missed):
        rng = random.Random(0)
        for b in (1, 4, 16, 784):
            for n in (max(b - 1, 1), b, b + 1, 3 * b + 2, rng.randint(1, 5 * b)):
                tables = BlockTables(pool := PrefixCache(12), b)
                tables.add("first", n)
                pool.publish(tables, "first", range(n))
                again = n - pool.adopt(tables, "second", range(n + 1))
                case = f"{n:,} shared token{'s' * (n != 1)} in blocks of {b}"
                expect(missed(n, b), again, case)

    return check(missed, test, "20 cases, each against a cache, on both sides of a block's end.")


def check_beginning_first(kind: type | None) -> Verdict:
    """Exercise 2: a cache that gives up the beginning of a chain before its end.  Given."""

    def test(kind):
        rng = random.Random(0)
        for n in (1, 2, 3, 7):
            for taken in range(n + 1):
                tables, order = BlockTables(pool := kind(n), 2), []
                pool.free_many(rng.sample(pool.allocate_many(n), n))  # no chain's ids are sorted
                expect(pool.num_free, n, f"{n} held without a chain, and given back: free")
                for name, size in (("first", n - n // 2), ("second", n // 2)):
                    tables.add(name, 2 * size)
                    pool.publish(tables, name, [(name, i) for i in range(2 * size)])
                    order += tables.block_table(name)
                for name in ("first", "second"):
                    tables.drop(name)
                case = f"chains of {n - n // 2} and {n // 2} blocks end one after the other"
                expect(pool.counts(), {"in use": 0, "reusable": n, "free": 0}, case)
                gone = sorted(map(order.index, pool.allocate_many(taken)))
                case += f", a stranger takes {taken}; evicted, of all blocks in their order"
                expect(gone, list(range(taken)), case)
                pool.check_invariants()

    return check(kind, test, "17 evictions: oldest chain first, and in it the beginning.")


def check_lie(lie: Callable | None) -> Verdict:
    """Exercise 3: a cache that believes what nobody has computed.  Given."""

    def test(lie):
        config = GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=9, n_positions=64)
        for n in (1, 3, 4, 5, 14):
            kv = PagedKV(config, 8, 4, allocator=PrefixCache)
            kv.keys[:] = kv.values[:] = torch.nan
            prompt, tables = list(range(n)), kv.tables
            lie(kv, "first", prompt)
            assert kv.keys.isnan().all() and kv.values.isnan().all(), (
                f"prompt of {n}: something was computed, or written."
            )
            stored = tables.num_tokens("first") if "first" in tables.seq_ids() else 0
            expect(stored, n, f"prompt of {n}, tokens that the sequence has stored")
            found = tables.allocator.adopt(tables, "second", [*prompt, 99])
            expect(found, n // 4 * 4, f"prompt of {n} in blocks of 4, tokens that a second finds")
            tables.allocator.check_invariants()

    return check(lie, test, "five prompts are found, and every key in their blocks is a NaN.")
