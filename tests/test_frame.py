"""The files around the book: short, pinned, the same on every machine."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from chapters import PACKAGES, ROOT

from bookkit.teach import normalise

PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([A-Za-z0-9_.]+)$")
LIGHT_MODULES = ("blocks", "workloads", "admission", "simulator")


def tracked_files() -> list[Path]:
    """List what is in the repository, and what would be."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.split("\0") if name]
    return [path for path in files if path.is_file()]


def texts():
    for path in tracked_files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(PIN.match(line).groups() for line in lines)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_readme_and_the_guide_for_changes_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


def test_the_picture_of_the_readme_is_the_introductions():
    path = ROOT / "book" / "write_readme_picture.py"
    spec = importlib.util.spec_from_file_location("write_readme_picture", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PICTURE.read_text() == module.readme_picture(), f"run python {path.name}"


def test_every_version_is_pinned_and_torch_and_triton_fit_each_other():
    """Source: torch 2.13.0's CUDA build requires triton==3.7.1; its CPU build requires none."""
    assert pins()["torch"] == "2.13.0"
    assert pins()["triton"] == "3.7.1"
    pinned = {canonical(name) for name in pins()}
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [re.match(r"[A-Za-z0-9_.-]+", line)[0] for line in lines if line[:1].isalpha()]
    assert {canonical(name) for name in wanted} <= pinned


def test_every_requirement_has_its_reason():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert all("#" in line for line in lines if line)


def test_installing_the_package_asks_for_numpy_alone():
    """Source: on a GPU runtime pip would replace the torch that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["numpy"]
    extras = {"model", "kernels", "cluster", "book", "test", "lint"}
    assert set(project["optional-dependencies"]) == extras
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_the_version_is_the_same_everywhere():
    import labcore

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == labcore.__version__


def test_no_file_names_a_package_registry_or_a_folder_of_one_machine():
    hosts = ["pypi" + r"\.org", "python" + r"hosted\.org", "npm" + r"js\.(org|com)"]
    folders = [rf"(?<![\w.)/])/{name}/" for name in ("work", "root", "home", "opt", "Users")]
    forbidden = re.compile("|".join(hosts + folders))
    assert not [(path, match[0]) for path, text in texts() for match in forbidden.finditer(text)]


def test_what_the_chapters_build_can_be_read_in_an_evening():
    modules = [path for name in ("labcore", "kernels") for path in (ROOT / name).glob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in modules) <= 3_500


def test_no_module_of_the_packages_is_over_250_lines_of_code():
    """Docstrings, comments and empty lines apart."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not [path for path in modules if normalise(path.read_text()).count("\n") >= 250]


def test_the_repository_is_named_in_one_place():
    """Source: executablebooks/jupyter-book: a book without a repository gets links to its own."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert "repository" not in config and "launch_buttons" not in config
    url = config["sphinx"]["config"]["labbook_repository"]
    assert url == "" or re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", url)


def test_the_book_never_trusts_outputs_that_are_already_there():
    """Source: MyST-NB runs no notebook in mode 'off', and skips those with outputs in 'auto'."""
    execute = yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]
    assert execute["execute_notebooks"] == "cache"  # its own, keyed by book/_ext/labbook.py
    assert execute["timeout"] >= 60
    assert "allow_errors" not in execute


def test_every_command_of_the_makefile_is_explained():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()
    help_text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert [name for name in phony if f"make {name} " not in help_text] == []


def test_ci_runs_the_tests_and_nothing_else():
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert path.read_text().rstrip().endswith("make test")


def test_an_old_python_is_refused_with_a_plain_word(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    make = ["make", "book", f"PYTHON={old}"]
    result = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stdout and "is Python 3.9.1" in result.stdout
    assert not (tmp_path / ".venv").exists()


def run_python(code: str) -> str:
    fresh = [sys.executable, "-c", code]
    return subprocess.run(fresh, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_labcore_is_fast_and_loads_nothing_else():
    code = "import sys, time; t = time.perf_counter(); import labcore; t = time.perf_counter() - t;"
    code += "print(t, *sorted({'numpy', 'torch', 'matplotlib', 'triton'} & set(sys.modules)))"
    runs = [run_python(code).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.1
    assert all(len(run) == 1 for run in runs)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_the_light_modules_load_neither_torch_nor_matplotlib(module):
    heavy = {"torch", "matplotlib", "triton"} | ({"numpy"} if module == "blocks" else set())
    code = f"import sys, labcore.{module}; print(*sorted({heavy} & set(sys.modules)))"
    assert run_python(code) == ""


def test_kernels_imports_nothing_from_labcore():
    sources = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    assert not [text for text in sources if re.search(r"^\s*(from|import) labcore", text, re.M)]
