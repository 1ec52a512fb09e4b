"""Write the .ipynb twin of each chapter given: its cells from the .md, its outputs from running it.

One way only: `jupytext --sync` goes by file times and can undo the newer edit without a word. What
differs from machine to machine or run to run (times, the exact version of Python, widgets of a
kernel that is gone) is left out; ids of kept cells stay.
"""

import os
import sys
from pathlib import Path

import jupytext
from jupytext.combine import combine_inputs_with_outputs
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELL_TIMEOUT = 300  # seconds
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def write_twin(source: Path) -> None:
    """Run one chapter from top to bottom and write its twin; leave the twin alone if it fails."""
    twin = source.with_suffix(".ipynb")
    notebook = jupytext.read(source)
    if twin.exists():
        notebook = combine_inputs_with_outputs(notebook, jupytext.read(twin), fmt="md:myst")
    folder = {"metadata": {"path": str(source.parent)}}
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        resources=folder,
    ).execute()
    leave_out_what_varies(notebook)
    fold(notebook)
    jupytext.write(notebook, twin, fmt="ipynb")


def leave_out_what_varies(notebook) -> None:
    """Drop the exact version of Python, and views of widgets where a picture stands beside them."""
    for key in ("language_info", "widgets"):
        notebook.metadata.pop(key, None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if len(output.get("data", {})) > 1:
                output.data.pop(WIDGET_VIEW, None)


def fold(notebook) -> None:
    """Fold in JupyterLab what the tags fold on the page: set-up cells and solutions."""
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "hide-cell" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True, "outputs_hidden": True}
        elif "hide-input" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}


def main(names: list[str]) -> None:
    """Write the twin of each chapter named; stop at the first that fails."""
    os.environ.pop("LABCORE_STATIC", None)  # a twin holds what a reader's own run shows
    os.environ["TQDM_DISABLE"] = "1"  # but no progress bar, which only a slow machine shows
    for name in names:
        if not Path(name).is_file():
            sys.exit(f"no chapter {name}")
        print(f"running {name}", flush=True)
        try:
            write_twin(Path(name))
        except CellExecutionError as failure:
            sys.exit(f"{name} failed:\n{failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
