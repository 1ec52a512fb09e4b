"""No chapter imports what is not built yet. Docstrings say where: `Built in: ch03`, or `Given`."""

import ast
import re

import chapters
import pytest
from chapters import ROOT, SOURCES, Cell, Chapter, built_in, names_built_by, package_definitions

GIVEN_MODULES = ("plot", "explorer", "timing", "teach", "evidence")
PACKAGE = chapters.package_definitions()


def imported_names(tree: ast.Module) -> list[str]:
    """List what a cell takes from the packages, as dotted names: labcore.blocks.OutOfBlocks."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in chapters.PACKAGES]


def objection(dotted: str, chapter: str, built_so_far: set, package: dict) -> str | None:
    """Say why `chapter` may not import this name at this point, or None if it may."""
    parts = dotted.split(".")
    if any(part in GIVEN_MODULES for part in parts[1:]):
        return None
    found = package.get(parts[-1])
    if not found:
        return f"{dotted}: import the names that are used, from the module that has them"
    docstring = found[0].docstring
    home = built_in(docstring)
    if home is None:
        given = re.search(r"\bGiven\b", docstring)
        return None if given else f"{dotted}: the docstring says neither `Built in` nor `Given`"
    if home < chapter or parts[-1] in built_so_far:
        return None
    return f"{dotted}: built in {home}, not yet at this cell of {chapter}"


def objections(chapter: Chapter, package: dict) -> list[str]:
    """Go through a chapter's cells; what one builds may be imported from the next one on."""
    problems, built = [], set()
    for cell in chapter.cells:
        found = [objection(n, chapter.number, built, package) for n in imported_names(cell.tree)]
        problems += [problem for problem in found if problem]
        built |= names_built_by(cell)
    return problems


@pytest.mark.parametrize("path", chapters.SOURCES, ids=lambda path: path.stem)
def test_a_chapter_imports_only_what_is_built_or_given(path):
    assert not objections(chapters.read_chapter(path), PACKAGE)


# The guard can fail.

MODULE = '''
"""Pools."""
LIMIT = 3
#: Tokens a block.
#: Built in: ch04
RATIO = 16
class Pool:
    """A pool.  Built in: ch02"""
class Tables:
    """Tables over a pool.  Built in: ch03"""
def read(path):
    """Read a file.  Given."""
def secret():
    """Neither."""
'''


@pytest.fixture
def package(tmp_path):
    (tmp_path / "labcore").mkdir()
    (tmp_path / "labcore" / "pool.py").write_text(MODULE)
    return chapters.package_definitions(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "from labcore.pool import Pool, read",
        "from labcore import Pool",
        "from labcore import plot, teach",
        "from bookkit.explorer import explore",
        "import numpy as np",
    ],
)
def test_what_is_built_earlier_or_given_passes(package, line):
    assert not objections(Chapter("ch03", [Cell(line)]), package)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from labcore.pool import Tables", "built in ch03"),
        ("def f():\n    from labcore.pool import Tables", "built in ch03"),
        ("from labcore.pool import secret", "neither"),
        ("from labcore.pool import LIMIT", "neither"),
        ("from labcore.pool import RATIO", "built in ch04"),
        ("from labcore import pool", "import the names"),
        ("import labcore.pool", "import the names"),
        ("from labcore.pool import *", "import the names"),
    ],
)
def test_what_is_not_built_yet_is_found(package, line, reason):
    (problem,) = objections(Chapter("ch03", [Cell(line)]), package)
    assert reason in problem


def test_a_chapter_may_import_what_it_has_built_but_not_before(package):
    build = Cell("class Tables: ...", frozenset({"same"}))
    use = Cell("from labcore.pool import Tables")
    assert not objections(Chapter("ch03", [build, use]), package)
    assert objections(Chapter("ch03", [use, build]), package)


def test_every_public_name_says_where_it_is_built_or_that_it_is_given():
    silent = [
        f"{definition.module}.{name}"
        for name, found in package_definitions().items()
        for definition in found
        if isinstance(definition.node, ast.ClassDef | ast.FunctionDef)
        and not name.startswith("_")
        and definition.module.startswith(("labcore", "bookkit"))
        and not re.search(r"Built in:\s*ch\d\d[a-z]?|Given\.", definition.docstring)
    ]
    assert not silent, silent


def test_every_chapter_stands_in_the_table_of_the_introduction():
    introduction = (ROOT / "book" / "intro.md").read_text(encoding="utf-8")
    assert [path.name for path in SOURCES if f"notebooks/{path.name})" not in introduction] == []
