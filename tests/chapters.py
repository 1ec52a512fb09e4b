"""Reading the chapters and the packages: what the guards of the book have in common."""

import ast
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path

import jupytext
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("*.md"))
PACKAGES = ("labcore", "kernels", "bookkit")


@dataclass(frozen=True)
class Cell:
    """One code cell of a chapter."""

    source: str
    tags: frozenset = frozenset()
    builds: tuple = ()

    @cached_property
    def tree(self) -> ast.Module:
        """The cell's syntax tree; magics such as %pip become calls."""
        return ast.parse(TransformerManager().transform_cell(self.source))


@dataclass(frozen=True)
class Chapter:
    """A chapter's number, such as ch03, and its code cells in order."""

    number: str
    cells: list = field(default_factory=list)


@dataclass(frozen=True)
class Definition:
    """One top-level name of labcore or kernels, and where it stands."""

    module: str
    node: ast.stmt
    docstring: str


def number_of(path: Path) -> str:
    """ch03_block_tables.md is ch03."""
    return path.stem.split("_")[0]


@cache
def read_chapter(path: Path) -> Chapter:
    """Read a chapter's code cells, from its .md or its .ipynb; once, for all the guards."""
    cells = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    return Chapter(number_of(path), [read_cell(cell) for cell in cells])


def read_cell(cell) -> Cell:
    """Take what the guards need from a notebook's code cell."""
    builds = cell.metadata.get("builds", ())
    builds = (builds,) if isinstance(builds, str) else tuple(builds)
    return Cell(cell.source, frozenset(cell.metadata.get("tags", ())), builds)


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Find what code defines at top level: classes, functions, and names given a value."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return found


def package_definitions(root: Path = ROOT) -> dict[str, list[Definition]]:
    """Collect every top-level name of labcore and kernels."""
    found = {}
    for path in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for name, node in definitions(ast.parse(source)).items():
            definition = Definition(module, node, describe(node, source.splitlines()))
            found.setdefault(name, []).append(definition)
    return found


def describe(node: ast.stmt, lines: list[str]) -> str:
    """Return the docstring of a class or function, or the `#:` comment above a constant."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or ""
    above = reversed(lines[: node.lineno - 1])
    return "\n".join(reversed(list(takewhile(lambda line: line.startswith("#:"), above))))


def built_in(docstring: str) -> str | None:
    """Read `Built in: ch03` from a docstring."""
    match = re.search(r"Built in:\s*(ch\d\d[a-z]?)", docstring)
    return match and match[1]


def names_built_by(cell: Cell) -> set[str]:
    """Name what a `same` cell defines and what a `simpler` cell declares that it builds."""
    return set(cell.builds) | (set(definitions(cell.tree)) if "same" in cell.tags else set())
