"""The explorer without a kernel: one piece of HTML with every picture, and a script to swap them.

Used by `labcore.explorer`. What the pictures have in common travels once: equal pictures, and the
text that all of them begin and end with.
"""

import gzip
import json
import re
from html import escape
from typing import NamedTuple

NO_SCRIPT = "The controls need JavaScript; the picture shows the starting values."
STYLE = """\
.explorer{border:1px solid var(--pst-color-border,#8886);border-radius:8px;padding:.9em 1.1em;\
margin:1em 0;color:var(--pst-color-text-base,inherit);\
background:var(--pst-color-background,transparent)}
html[data-theme=dark] .explorer{color-scheme:dark}
html[data-theme=light] .explorer{color-scheme:light}
.explorer-controls{display:flex;flex-wrap:wrap;gap:.6em 2em;margin-bottom:1em}
.explorer-control{display:flex;align-items:center;gap:.6em;flex:0 1 auto}
.explorer-control label{display:flex;align-items:center;gap:.6em}
.explorer-control input{width:min(11em,34vw);height:1.6em;\
accent-color:var(--pst-color-primary,#4477aa)}
.explorer-control select{font:inherit;color:inherit;padding:.25em .4em;border-radius:4px;\
border:1px solid var(--pst-color-border,#888);background:var(--pst-color-surface,Field)}
.explorer-control output{min-width:4.5ch;font-weight:600;font-variant-numeric:tabular-nums}
.explorer-control :focus-visible{outline:2px solid var(--pst-color-primary,#4477aa);\
outline-offset:3px}
.explorer-view svg,.explorer-view img{display:block;max-width:100%;height:auto}
.explorer-caption{margin:.9em 0 0;min-height:3em}.explorer noscript{font-style:italic}"""

SCRIPT = """\
(function (root) {
  var data = JSON.parse(root.querySelector('script[type="application/json"]').textContent),
      controls = root.querySelectorAll("input, select"), at = -1;
  function show() {
    var k = 0;
    controls.forEach(function (control, i) {
      var labels = data.labels[i], label = labels[control.value];
      k = k * labels.length + Number(control.value);
      if (control.type !== "range") return;
      control.setAttribute("aria-valuetext", label);
      control.closest(".explorer-control").querySelector("output").textContent = label;
    });
    if (k === at) return;
    at = k;
    var picture = data.head + data.pictures[data.frames[k][0]] + data.tail;
    root.querySelector(".explorer-view").innerHTML = picture;
    root.querySelector(".explorer-caption").textContent = data.frames[k][1];
  }
  controls.forEach(function (control) {
    control.disabled = false;
    control.addEventListener("input", show);
  });
  show();
})(document.currentScript.parentNode)"""


class Frame(NamedTuple):
    """One position of the controls: a picture as SVG or HTML, and its caption.  Given."""

    picture: str
    caption: str


class Control(NamedTuple):
    """One axis as a page shows it: a title, a label for each position, the start.  Given."""

    title: str
    labels: list[str]
    at: int
    is_list: bool


def page(controls: list[Control], frames: list[Frame]) -> str:
    """Return the HTML of an explorer; in `frames` the last control changes fastest.  Given."""
    first = 0
    for control in controls:
        first = first * len(control.labels) + control.at
    parts = (
        f"<style>{STYLE}</style>",
        f'<div class="explorer-controls">{"".join(map(_control, controls))}</div>',
        f"<noscript><p>{NO_SCRIPT}</p></noscript>",
        f'<div class="explorer-view" style="{_room(frames)}">{frames[first].picture}</div>',
        f'<p class="explorer-caption" aria-live="polite">{escape(frames[first].caption)}</p>',
        f'<script type="application/json">{_data(controls, frames)}</script>',
        f"<script>{SCRIPT}</script>",
    )
    return f'<div class="explorer">{"".join(parts)}</div>'


def compressed_bytes(text: str) -> int:
    """Return what a web server sends: the size after gzip.  Given."""
    return len(gzip.compress(text.encode(), mtime=0))


def _control(control: Control) -> str:
    """Return a native control, disabled until the script finds it."""
    off = 'disabled autocomplete="off"'
    now, output = escape(control.labels[control.at]), ""
    if control.is_list:
        options = [
            f'<option value="{i}"{" selected" * (i == control.at)}>{escape(label)}</option>'
            for i, label in enumerate(control.labels)
        ]
        element = f"<select {off}>{''.join(options)}</select>"
    else:
        reach = f'min="0" max="{len(control.labels) - 1}" value="{control.at}"'
        element = f'<input type="range" {off} {reach} aria-valuetext="{now}">'
        output = f'<output aria-live="off">{now}</output>'
    label = f"<label><span>{escape(control.title)}</span>{element}</label>"
    return f'<div class="explorer-control">{label}{output}</div>'


def _data(controls: list[Control], frames: list[Frame]) -> str:
    """Return labels, pictures and captions as JSON that may stand inside a script element."""
    pictures = list(dict.fromkeys(frame.picture for frame in frames))
    place = {picture: i for i, picture in enumerate(pictures)}
    head = _common_start(pictures)
    rest = [picture.removeprefix(head) for picture in pictures]
    tail = _common_start([text[::-1] for text in rest])[::-1]
    data = {
        "labels": [control.labels for control in controls],
        "head": head,
        "tail": tail,
        "pictures": [text.removesuffix(tail) for text in rest],
        "frames": [[place[frame.picture], frame.caption] for frame in frames],
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("</", "<\\/").replace("<!--", "\\u003c!--")


def _common_start(texts: list[str]) -> str:
    """Return what all texts begin with: no more than the first and the last in order share."""
    low, high = min(texts), max(texts)
    differ = (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    return low[: next(differ, len(low))]


def _room(frames: list[Frame]) -> str:
    """Return a style that keeps room for the largest picture, so that the page never jumps."""
    size = re.compile(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"')
    sizes = [size.match(frame.picture) for frame in frames]
    if not all(sizes):
        return ""
    width, height = (max(float(found[i]) for found in sizes) for i in (1, 2))
    return f"max-width:{width:g}px;aspect-ratio:{width:g}/{height:g}"
