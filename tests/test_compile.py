"""Compiled for GPUs that are not here, through the launcher itself: what the machine code tells.

One process compiles all (tests/compile_kernels.py), in 30 s on one core; each variant is a test.
What is wrong on purpose is compiled too, and must be found.
"""

import json
import os
import subprocess
import sys

import compile_kernels
import pytest
import torch
from compile_kernels import BAD, GPT2_ON_SM80, GPT2_ON_SM90, GRID, ONES, VARIANTS, multiply

from bookkit.compile_only import SHARED_LIMIT, TARGETS, Compiled, _load_bits, _loop, compile_only

# ptxas may keep one 32-bit register in memory from before the loop to after it, in a frame of 8
# bytes (seen on sm_90 at head size 80 and blocks of 256). Inside the loop it may keep none there.
FRAME_BYTES = 8
LOCAL = ("LDL", "STL", "scratch_")
# The plan's tile is at most 32 KiB of keys and values. Of three programs on a multiprocessor two
# can load while one computes: 64 KiB under way. An H200 needs 52, 4.3 TB/s for a turn of 1.6 us.
PROGRAMS_AN_SM = {"sm_80": 3, "sm_90": 3}
REGISTERS_AN_SM, RESERVED_SHARED = 65536, 1 << 10  # the driver keeps 1 KiB of each program's


def compile_all(folder, *words):
    """The report of a process where Triton compiles, with nothing in its cache yet."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, compile_kernels.__file__, *words],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return compile_all(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def grid_report(tmp_path_factory):
    return compile_all(tmp_path_factory.mktemp("triton"), "grid")


def kernels_of(outcome):
    return [Compiled(**kernel | {"loop": tuple(kernel["loop"])}) for kernel in outcome["kernels"]]


def objections(outcome, variant):
    """What is wrong with a launch, in words, and nothing else."""
    if outcome["refused"]:
        return [outcome["refused"]]
    split, *combine = kernels_of(outcome)
    found = [] if split.loads(128) else ["no 16-byte loads"]
    for kernel in (split, *combine):
        if kernel.spilled > FRAME_BYTES or any(line.startswith(LOCAL) for line in kernel.loop):
            found.append(f"{kernel.kernel} spills {kernel.spilled} bytes")
        if kernel.shared > SHARED_LIMIT[kernel.target]:  # the compiler does not look at it
            found.append(f"{kernel.kernel} wants {kernel.shared} bytes of shared memory")
    found += [f"{bits}-bit loads" for bits in (8, 16) if split.loads(bits)]  # 32: table entries
    tile_bytes, threads = variant.tile_and_threads()
    if split.loads(128) * 16 * threads != tile_bytes:
        found.append("not every key and value comes in 16-byte loads, once")
    if programs_an_sm(split, threads) < PROGRAMS_AN_SM.get(split.target, 1):
        found.append(f"{programs_an_sm(split, threads)} programs on a multiprocessor")
    return found


def programs_an_sm(kernel, threads):
    """How many fit at a time. AMD's registers are 512 for each of 4 x 64 threads."""
    registers = -(-kernel.registers // 8) * 8  # handed out by eights
    total = REGISTERS_AN_SM if kernel.target.startswith("sm") else 512 * 256
    reserved = RESERVED_SHARED if kernel.target in PROGRAMS_AN_SM else 0
    shared = (SHARED_LIMIT[kernel.target] + reserved) // (kernel.shared + reserved)
    return min(shared, total // (registers * threads))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_launch_compiles_to_wide_loads_without_spills(variant, report):
    assert objections(report[str(variant)], variant) == []


@pytest.mark.grid
@pytest.mark.parametrize("variant", GRID, ids=str)
def test_every_launch_of_the_grid_compiles_to_wide_loads_without_spills(variant, grid_report):
    assert objections(grid_report[str(variant)], variant) == []


def test_sizes_and_strides_of_1_compile(report):
    """An argument of 1 becomes a constant. Source: ROCm/aiter #597; triton-lang/triton #3102"""
    split, combine = kernels_of(report[str(ONES)])
    assert split.loads(16) and not split.loads(128)
    assert split.spilled == combine.spilled == 0


def test_bfloat16_on_a_card_without_it_is_refused_in_plain_words(report):
    """Source: vllm-project/vllm #36802; ServiceNow/Fast-LLM #143"""
    variant = BAD["bfloat16"]
    assert objections(report[str(variant)], variant) == [
        "TypeError: bfloat16 needs compute capability 8.0, this card has 7.5: use float16"
    ]


def test_a_running_server_compiles_each_kernel_once(report):
    """Batch, table width and, up to a power of two, splits change; no length is read on the host.

    A kernel that is compiled for each new value stalls a server for a second each time.
    """
    assert report["server"] == {"split_kernel": 1, "combine_kernel": 1}


# What must be found is found.


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("one warp", ["split_kernel spills"]),
        ("large tile", ["split_kernel wants 65792 bytes of shared memory", "0 programs"]),
        ("unaligned", ["no 16-byte loads", "16-bit loads", "not every key and value"]),
    ],
)
def test_a_bad_launch_is_found(name, reasons, report):
    found = "; ".join(objections(report[str(BAD[name])], BAD[name]))
    assert [reason for reason in reasons if reason not in found] == []


def test_a_pool_that_starts_between_16_byte_borders_is_read_by_2_bytes(report):
    good, bad = (
        kernels_of(report[str(variant)])[0] for variant in (GPT2_ON_SM90, BAD["unaligned"])
    )
    assert (good.loads(128), good.loads(16)) == (8, 0)
    assert (bad.loads(128), bad.loads(16)) == (0, 64)
    assert len(bad.loop) > 3 * len(good.loop)


def test_what_only_the_interpreter_accepts_is_found(report):
    """The same function: right here, refused there.

    Source: triton-lang/triton #4197; vllm-project/vllm #39807
    """
    torch.manual_seed(0)
    x, y = torch.randn(16, 8).half(), torch.randn(8, 16).half()
    torch.testing.assert_close(multiply(x, y), x.float() @ y.float())
    (reason,) = objections(report["depth 8"], None)
    assert reason.startswith("CompilationError") and "K >= 16" in reason


# The instrument.


def test_each_target_gets_its_own_code_in_one_process(report):
    """Triton keeps what it compiled by device, and each of these is the device 0 of its machine."""
    old, new = (kernels_of(report[str(v)])[0] for v in (GPT2_ON_SM80, GPT2_ON_SM90))
    assert (old.target, new.target) == ("sm_80", "sm_90")
    assert not any("desc[" in line for line in old.loop)
    assert any("desc[" in line for line in new.loop)  # sm_80 has no such operand


def test_kernels_are_listed_as_they_were_launched(report):
    kernels = kernels_of(report[str(VARIANTS[0])])
    assert [kernel.kernel for kernel in kernels] == ["split_kernel", "combine_kernel"]
    assert kernels[1].loop == ()


def test_nothing_stays_patched_after_an_error(report):
    assert report["patched"] == {"sm_1": ["KeyError", True], "sm_90": ["ZeroDivisionError", True]}


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="kernels are compiled here")
def test_interpreted_kernels_do_not_compile():
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), compile_only("sm_90"):
        raise AssertionError


def test_every_target_has_a_limit():
    assert TARGETS.keys() == SHARED_LIMIT.keys()


def test_the_loop_is_the_longest_that_loads_from_global_memory():
    lines = [
        "MOV R1, R2",
        "LDG.E R2, [R4.64]", "IADD3 R4, R4, 4, RZ", "BRA 0x10",  # loads, and is short
        "LDG.E.128 R8, [R4.64]", "FFMA R1, R2, R3, R1", "BRA 0x80", "FADD R1, R1, R2", "BRA 0x40",
        "LDS R1, [R2]", "FFMA R1, R1, R1, R1", "FADD R1, R1, R1", "FADD R1, R1, R1",
        "FADD R1, R1, R1", "BRA 0x90",  # the longest, from shared memory
        "EXIT", "BRA 0x100",
    ]  # fmt: skip
    labels = {hex(16 * at): at for at in range(len(lines))}
    assert _loop(lines, labels) == tuple(lines[4:9])
    assert _loop(lines[:1], labels) == ()


def test_the_loop_of_an_amd_kernel_ends_at_a_conditional_branch():
    lines = [
        "buffer_load_dwordx4 v[4:7], v1, s[4:7], 0",
        "s_cbranch_scc1 .LBB0_2",
        "s_endpgm",
    ]
    assert _loop(lines, {".LBB0_1": 0, ".LBB0_2": 2}) == ()
    assert _loop(lines, {".LBB0_2": 0}) == tuple(lines[:2])


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [
        ("LDG.E R49, desc[UR16][R36.64]", 32),
        ("LDG.E.128.SYS R24, [R22]", 128),
        ("LDG.E.64 R2, [R4.64]", 64),
        ("LDG.E.U16 R2, [R4.64]", 16),
        ("LDG.E.S8 R2, [R4.64]", 8),
        ("LDGSTS.E.BYPASS.128 [R63], desc[UR16][R72.64], P6", 128),
        ("LDGSTS.E [R43], [R12.64], P2", 32),
        ("LDGDEPBAR", 0),
        ("LDS.128 R20, [R3]", 0),
        ("LDL R2, [R1]", 0),
        ("buffer_load_dword v5, v9, s[8:11], 0", 32),
        ("buffer_load_dwordx4 v[4:7], v84, s[52:55], 0", 128),
        ("global_load_dwordx3 v[4:6], v[2:3], off", 96),
        ("global_load_ushort v4, v[2:3], off", 16),
        ("global_load_short_d16_hi v4, v[2:3], off", 16),
        ("buffer_load_ubyte v4, v2, s[4:7], 0", 8),
        ("scratch_load_dword v4, off, s32", 0),
        ("ds_read_b128 v[4:7], v1", 0),
    ],
)
def test_the_width_of_a_load_from_global_memory(instruction, bits):
    assert _load_bits(instruction) == bits
