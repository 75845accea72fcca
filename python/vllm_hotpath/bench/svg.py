"""A chart of small panels with shared axes, written as SVG by hand. Knows nothing of ops or benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# Greys and hues with enough contrast on white and on near-black alike: the page behind is transparent.
_INK = "#767e88"
_GRID = "#8b949e"
_COLOURS = ("#2f81f7", "#e0702b", "#3fa34d", "#b065d8")
_MARKS = ("circle", "square", "circle", "square")

_COLUMNS = 4
_CELL_W, _CELL_H = 300, 210
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 30, 12, 40
_HEADER, _FOOTER = 62, 30
_STYLE = (
    f"text{{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:11px;fill:{_INK}}}"
    ".title{font-size:15px;font-weight:600}.panel{font-size:11.5px;font-weight:600}.small{font-size:10px}"
)


@dataclass(frozen=True)
class Panel:
    """One panel: named series of (x, y) points, x positive and drawn on a log axis."""

    title: str
    x_label: str
    series: dict[str, list[tuple[float, float]]]


class _Axes(NamedTuple):
    xs: list[float]
    top: float
    y_label: str


def draw(title: str, panels: Sequence[Panel], *, footer: str = "", y_label: str = "time / floor") -> str:
    """Draw the panels in rows of four; a line at y = 1 marks the floor.

    Series without a point in any panel are left out of the legend.
    """
    columns = max(1, min(_COLUMNS, len(panels)))
    rows = -(-len(panels) // columns)
    width = max(columns * _CELL_W, 620) + 20
    height = _HEADER + rows * _CELL_H + _FOOTER
    names = [
        name
        for name in dict.fromkeys(n for p in panels for n in p.series)
        if any(p.series.get(name) for p in panels)
    ]
    colours = {name: (_COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]) for i, name in enumerate(names)}
    points = [point for panel in panels for line in panel.series.values() for point in line]
    axes = _Axes(
        xs=sorted({x for x, _ in points}) or [1.0],
        top=_ceiling(max((y for _, y in points), default=1.0)),
        y_label=y_label,
    )
    body = [f'<text class="title" x="16" y="24">{escape(title)}</text>', *_legend(colours)]
    for i, panel in enumerate(panels):
        left, upper = 10 + i % columns * _CELL_W, _HEADER + i // columns * _CELL_H
        body += _panel(panel, (left, upper), axes, colours)
    body.append(f'<text class="small" x="16" y="{height - 12}">{escape(footer)}</text>')
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _ceiling(highest: float) -> float:
    step = 0.25 if highest < 2 else 0.5 if highest < 4 else 1.0
    return max(1.25, math.ceil(highest / step + 0.05) * step)


def _legend(colours: dict[str, tuple[str, str]]) -> list[str]:
    parts, x = [], 16
    for name, (colour, mark) in colours.items():
        parts.append(f'<line x1="{x}" y1="42" x2="{x + 24}" y2="42" stroke="{colour}" stroke-width="2"/>')
        parts.append(_mark(mark, x + 12, 42, colour))
        parts.append(f'<text x="{x + 30}" y="46">{escape(name)}</text>')
        x += 52 + 7 * len(name)
    parts.append(f'<line x1="{x}" y1="42" x2="{x + 24}" y2="42" stroke="{_INK}" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{x + 30}" y="46">floor</text>')
    return parts


def _panel(
    panel: Panel, corner: tuple[int, int], axes: _Axes, colours: dict[str, tuple[str, str]]
) -> list[str]:
    left, upper = corner
    xs, top = axes.xs, axes.top
    x0, x1 = left + _LEFT, left + _CELL_W - _RIGHT
    y0, y1 = upper + _CELL_H - _BOTTOM, upper + _TOP
    low, span = math.log2(xs[0]), math.log2(xs[-1] / xs[0]) or 1.0
    base = 0.75

    def at_x(x: float) -> float:
        return x0 + 8 + (math.log2(x) - low) / span * (x1 - x0 - 16)

    def at_y(y: float) -> float:
        return y0 - (max(y, base) - base) / (top - base) * (y0 - y1)

    parts = [f'<text class="panel" x="{x0}" y="{y1 - 9}">{escape(panel.title)}</text>']
    step = 0.25 if top <= 2 else 0.5 if top <= 4 else math.ceil((top - 1) / 6)
    for i in range(int((top - 1) / step + 1e-9) + 1):
        y = 1 + i * step
        dash = (
            f' stroke="{_INK}" stroke-dasharray="4 3"'
            if i == 0
            else f' stroke="{_GRID}" stroke-opacity="0.3"'
        )
        parts.append(f'<line x1="{x0}" y1="{at_y(y):.1f}" x2="{x1}" y2="{at_y(y):.1f}"{dash}/>')
        parts.append(
            f'<text class="small" x="{x0 - 5}" y="{at_y(y) + 3.5:.1f}" text-anchor="end">{y:g}</text>'
        )
    parts.append(f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="{_INK}"/>')
    last = -math.inf
    for x in xs:
        parts.append(f'<line x1="{at_x(x):.1f}" y1="{y0}" x2="{at_x(x):.1f}" y2="{y0 + 4}" stroke="{_INK}"/>')
        if at_x(x) - last >= 24:
            parts.append(
                f'<text class="small" x="{at_x(x):.1f}" y="{y0 + 15}" text-anchor="middle">{_short(x)}</text>'
            )
            last = at_x(x)
    parts.append(
        f'<text class="small" x="{(x0 + x1) / 2}" y="{y0 + 29}" text-anchor="middle">{panel.x_label}</text>'
    )
    middle = (y0 + y1) / 2
    parts.append(
        f'<text class="small" x="{left + 10}" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 {left + 10} {middle})">{escape(axes.y_label)}</text>'
    )
    for name, (colour, mark) in colours.items():
        line = sorted(panel.series.get(name, []))
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line)
        if line:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line:
            hint = f"{name}: {panel.x_label}={x:g}, {y:.3f}"
            parts.append(_mark(mark, at_x(x), at_y(y), colour, hint))
    return parts


def _mark(kind: str, x: float, y: float, colour: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{inside}</circle>'
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}">{inside}</rect>'


def _short(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:g}"
