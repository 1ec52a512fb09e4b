"""Each rule for coming in and each rule for going, against a trace worked by hand."""

import ast
import inspect

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from labcore import admission
from labcore.admission import (
    Limits,
    Policy,
    Resident,
    Server,
    decaying_ratio,
    expect_declared,
    expect_like_others,
    fewest_generated,
    future_peak,
    least_computed,
    lowest_priority,
    may_enter,
    newest,
    oldest,
    oracle,
    paged,
    reserve_limit,
    reserve_max,
    reserve_power_of_2,
)
from labcore.costs import Costs
from labcore.simulator import simulate
from labcore.workloads import Workload, draw

LIMITS = Limits(num_blocks=10, block_size=4, declared=16, max_context=64)


def run(policy, requests, **settings):
    """By the step loop, which also counts the tokens that victims lose."""
    settings = {"block_size": 4, "costs": Costs()} | settings
    return simulate(policy, requests, history=True, **settings)


# --- who may come in


def test_room_for_the_longest_sequence_lets_one_in_at_a_time_worked_by_hand():
    """A context of 12 and a pool of 20 tokens: 12 are set aside, and 8 are too few for another."""
    result = run(reserve_max, [(4, 3), (4, 2)], budget=20, block_size=1, max_context=12)
    assert result.history.admitted == [(0, 0), (3, 1)]
    assert result.history.free == [8] * 5


def test_room_for_the_declared_limit_lets_three_in_worked_by_hand():
    """4 + 5 tokens each are set aside, and the pool has 27."""
    result = run(reserve_limit, [(4, 3)] * 4, budget=27, block_size=1, declared=5)
    assert result.history.admitted == [(0, 0), (0, 1), (0, 2), (3, 3)]
    assert result.history.free == [0, 0, 0, 18, 18, 18]


def test_room_for_the_next_power_of_two_lets_two_in_worked_by_hand():
    """The same as above, but 4 + 8 tokens are set aside: two fit into 27, and 3 stay free."""
    result = run(reserve_power_of_2, [(4, 3)] * 4, budget=27, block_size=1, declared=5)
    assert result.history.admitted == [(0, 0), (0, 1), (3, 2), (3, 3)]
    assert result.history.free == [3] * 6


@pytest.mark.parametrize(
    ("declared", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (512, 512), (513, 1024)]
)
def test_only_the_declared_limit_is_rounded_up_to_a_power_of_two(declared, power):
    limits = Limits(10_000, 1, declared, max_context=8_192)
    assert reserve_power_of_2.set_aside(7, 7, limits) == 7 + power
    assert reserve_power_of_2.set_aside(8_190, 8_190, limits) == min(8_190 + power, 8_192)


def test_a_decaying_ratio_worked_by_hand():
    """10 blocks of 4. All declare 16 tokens and use them. The ratio starts at 1/2, 0 after 4 steps.

    Step 0: request 0 comes in, as nothing runs: 9 blocks, 36 tokens, are free. Request 1 needs
    4 + 16, and half of the other's 16 count as taken: 28 of 36. Request 2: 20 + 16 of 32, waits.
    Both that run take a second block: 24 tokens stay free until step 4. Step 1: 20 + 30 * 3/8 =
    31.25, waits. Step 2: 20 + 28/4 = 27, waits. Step 3: 20 + 26/8 = 23.25 of 24: comes in.
    All three have to grow to 5 blocks. Step 8: request 1 needs its fourth, and 4 + 3 + 3 are taken:
    request 2, the newest, goes with 9 tokens. In step 9 it may not come back, and not until the
    others have ended, in step 15. It comes in at 16 and stores its last 11 tokens.
    """
    policy = decaying_ratio(start=0.5, factor=0, steps=4)
    result = run(policy, [(4, 16)] * 3, budget=40, declared=16)
    assert result.history.admitted == [(0, 0), (0, 1), (3, 2), (16, 2)]
    assert result.history.victims == [(8, 2)]
    assert result.history.free[:9] == [6, 6, 6, 4, 2, 2, 2, 1, 2]
    assert (result.steps, result.recomputed_tokens) == (27, 9)


def enters(policy, request, running, num_free, **known):
    return may_enter(policy, request, 1, Server(running, num_free, **known), LIMITS)


def test_the_ratio_stops_falling_and_is_whole_again_after_a_preemption():
    """One runs and has 10 tokens to come; the newcomer needs 4 + 16: 20 + ratio * 10 of 4n tokens.

    The ratio is 0.8 at first, 0.6 half-way, and 0.8 * 0.5 from step 100 on: 28, 26 and 24 tokens.
    """
    policy = decaying_ratio(start=0.8, factor=0.5, steps=100)
    running, newcomer = [Resident(0, 4, 10, declared=16)], Resident(1, 4, 4, declared=16)
    for calm_steps, blocks in ((0, 7), (50, 7), (99, 7), (100, 6), (10_000, 6)):
        assert enters(policy, newcomer, running, blocks, calm_steps=calm_steps)
        assert not enters(policy, newcomer, running, blocks - 1, calm_steps=calm_steps)


def test_a_preemption_begins_the_decay_again_worked_by_hand():
    """7 blocks of 2; the ratio is 1, then 1/2, then 0. 2 + 5, 2 + 7 and 4 + 4 tokens are declared.

    Step 0: request 0 is in, 12 tokens are free, and 9 + 5 are too many. Step 1: 9 + 4/2 of 10 are.
    Step 2: request 1 needs 9 of 10, comes in and takes 2; request 2 needs 8 of 8. Then each wants a
    block more, and there are 2: request 2 goes. Request 0 ends. Step 3: 10 tokens are free, and
    8 + 6/2 are too many. Step 4: 8 + 5 * 0 are not.
    """
    policy = decaying_ratio(start=1, factor=0, steps=2)
    requests, pool = [(2, 3), (2, 4), (4, 1)], {"budget": 14, "declared": [5, 7, 4]}
    result = run(policy, requests, block_size=2, **pool)
    assert result.history.admitted == [(0, 0), (2, 1), (2, 2), (4, 2)]
    assert result.history.victims == [(2, 2)]
    assert result.history.free == [5, 5, 2, 5, 1, 4]


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([0, 0.25, 0.5, 1]),
    factor=st.sampled_from([0, 0.5, 1]),
    running=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=6),
    num_free=st.integers(1, 40),
    calm_steps=st.integers(0, 30),
)
def test_a_ratio_lies_between_its_start_and_what_it_decays_to(
    start, factor, running, num_free, calm_steps
):
    """So it never lets in what would not fit at the end of its decay, nor keeps out what does now.

    And the longer nobody is preempted, the more may come in.
    """
    policy, newcomer = decaying_ratio(start, factor, steps=20), Resident(9, 4, 4, declared=16)
    residents = [Resident(i, 4, 4 + n, declared=m) for i, (n, m) in enumerate(running)]
    to_come = sum(max(0, m - n) for n, m in running)
    now, later = (
        enters(policy, newcomer, residents, num_free, calm_steps=calm)
        for calm in (calm_steps, calm_steps + 1)
    )
    assert later >= now
    room = 4 * num_free - 20
    assert now or start * to_come > room - 1e-9
    assert not now or start * factor * to_come <= room + 1e-9


def test_tokens_beyond_the_declared_limit_count_as_none_to_come():
    policy = decaying_ratio(start=1, factor=1)
    running = [Resident(0, 4, 30, declared=16), Resident(1, 4, 20, declared=16)]
    assert enters(policy, Resident(2, 4, 4, declared=16), running, 5)  # 4 + 16 of 20
    assert not enters(policy, Resident(2, 4, 5, declared=17), running, 5)
    assert enters(policy, Resident(2, 4, 20, declared=10), running, 5)


def test_the_peak_of_future_memory_worked_by_hand():
    """6 blocks of 4; all use what they declare: 4 + 8, 4 + 4 and 8 + 4 tokens.

    Step 0: requests 0 and 1 come in: when 1 ends, both have 8 tokens, 4 blocks. With request 2
    there would be 3 more in that moment, 7. Step 3: 1 ends. Step 4: request 0 has 4 tokens to come,
    and so has request 2: 3 + 3 blocks when both end. It comes in, and nobody ever has to go.
    By what is free alone it comes in at once, is sent away in the same step, and again in the next.
    """
    requests, pool = [(4, 8), (4, 4), (8, 4)], {"budget": 24, "declared": [8, 4, 4]}
    result = run(future_peak(), requests, **pool)
    assert result.history.admitted == [(0, 0), (0, 1), (4, 2)]
    assert result.history.free == [2] * 4 + [0] * 4
    assert result.preemptions == 0
    by_free_blocks = run(paged, requests, **pool)
    assert by_free_blocks.history.admitted[2] == (0, 2)
    assert by_free_blocks.history.victims[:2] == [(0, 2), (1, 2)]


def test_the_peak_may_come_when_the_longest_answer_ends():
    """8 blocks of 4. 2 tokens are stored in each; 6 are to come in one and 30 in the other.

    When the short one ends both have 8 tokens: 4 blocks. When the long one ends it has 32, alone:
    8 blocks. A third one with 30 to come would make 16 then.
    """
    limits, policy = Limits(8, 4, max_context=64), future_peak()
    short, long = Resident(0, 1, 2, declared=7), Resident(1, 1, 2, declared=31)
    assert may_enter(policy, long, 1, Server([short], 7), limits)
    assert may_enter(policy, short, 1, Server([long], 7), limits)
    assert not may_enter(policy, long, 1, Server([short], 6), Limits(7, 4, max_context=64))
    assert not may_enter(
        policy, Resident(2, 1, 2, declared=31), 1, Server([short, long], 6), limits
    )


def test_the_past_tells_how_long_answers_are_worked_by_hand():
    """8 blocks of 4; all declare 16 tokens and use 4.

    By what they declare each will fill 5 blocks, so they run one by one, four steps each. By the
    past: request 0 runs alone, as nothing is known yet. It ends with 4 tokens in step 3. In step 4
    request 1 comes in, and 2, 3 and 4 with it: 2 blocks each at the end. Request 5 waits for them.
    """
    requests, pool = [(4, 4)] * 6, {"budget": 32, "declared": 16}
    declared = run(future_peak(), requests, **pool)
    assert declared.history.admitted == [(4 * i, i) for i in range(6)]
    past = run(future_peak(expect_like_others()), requests, **pool)
    assert past.history.admitted == [(0, 0), (4, 1), (4, 2), (4, 3), (4, 4), (8, 5)]
    assert past.steps == 12
    assert past.preemptions == declared.preemptions == 0


def test_the_past_promises_nothing():
    """As above, but after the first answer of 4 tokens come four of 12: 4 x 4 blocks are too many.

    All are expected to end at 8 tokens. In step 8 each has them and needs a third block: the two
    newest go, and 3 + 3 blocks are in use.
    """
    result = run(
        future_peak(expect_like_others()), [(4, 4)] + [(4, 12)] * 4, budget=32, declared=16
    )
    assert result.history.admitted[1:5] == [(4, 1), (4, 2), (4, 3), (4, 4)]
    assert result.history.victims[:2] == [(8, 4), (8, 3)]
    assert (result.history.free[8], result.finished) == (2, 5)


@pytest.mark.parametrize(
    ("quantile", "generated", "expected"),
    [
        (0, 5, 1),
        (0.5, 5, 3),
        (0.9, 5, 3),
        (1, 5, 5),
        (0.5, 0, 6),
        (1, 9, 1),
        (1, 10, 6),
        (1, 30, 1),
    ],
)
def test_a_quantile_is_of_the_answers_that_were_longer(quantile, generated, expected):
    """Answers had 2, 4, 6, 8, 10 tokens; after 5 tokens only 6, 8 and 10 are still possible.

    When none was longer, what is declared counts, here 16 tokens; beyond them 1 is to come.
    """
    server = Server([], 10, answer_lengths=[2, 4, 6, 8, 10])
    request = Resident(0, 7, 7 + generated, declared=16)
    assert expect_like_others(quantile)(request, server, LIMITS) == expected


def test_what_is_declared_ends_where_the_context_does():
    server = Server([], 10)
    assert expect_declared(Resident(0, 60, 61, declared=16), server, LIMITS) == 3
    assert expect_declared(Resident(0, 4, 8, declared=16), server, LIMITS) == 12
    assert expect_declared(Resident(0, 4, 20, declared=16), server, LIMITS) == 1
    assert expect_declared(Resident(0, 4, 30, declared=16), server, LIMITS) == 1


def test_the_oracle_worked_by_hand():
    """6 blocks of 4; all declare 16 tokens, and use 4, 8, 4 and 4.

    Step 0: requests 0, 1 and 2 come in: when 0 and 2 end all have 8 tokens, 6 blocks. Request 3
    would make it 8. Step 4: 1 has 4 tokens to come: 3 + 2 blocks when it ends together with 3.
    By what is declared each would fill 5 blocks, and they run one by one: 20 steps.
    """
    outputs = [4, 8, 4, 4]
    requests, pool = [(4, output) for output in outputs], {"budget": 24, "declared": 16}
    result = run(oracle(outputs), requests, **pool)
    assert result.history.admitted == [(0, 0), (0, 1), (0, 2), (4, 3)]
    assert (result.steps, result.preemptions) == (8, 0)
    assert run(future_peak(), requests, **pool).steps == 20


def test_the_oracle_knows_where_the_context_ends():
    """62 of at most 64 tokens are there: whatever was asked for, 2 are to come."""
    limits, policy = Limits(32, 4, max_context=64), oracle([1_000, 14])
    first, second = Resident(0, 40, 62), Resident(1, 40, 52)
    assert may_enter(policy, second, 13, Server([first], 16), limits)  # 16 + 14 blocks; then 14
    assert not may_enter(policy, second, 13, Server([first], 14), Limits(29, 4, max_context=64))


def test_whatever_fits_comes_in_when_nothing_runs():
    def never(request, server, limits):
        return False

    policy = Policy("never", paged.set_aside, grows=True, admits=never)
    newcomer = Resident(0, 4, 4, declared=100)
    assert may_enter(policy, newcomer, 10, Server([], 10), LIMITS)
    assert not may_enter(policy, newcomer, 11, Server([], 10), LIMITS)
    assert not may_enter(policy, newcomer, 1, Server([Resident(1, 4, 4)], 10), LIMITS)
    assert run(policy, [(4, 2)] * 3, budget=40, declared=4).history.running == [1] * 6


def test_a_rule_sees_the_answers_that_have_ended_in_order_of_length():
    """Two run at a time. Answers of 5 and then of 1 have ended when the last one comes."""
    seen = []

    def admits(request, server, limits):
        seen.append((request.index, list(server.answer_lengths)))
        return len(server.running) < 2

    policy = Policy("two", paged.set_aside, grows=True, admits=admits)
    run(policy, [(1, 5), (1, 9), (1, 1), (1, 2)], declared=9)
    assert seen[0] == (1, [])
    assert seen[-2:] == [(3, [5]), (3, [1, 5])]


@pytest.mark.parametrize("policy", [decaying_ratio(0, 0), future_peak(lambda *seen: 1)])
def test_no_rule_lets_in_what_finds_too_few_free_blocks(policy):
    running = [Resident(0, 4, 5, declared=0)]
    assert may_enter(policy, Resident(1, 1, 1, declared=0), 1, Server(running, 1), LIMITS)
    assert not may_enter(policy, Resident(1, 1, 1, declared=0), 2, Server(running, 1), LIMITS)


# --- who must go


def test_the_oldest_goes_worked_by_hand():
    """Blocks of 2 tokens, 4 blocks; two requests of 2 + 3 tokens come in with 1 block each.

    Step 0: each takes a second block. Step 2: request 0 needs a third block and none is free; it is
    the oldest, so it goes itself. Request 1 takes one block of the two, stores token 5 and leaves.
    Step 3: request 0 comes back with 4 tokens in 2 blocks, takes a third and leaves.
    """
    result = run(paged, [(2, 3), (2, 3)], budget=8, block_size=2, declared=3, victim=oldest)
    assert result.history.victims == [(2, 0)]
    assert result.history.admitted == [(0, 0), (0, 1), (3, 0)]
    assert result.history.free == [0, 0, 1, 1]
    assert (result.steps, result.recomputed_tokens) == (4, 4)


THREE = [(8, 4), (1, 6), (4, 4)]


def test_the_least_computed_goes_worked_by_hand():
    """6 blocks of 4. Prompts of 8, 1 and 4 tokens; after step 0 they hold 3, 1 and 2 blocks.

    Step 3: request 1 has 4 tokens and needs a second block. The others have 12 and 7, so it goes
    itself; they end in this step. Step 4: it is back with its 4 tokens and stores 3 more.
    """
    result = run(paged, THREE, budget=24, declared=6, victim=least_computed)
    assert result.history.victims == [(3, 1)]
    assert result.history.free == [0, 0, 0, 1, 4, 4, 4]
    assert (result.steps, result.recomputed_tokens) == (7, 4)


def test_the_newest_and_the_fewest_generated_go_where_the_least_computed_stays():
    """The same run: by either of these rules request 2 goes in step 3, with 7 tokens."""
    for victim in (newest, fewest_generated):
        result = run(paged, THREE, budget=24, declared=6, victim=victim)
        assert result.history.victims == [(3, 2)]
        assert result.recomputed_tokens == 7


@pytest.mark.parametrize(
    ("classes", "victim", "lost"),
    [
        ([1, 0, 0], 0, 11),
        ([1, 1, 0], 1, 4),
        ([0, 1, 1], 2, 7),
        ([0, 0, 0], 2, 7),
        ([2, 1, 1], 0, 11),
    ],
)
def test_the_largest_class_goes_and_there_the_later_arrival_worked_by_hand(classes, victim, lost):
    """The same run as above. In step 3 requests 0, 1 and 2 have 11, 4 and 7 tokens.

    Request 0 stores token 12 in place, request 1 asks for a block. Who goes comes back in step 4.
    """
    result = run(paged, THREE, budget=24, declared=6, victim=lowest_priority(classes))
    assert result.history.victims == [(3, victim)]
    assert result.history.admitted[3:] == [(4, victim)]
    assert result.recomputed_tokens == lost


def test_one_victim_or_two_depend_on_the_rule_and_so_do_the_tokens_lost():
    """Source: vllm-project/vllm #54644, #53723, #54530 (one block is needed, then three at once)"""
    blocks, tokens = {1: 7, 2: 2, 3: 4}, {1: 100, 2: 20, 3: 60}
    for rule, needed, victims, lost in (
        (newest, 1, [3], 60),
        (least_computed, 1, [2], 20),
        (oldest, 1, [1], 100),
        (newest, 3, [3], 60),
        (least_computed, 3, [2, 3], 80),
        (oldest, 3, [1], 100),
    ):
        running = [Resident(1, 50, 100), Resident(2, 5, 20), Resident(3, 30, 60)]
        freed, gone = 0, []
        while freed < needed:
            victim = rule(running)
            running.remove(victim)
            gone.append(victim.index)
            freed += blocks[victim.index]
        assert gone == victims
        assert sum(tokens[i] for i in gone) == lost


def test_among_equals_the_later_arrival_goes_wherever_it_was_admitted():
    """Source: vllm-project/vllm #54644; inference-sim's rule for ties"""
    for order in ([4, 9], [9, 4]):
        running = [Resident(i, 5, 8) for i in order]
        for rule in (fewest_generated, least_computed, lowest_priority([0] * 10)):
            assert rule(running).index == 9


VICTIMS = {
    "newest": newest,
    "oldest": oldest,
    "fewest_generated": fewest_generated,
    "least_computed": least_computed,
    "lowest_priority": lowest_priority([i % 3 for i in range(200)]),
}


@pytest.mark.parametrize("budget", [None, 32])
@pytest.mark.parametrize("name", VICTIMS)
def test_every_rule_ends_every_run(name, budget):
    """Source: vllm-project/vllm #54644, #41951, #51574"""
    costs = Costs(token_budget=budget)
    result = run(paged, draw("chat", 200), victim=VICTIMS[name], budget=2_048, costs=costs)
    assert result.finished == 200
    assert result.preemptions > 50


def test_a_preempted_request_waits_for_all_it_needs_and_ahead_of_later_arrivals():
    """8 blocks of 4. Request 0 has a prompt of 4 and stores 16; request 1 a prompt of 10.

    Step 8: they hold 3 and 5 blocks; request 0 needs a fourth, so request 1 goes with 18 tokens.
    Its prompt alone needs 3 blocks, and there are 4 free, then 3 from step 12 on; all of it needs
    5. Request 2, which comes after 9 steps, would fit at any time. Step 15: request 0 ends.
    Source: vllm-project/vllm #25538, #28018, #21793; ai-dynamo #9718, #9721, #10439
    """
    arrivals = np.array([0.0, 0.0, 9.0])
    requests = Workload("three", np.array([4, 10, 1]), np.array([16, 9, 1]), arrivals)
    result = run(paged, requests, budget=32, declared=16, arrivals=True, recompute_steps=0)
    assert result.history.victims == [(8, 1)]
    assert result.history.admitted == [(0, 0), (0, 1), (16, 1), (16, 2)]
    assert result.history.free[8:16] == [4] * 4 + [3] * 4
    assert result.history.running[8:17] == [1] * 8 + [2]


# --- what cannot be, and what is said of it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decaying_ratio(1.2), "two fractions and a number of steps, got 1.2, 0.14, 600"),
        (lambda: decaying_ratio(-0.1), "got -0.1, 0.14, 600"),
        (lambda: decaying_ratio(factor=2), "got 0.7, 2, 600"),
        (lambda: decaying_ratio(factor=-1), "got 0.7, -1, 600"),
        (lambda: decaying_ratio(steps=0), "got 0.7, 0.14, 0"),
        (lambda: decaying_ratio(float("nan")), "got nan, 0.14, 600"),
        (lambda: decaying_ratio(factor=float("nan")), "got 0.7, nan, 600"),
        (lambda: decaying_ratio(steps=float("nan")), "got 0.7, 0.14, nan"),
        (lambda: expect_like_others(2), "a quantile is between 0 and 1, got 2"),
        (lambda: expect_like_others(-0.5), "a quantile is between 0 and 1, got -0.5"),
        (lambda: expect_like_others(float("nan")), "a quantile is between 0 and 1, got nan"),
    ],
)
def test_rules_that_cannot_be_are_refused_with_their_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_oracle_that_knows_too_few_answers_says_so():
    with pytest.raises(ValueError, match="1 outputs say nothing of request 1"):
        run(oracle([4]), [(4, 4)] * 2, budget=40, declared=4)


def test_classes_for_too_few_requests_are_refused():
    with pytest.raises(ValueError, match="2 classes say nothing of request 2"):
        run(paged, THREE, budget=24, declared=6, victim=lowest_priority([1, 1]))


ENGINES = ("vLLM", "SGLang", "LightLLM", "TensorRT", "Orca")


def what_is_said_of_policies():
    """The docstring of every function that makes a policy, the comment above every policy."""
    source = inspect.getsource(admission)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "Policy":
            yield node.name, ast.get_docstring(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Policy("):
            above = node.lineno - 1
            while lines[above - 1].startswith("#:"):
                above -= 1
            yield node.targets[0].id, "\n".join(lines[above : node.lineno - 1])


def test_where_a_policy_names_an_engine_it_says_what_is_left_out():
    said = dict(what_is_said_of_policies())
    naming = [name for name, text in said.items() if any(engine in text for engine in ENGINES)]
    assert {"reserve_max", "reserve_limit", "reserve_power_of_2", "paged"} <= set(naming)
    assert {"decaying_ratio", "future_peak"} <= set(naming)
    for name in naming:
        assert "left out" in said[name].lower(), name
