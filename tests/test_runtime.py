"""Any runtime: the first cell, paths that hold, and the commands that run chapters elsewhere."""

import re
import subprocess
import sys

import chapters
import jupytext
import nbformat
import pytest

sys.path.insert(0, str(chapters.ROOT / "book"))
import smoke

TWINS = sorted(chapters.NOTEBOOKS.glob("*.ipynb"))
EACH = pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.stem)
# `!cd` is forgotten by the next line; the others make a page depend on where it was started.
PATH_TRICK = re.compile(r"^\s*[%!]\s*cd\b|\bchdir\(|\bsys\.path\b", re.M)
INSTALLS = re.compile(r"^\s*[%!]\s*(?:pip|conda|uv|apt)\b.*|.*\bpip install\b.*", re.M)


def code_of(twin):
    notebook = nbformat.read(twin, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def write_notebook(path, code):
    cells = [nbformat.v4.new_code_cell(code)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_every_twin_starts_with_the_same_cell_and_it_installs_this_folder():
    """Source: googlecolab/colabtools #1171, #3061: an editable install wants a restart."""
    (first,) = {code_of(twin)[0] for twin in TWINS}
    (install,) = INSTALLS.findall(first)
    options = install.split("install")[1].split()
    assert options == ["--quiet", ".."]  # not editable, no requirements, no torch
    assert (chapters.NOTEBOOKS / ".." / "pyproject.toml").exists()


@EACH
def test_a_chapter_installs_nothing_more_and_plays_no_tricks_with_paths(twin):
    """Source: googlecolab/colabtools #147, #2539: `!cd` does not last."""
    first, *others = code_of(twin)
    assert not PATH_TRICK.search("\n".join([first, *others]))
    assert not INSTALLS.search("\n".join(others))


@pytest.mark.parametrize("line", ["!cd ..", "%cd x", "os.chdir(here)", "sys.path.append(x)"])
def test_a_trick_with_paths_is_seen(line):
    assert PATH_TRICK.search(f"import os\n{line}")


@EACH
def test_a_chapter_asks_for_the_kernel_that_every_machine_has(twin):
    """Source: jupyter-book #1291; e-marshall/itslive PR #1."""
    for path in (twin, twin.with_suffix(".md")):
        kernel = jupytext.read(path).metadata["kernelspec"]
        assert (kernel["name"], kernel["display_name"]) == ("python3", "Python 3")


def test_a_copy_says_what_it_ran_on_and_the_twin_stays(tmp_path):
    twin = write_notebook(tmp_path / "ch99.ipynb", "import torch\nx = torch.zeros(1)")
    before, environment = twin.read_bytes(), smoke.clean_environment()
    environment["PYTHONPATH"] = str(chapters.ROOT)
    good, said = smoke.attempt(twin, sys.executable, environment, tmp_path / "out")
    assert good and "; this chapter's tensors: cpu" in said and "Ran on " in said
    assert twin.read_bytes() == before
    copy = nbformat.read(tmp_path / "out" / "ch99.ipynb", as_version=4)
    assert copy.cells[-1].outputs[0].text.strip() in said


def test_a_chapter_that_fails_is_told_and_its_copy_kept(tmp_path):
    twin = write_notebook(tmp_path / "ch99.ipynb", "1 / 0")
    good, said = smoke.attempt(twin, sys.executable, smoke.clean_environment(), tmp_path / "out")
    assert not good and "ZeroDivisionError" in said
    assert (tmp_path / "out" / "ch99.ipynb").exists()


def test_the_chapters_run_after_the_timing_and_the_smoke_run_is_no_test():
    def commands(target):
        make = ["make", "-n", target, "GPU_PYTHON=python3", "GPU_OPTIONS=--tiny"]
        return subprocess.run(
            make, cwd=chapters.ROOT, capture_output=True, text=True, check=True
        ).stdout

    timing, chapter_run = commands("gpu-book").split("book/smoke.py")
    assert "benchmarks/gpu.py --tiny" in timing and "venv" not in timing
    assert chapter_run.startswith(" --here _build/gpu notebooks/")
    assert "smoke.py" not in commands("test")


def test_a_python_that_is_not_there_is_not_tried(tmp_path, monkeypatch):
    """A version manager's shim is found on the path, and ends with 127."""
    (shim := tmp_path / "python9.9").write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert not smoke.is_there("9.9") and not smoke.is_there("9.8")
