"""Checks of chapter 10b: requests that people sent."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from bookkit.check import Verdict, check, compare, each_guess, expect
from bookkit.quantiles import draw_quantiles
from labcore.admission import paged
from labcore.simulator import simulate
from labcore.workloads import Workload, draw

LONG = 16_384  # a context that nobody passes
FIVE = [0, 50, 90, 99, 100]  # per cent
MARKS = (0, 0.5, 1, 2, 5, 10, 20, 30)  # per cent of the pool
GAINS = (0.0410, 0.0381, 0.1054, 0.0421)  # of the oracle, by draw; 2 s to compute: recorded


@cache
def shuffled(seed: int) -> float:
    """How many times the steps 20,000 code requests take with their outputs shuffled.  Given."""

    def steps(requests):
        fits = requests.prompts + requests.outputs <= 1_024
        columns = {"prompts": requests.prompts[fits], "outputs": requests.outputs[fits]}
        return simulate(paged, replace(requests, **columns), watermark=0.05).steps

    code = draw_quantiles("azure_code", 20_000, seed, max_context=None)
    order = np.random.default_rng(seed).permutation(len(code))
    return steps(replace(code, outputs=code.outputs[order])) / steps(code)


def check_shuffled(guess: Sequence[float] | None) -> Verdict:
    """Exercise 1: code with its outputs shuffled, times the steps; five draws.  Given."""
    found = [shuffled(seed) for seed in range(5)]
    answers = {"the lowest of five": (min(found), 0.08), "the highest of five": (max(found), 0.08)}
    return each_guess(guess, answers, "up in one draw, down in the next.")


def check_tight(pairs: Sequence[tuple[float, float]] | None) -> Verdict:
    """Exercise 2: the safe watermark in a small pool, and what an oracle gains on it.  Given."""

    def thrown_out(mark, requests):
        limits = {"max_context": LONG, "declared": 1_000}
        return simulate(paged, requests, 32_768, watermark=mark / 100, **limits).preemptions

    def test(pairs):
        pairs = list(pairs)
        expect(len(pairs), len(GAINS), "pairs, one a draw")
        for seed, pair in enumerate(pairs):
            asked = f"draw {seed}: a watermark and a gain are asked for, got {pair!r}."
            assert np.shape(pair) == (2,), asked
            mark, more = pair
            assert mark in MARKS, f"draw {seed}: {mark!r} is none of {MARKS}."
            requests = draw_quantiles("azure_conv", 400, seed, max_context=LONG)
            thrown = thrown_out(mark, requests)
            assert not thrown, f"draw {seed}: a watermark of {mark}% throws out {thrown}."
            below = MARKS[MARKS.index(mark) - 1]
            assert thrown_out(below, requests), f"draw {seed}: {below}% throws out nobody, too."
            verdict = compare(more, GAINS[seed], 0.005, "")
            assert verdict.right, f"draw {seed}, the oracle's gain: {verdict.text}"

    return check(pairs, test, "each watermark was run, and the next smaller one beside it.")


def check_five(make: Callable[[Workload], dict]) -> Verdict:
    """Exercise 3: a table of one band from five percentiles.  Given."""

    def test(make):
        for seed, n in enumerate((1_001, 101)):  # so many that each percentile is one request
            requests = draw(((700, 1.0), (150, 0.8)), n, seed, max_context=LONG)
            table = make(requests)
            expect(list(table["percent"]), FIVE, "percent")
            for kind in ("prompts", "outputs"):
                rows = np.array(table[kind], float)
                expect(rows.shape, (1, 5), f"{kind}, bands and quantiles")
                expected = np.sort(getattr(requests, kind))[[(n - 1) * p // 100 for p in FIVE]]
                pair = f"expected {expected.tolist()}, got {rows[0].tolist()}."
                close = abs(rows[0] - expected).max() <= 1
                assert close, f"{n:,} requests, {kind}: {pair}"
            draw_quantiles(table, 10)

    return check(make, test, "prompts and outputs of two workloads, each quantile to a token.")


def check_order(order: Callable[[Workload], Sequence[int]]) -> Verdict:
    """Exercise 4: an order of the same requests in which over 100 are thrown out.  Given."""

    def test(order):
        for seed in range(2):
            day = draw_quantiles("azure_conv", 3_000, seed, max_context=LONG)
            places = np.array(list(order(day)))
            once = np.array_equal(np.sort(places, axis=None), np.arange(len(day)))
            assert once, f"draw {seed}: each of 0 to {len(day) - 1:,} is asked for once."
            places = places.astype(int).ravel()
            night = replace(day, prompts=day.prompts[places], outputs=day.outputs[places])
            thrown = simulate(paged, night, 131_072, watermark=0.05, max_context=LONG)
            count = thrown.preemptions
            assert count > 100, f"draw {seed}: expected more than 100 thrown out, got {count}."

    return check(order, test, "two draws of 3,000, every request once, over 100 thrown out.")
