"""What runs on the host: checks, the choice of tiles and splits, and the launch.

`kernels.split_kv` is imported at the first call: importing this module needs no card and no Triton.
"""

import math
from dataclasses import astuple, dataclass
from operator import index
from types import ModuleType

import torch
from torch import Tensor

from kernels.reference import check_shapes, check_tables

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_SPLITS = 128
MAX_WIDTH, MAX_ROWS_AND_WIDTH = 256, 32 * 256  # more passes a T4's shared memory, or any registers


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()


@dataclass(frozen=True)
class Launch:
    """What a caller may vary without changing the answer, rounding apart.

    `tile`: tokens a turn of the loop, a power of two from 16 up. `rows`: query heads of a group,
    padded to a power of two. `num_splits`: programs that share a sequence. `num_warps`: of 32
    threads, a program. `num_stages`: turns of the loop in flight.
    """

    tile: int
    rows: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self):
        whole = all(type(size) is int and size >= 1 for size in astuple(self))
        powers = self.tile, self.rows, self.num_warps
        if not whole or self.tile < 16 or any(n & (n - 1) for n in powers):
            raise ValueError(
                "whole numbers of 1 or more; tile, at least 16, rows and num_warps powers of two: "
                f"{self}"
            )


@dataclass(frozen=True)
class Card:
    """A GPU's multiprocessors, and whether they multiply 16-bit tiles.

    Those of NVIDIA do from compute capability 8.0 for Triton, those of AMD from CDNA on.  Given.
    """

    num_sms: int
    tensor_cores: bool = True


def plan(queries: Tensor, key_pool: Tensor, max_seq_len: int, card: Card | None) -> Launch:
    """Choose tile, splits and warps from shapes only, for a card; None is the interpreter.

    It reads no element and times nothing: a launch can be captured in a CUDA graph.  Given.
    """
    batch, q_heads, head_dim = queries.shape
    kv_heads = key_pool.shape[2]
    rows = next_power_of_2(q_heads // kv_heads)
    if card is None:  # pays for each operation, whatever its size: few large tiles
        return Launch(max(16, min(512, next_power_of_2(max_seq_len))), rows)
    row_bytes = next_power_of_2(head_dim) * queries.element_size()
    tile = min(64, 16 * 1024 // row_bytes)  # 16 KiB of keys: five programs fit on an SM
    if card.tensor_cores and queries.dtype != torch.float32:
        rows = max(16, rows)  # the least that one of their instructions multiplies
    else:  # the threads hold all products in registers, and a T4's shared memory is smaller
        tile = min(tile, 256 // rows) // (1 if card.tensor_cores else 2)
    tile = max(16, tile)
    wanted = round(4 * card.num_sms / max(1, batch * kv_heads))  # about four programs an SM
    most = min(MAX_SPLITS, max_seq_len // (2 * tile))  # each of two tiles or more
    return Launch(tile, rows, max(1, min(wanted, most)))


def paged_attention(
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    max_seq_len: int | None = None,
    launch: Launch | None = None,
    check_ids: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """One query a sequence, against the keys and values that its table names, read where they lie.

    Shapes as in `kernels.reference.paged_attention`; queries and pools are float32 (multiplied
    exactly, no TF32), float16 or bfloat16, tables and lengths int32, and each last axis lies
    without gaps. Returns `out` like the queries, and with `return_lse` the logarithm of each
    softmax's sum, [batch, q_heads] in float32; a sequence of length 0 gives 0 and -inf.
    `max_seq_len` (the table's width) helps `plan` to choose `launch`. `check_ids` looks at lengths
    and used ids, and the host waits for the card: switch it off where the tables are your own, and
    in a CUDA graph; a wrong id then reads foreign memory. Raises as `find_kernels`, TypeError and
    ValueError, before anything is written. Cost: each key and value is read once. Source: Kwon et
    al. 2023, section 4.3; splits: Dao et al. 2023, "Flash-Decoding".  Built in: ch06, where one
    program reads all
    """
    tensors = queries, key_pool, value_pool, block_tables, seq_lens
    check_shapes(*tensors)
    _check_tensors(*tensors)
    split_kv, card = find_kernels(key_pool)
    if check_ids:
        check_tables(key_pool, block_tables, seq_lens)
    if out is None:
        out = queries.new_empty(queries.shape)
    else:
        _check_output(out, queries)
    if launch is None:
        room = block_tables.shape[1] * key_pool.shape[1]
        longest = room if max_seq_len is None else index(max_seq_len)
        launch = plan(queries, key_pool, longest, card)
    number = str(queries.dtype).removeprefix("torch.")
    if card is None and number == "bfloat16":
        number = "float32"  # the interpreter takes bfloat16 for whole numbers
    with torch.cuda.device_of(queries):  # of a CPU tensor: no change
        lse = _launch(split_kv, launch, tensors, out, scale, getattr(split_kv.tl, number))
    return (out, lse) if return_lse else out


def _launch(split_kv, launch, tensors, out, scale, dot):
    """Fill `out`, by one kernel or two; returns the lse, [batch, q_heads]."""
    queries, key_pool, value_pool, block_tables, _ = tensors
    batch, q_heads, head_dim = queries.shape
    block_size, kv_heads = key_pool.shape[1:3]
    group, num_splits = q_heads // kv_heads, launch.num_splits
    width = max(16, next_power_of_2(head_dim))
    _check_sizes(launch.rows, group, width)
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    part_lse = queries.new_empty(batch, q_heads, num_splits, dtype=torch.float32)
    parts = out if num_splits == 1 else part_lse.new_empty(*part_lse.shape, head_dim)
    split_kv.split_kernel[batch * kv_heads, num_splits](
        *tensors, parts, part_lse,
        scale, num_splits, block_tables.stride(0), *queries.stride()[:2],
        *key_pool.stride()[:3], *value_pool.stride()[:3],
        BLOCK_SIZE=block_size, KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
        ROWS=launch.rows, WIDTH=width, TILE=launch.tile, STAGES=launch.num_stages,
        DOT=dot, num_warps=launch.num_warps,
    )  # fmt: skip
    if num_splits == 1:
        return part_lse.view(batch, q_heads)
    lse = part_lse.new_empty(batch, q_heads)
    split_kv.combine_kernel[batch * q_heads,](
        parts, part_lse, out, lse, num_splits,
        HEAD_DIM=head_dim, WIDTH=width, SPLITS=next_power_of_2(num_splits),
        num_warps=1 if num_splits <= 16 else 4 if num_splits <= 64 else 8,
    )  # fmt: skip
    return lse


def find_kernels(pool: Tensor) -> tuple[ModuleType, Card | None]:
    """`kernels.split_kv` and the card that runs it, None for the interpreter; or why there is none.

    TypeError for numbers that the kernels, or this card, do not know; RuntimeError without Triton
    or a card that holds `pool`, and for TRITON_INTERPRET set too late.  Given.
    """
    if pool.dtype not in DTYPES:
        raise TypeError(f"the kernels read float32, float16 and bfloat16, not {pool.dtype}")
    try:
        from triton import JITFunction, knobs
        from triton import language as tl
        from triton.runtime import driver

        from kernels import split_kv
    except ImportError as error:
        raise RuntimeError(f"the kernels need Triton, which is for Linux: {error}") from error
    compiled = [isinstance(f, JITFunction) for f in (tl.sum, split_kv.split_kernel)]
    if not any(compiled):
        return split_kv, None  # it reads CPU and CUDA tensors
    if not all(compiled) or knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET was changed after Triton had been imported (transformers imports it,"
            " too): restart, and set it before the first import"
        )
    try:
        device, target = driver.active.get_active_torch_device(), driver.active.get_current_target()
    except RuntimeError as error:
        raise RuntimeError(
            f"no GPU that Triton can use ({error}): on a CPU set TRITON_INTERPRET=1 before anything"
            " imports Triton, or use kernels.reference"
        ) from error
    if device.type != pool.device.type:
        raise RuntimeError(f"the pool is on {pool.device}, the kernels run on {device}")
    tensor_cores = target.backend != "cuda" or target.arch >= 80
    if pool.dtype == torch.bfloat16 and not tensor_cores:
        raise TypeError(
            f"bfloat16 needs compute capability 8.0, this card has {target.arch / 10}: use float16"
        )
    if device.type == "cpu":  # bookkit.compile_only: no card, and the size of an H200
        return split_kv, Card(132, tensor_cores)
    properties = torch.cuda.get_device_properties(pool.device)
    return split_kv, Card(properties.multi_processor_count, tensor_cores)


def _check_tensors(queries, key_pool, value_pool, block_tables, seq_lens):
    """Types of number, devices and strides: what the kernels take for granted."""
    tensors = queries, key_pool, value_pool, block_tables, seq_lens
    types, devices = [t.dtype for t in tensors], [t.device for t in tensors]
    if len(set(types[:3])) > 1:
        got = ", ".join(map(str, types[:3]))
        raise TypeError(f"queries, keys and values are of one type, got {got}")
    if types[3:] != [torch.int32, torch.int32]:
        raise TypeError(f"block tables and lengths are int32, got {types[3]} and {types[4]}")
    if len(set(devices)) > 1:
        raise ValueError(f"all tensors are on one device, got {', '.join(map(str, devices))}")
    for pool in (key_pool, value_pool):  # offsets within a block are products of 32 bits
        if max(pool.shape[1] * pool.stride(1), pool.shape[2] * pool.stride(2)) >= 2**31:
            raise ValueError(
                f"a block of shape {tuple(pool.shape[1:])} with strides {pool.stride()[1:]} spans "
                "2**31 elements or more"
            )
    for tensor in tensors:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            what = f"a tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}"
            raise ValueError(f"each last axis must lie without gaps: {what}")


def _check_sizes(rows, group, width):
    if rows < group:
        raise ValueError(f"{rows} rows for a group of {group} query heads")
    if width > MAX_WIDTH or rows * width > MAX_ROWS_AND_WIDTH:
        raise ValueError(
            f"head sizes up to {MAX_WIDTH}, and up to {MAX_ROWS_AND_WIDTH:,} numbers in a group's "
            f"queries (both padded to powers of two), not {rows} x {width}"
        )


def _check_output(out, queries):
    wanted, got = ((t.shape, t.dtype, t.device) for t in (queries, out))
    if got != wanted or not out.is_contiguous():
        got = f"{got} with strides {out.stride()}"
        raise ValueError(f"out is a contiguous tensor like the queries, {wanted}, got {got}")
