"""The simulator: runs by hand, the fast way against the plain one, the reference's tables."""

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from labcore.admission import (
    Limits,
    Policy,
    fewest_generated,
    newest,
    paged,
    reserve_limit,
    reserve_max,
)
from labcore.phases import PhaseLoop
from labcore.simulator import simulate
from labcore.steps import Counts, Jobs, StepLoop
from labcore.workloads import SHAPES, draw

POLICIES = (reserve_max, reserve_limit, paged)


def newest_by_steps(running):
    """The same victim as `newest`, under a name that sends the run through the step loop."""
    return newest(running)


def both_ways(policy, workload, **settings):
    fast = simulate(policy, workload, history=True, **settings)
    plain = simulate(policy, workload, history=True, victim=newest_by_steps, **settings)
    assert dataclasses.asdict(fast) == dataclasses.asdict(plain)
    return fast


def check_conservation(result, submitted, num_blocks, block_size):
    """Nothing lost at any step, no idle server, and the ratios are what the history adds up to."""
    h = result.history
    assert result.finished + result.refused == submitted
    gone = [submitted - r - w for r, w in zip(h.running, h.waiting, strict=True)]
    assert gone == sorted(gone)  # finished or refused, for good
    assert min(h.free, default=0) >= 0
    idle = [r == 0 and w > 0 for r, w in zip(h.running, h.waiting, strict=True)]
    assert not any(a and b for a, b in itertools.pairwise(idle))
    assert all(f == num_blocks for r, f in zip(h.running, h.free, strict=True) if r == 0)
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
    for seed in range(3):
        workload = draw(name, 200, seed=seed)
        result = both_ways(paged, workload, block_size=block_size, watermark=watermark)
        check_conservation(result, 200, 32_768 // block_size, block_size)


@pytest.mark.parametrize("name", SHAPES)
def test_the_fast_way_equals_the_step_loop_on_three_thousand_requests(name):
    result = both_ways(paged, name)
    check_conservation(result, 3_000, 2_048, 16)
    for policy in (reserve_max, reserve_limit):
        reserving = both_ways(policy, name)
        check_conservation(reserving, 3_000, 32_768, 1)


REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(POLICIES),
    block_size=st.integers(1, 9),
    num_blocks=st.integers(1, 25),
    watermark=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.99]),
    declared=st.integers(0, 25),
    max_context=st.integers(2, 40),
)
def test_any_run_ends_loses_nothing_and_is_the_same_both_ways(
    requests, policy, block_size, num_blocks, watermark, declared, max_context
):
    settings = {
        "budget": num_blocks * block_size,
        "block_size": block_size,
        "watermark": watermark,
        "declared": declared,
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
        ({"block_size": 0}, "block_size=0"),
        ({"recompute_steps": -1}, "recompute_steps=-1"),
        ({"budget": 8}, "num_blocks is at least 1, got 0"),
        ({"watermark": 1.0}, "watermark is at least 0 and below 1, got 1.0"),
        ({"workload": "chatty"}, "'chatty'"),
        ({"workload": [(1, 0)]}, "output of 0 tokens"),
        ({"workload": [(1,)]}, "whole numbers"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate(paged, **({"workload": [(1, 1)]} | arguments))


def test_a_policy_that_grows_from_more_than_is_stored_is_refused():
    greedy = Policy("greedy", lambda prompt, stored, limits: stored + 64, grows=True)
    with pytest.raises(ValueError, match="greedy grows, so it sets aside what is stored"):
        simulate(greedy, [(1, 1)])


def test_no_requests_take_no_steps():
    result = both_ways(paged, [])
    assert (result.steps, result.utilization, result.finished) == (0, 0, 0)
