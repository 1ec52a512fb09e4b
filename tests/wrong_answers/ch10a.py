"""Answers that the checks of chapter 10a must refuse."""

import numpy as np

from bookkit.exercises.ch10a import check_orca_max, check_two_counts, check_two_shapes
from bookkit.trials import CONTEXT, MEANS, lengths, requests_like
from labcore.workloads import Workload

PROMPT, OUTPUT = MEANS["ShareGPT"]


def one_shape(first, second):
    return requests_like("ShareGPT", first)


def swapped(first, second):
    return drawn(second, first, np.random.default_rng(0), np.random.default_rng(1))


def hand_in_hand(first, second):
    return drawn(first, second, np.random.default_rng(0), np.random.default_rng(0))


def uncut(first, second):
    rng = np.random.default_rng(0)
    columns = [
        lengths(mean, shape, CONTEXT - 1, rng, 3_000)
        for mean, shape in ((PROMPT, first), (OUTPUT, second))
    ]
    return Workload("uncut", *columns)


def no_mean(first, second):
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(PROMPT), first, 3_000), 1, 1_024).astype(int)
    outputs = np.clip(rng.lognormal(np.log(OUTPUT), second, 3_000), 1, 1_024).astype(int)
    return Workload("medians", prompts, outputs)


def drawn(first, second, one, other):
    prompts = lengths(PROMPT, first, CONTEXT - 1, one, 3_000)
    outputs = lengths(OUTPUT, second, CONTEXT - prompts, other, 3_000)
    return Workload("drawn", prompts, outputs)


def hits(cells, strict=False):
    return [
        [abs(v - published) < within + (not strict) * 1e-9 for v in ours.values()]
        for ours, published, within in cells
    ]


def own_twice(cells):
    return (sum(map(any, hits(cells))),) * 2


def one_twice(cells):
    return (max(map(sum, zip(*hits(cells), strict=True))),) * 2


def strictly(cells):
    found = hits(cells, strict=True)
    return sum(map(any, found)), max(map(sum, zip(*found, strict=True)))


def first_shape(cells):
    found = hits(cells)
    return sum(map(any, found)), sum(row[0] for row in found)


WRONG = {
    check_orca_max: [[15, 5, 4.6], [15, 3, 4.6], [14, 3, 42.8], [15, 4, 42.8], [15, 3], 15],
    check_two_shapes: [one_shape, swapped, hand_in_hand, uncut, no_mean, lambda a, b: (a, b)],
    check_two_counts: [
        own_twice,
        one_twice,
        strictly,
        first_shape,
        lambda cells: (21, 16),
        lambda cells: 21,
    ],
}
