"""Compile the launcher's kernels for GPUs that are not here; `python compile_kernels.py`.

It prints JSON. `tests/test_compile.py` runs it in a process of its own, because a Triton that
interprets cannot compile, and judges what comes out. The word `grid` compiles GRID instead.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
import triton
import triton.language as tl
from triton import JITFunction
from triton.errors import TritonError
from triton.runtime import driver

from bookkit.compile_only import TARGETS, compile_only
from kernels.paged_attention import Card, Launch, next_power_of_2, paged_attention, plan

MAX_SEQ_LEN = 4096
GPT2, LLAMA = (12, 12, 64), (32, 8, 128)  # query heads, key/value heads, head size; Llama-3-8B


@dataclass(frozen=True)
class Variant:
    """One call of the launcher. `launch` None is the plan's; `num_blocks` sizes the pools.

    `offset`: how many numbers lie before the pool's first one in their allocation.
    """

    target: str
    dtype: str
    heads: tuple[int, int, int]
    block_size: int = 16
    batch: int = 64
    num_blocks: int = 8
    offset: int = 0
    launch: Launch | None = None

    def __str__(self):
        heads = "/".join(map(str, self.heads))
        return (
            f"{self.target}, {self.dtype}, {heads}, batch {self.batch}, {self.num_blocks} blocks "
            f"of {self.block_size} at {self.offset}, {self.launch or 'as planned'}"
        )

    def tensors(self, device="cpu"):
        """Queries, both pools, tables and lengths. Nothing reads or writes their elements."""
        q_heads, kv_heads, head_dim = self.heads
        empty = partial(torch.empty, dtype=getattr(torch, self.dtype), device=device)
        integers = partial(torch.empty, dtype=torch.int32, device=device)
        pool = (self.num_blocks, self.block_size, kv_heads, head_dim)
        numel = torch.Size(pool).numel()
        return (
            empty(self.batch, q_heads, head_dim),
            *(empty(self.offset + numel)[self.offset :].view(pool) for _ in range(2)),
            integers(self.batch, -(-MAX_SEQ_LEN // self.block_size)),
            integers(self.batch),
        )

    def tile_and_threads(self):
        """Bytes of keys and values in a turn of the loop, and the threads that load them."""
        queries, key_pool = self.tensors("meta")[:2]
        card = Card(132, tensor_cores=self.target != "sm_75")
        launch = self.launch or plan(queries, key_pool, MAX_SEQ_LEN, card)
        width = next_power_of_2(max(16, self.heads[2]))
        threads = launch.num_warps * TARGETS[self.target].warp_size
        return 2 * launch.tile * width * queries.element_size(), threads

    def call(self):
        paged_attention(*self.tensors(), check_ids=False, launch=self.launch)


GPT2_ON_SM80, GPT2_ON_SM90 = (Variant(target, "float16", GPT2) for target in ("sm_80", "sm_90"))
VARIANTS = [
    Variant("sm_75", "float16", GPT2, batch=1),
    Variant("sm_75", "float32", (32, 4, 128), block_size=3),
    GPT2_ON_SM80,
    Variant("sm_80", "bfloat16", (24, 8, 96), block_size=256),
    GPT2_ON_SM90,
    Variant("sm_90", "float16", (24, 8, 80), block_size=3),
    Variant("sm_90", "bfloat16", LLAMA, batch=1),
    Variant("sm_90", "bfloat16", (32, 4, 256)),
    Variant("sm_90", "float32", GPT2, block_size=1, batch=1),
    Variant("gfx942", "bfloat16", LLAMA, batch=1),
    # AMD's compiler addresses pools of more than 2 GiB by other instructions than smaller ones.
    Variant("gfx942", "float16", GPT2, block_size=256, num_blocks=2**31 // (256 * 12 * 64 * 2) + 1),
]
GRID = [
    Variant(target, dtype, heads, block_size, 1 if block_size == 16 else 64)
    for target, dtype, heads, block_size in product(
        TARGETS,
        ("float32", "float16", "bfloat16"),
        (GPT2, LLAMA, (24, 8, 80), (24, 8, 96), (32, 4, 256), (25, 25, 64)),
        (1, 3, 16, 256),
    )
    if (target, dtype) != ("sm_75", "bfloat16")
]
# Each of these is wrong in one way.
BAD = {
    "unaligned": Variant("sm_90", "float16", GPT2, offset=1),
    "one warp": Variant("sm_90", "float16", GPT2, launch=Launch(128, 16, num_warps=1)),
    "large tile": Variant("sm_75", "float32", GPT2, launch=Launch(128, 1)),
    "bfloat16": Variant("sm_75", "bfloat16", GPT2),
}
ONES = Variant("sm_90", "float16", (1, 1, 1), block_size=1, batch=1, num_blocks=1)


@triton.jit
def product_of_depth_8(x_ptr, y_ptr, out_ptr):
    """[16, 8] times [8, 16] in float16: right in the interpreter, refused by the compiler."""
    i, k = tl.arange(0, 16), tl.arange(0, 8)
    x = tl.load(x_ptr + i[:, None] * 8 + k[None, :])
    y = tl.load(y_ptr + k[:, None] * 16 + i[None, :])
    out = tl.dot(x, y, input_precision="ieee")
    tl.store(out_ptr + i[:, None] * 16 + i[None, :], out)


def multiply(x, y):
    out = torch.full((16, 16), float("nan"))
    product_of_depth_8[1,](x, y, out)
    return out


def outcome(target, call):
    """The kernels that `call` launches, in order, or why there are none."""
    try:
        with compile_only(target) as kernels:
            call()
    except (TritonError, TypeError) as error:
        return {"refused": f"{type(error).__name__}: {error}", "kernels": []}
    return {"refused": None, "kernels": [asdict(kernel) for kernel in kernels]}


def what_a_server_compiles():
    """How many kernels of each name there are in calls that differ as a server's calls do."""
    queries, *pools, _, seq_lens = GPT2_ON_SM90.tensors()
    with compile_only(GPT2_ON_SM90.target) as kernels:
        for batch, width, num_splits in ((64, 256, 5), (1, 1, 6), (3, 255, 7), (16, 1000, 8)):
            paged_attention(
                queries[:batch], *pools, torch.empty(batch, width, dtype=torch.int32),
                seq_lens[:batch], check_ids=False, launch=Launch(64, 16, num_splits),
            )  # fmt: skip
    return Counter(kernel.kernel for kernel in {id(kernel): kernel for kernel in kernels}.values())


def what_stays_patched():
    """For an unknown target and for a call that fails: the error, and whether all is as before."""
    before, found = (JITFunction.run, driver._active), {}
    for target in ("sm_1", "sm_90"):
        try:
            with compile_only(target):
                raise ZeroDivisionError
        except (KeyError, ZeroDivisionError) as error:
            found[target] = type(error).__name__, (JITFunction.run, driver._active) == before
    return found


def main(grid=False):
    variants = GRID if grid else [*VARIANTS, *BAD.values(), ONES]
    report = {str(variant): outcome(variant.target, variant.call) for variant in variants}
    if not grid:
        x, y = torch.empty(2, 128, dtype=torch.float16)
        report |= {
            "depth 8": outcome("sm_90", lambda: multiply(x, y)),
            "server": what_a_server_compiles(),
            "patched": what_stays_patched(),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
