"""The watermark explorer and the table in the text of chapter 8 say the same."""

import ast
import json
import re
import symtable

import nbformat
import pytest
from built_site import BUILT, HTML, soup_of, words
from chapters import NOTEBOOKS, read_chapter

from bookkit.explorer import Explorer

SOURCE = NOTEBOOKS / "ch08a_admission.md"
PAGE = HTML / "notebooks" / "ch08a_admission.html"
WORKLOADS = ("Chat", "Long prompt", "Long answer")
ROW = re.compile(r"paged (\d+%)")
CAPTION = re.compile(
    r"(?P<workload>[A-Z][a-z ]+), block size (?P<block_size>\d+), watermark (?P<watermark>\d+%): "
    r"(?P<preemptions>[\d,]+) preemptions, (?P<raw>[\d,]+) raw steps, "
    r"(?P<charged>[\d,]+) charged steps, (?P<times>[\d.]+) times as fast"
)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def read_table(rows: list[list[str]]) -> dict[tuple[str, str], int]:
    """(workload, watermark): charged steps, from rows such as 'paged 5%', less the reference's."""
    found = {}
    for name, *cells in rows:
        if row := ROW.fullmatch(name):
            ours = [number(cell.split()[0]) for cell in cells]
            found |= {(w, row[1]): n for w, n in zip(WORKLOADS, ours, strict=True)}
    return found


def is_the_table(rows: list[list[str]]) -> bool:
    return any(ROW.fullmatch(row[0]) for row in rows) and len(rows[0]) == 4


def table_of_twin() -> dict:
    twin = nbformat.read(SOURCE.with_suffix(".ipynb"), as_version=4)
    outputs = [o for cell in twin.cells for o in cell.get("outputs", ()) if "data" in o]
    for text in [o.data["text/markdown"] for o in outputs if "text/markdown" in o.data]:
        lines = text.replace("*", "").splitlines()
        rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
        if is_the_table(rows):
            return read_table(rows)
    raise AssertionError(f"{SOURCE.stem} shows no table with a row 'paged 5%'")


def table_of_page() -> dict:
    for table in soup_of(PAGE).find_all("table"):
        lines = table.find_all("tr")
        rows = [[words(cell) for cell in line.find_all(["td", "th"])] for line in lines]
        if is_the_table(rows):
            return read_table(rows)
    raise AssertionError(f"{PAGE.name} shows no table with a row 'paged 5%'")


def charged_steps(captions: list[str], block_size: int = 16) -> dict[tuple[str, str], int]:
    """(workload, watermark): the charged steps that the explorer names at this block size."""
    read = [CAPTION.match(caption).groupdict() for caption in captions]
    return {
        (caption["workload"], caption["watermark"]): number(caption["charged"])
        for caption in read
        if int(caption["block_size"]) == block_size
    }


def captions_of_page() -> list[str]:
    for script in soup_of(PAGE).select('.explorer script[type="application/json"]'):
        captions = [caption for _, caption in json.loads(script.string)["frames"]]
        if all(map(CAPTION.match, captions)):
            return captions
    raise AssertionError(f"{PAGE.name} has no watermark explorer")


def names_read(table: symtable.SymbolTable) -> set[str]:
    """The names that code takes from around it: its functions' and comprehensions' own apart."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return own.union(*map(names_read, table.get_children()))


def changed_by(statement: ast.stmt, table: symtable.SymbolTable) -> set[str]:
    """What a statement gives a value, stores to, or calls a method of."""
    changed = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    stored = [n for n in ast.walk(statement) if isinstance(getattr(n, "ctx", 0), ast.Store)]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        stored.append(statement.value.func)
    while parts := [n for n in stored if isinstance(n, ast.Attribute | ast.Subscript)]:
        stored = [part.value for part in parts]
        changed |= {node.id for node in stored if isinstance(node, ast.Name)}
    return changed


def needed_for(name: str, statements: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that a name depends on, in order; found backwards, by the names in them."""
    wanted, found = {name}, []
    for statement in reversed(statements):
        table = symtable.symtable(ast.unparse(statement), SOURCE.name, "exec")
        if changed_by(statement, table) & wanted:
            found.insert(0, statement)
            wanted |= names_read(table) | {s.get_name() for s in table.get_symbols()}
    return found


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    """Run what leads to the explorer in its chapter: most other cells run a model."""
    cells = [cell for cell in read_chapter(SOURCE).cells[1:] if "remove-cell" not in cell.tags]
    statements = [statement for cell in cells for statement in cell.tree.body]
    scope = {"__name__": "__main__"}
    for statement in needed_for("watermark_explorer", statements):
        exec(compile(ast.Module([statement], []), SOURCE.name, "exec"), scope)
    return scope["watermark_explorer"]


@pytest.fixture(scope="module")
def captions(explorer) -> list[str]:
    return [frame.description for frame in explorer.frames]


@pytest.mark.slow
def test_every_value_of_the_table_is_a_position_of_the_explorer(captions):
    """Source: vllm-project/vllm PR #44594; ipywidgets #2069."""
    table, shown = table_of_twin(), charged_steps(captions)
    assert len(table) == 15
    assert {key: shown.get(key) for key in table} == table


@pytest.mark.slow
def test_every_position_counts_its_preemptions_at_four_steps_each(captions):
    for caption in captions:
        found = CAPTION.match(caption)
        raw, charged = number(found["raw"]), number(found["charged"])
        assert charged == raw + 4 * number(found["preemptions"])
    assert len(set(captions)) == len(captions)


@pytest.mark.slow
def test_preemptions_fall_with_the_watermark_and_the_best_one_lies_inside(captions):
    """Source: vllm-project/vllm PR #44594, its measured table."""
    for workload in WORKLOADS:
        found = [CAPTION.match(c) for c in captions]
        rows = [f for f in found if (f["workload"], f["block_size"]) == (workload, "16")]
        rows.sort(key=lambda f: int(f["watermark"].rstrip("%")))
        preemptions = [number(f["preemptions"]) for f in rows]
        charged = [number(f["charged"]) for f in rows]
        assert preemptions == sorted(preemptions, reverse=True)
        assert charged.index(min(charged)) not in (0, len(charged) - 1)


@BUILT
@pytest.mark.slow
def test_the_built_page_shows_the_same_table_and_the_same_positions(captions):
    assert table_of_page() == table_of_twin()
    assert captions_of_page() == captions


# The guards can fail.


def test_a_value_that_differs_is_found():
    rows = [["policy", "a", "b", "c"], ["paged 5%", "5,716 5,611", "3,053 3,106", "16,268 17,752"]]
    caption = (
        "Chat, block size 16, watermark 5%: 3 preemptions, 5,704 raw steps, 5,717 charged steps, "
        "2.63 times as fast as reserving the maximum; 92.6 sequences run while others wait."
    )
    assert is_the_table(rows)
    table, shown = read_table(rows), charged_steps([caption])
    assert table["Chat", "5%"] == 5_716 and table["Long answer", "5%"] == 16_268
    assert shown == {("Chat", "5%"): 5_717} != {("Chat", "5%"): table["Chat", "5%"]}
    assert charged_steps([caption], block_size=128) == {}


def test_what_a_name_needs_is_found_and_nothing_else():
    lines = ["import a", "x = 1", "y = {}", "y[x] = a", "y.update(b=2)", "z = 2", "print(x)"]
    lines += ["def f(n): return [y, n, [z for z in n]]", "e = f(x)", "e = 0"]
    statements = ast.parse("\n".join(lines)).body
    needed = needed_for("e", statements[:-1])
    assert [lines[statements.index(s)] for s in needed] == [*lines[:5], *lines[7:9]]
