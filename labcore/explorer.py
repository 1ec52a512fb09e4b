"""A picture with sliders that works in two places: `explore(render, block_size=[8, 16, 32])`.

With a kernel (JupyterLab, VS Code, Colab) the sliders are ipywidgets, and Python draws anew at each
change. In the built book there is no kernel, so everything is drawn beforehand, and the page holds
every picture: see labcore.explorer_page.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from html import escape
from itertools import product
from typing import NamedTuple

from labcore.explorer_page import Control, Frame, compressed_bytes, page
from labcore.picture import Picture, in_book, on_paper

MOST_FRAMES = 400
MOST_BYTES = 120 * 1024  # compressed, a whole explorer


class StaticSize(NamedTuple):
    """What an explorer weighs in the book, in bytes, and how many pictures it holds.  Given."""

    frames: int
    different_pictures: int
    raw_bytes: int
    compressed_bytes: int


def explore(
    render: Callable,
    *,
    start: Mapping[str, object] | None = None,
    labels: Mapping[str, Callable[[object], str]] | None = None,
    **axes,
) -> "Explorer":
    """Show `render(**values)` with a control for each axis, given as a list of its values.

    `render` returns a `Picture`, an SVG string or a matplotlib figure, or (picture, caption) with
    the caption one sentence that says what is to be seen. Numbers get a slider, text a list to
    choose from. `start` gives first positions (else each axis's first value), `labels` a function
    that writes an axis's values, as in labels={"watermark": "{:.0%}".format}.
    Raises ValueError for no axis, an empty axis, a start or label that does not fit, and more than
    400 positions; and in the book, for more than 120 KB compressed.  Given.
    """
    return Explorer(render, axes, dict(start or {}), dict(labels or {}))


class Explorer:
    """What `explore` returns: pictures over every combination of a few values.  Given."""

    def __init__(self, render: Callable, axes: Mapping, start: Mapping, labels: Mapping) -> None:
        self.render = render
        self.axes = {name: list(values) for name, values in axes.items()}
        _check(self.axes, start, labels)
        self.start = {name: values[0] for name, values in self.axes.items()} | dict(start)
        self.labels = {
            name: [str(labels.get(name, str)(value)) for value in values]
            for name, values in self.axes.items()
        }

    def positions(self) -> Iterator[dict[str, object]]:
        """Yield every combination of values, the last axis changing fastest.  Given."""
        for values in product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def frame(self, **values) -> Frame:
        """Draw one position.  Given."""
        result = self.render(**values)
        picture, caption = result if isinstance(result, tuple) else (result, "")
        return _frame(picture, caption)

    # --- in the book: everything drawn beforehand ---------------------------------------------

    @cached_property
    def frames(self) -> list[Frame]:
        """Every position's frame, drawn once. An error in `render` names the position.  Given."""
        return [self._frame_or_note(values) for values in self.positions()]

    def _frame_or_note(self, values: Mapping) -> Frame:
        try:
            return self.frame(**values)
        except Exception as error:
            error.add_note(f"while drawing {_words(values)}")
            raise

    @cached_property
    def _page(self) -> str:
        controls = [
            Control(
                _title(name), self.labels[name], values.index(self.start[name]), _is_text(values)
            )
            for name, values in self.axes.items()
        ]
        return page(controls, self.frames)

    def static_size(self) -> StaticSize:
        """Say what the explorer weighs in the book; draws every frame.  Given."""
        pictures = {frame.picture for frame in self.frames}
        raw, compressed = len(self._page.encode()), compressed_bytes(self._page)
        return StaticSize(len(self.frames), len(pictures), raw, compressed)

    def static_html(self) -> str:
        """Return the whole explorer as HTML that needs no kernel, no other file and no network.

        Draws every frame. Raises ValueError if it passes 120 KB compressed.  Given.
        """
        size = self.static_size()
        if size.compressed_bytes > MOST_BYTES:
            largest = max(len(frame.picture) for frame in self.frames) / 1024
            raise ValueError(
                f"explorer over {', '.join(self.axes)}: {size.compressed_bytes / 1024:.0f} KB "
                f"compressed, at most {MOST_BYTES // 1024} are allowed; {size.frames} frames, "
                f"{size.different_pictures} of them different, the largest {largest:.1f} KB"
            )
        return self._page

    # --- with a kernel: widgets -----------------------------------------------------------------

    def widget(self):
        """Return the live view, a box of ipywidgets; ImportError where there are none.  Given."""
        import ipywidgets

        picture, caption = ipywidgets.HTML(), ipywidgets.HTML()
        controls = {name: self._live_control(name) for name in self.axes}

        def draw(_change=None):
            frame = self._frame_or_message({name: box.value for name, box in controls.items()})
            picture.value, caption.value = frame.picture, escape(frame.caption)

        for control in controls.values():
            control.observe(draw, "value")
        draw()
        wrapping = ipywidgets.Layout(display="flex", flex_flow="row wrap")
        return ipywidgets.VBox(
            [ipywidgets.Box(list(controls.values()), layout=wrapping), picture, caption]
        )

    def _live_control(self, name: str):
        import ipywidgets

        options = list(zip(self.labels[name], self.axes[name], strict=True))
        common = {"options": options, "value": self.start[name], "description": _title(name)}
        common["style"] = {"description_width": "initial"}
        if _is_text(self.axes[name]):
            return ipywidgets.Dropdown(**common)
        return ipywidgets.SelectionSlider(continuous_update=False, **common)

    def _frame_or_message(self, values: Mapping) -> Frame:
        """Draw a frame; where `render` fails, show its message and leave the sliders alive."""
        try:
            return self.frame(**values)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            return Frame(f"<pre>{escape(message)}</pre>", f"Nothing to draw for {_words(values)}.")

    # --- how a notebook shows it ------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the caption of the starting position, or the axes where there is none."""
        axes = ", ".join(f"{name}={values}" for name, values in self.axes.items())
        return self._frame_or_message(self.start).caption or f"explore({axes})"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if in_book():
            return {"text/html": self.static_html(), "text/plain": repr(self)}
        frame = self._frame_or_message(self.start)
        bundle = {"text/plain": frame.caption or repr(self)}
        if frame.picture.startswith("<svg"):  # for viewers that run nothing, GitHub's among them
            bundle["image/svg+xml"] = on_paper(frame.picture)
        try:
            view = {"model_id": self.widget().model_id, "version_major": 2, "version_minor": 0}
        except ImportError:
            return bundle
        return bundle | {"application/vnd.jupyter.widget-view+json": view}


def _check(axes: Mapping[str, list], start: Mapping, labels: Mapping) -> None:
    if not axes:
        raise ValueError("explore() needs at least one axis, such as block_size=[8, 16, 32]")
    for name, values in axes.items():
        if not values:
            raise ValueError(f"axis {name!r} has no values")
    for name in [*start, *labels]:
        if name not in axes:
            raise ValueError(f"there is no axis {name!r} among {list(axes)}")
    for name, value in start.items():
        if value not in axes[name]:
            raise ValueError(f"start {name}={value!r} is not one of {axes[name]}")
    number = math.prod(map(len, axes.values()))
    if number > MOST_FRAMES:
        sizes = " x ".join(str(len(values)) for values in axes.values())
        raise ValueError(f"{sizes} = {number} frames, at most {MOST_FRAMES}: leave values out")


def _frame(picture, caption: str) -> Frame:
    """Turn whatever `render` returned into text: SVG strings, pictures, matplotlib figures."""
    if hasattr(picture, "savefig"):
        from labcore.figure import figure_svg

        picture = Picture(figure_svg(picture, caption or "Figure", caption).svg, caption)
    if isinstance(picture, Picture):
        return Frame(picture.svg, caption or picture.description)
    if isinstance(picture, str):
        return Frame(picture, caption)
    raise TypeError(
        f"render() returned {type(picture).__name__}, not a picture, SVG text or figure"
    )


def _is_text(values: list) -> bool:
    return all(isinstance(value, str) for value in values)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _words(values: Mapping) -> str:
    return ", ".join(f"{_title(name)} {value}" for name, value in values.items())
