"""The engine with a prefix cache: the same tokens, fewer of them computed, and nothing leaks."""

import random
from functools import cache

import pytest
import torch
from engines import CountingPool, check, check_all_free, stub
from models import NAN, dense_greedy, odd, random_tokens, tiny

from labcore import engine as engine_module
from labcore.admission import Limits, decaying_ratio, future_peak, oldest, paged, reserve_limit
from labcore.blocks import BlockAllocator
from labcore.caches import PagedKV
from labcore.decode import forward_paged_decode, prefill_packed, sampler
from labcore.engine import Engine
from labcore.gpt2 import load_gpt2
from labcore.prefix import PrefixCache


def spoil(kv):
    """Put NaN wherever neither a token of a sequence is nor one that might be found again."""
    tables, pool = kv.tables, kv.tables.allocator
    kept = torch.zeros(pool.num_blocks, tables.block_size, dtype=torch.bool)
    kept[list(getattr(pool, "_reusable", ()))] = True
    for seq_id in tables.seq_ids():
        kept.flatten()[tables.slot_mapping(seq_id)] = True
    for pool in (kv.keys, kv.values):
        pool[:, ~kept] = NAN


def make(model, num_blocks, block_size, policy=paged, allocator=PrefixCache, host=0, **rules):
    dtype, watermark = model.wte.weight.dtype, rules.pop("watermark", 0.0)
    kv = PagedKV(model.config, num_blocks, block_size, dtype, allocator=allocator)
    ids = list(range(num_blocks))
    random.Random(1).shuffle(ids)
    kv.tables.allocator.allocate_many(num_blocks)
    kv.tables.allocator.free_many(ids)
    spoil(kv)
    most = rules.pop("max_context", model.config.n_positions)
    limits = Limits(num_blocks, block_size, max_context=most, watermark=watermark)
    host = CountingPool(kv, host) if host else None
    return Engine(model, kv, limits, policy, host=host, **rules)


def finish(engine):
    """Step to the end, and check and spoil in each step."""
    tables, in_use = engine.kv.tables, []
    while engine.waiting or engine.running:
        assert engine.steps < 5_000
        steps = engine.steps
        engine.step()
        check(engine)
        spoil(engine.kv)
        if engine.steps > steps:
            in_use.append(tables.allocator.num_blocks - engine.history.free[-1])
            assert 0 < engine.history.stored[-1] <= in_use[-1] * tables.block_size
    check_all_free(engine)
    assert set(tables.allocator._ref_counts) <= {0, -1}
    return engine


@pytest.fixture
def computed(monkeypatch):
    """The tokens that each prefill has computed, in order."""
    lengths = []

    def count(model, kv, prompts):
        lengths.append(sum(map(len, prompts.values())))
        return prefill_packed(model, kv, prompts)

    monkeypatch.setattr(engine_module, "prefill_packed", count)
    return lengths


# The same tokens

SYSTEM = "It is a truth universally acknowledged, that"
QUESTIONS = ("", " Emma", " Mr. Darcy was not", " Elizabeth could not but smile", " she")


@cache
def sixty_requests():
    """(prompt, max_new_tokens, samples): two beginnings, five endings, some of them twice."""
    encode = load_gpt2("tiny")[1].encode
    prompts = [encode(SYSTEM * (i % 3 > 0) + QUESTIONS[i % 5]).ids or [0] for i in range(20)]
    draw = random.Random(0)
    return [(prompts[i % 20], draw.randint(1, 14), 1 + 2 * (i % 7 == 3)) for i in range(60)]


def served(allocator, *args, **rules):
    rules = {"choose": sampler(0.8, seed=3), "max_context": 48} | rules
    engine = make(tiny(), *args, allocator=allocator, **rules)
    for prompt, limit, samples in sixty_requests():
        engine.submit(prompt, limit, samples)
    return finish(engine)


@cache
def without_a_cache():
    return served(BlockAllocator, 200, 4).answers


@pytest.mark.parametrize(
    ("num_blocks", "rules", "preempts"),
    [
        (200, {}, False),
        (30, {}, True),
        (24, {"watermark": 0.1}, True),
        (26, {"victim": oldest, "host": 12}, True),
        (40, {"policy": decaying_ratio(0.2, steps=20)}, True),
    ],
)
def test_sixty_answers_are_the_same_with_and_without_a_prefix_cache(num_blocks, rules, preempts):
    """Hits, groups of samples that fork, preemptions and evictions, in float64."""
    engine = served(PrefixCache, num_blocks, 4, **rules)
    assert engine.answers == without_a_cache()
    assert bool(engine.history.victims) == preempts
    cache = engine.kv.tables.allocator
    assert 0.2 < cache.hits / cache.queries < 1
    if engine.host:
        assert engine.host.swaps > 0


@pytest.mark.parametrize("policy", [paged, reserve_limit, future_peak()], ids=lambda p: p.name)
def test_answers_of_a_random_model_equal_a_run_alone_in_a_pool_of_eight_blocks(policy):
    """Large random weights: a key or value of anybody else would change the answer."""
    shared = random_tokens(7, 0, 53)
    requests = [
        (shared[: 3 * (i % 3)] + random_tokens(1 + i % 4, i, 53), 3 + i % 5) for i in range(24)
    ]
    engine = make(odd(), 8, 3, policy)
    for prompt, limit in requests:
        engine.submit(prompt, limit)
    finish(engine)
    assert engine.kv.tables.allocator.hits > 0
    assert bool(engine.history.victims) == (policy is paged)
    for i, (prompt, limit) in enumerate(requests):
        assert engine.answers[i] == [dense_greedy(odd(), prompt, limit)[len(prompt) :]]


# Two equal prompts in one step


def test_equal_prompts_in_one_pass_are_both_computed_and_end_with_one_set_of_blocks():
    """Neither reads what the other has not computed yet. A ends first, then B, then C comes.

    Source: GeeeekExplorer/nano-vllm #208, #219, #243
    """
    model, prompt = tiny(), random_tokens(40, 5)
    kv = PagedKV(model.config, 12, 16, torch.float64, allocator=PrefixCache)
    pool, tables = kv.tables.allocator, kv.tables
    spoil(kv)
    texts = {name: list(prompt) for name in "AB"}
    for name in texts:
        assert pool.adopt(tables, name, prompt) == 0
    logits = prefill_packed(model, kv, texts)
    for name in texts:
        pool.publish(tables, name, prompt)
    for _ in range(10):
        assert logits[0].argmax() == logits[1].argmax()
        for text, row in zip(texts.values(), logits, strict=True):
            text.append(int(row.argmax()))
        spoil(kv)
        logits = forward_paged_decode(model, kv, list("AB"), [t[-1] for t in texts.values()])
    assert texts["A"] == texts["B"] == dense_greedy(model, prompt, 10)
    assert pool.counts() == {"in use": 2 + 2 * 2, "reusable": 0, "free": 6}
    for name, text in texts.items():
        pool.publish(tables, name, text)
        assert len(pool._blocks) == 3
        tables.drop(name)
        tables.check_invariants()
    assert pool.counts() == {"in use": 0, "reusable": 3, "free": 9}
    assert pool.adopt(tables, "C", prompt) == 32


def test_the_second_of_two_equal_prompts_finds_the_first_ones_blocks_in_the_same_step(computed):
    """The engine computes a prompt before it looks at the next one in the queue."""
    engine = make(tiny(), 12, 16)
    prompt = random_tokens(40, 5)
    for _ in range(3):
        engine.submit(prompt, 11)
    engine.step()
    assert computed == [40, 8, 8]
    assert engine.kv.tables.allocator.counts()["in use"] == 2 + 3
    finish(engine)
    answer = dense_greedy(tiny(), prompt, 11)[40:]
    assert engine.answers == {i: [answer] for i in range(3)}


# Coming back


@pytest.mark.parametrize(("taken", "hit"), [(0, 8), (4, 8), (5, 4), (6, 0)])
def test_who_comes_back_finds_what_is_left_of_its_own_blocks(computed, taken, hit):
    """11 tokens are known, in 2 full blocks and 3 slots. A stranger takes some of the 6 blocks.

    Source: GeeeekExplorer/nano-vllm #207, #211, #233
    """
    prompt = random_tokens(8, 1, 53)
    engine = make(odd(), 6, 4)
    engine.submit(prompt, 9)
    for _ in range(3):
        engine.step()
    (request,) = engine.running
    assert request.stored == 11
    engine._preempt(request)
    assert engine.kv.tables.allocator.counts() == {"in use": 0, "reusable": 2, "free": 4}
    engine.kv.tables.add("stranger", 4 * taken)
    engine.kv.tables.drop("stranger")
    spoil(engine.kv)
    engine.step()
    assert engine.kv.tables.allocator.hits == hit
    assert computed == [8, 11 - hit]
    finish(engine)
    assert engine.answers == {0: [dense_greedy(odd(), prompt, 9)[8:]]}


def test_a_second_turn_finds_the_prompt_and_the_answer_of_the_first(computed):
    """The last token of an answer is never stored: 8 + 9 - 1 tokens are 4 full blocks."""
    engine = make(odd(), 10, 4)
    prompt = random_tokens(8, 1, 53)
    engine.submit(prompt, 9)
    finish(engine)
    history = prompt + engine.answers[0][0]
    engine.submit([*history, 5], 2)
    finish(engine)
    assert computed == [8, 18 - 16]
    assert engine.answers[1] == [dense_greedy(odd(), [*history, 5], 2)[18:]]


def test_a_group_of_samples_finds_its_prompt_and_comes_back_sharing_it(computed):
    """3 samples of a prompt of 6, of 7 tokens each: 1 block of 4 shared, 3 of their own."""
    prompt = random_tokens(6, 2, 53)
    answers = []
    for allocator in (BlockAllocator, PrefixCache):
        engine = make(odd(), 7, 4, allocator=allocator, choose=sampler(1.0))
        engine.submit(prompt, 3, samples=3)
        engine.step()
        assert engine.kv.tables.allocator.num_free == 3
        assert engine.history.stored == [4 + 3 * 3]
        engine._preempt(engine.running[0])
        assert engine.kv.tables.allocator.num_free == 7
        finish(engine)
        answers.append(engine.answers)
    assert answers[0] == answers[1]
    assert computed == [6, 6, 3, 6, 6 - 4, 3]


# Who comes in


def test_blocks_that_others_use_need_no_room():
    """A prompt of 9 blocks, 8 of them shared: in a pool of 12 four requests run, not one."""
    engine = make(stub(), 12, 4)
    shared = random_tokens(32, 0, 32)
    for i in range(4):
        engine.submit([*shared, i], 2)
    engine.step()
    assert engine.history.running == [4]
    assert engine.history.free == [0]
    assert engine.history.stored == [32 + 4 * 2]
    plain = make(stub(), 12, 4, allocator=BlockAllocator)
    for i in range(4):
        plain.submit([*shared, i], 2)
    plain.step()
    assert plain.history.running == [1]


@pytest.mark.parametrize(("watermark", "running"), [(0.0, 2), (0.1, 1)])
def test_reusable_blocks_that_are_found_are_room_no_longer(watermark, running):
    """8 blocks: 3 reusable ones are found, and one is taken. Another request holds 4 of the rest.

    So 3 + 1 of the 4 that can be allocated go: all of them, which a watermark of 1 forbids.
    """
    engine = make(stub(), 8, 4, watermark=watermark)
    known = random_tokens(13, 0, 32)
    engine.submit(known, 1)
    engine.step()
    assert engine.kv.tables.allocator.counts() == {"in use": 0, "reusable": 3, "free": 5}
    engine.submit(random_tokens(14, 1, 32), 2)
    engine.submit(known, 3)
    engine.step()
    assert engine.history.running == [running]
    assert engine.history.free == [0 if running == 2 else 4]
    finish(engine)
    assert not engine.history.victims
    assert not engine.refusals


def test_what_a_newcomer_finds_is_not_evicted_for_its_own_new_blocks():
    """All 4 blocks are needed, and the 2 that are found are the only reusable ones."""
    engine = make(odd(), 4, 3)
    prompt = random_tokens(7, 0, 53)
    engine.submit(prompt, 1)
    finish(engine)
    text = [*prompt[:6], *random_tokens(4, 1, 53)]
    engine.submit(text, 2)
    finish(engine)
    assert engine.kv.tables.allocator.hits == 6
    assert engine.answers[1] == [dense_greedy(odd(), text, 2)[10:]]


# Failures


@pytest.mark.parametrize("place", ["prefill_packed", "forward_paged_decode"])
@pytest.mark.parametrize("samples", [1, 3])
def test_after_a_step_that_fails_the_answers_are_the_same_and_nothing_leaks(
    monkeypatch, place, samples
):
    """It fails before, or after, it has written: what was not computed was not published."""
    requests = [(random_tokens(6, i % 2, 53), 4) for i in range(6)]

    def serve(broken):
        engine, calls = make(odd(), 14, 3, choose=sampler(1.0)), [0]
        whole = getattr(engine_module, place)

        def fails(*args):
            calls[0] += 1
            if calls[0] % 3 == 2:
                raise MemoryError
            result = whole(*args)
            if calls[0] % 3 == 0:
                raise KeyboardInterrupt
            return result

        for prompt, limit in requests:
            engine.submit(prompt, limit, samples)
        while engine.waiting or engine.running:
            with monkeypatch.context() as patch:
                if broken and calls[0] < 9:
                    patch.setattr(engine_module, place, fails)
                try:
                    engine.step()
                except (MemoryError, KeyboardInterrupt):
                    broken = place == "prefill_packed" or calls[0] < 2
            engine.kv.check_invariants()
            spoil(engine.kv)
        check_all_free(engine)
        return engine

    assert serve(broken=True).answers == serve(broken=False).answers


def test_who_is_cancelled_leaves_full_blocks_that_the_next_one_finds(computed):
    engine = make(odd(), 10, 4)
    prompt = random_tokens(9, 1, 53)
    number = engine.submit(prompt, 9)
    for _ in range(3):
        engine.step()
    engine.cancel(number)  # 9 + 3 tokens are stored
    check(engine)
    assert engine.kv.tables.allocator.counts() == {"in use": 0, "reusable": 3, "free": 7}
    engine.submit(prompt, 3)
    finish(engine)
    assert computed == [9, 1]
    assert engine.answers == {1: [dense_greedy(odd(), prompt, 3)[9:]]}


def test_clearing_between_steps_changes_no_answer():
    engine = make(odd(), 9, 3)
    prompts = [random_tokens(7, i % 2, 53) for i in range(8)]
    for prompt in prompts:
        engine.submit(prompt, 5)
    while engine.waiting or engine.running:
        engine.step()
        engine.kv.tables.allocator.clear()
        check(engine)
        spoil(engine.kv)
    for i, prompt in enumerate(prompts):
        assert engine.answers[i] == [dense_greedy(odd(), prompt, 5)[7:]]
    assert engine.kv.tables.allocator.counts() == {"in use": 0, "reusable": 0, "free": 9}
