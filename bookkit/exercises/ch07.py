"""Checks of chapter 7: what a block size wastes, a policy, and two ratios."""

import random
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import SimpleNamespace

import numpy as np

from bookkit.check import Verdict, check, expect
from labcore.admission import Limits, paged
from labcore.simulator import simulate
from labcore.workloads import Workload, draw

KINDS = ("by the formula", "of stored", "of set aside", "among the powers of two")


def check_waste(waste: Callable | None) -> Verdict:
    """Exercise 1: unused slots as a share of what is stored, and of what is set aside.  Given."""

    def test(answer):
        for case, requests, block_size in _few_requests():
            stored = unused = 0
            for prompt, output, _ in requests:
                for tokens in range(prompt + 1, prompt + output + 1):
                    stored += tokens
                    unused += next(u for u in range(block_size) if (tokens + u) % block_size == 0)
            found = answer(requests, block_size)
            assert np.shape(found) == (2,), f"two ratios are asked for, got {found!r}."
            case = f"{case}, blocks of {block_size}"
            _near(found[0], unused / stored, f"{case}, of stored")
            _near(found[1], unused / (unused + stored), f"{case}, of set aside")

    return check(waste, test, "30 small workloads, some of whose sequences end at a block's edge.")


def check_sizes(sizes: Sequence[int] | None) -> Verdict:
    """Exercise 1: the first block size that wastes over a fifth, as `KINDS` count it.  Given."""
    short = draw(((49, 0.6), (34.5, 0.6)))

    def waste(kind, block_size):
        if kind == "by the formula":
            return (block_size - 1) / 2 / 100
        run = simulate(paged, short, block_size=block_size)
        return run.waste if kind == "of set aside" else run.waste_of_used

    def test(sizes):
        assert np.shape(sizes) == (4,), f"four block sizes are asked for, got {sizes!r}."
        for kind, size in zip(KINDS, sizes, strict=True):
            whole = isinstance(size, Integral) and not isinstance(size, bool)
            assert whole and 1 <= size <= 1_024, f"{kind}: {size} is no block size."
            smaller = size // 2 if kind == KINDS[-1] else size - 1
            assert waste(kind, size) > 0.2, f"{kind}: {size} is too low."
            assert not smaller or waste(kind, smaller) <= 0.2, f"{kind}: {size} is too high."
        assert int(sizes[-1]).bit_count() == 1, f"{sizes[-1]} is no power of two."

    return check(sizes, test, "each wastes more than a fifth, and the size before it does not.")


def check_room(room: Callable | None) -> Verdict:
    """Exercise 2: a policy that sets aside the prompt and 128 tokens, in the context.  Given."""

    def test(policy):
        draw = random.Random(0)
        for most in (200, 1_024):
            around = [most - 129, most - 128, most - 127, most - 1]
            for prompt in (1, *around, draw.randrange(1, most)):
                stored, declared = draw.randint(prompt, most), draw.randint(1, most)
                limits = Limits(2_048, 16, declared, most)
                case = f"a prompt of {prompt}, {stored} stored, {declared} declared, at most {most}"
                expect(policy(prompt, stored, limits), min(prompt + 128, most), case)

    return check(room, test, "12 prompts, up to the end of the context and around 128 before it.")


def check_mean_of_ratios(mean: Callable | None) -> Verdict:
    """Exercise 3: the mean over all steps of stored / set aside, from a run's history.  Given."""

    def test(answer):
        draw = random.Random(0)
        for steps in (1, 2, 3, 5, 8):
            num_blocks, block_size = draw.randint(2, 9), draw.choice([1, 4, 16])
            free = [draw.randrange(num_blocks) for _ in range(steps)]
            stored = [draw.randint(1, (num_blocks - f) * block_size) for f in free]
            history = SimpleNamespace(stored=stored, free=free)
            total = 0.0
            for tokens, unused in zip(stored, free, strict=True):
                total += tokens / (num_blocks * block_size - unused * block_size)
            case = f"stored {stored}, free {free} of {num_blocks} blocks of {block_size}"
            _near(answer(history, num_blocks, block_size), total / steps, case)

    return check(mean, test, "five histories of up to eight steps.")


def check_oracle(utilization: Callable | None) -> Verdict:
    """Exercise 4: stored / set aside where each sequence gets its final length at once.  Given."""

    def test(answer):
        for case, requests, _ in _few_requests():
            stored = set_aside = 0
            for prompt, output, _ in requests:
                for step in range(1, output + 1):
                    stored += prompt + step
                    set_aside += prompt + output
            _near(answer(requests), stored / set_aside, case)

    return check(utilization, test, "30 small workloads, step by step.")


def _few_requests():
    """Yield (in words, workload, block size): lengths to b - 1, b and b + 1, and random ones."""
    draw = random.Random(0)
    for i in range(30):
        block_size = (1, 4, 16)[i % 3]
        prompts = [draw.randint(1, 20) for _ in range(i % 4 + 1)]
        outputs = [draw.randint(1, 30) for _ in prompts]
        if i < 9:  # alone, from one token to the next block's edge
            prompts, outputs = [block_size], [block_size + i // 3 - 1 or 1]
        case = f"prompts {prompts}, outputs {outputs}"
        yield case, Workload("few", np.array(prompts), np.array(outputs)), block_size


def _near(found, expected: float, case: str) -> None:
    """`expect` for fractions: equal but for rounding."""
    number = isinstance(found, Real) and not isinstance(found, bool)
    assert number, f"{case}: a ratio is asked for, got {found!r}."
    assert abs(found - expected) < 1e-6, f"{case}: expected {expected:.6f}, got {found:.6f}."
