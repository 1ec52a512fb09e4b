"""Answers that the checks of chapter 7 must refuse."""

import numpy as np

from bookkit.exercises.ch07 import (
    check_mean_of_ratios,
    check_oracle,
    check_room,
    check_sizes,
    check_waste,
)


def sums(requests, block_size, first=1, last=1):
    """Tokens stored and slots set aside, from prompt + `first` to prompt + output + `last` - 1."""
    stored = set_aside = 0
    for prompt, output, _ in requests:
        for tokens in range(prompt + first, prompt + output + last):
            stored += tokens
            set_aside += -(-tokens // block_size) * block_size
    return stored, set_aside


def ratios(stored, set_aside):
    return (set_aside - stored) / stored, (set_aside - stored) / set_aside


def swapped(requests, block_size):
    return ratios(*sums(requests, block_size))[::-1]


def one_early(requests, block_size):
    """Counts before a token is stored."""
    return ratios(*sums(requests, block_size, first=0, last=0))


def at_the_end(requests, block_size):
    """Looks at final lengths only."""
    lengths = requests.prompts + requests.outputs
    return ratios(lengths.sum(), (-(-lengths // block_size) * block_size).sum())


def one_block_more(requests, block_size):
    """Takes the next block when one is full, and not when it is needed."""
    stored = set_aside = 0
    for prompt, output, _ in requests:
        for tokens in range(prompt + 1, prompt + output + 1):
            stored += tokens
            set_aside += (tokens // block_size + 1) * block_size
    return ratios(stored, set_aside)


def taken(history, num_blocks, block_size):
    return [(num_blocks - free) * block_size for free in history.free]


def ratio_of_sums(history, num_blocks, block_size):
    return sum(history.stored) / sum(taken(history, num_blocks, block_size))


def of_the_pool(history, num_blocks, block_size):
    return sum(history.stored) / len(history.stored) / (num_blocks * block_size)


def one_block_too_many(history, num_blocks, block_size):
    room = taken(history, num_blocks + 1, block_size)
    return np.mean([s / t for s, t in zip(history.stored, room, strict=True)])


def without_the_last_step(history, num_blocks, block_size):
    room = taken(history, num_blocks, block_size)
    return np.mean([s / t for s, t in zip(history.stored[:-1] or [1], room, strict=False)])


def each_request_once(requests):
    lengths = requests.prompts + requests.outputs
    return np.mean((requests.prompts + (requests.outputs + 1) / 2) / lengths)


def half_way(requests):
    """Half a token too low: the first step has stored one already."""
    steps = (requests.prompts + requests.outputs / 2) * requests.outputs
    return steps.sum() / ((requests.prompts + requests.outputs) * requests.outputs).sum()


def not_by_steps(requests):
    return (requests.prompts + (requests.outputs + 1) / 2).sum() / (
        requests.prompts + requests.outputs
    ).sum()


WRONG = {
    check_waste: [
        swapped,
        one_early,
        at_the_end,
        one_block_more,
        lambda requests, block_size: (0.0, 0.0),
        lambda requests, block_size: (float("nan"), float("nan")),
        lambda requests, block_size: 0.2,
        lambda requests, block_size: None,
    ],
    check_sizes: [
        (42, 37, 46),
        (41, 37, 46, 64),
        (43, 37, 46, 64),
        (42, 36, 46, 64),
        (42, 38, 46, 64),
        (42, 37, 45, 64),
        (42, 37, 47, 64),
        (42, 37, 46, 32),
        (42, 37, 46, 128),
        (42, 37, 46, 46),
        (1, 1, 1, 1),
        (42.0, 37, 46, 64),
    ],
    check_room: [
        lambda prompt, stored, limits: prompt + 128,
        lambda prompt, stored, limits: min(stored + 128, limits.max_context),
        lambda prompt, stored, limits: min(prompt + limits.declared, limits.max_context),
        lambda prompt, stored, limits: min(prompt + 129, limits.max_context),
        lambda prompt, stored, limits: min(prompt + 128, limits.max_context - 1),
        lambda prompt, stored, limits: limits.max_context,
    ],
    check_mean_of_ratios: [
        ratio_of_sums,
        of_the_pool,
        one_block_too_many,
        without_the_last_step,
        lambda history, num_blocks, block_size: 0.979,
    ],
    check_oracle: [
        each_request_once,
        half_way,
        not_by_steps,
        lambda requests: sums(requests, 1)[0] / (1_024 * requests.outputs.sum()),
        lambda requests: 1.0,
    ],
}
