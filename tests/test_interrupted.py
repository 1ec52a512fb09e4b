"""Calls that end in the middle: no memory, Ctrl-C, somebody who forks during a step."""

import pytest
import torch
from models import NAN, assert_equal_logits, dense, odd, paged_cache, poison, snapshot

from labcore.attention import gather
from labcore.caches import ConcatKV, StaticKV, forward_cached
from labcore.decode import forward_paged_decode, prefill_packed, prefill_paged

PROMPT = [1, 2, 3, 4, 5, 6]


def out_of_memory(*args):
    raise MemoryError


def half_full_block(num_blocks=8):
    """Sequence "a" in blocks of 4: one full, one with two tokens."""
    model, kv = odd(), paged_cache(odd(), num_blocks, 4)
    kv.tables.add("a")
    prefill_paged(model, kv, "a", PROMPT)
    return model, kv


@pytest.mark.parametrize(
    "call",
    [
        lambda model, kv: forward_paged_decode(model, kv, ["a"], [9])[0],
        lambda model, kv: prefill_paged(model, kv, "a", [9]),
        lambda model, kv: prefill_packed(model, kv, {"a": [9]})[0],
    ],
)
def test_a_step_that_fails_in_the_head_has_stored_nothing(call, monkeypatch):
    model, kv = half_full_block()
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", out_of_memory)
        with pytest.raises(MemoryError):
            call(model, kv)
    assert kv.tables.num_tokens("a") == 6
    assert_equal_logits(call(model, kv), dense(model, [*PROMPT, 9])[-1])


@pytest.mark.parametrize("make", [ConcatKV, lambda c: StaticKV(c, 1, 9, torch.float64)])
def test_a_dense_step_that_fails_in_the_head_has_stored_nothing(make, monkeypatch):
    model, tokens = odd(), torch.tensor([PROMPT])
    cache = make(model.config)
    with monkeypatch.context() as patch:
        patch.setattr(model, "logits", out_of_memory)
        with pytest.raises(MemoryError):
            forward_cached(model, cache, tokens)
    assert cache.num_tokens == 0
    assert_equal_logits(forward_cached(model, cache, tokens)[0], dense(model, PROMPT)[-1])


@pytest.mark.parametrize("writers", [["a", "empty"], ["a", "b", "c", "empty"], ["c", "a"]])
def test_a_copy_that_fails_gives_the_blocks_and_the_tables_back(writers, monkeypatch):
    model, kv = half_full_block()
    kv.tables.fork("a", "b")
    kv.tables.fork("a", "c")
    kv.tables.add("empty")
    before = snapshot(kv)
    with monkeypatch.context() as patch:
        patch.setattr(kv, "copy_blocks", out_of_memory)
        with pytest.raises(MemoryError):
            forward_paged_decode(model, kv, writers, [9] * len(writers))
    assert snapshot(kv) == before
    kv.check_invariants()
    poison(kv, NAN)
    logits = forward_paged_decode(model, kv, ["a"], [9])
    assert_equal_logits(logits[0], dense(model, [*PROMPT, 9])[-1])


def test_a_fork_in_the_middle_of_a_step_disturbs_neither_side():
    model, kv = half_full_block()

    def forking(block_tables, seq_lens, pool):
        kv.tables.fork("a", "child")
        return gather(block_tables, seq_lens, pool)

    forward_paged_decode(model, kv, ["a"], [9], forking)
    poison(kv, NAN)
    logits = forward_paged_decode(model, kv, ["a", "child"], [10, 11])
    assert_equal_logits(logits[0], dense(model, [*PROMPT, 9, 10])[-1])
    assert_equal_logits(logits[1], dense(model, [*PROMPT, 11])[-1])
