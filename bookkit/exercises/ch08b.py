"""Checks of chapter 8b: what a preemption costs."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from math import inf, isclose
from numbers import Real

import numpy as np

from bookkit.check import Verdict, check, compare, expect
from labcore.admission import expect_like_others, fewest_generated, future_peak, paged
from labcore.simulator import simulate
from labcore.workloads import draw

PREFILL = 150e12 / 14e9  # tokens a second, on the chapter's assumed card


@cache
def _residents() -> float:
    return simulate(future_peak(expect_like_others(0.9)), draw("chat", 700)).mean_resident


@cache
def _preemptions() -> int:
    return simulate(paged, draw("long_answer", 500), victim=fewest_generated).preemptions


def check_residents(guess: float | None) -> Verdict:
    """Exercise 1: how many chats run if each answer is taken for a long one.  Given."""
    why = "long answers and short ones make up for each other; a sum of fears is too large."
    return compare(guess, _residents(), 6, why)


def check_victims(guess: Sequence | None) -> Verdict:
    """Exercise 2: whether two rules choose alike, and how often one of them chooses.  Given."""

    def test(pair):
        asked = f"True or False, and a number, are asked for, got {pair!r}."
        assert isinstance(pair, list | tuple) and len(pair) == 2, asked
        assert isinstance(pair[0], bool | np.bool_), asked
        assert pair[0], "look at the tie: who came in earlier gets its prompt's tokens earlier."
        verdict = compare(pair[1], _preemptions(), _preemptions() / 10, "")
        assert verdict.right, f"preemptions of the long answers: {verdict.text}"

    return check(guess, test, "victim by victim the same, with a budget and without.")


def check_link(even_link: Callable | None) -> Verdict:
    """Exercise 3: the link at which a copy out and in takes as long as computing again.  Given."""

    def test(even_link):
        rng = random.Random(0)
        for block_size in (1, 16, 256, rng.randint(17, 255)):
            for kv_heads, us in ((32, 0), (8, 0), (8, 10), (rng.choice((1, 2, 4, 16)), 5)):
                link = even_link(kv_heads, block_size, us / 1e6)
                case = f"{kv_heads} heads, blocks of {block_size}, {us} µs a copy"
                again = block_size / PREFILL
                if 128 * us / 1e6 >= again:
                    expect(link, inf, case)
                    continue
                fast = isinstance(link, Real) and link > 0
                assert fast, f"{case}: a link has a speed above 0, in bytes a second, got {link!r}."
                num_bytes = block_size * kv_heads * 2 * 128 * 32 * 2  # k and v, layers, fp16
                copied = 2 * (num_bytes / link + 64 * us / 1e6)
                assert isclose(copied, again, rel_tol=1e-6), (
                    f"{case}: at {link / 1e9:.3g} GB/s a block takes {copied * 1e3:.3g} ms "
                    f"out and in; to compute it again takes {again * 1e3:.3g} ms."
                )

    return check(even_link, test, "16 cases, four block sizes; both ways take the same time.")


def check_watermark(guess: float | None) -> Verdict:
    """Exercise 4: the watermark, in % of the pool, that a ratio of 0 comes to.  Given."""
    why = "the newcomer still counts in full: 32 blocks of 2,048 are free when it comes in."
    return compare(guess, 100 * 32 / 2_048, 0.1, why)
