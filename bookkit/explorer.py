"""A picture with sliders that works in two places: `explore(render, block_size=[8, 16, 32])`.

With a kernel (JupyterLab, VS Code, Colab) the sliders are ipywidgets, and Python draws anew at each
change. The built book has no kernel: there one piece of HTML holds every picture, drawn beforehand,
and the book's script and style sheet (book/_static) see to its controls.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from html import escape
from itertools import product
from types import SimpleNamespace

from bookkit.picture import ENLARGED, Picture, in_book, on_paper, short

MOST_FRAMES = 400
MOST_BYTES = 120 * 1024  # compressed, a whole explorer
PAGE = """\
<div class="explorer"><div class="explorer-controls">{controls}</div>\
<noscript><p>The controls need JavaScript; the picture shows the starting values.</p></noscript>\
<div class="explorer-view" style="{room}">{picture}</div>\
<p class="explorer-caption" aria-live="polite">{caption}</p>\
<script type="application/json">{data}</script></div>"""


class Explorer:
    """Show `render(**values)` with a control for each axis, given as a list of its values.

    `render` returns a `Picture`, or (picture, caption) with the caption one sentence that says what
    is to be seen. Numbers get a slider, text a list to choose from. `start` gives first positions
    (else each axis's first value), `labels` a function that writes an axis's values, as in
    labels={"watermark": "{:.0%}".format}.
    Raises ValueError for an axis, start or label that does not fit, for more than 400 positions,
    and in the book for more than 120 KB compressed.  Given.
    """

    def __init__(
        self, render: Callable, *, start: dict | None = None, labels: dict | None = None, **axes
    ) -> None:
        start, labels = start or {}, labels or {}
        self.render = render
        for name, values in axes.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise ValueError(f"axis {name!r} is a list of values, not {values!r:.60}")
        self.axes = {name: list(values) for name, values in axes.items()}
        _check(self.axes, start, labels)
        self.start = {name: values[0] for name, values in self.axes.items()} | start
        self.labels = {
            name: [str(labels.get(name, str)(value)) for value in values]
            for name, values in self.axes.items()
        }
        every = product(*self.axes.values())  # the last axis changes fastest
        self.positions = [dict(zip(self.axes, values, strict=True)) for values in every]

    def frame(self, **values) -> Picture:
        """Draw one position, described by its caption. An error names the position.  Given."""
        try:
            result = self.render(**values)
            picture, caption = result if isinstance(result, tuple) else (result, "")
            if not isinstance(picture, Picture):
                raise TypeError(f"render() returned {type(picture).__name__}, not a picture")
            if not isinstance(caption, str):
                raise TypeError(f"a caption of type {type(caption).__name__}, not text")
            return Picture(picture.svg, caption or picture.description)
        except Exception as error:
            error.add_note(f"while drawing {_words(values)}")
            raise

    @cached_property
    def frames(self) -> list[Picture]:
        """Every position's frame, drawn once.  Given."""
        return [self.frame(**values) for values in self.positions]

    @cached_property
    def _page(self) -> str:
        first = self.frames[self.positions.index(self.start)]
        width, height = map(max, zip(*(frame.size for frame in self.frames), strict=True))
        frames = [(frame.svg, frame.description) for frame in self.frames]
        data = {"labels": list(self.labels.values()), "frames": frames}
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return PAGE.format(
            controls="".join(map(self._control, self.axes)),
            room=f"max-width:{short(width * ENLARGED)}px;aspect-ratio:{width:g}/{height:g}",
            picture=first.svg,
            caption=escape(first.description),
            data=text.replace("</", "<\\/").replace("<!--", "\\u003c!--"),  # stays in its element
        )

    def _control(self, name: str) -> str:
        """Return an axis's native control, disabled until the script finds it."""
        labels, at = self.labels[name], self.axes[name].index(self.start[name])
        off, output, now = 'disabled autocomplete="off"', "", escape(labels[at])
        if self._is_text(name):
            options = [
                f'<option value="{i}"{" selected" * (i == at)}>{escape(label)}</option>'
                for i, label in enumerate(labels)
            ]
            element = f"<select {off}>{''.join(options)}</select>"
        else:
            reach = f'min="0" max="{len(labels) - 1}" value="{at}"'
            element = f'<input type="range" {off} {reach} aria-valuetext="{now}">'
            output = f'<output aria-live="off">{now}</output>'
        label = f"<label><span>{escape(name.replace('_', ' '))}</span>{element}</label>"
        return f'<div class="explorer-control">{label}{output}</div>'

    def _is_text(self, name: str) -> bool:
        return all(isinstance(value, str) for value in self.axes[name])

    def static_size(self) -> SimpleNamespace:
        """Count what the book gets, `frames` and `compressed_bytes`; draws every frame.  Given."""
        compressed = gzip.compress(self._page.encode(), mtime=0)
        return SimpleNamespace(frames=len(self.frames), compressed_bytes=len(compressed))

    def static_html(self) -> str:
        """Return all positions as HTML, for a page that loads book/_static/explorer.js.

        Draws every frame. Raises ValueError if it passes 120 KB compressed.  Given.
        """
        size = self.static_size()
        if size.compressed_bytes > MOST_BYTES:
            largest = max(len(frame.svg) for frame in self.frames) / 1024
            raise ValueError(
                f"explorer over {', '.join(self.axes)}: {size.compressed_bytes / 1024:.0f} KB "
                f"compressed, at most {MOST_BYTES // 1024} are allowed; {size.frames} frames, "
                f"the largest {largest:.1f} KB"
            )
        return self._page

    def widget(self):
        """Return the live view, a box of ipywidgets; ImportError where there are none.  Given."""
        from ipywidgets import HTML, Box, Dropdown, Layout, SelectionSlider, VBox

        picture, caption, controls = HTML(), HTML(), {}

        def draw(_change=None):
            frame = self._frame_or_message({name: box.value for name, box in controls.items()})
            picture.value, caption.value = frame.svg, escape(frame.description)

        for name, values in self.axes.items():
            controls[name] = box = (Dropdown if self._is_text(name) else SelectionSlider)(
                options=list(zip(self.labels[name], values, strict=True)),
                index=values.index(self.start[name]),  # a value may be None
                description=name.replace("_", " "),
                style={"description_width": "initial"},
            )
            box.continuous_update = False  # draw when a slider is let go; a list knows no other way
            box.observe(draw, "value")
        draw()
        wrapping = Layout(display="flex", flex_flow="row wrap")
        return VBox([Box(list(controls.values()), layout=wrapping), picture, caption])

    def _frame_or_message(self, values: Mapping) -> Picture:
        """Draw a frame; where `render` fails, show its message and leave the sliders alive."""
        try:
            return self.frame(**values)
        except Exception as error:
            message = escape(f"{type(error).__name__}: {error}")
            return Picture(f"<pre>{message}</pre>", f"Nothing to draw for {_words(values)}.")

    def __repr__(self) -> str:
        """Return the caption of the starting position."""
        return self._frame_or_message(self.start).description

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        if in_book():
            return {"text/html": self.static_html(), "text/plain": repr(self)}
        frame = self._frame_or_message(self.start)
        bundle = {"text/plain": frame.description}
        if frame.svg.startswith("<svg"):  # for viewers that run nothing, GitHub's among them
            bundle["image/svg+xml"] = on_paper(frame.svg)
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


def _words(values: Mapping) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()).replace("_", " ")


explore = Explorer  # the verb for the chapters
