"""What this book asks of Sphinx beyond its settings (see _config.yml).

1. A chapter is run again when a package, a recorded result or a pinned version changed, not only
   when its own cells did.
2. No page loads anything from elsewhere: MathJax is copied into the site, thebe is taken out.
3. Repository, issue and launch buttons appear once `labbook_repository` says where that is.
4. A chapter's download is the committed, executed .ipynb beside its source.
5. Two chapters run at a time.
"""

import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

from jupyter_cache import get_cache

# Besides a chapter's cells, its outputs depend on these.
SOURCES_OF_OUTPUTS = ("labcore", "kernels", "bookkit", "book/results", "constraints.txt")
MATHJAX_PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2")


def cache_key(root: Path) -> str:
    """Name the state of all that a chapter's outputs depend on besides its cells."""
    digest = hashlib.sha256()
    for source in SOURCES_OF_OUTPUTS:
        path = root / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(file.relative_to(root).as_posix().encode() + b"\0")
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def set_execution_cache(app, config) -> None:
    """Keep cached outputs in a folder named by the key. A new key is a new, empty cache."""
    base = Path(app.outdir).parent / ".jupyter_cache"
    current = base / cache_key(Path(app.srcdir))
    config.nb_execution_cache_path = str(current)
    for old in base.glob("*"):
        if old != current:
            shutil.rmtree(old)


def read_in_parallel(app, config) -> None:
    """Read, and so run, two chapters at a time. Sphinx does so if every extension says it may.

    The two that say nothing number sections and write LaTeX; this book has them do neither.
    """
    get_cache(config.nb_execution_cache_path).list_cache_records()  # made now, not by two at once
    app.parallel = min(2, os.cpu_count())
    for name in ("sphinx_multitoc_numbering", "sphinx_jupyterbook_latex"):
        app.extensions[name].parallel_read_safe = True


def deal_evenly(app, env, docnames) -> None:
    """Sphinx cuts the list into two or three: in order of name, chapters would lie in one part."""
    docnames[:] = docnames[::2] + docnames[1::2]


def set_buttons(app, config) -> None:
    """Point all buttons at the repository, or have none. Jupyter Book's default is its own."""
    repository = config.labbook_repository.rstrip("/")
    config.html_theme_options |= {
        "repository_url": repository,
        "repository_branch": config.labbook_branch,
        "use_repository_button": bool(repository),
        "use_issues_button": bool(repository),
        "launch_buttons": {"colab_url": "https://colab.research.google.com" if repository else ""},
    }


def set_local_mathjax(app, config) -> None:
    """Load formulas' script from the site (copied by `finish`)."""
    config.mathjax_path = "mathjax/tex-chtml.js"


def take_out_thebe(app, config) -> None:
    """Keep sphinx-thebe, which Jupyter Book always loads, from adding scripts and settings."""
    for event, listeners in app.events.listeners.items():
        app.events.listeners[event] = [
            listener
            for listener in listeners
            if not listener.handler.__module__.startswith("sphinx_thebe")
        ]
    app.registry.css_files = [css for css in app.registry.css_files if "thebe" not in css[0]]


def offer_twin(app, pagename, templatename, context, doctree) -> None:
    """Have the theme offer the twin for download, where there is one."""
    if (Path(app.srcdir) / f"{pagename}.ipynb").is_file():
        context["ipynb_source"] = f"{pagename}.ipynb"


def copy_twins(app) -> None:
    """Put the committed notebooks where the download buttons point."""
    source, site = Path(app.srcdir), Path(app.outdir)
    for docname in app.env.found_docs:
        twin = source / f"{docname}.ipynb"
        if twin.is_file():
            target = site / "_sources" / f"{docname}.ipynb"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(twin, target)


def copy_mathjax(app) -> None:
    """Copy the parts of MathJax that pages need: 1.5 MB of the package's 24."""
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent
    for part in MATHJAX_PARTS:
        source = package / "static" / "mathjax" / part
        target = Path(app.outdir) / "_static" / "mathjax" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, target)


def finish(app, exception) -> None:
    """Complete the written site."""
    if exception is None and app.builder.format == "html":
        copy_twins(app)
        copy_mathjax(app)


def setup(app) -> dict:
    """Tell Sphinx about all of the above."""
    # The kernels of this build inherit these. Explorers write HTML; no progress bar is an output of
    # a slow machine; two chapters at a time have one thread each.
    os.environ |= {"LABCORE_STATIC": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    app.add_config_value("labbook_repository", "", "html")
    app.add_config_value("labbook_branch", "main", "html")
    hooks = (set_execution_cache, read_in_parallel, set_buttons, set_local_mathjax, take_out_thebe)
    for hook in hooks:
        app.connect("config-inited", hook, priority=100)
    app.connect("env-before-read-docs", deal_evenly)
    app.connect("html-page-context", offer_twin, priority=490)  # before the theme adds its buttons
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
