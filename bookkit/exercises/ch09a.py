"""Checks of chapter 9a: many answers to one prompt."""

import random
from collections.abc import Callable, Iterable

import torch

from bookkit.check import Verdict, check, expect
from labcore.beams import beam_search
from labcore.blocks import BlockAllocator, BlockTables, blocks_needed
from labcore.caches import PagedKV
from labcore.gpt2 import load_gpt2


def by_tables(prompt: int, answer: int, n: int, block_size: int) -> tuple[int, int, int]:
    """Blocks held with sharing and without, and copies, counted on real tables.  Given."""
    alone, copies = n * blocks_needed(prompt + answer, block_size), 0
    tables = BlockTables(BlockAllocator(alone), block_size)
    tables.add(0, prompt)
    for other in range(1, n):
        tables.fork(0, other)
    for _ in range(answer):
        copies += len(tables.append_all(dict.fromkeys(range(n), 1)))
    return alone - tables.allocator.num_free, alone, copies


def check_samples(count: Callable | None) -> Verdict:
    """Exercise 1: n answers to one prompt, in blocks and copies, by arithmetic.  Given."""

    def test(count):
        rng, cases = random.Random(0), [(512, 100, 16, 16), (500, 100, 16, 16)]
        for b in (1, 4, 16):
            for prompt in (max(b - 1, 1), b, b + 1, 3 * b + 2):
                for answer in (1, b, rng.randint(2, 40)):
                    cases.append((prompt, answer, rng.randint(1, 6), b))
        for prompt, answer, n, b in cases:
            case = f"prompt of {prompt}, {n} answers of {answer}, blocks of {b}"
            found = tuple(count(prompt, answer, n, b))
            expect(found, by_tables(prompt, answer, n, b), case)

    return check(count, test, "38 cases like block tables that were filled token by token.")


def check_lengths(lengths: Callable | None) -> Verdict:
    """Exercise 2: how long the answers of a search are, best first.  Given."""

    def test(lengths):
        found = {penalty: list(lengths(penalty)) for penalty in (0, 1, 2)}
        model, tokenizer = load_gpt2(dtype=torch.float64)
        prompt = tokenizer.encode("They were").ids
        for penalty in found:
            kv = PagedKV(model.config, 60, 4, torch.float64)
            expected = [len(answer) for answer, _ in beam_search(model, kv, prompt, 4, 16, penalty)]
            expect(found[penalty], expected, f"length_penalty {penalty}")

    return check(lengths, test, "three searches, each like the package's.")


def check_right_sizes(guess: Iterable[int] | None) -> Verdict:
    """Exercise 3: the block sizes at which nobody needs a copy.  Given."""

    def test(sizes):
        assert isinstance(sizes, Iterable), f"a list of block sizes is asked for, got {sizes!r}."
        sizes = set(sizes)
        assert sizes <= {1, 4, 16}, f"block sizes of 1, 4 and 16 are run, got {sorted(sizes)}."
        judged = 3 - len(sizes ^ {1})
        assert judged == 3, f"{judged} of the three block sizes are judged rightly."

    return check(
        guess, test, "a block of one token is never part full: nobody writes into a shared one."
    )
