"""What the first cell of a chapter needs, and how its code is compared with the package's."""

import ast
import inspect
import linecache
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import FunctionType


def start(version: str) -> None:
    """Prepare a chapter: check the installed labcore, shorten tracebacks, choose Triton's mode.

    Call it before anything imports Triton: `@triton.jit` looks at TRITON_INTERPRET once, when it
    decorates, and where no NVIDIA driver is found kernels can run only in the interpreter. A value
    that is already set stays. Raises ImportError if labcore is not of the release `version`: "0.1"
    accepts 0.1.3 and not 0.10.  Given.
    """
    installed = import_module("labcore").__version__
    if not f"{installed}.".startswith(f"{version}."):
        raise ImportError(
            f"this chapter is written for labcore {version}, installed is {installed}"
        )
    _shorten_tracebacks()
    if not _has_nvidia_driver():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _shorten_tracebacks() -> None:
    """Let errors show as their last line only, as %xmode Minimal does, but in silence."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.InteractiveTB.set_mode(mode="Minimal")


def _has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def glue(name: str, value: object) -> None:
    """Keep `value` for the book's text to quote as `name`; nothing where myst_nb is not there.

    Given.
    """
    try:
        from myst_nb import glue as keep
    except ImportError:
        return
    keep(name, value, display=False)


def table(head: Sequence, rows: Iterable[Sequence]):
    """Show `rows` under `head`; the first column is words, the others are numbers.  Given."""
    from IPython.display import Markdown

    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


def same_code(a: type | FunctionType | str, b: type | FunctionType | str) -> bool:
    """Tell whether two classes, functions or source texts are the same program.

    Comments, layout, docstrings and type hints do not count; every name does. The fields of a
    dataclass are hints that do count. Raises SyntaxError for text that is no Python, and ValueError
    where an object's source is not to be found.  Given.
    """
    return normalise(_source(a)) == normalise(_source(b))


def normalise(source: str) -> str:
    """Return `source` without comments, docstrings, type hints and layout of its own.

    Raises SyntaxError for text that is no Python.  Given.
    """
    tree = ast.parse(textwrap.dedent(source))
    return ast.unparse(ast.fix_missing_locations(_Plain().visit(tree)))


class _Plain(ast.NodeTransformer):
    """Removes from a syntax tree what only a reader, or a type checker, looks at."""

    def visit_Module(self, node):
        return self._body(node, keeps_fields=False)

    def visit_ClassDef(self, node):
        return self._body(node, keeps_fields=_has_fields(node))

    def visit_FunctionDef(self, node):
        node.returns = None
        return self._body(node, keeps_fields=False)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_AnnAssign(self, node):
        """Turn `x: int = 3` into `x = 3`, and drop `x: int`."""
        if node.value is None:
            return None
        return ast.Assign([node.target], self.visit(node.value), lineno=node.lineno)

    def _body(self, node, keeps_fields: bool):
        """Visit the parts of a module, class or function, less its docstring."""
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        fields = [part for part in node.body if keeps_fields and isinstance(part, ast.AnnAssign)]
        new = [part if part in fields else self.visit(part) for part in node.body]
        node.body = [part for part in new if part is not None]
        for name in ("decorator_list", "args", "bases", "keywords"):
            self._visit_parts(node, name)
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        return node

    def _visit_parts(self, node, name: str) -> None:
        parts = getattr(node, name, None)
        for part in parts if isinstance(parts, list) else [parts] * (parts is not None):
            self.visit(part)


def _has_fields(node: ast.ClassDef) -> bool:
    """Tell a dataclass or a named tuple: their hints are what makes their fields."""
    makers = " ".join(map(ast.unparse, node.decorator_list + node.bases))
    return "dataclass" in makers or "NamedTuple" in makers


def _source(thing: type | FunctionType | str) -> str:
    """Return the text of a class or function, also of one that a notebook's cell defines."""
    if isinstance(thing, str):
        return thing
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return _source_in_cells(thing)


def _source_in_cells(thing: type) -> str:
    """Find a class in the newest cell that defines it: `inspect` looks only into modules' files."""
    for filename in reversed(list(linecache.cache)):
        text = "".join(linecache.getlines(filename))
        if f"class {thing.__name__}" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                return ast.unparse(node)
    raise ValueError(f"the source of {thing!r} is not to be found; pass it as text")
