"""What the text of every kernel must say: the fill of a masked load, the precision of a product."""

import ast

import pytest
from chapters import PACKAGES, ROOT, SOURCES, read_chapter

FOLDERS = (*PACKAGES, "benchmarks")
FILES = [*SOURCES, *sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))]


def is_kernel(node):
    """Whether this is a function under @triton.jit, with arguments or without."""
    decorators = getattr(node, "decorator_list", ())
    return any(ast.unparse(d).split("(")[0] in ("triton.jit", "jit") for d in decorators)


def kernels_in(trees):
    return [node for tree in trees for node in ast.walk(tree) if is_kernel(node)]


def plain_globals(trees):
    """Names that a module gives a value which Triton does not take: it wants tl.constexpr(...)."""
    return {
        target.id
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and "tl.constexpr(" not in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def objections(kernel, outside):
    """What this kernel does not say, with the line. `outside`: the plain globals of its module."""
    found = [
        (node.lineno, reason)
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call) and (reason := silence(node))
    ]
    names = [node for node in ast.walk(kernel) if isinstance(node, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own |= {argument.arg for argument in kernel.args.args}
    foreign = {name.id: name.lineno for name in names if name.id in outside - own}
    return sorted(found + [(line, f"{name} is no tl.constexpr") for name, line in foreign.items()])


def silence(call):
    """What this call leaves to chance, if anything."""
    called, named = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    if called == "tl.load" and len(call.args) < 3 and "other" not in named:
        masked = len(call.args) == 2 or "mask" in named
        return "a masked load without `other`: its fill is undefined" if masked else None
    if called == "tl.dot" and "input_precision" not in named:
        return "tl.dot without `input_precision`: float32 is rounded to TF32"
    return None


def trees_of(path):
    """The syntax trees of a file or, cell by cell, of a chapter."""
    if path.suffix == ".md":
        return [cell.tree for cell in read_chapter(path).cells]
    return [ast.parse(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_kernel_says_its_fills_its_precision_and_its_constants(path):
    trees = trees_of(path)
    outside = plain_globals(trees)
    found = {kernel.name: objections(kernel, outside) for kernel in kernels_in(trees)}
    assert {name: said for name, said in found.items() if said} == {}


def test_the_kernels_of_the_package_are_found():
    names = [kernel.name for kernel in kernels_in(trees_of(ROOT / "kernels" / "split_kv.py"))]
    assert names == ["split_kernel", "combine_kernel"]


GOOD = """
NEG = tl.constexpr(-1.0)
BLOCK = 16
@triton.jit(do_not_specialize=["n"])
def kernel(x_ptr, n, D: tl.constexpr):
    i = tl.arange(0, D)
    x = tl.load(x_ptr + i, mask=i < n, other=NEG)
    first = tl.load(x_ptr)
    y = tl.load(x_ptr + i, i < n, 0.0)
    tl.store(x_ptr + i, tl.dot(x, y, input_precision="ieee"), mask=i < n)
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        (", other=NEG", "", 7, "without `other`"),
        ("i < n, 0.0", "i < n", 9, "without `other`"),
        (', input_precision="ieee"', "", 10, "TF32"),
        ("tl.arange(0, D)", "tl.arange(0, BLOCK)", 6, "BLOCK"),
    ],
)
def test_what_a_kernel_does_not_say_is_found(old, new, line, reason):
    def check(source):
        trees = [ast.parse(source)]
        return objections(*kernels_in(trees), plain_globals(trees))

    assert check(GOOD) == []
    ((at, said),) = check(GOOD.replace(old, new))
    assert at == line and reason in said
