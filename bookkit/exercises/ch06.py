"""Checks of chapter 6: the kernel."""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from bookkit.check import Verdict, check, each_guess, expect
from kernels.paged_attention import Card, plan

MASKS = ("scores", "v", "k")
FILLINGS = {"0": 0.0, "10,000": 1e4, "NaN": torch.nan}


def check_small_blocks(guess: Sequence[float] | None) -> Verdict:
    """Exercise 1: bytes of a table, and the tokens a turn of each kernel's loop.  Given."""
    table = torch.zeros(32_768, dtype=torch.int32)
    queries = torch.empty(64, 32, 128, dtype=torch.bfloat16, device="meta")
    tile = plan(queries, queries.new_empty(1, 1, 8, 128), 32_768, Card(132)).tile
    answers = {
        "bytes of the table": (table.nbytes, 0),
        "tokens a turn, naive": (1, 0),
        "tokens a turn, ours": (tile, 0),
    }
    return each_guess(guess, answers, "an id has four bytes, and a tile is not a block.")


def check_prefill(prefill: Callable | None) -> Verdict:
    """Exercise 2: some queries of one conversation, each up to its own position.  Given."""

    def test(prefill):
        for block_size, n, past in ((8, 1, 0), (8, 2, 7), (5, 17, 8), (8, 3, 13)):
            case = f"n = {n}, past = {past}, blocks of {block_size}"
            inputs, expected = _conversation(block_size, n, past)
            out = prefill(*inputs, past)
            assert isinstance(out, torch.Tensor), f"{case}: a tensor is expected, got {out!r:.40}."
            expect(tuple(out.shape), tuple(expected.shape), f"{case}, shape")
            off = (out.cpu().double() - expected).abs().amax(-1)
            for query, head in product(range(n), range(2)):
                where = f"{case}: query {query}, head {head}"
                error = float(off[query, head])
                assert error == error, f"{where} is NaN, as slots without a token are."
                seen = f"attention to positions 0 to {past + query}"
                assert error < 1e-5, f"{where} is off by {error:.2g} from {seen}."

    tried = "up to 17 queries, ends on and beside a block's edge, NaN in every other slot."
    return check(prefill, test, tried)


def check_masks(wrong: Sequence[tuple[str, str]] | None) -> Verdict:
    """Exercise 3: which of the nine runs are wrong, as pairs of a mask and a filling.  Given."""

    def test(pairs):
        guessed = set()
        for pair in pairs:
            words = f"{pair!r} is no pair of a mask, {MASKS}, and a filling, {tuple(FILLINGS)}."
            assert not isinstance(pair, str) and tuple(pair) in product(MASKS, FILLINGS), words
            guessed.add(tuple(pair))
        for mask in MASKS:
            hits = sum(((mask, fill) in guessed) == _goes_wrong(mask, fill) for fill in FILLINGS)
            assert hits == 3, f'without the mask "{mask}", {hits} of three verdicts are right.'

    return check(wrong, test, "all nine verdicts, against five tokens in a block of sixteen.")


def _conversation(block_size: int, n: int, past: int):
    """Queries, two pools and a table of one row; and what attention in float64 says."""
    draw = torch.Generator().manual_seed(n)
    used = -(-(past + n) // block_size)
    queries = torch.randn(n, 2, 16, generator=draw)
    tokens = torch.randn(2, past + n, 2, 16, generator=draw)
    pools = torch.full((2, used + 2, block_size, 2, 16), torch.nan)
    ids = torch.randperm(used + 2, generator=draw)[:used]
    for position in range(past + n):
        offset = position % block_size
        pools[:, ids[position // block_size], offset] = tokens[:, position]
    expected = torch.empty(n, 2, 16, dtype=torch.float64)
    for query, head in product(range(n), range(2)):
        keys, values = tokens[:, : past + query + 1, head].double()
        weights = (keys @ queries[query, head].double() / 4).softmax(0)
        expected[query, head] = weights @ values
    table = torch.cat([ids, torch.tensor([-1, -1])]).int()[None]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [x.to(device) for x in (queries, *pools, table)], expected


def _goes_wrong(mask: str, filling: str) -> bool:
    """Whether attention to five of sixteen slots is wrong without one of its three masks."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 4, generator=draw) for rows in (1, 16, 16))
    expected = (k[:5] @ q[0]).softmax(0) @ v[:5]
    held = torch.arange(16)[:, None] < 5
    read_k, read_v = (torch.where(held, pool, FILLINGS[filling]) for pool in (k, v))
    k = read_k if mask == "k" else torch.where(held, k, 0.0)
    v = read_v if mask == "v" else torch.where(held, v, 0.0)
    scores = k @ q[0]
    if mask != "scores":
        scores = torch.where(held[:, 0], scores, -1e30)
    return not torch.allclose(scores.softmax(0) @ v, expected)
