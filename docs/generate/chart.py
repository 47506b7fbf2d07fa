"""docs/images/speed.svg, the bars on the first page: times against those of torch's own tools, from bench/results.

python docs/generate/chart.py
"""

from __future__ import annotations

from typing import Any

import performance

PICTURE = performance.ROOT / "docs" / "images" / "speed.svg"

# What a reader waits for; the script, the case and the name of the figure; and what it is compared with.
BARS = [
    ("a first start, 2 workers", "launch", "2 workers", "cold / torchrun", "torchrun's"),
    ("each later start", "launch", "2 workers", "warm / torchrun", "torchrun's"),
    ("a step of a CNN", "steps", "cnn, 2 ranks", "Accelerator / DDP", "DDP's, over gloo"),
    ("a step of a transformer", "steps", "transformer, 2 ranks", "Accelerator / DDP", "DDP's, over gloo"),
    ("all_reduce of 25 MB", "shared_memory", "25 MB, 2 processes", "shared memory / gloo", "gloo's"),
    ("a worker's exception arrives", "failures", "a raise", "unisono.spawn / torchrun", "torchrun's"),
    (
        "training again after kill -9",
        "restart",
        "2 workers",
        "spawn(max_restarts=1) / torch's elastic agent",
        "torch's agent's",
    ),
]

_WIDTH, _ROW, _LEFT, _SCALE = 670, 30, 225, 240  # of the picture, a row, the names, and a ratio of 1
_TEXT = '<text x="{x}" y="{y}" {more}>{text}</text>'
_STYLE = (
    "text { font: 14px system-ui, sans-serif; fill: #1f2933 } .of { fill: #66737f } .ours { fill: #0f766e } "
    ".theirs { fill: #cbd5db } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .of { fill: #9aa7b2 } "
    ".ours { fill: #2dd4bf } .theirs { fill: #4b5864 } }"
)


def draw(results: list[dict[str, Any]]) -> str:
    """The picture. Raises KeyError if a figure is missing."""
    found = {
        (each["script"], each["case"], each["name"]): each["ratio"]
        for one in results
        for each in one["figures"]
        if each["device"] == "cpu"
    }
    parts = []
    for number, (what, *key, peer) in enumerate(BARS):
        ratio, y = found[tuple(key)], number * _ROW + 8
        parts += [
            _TEXT.format(x=_LEFT - 12, y=y + 15, more='text-anchor="end"', text=what),
            f'<rect class="theirs" x="{_LEFT}" y="{y}" width="{_SCALE}" height="20" rx="3"/>',
            f'<rect class="ours" x="{_LEFT}" y="{y}" width="{max(ratio * _SCALE, 3):.0f}" height="20" rx="3"/>',
            _TEXT.format(
                x=_LEFT + _SCALE + 12,
                y=y + 15,
                more='class="of"',
                text=f"{ratio:.2f} of {peer}",
            ),
        ]
    height = len(BARS) * _ROW + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Times, as parts of those of torch\'s own tools"><style>{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(performance.read_all()))
