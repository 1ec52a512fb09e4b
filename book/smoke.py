"""Run chapters as a kernel would, here or in clean environments, and say what they ran on.

    python book/smoke.py --here _build/gpu notebooks/*.md

runs each chapter's twin with this Python, which needs nbclient and ipykernel, and writes copies
with outputs to a folder. A copy's last cell, and a line here, say what it ran on. The twins stay.

    python book/smoke.py [--python 3.11] [--torch 2.13] [--widgets 7.7 8] [chapters]

makes a clean virtual environment for each combination, with what a hosted runtime has. A chapter's
first cell installs a copy of this folder there, and the same kernel goes on. Prints a table; ends
with 1 if anything failed. A combination takes minutes, and is removed before the next. On Linux pip
takes CUDA builds of torch, several GB each, unless PIP_FIND_LINKS leads it to CPU builds.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = ("ch02_allocator", "ch06_kernel", "ch07_simulator")
PYTHONS, WIDGETS = ("3.11", "3.12"), ("7.7", "8")
# The Triton that each torch's CUDA build asks for; its CPU build asks for none, and chapter 6 does.
TORCHES = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}
# What a hosted runtime has besides torch, Triton and ipywidgets. With numpy 2.4, Triton 3.6's
# interpreter fails: "only 0-dimensional arrays can be converted to Python scalars".
RUNTIME = "numpy<2.4 transformers tokenizers safetensors tqdm matplotlib ipykernel".split()
LEFT_OUT = (".git", ".venv", "_build", "build", "*.egg-info", "__pycache__", ".*_cache")
CELL_TIMEOUT = 300  # seconds
LEADS_ELSEWHERE = ("PYTHONPATH", "LABCORE_MODEL", "LABCORE_STATIC", "TRITON_INTERPRET")
WHERE = """\
# Added to this copy: what it ran on.
import os
import sys

from bookkit.timing import machine

told, values = [machine()], list(globals().values())
if "torch" in sys.modules:
    torch = sys.modules["torch"]
    has_gpu = torch.cuda.is_available()
    told.append(f"torch {torch.__version__}")
    told.append(torch.cuda.get_device_name() if has_gpu else "no GPU that torch can use")
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    for model in [x for x in values if isinstance(x, torch.nn.Module)]:
        tensors += model.parameters()
    devices = {x.device.type for x in tensors} - {"meta"}
    told.append(f"this chapter's tensors: {', '.join(sorted(devices)) or 'none'}")
if "copy_blocks" in globals():  # chapter 6
    told.append(f"Triton: {type(copy_blocks).__name__}")
print("Ran on", "; ".join(told))"""


def run_chapter(twin, python, environment, out=None):
    """Run one twin in a kernel of `python`, a last cell added; return what that cell printed."""
    notebook = nbformat.read(twin, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(WHERE))
    with TemporaryDirectory() as folder:
        kernel = Path(folder, "kernels", "python3", "kernel.json")
        kernel.parent.mkdir(parents=True)
        command = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3"}))
        os.environ["JUPYTER_PATH"] = folder  # found before any other kernel of that name
        resources = {"metadata": {"path": str(twin.parent)}}
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT, kernel_name="python3", resources=resources
        )
        try:
            client.execute(env=environment)
        finally:
            if out:
                out.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, out / twin.name)
    return notebook.cells[-1].outputs[0].text.strip()


def attempt(twin, python, environment, out=None):
    """Whether a chapter runs, and what is to be said of it in one line."""
    started = perf_counter()
    try:
        said = run_chapter(twin, python, environment, out)
    except Exception as error:  # whatever it is, the other chapters still get their turn
        print(error, file=sys.stderr)
        last = [line for line in str(error).splitlines() if line.strip()][-1:]
        return False, f"FAILED, {type(error).__name__}: {''.join(last)[:150]}"
    return True, f"{perf_counter() - started:.0f} s. {said}"


def clean_environment():
    """This process's environment without what would change what a chapter imports or shows."""
    return {name: value for name, value in os.environ.items() if name not in LEADS_ELSEWHERE}


def run_here(twins, out):
    """Run chapters with this Python and this folder's packages; nothing is installed."""
    environment, failed = clean_environment() | {"PYTHONPATH": str(ROOT)}, 0
    for twin in twins:
        good, said = attempt(twin, sys.executable, environment, out)
        failed += not good
        print(f"{twin.stem}: {said}", flush=True)
    print(f"{len(twins) - failed} of {len(twins)} chapters ran; copies in {out}")
    return failed


def installed(python):
    """Every package of an environment, with its version."""
    freeze = [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(freeze, capture_output=True, check=True, text=True).stdout)
    return {(package["name"], package["version"]) for package in listed}


def is_there(version):
    """Whether that Python can be started: a shim on the path may lead nowhere."""
    command = shutil.which(f"python{version}")
    ended = command and subprocess.run([command, "-c", ""], capture_output=True).returncode
    return ended == 0


def try_combination(version, torch, widgets, stems):
    """Make a clean environment, run chapters in it, and return the rows of the table."""
    name = f"Python {version}, torch {torch}, ipywidgets {widgets}"
    with TemporaryDirectory() as folder:
        copy, python = Path(folder, "book"), Path(folder, "venv", "bin", "python")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        pinned = {"torch": torch, "triton": TORCHES[torch], "ipywidgets": widgets}
        wanted = [f"{package}=={start}.*" for package, start in pinned.items()] + RUNTIME
        try:
            subprocess.run([f"python{version}", "-m", "venv", python.parent.parent], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
        except subprocess.CalledProcessError as error:
            return [(False, name, "not installed", f"pip or venv ended with {error.returncode}")]
        before, rows = installed(python), []
        for stem in stems:
            twin = copy / "notebooks" / f"{stem}.ipynb"
            good, said = attempt(twin, python, clean_environment())
            rows.append((good, name, stem, said))
        came, went = installed(python) - before, before - installed(python)
        alone = not went and {package for package, _ in came} == {"paged-attention-book"}
        what = ", ".join(" ".join(package) for package in sorted(came | went)) or "nothing"
        rows.append((alone, name, "the first cell", f"{'changed' if went else 'installed'} {what}"))
        return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", default=CHAPTERS)
    parser.add_argument("--here", metavar="FOLDER", type=Path)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES, choices=TORCHES)
    parser.add_argument("--widgets", nargs="+", default=WIDGETS)
    asked = parser.parse_args()
    stems = [Path(chapter).stem for chapter in asked.chapters]
    if asked.here:
        sys.exit(run_here([ROOT / "notebooks" / f"{stem}.ipynb" for stem in stems], asked.here) > 0)
    rows = []
    for version, torch, widgets in product(asked.python, asked.torch, asked.widgets):
        if not is_there(version):
            name = f"Python {version}, torch {torch}, ipywidgets {widgets}"
            rows.append((None, name, "not tried", f"there is no python{version} here"))
            continue
        rows += (new := try_combination(version, torch, widgets, stems))
        print(*["  ".join(row) for _, *row in new], sep="\n", flush=True)
    print("\n| runs | in | chapter | |\n|---|---|---|---|")
    for good, *row in rows:
        print(f"| {'-' if good is None else 'yes' if good else 'NO'} | {' | '.join(row)} |")
    sys.exit(any(good is False for good, *_ in rows))


if __name__ == "__main__":
    main()
