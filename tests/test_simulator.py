"""The simulator: runs by hand, the fast way against the plain one, the reference's tables."""

import dataclasses
import itertools
import os
import random
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bookkit.contiguous import Buddy, FirstFit
from labcore.admission import (
    Limits,
    Policy,
    Resident,
    decaying_ratio,
    expect_like_others,
    fewest_generated,
    future_peak,
    least_computed,
    lowest_priority,
    newest,
    oldest,
    oracle,
    paged,
    reserve_limit,
    reserve_max,
    reserve_power_of_2,
)
from labcore.costs import ConstantStep, Costs, Recovery
from labcore.jobs import Counts, Jobs
from labcore.phases import PhaseLoop
from labcore.simulator import simulate
from labcore.steps import StepLoop
from labcore.workloads import SHAPES, Workload, draw

POLICIES = (reserve_max, reserve_limit, paged)


def newest_by_steps(running):
    """The same victim as `newest`, under a name that sends the run through the step loop."""
    return newest(running)


def both_ways(policy, workload, **settings):
    fast = simulate(policy, workload, history=True, **settings)
    plain = simulate(policy, workload, history=True, victim=newest_by_steps, **settings)
    steps_only = ("seconds", "recomputed_tokens", "swaps", "unreserved", "first_token")
    plain = dataclasses.replace(plain, **dict.fromkeys(steps_only))
    assert dataclasses.asdict(fast) == dataclasses.asdict(plain)
    return fast


def check_conservation(result, submitted, num_blocks, block_size):
    """Nothing lost at any step, no idle server, and the ratios are what the history adds up to."""
    h = result.history
    assert result.finished + result.refused == submitted
    everywhere = zip(h.waiting, h.running, h.finished, h.refused, strict=True)
    assert {sum(places) for places in everywhere} <= {submitted}
    assert h.finished == sorted(h.finished)
    assert h.refused == sorted(h.refused)
    assert min(h.free, default=0) >= 0
    assert min(h.running, default=1) >= 1  # no step in which nobody runs
    assert len(h.victims) == result.preemptions
    assert max(h.running, default=0) == result.peak_resident
    set_aside = sum(num_blocks - free for free in h.free) * block_size
    assert result.utilization == pytest.approx(sum(h.stored) / max(set_aside, 1))
    assert result.waste == pytest.approx(1 - result.utilization if set_aside else 0)
    if sum(h.stored):
        assert result.waste_of_used == pytest.approx(set_aside / sum(h.stored) - 1)


# --- by hand


def test_two_requests_share_a_pool_worked_by_hand():
    """Blocks of 2 tokens, 4 blocks. Both come in with 1 block each.

    Step 0: each takes a second block and stores token 3. Step 1: token 4, in place. Step 2:
    request 0 needs a third block and none is free, so request 1, the newest, goes: 2 blocks back,
    one taken; request 0 stores token 5 and leaves. Step 3: request 1 comes back with 4 tokens in 2
    blocks, takes a third, stores token 5 and leaves.
    """
    result = both_ways(paged, [(2, 3), (2, 3)], budget=8, block_size=2, declared=3)
    assert result.steps == 4
    assert result.history.victims == [(2, 1)]
    assert result.history.admitted == [(0, 0), (0, 1), (3, 1)]
    assert result.history.stored == [6, 8, 5, 5]
    assert result.history.free == [0, 0, 1, 1]
    assert result.utilization == 24 / (2 * (4 + 4 + 3 + 3))
    assert result.mean_resident == 1  # one step in which a request waits: step 2, with one resident
    assert (result.charged_steps, result.preemptions, result.empty_preemptions) == (8, 1, 0)


def test_a_victim_that_stored_nothing_since_it_came_in_is_an_empty_preemption():
    result = both_ways(paged, [(3, 3), (4, 1)], budget=8, block_size=4, declared=4)
    assert result.history.victims == [(0, 1), (1, 1), (2, 1)][: result.preemptions]
    assert result.preemptions == result.empty_preemptions > 0
    assert result.output_tokens == 4


def test_the_head_of_the_queue_blocks_the_rest():
    """Two blocks stay free for four steps;

    the last request would fit, but the one before it does not.
    """
    result = both_ways(paged, [(8, 4), (11, 1), (1, 1)], budget=16, block_size=4, declared=4)
    assert result.history.admitted == [(0, 0), (4, 1), (4, 2)]


def test_room_is_counted_in_blocks_not_in_tokens():
    """Source: sgl-project/sglang #4602, #6731, #6671, #9989, #4977"""
    result = both_ways(paged, [(16, 1)] * 3, budget=80, block_size=16, declared=1)
    assert result.history.victims == [(0, 2)]
    sequences = both_ways(paged, [(64, 1)] * 148, budget=(148 + 32) * 64, block_size=64, declared=1)
    first_step = [i for step, i in sequences.history.victims if step == 0]
    assert len(first_step) == 58
    assert sequences.history.running[0] == 90


def test_a_request_that_never_fits_is_refused_and_blocks_nobody():
    """Source: vllm-project/vllm #35541, PR #35570, #2163; inference-sim #373"""
    requests = [(1_002, 2)] * 5 + [(100, 2)]
    result = both_ways(paged, requests, budget=49 * 16, declared=2)
    assert result.refused == 5
    assert set(result.refusals.values()) == {"needs 63 blocks, the pool has 49"}
    assert result.finished == 1


def test_a_sequence_alone_in_a_pool_too_small_ends_and_is_never_its_own_victim():
    """Source: GeeeekExplorer/nano-vllm #274, PR #277; sgl-project/sglang #19881"""
    result = both_ways(paged, [(8, 4)], budget=8, block_size=4, declared=0)
    assert result.refusals == {0: "cache too small: needs 3 blocks, the pool has 2"}
    assert (result.preemptions, result.finished, result.output_tokens) == (0, 0, 0)


def test_a_limit_declared_far_beyond_the_pool_is_refused_at_the_start():
    """Source: vllm-project/vllm #2418; sgl-project/sglang #14948 (3,664 < 4,096 tokens)"""
    result = both_ways(paged, [(1, 5)], budget=229 * 16, declared=4_096, max_context=8_192)
    assert result.refusals == {0: "needs 257 blocks, the pool has 229"}
    assert result.steps == 0


def test_a_preemption_sends_no_token_twice_and_is_charged_once():
    """Source: inference-sim #1121, #1167; vllm-project/vllm #13073, #16832, #3032"""
    requests = [(34, 64), (34, 35)]  # the second is preempted when it has 14 of its 35 tokens
    pool = {"budget": 7 * 16, "declared": 64, "watermark": 0.14}  # one block of headroom
    free = both_ways(paged, requests, recompute_steps=0, **pool)
    charged = both_ways(paged, requests, recompute_steps=4, **pool)
    assert charged.history.victims == [(14, 1)]
    assert charged.output_tokens == free.output_tokens == 64 + 35
    assert charged.charged_steps == charged.steps + 4 == free.steps + 4
    assert free.charged_steps == free.steps


def test_a_preempted_request_stays_ahead_of_later_arrivals():
    """Source: vllm-project/vllm #25538, #28018"""
    history = both_ways(paged, [(16, 30)] * 9, budget=96, block_size=16, declared=30).history
    assert len(history.victims) > 5
    events = [(step, 0, i) for step, i in history.admitted]
    events += [(step, 1, i) for step, i in history.victims]
    preempted = set()
    for _, is_victim, i in sorted(events, key=lambda event: event[:2]):
        if is_victim:
            preempted.add(i)
        else:
            assert i in preempted or not preempted
            preempted.discard(i)


def test_the_watermark_limits_new_requests_only():
    """Source: vllm-project/vllm #255"""
    result = both_ways(paged, [(4, 12)], budget=16, block_size=4, declared=12, watermark=0.9)
    assert result.finished == 1
    assert min(result.history.free) == 0  # growth used the headroom


def test_the_watermark_does_not_concern_reserving_policies():
    for policy in (reserve_max, reserve_limit):
        without, with_one = (simulate(policy, "chat", watermark=w) for w in (0.0, 0.3))
        assert dataclasses.asdict(without) == dataclasses.asdict(with_one)


def test_a_sequence_that_outgrows_its_reservation_stores_on_and_is_counted():
    result = both_ways(reserve_limit, [(4, 20), (4, 8)], budget=40, declared=8)
    assert result.overruns == 1
    assert (result.finished, result.preemptions) == (2, 0)
    long_answer = simulate(reserve_limit, "long_answer")
    assert long_answer.overruns / 3_000 == pytest.approx(0.22, abs=0.01)


def test_reservations_come_in_whole_blocks_where_a_block_size_is_asked_for():
    tokens = simulate(reserve_limit, [(5, 3)], budget=64, declared=8, history=True)
    blocks = simulate(reserve_limit, [(5, 3)], budget=64, block_size=16, declared=8, history=True)
    assert tokens.history.free == [64 - 13] * 3
    assert blocks.history.free == [4 - 1] * 3


def test_a_sequence_ends_where_the_context_does():
    result = both_ways(paged, [(1_000, 500)], declared=10)
    assert (result.steps, result.output_tokens) == (24, 24)


def test_the_fewest_generated_tokens_go_worked_by_hand():
    """Blocks of 4, 4 blocks, prompts of 4 and 3 tokens.

    Step 0: request 0 takes a second block; request 1 stores token 4 in place: 3 blocks in use.
    Step 1: request 1 takes a second block; the pool is full. Step 4: request 0 has 8 tokens and
    needs a third. Both have generated 4 tokens, so the later arrival goes. It comes back in step 8,
    when request 0 has left with 12 tokens, and has then the 7 tokens that it had.
    """
    result = simulate(
        paged,
        [(4, 8), (3, 8)],
        budget=16,
        block_size=4,
        declared=8,
        victim=fewest_generated,
        history=True,
    )
    assert result.history.victims[0] == (4, 1)
    assert (7, 0) not in result.history.victims
    assert result.history.stored[8] == 8
    assert (result.finished, result.steps) == (2, 12)


def test_the_victim_may_be_an_older_sequence_than_the_one_that_asks():
    def oldest(running):
        return running[0]

    result = simulate(
        paged, [(3, 9), (4, 8)], budget=16, block_size=4, declared=9, victim=oldest, history=True
    )
    assert 0 in [i for _, i in result.history.victims]
    check_conservation(result, 2, 4, 4)
    assert result.output_tokens == 17


@pytest.mark.parametrize("way", ["fast", "plain"])
def test_a_run_that_would_not_end_fails_loudly(way):
    """Source: vllm-project/vllm #35541; GeeeekExplorer/nano-vllm #274"""
    limits = Limits(64, 1, declared=8)
    jobs = Jobs(reserve_limit, limits, [8], [6], [0], [16])  # past its length when it comes in
    loop = PhaseLoop(jobs, Counts()) if way == "fast" else StepLoop(jobs, Counts(), newest)
    with pytest.raises(RuntimeError, match="should end did not"):
        loop.run()


# --- the fast way equals the plain one

GRID = list(itertools.product(SHAPES, (1, 3, 16, 64, 256), (0.0, 0.05, 0.3)))


@pytest.mark.parametrize(("name", "block_size", "watermark"), GRID)
def test_the_fast_way_equals_the_step_loop(name, block_size, watermark):
    """Each combination with one of three seeds; any two of the four meet."""
    number = GRID.index((name, block_size, watermark))
    workload = draw(name, 200, seed=(number + number // 3) % 3)
    result = both_ways(paged, workload, block_size=block_size, watermark=watermark)
    check_conservation(result, 200, 32_768 // block_size, block_size)


@pytest.mark.parametrize("name", SHAPES)
def test_the_fast_way_equals_the_step_loop_on_three_thousand_requests(name):
    """A thousand where nobody is sent away: there a long run shows no more than a short one."""
    result = both_ways(paged, name)
    check_conservation(result, 3_000, 2_048, 16)
    for policy in (reserve_max, reserve_limit):
        reserving = both_ways(policy, draw(name, 1_000))
        check_conservation(reserving, 1_000, 32_768, 1)


REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    policy=st.sampled_from([*POLICIES, reserve_power_of_2]),
    block_size=st.integers(1, 9),
    num_blocks=st.integers(1, 25),
    watermark=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99]),
    declared=st.integers(0, 25) | st.lists(st.integers(0, 25), min_size=25, max_size=25),
    max_context=st.integers(2, 40),
)
def test_any_run_ends_loses_nothing_and_is_the_same_both_ways(
    requests, policy, block_size, num_blocks, watermark, declared, max_context
):
    settings = {
        "budget": num_blocks * block_size,
        "block_size": block_size,
        "watermark": watermark,
        "declared": declared if isinstance(declared, int) else declared[: len(requests)],
        "max_context": max_context,
    }
    result = both_ways(policy, requests, **settings)
    check_conservation(result, len(requests), num_blocks, block_size)
    least = simulate(policy, requests, victim=fewest_generated, history=True, **settings)
    check_conservation(least, len(requests), num_blocks, block_size)


def test_tight_and_comfortable_pools_lose_nothing_and_show_the_cliff():
    """Source: inference-sim #323, #963, #1061 and its cliff study"""
    rng = random.Random(0)
    requests = [(rng.randint(10, 300), rng.randint(10, 300)) for _ in range(1_000)]
    preemptions = []
    for num_blocks in (64, 128, 512, 2_048, 38_000):
        result = both_ways(paged, requests, budget=num_blocks * 16)
        check_conservation(result, 1_000, num_blocks, 16)
        preemptions.append(result.preemptions)
    assert preemptions == sorted(preemptions, reverse=True)
    assert preemptions[0] > 1_000
    assert preemptions[-1] == 0


def test_the_same_seed_gives_the_same_run():
    first, again, other = (
        dataclasses.asdict(simulate(paged, "chat", seed=seed, history=True)) for seed in (0, 0, 1)
    )
    assert repr(first) == repr(again) != repr(other)


# --- the reference's tables

UTILIZATION = {
    "chat": (0.33, 0.48, 0.98),
    "long_prompt": (0.61, 0.64, 0.99),
    "long_answer": (0.30, 0.55, 0.97),
}
RESERVED_STEPS = {
    "chat": (15_260, 10_637),
    "long_prompt": (4_665, 4_536),
    "long_answer": (35_223, 19_711),
}
PAGED_STEPS = {  # watermark 0, 5, 10, 20, 30%
    "chat": (13_754, 5_611, 5_858, 6_550, 7_446),
    "long_prompt": (3_877, 3_106, 3_273, 3_671, 4_186),
    "long_answer": (None, 17_752, 14_599, 14_489, 15_650),  # 94,960 at 0: its rule is not known
}
WATERMARKS = (0.0, 0.05, 0.1, 0.2, 0.3)


@pytest.mark.parametrize("name", UTILIZATION)
def test_utilization_is_within_a_tenth_of_the_reference(name):
    ours = [simulate(policy, name).utilization for policy in POLICIES]
    assert ours == pytest.approx(UTILIZATION[name], rel=0.1)


@pytest.mark.parametrize("name", PAGED_STEPS)
def test_charged_steps_are_within_a_tenth_of_the_reference(name):
    tolerance = 0.15 if name == "long_answer" else 0.10
    ours = [simulate(policy, name).charged_steps for policy in (reserve_max, reserve_limit)]
    assert ours == pytest.approx(RESERVED_STEPS[name], rel=tolerance)
    for watermark, expected in zip(WATERMARKS, PAGED_STEPS[name], strict=True):
        if expected:
            result = simulate(paged, name, watermark=watermark)
            assert result.charged_steps == pytest.approx(expected, rel=tolerance)


def test_preemptions_and_residents_come_close_to_the_reference():
    assert simulate(paged, "chat").preemptions == pytest.approx(2_094, rel=0.1)
    assert simulate(paged, "long_prompt").preemptions == pytest.approx(228, rel=0.1)
    assert simulate(reserve_max, "chat").mean_resident == 32
    assert 92 <= simulate(paged, "chat", watermark=0.05).mean_resident <= 97
    assert 92 <= simulate(paged, "chat").mean_resident <= 97
    assert simulate(paged, "chat", watermark=0.3).mean_resident == pytest.approx(67, rel=0.1)


@pytest.mark.parametrize(
    ("name", "share"), [("chat", 46), ("long_prompt", 59), ("long_answer", 29)]
)
def test_about_half_of_the_preemptions_are_of_victims_that_stored_nothing(name, share):
    result = simulate(paged, name)
    assert 100 * result.empty_preemptions / result.preemptions == pytest.approx(share, abs=2)


@pytest.mark.parametrize(
    ("block_size", "waste"), [(1, 0.0), (16, 2.2), (64, 8.7), (128, 16.0), (256, 27.3)]
)
def test_waste_grows_with_the_block_size_as_in_the_reference(block_size, waste):
    ours = 100 * simulate(paged, "chat", block_size=block_size, watermark=0.05).waste
    assert ours == pytest.approx(waste, rel=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_preemptions_fall_steeply_then_flatten_and_the_best_watermark_is_inside(name):
    """Source: vllm-project/vllm PR #44594 (measured table)"""
    runs = [simulate(paged, name, watermark=w) for w in (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)]
    preemptions = [run.preemptions for run in runs]
    assert preemptions == sorted(preemptions, reverse=True)
    assert preemptions[0] - preemptions[2] > 5 * (preemptions[2] - preemptions[-1])
    charged = [run.charged_steps for run in runs]
    assert 0 < charged.index(min(charged)) < len(charged) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "a budget of 32768 tokens holds no block of 0"),
        ({"recompute_steps": -1}, "at least 0 steps, got -1"),
        ({"budget": 8}, "a budget of 8 tokens holds no block of 16"),
        ({"block_size": 2.5}, "block_size is a whole number of tokens, got 2.5"),
        ({"declared": float("nan")}, "declared is a whole number of tokens, got nan"),
        ({"max_context": float("inf")}, "max_context is a whole number of tokens, got inf"),
        ({"recompute_steps": float("nan")}, "at least 0 steps, got nan"),
        ({"workload": "chat", "max_context": 1}, "max_context is an int of at least 2, got 1"),
        ({"workload": [(1, 2), (3,)]}, "whole numbers, got"),
        ({"watermark": 1.0}, "watermark is at least 0 and below 1, got 1.0"),
        ({"workload": "chatty"}, "'chatty'"),
        ({"workload": [(1, 0)]}, "output of 0 tokens"),
        ({"workload": [(1,)]}, "whole numbers"),
        ({"declared": [1, 2]}, "2 declared limits for 1 requests"),
        ({"declared": [2.5]}, "declared is a whole number of tokens, got 2.5"),
        ({"declared": np.array([0.5])}, "declared is a whole number of tokens, got "),
        ({"declared": [-5]}, "declared is an int of at least 0, got -5"),
        ({"workload": [(1, 1)] * 2, "declared": [-5, 9]}, "of at least 0, got -5"),
        ({"declared": -1}, "declared is an int of at least 0, got -1"),
        ({"recompute_steps": float("inf")}, "at least 0 steps, got inf"),
        ({"watermark": float("nan")}, "at least 0 and below 1, got nan"),
        ({"arrivals": True}, "nothing is known of the arrivals of pairs"),
        ({"memory": FirstFit}, "paged grows, and a region of contiguous memory does not"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(paged, **({"workload": [(1, 1)]} | arguments))


def test_a_policy_that_grows_from_more_than_is_stored_is_refused():
    greedy = Policy("greedy", lambda prompt, stored, limits: stored + 64, grows=True)
    with pytest.raises(ValueError, match="greedy grows, so it sets aside what is stored"):
        simulate(greedy, [(1, 1)])


def test_a_policy_that_grows_from_its_prompt_alone_is_refused():
    """It would let a preempted sequence in on a part of what it needs: vllm-project/vllm #25538."""
    forgetful = Policy("forgetful", lambda prompt, stored, limits: prompt, grows=True)
    with pytest.raises(ValueError, match="forgetful grows"):
        simulate(forgetful, [(1, 1)])


def test_where_nobody_ever_waits_the_mean_is_over_all_steps():
    result = both_ways(paged, [(4, 2), (4, 6)], budget=64, block_size=4, declared=6)
    assert result.history.running == [2, 2, 1, 1, 1, 1]
    assert result.mean_resident == 8 / 6


def test_no_requests_take_no_steps():
    result = both_ways(paged, [])
    assert (result.steps, result.utilization, result.finished) == (0, 0, 0)


def test_a_sequence_that_ends_early_gave_no_output_and_is_refused():
    """Source: inference-sim #1121 (goodput counts finished requests only); nano-vllm #274"""
    result = both_ways(paged, [(5, 9), (4, 2)], budget=8, block_size=4, declared=0)
    assert result.refusals == {0: "cache too small: needs 3 blocks, the pool has 2"}
    assert (result.finished, result.output_tokens) == (1, 2)
    assert result.history.stored == [6, 7, 8, 5, 6]  # the next one comes in at once
    assert result.utilization == 32 / (4 * 10)


def test_the_watermark_holds_back_a_head_that_would_fit():
    """Source: vllm-project/vllm #25538: the failed attempt evicts nobody and takes no block"""
    pool = {"budget": 8 * 4, "block_size": 4, "declared": 4, "watermark": 0.25}
    history = both_ways(paged, [(20, 4), (10, 2)], **pool).history
    assert history.admitted == [(0, 0), (4, 1)]  # 3 blocks would leave 0 free, 2 are to stay free
    assert history.victims == []
    assert history.free[:4] == [2, 2, 2, 2]


def test_ratios_of_a_reserving_run_are_of_whole_blocks_and_may_be_negative():
    result = both_ways(reserve_limit, [(4, 20)], budget=40, block_size=4, declared=4)
    assert result.overruns == 1
    assert result.utilization == sum(range(5, 25)) / (20 * 8)
    assert result.waste == 1 - result.utilization < 0
    exact = both_ways(reserve_limit, [(4, 4)], budget=40, block_size=4, declared=4)
    assert exact.overruns == 0
    within = both_ways(reserve_limit, [(4, 7)], budget=40, block_size=4, declared=5)
    assert within.overruns == 0  # 11 tokens fit into 3 blocks


@pytest.mark.parametrize("way", ["fast", "plain"])
def test_the_step_limit_is_one_more_than_the_longest_run(way):
    limits = Limits(4, 4, declared=8)
    jobs = Jobs(paged, limits, [1, 1], [3, 4], [0, 1], None)
    assert jobs.max_steps == 2 + 3 + 2 + 1
    for length in (6, 5, -(2**63)):
        never = Jobs(reserve_limit, limits, [8], [length], [0], [4])
        counts = Counts()
        loop = PhaseLoop(never, counts) if way == "fast" else StepLoop(never, counts, newest)
        with pytest.raises(RuntimeError, match="did not, in 2 steps"):
            loop.run()


def test_only_empty_preemptions_are_counted_as_empty():
    """It came back with 6 tokens: what counts is not its prompt but what it had then."""
    result = both_ways(paged, [(3, 9), (3, 9)], budget=16, block_size=4, declared=9)
    seen = {}
    empty = 0
    events = [(s, 0, i) for s, i in result.history.admitted]
    events += [(s, 1, i) for s, i in result.history.victims]
    for step, is_victim, i in sorted(events):
        if is_victim:
            empty += step == seen[i]
        else:
            seen[i] = step
    assert result.empty_preemptions == empty < result.preemptions


def test_names_are_drawn_for_the_context_that_is_asked_for():
    assert simulate(paged, "chat", max_context=256).refused == 0
    direct = simulate(paged, draw("chat", max_context=256), max_context=256)
    assert simulate(paged, "chat", max_context=256) == direct


def test_two_processes_with_different_hash_seeds_give_the_same_bytes():
    """Source: inference-sim #323, #963 and invariants"""
    program = (
        "import dataclasses; from labcore.admission import *; "
        "from labcore.simulator import simulate; "
        "from bookkit.contiguous import Buddy, FirstFit; from labcore.workloads import draw; "
        "few = draw('chat', 100); "
        "print([dataclasses.asdict(simulate(paged, few, 4096, victim=v, history=True))"
        " for v in (newest, fewest_generated)]); "
        "print([dataclasses.asdict(simulate(p, few, 4096, history=True)) for p in "
        "(decaying_ratio(), future_peak(), future_peak(expect_like_others()), oracle(few.outputs))]"
        "); "
        "print([dataclasses.asdict(simulate(reserve_limit, few, 4096, memory=m, history=True))"
        " for m in (Buddy, FirstFit)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1] != b""


# --- what needed a fix


RUBBISH = {
    "nothing": lambda running: None,
    "a place": lambda running: 0,
    "a copy": lambda running: dataclasses.replace(running[-1]),
    "a stranger": lambda running: Resident(99, 1, 1),
    "a list": lambda running: [running[0]],
}


@pytest.mark.parametrize("name", RUBBISH)
def test_a_victim_that_does_not_run_is_refused(name):
    with pytest.raises(ValueError, match="a victim is one of the 2 that run, got"):
        simulate(paged, [(3, 9), (4, 8)], budget=16, block_size=4, declared=9, victim=RUBBISH[name])


def test_a_victim_s_rule_cannot_change_the_order_of_those_that_run():
    def sorts(running):
        running.sort(key=lambda sequence: sequence.stored)

    with pytest.raises(AttributeError, match="tuple"):
        simulate(paged, [(3, 9), (4, 8)], budget=16, block_size=4, declared=9, victim=sorts)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_an_output_without_end_stops_at_the_context(policy):
    result = both_ways(policy, [(10, sys.maxsize)], declared=10)
    assert (result.finished, result.output_tokens) == (1, 1_014)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64])
def test_numpy_s_integers_are_ints(kind):
    requests = [(4, 8), (3, 8)] * 10
    settings = {"budget": 64, "block_size": 4, "declared": 8, "max_context": 40}
    plain = simulate(paged, requests, **settings)
    assert simulate(paged, requests, **{k: kind(v) for k, v in settings.items()}) == plain
    assert plain.preemptions == 36


def test_a_policy_that_sets_aside_more_for_shorter_prompts_leaves_nobody_waiting():
    odd = Policy("odd", lambda prompt, stored, limits: 100 - 10 * prompt, grows=False)
    result = both_ways(odd, [(3, 2), (9, 2)], budget=16, declared=2)
    assert result.refusals == {0: "needs 70 blocks, the pool has 16"}
    assert result.finished == 1


# --- any rule, any price


RULES = {
    "paged": paged,
    "decaying_ratio": decaying_ratio(),
    "undecaying_ratio": decaying_ratio(1, 1),
    "future_peak": future_peak(),
    "past": future_peak(expect_like_others(0.5)),
}
RESERVATIONS = (reserve_max, reserve_limit, reserve_power_of_2)


def most_computed(running):
    """A rule of no server's: it throws away as much as it can."""
    return max(running, key=lambda sequence: sequence.stored)


VICTIMS = (
    newest,
    oldest,
    fewest_generated,
    least_computed,
    most_computed,
    lowest_priority([0, 1, 2] * 99),
)


class Clock:
    """A step that takes longer the more there is to do, and keeps what it was asked."""

    def __init__(self):
        self.computed, self.seconds = [], []

    def __call__(self, stored, computed):
        self.computed.append(computed)
        self.seconds.append(1 + stored / 64 + computed / 8)
        return self.seconds[-1]


@st.composite
def any_settings(draw):
    """Requests, and all that `simulate` may be asked, its costs excepted. One in four preempts."""
    length = st.integers(1, 12)
    requests = draw(st.lists(st.tuples(length, length), min_size=draw(st.sampled_from([0, 5, 12]))))
    many = {"min_size": len(requests), "max_size": len(requests)}
    arrivals = draw(st.none() | st.lists(st.floats(0, 40), **many).map(sorted))
    prompts, outputs = np.array(requests, dtype=int).reshape(-1, 2).T
    times = None if arrivals is None else np.array(arrivals)
    block_size = draw(st.integers(1, 5))
    declared = draw(st.sampled_from(["what they use", "any", "one"]))
    settings = {
        "workload": Workload("any", prompts, outputs, times),
        "arrivals": arrivals is not None,
        "budget": draw(st.sampled_from([30, 20, 60, block_size])),
        "block_size": block_size,
        "declared": {
            "what they use": outputs,
            "any": draw(st.lists(st.integers(0, 15), **many)),
            "one": draw(st.integers(0, 15)),
        }[declared],
        "max_context": draw(st.sampled_from([40, 40, 40, 9, 2])),
        "recompute_steps": draw(st.integers(0, 4)),
    }
    if draw(st.integers(0, 3)) == 3:
        return settings | {
            "policy": draw(st.sampled_from(RESERVATIONS)),
            "memory": draw(st.sampled_from([None, FirstFit, Buddy])),
        }
    return settings | {
        "policy": draw(st.sampled_from([paged, paged, *RULES.values(), oracle(outputs)])),
        "victim": draw(st.sampled_from(VICTIMS)),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
        "samples": draw(st.sampled_from([1, 1, 2, 3])),
    }


RECOVERIES = st.builds(
    Recovery,
    prefill_rate=st.sampled_from([0.5, 8, float("inf")]),
    host_blocks=st.sampled_from([0, 2, 5, 100]),
    block_seconds=st.sampled_from([0.0, 0.25]),
)


@settings(max_examples=500, deadline=None)
@given(
    wanted=any_settings(),
    recovery=RECOVERIES,
    token_budget=st.none() | st.integers(1, 20),
)
def test_under_any_rule_and_price_a_run_ends_and_loses_nothing(wanted, recovery, token_budget):
    """Source: inference-sim #323, #963, #1061 and invariants; vllm-project/vllm #41951"""
    clock, again = Clock(), Clock()
    result = simulate(**wanted, history=True, costs=Costs(clock, recovery, token_budget))
    same = simulate(**wanted, history=True, costs=Costs(again, recovery, token_budget))
    assert repr(result) == repr(same)
    assert result.first_token == same.first_token
    workload, samples = wanted["workload"], wanted.get("samples", 1)
    num_blocks = wanted["budget"] // wanted["block_size"]
    check_conservation(result, len(workload), num_blocks, wanted["block_size"])

    # time: every step, and never less; a token for everybody, after some time
    assert len(clock.seconds) == result.steps
    assert result.seconds >= sum(clock.seconds) - 1e-9
    served = set(range(len(workload))) - set(result.refusals)
    assert served <= set(result.first_token)
    assert min(result.first_token.values(), default=1) >= 1

    # work: what decoding needs, and no more than the budget for the rest
    busy = [samples * running for running in result.history.running]
    if token_budget is None:
        assert clock.computed == busy
    else:
        assert all(0 < n for n in clock.computed)
        assert all(n <= max(token_budget, b) for n, b in zip(clock.computed, busy, strict=True))
        if samples == 1 and not recovery.host_blocks:
            assert max(clock.computed, default=0) <= token_budget

    # victims
    assert 0 <= result.swaps <= result.preemptions
    if not result.preemptions:
        assert result.recomputed_tokens == 0
    if samples > 1 or not recovery.host_blocks:
        assert result.swaps == 0
    if not wanted["policy"].grows:
        assert result.preemptions == 0
    if token_budget and samples == 1 and len(served) == len(workload):
        answers = result.output_tokens
        prompts = int(workload.prompts.sum())
        assert sum(clock.computed) == prompts + answers + result.recomputed_tokens


@settings(max_examples=150, deadline=None)
@given(wanted=any_settings(), recompute_steps=st.integers(0, 5))
def test_where_a_step_takes_a_second_a_run_takes_its_charged_steps(wanted, recompute_steps):
    """Unless the server waits for arrivals; and a group may go just before the last one is refused.

    Then no step follows to be charged.
    """
    wanted |= {"arrivals": False, "recompute_steps": recompute_steps}
    result = simulate(**wanted, costs=Costs(ConstantStep(1)))
    if wanted.get("samples", 1) == 1:
        assert result.seconds == result.charged_steps
    assert result.seconds <= result.charged_steps


@settings(max_examples=200, deadline=None)
@given(
    wanted=any_settings(),
    host_blocks=st.sampled_from([0, 100]),
    knows=st.sampled_from(["outputs", "limits"]),
)
def test_who_knows_how_long_answers_are_or_may_be_never_preempts(wanted, host_blocks, knows):
    """An oracle; and the peak by what is declared, where no answer is longer than that.

    Groups, prompts in pieces and answers beyond the limit are outside of what these rules know.
    """
    outputs = wanted["workload"].outputs
    wanted |= {"samples": 1, "policy": oracle(outputs), "memory": None}
    if knows == "limits":
        longest = np.maximum(wanted["declared"], outputs).tolist()
        wanted |= {"policy": future_peak(), "declared": longest}
    result = simulate(**wanted, costs=Costs(recovery=Recovery(host_blocks=host_blocks)))
    assert result.preemptions == 0
