"""Chapters and packages hold the same code: a cell tagged `same` shows what labcore runs."""

import ast

import chapters
import pytest
from chapters import Cell, built_in, definitions, names_built_by, read_chapter

from bookkit.teach import same_code

PACKAGE = chapters.package_definitions()
CHAPTERS = {chapters.number_of(path): read_chapter(path) for path in chapters.SOURCES}
SAME = [
    pytest.param(cell, id=f"{number}-{'-'.join(definitions(cell.tree)) or 'empty'}")
    for number, chapter in CHAPTERS.items()
    for cell in chapter.cells
    if "same" in cell.tags
]


def differences(cell: Cell, package: dict) -> list[str]:
    """Say how a `same` cell differs from the package; an empty list when it does not."""
    problems = []
    for name, node in definitions(cell.tree).items():
        theirs = package.get(name, [])
        if not theirs:
            problems.append(f"{name} is tagged `same`, but neither labcore nor kernels has it")
        elif not any(same_code(ast.unparse(node), ast.unparse(their.node)) for their in theirs):
            where = ", ".join(their.module for their in theirs)
            problems.append(f"{name} differs from {where}")
    return problems if definitions(cell.tree) else ["a `same` cell defines nothing"]


def missing(package: dict, by_number: dict) -> list[str]:
    """List the names that say `Built in: chNN` while that chapter does not build them."""
    built = {n: set().union(*map(names_built_by, c.cells)) for n, c in by_number.items() if c.cells}
    return [
        f"{definition.module}.{name} says `Built in: {number}`, which does not build it"
        for name, found in package.items()
        for definition in found
        if isinstance(definition.node, ast.ClassDef | ast.FunctionDef)
        and (number := built_in(definition.docstring)) in built
        and name not in built[number]
    ]


@pytest.mark.parametrize("cell", SAME)
def test_a_same_cell_equals_the_package(cell):
    assert not differences(cell, PACKAGE)


def test_what_says_built_in_a_chapter_is_built_there():
    assert not missing(PACKAGE, CHAPTERS)


def test_what_a_simpler_cell_declares_is_a_name_of_the_package():
    for chapter in CHAPTERS.values():
        declared = {name for cell in chapter.cells for name in cell.builds}
        assert declared <= set(PACKAGE), f"{chapter.number}: {declared - set(PACKAGE)}"


# The guards can fail.

SHIPPED = '''
class Pool:
    """A pool.  Built in: ch02"""

    size: int = 3

    def take(self, n: int) -> list[int]:
        """Take n blocks."""
        return self.free_ids[-n:]  # the last freed first
'''
COPIED = """
class Pool:
    size = 3
    def take(self, n):
        # from the end
        return self.free_ids[-n:]
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "labcore").mkdir()
    (tmp_path / "labcore" / "pool.py").write_text(SHIPPED)
    return chapters.package_definitions(tmp_path)


def test_docstrings_hints_comments_and_layout_do_not_count(package):
    assert not differences(Cell(COPIED), package)


@pytest.mark.parametrize(
    ("old", "new"),
    [("-n:", "n:"), ("size = 3", "size = 4"), ("take", "grab"), ("(self, n)", "(self, n=1)")],
)
def test_a_changed_cell_is_found(package, old, new):
    assert differences(Cell(COPIED.replace(old, new)), package) == [
        "Pool differs from labcore.pool"
    ]


def test_a_same_cell_with_an_unknown_name_is_found(package):
    (problem,) = differences(Cell("def pour(): pass"), package)
    assert "neither labcore nor kernels has it" in problem


def test_a_same_cell_without_a_definition_is_found(package):
    assert differences(Cell("pool.take(3)"), package) == ["a `same` cell defines nothing"]


def test_a_name_that_its_chapter_does_not_build_is_found(package):
    cells = {"copy": Cell(COPIED, frozenset({"same"})), "plain": Cell("x = 1", builds=("Pool",))}
    for cell in cells.values():
        assert not missing(package, {"ch02": chapters.Chapter("ch02", [cell])})
    (problem,) = missing(package, {"ch02": chapters.Chapter("ch02", [Cell(COPIED)])})
    assert "labcore.pool.Pool says `Built in: ch02`" in problem
    assert not missing(package, {"ch03": chapters.Chapter("ch03", [Cell(COPIED)])})
