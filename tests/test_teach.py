"""Set-up of a chapter, and the comparison of its code with the package's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import labcore
from bookkit import teach
from bookkit.teach import normalise, same_code

CLASS = '''
@dataclass(frozen=True)
class Pair:
    """Two numbers."""

    a: int
    b: int = 3  # the second

    def total(self, more: int = 0) -> int:
        """Add them."""
        result: int = self.a + self.b
        return result + more
'''


def test_a_chapter_accepts_its_own_release():
    teach.start(".".join(labcore.__version__.split(".")[:2]))
    teach.start(labcore.__version__)


@pytest.mark.parametrize("version", ["9", "0.", "0.10", "1"])
def test_another_release_is_refused_with_both_versions(version, monkeypatch):
    monkeypatch.setattr(labcore, "__version__", "0.1.3")
    with pytest.raises(ImportError, match=f"labcore {version}, installed is 0.1.3"):
        teach.start(version)


def test_one_digit_is_not_taken_for_two(monkeypatch):
    monkeypatch.setattr(labcore, "__version__", "0.10.0")
    with pytest.raises(ImportError):
        teach.start("0.1")


@pytest.mark.parametrize(("gpu", "expected"), [(None, "1"), ("NVIDIA T4", None)])
def test_triton_interprets_only_where_there_is_no_gpu(gpu, expected, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(teach, "_find_gpu", lambda: gpu)
    teach.start(labcore.__version__)
    assert os.environ.get("TRITON_INTERPRET") == expected
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Runs on labcore {labcore.__version__}, Python 3.")
    assert line.endswith(gpu or "; no GPU")


LISTED = "GPU 0: Tesla T4 (UUID: GPU-1b2c)\nGPU 1: Tesla T4 (UUID: GPU-3d4e)\n"


@pytest.mark.parametrize(
    ("torch", "script", "expected"),
    [
        ("2.13.0+cpu", f"printf '{LISTED}'", None),
        ("2.13.0", f"printf '{LISTED}'", "Tesla T4"),
        ("2.13.0", "echo NVIDIA-SMI has failed; exit 9", None),  # a driver and no card
        ("2.13.0", "echo No devices found", None),
        ("2.13.0", None, None),
    ],
)
def test_a_gpu_is_one_that_torch_and_the_driver_both_know(
    torch, script, expected, monkeypatch, tmp_path
):
    if script:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(teach, "version", lambda package: torch)
    monkeypatch.setattr(teach, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    assert teach._find_gpu() == expected


def test_a_container_without_the_tool_has_the_device_all_the_same(monkeypatch, tmp_path):
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(teach, "version", lambda package: "2.13.0")
    monkeypatch.setattr(teach, "NVIDIA_DEVICE", device)
    assert teach._find_gpu() == "an NVIDIA GPU"


def test_a_choice_already_made_stays(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(teach, "_find_gpu", lambda: None)
    teach.start(labcore.__version__)
    assert os.environ["TRITON_INTERPRET"] == "0"


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root).stdout


def test_teach_loads_neither_torch_nor_triton_nor_ipython():
    code = "import sys, bookkit.teach as t; t.start('1'); print(sorted(sys.modules))"
    loaded = run("-c", code)
    assert "'bookkit.teach'" in loaded
    assert not [name for name in ("torch", "triton", "IPython", "numpy") if f"'{name}'" in loaded]


CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors='nocolor')
def run(cell):
    shell.run_cell(cell, store_history=True)
run("from bookkit.teach import start, same_code; start('1')")
run("class A:\\n    def f(self): return 1")
run("class A:\\n    def f(self): return 2  # newer")
run("print(same_code(A, 'class A:\\\\n  def f(self): return 2'))")
run("def g():\\n    return 1 / 0\\ng()")
"""


def test_in_a_notebook_tracebacks_are_one_line_and_classes_of_cells_are_found(tmp_path):
    script = tmp_path / "cells.py"
    script.write_text(CELLS)
    lines = [line for line in run("-W", "error", str(script)).splitlines() if line.strip()]
    assert lines[-2:] == ["True", "ZeroDivisionError: division by zero"]
    assert not any("reporting mode" in line for line in lines)


def test_docstrings_hints_comments_and_layout_do_not_count():
    bare = "def f(a,b=2):\n  return (a\n   + b)"
    full = 'def f(a: int, b: float = 2) -> float:\n  """Add."""\n  # why\n  c: int\n  return a + b'
    assert same_code(bare, full)
    assert same_code("x: int = 3", "x = 3  # three")
    assert same_code("def f(): 'says what'", "def f(): pass")


@pytest.mark.parametrize("other", ["a - b", "b + a", "a + b + 0", "a"])
def test_another_computation_counts(other):
    assert not same_code("def f(a, b): return a + b", f"def f(a, b): return {other}")


@pytest.mark.parametrize(
    "other",
    [
        "def g(a, b=2): return a",
        "def f(a, c=2): return a",
        "def f(a, b=3): return a",
        "def f(a, *, b=2): return a",
        "@cache\ndef f(a, b=2): return a",
        "async def f(a, b=2): return a",
    ],
)
def test_names_defaults_and_decorators_count(other):
    assert not same_code("def f(a, b=2): return a", other)


def test_the_fields_of_a_dataclass_count_and_hints_elsewhere_do_not():
    assert same_code(CLASS, CLASS.replace("-> int", "").replace("result: int", "result"))
    assert not same_code(CLASS, CLASS.replace("a: int\n", "a: float\n"))
    assert not same_code(CLASS, CLASS.replace("    a: int\n", ""))
    tuple_ = "class P(NamedTuple):\n    a: int"
    assert not same_code(tuple_, tuple_.replace("a:", "b:"))
    assert same_code("class P:\n    a: int\n    b = 1", "class P:\n    b = 1")


def test_a_text_in_the_middle_of_a_function_is_no_docstring():
    assert not same_code(
        "def f():\n    x = 'a'\n    return x", "def f():\n    x = 'b'\n    return x"
    )


def test_live_functions_and_classes_are_compared_by_their_source():
    assert same_code(run, run)
    assert same_code(teach._Plain, Path(teach.__file__).read_text().split("\n\n\n")[-2])
    assert not same_code(run, normalise)


def test_normalise_is_the_same_twice():
    source = Path(teach.__file__).read_text()
    assert normalise(normalise(source)) == normalise(source)
    assert '"""' not in normalise(source)


def test_text_that_is_no_python_is_refused():
    with pytest.raises(SyntaxError):
        same_code("def f(", "def f(")


def test_a_class_without_source_is_refused_by_name():
    made = type("Made", (), {"__module__": "nowhere"})
    with pytest.raises(ValueError, match="Made"):
        same_code(made, made)
