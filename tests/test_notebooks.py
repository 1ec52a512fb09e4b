"""The chapters as notebooks: pairs in step, run, comparable, and shaped alike."""

import ast
import os
from statistics import median

import chapters
import jupytext
import nbformat
import pytest
from chapters import Cell, definitions
from jupytext.compare import NotebookDifference, compare_notebooks

FIRST_CELL = """\
try:
    from bookkit import teach
except ModuleNotFoundError:  # a bare runtime: install the folder that this notebook came with
    %pip install --quiet ..
    from bookkit import teach
teach.start("1.0")"""
NOT_COMPARED = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
HIDDEN = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
MIN_COMPARED = 10
MAX_LINES, MAX_FINAL = 40, 95  # of a cell; of a final class, shown whole, without docstrings
COLUMN = 82  # characters that fit beside the sidebar of a window 1280 pixels wide
EACH = pytest.mark.parametrize("source", chapters.SOURCES, ids=lambda path: path.stem)


def problem_of_pair(source) -> str:
    """Say how a chapter and its twin differ, outputs apart; file times play no part."""
    twin = source.with_suffix(".ipynb")
    if not twin.exists():
        return f"{twin.name} is missing: run `make notebooks`"
    pair = [jupytext.read(twin), jupytext.read(source)]
    for cell in pair[0].cells + pair[1].cells:
        cell.metadata.pop("jupyter", None)  # folds, which write_twins.py makes from the tags
    try:
        compare_notebooks(*pair, fmt="md:myst", compare_outputs=False)
    except NotebookDifference as difference:
        return f"{source.name} and {twin.name} differ: run `make notebooks`\n{difference}"
    return ""


def problem_of_header(source) -> str:
    """Say what is wrong with the header: without one, tags get lost on the way to the twin."""
    text = source.read_text(encoding="utf-8")
    if not text.startswith("---\n") or "jupytext:" not in text.split("\n---\n")[0]:
        return f"{source.name} has no jupytext header"
    for path in (source, source.with_suffix(".ipynb")):
        kernel = jupytext.read(path).metadata.get("kernelspec", {}).get("name")
        if kernel != "python3":
            return f"{path.name} asks for the kernel {kernel}: it must be python3"
    return ""


def problem_of_run(notebook) -> str:
    """Say why nbval would compare little or nothing: it passes cells that were never run."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        return "not run from top to bottom in a fresh kernel: run `make notebooks`"
    compared = sum(
        bool(cell.outputs) and not NOT_COMPARED & set(cell.metadata.get("tags", []))
        for cell in code
    )
    return "" if compared >= MIN_COMPARED else f"only {compared} cells have outputs to compare"


def code_lines(cell: Cell) -> int:
    """Count a cell's lines; in a `same` cell its docstrings do not count."""
    source = cell.source
    if "same" in cell.tags:
        holders = (ast.ClassDef, ast.FunctionDef)
        for node in [n for n in ast.walk(cell.tree) if isinstance(n, holders)]:
            source = source.replace(ast.get_docstring(node, clean=False) or "\0", "")
    return sum(bool(line.strip()) for line in source.splitlines())


def is_long_by_right(cell: Cell) -> bool:
    """A final class or a kernel is shown whole."""
    kinds = ast.ClassDef | ast.FunctionDef
    defined = definitions(cell.tree).values()
    return "same" in cell.tags and any(isinstance(node, kinds) for node in defined)


@EACH
def test_a_chapter_and_its_twin_are_in_step(source):
    """Source: mwouts/jupytext #63, #254, #335, #619."""
    assert not problem_of_pair(source)


@EACH
def test_a_chapter_has_a_header_and_the_kernel_python3(source):
    """Source: ProjectPythia/pythia-foundations #69; jupyter-book #1291; mwouts/jupytext #714."""
    assert not problem_of_header(source)


@EACH
def test_a_twin_has_been_run_and_has_outputs_to_compare(source):
    """Source: nbval's plugin skips cells without an execution count."""
    twin = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(twin)
    assert not problem_of_run(twin)


@EACH
def test_a_twin_keeps_nothing_of_the_machine_that_ran_it(source):
    """Source: mwouts/jupytext #735; nbclient records times unless told not to."""
    twin = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    added = set(twin.metadata) - {"jupytext", "kernelspec"}
    assert not added, f"{added} in {source.stem}.ipynb: run make notebooks before you commit"
    assert not any("execution" in cell.metadata for cell in twin.cells)
    outputs = [output for cell in twin.cells for output in cell.get("outputs", [])]
    assert not any("widget-view" in kind for o in outputs for kind in o.get("data", {}))


@EACH
def test_solutions_and_the_first_cell_are_folded_in_a_notebook_too(source):
    cells = nbformat.read(source.with_suffix(".ipynb"), as_version=4).cells
    folded = {"hide-cell": {"source_hidden", "outputs_hidden"}, "hide-input": {"source_hidden"}}
    for cell in cells:
        for tag in set(cell.metadata.get("tags", [])) & set(folded):
            assert set(cell.metadata["jupyter"]) == folded[tag]


@EACH
def test_the_first_cell_is_the_standard_one(source):
    """Source: googlecolab/colabtools #147, #3020: one cell installs, nothing needs a restart."""
    first = chapters.read_chapter(source).cells[0]
    assert first.source == FIRST_CELL
    assert first.tags == {"hide-input"}


@EACH
def test_claims_are_never_in_a_cell_that_is_not_compared(source):
    """Source: nbval #6, #38: what is marked as ignored may say anything."""
    cells = chapters.read_chapter(source).cells
    ignored = [cell for cell in cells if cell.tags & {"nbval-ignore-output", "nbval-skip"}]
    assert not [cell.source for cell in ignored if "claim(" in cell.source]


@EACH
def test_cells_are_short(source):
    cells = chapters.read_chapter(source).cells
    lengths = sorted(code_lines(cell) for cell in cells)
    limits = [MAX_FINAL if is_long_by_right(cell) else MAX_LINES for cell in cells]
    over = [c.source for c, limit in zip(cells, limits, strict=True) if code_lines(c) > limit]
    assert not over
    assert median(lengths) <= 7
    assert lengths[len(lengths) * 9 // 10] <= 15


@EACH
def test_lines_of_code_fit_the_column(source):
    cells = [cell for cell in chapters.read_chapter(source).cells if not cell.tags & HIDDEN]
    lines = [line for cell in cells for line in cell.source.splitlines()]
    assert not [line for line in lines if len(line) > COLUMN]


@EACH
def test_no_three_cells_of_code_follow_each_other_without_a_sentence(source):
    run = 0
    for cell in jupytext.read(source).cells:
        if cell.cell_type == "markdown":
            run = 0
        elif not HIDDEN & set(cell.metadata.get("tags", [])):
            run += 1
        assert run < 3, cell.source


# The guards can fail.

CHAPTER = """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# 1. A chapter

```{code-cell} ipython3
:tags: [hide-input]

x = 1
```

```{code-cell} ipython3
:tags: [raises-exception, same]

1/0
```

```{code-cell} ipython3
# a cell with only a comment
```
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "ch01_small.md"
    path.write_text(CHAPTER)
    jupytext.write(jupytext.read(path), path.with_suffix(".ipynb"))
    return path


def test_an_edit_on_either_side_is_found_whatever_the_file_times(source):
    """Source: mwouts/jupytext #63, #254, #339: after a clone all times are equal."""
    twin = source.with_suffix(".ipynb")
    for edited in (source, twin):
        for newer in (source, twin):
            before = edited.read_text()
            edited.write_text(before.replace("x = 1", "x = 2"))
            os.utime(source, (1, 1))
            os.utime(twin, (1, 1))
            os.utime(newer, (2, 2))
            assert source.name in problem_of_pair(source)
            edited.write_text(before)
    assert not problem_of_pair(source)
    twin.unlink()
    assert "missing" in problem_of_pair(source)


def test_tags_and_comment_cells_survive_a_round_trip(source):
    """Source: mwouts/jupytext #714, #1024, #264."""
    notebook = jupytext.read(source)
    again = jupytext.reads(jupytext.writes(notebook, fmt="ipynb"), fmt="ipynb")
    back = jupytext.reads(jupytext.writes(again, fmt="md:myst"), fmt="md:myst")
    for other in (again, back):
        assert [c.cell_type for c in other.cells] == ["markdown", "code", "code", "code"]
        tags = [cell.metadata.get("tags") for cell in other.cells]
        assert tags == [None, ["hide-input"], ["raises-exception", "same"], None]


def test_a_missing_header_is_found(source):
    """Source: mwouts/jupytext #714."""
    assert not problem_of_header(source)
    source.write_text(CHAPTER.split("---\n", 2)[2])
    assert "has no jupytext header" in problem_of_header(source)


def test_a_kernel_of_one_machine_is_found(source):
    """Source: jupyter-book #1291; xarray-contrib/xarray-tutorial #78."""
    source.write_text(CHAPTER.replace("name: python3", "name: conda-env-mine-py"))
    assert "conda-env-mine-py" in problem_of_header(source)


def test_a_twin_that_was_never_run_or_out_of_order_is_found(source):
    notebook = jupytext.read(source)
    assert "not run" in problem_of_run(notebook)
    for count, cell in enumerate(notebook.cells[1:], start=1):
        cell.execution_count = count
    assert "only 0 cells" in problem_of_run(notebook)
    notebook.cells[1].execution_count = 5
    assert "not run" in problem_of_run(notebook)
