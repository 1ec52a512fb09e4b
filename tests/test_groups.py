"""Several answers to one prompt: blocks that are shared, and groups that come and go as one."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from labcore.admission import (
    Limits,
    group_blocks,
    oldest,
    paged,
    reserve_limit,
    submit,
)
from labcore.blocks import BlockAllocator, BlockTables, blocks_needed
from labcore.costs import Costs, Recovery
from labcore.simulator import simulate
from labcore.workloads import Workload


def run(requests, samples, **settings):
    settings = {"block_size": 4, "recompute_steps": 0, "costs": Costs()} | settings
    return simulate(paged, requests, samples=samples, history=True, **settings)


@pytest.mark.parametrize(
    ("prompt", "tokens", "samples", "blocks", "slots"),
    [
        (6, 6, 3, 2, None),  # one prompt, however many will answer
        (6, 7, 3, 4, 13),  # 1 full block is shared, 3 have a copy of the second: 4 + 3 x 3
        (6, 8, 3, 4, 16),
        (6, 9, 3, 7, 19),
        (8, 9, 4, 6, 12),  # a prompt that ends with a block: nothing is copied
        (9, 10, 4, 6, 16),  # the third block, of 1 token, is copied
        (6, 8, 1, 2, 8),
    ],
)
def test_full_blocks_of_the_prompt_are_shared_and_the_rest_is_not(
    prompt, tokens, samples, blocks, slots
):
    """Source: vllm-project/vllm tests (n samples, append slots); TensorRT-LLM PR #14945"""
    assert group_blocks(prompt, tokens, samples, 4) == blocks
    if slots is not None:
        assert run([(prompt, tokens - prompt)], samples).history.stored[-1] == slots


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.integers(1, 20),
    generated=st.integers(0, 20),
    samples=st.integers(1, 5),
    block_size=st.integers(1, 6),
)
def test_a_group_counts_the_blocks_that_forked_tables_hold(prompt, generated, samples, block_size):
    """The tables of chapter 3 are the oracle: one prompt, forks, and a token for each in turn."""
    allocator = BlockAllocator(200)
    tables = BlockTables(allocator, block_size)
    tables.add(0, prompt)
    for other in range(1, samples):
        tables.fork(0, other)
    for _ in range(generated):
        for one in range(samples):
            tables.append(one)
    held = 200 - allocator.num_free
    assert group_blocks(prompt, prompt + generated, samples, block_size) == held
    blocks = {}  # block: the most slots that a table fills in it
    for one in range(samples):
        left = prompt + generated
        for block in tables.block_table(one):
            blocks[block] = max(blocks.get(block, 0), min(left, block_size))
            left -= block_size
    if generated:
        last = run([(prompt, generated)], samples, block_size=block_size).history.stored[-1]
        assert last == sum(blocks.values())


def test_three_answers_to_one_prompt_worked_by_hand():
    """8 blocks of 4; a prompt of 6 in 2 blocks. Step 0: 1 shared block, 3 with 3 tokens each.

    Step 1: the three are full. Step 2: each takes another, and stores the last token.
    """
    result = run([(6, 3)], 3, budget=32, declared=3)
    assert result.history.free == [4, 4, 1]
    assert result.history.stored == [4 + 3 * 3, 4 + 3 * 4, 4 + 3 * 5]
    assert result.utilization == (13 + 16 + 19) / (4 * (4 + 4 + 7))
    assert result.output_tokens == 9
    assert result.history.running == [1] * 3  # requests, not sequences


def test_a_group_comes_back_with_what_it_shares_and_is_not_left_waiting():
    """5 blocks of 4, 3 samples. Request 0: a prompt of 6; after one step 7 tokens in 4 blocks.

    Request 1 comes after that step, with a prompt of 1, and takes the fifth block; for three
    answers it needs 2 more. By its rule the oldest goes: 4 blocks are free, 2 are taken. It ends in
    this step. Request 0 needs 4 of 5 blocks and comes back; three sequences that share nothing
    would need 6.
    Source: vllm-project/vllm #1423, PR #2186, #4422, #4451, #8844, PR #12
    """
    two = Workload("two", np.array([6, 1]), np.array([2, 1]), np.array([0.0, 1.0]))
    result = run(two, 3, budget=20, declared=2, arrivals=True, victim=oldest)
    assert result.history.victims == [(1, 0)]
    assert result.history.admitted == [(0, 0), (1, 1), (2, 0)]
    assert result.history.free == [1, 2, 1]
    assert (result.finished, result.output_tokens) == (2, 3 * 2 + 3 * 1)
    assert group_blocks(6, 8, 3, 4) == 4
    assert 3 * blocks_needed(8, 4) == 6 > 5


def test_a_group_that_can_never_fit_is_refused_with_both_numbers():
    """Source: vllm-project/vllm #1423, #8844"""
    limits = Limits(5, 4, declared=2)
    assert submit(paged, 6, limits, samples=4) is None
    assert submit(paged, 6, limits, samples=5) == "needs 6 blocks, the pool has 5"
    result = run([(6, 2), (1, 2)], 5, budget=20, declared=2)
    assert result.refusals == {0: "needs 6 blocks, the pool has 5"}
    assert result.finished == 1


def test_a_group_alone_in_a_pool_too_small_ends_with_the_blocks_that_it_needed():
    """It declared 2 tokens and wants 3: 1 + 3 x 2 blocks for 9 tokens, in a pool of 5."""
    result = run([(6, 3)], 3, budget=20, declared=2)
    assert result.refusals == {0: "cache too small: needs 7 blocks, the pool has 5"}
    assert (result.steps, result.preemptions, result.output_tokens) == (2, 0, 0)


def test_a_victim_may_free_too_little_and_the_next_one_goes_too():
    """7 blocks of 4, 3 samples. Request 0 has a prompt of 4: 1 shared block, and 3 from step 0 on.

    Requests 1 and 2, also with prompts of 4, come after step 3 and take a block each. Step 4:
    request 0 stores token 9 and needs 3 blocks; 1 is free. Request 2 goes, and request 1 too.
    Step 5: request 0 has ended, both are back; 1 takes 3 blocks and ends, 2 finds only 2 and goes.
    Each preemption is charged, both of step 4 and the one of step 5.
    """
    three = Workload("three", np.array([4, 4, 4]), np.array([5, 1, 1]), np.array([0.0, 4.0, 4.0]))
    result = run(three, 3, budget=28, declared=[5, 1, 1], arrivals=True, recompute_steps=2)
    assert result.history.victims == [(4, 2), (4, 1), (5, 2)]
    assert result.history.free == [3, 3, 3, 3, 0, 3, 3]
    assert result.seconds == result.charged_steps == 7 + 2 * 3


def test_a_group_that_goes_loses_its_prompt_once_and_each_answer():
    """The group of above goes with a prompt of 6 and 1 token of each of 3 answers: 9, not 21."""
    two = Workload("two", np.array([6, 1]), np.array([2, 1]), np.array([0.0, 1.0]))
    again = Costs(recovery=Recovery(prefill_rate=2))
    result = run(two, 3, budget=20, declared=2, arrivals=True, victim=oldest, costs=again)
    assert result.recomputed_tokens == 6 + 3
    assert result.seconds == 3 + 9 / 2


def test_groups_are_computed_again_however_much_room_the_host_has():
    """One sequence would be copied: what is shared would be copied for each, and shared no more."""
    host = Costs(recovery=Recovery(host_blocks=1_000))
    group = run([(6, 6)] * 2, 2, budget=36, declared=6, costs=host)
    assert group.preemptions > 0
    assert (group.swaps, group.recomputed_tokens > 0) == (0, True)
    alone = run([(6, 6)] * 2, 1, budget=20, declared=6, costs=host)
    assert alone.swaps == alone.preemptions > 0
    assert alone.recomputed_tokens == 0


def test_under_a_token_budget_a_prompt_is_computed_once_for_all_answers():
    """2 tokens a step: the prompt of 3 in two steps. Then 3 answers, which no budget holds back."""
    asked = []

    def step(stored, computed):
        asked.append((stored, computed))
        return 1

    result = run([(3, 2)], 3, budget=64, declared=2, costs=Costs(step, token_budget=2))
    assert asked == [(2, 2), (3, 1), (12, 3), (15, 3)]
    assert result.first_token == {0: 2}


def test_a_group_whose_prompt_is_being_computed_loses_what_there_is_of_it():
    """8 blocks of 2, 2 samples, 3 tokens a step. Step 0: request 0's 2 tokens, 1 of the other's 8.

    Steps 1 and 2: two answers, in 3 blocks, and a token each of the other prompt, in 4. Step 3:
    request 0 needs 2 blocks and 1 is free: the other goes with 3 tokens. Steps 4 to 6: all 8.
    """
    asked = []

    def step(stored, computed):
        asked.append(computed)
        return 1

    costs, pool = Costs(step, token_budget=3), {"block_size": 2, "budget": 16}
    result = run([(2, 3), (8, 1)], 2, declared=[3, 1], costs=costs, **pool)
    assert result.history.victims == [(3, 1)]
    assert result.recomputed_tokens == 3
    assert asked == [3, 3, 3, 2, 3, 3, 2, 2]


@pytest.mark.parametrize("samples", [0, -1, 1.5, float("nan"), "2"])
def test_a_number_of_samples_that_cannot_be_is_refused(samples):
    with pytest.raises(ValueError, match=f"samples is a whole number, at least 1, got {samples!r}"):
        run([(4, 2)], samples)


def test_a_reservation_is_for_one_sequence():
    with pytest.raises(ValueError, match="under reserve_limit, 2 samples cannot share blocks"):
        simulate(reserve_limit, [(4, 2)], samples=2)


REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    block_size=st.integers(1, 6),
    num_blocks=st.integers(1, 40),
    watermark=st.sampled_from([0.0, 0.2]),
)
def test_one_sample_is_no_group(requests, block_size, num_blocks, watermark):
    pool = {"budget": num_blocks * block_size, "block_size": block_size, "watermark": watermark}
    one = dataclasses.asdict(run(requests, 1, declared=12, **pool))
    assert one == dataclasses.asdict(run(requests, np.int64(1), declared=12, **pool))
    fast = simulate(paged, requests, declared=12, history=True, **pool)
    assert one["history"] == dataclasses.asdict(fast)["history"]
