"""HostPool: out and back bit by bit, what has no room, and calls that end in the middle."""

from itertools import chain

import hypothesis.strategies as st
import pytest
import torch
from engines import finish, make_engine, stub
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import NAN, bits, dense, odd, paged_cache, poison, random_tokens, snapshot

from labcore.admission import Admission
from labcore.blocks import OutOfBlocks
from labcore.caches import PagedKV
from labcore.decode import forward_paged_decode, prefill_paged
from labcore.swap import HostPool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_pools(device=4, host=4, block_size=8, dtype=torch.float32):
    """A cache and a host pool, NaN in every slot of both."""
    kv = PagedKV(odd().config, device, block_size, dtype)
    pool = HostPool(kv, host)
    for data in (kv.keys, kv.values, pool.keys, pool.values):
        data.fill_(NAN)
    return kv, pool


def store(kv, seq_id, num_tokens, room=0):
    """Add a sequence with random keys and values, and with room for `room` more tokens."""
    kv.tables.add(seq_id, num_tokens)
    kv.tables.reserve(seq_id, room)
    slots = kv.tables.slot_mapping(seq_id)
    for data in (kv.keys, kv.values):
        data.flatten(1, 2)[:, slots] = torch.randn(
            len(data), num_tokens, *data.shape[3:], generator=torch.Generator().manual_seed(7)
        ).to(data.dtype)


def contents(kv, seq_id):
    """Keys and values of a sequence's tokens, in order."""
    slots = kv.tables.slot_mapping(seq_id)
    return [bits(data.flatten(1, 2)[:, slots]) for data in (kv.keys, kv.values)]


def free(kv, pool):
    return kv.tables.allocator.num_free, pool.tables.allocator.num_free


def everything(kv, pool):
    """All that a failed call could have changed, the host's data in free blocks excepted."""
    allocator = pool.tables.allocator
    held = sorted(chain.from_iterable(pool.tables._tables.values()))
    return (
        snapshot(kv)[:3],
        {seq_id: contents(kv, seq_id) for seq_id in kv.tables.seq_ids()},
        list(allocator._free_ids),
        [allocator.ref_count(block_id) for block_id in range(allocator.num_blocks)],
        {seq_id: list(table) for seq_id, table in pool.tables._tables.items()},
        dict(pool.tables._num_tokens),
        [bits(data[:, held]) for data in (pool.keys, pool.values)],
    )


def check(kv, pool):
    kv.check_invariants()
    pool.check_invariants()


@pytest.mark.parametrize("dtype", DTYPES)
def test_v6a_a_sequence_goes_out_and_comes_back_bit_for_bit(dtype):
    """Source: vllm-project/vllm, tests/core/test_block_manager.py"""
    kv, pool = make_pools(dtype=dtype)
    store(kv, "s", 24)  # 23 of a prompt and 1
    before = contents(kv, "s")
    assert free(kv, pool) == (1, 4)
    assert pool.has_room("s")
    pool.swap_out("s")
    assert free(kv, pool) == (4, 1)  # device +3, host -3
    assert kv.tables.seq_ids() == []
    check(kv, pool)
    poison(kv, NAN)  # whatever is there meanwhile
    stranger = kv.tables.allocator.allocate()  # and somebody takes the block that would come first
    pool.swap_in("s")
    assert free(kv, pool) == (0, 4)
    assert kv.tables.num_tokens("s") == 24
    assert stranger not in kv.tables.block_table("s")
    assert contents(kv, "s") == before
    kv.tables.allocator.free(stranger)
    check(kv, pool)


def test_v6b_it_waits_while_too_few_are_free_and_never_fits_where_the_pool_is_too_small():
    """Source: vllm-project/vllm, tests/core/test_block_manager.py"""
    kv, pool = make_pools()
    store(kv, "s", 24)
    pool.swap_out("s")
    store(kv, "other", 9)
    assert free(kv, pool) == (2, 1)
    before = everything(kv, pool)
    assert pool.can_return("s") is Admission.LATER  # 3 needed, 2 free
    assert pool.can_return("s", lookahead=10) is Admission.NEVER  # 5 needed, 4 in the pool
    with pytest.raises(OutOfBlocks):
        pool.swap_in("s")
    assert everything(kv, pool) == before
    kv.tables.drop("other")
    assert pool.can_return("s", lookahead=8) is Admission.OK  # 4 needed, 4 free
    assert pool.can_return("s", lookahead=9) is Admission.NEVER


@pytest.mark.parametrize(
    ("lookahead", "answer"), [(0, Admission.OK), (2, Admission.OK), (10, Admission.NEVER)]
)
def test_v6c_one_block_holds_8_tokens_and_no_more(lookahead, answer):
    """Source: vllm-project/vllm, tests/core/test_block_manager.py"""
    kv, pool = make_pools(device=1)
    store(kv, "s", 6)
    pool.swap_out("s")
    assert pool.can_return("s", lookahead) is answer


def test_v6d_a_victim_of_three_blocks_that_finds_one_on_the_host_is_computed_again():
    """Source: vllm-project/vllm #787"""
    engine = make_engine(stub(), 4, 8, host_blocks=1)
    first = engine.submit(random_tokens(7, vocab_size=32), 3)
    second = engine.submit(random_tokens(20, vocab_size=32), 6)
    before = bits(engine.host.keys)
    finish(engine)
    assert engine.history.victims == [(1, second)]
    assert engine.history.admitted == [(0, first), (0, second), (2, second)]
    assert engine.host.swaps == 0
    assert engine.host.tables.allocator.num_free == 1
    assert bits(engine.host.keys) == before


def test_blocks_reserved_ahead_stay_behind():
    kv, pool = make_pools()
    store(kv, "s", 9, room=20)
    assert len(kv.tables.block_table("s")) == 4
    before = contents(kv, "s")
    pool.swap_out("s")
    assert free(kv, pool) == (4, 2)
    pool.swap_in("s")
    assert free(kv, pool) == (2, 4)
    assert contents(kv, "s") == before


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 26])
def test_lengths_around_a_block(num_tokens):
    kv, pool = make_pools()
    store(kv, "s", num_tokens)
    before = contents(kv, "s")
    blocks = -(-num_tokens // 8)
    pool.swap_out("s")
    assert free(kv, pool) == (4, 4 - blocks)
    pool.swap_in("s")
    assert free(kv, pool) == (4 - blocks, 4)
    assert contents(kv, "s") == before
    check(kv, pool)


def test_a_fork_that_is_swapped_out_does_not_disturb_who_shares_its_blocks():
    kv, pool = make_pools(device=5)
    store(kv, "parent", 20)
    kv.tables.fork("parent", "child")
    before, table = contents(kv, "parent"), kv.tables.block_table("parent")
    pool.swap_out("child")
    assert free(kv, pool) == (2, 1)  # the parent still holds all three
    assert kv.tables.block_table("parent") == table
    assert contents(kv, "parent") == before
    kv.copy_blocks(kv.tables.append("parent"))  # it is alone, so it writes in place
    assert kv.tables.block_table("parent") == table
    kv.tables.drop("parent")
    poison(kv, NAN)
    pool.swap_in("child")
    assert contents(kv, "child") == before
    assert [kv.tables.allocator.ref_count(b) for b in kv.tables.block_table("child")] == [1, 1, 1]
    check(kv, pool)


def test_the_model_goes_on_after_the_way_out_and_back():
    model, kv = odd(), paged_cache(odd(), 8, 4)
    pool, prompt = HostPool(kv, 4), random_tokens(10, vocab_size=53)
    for data in (pool.keys, pool.values):
        data.fill_(NAN)
    kv.tables.add("s")
    prefill_paged(model, kv, "s", prompt)
    pool.swap_out("s")
    poison(kv, NAN)
    kv.tables.add("other", 9)
    pool.swap_in("s")
    logits = forward_paged_decode(model, kv, ["s"], [5])
    torch.testing.assert_close(logits[0], dense(model, [*prompt, 5])[-1], rtol=0, atol=1e-12)


class Broken:
    """Data that cannot be read, nor written."""

    def __init__(self, error):
        self.error, self.device = error, "cpu"

    def __getitem__(self, key):
        raise self.error

    def __setitem__(self, key, value):
        raise self.error


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_a_copy_that_ends_between_keys_and_values_changes_nothing(direction, error, monkeypatch):
    kv, pool = make_pools(device=6)
    store(kv, "s", 20, room=10)
    store(kv, "other", 5)
    expected = contents(kv, "s")
    if direction == "swap_in":
        pool.swap_out("s")
    before = everything(kv, pool)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(pool, "values", Broken(error))
        getattr(pool, direction)("s")
    assert everything(kv, pool) == before
    check(kv, pool)
    getattr(pool, direction)("s")
    if direction == "swap_out":
        pool.swap_in("s")
    assert contents(kv, "s") == expected


def refused_calls():
    """(error, call). The device has sequences "s" and "both", the host "out" and "both"."""
    return {
        "swap_out of what is nowhere": (KeyError, lambda kv, pool: pool.swap_out("nobody")),
        "swap_out twice": (KeyError, lambda kv, pool: pool.swap_out("out")),
        "swap_out of a second one": (ValueError, lambda kv, pool: pool.swap_out("both")),
        "swap_out without room": (OutOfBlocks, lambda kv, pool: pool.swap_out("s")),
        "has_room of what is nowhere": (KeyError, lambda kv, pool: pool.has_room("nobody")),
        "swap_in of what is nowhere": (KeyError, lambda kv, pool: pool.swap_in("nobody")),
        "swap_in of what never left": (KeyError, lambda kv, pool: pool.swap_in("s")),
        "swap_in onto a second one": (ValueError, lambda kv, pool: pool.swap_in("both")),
        "can_return of what never left": (KeyError, lambda kv, pool: pool.can_return("s")),
        "forget what never left": (KeyError, lambda kv, pool: pool.tables.drop("s")),
    }


@pytest.mark.parametrize("what", refused_calls())
def test_a_refused_call_changes_nothing(what):
    kv, pool = make_pools(device=6, host=3)
    for seq_id in ("out", "both"):
        store(kv, seq_id, 3)
        pool.swap_out(seq_id)
    store(kv, "both", 3)
    store(kv, "s", 15)
    before = everything(kv, pool)
    error, call = refused_calls()[what]
    with pytest.raises(error):
        call(kv, pool)
    assert everything(kv, pool) == before
    check(kv, pool)


@pytest.mark.parametrize(("host", "room"), [(2, False), (3, True)])
def test_asking_for_room_changes_nothing_and_counts_blocks_that_hold_tokens(host, room):
    kv, pool = make_pools(host=host)
    store(kv, "s", 17, room=10)
    before = everything(kv, pool)
    assert pool.has_room("s") == room
    assert everything(kv, pool) == before


def test_what_is_forgotten_leaves_its_blocks_to_others_the_first_one_first():
    kv, pool = make_pools(device=6)
    store(kv, "s", 24)
    store(kv, "next", 24)
    pool.swap_out("s")
    assert pool.tables.block_table("s") == [0, 1, 2]
    pool.tables.drop("s")
    assert free(kv, pool) == (3, 4)
    for call in (pool.swap_in, pool.can_return, pool.tables.drop):
        with pytest.raises(KeyError):
            call("s")
    pool.swap_out("next")
    assert pool.tables.block_table("next") == [0, 1, 2]
    check(kv, pool)


def test_a_host_pool_has_at_least_one_block():
    with pytest.raises(ValueError):
        make_pools(host=0)


class HostPoolMachine(RuleBasedStateMachine):
    """Any order of calls, beside two dicts: what each sequence holds, and where it is."""

    @initialize(device=st.integers(2, 6), host=st.integers(1, 5), block_size=st.integers(1, 4))
    def start(self, device, host, block_size):
        self.kv, self.pool = make_pools(device, host, block_size)
        self.texts, self.names = {}, 0
        self.out = set()

    def blocks(self, seq_id):
        return -(-len(self.texts[seq_id]) // self.kv.tables.block_size)

    def pick(self, data, where):
        return data.draw(st.sampled_from(sorted(where)))

    def inside(self):
        return set(self.texts) - self.out

    @rule(num_tokens=st.integers(0, 9))
    def add(self, num_tokens):
        if -(-num_tokens // self.kv.tables.block_size) <= self.kv.tables.allocator.num_free:
            self.names += 1
            self.kv.tables.add(self.names, num_tokens)
            self.texts[self.names] = [100.0 * self.names + i for i in range(num_tokens)]
            self.write(self.names, 0)

    @precondition(lambda self: self.inside())
    @rule(data=st.data())
    def append(self, data):
        seq_id = self.pick(data, self.inside())
        if self.kv.tables.can_append(seq_id):
            self.kv.copy_blocks(self.kv.tables.append(seq_id))
            self.texts[seq_id] = [*self.texts[seq_id], 1000.0 * seq_id + len(self.texts[seq_id])]
            self.write(seq_id, len(self.texts[seq_id]) - 1)

    @precondition(lambda self: self.inside())
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data, self.inside())
        self.names += 1
        self.kv.tables.fork(parent, self.names)
        self.texts[self.names] = self.texts[parent]

    @precondition(lambda self: self.inside())
    @rule(data=st.data())
    def swap_out(self, data):
        seq_id = self.pick(data, self.inside())
        fits = self.blocks(seq_id) <= self.pool.tables.allocator.num_free
        assert self.pool.has_room(seq_id) == fits
        if fits:
            self.pool.swap_out(seq_id)
            self.out.add(seq_id)
        else:
            with pytest.raises(OutOfBlocks):
                self.pool.swap_out(seq_id)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def swap_in(self, data):
        seq_id = self.pick(data, self.out)
        fits = self.blocks(seq_id) <= self.kv.tables.allocator.num_free
        assert (self.pool.can_return(seq_id) is Admission.OK) == fits
        if fits:
            self.pool.swap_in(seq_id)
            self.out.remove(seq_id)
        else:
            with pytest.raises(OutOfBlocks):
                self.pool.swap_in(seq_id)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data):
        seq_id = self.pick(data, self.texts)
        if seq_id in self.out:
            self.pool.tables.drop(seq_id)
            self.out.remove(seq_id)
        else:
            self.kv.tables.drop(seq_id)
        del self.texts[seq_id]

    def write(self, seq_id, start):
        slots = self.kv.tables.slot_mapping(seq_id, start)
        numbers = torch.tensor(self.texts[seq_id][start:])[:, None, None]
        for data, sign in ((self.kv.keys, 1), (self.kv.values, -1)):
            data.flatten(1, 2)[:, slots] = sign * numbers

    @invariant()
    def everything_is_where_it_should_be(self):
        if not hasattr(self, "kv"):
            return
        check(self.kv, self.pool)
        assert set(self.pool.tables.seq_ids()) == self.out
        assert set(self.kv.tables.seq_ids()) == self.inside()
        held = sum(map(self.blocks, self.out))
        assert self.pool.tables.allocator.num_free == self.pool.tables.allocator.num_blocks - held
        for seq_id in self.inside():
            slots = self.kv.tables.slot_mapping(seq_id)
            for data, sign in ((self.kv.keys, 1), (self.kv.values, -1)):
                stored = data.flatten(1, 2)[0, slots, 0, 0].tolist()
                assert stored == [sign * number for number in self.texts[seq_id]]


HostPoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHostPool = HostPoolMachine.TestCase
