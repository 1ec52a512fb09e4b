"""What benchmarks/gpu.py checks and times: shapes, batches, and every way to attend to one.

A method takes a `Batch` and returns a function that answers for the batch's pools of a number. All
methods read the same keys and values, and are held against the same answer in float64.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.paged_attention import Launch, paged_attention, plan
from kernels.reference import paged_attention as reference
from labcore.attention import token_slots
from labcore.blocks import blocks_needed

GPT2, LLAMA = (12, 12, 64), (32, 8, 128)
MODELS = {GPT2: "GPT-2", LLAMA: "Llama-3-8B"}
ALLOWED = {"float32": 3e-5, "float16": 2e-3, "bfloat16": 1.2e-2}  # TF32 would err by 3e-4
PAGE = 128  # tokens a block for FlexAttention: the blocks of its mask are the pool's


@dataclass(frozen=True)
class Shape:
    """Heads are (query heads, key/value heads, head size); one length a sequence, in tokens."""

    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    dtype: str
    block_size: int = 16
    in_order: bool = False

    def facts(self):
        """What a row of the results says about it."""
        return {
            "model": MODELS.get(self.heads, "{}/{} heads of {}".format(*self.heads)),
            "heads": self.heads, "dtype": self.dtype,
            "batch": len(self.lengths), "context": max(self.lengths), "tokens": sum(self.lengths),
            "block_size": self.block_size, "order": "in order" if self.in_order else "scattered",
        }  # fmt: skip

    def empty(self, device):
        """Queries and a pool of one block, for what looks at shapes and types only."""
        q_heads, kv_heads, head_dim = self.heads
        new = partial(torch.empty, dtype=getattr(torch, self.dtype), device=device)
        queries = new(len(self.lengths), q_heads, head_dim)
        return queries, new(1, self.block_size, kv_heads, head_dim)

    def plan(self, card):
        """The launch that our kernel chooses."""
        return plan(*self.empty("meta"), max(self.lengths), card)


RAGGED = tuple(torch.randint(1, 4096, (16,), generator=torch.Generator().manual_seed(0)).tolist())
SHAPES = [
    Shape(LLAMA, (4096,) * 64, "bfloat16"),
    Shape(GPT2, (512,) * 64, "float16"),
    Shape(LLAMA, (4096,), "bfloat16"),
    Shape(GPT2, (512,) * 64, "float32"),
    Shape(LLAMA, (512,) * 64, "bfloat16"),
    Shape(GPT2, (4096,) * 64, "float16"),
    Shape(LLAMA, (32768,), "bfloat16"),
    Shape(GPT2, (512,) * 8, "float32"),
    Shape(LLAMA, RAGGED, "bfloat16"),
]
LAYOUTS = [
    replace(shape, block_size=block_size, in_order=in_order)
    for shape in (SHAPES[0], SHAPES[1], SHAPES[4])
    for in_order, block_size in product((False, True), (1, 16, 64, 256))
    if in_order or block_size != 16
]
TINY = [
    Shape((2, 2, 64), (20, 20), "float32", block_size=4),
    Shape((4, 2, 64), (9, 24), "bfloat16", in_order=True),
]
TINY_PAGES = [Shape((4, 2, 64), (PAGE, 2 * PAGE), "float16", block_size=PAGE)]
CHANGES = [
    {"num_stages": 1}, {"num_stages": 3}, {"num_stages": 5}, {"num_warps": 2}, {"num_warps": 8},
    {"tile": 32}, {"tile": 64}, {"tile": 128}, {"tile": 32, "num_warps": 2},
    {"tile": 32, "num_stages": 3}, {"tile": 128, "num_warps": 8},
]  # fmt: skip


class Wrong(Exception):
    """An answer too far from the one in float64."""


class Batch:
    """Queries, tables, and so many pairs of pools that they hold `least_bytes`."""

    def __init__(self, shape, device, least_bytes=0):
        self.shape, (q_heads, kv_heads, head_dim) = shape, shape.heads
        needed = torch.tensor([blocks_needed(n, shape.block_size) for n in shape.lengths])
        num_blocks = int(needed.sum()) + 3
        ids = torch.arange(num_blocks) if shape.in_order else torch.randperm(num_blocks)
        is_used = torch.arange(int(needed.max())) < needed[:, None]  # [batch, max_blocks]
        tables = torch.zeros(is_used.shape, dtype=torch.int32)
        tables[is_used] = ids[: int(needed.sum())].int()
        self.tables, self.is_used = tables.to(device), is_used.to(device)
        self.lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        new = partial(torch.randn, dtype=getattr(torch, shape.dtype), device=device)
        self.queries = new(len(shape.lengths), q_heads, head_dim)
        self.out = torch.empty_like(self.queries)
        token_bytes = 2 * kv_heads * head_dim * self.out.element_size()
        size = num_blocks, shape.block_size, kv_heads, head_dim
        pairs = max(1, math.ceil(least_bytes / (num_blocks * shape.block_size * token_bytes)))
        self.pools = [(new(size), new(size)) for _ in range(pairs)]
        self.bytes = sum(shape.lengths) * token_bytes + 2 * self.out.nbytes  # that must move
        self.bytes += 4 * int(needed.sum()) + self.lens.nbytes

    def poison(self):
        """NaN into every slot that nobody owns, rubbish into every entry that nobody may read."""
        slots, valid = token_slots(self.tables, self.lens, self.shape.block_size)
        for pool in (pool.flatten(0, 1) for pair in self.pools for pool in pair):
            foreign = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
            foreign[slots[valid]] = False
            pool[foreign] = torch.nan
        self.tables[~self.is_used] = 10**9

    @cached_property
    def expected(self):
        """The answer for the first pools."""
        return reference(self.queries, *self.pools[0], self.tables, self.lens)

    def error(self, call):
        """The largest relative error of a head of a query, on an output full of NaN, or Wrong."""
        expected, allowed = self.expected, ALLOWED[self.shape.dtype]
        self.out.fill_(torch.nan)
        difference = call(0).reshape(expected.shape).double() - expected
        size = expected.norm(dim=-1).clamp_min(1e-30)  # an empty sequence must give 0
        error = float((difference.norm(dim=-1) / size).max())
        if not error <= allowed:
            raise Wrong(f"relative error {error:.2g}, allowed {allowed:.2g}")
        return error

    @cached_property
    def slots_and_mask(self):
        """The slot of each token, and a mask if some sequence is shorter than the longest."""
        slots, valid = token_slots(self.tables, self.lens, self.shape.block_size)
        return slots, None if valid.all() else valid[:, None, None]

    def gathered(self, i):
        """Keys and values of pair i, side by side: each [batch, kv_heads, longest, head_dim]."""
        slots, _ = self.slots_and_mask
        rows = (pool.flatten(0, 1).index_select(0, slots.flatten()) for pool in self.pools[i])
        return [x.unflatten(0, slots.shape).transpose(1, 2) for x in rows]

    @cached_property
    def caches(self):
        """All pairs as caches that need no table."""
        return [[x.contiguous() for x in self.gathered(i)] for i in range(len(self.pools))]

    def sdpa(self, keys, values):
        """torch's attention. A group's queries stand in for positions: then every backend can."""
        queries = self.queries.unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, group, dim]
        return F.scaled_dot_product_attention(queries, keys, values, self.slots_and_mask[1])


def kernel(batch, launch=None, check_ids=False):
    """Ours."""
    longest = max(batch.shape.lengths)
    return lambda i: paged_attention(
        batch.queries, *batch.pools[i], batch.tables, batch.lens,
        out=batch.out, max_seq_len=longest, launch=launch, check_ids=check_ids,
    )  # fmt: skip


def gather_sdpa(batch):
    """Copy keys and values side by side, then attend."""
    return lambda i: batch.sdpa(*batch.gathered(i))


def contiguous_sdpa(batch, backend=None):
    """Attend to what lies side by side: by the backend that torch prefers, or by this one."""
    caches = batch.caches

    def call(i):
        with sdpa_kernel(backend) if backend else nullcontext():
            return batch.sdpa(*caches[i])

    return call


def varlen_paged(batch):
    """torch's attention over sequences of many lengths, where it takes a block table."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise NotImplementedError(f"varlen_attn takes no block table in torch {torch.__version__}")
    starts = torch.arange(len(batch.lens) + 1, dtype=torch.int32, device=batch.lens.device)
    longest, (q_heads, kv_heads, _) = max(batch.shape.lengths), batch.shape.heads
    return lambda i: varlen_attn(
        batch.queries, *batch.pools[i], starts, None, 1, longest,
        seqused_k=batch.lens, block_table=batch.tables, enable_gqa=q_heads > kv_heads,
    )  # fmt: skip


def flex_paged(batch):
    """FlexAttention over the whole pool, under a mask of the blocks that the tables name.

    Sequences of whole blocks only. What is compiled reads the numbers of blocks and their ids;
    what is not compiled asks the function.
    """
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    attend = torch.compile(flex_attention, dynamic=False) if batch.lens.is_cuda else flex_attention
    num_blocks, block_size, kv_heads, _ = batch.pools[0][0].shape
    full = batch.is_used.sum(1, dtype=torch.int32)[:, None, None]
    ids = F.pad(batch.tables, (0, num_blocks - batch.tables.shape[1]))[:, None, None]
    owned = torch.zeros(len(full), num_blocks, dtype=torch.bool, device=full.device)
    owned[batch.is_used.nonzero()[:, 0], batch.tables[batch.is_used].long()] = True
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(full), ids, full, ids,
        BLOCK_SIZE=(128, block_size), seq_lengths=(1, num_blocks * block_size),
        mask_mod=lambda row, head, query, slot: owned[row, slot // block_size],
    )  # fmt: skip
    caches = [[pool.flatten(0, 1)[None].transpose(1, 2) for pool in pair] for pair in batch.pools]
    grouped = batch.shape.heads[0] > kv_heads
    return lambda i: attend(
        batch.queries[:, :, None], *caches[i], block_mask=mask, enable_gqa=grouped
    )


class Method(NamedTuple):
    """A way to attend, with what the results say about our launch; `eager`: without a graph."""

    name: str
    build: Callable
    launch: Launch | None = None
    change: dict | None = None
    eager: bool = False


class Job(NamedTuple):
    """Methods on a shape, checked and then timed, if so many seconds are left."""

    shape: Shape
    methods: list[Method]
    seconds: float
    timed: bool = True


def ours(launch, change=None):
    """Our kernel as it is planned, or with a change."""
    name = "".join(f", {key}={value}" for key, value in (change or {}).items())
    launch = replace(launch, **change or {})
    return Method(f"kernel{name}", partial(kernel, launch=launch), launch, change)


def main_methods(launch):
    """Through the table, without a table, and by getting rid of the table."""
    return [
        ours(launch),
        Method("contiguous SDPA", contiguous_sdpa),
        Method("gather + SDPA", gather_sdpa),
    ]


def all_methods(launch):
    """These, by each backend of torch's, and what it costs to launch ours."""
    first = {"tile": 16, "num_splits": 1, "num_stages": 1}  # the kernel that one writes first
    found = [*main_methods(launch), ours(launch, first)]
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        build = partial(contiguous_sdpa, backend=getattr(SDPBackend, name))
        found.append(Method(f"contiguous SDPA, {name}", build))
    for name, check_ids in (("kernel, eager", False), ("kernel, eager, ids checked", True)):
        found.append(Method(name, partial(kernel, check_ids=check_ids), eager=True))
    return found


def paged_methods(launch):
    """Others that read through a table. FlexAttention compiles for up to a minute."""
    varlen, flex = Method("varlen_attn", varlen_paged), Method("flex_attention", flex_paged)
    return [*main_methods(launch), varlen, flex]


def sweep(launch):
    """Our kernel as it is planned, and with one or two things changed."""
    splits = [{"num_splits": max(1, int(launch.num_splits * x))} for x in (0.25, 0.5, 2, 4)]
    changes = {replace(launch, **change): change for change in CHANGES + splits}
    changes.pop(launch, None)
    return [ours(launch, change) for change in ({}, *changes.values())]


def shapes_to_check():
    """Every block size with every type; head sizes and groups of heads take turns.

    Lengths: nothing, one token, around the end of a block, and several tiles.
    """
    groups, head_dims = cycle([(4, 4), (6, 2), (8, 2), (8, 1)]), cycle([64, 80, 128])
    return [
        Shape((*next(groups), next(head_dims)), (0, 1, size - 1, size, size + 1, 200), dtype, size)
        for dtype, size in product(ALLOWED, (1, 16, 64, 256, 24))
    ]


def jobs(card, tiny):
    """All there is to do, what matters most first."""
    turns = cycle([{"num_splits": 3, "tile": 32}, *CHANGES])
    for shape in shapes_to_check()[:: 7 if tiny else 1]:
        changes = {}, next(turns), next(turns), next(turns)
        yield Job(shape, [ours(shape.plan(card), change) for change in changes], 100, timed=False)
    for shape in TINY[:1] if tiny else SHAPES:
        yield Job(shape, all_methods(shape.plan(card)), 10)
    for shape in TINY[1:] if tiny else LAYOUTS:
        yield Job(shape, main_methods(shape.plan(card)), 8)
    for shape in TINY[:1] if tiny else SHAPES[:3]:
        yield Job(shape, sweep(shape.plan(card))[: 2 if tiny else None], 15)
    for shape in TINY_PAGES if tiny else [replace(x, block_size=PAGE) for x in SHAPES[:2]]:
        yield Job(shape, paged_methods(shape.plan(card)), 45)
