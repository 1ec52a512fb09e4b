"""Small books, really built with this book's settings and extensions: what must fail fails."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
import yaml
from chapters import ROOT

from bookkit.evidence import claim

HEADER = """\
---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---

"""
GOOD = """\
# 1. Good

```{code-cell} ipython3
with open("../runs.txt", "a") as log:
    log.write("run\\n")
open("../labcore/answer.txt").read()
```
"""
BAD = {
    "fails": "1/0",
    "sleeps": "import time\ntime.sleep(60)",
    "warns": "import warnings\nwarnings.warn('beware')",
}
VARYING = """\
```{code-cell} ipython3
from bookkit.evidence import claim
from bookkit.explorer import explore
from bookkit.plot import drawing
```

```{code-cell} ipython3
claim("n", f"It takes {3 * 4} blocks.", "derived")
```

```{code-cell} ipython3
object()
```

```{code-cell} ipython3
explore(lambda n: (drawing(9 * n, [], "Blocks", str(n)), f"{n} blocks"), n=[1, 2])
```

```{code-cell} ipython3
import matplotlib.pyplot as plt

{"b", "a"}, plt.figure()
```
"""
GOOD_PAGES = ("book/intro", "notebooks/ch01_good", "book/evidence")
REPOSITORY = "https://github.com/someone/some-book"
EXPECTED = ":tags: [raises-exception]\n\n[].pop()"
pytestmark = pytest.mark.slow


def chapter(title: str, code: str) -> str:
    return f"{HEADER}# {title}\n\n```{{code-cell}} ipython3\n{code}\n```\n"


def make_book(folder: Path, chapters: dict[str, str]) -> Path:
    """Write a book of these chapters with the project's own settings, extensions and style."""
    shutil.copytree(ROOT / "book" / "_ext", folder / "book" / "_ext")
    shutil.copytree(ROOT / "book" / "_static", folder / "book" / "_static")
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    config["execute"]["timeout"] = 5
    (folder / "_config.yml").write_text(yaml.safe_dump(config))
    (folder / "book" / "references.bib").write_text("")
    (folder / "book" / "intro.md").write_text("# Intro\n\nWords, and $x^2$.\n")
    (folder / "book" / "evidence.md").write_text("# Evidence\n\n```{claims}\n```\n")
    (folder / "labcore").mkdir()
    (folder / "labcore" / "answer.txt").write_text("forty-one")
    (folder / "notebooks").mkdir()
    for name, text in chapters.items():
        (folder / "notebooks" / f"{name}.md").write_text(text)
    files = [f"notebooks/{name}" for name in chapters] + ["book/evidence"]
    toc = {"format": "jb-book", "root": "book/intro", "chapters": [{"file": f} for f in files]}
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc))
    return folder


def write_twin(book: Path, name: str, *claims) -> Path:
    """Write an .ipynb whose cells show these claims, as running the chapter would."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# Twin {name}")])
    for shown in claims:
        data = shown._repr_mimebundle_()
        output = nbformat.v4.new_output("execute_result", data, execution_count=1)
        notebook.cells.append(nbformat.v4.new_code_cell("show", outputs=[output]))
    path = book / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def build(book: Path) -> subprocess.CompletedProcess:
    """Build as `make book` does."""
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "jupyter-book" in x)
    options = line.split("jupyter-book")[1].split()
    program = Path(sys.executable).with_name("jupyter-book")
    return subprocess.run([program, *options], cwd=book, capture_output=True, text=True)


def page(book: Path, name: str) -> str:
    return (book / "_build" / "html" / f"{name}.html").read_text()


def test_a_failing_a_slow_and_a_warning_chapter_fail_the_build_each_time(tmp_path):
    """Source: executablebooks/jupyter-book #781, #1320, #945; MyST-NB #248.

    So does the register of claims, where one has a category that is none.
    """
    texts = {name: chapter(name, code) for name, code in BAD.items()}
    book = make_book(tmp_path, texts | {"expected": chapter("Expected", EXPECTED)})
    twin = write_twin(book, "expected", claim("one", "1 block", "derived"))
    twin.write_text(twin.read_text().replace("derived", "guessed"))
    for _ in ("first", "again"):  # a second run must not find nothing to do and end well
        result = build(book)
        assert result.returncode != 0
        found = [s for s in result.stderr.splitlines() if "WARNING:" in s or "ERROR:" in s]
        for name in BAD:
            assert any(f"notebooks/{name}.md" in line for line in found), name
        assert not any("expected" in line for line in found)
        assert any("evidence.md" in s and "unknown category 'guessed'" in s for s in found)
    assert "IndexError" in page(book, "notebooks/expected")


# A good book, built three times.


class Built(NamedTuple):
    """How a build ended, how often the chapter had run by then, its pages, and its twin."""

    result: subprocess.CompletedProcess
    runs: int
    pages: dict[str, str]
    twin: bytes


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> list[Built]:
    """At first plain; then with a repository, and with a claim twice; then with that mended, and
    another answer in labcore.
    """
    book, built = make_book(tmp_path_factory.mktemp("book"), {"ch01_good": HEADER + GOOD}), []
    right = claim("two-blocks", "It takes 2 < 3 blocks.", "derived")
    for answer, claims, repository in [
        ("forty-one", [right], ""),
        ("forty-one", [right, right], REPOSITORY),
        ("forty-two", [right], REPOSITORY),
    ]:
        twin = write_twin(book, "ch01_good", *claims)
        (book / "labcore" / "answer.txt").write_text(answer)
        config = yaml.safe_load((book / "_config.yml").read_text())
        config["sphinx"]["config"]["labbook_repository"] = repository
        (book / "_config.yml").write_text(yaml.safe_dump(config))
        result, runs = build(book), (book / "runs.txt").read_text().count("run")
        pages = {name: page(book, name) for name in GOOD_PAGES}
        built.append(Built(result, runs, pages, twin.read_bytes()))
        offered = book / "_build" / "html" / "_sources" / "notebooks" / "ch01_good.ipynb"
        assert offered.read_bytes() == built[-1].twin
    return built


def test_a_chapter_is_run_again_when_labcore_changes_and_only_then(builds):
    """Source: jupyter-cache keys on the cells alone; MyST-NB mode 'auto' keeps old outputs."""
    assert [build.runs for build in builds] == [1, 1, 2]
    for build, answer in zip(builds, ["forty-one", "forty-one", "forty-two"], strict=True):
        assert answer in build.pages["notebooks/ch01_good"]


def test_two_claims_with_one_id_fail_the_build_and_nothing_else_does(builds):
    plain, doubled, mended = (build.result for build in builds)
    assert plain.returncode == 0, plain.stderr
    assert doubled.returncode != 0
    assert "same id: two-blocks" in doubled.stderr
    assert mended.returncode == 0, mended.stderr


def test_without_a_repository_no_page_has_a_button_to_anywhere(builds):
    """Source: executablebooks/jupyter-book: buttons lead to its own repository by default."""
    for text in builds[0].pages.values():
        assert "https://" not in text and "http://" not in text
        assert "thebe" not in text


def test_a_page_offers_its_twin_and_the_register_leads_to_the_page(builds):
    """The twin itself, byte for byte: the fixture compares them."""
    pages = builds[0].pages
    assert "_sources/notebooks/ch01_good.ipynb" in pages["notebooks/ch01_good"]
    assert "It takes 2 &lt; 3 blocks." in pages["book/evidence"]
    assert "../notebooks/ch01_good.html#claim-two-blocks" in pages["book/evidence"]


def test_with_a_repository_the_buttons_lead_to_it(builds):
    """Source: jupyter-book #752: a launch link to a .md gives an error; it must be the .ipynb."""
    text = builds[-1].pages["notebooks/ch01_good"]
    assert f'"{REPOSITORY}"' in text
    assert f"{REPOSITORY}/issues/new" in text
    assert (
        "https://colab.research.google.com/github/someone/some-book/blob/main/notebooks/ch01_good.ipynb"
        in text
    )
    assert "executablebooks" not in text


# Twins


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Write a chapter's twin as `make notebooks` does, twice."""
    source = tmp_path_factory.mktemp("notebooks") / "ch01_small.md"
    source.write_text(HEADER + "# 1. Small\n\n" + VARYING)
    spec = importlib.util.spec_from_file_location("write_twins", ROOT / "book" / "write_twins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = []
    for _ in range(2):
        module.main([str(source)])
        texts.append(source.with_suffix(".ipynb").read_text())
    return texts[0], texts[1], source.with_suffix(".ipynb")


def test_writing_a_twin_again_changes_no_more_than_addresses(twin):
    """Source: mwouts/jupytext #735, #1016: cell ids and times make noise."""
    first, second, _ = twin
    addresses = re.compile(r"0x[0-9a-f]+")
    assert addresses.sub("", first) == addresses.sub("", second)
    assert "language_info" not in first and "widget" not in first


@pytest.fixture(scope="module")
def compared(twin) -> str:
    """What nbval says, run as `make test` does, of the twin and of one with an edited number."""
    edited = twin[2].with_name("edited.ipynb")
    text = twin[2].read_text()
    assert text.count('"value": "It takes 12 blocks."') == 1
    edited.write_text(text.replace('"value": "It takes 12', '"value": "It takes 13'))
    keep_cells(edited, 3)
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command = [*pytest_here, *options, twin[2], edited]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout
    return result.stdout


def keep_cells(path: Path, number: int) -> None:
    """Leave out what comes after the first cells: no need to run it once more."""
    notebook = nbformat.read(path, as_version=4)
    del notebook.cells[number:]
    nbformat.write(notebook, path)


def test_what_varies_from_run_to_run_does_not_fail_a_chapter(compared):
    """Source: nbval #6, #38, #125, #357: addresses, widgets, sets, pictures."""
    assert compared.startswith(5 * ".")


def test_a_number_edited_in_a_twin_is_found_when_the_chapter_is_run(compared):
    """Source: MyST-NB's mode 'auto' would keep it. What only the register reads is compared too."""
    assert compared.startswith(5 * "." + ".F ")
    assert "1 failed, 6 passed" in compared
    assert "It takes 13 blocks." in compared
