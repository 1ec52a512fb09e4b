"""The three caches: the dense two equal no cache at all, the paged one copies and reserves."""

import json
from pathlib import Path

import pytest
import torch
from models import FLOATS, RUBBISH, assert_equal_logits, bits, odd, random_tokens, snapshot, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from labcore.blocks import OutOfBlocks, UnknownBlock
from labcore.caches import ConcatKV, ContextOverflow, PagedKV, StaticKV, forward_cached
from labcore.capacity import read_kv_shape
from labcore.gpt2 import GPT2Config, find_model, read_config


def static(model, batch, max_tokens):
    return StaticKV(model.config, batch, max_tokens, model.wte.weight.dtype)


def concat(model, batch, max_tokens):
    return ConcatKV(model.config)


BOTH = pytest.mark.parametrize("make", [concat, static])


def small_paged(num_blocks=4):
    """Four layers' worth of random numbers: 2 layers, blocks of 3 tokens, 2 heads of 4."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=40)
    kv = PagedKV(config, num_blocks, 3)
    torch.manual_seed(0)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


@BOTH
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_dense_cache_equals_no_cache_at_every_step(make, dtype, batch):
    model = tiny(dtype)
    tokens = torch.tensor([random_tokens(24, seed) for seed in range(batch)])
    expected, cache = model(tokens), make(model, batch, 24)
    assert_equal_logits(forward_cached(model, cache, tokens[:, :5]), expected[:, 4])
    for n in range(5, 24):
        logits = forward_cached(model, cache, tokens[:, n : n + 1])
        assert_equal_logits(logits, expected[:, n])
        assert cache.num_tokens == n + 1


@BOTH
@pytest.mark.parametrize("chunks", [(1, 1, 1, 21), (16, 8), (7, 9, 8), (24,)])
def test_a_prompt_may_come_in_chunks(make, chunks):
    model, tokens = tiny(), torch.tensor([random_tokens(24, seed) for seed in range(2)])
    expected, cache = model(tokens), make(model, 2, 24)
    for chunk in tokens.split(chunks, dim=1):
        logits = forward_cached(model, cache, chunk)
        assert_equal_logits(logits, expected[:, cache.num_tokens - 1])


def test_what_lies_behind_the_tokens_of_a_static_cache_is_not_read():
    model, tokens = odd(), torch.tensor([random_tokens(9, 0, 53)])
    cache = static(model, 1, 20)
    for buffer in (cache.keys, cache.values):
        buffer.fill_(float("nan"))
    forward_cached(model, cache, tokens[:, :4])
    assert_equal_logits(forward_cached(model, cache, tokens[:, 4:]), model(tokens)[:, -1])


def test_a_static_cache_never_moves_and_a_concatenated_one_holds_what_it_needs():
    model, tokens = odd(), torch.tensor([random_tokens(9, 0, 53)])
    fixed, grown = static(model, 1, 20), concat(model, 1, 20)
    where = fixed.keys.data_ptr(), fixed.values.data_ptr()
    for token in tokens.split(1, dim=1):
        for cache in (fixed, grown):
            forward_cached(model, cache, token)
    assert (fixed.keys.data_ptr(), fixed.values.data_ptr()) == where
    assert [tuple(k.shape) for k in grown.keys + grown.values] == [(1, 9, 3, 5)] * 4


@BOTH
@pytest.mark.parametrize(("stored", "more"), [(0, 42), (41, 1), (40, 2)])
def test_a_token_past_the_last_position_is_refused_before_anything_is_written(make, stored, more):
    model, cache = odd(), make(odd(), 1, 41)
    if stored:
        forward_cached(model, cache, torch.tensor([random_tokens(stored, 0, 53)]))
    before = [bits(b) for b in (*cache.keys, *cache.values)] if stored else None
    with pytest.raises(ContextOverflow, match="token 42 of at most 41"):
        forward_cached(model, cache, torch.tensor([random_tokens(more, 0, 53)]))
    assert cache.num_tokens == stored
    assert before is None or [bits(b) for b in (*cache.keys, *cache.values)] == before


def test_the_room_of_a_static_cache_is_a_limit_too_and_cannot_pass_the_model_s():
    model, cache = odd(), static(odd(), 1, 4)
    with pytest.raises(ContextOverflow, match="token 5 of at most 4"):
        forward_cached(model, cache, torch.tensor([random_tokens(5, 0, 53)]))
    assert not cache.keys.any() and not cache.values.any()
    with pytest.raises(ContextOverflow, match="42 tokens, the model has 41"):
        static(model, 1, 42)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_static_cache_takes_no_other_number_of_sequences_than_it_was_made_for(batch):
    model, cache = odd(), static(odd(), 2, 8)
    forward_cached(model, cache, torch.tensor([[1, 2], [3, 4]]))
    before = bits(cache.keys), bits(cache.values)
    with pytest.raises(ValueError, match=f"{batch} sequences in a buffer for 2"):
        forward_cached(model, cache, torch.tensor([[5]] * batch))
    assert (cache.num_tokens, bits(cache.keys), bits(cache.values)) == (2, *before)


class Interrupted(Exception):
    pass


@BOTH
def test_a_step_that_is_interrupted_between_two_layers_has_stored_nothing(make):
    model, tokens = odd(), torch.tensor([random_tokens(9, 0, 53)])
    cache = make(model, 1, 20)
    forward_cached(model, cache, tokens[:, :6])

    def interrupt(*_):
        raise Interrupted

    handle = model.h[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(Interrupted):
            forward_cached(model, cache, tokens[:, 6:8])
    finally:
        handle.remove()
    assert cache.num_tokens == 6
    assert_equal_logits(forward_cached(model, cache, tokens[:, 6:]), model(tokens)[:, -1])


def test_c8_copies_cover_every_layer_and_both_caches_and_one_source_goes_to_two_places():
    """Source: vllm-project/vllm, kernel cache tests (block copy), PR #32"""
    config = GPT2Config(n_layer=7, n_head=17, n_embd=17 * 16)
    kv = PagedKV(config, num_blocks=1_024, block_size=8)
    assert kv.keys.shape == kv.values.shape == (7, 1_024, 8, 17, 16)
    torch.manual_seed(0)
    kv.keys.normal_()
    kv.values.normal_()
    keys, values = kv.keys.clone(), kv.values.clone()
    ids = torch.randperm(1_024)[: 3 * 23].tolist()
    sources, destinations = ids[:23], ids[23:]
    copies = list(zip(sources * 2, destinations, strict=True))
    kv.copy_blocks(copies)
    others = sorted(set(range(1_024)) - set(destinations))
    assert len(copies) == len(set(destinations)) == 46
    for pool, before in ((kv.keys, keys), (kv.values, values)):
        for source, destination in copies:
            assert torch.equal(pool[:, destination], before[:, source])
        assert torch.equal(pool[:, others], before[:, others])


@pytest.mark.parametrize("copy", [(0, -1), (-1, 0), (0, 8), (8, 0)])
def test_a_copy_from_or_to_no_block_of_the_pool_is_refused_before_any_is_made(copy):
    kv = PagedKV(GPT2Config(n_layer=1, n_head=1, n_embd=4), num_blocks=8, block_size=2)
    kv.keys.normal_()
    before = kv.keys.clone()
    with pytest.raises(UnknownBlock, match="in a pool of 8"):
        kv.copy_blocks([(1, 2), copy])
    assert torch.equal(kv.keys, before)


class Launches(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_c8_without_copies_nothing_changes_and_nothing_is_launched():
    kv = small_paged()
    before = snapshot(kv)
    with Launches() as launches:
        kv.copy_blocks([])
        assert launches.count == 0
        kv.copy_blocks([(0, 0)])
        assert launches.count > 0
    assert snapshot(kv) == before


def test_reserve_takes_all_blocks_and_makes_all_copies_or_does_neither():
    kv = small_paged(num_blocks=5)
    kv.tables.add("a", 4)
    kv.tables.fork("a", "b")
    kv.tables.add("c", 3)
    before, keys, values = snapshot(kv), kv.keys.clone(), kv.values.clone()
    for growth, error in (
        ({"a": 1, "b": 1, "c": 4}, OutOfBlocks),  # a copy and two blocks, 2 are free
        ({"a": 1, "x": 1}, KeyError),
        ({"a": 1, "c": -1}, ValueError),
        ({"a": 1, "c": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            kv.reserve(growth)
        assert snapshot(kv) == before
    kv.reserve({"a": 1, "b": 1, "c": 1})
    assert [kv.tables.block_table(s) for s in "abc"] == [[0, 3], [0, 1], [2, 4]]
    assert [kv.tables.num_tokens(s) for s in "abc"] == [4, 4, 3]
    for pool, was in ((kv.keys, keys), (kv.values, values)):
        assert torch.equal(pool[:, 3], was[:, 1])
        assert torch.equal(pool[:, [0, 1, 2, 4]], was[:, [0, 1, 2, 4]])


def test_slots_include_room_that_is_only_reserved():
    kv = small_paged()
    kv.tables.allocator.allocate()
    kv.tables.add("s", 2)
    kv.reserve({"s": 3})
    assert kv.slots("s", 0, 5) == [3, 4, 5, 6, 7]
    assert kv.slots("s", 2, 4) == [5, 6]
    with pytest.raises(KeyError, match="'x'"):
        kv.slots("x", 0, 1)


def test_tables_become_rows_of_one_tensor_and_shorter_ones_are_filled_up():
    kv = small_paged()
    kv.tables.allocator.allocate()
    kv.tables.add("short", 2)
    kv.tables.add("long", 5)
    assert kv.block_tables(["long", "short"]).tolist() == [[2, 3], [1, 0]]


def test_what_is_written_to_slots_is_read_from_them_and_nothing_else_changes():
    kv = small_paged()
    keys, values = kv.keys.clone(), kv.values.clone()
    k, v = torch.full((2, 3, 2, 4), RUBBISH) * torch.tensor([1, 2])[:, None, None, None]
    slots = torch.tensor([7, 0, 11])
    kv.write(1, slots, k, v)
    for got, wrote in zip(kv.read(1, slots), (k, v), strict=True):
        assert torch.equal(got, wrote)
    for pool, was, wrote in ((kv.keys, keys, k), (kv.values, values, v)):
        was[1, [2, 0, 3], [1, 0, 2]] = wrote
        assert torch.equal(pool, was)


@pytest.mark.parametrize("places", [(0, 9), (-2, 1), (3, 2)])
def test_slots_outside_a_table_are_an_error_and_not_a_shorter_list(places):
    kv = small_paged()
    kv.tables.add("s", 5)  # two blocks of 3
    with pytest.raises(IndexError, match=r"positions .* in 2 blocks of 3"):
        kv.slots("s", *places)
    kv.check_invariants()


def test_concatenation_keeps_no_queries_alive():
    model, cache = odd(), ConcatKV(odd().config)
    forward_cached(model, cache, torch.tensor([[1, 2, 3]]))
    kept = sum(k.untyped_storage().nbytes() for k in [*cache.keys, *cache.values])
    assert kept == sum(k.nbytes for k in [*cache.keys, *cache.values])


@pytest.mark.parametrize("make", [concat, static])
def test_no_tokens_are_refused(make):
    model = odd()
    with pytest.raises(ValueError, match="no tokens"):
        forward_cached(model, make(model, 1, 9), torch.empty(1, 0, dtype=torch.long))


def test_models_and_caches_lie_on_the_device_that_is_asked_for():
    config = odd().config
    static_kv, paged_kv = (
        StaticKV(config, 1, 4, device="meta"),
        PagedKV(config, 4, 4, device="meta"),
    )
    paged_kv.tables.add("s", 5)
    tensors = [static_kv.keys, static_kv.values, paged_kv.keys, paged_kv.values]
    assert {str(t.device) for t in [*tensors, paged_kv.block_tables(["s"])]} == {"meta"}


def test_the_pool_takes_the_bytes_that_the_arithmetic_of_capacity_says():
    raw = Path(find_model("tiny"), "config.json")
    kv = PagedKV(read_config(json.loads(raw.read_text())), num_blocks=7, block_size=16)
    shape = read_kv_shape(raw, "float32")
    assert kv.keys.nbytes + kv.values.nbytes == 7 * 16 * shape.token_bytes
