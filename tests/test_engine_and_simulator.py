"""The engine, which runs a model, takes the same decisions as the simulator, which only counts.

Both get the same requests and the same pool. What each does in each step is written as one `Step`,
and the two lists must be equal: who came in, who was sent away, how many ran, waited, had finished
or were refused, how many blocks were free and how many slots held a token.

One slot has to be accounted for. A token is stored in the step after the one that chose it, when it
is the model's input; the last token of an answer is nobody's input, so it is never stored:

    prompt of 3, answer of 4 tokens      admission    step 0    step 1    step 2
    stored                                    3          4         5         6
    chosen so far                             1          2         3         4, and it leaves

The engine stores 3 tokens for an answer of 4. To the simulator, which ends a sequence when its last
token is stored, this is a request for 3. In general a request for n tokens is one for n - 1, and a
request for 1 token, which ends as soon as its prompt is computed, has no counterpart.
"""

from random import Random
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from engines import ask, check_all_free, finish, make_engine, stub
from hypothesis import given, settings
from models import random_tokens

from labcore.admission import (
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
from labcore.costs import Costs, Recovery
from labcore.simulator import simulate


class Step(NamedTuple):
    """What happened in one step. Counts are taken before those that are done leave."""

    admitted: list[int]
    victims: list[int]
    running: int
    waiting: int
    finished: int
    refused: int
    free_blocks: int
    stored_tokens: int


def log(run) -> list[Step]:
    """The steps of an engine, or of a simulation's result."""
    history = run.history
    columns = (
        history.running,
        history.waiting,
        history.finished,
        history.refused,
        history.free,
        history.stored,
    )
    return [
        Step(
            [request for step, request in history.admitted if step == now],
            [request for step, request in history.victims if step == now],
            *counts,
        )
        for now, counts in enumerate(zip(*columns, strict=True))
    ]


def run_both(requests, num_blocks, block_size, policy=paged, **settings):
    """Serve (prompt length, answer length) pairs, with a model and without: (engine, result)."""
    rules = {"victim": newest, "watermark": 0.0, "max_context": 200} | settings
    samples, host_blocks = rules.pop("samples", 1), rules.pop("host_blocks", 0)

    engine = make_engine(stub(), num_blocks, block_size, policy, host_blocks=host_blocks, **rules)
    prompts = [random_tokens(prompt, i, vocab_size=32) for i, (prompt, _) in enumerate(requests)]
    answers = [answer for _, answer in requests]
    ask(engine, zip(prompts, answers, strict=True), samples).run()
    check_all_free(engine)

    result = simulate(
        policy,
        [(prompt, answer - 1) for prompt, answer in requests],  # the last token is not stored
        num_blocks * block_size,
        block_size,
        declared=answers,
        samples=samples,
        costs=Costs(recovery=Recovery(host_blocks=host_blocks)) if host_blocks else None,
        history=True,
        **rules,
    )
    return engine, result


def assert_same_decisions(engine, result):
    assert log(engine) == log(result)
    assert engine.refusals == result.refusals
    assert len(engine.answers) == result.finished
    if engine.host is not None:
        assert engine.host.swaps == result.swaps


def test_two_requests_in_four_blocks_worked_by_hand():
    """Blocks of 2 tokens, 4 of them; two prompts of 2 tokens, answers of 4 tokens each.

    Step 0 and 1: both take a second block and fill it. Step 2: request 0 needs a third block, so
    request 1, the newest, goes; request 0 stores its third token, chooses the fourth, and leaves.
    Step 3: request 1 comes back with 4 tokens, takes a third block, and ends in the same way.
    """
    engine, result = run_both([(2, 4), (2, 4)], num_blocks=4, block_size=2)
    assert log(engine) == [
        Step(
            [0, 1], [], running=2, waiting=0, finished=0, refused=0, free_blocks=0, stored_tokens=6
        ),
        Step([], [], running=2, waiting=0, finished=0, refused=0, free_blocks=0, stored_tokens=8),
        Step([], [1], running=1, waiting=1, finished=0, refused=0, free_blocks=1, stored_tokens=5),
        Step([1], [], running=1, waiting=0, finished=1, refused=0, free_blocks=1, stored_tokens=5),
    ]
    assert log(result) == log(engine)
    assert [len(answer) for (answer,) in engine.answers.values()] == [4, 4]


def test_a_request_for_one_token_ends_as_it_comes_in_and_takes_no_step():
    engine = make_engine(stub(), num_blocks=4, block_size=2)
    ask(engine, [([1, 2, 3], 1), ([4, 5], 1)]).run()
    assert [len(answer) for (answer,) in engine.answers.values()] == [1, 1]
    assert engine.steps == 0
    assert log(engine) == []
    check_all_free(engine)


# (median prompt, median answer): the book's workloads, a tenth as long
SHAPES = {"chat": (18, 12), "long prompt": (60, 5), "long answer": (5, 29)}


def draw(shape, num_requests=25, seed=0):
    """(prompt, answer) lengths about the medians of a shape, from half of them to twice."""
    random, (prompt, answer) = Random(f"{shape}/{seed}"), SHAPES[shape]

    def length(median, least):
        return max(least, round(median * 2 ** random.uniform(-1, 1)))

    return [(length(prompt, 1), length(answer, 2)) for _ in range(num_requests)]


POOLS = {"comfortable": 600, "tight": 250, "thrashing": 140}  # tokens


PAIRS = [  # any two of a shape, a pool and a block size meet
    (shape, pool, (1, 3, 16)[(i + j) % 3])
    for i, shape in enumerate(SHAPES)
    for j, pool in enumerate(POOLS)
]


@pytest.mark.parametrize(("shape", "pool", "block_size"), PAIRS)
def test_workloads_pools_and_block_sizes(shape, pool, block_size):
    requests = draw(shape)
    engine, result = run_both(requests, POOLS[pool] // block_size, block_size)
    assert_same_decisions(engine, result)
    assert result.finished == len(requests)
    if pool == "thrashing":
        assert result.preemptions > 0


CHAT = draw("chat", 40)
POLICIES = {
    "reserve_max": reserve_max,
    "reserve_limit": reserve_limit,
    "reserve_power_of_2": reserve_power_of_2,
    "paged": paged,
    "decaying_ratio": decaying_ratio(steps=20),
    "decaying_ratio, hopeful": decaying_ratio(start=0.1, steps=20),
    "future_peak": future_peak(),
    "future_peak like others": future_peak(expect_like_others(0.5)),
    "oracle": oracle([answer - 1 for _, answer in CHAT]),
}


@pytest.mark.parametrize(
    ("policy", "watermark"),
    [("paged", 0.0), ("paged", 0.05), *((policy, 0.2) for policy in POLICIES)],
)
def test_policies(policy, watermark):
    """A reserving policy has no use for a watermark: there is no growth to keep headroom for."""
    engine, result = run_both(CHAT, 50, 4, POLICIES[policy], watermark=watermark, max_context=100)
    assert_same_decisions(engine, result)
    assert result.finished == 40
    if policy in ("paged", "decaying_ratio, hopeful"):
        assert result.preemptions > 0
    if not POLICIES[policy].grows:
        assert result.preemptions == 0


VICTIMS = {
    "newest": newest,
    "oldest": oldest,
    "fewest_generated": fewest_generated,
    "least_computed": least_computed,
    "lowest_priority": lowest_priority([i % 3 for i in range(40)]),
}


@pytest.mark.parametrize("host_blocks", [0, 3, 12, 100])
@pytest.mark.parametrize("victim", VICTIMS)
def test_victims_computed_again_and_swapped(victim, host_blocks):
    """A sequence may be sent away in the step in which it has taken a block it has not used yet."""
    engine, result = run_both(CHAT, 37, 4, victim=VICTIMS[victim], host_blocks=host_blocks)
    assert_same_decisions(engine, result)
    assert result.preemptions > 0
    assert (host_blocks > 0) == bool(result.swaps)
    if host_blocks == 100:
        assert result.swaps == result.preemptions


@pytest.mark.parametrize(
    ("victim", "block_size", "samples"),
    [
        *(("newest", 1, 2), ("newest", 3, 3), ("newest", 16, 2)),
        *(("oldest", 1, 3), ("oldest", 3, 2), ("oldest", 16, 3)),
    ],
)
def test_groups_that_share_a_prompt(victim, block_size, samples):
    requests, num_blocks = draw("chat", 20), 300 // block_size
    engine, result = run_both(
        requests, num_blocks, block_size, samples=samples, victim=VICTIMS[victim], host_blocks=5
    )
    assert_same_decisions(engine, result)
    assert result.preemptions > 0
    assert result.swaps == 0  # a group is computed again


def test_requests_that_can_never_fit_stand_between_others():
    requests = draw("chat", 20)
    requests[3:3] = [(150, 20), (199, 2), (90, 100)]  # more than the pool, than the context, both
    requests.append((200, 5))
    engine, result = run_both(requests, 12, 8)
    assert_same_decisions(engine, result)
    assert sorted(engine.refusals) == [3, 4, 5, 23]
    assert result.finished == 20


@pytest.mark.parametrize("policy", [paged, reserve_limit, reserve_max, future_peak()])
def test_answers_that_the_context_cuts_off(policy):
    requests = [(prompt, answer + 30) for prompt, answer in draw("chat", 20) if prompt < 40]
    engine, result = run_both(requests, 30, 4, policy, max_context=40)
    assert_same_decisions(engine, result)
    for (prompt, _), (answer,) in zip(requests, engine.answers.values(), strict=False):
        assert prompt >= 1
        assert len(answer) <= 40
    cut = {i: 41 - prompt for i, (prompt, answer) in enumerate(requests) if prompt + answer > 41}
    assert cut
    assert all(len(engine.answers[i][0]) == length for i, length in cut.items())


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_that_end_before_their_limit(policy):
    """The policy sees limits of 40 tokens; end-of-text, token 0, comes when the script says.

    End-of-text is chosen when all of the answer is stored: n tokens are n to the simulator, too.
    """
    lengths = [answer for _, answer in CHAT]
    rule = oracle(lengths) if policy == "oracle" else POLICIES[policy]

    def choose(logits, rows, step):
        return [0 if step == lengths[row] else 1 for row in rows]

    engine = make_engine(stub(eos=0), 50, 4, rule, max_context=100, choose=choose)
    finish(ask(engine, [([1] * prompt, 60) for prompt, _ in CHAT]))
    assert [len(engine.answers[i][0]) for i in range(40)] == lengths
    result = simulate(rule, CHAT, 200, 4, declared=60, max_context=100, history=True)
    assert_same_decisions(engine, result)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 14), st.integers(2, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    policy=st.sampled_from([*POLICIES.values()][:-1]),
    victim=st.sampled_from([*VICTIMS.values()]),
    watermark=st.sampled_from([0.0, 0.1, 0.5]),
    samples=st.sampled_from([1, 1, 2, 3]),
    host_blocks=st.integers(0, 5),
    max_context=st.integers(4, 20),
)
def test_whatever_is_asked_for(requests, num_blocks, block_size, policy, samples, **settings):
    samples = samples if policy.grows else 1
    engine, result = run_both(requests, num_blocks, block_size, policy, samples=samples, **settings)
    assert_same_decisions(engine, result)
    assert result.finished + result.refused == len(requests)
