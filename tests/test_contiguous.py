"""Memory in one piece: first fit and the buddy system, and what they do to a simulated server."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bookkit.contiguous import Buddy, FirstFit
from labcore.admission import paged, reserve_limit, reserve_max, reserve_power_of_2
from labcore.simulator import simulate


def test_first_fit_takes_the_first_hole_that_is_large_enough():
    """16 tokens: 0-3, 4-5, 6-10 are taken; 0-3 and 6-10 are given back, which leaves three holes.

    2 tokens go into the first; 3 do not fit into what is left of it, and go to 6.
    """
    memory = FirstFit(16)
    assert [memory.allocate(size) for size in (4, 2, 5)] == [0, 4, 6]
    memory.free(0)
    memory.free(6)
    assert memory.holes == [(0, 4), (6, 16)]
    assert [memory.allocate(size) for size in (2, 3)] == [0, 6]
    assert memory.holes == [(2, 4), (9, 16)]
    memory.check_invariants()


def test_nine_free_tokens_do_not_hold_eight_in_one_piece():
    """External fragmentation: what the total does not say."""
    memory = FirstFit(16)
    starts = [memory.allocate(size) for size in (5, 2, 4, 5)]
    memory.free(starts[0])
    memory.free(starts[2])
    assert memory.num_free == 9
    assert memory.allocate(8) is None
    memory.free(starts[1])
    assert memory.holes == [(0, 11)]
    assert memory.allocate(8) == 0


def test_a_refusal_changes_nothing():
    for memory in (FirstFit(8), Buddy(8)):
        memory.allocate(5)
        before = repr(vars(memory))
        assert memory.allocate(9) is None
        assert memory.allocate(4) is None
        for start in (1, 8, -1):
            with pytest.raises(KeyError):
                memory.free(start)
        for start in (0.0, None, "0"):  # a dict finds 0.0 where 0 is
            with pytest.raises(TypeError):
                memory.free(start)
        assert repr(vars(memory)) == before


def test_buddies_split_and_join_worked_by_hand():
    """16 tokens. 3 take 4, and leave holes of 4 and 8; 1 takes 1 of the 4, and leaves 1 and 2.

    2 take the hole of 2; 8 take the hole of 8: 1 token is left, at 5. When 1 is given back it joins
    its buddy at 5; when 2 are given back, that hole and the one at 4 become 4 again, at 4.
    """
    memory = Buddy(16)
    assert [memory.allocate(size) for size in (3, 1, 2, 8)] == [0, 4, 6, 8]
    assert (memory.num_free, memory.allocate(2)) == (1, None)
    memory.free(4)
    memory.free(6)
    assert (memory.num_free, memory.allocate(4)) == (4, 4)
    memory.free(0)
    memory.free(4)
    memory.free(8)
    assert memory.allocate(16) == 0


def test_neighbours_that_are_no_buddies_stay_apart():
    """Holes at 4-7 and 8-11 touch; only a hole that starts at a multiple of 8 can have 8 tokens."""
    memory = Buddy(16)
    assert [memory.allocate(4) for _ in range(4)] == [0, 4, 8, 12]
    memory.free(4)
    memory.free(8)
    assert memory.num_free == 8
    assert memory.allocate(8) is None
    memory.check_invariants()


def test_a_size_that_is_no_power_of_two_starts_as_several_holes():
    """13 = 8 + 4 + 1."""
    memory = Buddy(13)
    assert memory.allocate(9) is None
    assert [memory.allocate(size) for size in (1, 4, 7)] == [12, 8, 0]
    assert memory.num_free == 0


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@pytest.mark.parametrize("size", [0, -4, 2.5, float("nan")])
def test_a_size_that_is_no_number_of_tokens_is_refused(kind, size):
    message = f"memory holds a whole number of tokens, at least 1, got {size}"
    with pytest.raises(ValueError, match=message):
        kind(size)
    memory = kind(8)
    with pytest.raises(ValueError, match=message):
        memory.allocate(size)
    assert memory.num_free == 8


def first_fit_by_cells(cells, size):
    """The first run of free cells that is long enough, and how much of it is taken."""
    for start in range(len(cells) - size + 1):
        if not any(cells[start : start + size]):
            return start, size
    return None, 0


def free_pieces(cells, start, length):
    """The largest free aligned pieces of a power of two of cells, found by halving it."""
    if not any(cells[start : start + length]):
        return [(length, start)]
    if length == 1:
        return []
    half = length // 2
    return free_pieces(cells, start, half) + free_pieces(cells, start + half, half)


def buddy_by_cells(cells, size):
    """The smallest free piece of at least the next power of two, and that power."""
    wanted, pieces, start = 1, [], 0
    while wanted < size:
        wanted *= 2
    for length in (64, 32, 16, 8, 4, 2, 1):
        if len(cells) & length:
            pieces += free_pieces(cells, start, length)
            start += length
    pieces = [piece for piece in pieces if piece[0] >= wanted]
    return (min(pieces)[1], wanted) if pieces else (None, 0)


CALLS = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60)


@pytest.mark.parametrize(
    ("kind", "model"), [(FirstFit, first_fit_by_cells), (Buddy, buddy_by_cells)]
)
@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 100), calls=CALLS)
def test_every_call_does_what_a_row_of_cells_says(kind, model, size, calls):
    """The model marks each token as taken or free, and looks for room from the beginning."""
    memory, cells, regions = kind(size), [False] * size, []
    for gives_back, number in calls:
        if gives_back and regions:
            start, length = regions.pop(number % len(regions))
            memory.free(start)
            cells[start : start + length] = [False] * length
        else:
            wanted = number if gives_back else (number - 1) // 4 + 1
            start, length = model(cells, wanted)
            assert memory.allocate(wanted) == start
            if start is not None:
                regions.append((start, length))
                cells[start : start + length] = [True] * length
        memory.check_invariants()
        assert memory.num_free == size - sum(cells)
    for start, _ in regions:
        memory.free(start)
    assert memory.num_free == size
    assert memory.holes == kind(size).holes


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
def test_the_checks_can_fail(kind):
    memory = kind(8)
    memory.allocate(3)
    memory.taken[6] = 1
    with pytest.raises(AssertionError):
        memory.check_invariants()


def test_a_piece_that_starts_between_two_buddies_is_noticed():
    memory = Buddy(8)
    memory.holes = {(1, 0), (1, 7), (2, 1), (2, 3), (2, 5)}
    with pytest.raises(AssertionError):
        memory.check_invariants()


def test_holes_that_touch_are_noticed():
    memory = FirstFit(8)
    memory.holes = [(0, 4), (4, 8)]
    with pytest.raises(AssertionError):
        memory.check_invariants()


# --- in the simulator


def run(policy, requests, memory, **settings):
    settings = {"block_size": 1, "history": True} | settings
    return simulate(policy, requests, memory=memory, **settings)


SCATTERED = [(4, 1), (2, 6), (4, 1), (6, 2)]  # with what each declares, 16 + 6 tokens
DECLARED = [1, 6, 1, 2]


def test_a_piece_too_small_holds_back_what_the_total_would_let_in_worked_by_hand():
    """20 tokens; requests of 5, 8, 5 and 8 come. The first three take 0-4, 5-12 and 13-17.

    Step 0: two tokens are left, and requests 0 and 2 end. In step 1 there are 12 free tokens, in
    pieces of 5 and 7: request 3 needs 8 in one, and waits for request 1, which ends in step 5.
    Counted in tokens it comes in at step 1.
    """
    counted = run(reserve_limit, SCATTERED, None, budget=20, declared=DECLARED)
    assert counted.history.admitted == [(0, 0), (0, 1), (0, 2), (1, 3)]
    whole = run(reserve_limit, SCATTERED, FirstFit, budget=20, declared=DECLARED)
    assert whole.history.admitted == [(0, 0), (0, 1), (0, 2), (6, 3)]
    assert whole.history.free == [2, 12, 12, 12, 12, 12, 12, 12]
    assert whole.unreserved == (2 + 5 * 12) / (6 * 20)  # the six steps in which request 3 waits


def test_buddies_round_up_what_first_fit_gives_exactly_worked_by_hand():
    """16 tokens; each request reserves 5. First fit has room for three, buddies for two of 8."""
    requests = [(4, 1)] * 4
    exact = run(reserve_limit, requests, FirstFit, budget=16, declared=1)
    assert exact.history.running == [3, 1]
    halves = run(reserve_limit, requests, Buddy, budget=16, declared=1)
    assert halves.history.running == [2, 2]
    assert halves.history.free == [6, 6]  # what the rounding takes is nobody's


def test_a_region_larger_than_any_piece_is_refused_at_the_start():
    """Of 24 tokens the largest piece of a buddy system is 16, and 17 tokens take 32."""
    requests = [(9, 2), (8, 2)]
    result = run(reserve_limit, requests, Buddy, budget=24, declared=8)
    assert result.refusals == {0: "needs 17 tokens in one piece, no piece of 24 tokens is as large"}
    assert result.finished == 1
    assert run(reserve_limit, requests, FirstFit, budget=24, declared=8).refused == 0
    nothing = run(reserve_limit, [(30, 2)], Buddy, budget=24, declared=8)
    assert nothing.refusals == {0: "needs 38 blocks, the pool has 24"}


def test_memory_in_one_piece_is_for_policies_that_reserve():
    with pytest.raises(ValueError, match="paged grows, and a region of contiguous memory does not"):
        run(paged, [(4, 1)], FirstFit)


def test_memory_that_never_gives_a_region_fails_loudly():
    """Asked at submission it has room, and then never has any."""

    class Full(FirstFit):
        def allocate(self, size):
            return None

    kinds = iter([FirstFit, Full])

    def memory(size):
        return next(kinds)(size)

    with pytest.raises(RuntimeError, match="should end did not, in 4 steps"):
        run(reserve_limit, [(4, 2)], memory, budget=16, declared=2)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), max_size=15),
    policy=st.sampled_from([reserve_max, reserve_limit, reserve_power_of_2]),
    kind=st.sampled_from([FirstFit, Buddy]),
    block_size=st.integers(1, 4),
    budget=st.integers(4, 120),
    declared=st.integers(0, 16),
)
def test_one_piece_never_holds_more_than_the_total_and_every_region_comes_back(
    requests, policy, kind, block_size, budget, declared
):
    made = []

    def watched(size):
        made.append(kind(size))
        return made[-1]

    pool = {"budget": budget, "block_size": block_size, "declared": declared, "max_context": 40}
    whole = run(policy, requests, watched, **pool)
    counted = run(policy, requests, None, **pool)
    assert whole.finished + whole.refused == len(requests)
    assert set(counted.refusals) <= set(whole.refusals)
    assert whole.preemptions == 0
    assert min(whole.history.running, default=1) >= 1
    if not whole.refusals and requests:
        assert whole.steps >= counted.steps
    for memory in made:  # the last one is the server's, the others only asked whether it can hold
        memory.check_invariants()
    server = made[-1]
    if requests:
        assert (server.num_free, server.taken) == (server.size, {})


def test_numpy_s_integers_are_sizes():
    for memory in (FirstFit(np.int64(8)), Buddy(8)):
        assert memory.allocate(np.int64(8)) == 0
