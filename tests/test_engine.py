"""The engine: the answers of transformers under every policy, and what servers get wrong."""

from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from engines import CountingPool, ask, check, check_all_free, finish, make_engine, stub
from models import (
    NAN,
    dense_greedy,
    odd,
    paged_cache,
    poison,
    random_tokens,
    reference,
    reference_greedy,
    tiny,
)

from labcore.admission import (
    Limits,
    Policy,
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
from labcore.caches import PagedKV
from labcore.decode import generate, greedy, sampler
from labcore.engine import Engine
from labcore.gpt2 import load_gpt2

# Against transformers

SENTENCES = (
    "It was a truth universally acknowledged",
    "Emma was very fond of her father, and",
    "Mr. Darcy had at first scarcely allowed her to be pretty; he had looked at her without",
    "She was",
    "The family of Dashwood had been long settled in Sussex",
    "Elizabeth could not but smile at this, and her sister",
)
LIMITS = (2, 3, 5, 8, 12, 16, 20, 24, 7, 14)
POOL = {"num_blocks": 28, "block_size": 4, "max_context": 48}


@cache
def sixty_requests():
    """(prompt, max_new_tokens): each of six beginnings, at ten lengths."""
    tokenizer = load_gpt2("tiny")[1]
    prompts = [tokenizer.encode(text).ids for text in SENTENCES]
    pairs = zip(product(LIMITS, range(6)), [prompts[i % 6] for i in range(60)], strict=True)
    return [(prompt, limit) for (limit, _), prompt in pairs]


@cache
def answers_of_transformers():
    """Greedy, in float64, one request at a time, with transformers' own cache.

    The answer under a lower limit is the beginning of the one under a higher limit, so each prompt
    is run once. No step is near a tie: rounding does not choose a token, not even in float32. Half
    of them reach end-of-text before the highest limit.
    """
    longest = {}
    for prompt, _ in sixty_requests():
        if tuple(prompt) not in longest:
            logits = reference_greedy(reference(), prompt, max(LIMITS))
            best, second = logits.topk(2).values.T
            assert (best - second).min() > 5e-4
            tokens = logits.argmax(-1).tolist()
            eos = reference().config.eos_token_id
            longest[tuple(prompt)] = tokens[: tokens.index(eos) if eos in tokens else None]
    assert sum(len(tokens) < max(LIMITS) for tokens in longest.values()) == 3
    return {i: [longest[tuple(p)][:limit]] for i, (p, limit) in enumerate(sixty_requests())}


NEVER_PREEMPT = {
    "reserve_max": reserve_max,
    "reserve_limit": reserve_limit,
    "reserve_power_of_2": reserve_power_of_2,
    "future_peak": future_peak(),
    "oracle": oracle([LIMITS[i // 6] - 1 for i in range(60)]),
}
BY_PRIORITY = lowest_priority([i % 3 for i in range(60)])
PREEMPT = {  # name: (policy, watermark, who is sent away, blocks on the host)
    "paged": (paged, 0.0, newest, 0),
    "paged, 5 %": (paged, 0.05, oldest, 8),
    "paged, 20 %": (paged, 0.2, newest, 100),
    "paged, fewest_generated": (paged, 0.0, fewest_generated, 0),
    "paged, lowest_priority": (paged, 0.0, BY_PRIORITY, 8),
    "decaying_ratio": (decaying_ratio(0.3, steps=20), 0.0, least_computed, 100),
    "future_peak like others": (future_peak(expect_like_others(0.3)), 0.0, oldest, 0),
}


def serve_sixty(record_property, policy, watermark=0.0, **rules):
    """An engine that has answered all of them, and each as transformers does."""
    engine = make_engine(tiny(torch.float32), **POOL, policy=policy, watermark=watermark, **rules)
    finish(ask(engine, sixty_requests()))
    record_property("steps", engine.steps)
    record_property("preemptions", len(engine.history.victims))
    assert engine.answers == answers_of_transformers()
    assert max(engine.history.running) > 1
    return engine


@pytest.mark.parametrize("name", NEVER_PREEMPT)
def test_sixty_answers_equal_those_of_transformers_where_nobody_is_sent_away(name, record_property):
    engine = serve_sixty(record_property, NEVER_PREEMPT[name])
    assert not engine.history.victims


@pytest.mark.parametrize("name", PREEMPT)
def test_sixty_answers_equal_those_of_transformers_whoever_is_sent_away(name, record_property):
    """Without room on the host all are computed again, with 8 blocks some, with 100 none."""
    policy, watermark, victim, host_blocks = PREEMPT[name]
    rules = {"victim": victim, "host_blocks": host_blocks}
    engine = serve_sixty(record_property, policy, watermark, **rules)
    preemptions = len(engine.history.victims)
    assert preemptions > 0
    if host_blocks:
        assert 0 < engine.host.swaps <= preemptions
        assert (engine.host.swaps == preemptions) == (host_blocks == 100)


@pytest.mark.parametrize("attention", ["gather", "in_place"])
def test_each_request_of_a_small_random_model_equals_a_run_alone(attention):
    """Large random weights and NaN in every slot that holds no token, in every step."""
    requests = [(random_tokens(1 + 3 * i % 11, i, 53), 2 + 5 * i % 9) for i in range(12)]
    engine = make_engine(odd(), 9, 3, host_blocks=3, attention=attention)
    finish(ask(engine, requests), spoil=True)
    assert len(engine.history.victims) > engine.host.swaps > 0
    for i, (prompt, limit) in enumerate(requests):
        assert engine.answers[i] == [dense_greedy(odd(), prompt, limit)[len(prompt) :]]


# Sampling

SAMPLED = [(random_tokens(2 + i % 5, i, 53), 4 + i % 7) for i in range(10)]


def sampled(policy=paged, num_blocks=8, samples=1, **rules):
    engine = make_engine(odd(), num_blocks, 3, policy, choose=sampler(1.0, seed=4), **rules)
    return finish(ask(engine, SAMPLED, samples), spoil=True)


def test_a_seeded_sampler_answers_the_same_under_every_policy_and_after_preemptions():
    expected = sampled(reserve_max, num_blocks=40).answers
    assert expected != finish(ask(make_engine(odd(), 40, 3), SAMPLED)).answers  # not greedy
    for policy in (paged, reserve_limit, reserve_power_of_2, future_peak(), decaying_ratio(0.0)):
        assert sampled(policy).answers == expected
    for rules in ({}, {"victim": oldest}, {"host_blocks": 4}):
        engine = sampled(**rules)
        assert engine.history.victims
        assert engine.answers == expected


def test_samples_of_one_request_differ_and_do_not_depend_on_preemptions():
    roomy, tight = sampled(samples=3, num_blocks=60), sampled(samples=3, num_blocks=14)
    assert not roomy.history.victims
    assert tight.history.victims
    assert tight.answers == roomy.answers
    for answers in tight.answers.values():
        assert len({tuple(answer) for answer in answers}) == 3


def test_an_answer_equals_that_of_generate_for_the_same_row():
    kv = paged_cache(odd(), 60, 3)
    prompts, limits = zip(*SAMPLED, strict=True)
    expected = generate(odd(), kv, prompts, max(limits), sampler(1.0, seed=4))
    answers = sampled().answers
    assert answers == {i: [row[: limits[i]]] for i, row in enumerate(expected)}


# The end of a text. Token 0 is end-of-text, and what is chosen is scripted.


def scripted(texts, default=1):
    """A `choose` that answers request `row` from texts[row], and `default` where it is silent."""

    def choose(logits, rows, step):
        return [dict(enumerate(texts.get(row, []))).get(step, default) for row in rows]

    return choose


def test_an_answer_ends_with_end_of_text_and_its_blocks_are_free_in_that_step():
    texts = {0: [5, 6, 0], 1: [7, 7, 7, 7]}
    engine = make_engine(stub(eos=0), 8, 2, choose=scripted(texts))
    ask(engine, [([1, 2, 3], 9), ([1], 4)])
    engine.step()
    assert engine.running[0].answers == [[5, 6]]
    assert engine.kv.tables.allocator.num_free == 8 - 2 - 1
    engine.step()
    assert engine.answers == {0: [[5, 6]]}
    assert engine.kv.tables.allocator.num_free == 8 - 2
    assert engine.history.free == [5, 3]  # taken before anybody leaves
    assert engine.history.stored == [4 + 2, 5 + 3]
    finish(engine)
    assert engine.answers == {0: [[5, 6]], 1: [[7, 7, 7, 7]]}


def test_a_first_token_that_is_end_of_text_is_an_empty_answer_and_takes_no_step():
    engine = make_engine(stub(eos=0), 4, 2, choose=scripted({0: [0], 1: [0]}))
    finish(ask(engine, [([1, 2, 3], 5), ([4], 5)]))
    assert engine.answers == {0: [[]], 1: [[]]}
    assert engine.steps == 0


def test_others_go_on_where_one_ends_as_it_comes_in_and_the_next_takes_its_blocks():
    """The pool holds one prompt at a time: request 0 leaves it to request 1 within one step."""
    engine = make_engine(stub(eos=0), 2, 4, choose=scripted({0: [0], 1: [3, 3, 0]}))
    finish(ask(engine, [([1] * 5, 2), ([2] * 5, 3)]))
    assert engine.answers == {0: [[]], 1: [[3, 3]]}
    assert engine.history.admitted == [(0, 0), (0, 1)]


def test_samples_of_a_group_end_one_by_one():
    texts = {(0, 0): [5, 0], (0, 1): [6, 6, 6], (0, 2): [0]}
    engine = make_engine(stub(eos=0), 8, 4, choose=scripted(texts))
    engine.submit([1] * 6, 3, samples=3)
    engine.step()
    assert [request.going for request in engine.running] == [[1]]
    assert engine.history.stored == [4 + 3 + 3]
    finish(engine)
    assert engine.answers == {0: [[5], [6, 6, 6], []]}
    assert engine.history.stored == [10, 8]


# Cancel


def four_requests(**rules):
    """Requests 0 and 1 run in two blocks each, 2 and 3 wait: 4 blocks of 4 tokens."""
    engine = make_engine(stub(), 4, 4, **rules)
    ask(engine, [([i + 1] * 5, 6) for i in range(4)])
    engine.step()
    assert [request.index for request in engine.running] == [0, 1]
    return engine


def test_a_waiting_request_is_forgotten():
    engine = four_requests()
    engine.cancel(2)
    check(engine)
    assert set(finish(engine).answers) == {0, 1, 3}


def test_the_blocks_of_a_running_request_are_free_at_once():
    engine = four_requests()
    engine.cancel(0)
    assert engine.kv.tables.allocator.num_free == 2
    check(engine)
    assert set(finish(engine).answers) == {1, 2, 3}


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_a_preempted_request_gives_up_its_place_and_its_blocks_on_the_host(host_blocks):
    """After 3 steps 8 tokens are stored, and the ninth needs a third block."""
    engine = four_requests(host_blocks=host_blocks)
    for _ in range(3):
        engine.step()
    assert engine.history.victims == [(3, 1)]
    assert [request.index for request in engine.waiting] == [1, 2, 3]
    if host_blocks:
        assert engine.host.tables.allocator.num_free == 2
    engine.cancel(1)
    if host_blocks:
        assert engine.host.tables.allocator.num_free == 4
    check(engine)
    assert set(finish(engine).answers) == {0, 2, 3}


def test_a_group_is_cancelled_as_a_whole():
    engine = make_engine(stub(), 12, 4)
    engine.submit([1] * 6, 9, samples=3)
    engine.step()
    assert engine.kv.tables.allocator.num_free == 12 - 4
    engine.cancel(0)
    assert engine.kv.tables.seq_ids() == []
    finish(engine)


def test_what_has_ended_what_was_refused_and_what_never_was_cannot_be_cancelled():
    engine = make_engine(stub(), 4, 4)
    ask(engine, [([1], 2), ([1] * 40, 2)]).run()
    engine.submit([1], 2)
    engine.cancel(2)
    for number in (0, 1, 2, 3, -1):
        with pytest.raises(KeyError):
            engine.cancel(number)
    assert set(engine.answers) == {0}
    assert set(engine.refusals) == {1}


def test_a_request_may_cancel_another_one_while_tokens_are_chosen():
    """As a client does who has seen enough: the token of request 1 is then not chosen at all."""
    asked = []

    def choose(logits, rows, step):
        asked.append((*rows, step))
        if (rows, step) == ([0], 2):
            engine.cancel(1)
        return [1]

    engine = make_engine(stub(), 8, 4, choose=choose)
    finish(ask(engine, [([1] * 3, 4), ([2] * 3, 4), ([3] * 3, 4)]))
    assert set(engine.answers) == {0, 2}
    assert max(step for row, step in asked if row == 1) == 1


def test_a_request_may_cancel_itself_while_its_token_is_chosen():
    """As for a stop string: the others' tokens are theirs, and nothing of it is left."""

    def choose(logits, rows, step):
        if (rows, step) == ([ended], 2):
            engine.cancel(ended)
        return greedy(logits, rows, step)

    requests = [([1] * 3, 4), ([2] * 3, 4), ([3] * 3, 4)]
    alone = finish(ask(make_engine(stub(), 8, 4), requests)).answers
    for ended in range(3):
        engine = make_engine(stub(), 8, 4, choose=choose)
        finish(ask(engine, requests))
        assert engine.answers == {k: v for k, v in alone.items() if k != ended}


@pytest.mark.parametrize("cancelled", [{0}, {1}, {0, 1}, {0, 1, 2}])
def test_a_rule_may_cancel_the_request_about_which_it_is_asked(cancelled):
    def admits(request, server, limits):
        if request.index in cancelled:
            engine.cancel(request.index)
        return True

    rule = Policy("cancels", paged.set_aside, grows=True, admits=admits)
    engine = make_engine(stub(), 8, 4, rule)
    engine.submit([9] * 3, 9)
    engine.step()  # alone, a request is not judged
    cancelled = {number + 1 for number in cancelled}
    ask(engine, [([1] * 3, 4), ([2] * 3, 4), ([3] * 3, 4)])
    finish(engine)
    assert set(engine.answers) == {0, 1, 2, 3} - cancelled


def test_a_request_that_cancels_itself_and_then_fails_is_not_asked_again():
    def choose(logits, rows, step):
        if (rows, step) == ([0], 1):
            engine.cancel(0)
            raise Interrupted
        return greedy(logits, rows, step)

    engine = ask(make_engine(stub(), 8, 4, choose=choose), [([1] * 3, 4), ([2] * 3, 4)])
    with pytest.raises(Interrupted):
        engine.run()
    finish(engine)
    assert set(engine.answers) == {1}


# Requests that cannot be served


def finish_with_strangers(engine):
    """`finish` where somebody else holds blocks, too."""
    while engine.waiting or engine.running:
        engine.step()
        engine.check_invariants()
        poison(engine.kv, NAN)


def test_s1_prompts_that_can_never_fit_do_not_block_the_one_behind_them():
    """Source: vllm-project/vllm #35541, PR #35570; sgl-project/sglang #14948"""
    engine = make_engine(stub(), num_blocks=49, block_size=16)
    ask(engine, [([1] * 1_002, 6)] * 5 + [([1] * 100, 20)])
    assert engine.refusals == dict.fromkeys(range(5), "needs 63 blocks, the pool has 49")
    finish(engine)
    assert list(engine.answers) == [5]
    assert len(engine.answers[5][0]) == 20


def test_s1_a_request_that_would_outgrow_the_whole_pool_is_refused_and_never_preempts_itself():
    """Source: vllm-project/vllm #2163, #2418"""
    engine = make_engine(stub(), num_blocks=2, block_size=4)
    ask(engine, [([1] * 8, 4), ([1] * 5, 3)])
    assert engine.refusals == {0: "needs 3 blocks, the pool has 2"}
    finish(engine)
    assert list(engine.answers) == [1]
    assert engine.history.victims == []


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_s1_nothing_waits_for_blocks_that_somebody_else_holds(host_blocks):
    """Strangers are in the pool: a request that finds no room alone is refused with the numbers."""
    engine = make_engine(stub(), 8, 4, host_blocks=host_blocks)
    ask(engine, [([1] * 4, 9), ([2] * 4, 20)])
    for _ in range(2):
        engine.step()
    engine.kv.tables.add("stranger", 12)
    finish_with_strangers(engine)
    assert {index for _, index in engine.history.victims} == {1}
    assert set(engine.answers) == {0}
    assert engine.refusals == {1: "cache too small: needs 1 free blocks, there are 0"}
    engine.kv.tables.add("another", 18)
    engine.submit([1] * 4, 2)
    engine.run()
    assert engine.refusals[2] == "cache too small: needs 1 free blocks, there are 0"
    engine.kv.tables.drop("another")
    engine.kv.tables.drop("stranger")
    check_all_free(engine)


def test_s1_a_preempted_request_whose_blocks_are_gone_is_refused_and_forgotten_on_the_host():
    engine = four_requests(host_blocks=2)
    for number in (2, 3):
        engine.cancel(number)
    for _ in range(3):
        engine.step()
    assert engine.host.tables.allocator.num_free == 0
    engine.cancel(0)
    engine.kv.tables.add("stranger", 12)
    engine.run()
    assert engine.refusals == {1: "cache too small: needs 2 free blocks, there are 1"}
    assert engine.host.tables.allocator.num_free == 2


def test_a_prompt_as_long_as_the_context_is_refused_and_one_token_less_is_answered():
    """One token is stored behind 39, and it chooses one more. The last is never stored."""
    engine = make_engine(odd(), 20, 4, max_context=40)
    ask(engine, [([1] * 40, 5), ([1] * 39, 5), ([1] * 41, 1)])
    finish(engine)
    assert engine.refusals == {
        0: "a prompt of 40 tokens leaves no room in a context of 40",
        2: "a prompt of 41 tokens leaves no room in a context of 40",
    }
    assert engine.answers == {1: [dense_greedy(odd(), [1] * 39, 2)[39:]]}


# Groups that are preempted


@pytest.mark.parametrize("ended", [None, 0, 1, 2])
def test_b3_a_group_comes_back_sharing_its_prompt_and_without_who_has_ended(ended, monkeypatch):
    """Three samples of a prompt of 6; one of them may have ended. Blocks of 4, five in all.

    With 1 or 2 tokens stored behind the prompt the group holds 1 shared block and one of its own
    for each sample that goes on. Without sharing three would need 6 to come back, more than there
    are. A stranger leaves it just what it needs.
    Source: vllm-project/vllm #1423, PR #2186, #4451, #8844
    """
    draw, prompt = sampler(1.0, seed=3), random_tokens(6, 1, 53)

    def choose(logits, rows, step):
        return [0] if (rows, step) == ([(0, ended)], 1) else draw(logits, rows, step)

    def submit():
        engine = make_engine(odd(eos_token_id=0), 5, 4, max_context=8, choose=choose)
        engine.submit(prompt, 3, samples=3)
        return engine

    expected, engine = finish(submit()), submit()
    lengths = [1 if sample == ended else 3 for sample in range(3)]
    assert [len(answer) for answer in expected.answers[0]] == lengths
    engine.step()
    going = 3 if ended is None else 2
    assert [len(engine.running[0].answers[s]) for s in engine.running[0].going] == [2] * going
    in_use = 1 + going
    assert engine.kv.tables.allocator.num_free == 5 - in_use
    engine._preempt(engine.running[0])
    assert engine.kv.tables.allocator.num_free == 5
    check(engine)

    written = []
    write = engine.kv.write

    def count(layer, slots, k, v):
        written.extend(slots.tolist() if layer == 0 else [])
        write(layer, slots, k, v)

    monkeypatch.setattr(engine.kv, "write", count)
    engine.kv.tables.add("stranger", 4 * (5 - in_use))
    finish_with_strangers(engine)
    assert engine.history.free[-1] == 0
    assert len(written) == 6 + going + going  # the prompt once, a token each, and the next step's
    assert engine.history.admitted == [(0, 0), (1, 0)]
    assert engine.answers == expected.answers


def test_b3_a_group_that_is_sent_away_for_another_request_says_the_same():
    """Its samples differ, so what is computed again are three answers behind one prompt."""
    answers = {}
    for num_blocks in (20, 8):
        choose = sampler(1.0, seed=1)
        engine = make_engine(odd(), num_blocks, 4, victim=oldest, max_context=12, choose=choose)
        engine.submit(random_tokens(6, 1, 53), 6, samples=3)
        engine.submit(random_tokens(4, 2, 53), 8)
        finish(engine, spoil=True)
        answers[num_blocks] = engine.answers
        assert bool(engine.history.victims) == (num_blocks == 8)
    assert (2, 0) in engine.history.victims
    assert answers[8] == answers[20]


def test_b3_a_group_that_needs_more_than_the_pool_is_refused():
    engine = make_engine(stub(), 5, 4)
    engine.submit([1] * 6, 3, samples=3)  # 9 tokens: 1 shared and 3 * 2
    assert engine.refusals == {0: "needs 7 blocks, the pool has 5"}


# Steps that end in the middle


class Interrupted(Exception):
    pass


def failing(function, when):
    """The function, whose call number `when` ends with an error; copies of no blocks never fail."""
    wrapped, calls = counting(function)

    def may_fail(*args):
        if len(calls) == when and args != ([],):
            calls.append(args)
            raise Interrupted
        return wrapped(*args)

    return may_fail


def counting(function):
    """The function, and a list of the arguments it was called with."""
    calls = []

    def wrapped(*args):
        calls.extend([args] if args != ([],) else [])
        return function(*args)

    return wrapped, calls


MIXED = [(random_tokens(2 + 2 * i, i, 53), 5 + i) for i in range(4)]
PARTS = {  # what may fail: an object, and the name of its function
    "hidden": lambda engine: (engine.model, "hidden"),
    "logits": lambda engine: (engine.model, "logits"),
    "choose": lambda engine: (engine, "choose"),
    "reserve": lambda engine: (engine.kv, "reserve"),
    "copy_blocks": lambda engine: (engine.kv, "copy_blocks"),
    "swap_out": lambda engine: (engine.host, "swap_out"),
    "swap_in": lambda engine: (engine.host, "swap_in"),
    "victim": lambda engine: (engine, "victim"),
}


def mixed(host_blocks=6, **rules):
    """Three requests of one sample and a group, in a pool that makes them preempt each other."""
    rules |= {"victim": oldest, "choose": sampler(1.0)}
    engine = make_engine(odd(), 12, 3, max_context=24, host_blocks=host_blocks, **rules)
    for i, (prompt, limit) in enumerate(MIXED):
        engine.submit(prompt, limit, samples=2 if i == 1 else 1)
    return engine


@pytest.mark.parametrize("part", PARTS)
def test_a_step_that_fails_anywhere_is_tried_again_and_loses_nothing(part, monkeypatch):
    expected = mixed()
    owner, name = PARTS[part](expected)
    wrapped, calls = counting(getattr(owner, name))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        finish(expected)
    assert {index for _, index in expected.history.victims} >= {0, 1}  # one swapped, a group not
    assert calls
    for when in range(len(calls)):
        engine, failures = mixed(), 0
        owner, name = PARTS[part](engine)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name), when))
            while engine.waiting or engine.running:
                try:
                    engine.step()
                except Interrupted:
                    failures += 1
                check(engine)
        assert failures == 1
        assert engine.answers == expected.answers
        check_all_free(engine)


def test_an_interrupted_choice_does_not_even_change_the_decisions():
    """Its logits are kept, so the step that follows is the one that would have followed."""
    expected, engine = finish(mixed()), mixed()
    engine.choose = failing(engine.choose, 7)
    with pytest.raises(Interrupted):
        engine.run()
    finish(engine)
    assert engine.history == expected.history


def test_a_request_whose_choice_failed_can_be_cancelled():
    engine = make_engine(stub(), 8, 4, choose=failing(greedy, 0))
    ask(engine, [([1] * 3, 4), ([2] * 3, 4)])
    with pytest.raises(Interrupted):
        engine.step()
    engine.cancel(0)
    finish(engine)
    assert set(engine.answers) == {1}


def test_a_victim_that_does_not_run_is_an_error_and_nobody_is_sent_away():
    engine = four_requests(victim=lambda running: engine.waiting[0])
    with pytest.raises(ValueError, match="a victim is one of those that run"):
        engine.run()
    check(engine)
    assert engine.history.victims == []
    engine.victim = newest
    finish(engine)
    assert set(engine.answers) == {0, 1, 2, 3}


# Bad input


def parts(**changes):
    kv = PagedKV(odd().config, 8, 4, torch.float64)
    return {"model": odd(), "kv": kv, "limits": Limits(8, 4, max_context=41)} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": Limits(9, 4, max_context=41)}, r"num_blocks=9.* for a pool of 8 blocks of 4"),
        ({"limits": Limits(8, 3, max_context=41)}, r"block_size=3.* for a pool of 8 blocks of 4"),
        ({"limits": Limits(8, 4, max_context=42)}, "a context of 42 in 41 positions"),
        ({"kv": PagedKV(odd().config, 8, 4)}, "torch.float32.*torch.float64"),
        ({"kv": PagedKV(odd(n_layer=3).config, 8, 4, torch.float64)}, "n_layer=3.*n_layer=2"),
        ({"kv": PagedKV(odd().config, 8, 4, torch.float64, "meta")}, "on meta;.* on cpu"),
        ({"host": CountingPool(PagedKV(odd().config, 8, 4), 4)}, "another cache"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, message):
    Engine(**parts())
    with pytest.raises(ValueError, match=message):
        Engine(**parts(**changes))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 5), ValueError, "1 samples of 5 tokens after a prompt of 0"),
        (([1], 0), ValueError, "1 samples of 0 tokens after a prompt of 1"),
        (([1], -1), ValueError, "1 samples of -1 tokens"),
        (([1], 5, 0), ValueError, "0 samples of 5 tokens"),
        (([1], 5, -2), ValueError, "-2 samples"),
        (([1.0], 5), TypeError, "float"),
        (([1], 5.0), TypeError, "float"),
        (([1], 5, 2.0), TypeError, "float"),
        (("text", 5), TypeError, "str"),
        (([3, 53, -1], 5), ValueError, r"tokens \[53, -1\] are outside a vocabulary of 53"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_it_waits(arguments, error, message):
    """A token outside the vocabulary would otherwise stop everybody in the middle of a step."""
    engine = Engine(**parts())
    with pytest.raises(error, match=message):
        engine.submit(*arguments)
    assert not engine.waiting
    assert not engine.refusals
    assert engine.submit([52], 2) == 0
    finish(engine)


@pytest.mark.parametrize("policy", [reserve_max, reserve_limit, reserve_power_of_2])
def test_a_group_is_refused_under_a_policy_that_reserves(policy):
    engine = Engine(**parts(policy=policy))
    with pytest.raises(ValueError, match=f"2 samples .* under {policy.name}"):
        engine.submit([1], 3, samples=2)


def test_a_prompt_may_be_a_tensor_or_an_iterator_and_a_choice_may_be_a_tensor():
    plain = finish(ask(Engine(**parts()), [([1, 2, 3], 4), ([4, 5], 3)]))
    engine = Engine(**parts(choose=lambda logits, rows, step: logits.argmax(-1)))
    ask(engine, [(torch.tensor([1, 2, 3]), torch.tensor(4)), (iter([4, 5]), 3)])
    assert finish(engine).answers == plain.answers
    assert all(type(token) is int for (answer,) in engine.answers.values() for token in answer)


def test_a_choice_that_is_no_token_is_an_error_and_the_next_one_counts():
    engine = Engine(**parts())
    engine.submit([1, 2, 3], 4)
    for wrong in (lambda *_: [1.5], lambda *_: [1, 2], lambda *_: []):
        engine.choose = wrong
        with pytest.raises((TypeError, ValueError)):
            engine.step()
        check(engine)
    engine.choose = greedy
    assert finish(engine).answers == {0: [dense_greedy(odd(), [1, 2, 3], 4)[3:]]}


def test_requests_may_come_while_others_run():
    engine = make_engine(odd(), 12, 4)
    requests = [(random_tokens(3 + i, i, 53), 6) for i in range(6)]
    for prompt, limit in requests:
        engine.submit(prompt, limit)
        engine.step()
        engine.step()
        check(engine)
    finish(engine)
    for i, (prompt, limit) in enumerate(requests):
        assert engine.answers[i] == [dense_greedy(odd(), prompt, limit)[len(prompt) :]]
    engine.step()  # nobody is there
    assert engine.steps == len(engine.history.running)


def test_a_chosen_token_outside_the_vocabulary_is_an_error_and_is_not_kept():
    chosen = iter([5, 32, 7])
    engine = make_engine(stub(), 4, 4, choose=lambda logits, rows, step: [next(chosen)])
    engine.submit([1, 2], 2)
    with pytest.raises(ValueError, match=r"tokens \[32\] are outside a vocabulary of 32"):
        engine.run()
    assert engine.run() == {0: [[5, 7]]}


@pytest.mark.parametrize(
    "policy",
    [
        Policy("half", lambda prompt, stored, limits: prompt + limits.declared // 2, grows=False),
        Policy("one", lambda prompt, stored, limits: 1, grows=True),
    ],
)
def test_a_policy_that_sets_too_little_aside_is_refused(policy):
    engine = make_engine(stub(), 8, 4, policy)
    with pytest.raises(ValueError, match=rf"{policy.name} sets \d tokens aside where 14 may come"):
        engine.submit([1, 2, 3, 4], 10)
    assert engine.num_requests == 0


def test_what_another_engine_left_behind_is_not_taken_for_ones_own():
    engine = make_engine(stub(), 8, 4, host_blocks=4)
    engine.submit([1] * 6, 5)
    engine.step()
    with pytest.raises(ValueError, match=r"the cache has sequences \[\(0, 0\)\]"):
        Engine(engine.model, engine.kv, engine.limits)
    engine.host.swap_out((0, 0))
    with pytest.raises(ValueError, match=r"or holds \[\(0, 0\)\]"):
        Engine(engine.model, engine.kv, engine.limits, host=engine.host)


def test_attention_that_cannot_read_the_cache_is_refused_when_the_engine_is_made():
    with pytest.raises(ValueError, match="gather, in_place, triton, got 'flash'"):
        make_engine(stub(), 9, 3, attention="flash")
    with pytest.raises(ValueError, match="got None"):
        make_engine(stub(), 9, 3, attention=None)
    with pytest.raises(TypeError, match="reads float32 and float64"):
        make_engine(deepcopy(stub()).half(), 9, 3, attention="in_place")
