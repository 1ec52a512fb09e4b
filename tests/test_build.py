"""Small books, really built with this book's settings and extensions: what must fail fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
EXPECTED = ":tags: [raises-exception]\n\n[].pop()"
pytestmark = pytest.mark.slow


def chapter(title: str, code: str) -> str:
    return f"{HEADER}# {title}\n\n```{{code-cell}} ipython3\n{code}\n```\n"


def make_book(folder: Path, chapters: dict[str, str], **settings) -> Path:
    """Write a book of these chapters with the project's own settings, extensions and style."""
    shutil.copytree(ROOT / "book" / "_ext", folder / "book" / "_ext")
    shutil.copytree(ROOT / "book" / "_static", folder / "book" / "_static")
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    config["sphinx"]["config"] |= settings
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
    """Source: executablebooks/jupyter-book #781, #1320, #945; MyST-NB #248."""
    texts = {name: chapter(name, code) for name, code in BAD.items()}
    book = make_book(tmp_path, texts | {"expected": chapter("Expected", EXPECTED)})
    for _ in ("first", "again"):  # a second run must not find nothing to do and end well
        result = build(book)
        assert result.returncode != 0
        warnings = [line for line in result.stderr.splitlines() if "WARNING:" in line]
        for name in BAD:
            assert any(f"notebooks/{name}.md" in line for line in warnings), name
        assert not any("expected" in line for line in warnings)
    assert "IndexError" in page(book, "notebooks/expected")


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ([claim("one", "1 block", "derived"), claim("one", "2 blocks", "derived")], "same id: one"),
        ([claim("one", "1 block", "derived")], "unknown category 'guessed'"),
    ],
    ids=["two claims with one id", "an unknown category"],
)
def test_a_wrong_claim_fails_the_build(tmp_path, claims, reason):
    book = make_book(tmp_path, {"ch01_a": "# 1. A\n"})
    twin = write_twin(book, "ch01_a", *claims)
    if "guessed" in reason:
        twin.write_text(twin.read_text().replace("derived", "guessed"))
    result = build(book)
    assert result.returncode != 0
    assert reason in result.stderr


def test_a_chapter_is_run_again_when_labcore_changes_and_only_then(tmp_path):
    """Source: jupyter-cache keys on the cells alone; MyST-NB mode 'auto' keeps old outputs."""
    book = make_book(tmp_path, {"ch01_good": HEADER + GOOD})
    write_twin(book, "ch01_good", claim("old", "the answer is forty", "derived"))
    for answer, runs in [("forty-one", 1), ("forty-one", 1), ("forty-two", 2)]:
        (book / "labcore" / "answer.txt").write_text(answer)
        result = build(book)
        assert result.returncode == 0, result.stderr
        assert (book / "runs.txt").read_text().count("run") == runs
        assert answer in page(book, "notebooks/ch01_good")


def test_without_a_repository_no_page_has_a_button_to_anywhere(tmp_path):
    """Source: executablebooks/jupyter-book: buttons lead to its own repository by default."""
    book = make_book(tmp_path, {"ch01_good": HEADER + GOOD})
    twin = write_twin(book, "ch01_good", claim("two-blocks", "It takes 2 < 3 blocks.", "derived"))
    result = build(book)
    assert result.returncode == 0, result.stderr
    for name in ("book/intro", "notebooks/ch01_good", "book/evidence"):
        text = page(book, name)
        assert "https://" not in text and "http://" not in text
        assert "thebe" not in text
    offered = book / "_build" / "html" / "_sources" / "notebooks" / "ch01_good.ipynb"
    assert offered.read_bytes() == twin.read_bytes()
    assert "_sources/notebooks/ch01_good.ipynb" in page(book, "notebooks/ch01_good")
    register = page(book, "book/evidence")
    assert "It takes 2 &lt; 3 blocks." in register
    assert "../notebooks/ch01_good.html#claim-two-blocks" in register


def test_with_a_repository_the_buttons_lead_to_it(tmp_path):
    """Source: jupyter-book #752: a launch link to a .md gives an error; it must be the .ipynb."""
    url = "https://github.com/someone/some-book"
    book = make_book(tmp_path, {"ch01_good": HEADER + GOOD}, labbook_repository=url)
    write_twin(book, "ch01_good")
    result = build(book)
    assert result.returncode == 0, result.stderr
    text = page(book, "notebooks/ch01_good")
    assert f'"{url}"' in text
    assert f"{url}/issues/new" in text
    assert (
        "https://colab.research.google.com/github/someone/some-book/blob/main/notebooks/ch01_good.ipynb"
        in text
    )
    assert "executablebooks" not in text


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """Write a chapter's twin as `make notebooks` does, twice."""
    source = tmp_path_factory.mktemp("notebooks") / "ch01_small.md"
    source.write_text(HEADER + "# 1. Small\n\n" + VARYING)
    command = [sys.executable, ROOT / "book" / "write_twins.py", source]
    texts = []
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True, env=os.environ)
        texts.append(source.with_suffix(".ipynb").read_text())
    return texts[0], texts[1], source.with_suffix(".ipynb")


def nbval(notebook: Path) -> subprocess.CompletedProcess:
    """Run a notebook and compare its outputs, as `make test` does."""
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    command = [*pytest_here, *options, notebook]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_writing_a_twin_again_changes_no_more_than_addresses(twin):
    """Source: mwouts/jupytext #735, #1016: cell ids and times make noise."""
    first, second, _ = twin
    addresses = re.compile(r"0x[0-9a-f]+")
    assert addresses.sub("", first) == addresses.sub("", second)
    assert "language_info" not in first and "widget" not in first


def test_what_varies_from_run_to_run_does_not_fail_a_chapter(twin):
    """Source: nbval #6, #38, #125, #357: addresses, widgets, sets, pictures."""
    result = nbval(twin[2])
    assert result.returncode == 0, result.stdout


def test_a_number_edited_in_a_twin_is_found_when_the_chapter_is_run(twin):
    """Source: MyST-NB's mode 'auto' would keep it. What only the register reads is compared too."""
    edited = twin[2].with_name("edited.ipynb")
    text = twin[2].read_text()
    assert text.count('"value": "It takes 12 blocks."') == 1
    edited.write_text(text.replace('"value": "It takes 12', '"value": "It takes 13'))
    result = nbval(edited)
    assert result.returncode == 1
    assert "1 failed, 4 passed" in result.stdout
    assert "It takes 13 blocks." in result.stdout
