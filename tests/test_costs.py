"""What a run takes in seconds: steps, prompts, victims that come back, and requests that come late.

The loop's own invariants, over random runs, are in test_simulator.py.
"""

from dataclasses import dataclass, field
from math import inf

import numpy as np
import pytest

from labcore.admission import Limits, lowest_priority, newest, oldest, paged, reserve_limit
from labcore.costs import ConstantStep, Costs, Recovery, Roofline
from labcore.jobs import Counts, Jobs
from labcore.simulator import simulate
from labcore.steps import StepLoop
from labcore.workloads import Workload


@dataclass(frozen=True)
class Watched:
    """A step of one second that keeps what it was asked: (stored, computed) tokens."""

    calls: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, stored, computed):
        self.calls.append((stored, computed))
        return 1.0


def run(requests, costs=None, **settings):
    settings = {"block_size": 2, "recompute_steps": 0, "history": True} | settings
    return simulate(paged, requests, costs=costs or Costs(), **settings)


# --- prices by themselves


def test_a_constant_step_takes_the_same_for_any_number_of_tokens():
    assert {ConstantStep(0.25)(stored, computed) for stored in (0, 99) for computed in (0, 99)} == {
        0.25
    }
    assert ConstantStep()(1, 1) == 1


def test_a_roofline_is_the_slower_of_reading_and_multiplying_worked_by_hand():
    """100 bytes of weights and 5 a stored token at 10 a second; 4 operations a token at 2 a second.

    20 stored: 200 bytes, 20 s; 9 computed: 18 s; 11 computed: 22 s. Half a second comes on top.
    """
    step = Roofline(100, 5, 10, 4, 2, overhead=0.5)
    assert step(20, 9) == 20.5
    assert step(20, 10) == 20.5
    assert step(20, 11) == 22.5
    assert step(0, 0) == 10.5


def test_a_7b_model_reads_more_cache_than_weights_from_26_000_tokens_on():
    """14 GB of weights, 524,288 bytes a token, 2 TB/s: at 26,703 tokens both take 7 ms.

    2 operations a weight and token at 300 T/s: 150 tokens are computed in the time of the weights.
    """
    step = Roofline(14e9, 524_288, 2e12, 14e9, 300e12)
    assert step(0, 1) == 0.007
    assert step(26_703, 1) == pytest.approx(0.014, rel=1e-4)
    assert step(0, 150) == pytest.approx(0.007)
    assert step(0, 300) == pytest.approx(0.014)


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantStep(-1), "a finite time, at least 0, got -1 seconds"),
        (lambda: ConstantStep(NAN), "got nan seconds"),
        (lambda: ConstantStep(inf), "got inf seconds"),
        (lambda: Roofline(-1, 1, 1, 1, 1), "weight_bytes=-1"),
        (lambda: Roofline(1, NAN, 1, 1, 1), "token_bytes=nan"),
        (lambda: Roofline(1, 1, 0, 1, 1), "bandwidth=0"),
        (lambda: Roofline(1, 1, NAN, 1, 1), "bandwidth=nan"),
        (lambda: Roofline(1, 1, 1, inf, 1), "flops=inf"),
        (lambda: Roofline(1, 1, 1, 1, -2), "flops_per_second=-2"),
        (lambda: Roofline(1, 1, 1, 1, 1, -0.1), "overhead=-0.1"),
        (lambda: Recovery(prefill_rate=0), "prefill_rate=0"),
        (lambda: Recovery(prefill_rate=-5), "prefill_rate=-5"),
        (lambda: Recovery(prefill_rate=NAN), "prefill_rate=nan"),
        (lambda: Recovery(host_blocks=-1), "host_blocks=-1"),
        (lambda: Recovery(host_blocks=NAN), "host_blocks=nan"),
        (lambda: Recovery(block_seconds=-0.5), "block_seconds=-0.5"),
        (lambda: Recovery(block_seconds=NAN), "block_seconds=nan"),
        (lambda: Recovery(block_seconds=inf), "block_seconds=inf"),
        (lambda: Costs(token_budget=0), "a token budget is a whole number, at least 1, got 0"),
        (lambda: Costs(token_budget=-3), "at least 1, got -3"),
        (lambda: Costs(token_budget=2.5), "at least 1, got 2.5"),
        (lambda: Costs(token_budget=NAN), "at least 1, got nan"),
    ],
)
def test_prices_that_nothing_has_are_refused_with_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("seconds", [-1.0, NAN, inf])
def test_a_step_of_your_own_is_refused_when_it_gives_no_time(seconds):
    """Else a clock that is nan would stand still, and who comes later would never come."""
    with pytest.raises(ValueError, match=f"at least 0, got {seconds} seconds"):
        run([(1, 1)], Costs(step=lambda stored, computed: seconds))


# --- the seconds of a run


SHARED = {"requests": [(2, 3), (2, 3)], "budget": 8, "declared": 3}
"""Two requests share 4 blocks of 2; in step 2 the second goes with 4 tokens, and is back in step 3.

Worked by hand in test_simulator.py. Stored tokens: 6, 8, 5, 5; computed: 2, 2, 1, 1.
"""


def test_the_step_is_asked_for_what_is_stored_and_what_is_computed():
    step = Watched()
    assert run(costs=Costs(step), **SHARED).seconds == 4
    assert step.calls == [(6, 2), (8, 2), (5, 1), (5, 1)]


def test_a_run_takes_the_sum_of_its_steps_and_nothing_comes_free():
    """Reading: 1 + stored / 10 seconds; multiplying: 0.9 a token, 1.8 in the first two steps."""
    result = run(costs=Costs(Roofline(10, 1, 10, 0.9, 1)), **SHARED)
    assert result.seconds == pytest.approx(1.8 + 1.8 + 1.5 + 1.5)
    assert result.tokens_per_second == pytest.approx(6 / 6.6)
    assert result.first_token == pytest.approx({0: 1.8, 1: 1.8})


def test_a_flat_charge_is_a_number_of_steps_as_long_as_the_one_it_falls_in():
    """The victim goes in step 2, which takes 1.5 seconds: 4 times that on top."""
    result = run(costs=Costs(Roofline(10, 1, 10, 0.9, 1)), recompute_steps=4, **SHARED)
    assert result.seconds == pytest.approx(6.6 + 4 * 1.5)
    constant = run(costs=Costs(ConstantStep(1)), recompute_steps=4, **SHARED)
    assert constant.seconds == constant.charged_steps == 8


def test_computing_again_takes_the_victim_s_tokens_at_the_prefill_rate():
    """4 tokens at 8 a second, before step 3: half a second."""
    result = run(costs=Costs(recovery=Recovery(prefill_rate=8)), **SHARED)
    assert (result.seconds, result.recomputed_tokens, result.swaps) == (4.5, 4, 0)
    both = run(costs=Costs(recovery=Recovery(prefill_rate=8)), recompute_steps=4, **SHARED)
    assert both.seconds == 4.5 + 4


def test_swapping_takes_the_victim_s_blocks_out_and_in():
    """2 blocks, 0.125 seconds each way. Nothing is computed again, at whatever rate."""
    recovery = Recovery(prefill_rate=8, host_blocks=2, block_seconds=0.125)
    result = run(costs=Costs(recovery=recovery), **SHARED)
    assert (result.seconds, result.recomputed_tokens, result.swaps) == (4.5, 0, 1)


def swap_loop(host_blocks, requests=(23, 23), length=26):
    """Blocks of 8, 6 of them; after 1 + 1 stored tokens the second request goes with 3 blocks."""
    jobs = Jobs(paged, Limits(6, 8), list(requests), [length] * len(requests), [0, 1], None)
    costs = Costs(recovery=Recovery(host_blocks=host_blocks))
    loop = StepLoop(jobs, Counts(), newest, costs)
    loop.run()
    return loop


@pytest.mark.parametrize(
    ("host_blocks", "swaps", "recomputed"),
    [(0, 0, 24), (1, 0, 24), (2, 0, 24), (3, 1, 0), (4, 1, 0)],
)
def test_a_host_pool_too_small_for_a_victim_falls_back_to_recompute(host_blocks, swaps, recomputed):
    """Source: vllm-project/vllm tests/core/test_block_manager.py (swap); #546, #787"""
    loop = swap_loop(host_blocks)
    assert (loop.counts.preemptions, loop.counts.swaps) == (1, swaps)
    assert loop.counts.recomputed_tokens == recomputed
    assert loop.host_free == host_blocks
    assert loop.counts.finished == 2


def test_the_host_pool_is_full_while_a_victim_lies_there():
    """6 blocks of 2; three requests of 3 + 5 tokens, 2 blocks each, of which 1 and 2 must go.

    Step 1: all have 4 tokens. Request 0 needs a block, 2 goes; request 1 takes what is left.
    Step 3: request 0 needs another, and 1 goes with 6 tokens in 3 blocks; it waits ahead of 2.
    Step 5: request 0 has ended, both are back, 1 takes the last block, and 2 goes with 4 tokens.
    Step 6: it is back, and goes at once: 1 ends in this step only. In steps 7 to 10 it is alone.
    4 blocks on the host hold request 2, but not 1 beside it; 5 hold both.
    """
    three = {"requests": [(3, 5)] * 3, "budget": 12, "declared": 5}
    for host_blocks, swaps, recomputed in ((1, 0, 4 + 6 + 4 + 4), (4, 3, 6), (5, 4, 0)):
        result = run(costs=Costs(recovery=Recovery(host_blocks=host_blocks)), **three)
        assert result.history.victims == [(1, 2), (3, 1), (5, 2), (6, 2)]
        assert (result.swaps, result.recomputed_tokens) == (swaps, recomputed)
        assert result.steps == 11


def test_a_block_taken_ahead_and_still_empty_is_not_copied():
    """3 blocks of 2. Step 0: request 0 takes the third one for its next token; then it must go.

    It has 2 tokens in 1 block, and the host has room for 1. It is back when request 1 has ended.
    """
    recovery = Recovery(host_blocks=1, block_seconds=0.5)
    costs, pool = Costs(recovery=recovery), {"budget": 6, "declared": 2}
    result = run([(2, 2), (2, 1)], costs, victim=oldest, **pool)
    assert result.history.victims == [(0, 0)]
    assert (result.swaps, result.recomputed_tokens) == (1, 0)
    assert result.seconds == 3 + 2 * 0.5


def test_a_victim_may_be_swapped_once_and_computed_the_next_time():
    """5 blocks of 2, and 2 on the host. Three requests of 3 + 5 tokens; the second always goes.

    Steps 1, 2 and 3: with 4 tokens in 2 blocks it finds no third, and goes to the host and back.
    Step 5: request 0 has ended; it takes a third block, and request 2 comes in. Step 6: request 2
    needs one too: the second goes with 5 tokens in 3 blocks. Step 10: it is alone, and stores 3.
    12 copies of a block take 6 seconds, and 5 tokens that are computed half a second.
    """
    recovery = Recovery(prefill_rate=10, host_blocks=2, block_seconds=0.5)
    result = run(
        [(3, 5)] * 3,
        Costs(recovery=recovery),
        budget=10,
        declared=5,
        victim=lowest_priority([0, 1, 0]),
    )
    assert result.history.victims == [(1, 1), (2, 1), (3, 1), (6, 1)]
    assert (result.swaps, result.recomputed_tokens, result.steps) == (3, 5, 13)
    assert result.seconds == 13 + 3 * 2 * 2 * 0.5 + 5 / 10


# --- arrivals


def late(arrivals, requests):
    prompts, outputs = np.array(requests).T
    return Workload("late", prompts, outputs, arrivals)


def test_requests_come_when_they_come_worked_by_hand():
    """One second a step. Request 0 is alone in step 0; 1 comes after half a second.

    It joins in step 1 and has its first token 2 seconds after the start, 1.5 after it came.
    Both have gone by second 3. Request 2 comes at second 10, and waits for nobody.
    """
    workload = late(np.array([0.0, 0.5, 10.0]), [(2, 2), (2, 2), (2, 1)])
    result = run(workload, arrivals=True)
    assert (result.steps, result.seconds) == (4, 11)
    assert result.first_token == {0: 1, 1: 1.5, 2: 1}
    assert result.history.admitted == [(0, 0), (1, 1), (3, 2)]
    assert result.history.waiting == [2, 1, 1, 0]  # who has not come yet waits
    assert result.mean_resident == 5 / 4  # but nobody ever stood in the queue
    assert result.unreserved == 0


def test_arrivals_are_ignored_unless_they_are_asked_for():
    workload = late(np.array([0.0, 50.0]), [(2, 2), (2, 2)])
    assert run(workload).seconds == 2


def test_arrivals_alone_take_steps_of_one_second():
    workload = late(np.array([0.0, 5.0]), [(2, 2), (2, 1)])
    result = simulate(paged, workload, arrivals=True)
    assert (result.steps, result.seconds, result.swaps) == (3, 6, 0)


def test_a_queue_makes_those_who_come_later_wait():
    """One fits at a time, two steps each; a new one comes every second: 1, 2, 3, ... seconds."""
    workload = late(np.arange(5.0), [(4, 2)] * 5)
    result = simulate(reserve_limit, workload, 6, declared=2, arrivals=True)
    assert result.first_token == {i: 1 + i for i in range(5)}
    assert result.seconds == 10


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        (None, "nothing is known of the arrivals of late"),
        (np.array([0.0]), "1 arrivals for 2 requests"),
        (np.array([0.0, NAN]), "in order and from 0 on, request 1 comes at nan"),
        (np.array([0.0, inf]), "request 1 comes at inf"),
        (np.array([2.0, 1.0]), "request 1 comes at 1.0"),
        (np.array([-1.0, 1.0]), "request 0 comes at -1.0"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(arrivals, message):
    """Source: Azure/AzurePublicDataset #53 (rows out of order)"""
    with pytest.raises(ValueError, match=message):
        run(late(arrivals, [(2, 2), (2, 2)]), arrivals=True)


# --- prompts in pieces


def test_prompts_are_computed_in_pieces_worked_by_hand():
    """4 tokens a step; prompts of 6 and 3, both with 2 tokens to answer.

    Step 0: 4 of the first prompt. Step 1: its last 2, and 2 of the second; now request 0 has its
    first token. Step 2: request 0 stores a token, and 1 is left of the second prompt. Steps 3 and
    4: what remains. Cached: 4, 6 + 2, 7 + 3, 8 + 4, and 5 when the other has gone.
    """
    step = Watched()
    result = run([(6, 2), (3, 2)], Costs(step, token_budget=4), declared=2)
    assert step.calls == [(4, 4), (8, 4), (10, 2), (12, 2), (5, 1)]
    assert result.history.stored == [4, 8, 10, 12, 5]
    assert result.first_token == {0: 2, 1: 3}
    assert (result.steps, result.seconds, result.output_tokens) == (5, 5, 4)


def test_answers_go_before_prompts():
    """2 tokens a step. Two prompts are computed in step 0; their answers take all there is.

    They end in step 4; the next two take steps 5 to 9, and the prompt of 4 has the rest.
    """
    step = Watched()
    result = run([(1, 4)] * 4 + [(4, 1)], Costs(step, token_budget=2), declared=4)
    assert [computed for _, computed in step.calls] == [2] * 12 + [1]
    assert result.first_token == {0: 1, 1: 1, 2: 6, 3: 6, 4: 12}


def test_a_victim_s_tokens_are_a_prompt_again():
    """4 blocks of 2, 8 tokens a step. Step 0: both prompts. Steps 1 to 3 as in the run without.

    In step 3 the second goes with 4 tokens. Step 4: they are computed again. Step 5: the last one.
    """
    step = Watched()
    result = run(costs=Costs(step, token_budget=8), **SHARED)
    assert [computed for _, computed in step.calls] == [4, 2, 2, 1, 4, 1]
    assert (result.recomputed_tokens, result.steps) == (4, 6)


def test_a_swapped_victim_has_no_prompt_to_compute():
    step = Watched()
    recovery = Recovery(host_blocks=2, block_seconds=1)
    result = run(costs=Costs(step, recovery, token_budget=8), **SHARED)
    assert [computed for _, computed in step.calls] == [4, 2, 2, 1, 1]
    assert (result.recomputed_tokens, result.swaps, result.seconds) == (0, 1, 5 + 4)


def test_only_what_was_computed_can_be_lost():
    """6 blocks of 2; 2 tokens a step. Step 0: request 0's prompt. The other's 8 tokens take longer.

    Steps 1 and 2: a token for request 0, and one of that prompt. Step 3: request 0 needs a third
    block, and the other goes, with 2 of its 8 tokens. It needs 4 blocks, and they are free when
    request 0 has ended, in step 8: steps 9 to 12 compute its prompt, and 13 its answer.
    """
    step = Watched()
    costs = Costs(step, token_budget=2)
    result = run([(2, 8), (8, 1)], costs, budget=12, declared=[8, 1])
    assert result.history.victims == [(3, 1)]
    assert [computed for _, computed in step.calls] == [2] * 3 + [1] * 6 + [2] * 4 + [1]
    assert result.recomputed_tokens == 2


def test_under_a_budget_those_whose_prompt_is_computed_go_first():
    """4 blocks of 4, 8 tokens a step; both requests have 8 + 4 tokens.

    Step 1: request 0 has its prompt and needs a third block. By its rule the oldest would go, which
    is itself; it would come back while the other needs its own third block, and so on: no token
    would ever be stored. So the other one goes, with none of its tokens computed.
    """
    costs = Costs(token_budget=8)
    result = run([(8, 4)] * 2, costs, block_size=4, budget=16, declared=4, victim=oldest)
    assert result.history.victims == [(1, 1)]
    assert (result.finished, result.recomputed_tokens) == (2, 0)


def test_the_fast_way_counts_no_seconds():
    result = simulate(paged, [(2, 2)])
    assert result.seconds is None
    with pytest.raises(ValueError, match="simulate with costs"):
        _ = result.tokens_per_second
    assert simulate(paged, [], costs=Costs()).tokens_per_second == 0
