"""The loop that chapter 7 builds, step by step, is the oracle of `labcore.simulator`."""

import itertools

import pytest
from chapters import NOTEBOOKS, definitions, read_chapter

from labcore.admission import paged, reserve_limit, reserve_max
from labcore.simulator import simulate
from labcore.workloads import SHAPES, draw


@pytest.fixture(scope="module")
def naive_simulate():
    """Run chapter 7 up to the cell that defines its loop."""
    names = {}
    for cell in read_chapter(NOTEBOOKS / "ch07_simulator.md").cells[1:]:
        exec(compile(cell.tree, "ch07_simulator", "exec"), names)
        if "naive_simulate" in definitions(cell.tree):
            return names["naive_simulate"]
    pytest.fail("chapter 7 defines no naive_simulate")


def check(naive_simulate, policy, workload, block_size, watermark):
    naive = naive_simulate(policy, workload, block_size, watermark)
    fast = simulate(policy, workload, block_size=block_size, watermark=watermark, history=True)
    assert fast.steps == naive.steps
    assert fast.preemptions == naive.preemptions
    assert fast.history.victims == naive.victims
    assert fast.utilization == naive.utilization
    if any(fast.history.waiting):  # else the chapter's mean is of no steps, and ours of all
        assert fast.mean_resident == naive.mean_resident


GRID = [  # with one of two seeds each, in turn: any two of the four meet
    (*some, i % 2)
    for i, some in enumerate(itertools.product(SHAPES, (1, 2, 16, 64, 256), (0.0, 0.05, 0.3)))
]


@pytest.mark.parametrize(("name", "block_size", "watermark", "seed"), GRID)
def test_the_chapters_loop_equals_the_package(name, block_size, watermark, seed, naive_simulate):
    check(naive_simulate, paged, draw(name, 200, seed=seed), block_size, watermark)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("policy", [reserve_max, reserve_limit], ids=lambda policy: policy.name)
def test_reservations_are_the_same_in_both(name, policy, naive_simulate):
    for block_size in (1, 16):
        check(naive_simulate, policy, draw(name, 200), block_size, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_three_thousand_requests_are_the_same_in_both(name, naive_simulate):
    check(naive_simulate, paged, draw(name), 16, 0.05)


def test_a_wrong_watermark_is_noticed(naive_simulate):
    with pytest.raises(AssertionError):
        naive = naive_simulate(paged, draw("chat", 200), 16, 0.05)
        assert simulate(paged, draw("chat", 200)).preemptions == naive.preemptions
