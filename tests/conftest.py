"""What every test, and every chapter that the tests run, finds set."""

import os

from bookkit import teach

os.environ["TQDM_DISABLE"] = "1"  # a bar after five seconds would be an output of a slow machine
os.environ.pop("LABCORE_STATIC", None)  # set while the book is built; here explorers are live
teach.start("1.0")  # as in a chapter's first cell: Triton's interpreter where there is no GPU
# The files that take longest, so that at the end no core waits for the other one.
FIRST = ["build", "compile", "kernel", "other_model", "engine", "browser", "decode", "benchmarks"]
collect_ignore = ["test_kernel_on_gpu.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []


def pytest_collection_modifyitems(config, items):
    """Leave the full grid out unless -m names it; begin with what takes longest."""
    if "grid" not in config.option.markexpr:
        grid = [item for item in items if item.get_closest_marker("grid")]
        items[:] = [item for item in items if item not in grid]
        config.hook.pytest_deselected(items=grid)
    names = [f"test_{name}.py" for name in FIRST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else 99)
