"""Who may come in and who must go, with numbers worked by hand."""

import itertools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from labcore.admission import (
    Admission,
    Limits,
    Resident,
    admit,
    fewest_generated,
    has_room,
    newest,
    paged,
    reserve_limit,
    reserve_max,
    submit,
)

OK, LATER, NEVER = Admission.OK, Admission.LATER, Admission.NEVER


def admitted_at_once(num_blocks, watermark):
    """How many requests of one block come in before the first has to wait."""
    limits = Limits(num_blocks, 16, declared=0, watermark=watermark)
    for running in itertools.count():
        if admit(paged, 16, 16, num_blocks - running, running, limits) is not OK:
            return running


def test_the_watermark_keeps_its_blocks_free():
    """Source: vllm-project/vllm PR #11, test_block_manager.py (can_allocate)"""
    assert admitted_at_once(4, 0) == 4
    assert admitted_at_once(4, 0.25) == 3
    assert admitted_at_once(8, 0.01) == 7  # 0.08 blocks, rounded up: at least that many stay free


@pytest.mark.parametrize("watermark", [1.0, 1.5, -0.1, float("nan")])
def test_a_watermark_outside_its_range_is_refused_as_a_setting(watermark):
    """Source: vllm-project/vllm PR #11"""
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        Limits(4, 16, watermark=watermark)


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "blocks"),
    [(100, 0.29, 29), (100, 0.57, 57), (100, 0.07, 7), (100, 0.071, 8), (2048, 0.05, 103)],
)
def test_the_watermark_is_exact_where_floats_are_not(num_blocks, watermark, blocks):
    """Source: vllm-project/vllm PR #11 (there, int() of the float product gives 28 and 56)"""
    assert Limits(num_blocks, 16, watermark=watermark).headroom == blocks
    assert Limits(num_blocks, 16, watermark=np.float64(watermark)).headroom == blocks
    limits = Limits(num_blocks, 16, watermark=watermark)
    assert has_room(1, blocks + 1, 1, limits)
    assert not has_room(1, blocks, 1, limits)


def test_the_watermark_is_waived_when_nothing_runs():
    limits = Limits(8, 4, declared=4, watermark=0.5)
    assert admit(paged, 28, 28, 8, 0, limits) is OK
    assert admit(paged, 28, 28, 8, 1, limits) is LATER


def test_a_preempted_request_comes_back_only_when_all_of_it_fits():
    """Source: vllm-project/vllm #25538, #28018, #21793; ai-dynamo #9718"""
    limits = Limits(8, 4, declared=10, max_context=32)
    assert admit(paged, 10, 18, 3, 1, limits) is LATER  # its prompt alone would fit
    assert admit(paged, 10, 18, 4, 1, limits) is LATER
    assert admit(paged, 10, 18, 5, 1, limits) is OK


def test_what_can_never_fit_is_refused_with_both_numbers():
    """Source: vllm-project/vllm #35541, PR #35570; sgl-project/sglang #14948"""
    limits = Limits(229, 16, declared=4096, max_context=8192)
    assert submit(paged, 100, limits) == "needs 263 blocks, the pool has 229"
    assert admit(paged, 100, 100, 229, 0, limits) is NEVER
    assert submit(paged, 100, Limits(263, 16, declared=4096, max_context=8192)) is None


def test_a_prompt_that_fills_the_context_is_refused():
    """Source: openai/gpt-2 #137; huggingface/transformers #1749"""
    limits = Limits(2048, 16)
    assert submit(paged, 1023, limits) is None
    assert submit(paged, 1024, limits) == (
        "a prompt of 1024 tokens leaves no room in a context of 1024"
    )


def test_reserving_sets_aside_what_it_says():
    limits = Limits(2048, 16)
    assert [p.set_aside(100, 100, limits) for p in (reserve_max, reserve_limit, paged)] == [
        1024,
        612,
        100,
    ]
    assert reserve_limit.set_aside(900, 900, limits) == 1024
    assert paged.set_aside(100, 130, limits) == 130


def test_reserving_the_maximum_in_a_pool_too_small_is_refused_and_not_left_waiting():
    limits = Limits(40, 16, declared=100)
    assert submit(paged, 100, limits) is None
    assert submit(reserve_max, 100, limits) == "needs 64 blocks, the pool has 40"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is an int of at least 1, got 0"),
        ({"block_size": 0}, "block_size is an int of at least 1, got 0"),
        ({"declared": -1}, "declared is an int of at least 0, got -1"),
        ({"max_context": 1}, "max_context is an int of at least 2, got 1"),
    ],
)
def test_limits_under_which_nothing_could_be_served_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Limits(**({"num_blocks": 4, "block_size": 4} | setting))


def resident(index, prompt, generated):
    return Resident(index, prompt, prompt + generated)


def test_the_newest_is_the_one_admitted_last():
    running = [resident(4, 9, 9), resident(2, 1, 1)]
    assert newest(running).index == 2


def test_the_fewest_generated_tokens_go_and_among_equals_the_later_arrival():
    """Source: vllm-project/vllm #54644, #53723; inference-sim's rule for ties"""
    running = [resident(0, 50, 50), resident(1, 5, 15), resident(2, 30, 30)]
    assert fewest_generated(running).index == 1
    assert fewest_generated([resident(0, 9, 4), resident(1, 1, 4)]).index == 1
    assert fewest_generated([resident(1, 9, 4), resident(0, 1, 4)]).index == 1


def test_one_victim_or_two_depend_on_the_rule():
    """Source: vllm-project/vllm #54644, #53723 (three blocks are needed at once)"""
    blocks, tokens = {1: 7, 2: 2, 3: 4}, {1: 100, 2: 20, 3: 60}
    for rule, victims, lost in ((newest, [3], 60), (fewest_generated, [2, 3], 80)):
        running = [resident(1, 50, 50), resident(2, 5, 15), resident(3, 30, 30)]
        freed, gone = 0, []
        while freed < 3:
            victim = rule(running)
            running.remove(victim)
            gone.append(victim.index)
            freed += blocks[victim.index]
        assert gone == victims
        assert sum(tokens[i] for i in gone) == lost


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "blocks"),
    [(9, Fraction(5, 9), 5), (100, np.float32(0.07), 7), (100, Decimal("0.07"), 7)],
)
def test_a_watermark_of_another_kind_is_as_exact(num_blocks, watermark, blocks):
    assert Limits(num_blocks, 16, watermark=watermark).headroom == blocks


@pytest.mark.parametrize("number", [np.uint8(16), np.int64(16), 16.0, float("nan"), True])
def test_limits_are_pythons_own_integers_because_others_overflow_in_silence(number):
    with pytest.raises(ValueError, match="num_blocks is an int of at least 1, got "):
        Limits(number, 4)
