"""What the first cell of a chapter needs, and how its code is compared with the package's."""

import ast
import inspect
import linecache
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType

NVIDIA_DEVICE = Path("/dev/nvidiactl")
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def start(release: str) -> None:
    """Prepare a chapter: check the installed labcore, choose Triton's mode, print what it runs on.

    Call it before anything imports Triton: `@triton.jit` looks at TRITON_INTERPRET once, when it
    decorates, and where torch can use no NVIDIA GPU kernels run only in the interpreter. A value
    that is already set stays. Raises ImportError if labcore is not of this `release`: "1.0"
    accepts 1.0.3 and not 1.01.  Given.
    """
    installed = import_module("labcore").__version__
    if not f"{installed}.".startswith(f"{release}."):
        raise ImportError(
            f"this chapter is written for labcore {release}, installed is {installed}"
        )
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        shell.InteractiveTB.set_mode(mode="Minimal")  # what %xmode Minimal does, but in silence
    gpu = _find_gpu()
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    used = [f"labcore {installed}", f"Python {sys.version_info.major}.{sys.version_info.minor}"]
    with suppress(PackageNotFoundError):
        used.append(f"torch {version('torch')}")
    print(f"Runs on {', '.join(used)}; {gpu or 'no GPU'}")


def _find_gpu() -> str | None:
    """The name of an NVIDIA GPU that torch can use, without importing torch; None without one."""
    with suppress(PackageNotFoundError):
        if "+cpu" in version("torch"):
            return None
    with suppress(OSError, subprocess.SubprocessError):
        tool = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        name = re.match(r"GPU 0: (.*?)(?: \(UUID|$)", tool.stdout)
        return name[1] if name else None  # a driver may be there, and no card
    return "an NVIDIA GPU" if NVIDIA_DEVICE.exists() else None


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

    def generic_visit(self, node):
        """Take off a node's docstring and hints, then those of its parts."""
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            del node.body[0]
        node.annotation = node.returns = None
        super().generic_visit(node)
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass()]
        return node

    def visit_ClassDef(self, node):
        """Mark what makes the fields of a dataclass or a named tuple: their hints."""
        makers = " ".join(map(ast.unparse, node.decorator_list + node.bases))
        for part in node.body:
            part.is_field = "dataclass" in makers or "NamedTuple" in makers
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        """Turn `x: int = 3` into `x = 3`, and drop `x: int`; a field stays as it is."""
        if getattr(node, "is_field", False):
            return node
        if node.value is None:
            return None
        return ast.Assign([node.target], self.visit(node.value), lineno=node.lineno)


def _source(thing: type | FunctionType | str) -> str:
    """Return the text of a class or function, also of one that a notebook's cell defines."""
    if isinstance(thing, str):
        return thing
    with suppress(OSError, TypeError):
        return inspect.getsource(thing)
    for filename in reversed(list(linecache.cache)):  # the newest cell that defines the class
        text = "".join(linecache.getlines(filename))
        if f"class {thing.__name__}" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                return ast.unparse(node)
    raise ValueError(f"the source of {thing!r} is not to be found; pass it as text")
