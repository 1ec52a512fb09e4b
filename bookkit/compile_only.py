"""Compile a launcher's kernels for a GPU that is not here, and read what came out.

Triton brings NVIDIA's assembler and disassembler, and LLVM's for AMD. Under `compile_only` a launch
compiles with its true arguments (which are multiples of 16, which are 1) and runs nothing, so that
CPU tensors will do. It needs a process of its own, with TRITON_INTERPRET unset.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),  # T4
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
# Most shared memory that one program may have, in bytes. Source: the makers' programming guides.
SHARED_LIMIT = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target, as far as its machine code tells.

    `registers` a thread, `spilled` bytes of them that went to memory, `shared` bytes a program;
    `loop`: the instructions of its largest loop that loads from global memory, in order. Given.
    """

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    loop: tuple[str, ...]

    def loads(self, bits: int) -> int:
        """How many instructions of the loop load so many bits a thread from global memory."""
        return sum(_load_bits(instruction) == bits for instruction in self.loop)


class _AbsentDriver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    get_current_device = get_current_target  # by device, Triton keeps what it has compiled

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_stream(self, device):
        return 0


@contextmanager
def compile_only(target: str) -> Iterator[list[Compiled]]:
    """Every kernel launched within is compiled for `target`, one of TARGETS, and not run.

    Yields a list that fills with a `Compiled` for each launch, the same one as before where nothing
    had to be compiled. Raises KeyError for another target, RuntimeError where kernels are
    interpreted; what the compiler refuses raises as on a GPU.
    Cost: 0.3 to 1.5 s a variant that Triton's cache on disk does not hold.  Given.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("kernels that are interpreted do not compile: unset TRITON_INTERPRET")
    done, run, before = [], JITFunction.run, driver._active

    def compile_instead(self, *args, grid, warmup, **options):
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        done.append(_read(compiled, target))
        return compiled

    driver.set_active(_AbsentDriver(TARGETS[target]))
    JITFunction.run = compile_instead
    try:
        yield done
    finally:
        JITFunction.run = run
        driver._active = before


@cache
def _read(compiled, target) -> Compiled:
    read = _read_amd if "amdgcn" in compiled.asm else _read_nvidia
    registers, spilled, instructions, labels = read(compiled)
    loop = _loop(instructions, labels)
    shared = compiled.metadata.shared
    return Compiled(compiled.metadata.name, target, registers, spilled, shared, loop)


def _read_nvidia(compiled):
    with TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", cubin]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", sass).groups())
    lines = re.findall(r"/\*([0-9a-f]{4,8})\*/\s+(?:@!?U?P\w+\s+)?([^;]+?)\s*;", sass)
    labels = {f"{int(address, 16):#x}": at for at, (address, _) in enumerate(lines)}
    return registers, stack, [text for _, text in lines], labels


def _read_amd(compiled):
    asm = compiled.asm["amdgcn"]
    registers, stack = (
        int(re.search(rf"\.{name}:\s+(\d+)", asm)[1])
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    instructions, labels = [], {}
    for line in re.findall(r"^(\.LBB\w+(?=:)|\t[a-z]\w+.*)", asm, re.MULTILINE):
        if line.startswith("."):
            labels[line] = len(instructions)
        else:
            instructions.append(line.strip())
    return registers, stack, instructions, labels


def _loop(instructions, labels) -> tuple[str, ...]:
    """The longest stretch with a branch back to its start that loads from global memory."""
    longest = []
    for end, instruction in enumerate(instructions):
        branch = re.match(r"(?:BRA|s_c?branch).*?(0x[0-9a-f]+|\.LBB\w+)", instruction)
        body = instructions[labels[branch[1]] : end + 1] if branch else []
        if len(body) > len(longest) and any(map(_load_bits, body)):
            longest = body
    return tuple(longest)


def _load_bits(instruction: str) -> int:
    """How many bits this loads from global memory into registers or shared memory; else 0."""
    name = instruction.split()[0]
    if name.startswith(("LDG.", "LDGSTS.")):
        size = re.search(r"\.[US]?(8|16|64|128)\b", name)
        return int(size[1]) if size else 32
    if size := re.match(r"(?:global|buffer)_load_(dword(?:x(\d))?|\w*short|\w*byte)", name):
        return 32 * int(size[2] or 1) if size[1][:5] == "dword" else 16 if "short" in name else 8
    return 0
