"""Checks of chapter 8a: who comes in, and who goes."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from bookkit.check import Verdict, check, each_guess, told_with
from labcore.admission import Limits, newest, paged
from labcore.jobs import Counts, History, Jobs
from labcore.simulator import simulate

BLOCKS = 16  # in the pools of the checks


def run_loop(
    kind: Callable, requests: Iterable, watermark: float, num_blocks=2_048, block_size=16
) -> Counts:
    """Run a kind of StepLoop on requests, paged; what it counts, and its history.  Given."""
    pairs = [(prompt, output) for prompt, output, *_ in requests]
    limits = Limits(num_blocks, block_size, watermark=watermark)
    prompts, lengths = [prompt for prompt, _ in pairs], [sum(pair) for pair in pairs]
    jobs = Jobs(paged, limits, prompts, lengths, list(range(len(pairs))), None)
    loop = kind(jobs, Counts(history=History()), newest)
    loop.run()
    return loop.counts


def check_puzzle(guess: Sequence[float] | None) -> Verdict:
    """Exercise 1: three requests in eight blocks, counted on paper.  Given."""
    answers = {
        "the first step in which somebody goes": (4, 0),
        "preemptions": (5, 0),
        "the empty ones": (4, 0),
        "steps": (20, 0),
        "preemptions with a watermark of one block": (1, 0),
    }
    return each_guess(guess, answers, "all five numbers.")


def check_growth(kind: Callable | None) -> Verdict:
    """Exercise 2: a step loop whose growth leaves the headroom alone.  Given."""

    def test(kind):
        for case, pairs, block_size, headroom in _queues():
            smaller = (BLOCKS - headroom) * block_size
            right = simulate(paged, pairs, smaller, block_size, declared=1, history=True)
            _same_victims(kind, pairs, block_size, headroom, right.history.victims, case)

    return check(kind, test, "27 random queues in blocks of 1, 3 and 16, victim by victim.")


def check_prompt_fits(kind: Callable | None) -> Verdict:
    """Exercise 3: a step loop that lets a sequence in when its prompt fits.  Given."""

    def test(kind):
        for case, pairs, block_size, headroom in _queues():
            victims = _victims_if_the_prompt_fits(pairs, block_size, headroom)
            _same_victims(kind, pairs, block_size, headroom, victims, case)

    return check(kind, test, "27 random queues in blocks of 1, 3 and 16, victim by victim.")


def _queues():
    """Yield (in words, pairs, block size, headroom in blocks); nobody needs over seven blocks."""
    draw = random.Random(0)
    for i in range(27):
        block_size, headroom = (1, 3, 16)[i % 3], 1 + i // 3 % 3
        most = 3 * block_size
        pairs = [(draw.randint(1, most), draw.randint(1, most)) for _ in range(5 + i // 3)]
        case = f"requests {pairs} in {BLOCKS} blocks of {block_size}, headroom {headroom}"
        yield case, pairs, block_size, headroom


def _same_victims(kind, pairs, block_size, headroom, expected, case):
    """Assert that a step loop throws out whom it should, in every step."""
    with told_with(case):
        counts = run_loop(kind, pairs, headroom / BLOCKS, BLOCKS, block_size)
    for pair in zip_longest(expected, counts.history.victims):
        says = [f"request {v[1]} goes in step {v[0]}" if v else "nobody goes" for v in pair]
        assert pair[0] == pair[1], f"{case}: expected that {says[0]}, but {says[1]}."
    done = counts.finished
    assert done == len(pairs), f"{case}: {done} of {len(pairs)} requests came to their end."


def _victims_if_the_prompt_fits(pairs, block_size, headroom):
    """(step, request) of each preemption, by a loop over plain lists."""
    stored, held, running, victims = [prompt for prompt, _ in pairs], {}, [], []
    waiting, step = list(range(len(pairs))), 0
    while waiting or running:
        while waiting:
            needed = -(-pairs[waiting[0]][0] // block_size)
            if BLOCKS - sum(held.values()) - needed < (headroom if running else 0):
                break
            running.append(waiting.pop(0))
            held[running[-1]] = needed
        for i in running.copy():
            needed = -(-(stored[i] + 1) // block_size)
            while i in running and BLOCKS - sum(held.values()) + held[i] < needed:
                victims.append((step, running[-1]))
                waiting.insert(0, running.pop())
                del held[waiting[0]]
            if i in running:
                held[i] = needed
        for i in running.copy():
            stored[i] += 1
            if stored[i] == sum(pairs[i]):
                running.remove(i)
                del held[i]
        step += 1
    return victims
