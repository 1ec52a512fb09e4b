"""Cases for the kernel: scattered blocks, and fill in every slot that no sequence owns.

The pools are views into larger memory that holds the same fill all round. With NaN, what is read by
mistake spoils the answer; with a large finite number, it survives where a minimum or maximum would
pass over NaN.
"""

import math
import os
import random
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from models import NAN, RUBBISH

from kernels import reference
from kernels.paged_attention import DTYPES, Launch, next_power_of_2, paged_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests/conftest.py, where there is no GPU
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
FLOAT32, FLOAT16, BFLOAT16 = DTYPES
TYPES = DTYPES if INTERPRETED or CAPABILITY >= (8, 0) else (FLOAT32, FLOAT16)  # a T4 has two
FILLS, PADDINGS = (NAN, RUBBISH), (-1, 10**9)
GUARD = 77.0  # round the answer, and round what the launcher takes for itself

# Largest error of an answer, in units of the largest value, because an answer is a mean of values.
# Sums are float32 whatever the type; only the weights and the answer are rounded to it.
TOLERANCE = {
    FLOAT32: 1e-6,  # another order of sums: a few times 2**-24
    FLOAT16: 2**-10,  # 11 bits: weights and answer are each off by 2**-11 at most
    BFLOAT16: 2**-7,  # 8 bits, 2**-9 each on a card; the interpreter does not round, it cuts off
}
LOGIT_TOLERANCE = 2**-21  # of a logit of 1: four roundings. exp makes them errors of the weight


@dataclass(frozen=True)
class Shape:
    """What a case is like. `heads`: those of queries, those of keys and values.

    `spread` is the standard deviation of the logits, `padding` stands in unused entries of tables.
    """

    lengths: tuple[int, ...]
    block_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = FLOAT32
    layout: str = "apart"
    fill: float = NAN
    padding: int = -1
    spread: float = 1.0


@dataclass(frozen=True)
class Case:
    """Arguments of a call, the numbers that went into the pools, and the memory round them.

    `dense` holds keys and values of each sequence side by side, [2, length, kv_heads, head_dim].
    """

    queries: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    dense: list[torch.Tensor]
    memory: list[torch.Tensor]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.queries, self.key_pool, self.value_pool, self.block_tables, self.seq_lens
        )  # fmt: skip


def lengths_around(block_size: int) -> tuple[int, ...]:
    """0, 1, a block and its neighbours; and one that fills its table, 50 tokens or two blocks."""
    full = max(2, -(-50 // block_size)) * block_size
    return tuple(dict.fromkeys([block_size + 1, 0, full, 1, block_size - 1, block_size]))


def paged_case(shape: Shape, seed: int = 0) -> Case:
    """Queries, keys and values depend on `seed` and not on where they lie, in what layout."""
    torch.manual_seed(seed)
    (q_heads, kv_heads), batch = shape.heads, len(shape.lengths)
    numbers = torch.randn(batch, q_heads, shape.head_dim) * shape.spread
    dense = [
        torch.randn(2, n, kv_heads, shape.head_dim).to(DEVICE, shape.dtype) for n in shape.lengths
    ]
    counts = [-(-n // shape.block_size) for n in shape.lengths]
    num_blocks = sum(counts) + 3
    ids = random.Random(seed).sample(range(num_blocks), num_blocks)
    wide = torch.full((batch, max(counts) + 1), shape.padding, dtype=torch.int32, device=DEVICE)
    pools, memory = LAYOUTS[shape.layout](num_blocks, shape)
    for row, (length, count) in enumerate(zip(shape.lengths, counts, strict=True)):
        own = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32, device=DEVICE)
        wide[row, :count] = own
        position = torch.arange(length, device=DEVICE)
        for pool, new in zip(pools, dense[row], strict=True):
            pool[own[position // shape.block_size], position % shape.block_size] = new
    gap = 3 if shape.layout == "mixed" else 0
    packed = _filled(shape, batch, q_heads + 2 * kv_heads, shape.head_dim + gap)
    queries = packed[:, :q_heads, : shape.head_dim]
    queries.copy_(numbers)
    tables, lengths = wide[:, :-1], torch.tensor(shape.lengths, dtype=torch.int32, device=DEVICE)
    return Case(queries, *pools, tables, lengths, dense, [*memory, packed, wide, lengths])


def _filled(shape, *axes):
    return torch.full(axes, shape.fill, dtype=shape.dtype, device=DEVICE)


def _apart(num_blocks, shape):
    """A tensor for keys and one for values, with a block of guards at each end."""
    axes = num_blocks + 2, shape.block_size, shape.heads[1], shape.head_dim
    memory = [_filled(shape, *axes) for _ in range(2)]
    return [m[1:-1] for m in memory], memory


def _layer(num_blocks, shape):
    """The middle one of three layers, as in `labcore.caches.PagedKV`."""
    axes = num_blocks, shape.block_size, shape.heads[1], shape.head_dim
    memory = [_filled(shape, 3, *axes) for _ in range(2)]
    return [m[1] for m in memory], memory


def _mixed(num_blocks, shape):
    """Keys that share blocks with others, values head by head with gaps: no two strides agree.

    Nor do the queries' with those of a tensor of their own.
    """
    kv_heads, size, width = shape.heads[1], shape.block_size, shape.head_dim
    keys = _filled(shape, num_blocks + 2, size, 2, kv_heads, width)
    values = _filled(shape, num_blocks + 2, kv_heads, size, width + 3)
    return [keys[1:-1, :, 0], values[1:-1, ..., :width].transpose(1, 2)], [keys, values]


LAYOUTS = {"apart": _apart, "layer": _layer, "mixed": _mixed}


def launch_for(shape: Shape, tile: int = 64, num_splits: int = 1, rows: int = 1) -> Launch:
    """A launch whose keys fit in 16 KiB a tile, so that every card has the shared memory."""
    row_bytes = next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    group = shape.heads[0] // shape.heads[1]
    return Launch(min(tile, 2**14 // row_bytes), max(rows, next_power_of_2(group)), num_splits)


def scores(case: Case, scale: float | None = None) -> list[torch.Tensor]:
    """The logits of each sequence in float64, from what lies side by side: [q_heads, length]."""
    _, q_heads, head_dim = case.queries.shape
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    return [
        torch.einsum(
            "hd,thd->ht", query, keys.double().repeat_interleave(q_heads // keys.shape[1], dim=1)
        )
        * scale
        for query, (keys, _) in zip(case.queries.double(), case.dense, strict=True)
    ]


def largest(tensors) -> float:
    """The largest absolute value in some tensors; 0 if they hold none."""
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def error(out: torch.Tensor, expected: torch.Tensor, case: Case) -> torch.Tensor:
    """Each row's largest error, in units of the largest value: [batch]."""
    off = (out.double() - expected).abs().amax((1, 2))
    return off / max(largest(values for _, values in case.dense), 1e-30)


def tolerance(case: Case, scale: float | None = None) -> float:
    """How large `error` may be."""
    return TOLERANCE[case.queries.dtype] + LOGIT_TOLERANCE * largest(scores(case, scale))


def run(case: Case, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel; everything around its answer must stay as it was."""
    before = [memory.clone() for memory in case.memory]
    with guarded() as room_of:
        room = room_of(case.queries, case.queries.shape)
        out, lse = paged_attention(*case.tensors, out=room, return_lse=True, **options)
    assert out.data_ptr() == room.data_ptr()
    assert all(map(same_bits, case.memory, before))
    return out, lse


@contextmanager
def guarded():
    """Tensors made with `new_empty` hold NaN at first, and lie between guards that must survive."""
    rooms, end, new_empty = [], 64, torch.Tensor.new_empty

    def room_of(tensor, *shape, **options):
        shape = shape if isinstance(shape[0], int) else shape[0]
        if shape == (0,):  # the interpreter's, for its own use
            return new_empty(tensor, 0, **options)
        room = new_empty(tensor, math.prod(shape) + 2 * end, **options).fill_(GUARD)
        rooms.append(room)
        return room[end:-end].fill_(NAN).view(shape)

    with mock.patch.object(torch.Tensor, "new_empty", room_of):
        yield room_of
    for room in rooms:
        assert (room[:end] == GUARD).all() and (room[-end:] == GUARD).all()


@contextmanager
def addresses_read():
    """A list that fills with every address which an interpreted kernel loads from."""
    from triton.runtime.interpreter import InterpreterBuilder

    read, load = [], InterpreterBuilder.create_masked_load

    def watched(builder, pointers, mask, *rest):
        read.extend(pointers.data[mask.data].tolist())
        return load(builder, pointers, mask, *rest)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", watched):
        yield read


def addresses(tensor: torch.Tensor) -> torch.Tensor:
    """Where each number of a tensor lies: int64, of the tensor's shape."""
    at = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + torch.arange(size) * stride * tensor.itemsize
    return at


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors without gaps hold the same bytes; NaN equals NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check(case: Case, scale: float | None = None, **options) -> None:
    """The answer is the oracle's, the sums are torch.logsumexp's, and nothing else was touched."""
    out, lse = run(case, scale=scale, **options)
    expected = reference.paged_attention(*case.tensors, scale)
    assert (error(out, expected, case) <= tolerance(case, scale)).all()
    logits = scores(case, scale)
    sums = torch.stack([logit.logsumexp(-1) for logit in logits])
    empty = case.seq_lens == 0
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    off = (lse - sums)[~empty].abs()
    assert (off <= LOGIT_TOLERANCE * (2 + largest(logits))).all()
