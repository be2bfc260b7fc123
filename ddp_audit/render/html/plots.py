"""The plots of the report: matplotlib's SVG, rewritten so that a strict policy draws it.

matplotlib writes inline ``style``, which a policy without 'unsafe-inline' blocks: charts then come
out as black boxes. Each property is therefore moved into its presentation attribute.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"

OWN, SHARED, NOTHING = 0, 1, 2
# Okabe-Ito sky blue and vermilion: apart in lightness too, so they differ for every kind of colour vision.
COLORS = {OWN: "#8ecbf0", SHARED: "#d55e00", NOTHING: "#ffffff"}
_INK, _MUTED, _GRID = "#1f2328", "#57606a", "#d0d7de"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
_WIDTH = 7.6  # inches; 72 units each in the SVG
_SCALE = 1.5  # pixels per unit at full width: 9 units of type come out a little smaller than the page's text

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: searchable, small
    "svg.hashsalt": "ddp-audit",  # ids must not differ between two renderings
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "image.composite_image": False,
}


def heat_map(
    states: Sequence[Sequence[int]], ranks: Sequence[int], last_step: int, first_step: int, notes: Sequence[str]
) -> str:
    """Rank x step map of who shares its batch.

    Args:
        states: ranks x bins of ``OWN``, ``SHARED`` or ``NOTHING``.
        ranks: rank of each row.
        first_step, last_step: steps at the left and right edge.
        notes: what to write at the right of each row, for instance ``= rank 0``.

    Returns:
        SVG text; the map itself is a PNG inside, one pixel per cell, so 64 x 200 cells stay small.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap

    num_ranks = len(ranks)

    def draw(axes: Axes) -> None:
        axes.imshow(
            np.array(states, dtype=np.uint8),
            cmap=ListedColormap([COLORS[OWN], COLORS[SHARED], COLORS[NOTHING]]),
            vmin=0,
            vmax=2,
            aspect="auto",
            interpolation="none",
            extent=(first_step, max(last_step, first_step + 1), num_ranks - 0.5, -0.5),
        )
        if num_ranks <= 16:
            for row in range(1, num_ranks):
                axes.axhline(row - 0.5, color="#ffffff", linewidth=2)
        every = 1 if num_ranks <= 16 else 8
        axes.set_yticks(range(0, num_ranks, every), [str(rank) for rank in ranks[::every]])
        axes.set_ylabel("rank")
        axes.set_xlabel("optimizer step")
        axes.spines[:].set_visible(False)
        for start, stop, note in _runs(notes):
            axes.annotate(
                note,
                xy=(1.0, (start + stop - 1) / 2),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8 if num_ranks <= 24 else 7,
                color=_MUTED,
            )

    return _figure("heat", draw, height=0.75 + min(5.2, max(0.7, 0.3 * num_ranks)), right=0.84)


def overlap_matrix(shares: Sequence[Sequence[float]], ranks: Sequence[int]) -> str:
    """Ranks x ranks matrix of the share of samples in common, each cell with its number in per cent.

    Args:
        shares: 0 to 1; NaN = unknown. The diagonal is left out.
        ranks: rank of each row and column, at most 16.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    num_ranks = len(ranks)
    values = np.array(shares, dtype=float).reshape(num_ranks, num_ranks)
    diagonal = np.eye(num_ranks, dtype=bool)
    # The colours of the heat map, so that orange means "shared" in both; lightness falls all the way.
    palette = LinearSegmentedColormap.from_list("shared", ["#e3f0fa", "#f7cfa8", COLORS[SHARED]])
    side = min(5.0, max(1.2, 0.42 * num_ranks))

    def draw(axes: Axes) -> None:
        from matplotlib.patches import Rectangle

        for row in range(num_ranks):
            for column in range(num_ranks):
                value = values[row, column]
                known = not diagonal[row, column] and math.isfinite(value)
                fill: Any = "#eef1f4" if diagonal[row, column] else "#ffffff"
                if known:
                    fill = palette(float(value))
                axes.add_patch(
                    Rectangle(
                        (column - 0.5, row - 0.5), 1, 1, facecolor=fill, edgecolor="#ffffff", linewidth=1.5, zorder=1
                    )
                )
                text = f"{value * 100:.0f}" if known else ("–" if diagonal[row, column] else "?")
                if known and 0 < value < 0.005:
                    text = "<1"
                axes.text(
                    column, row, text, ha="center", va="center", fontsize=9 if num_ranks <= 8 else 7.5, color="#000000"
                )
        axes.set_xlim(-0.5, num_ranks - 0.5)
        axes.set_ylim(num_ranks - 0.5, -0.5)
        axes.set_xticks(range(num_ranks), [str(rank) for rank in ranks])
        axes.set_yticks(range(num_ranks), [str(rank) for rank in ranks])
        axes.tick_params(length=0)
        axes.set_xlabel("rank   (cells: samples in common, %)")
        axes.set_ylabel("rank")
        axes.spines[:].set_visible(False)

    return _figure("overlap", draw, height=side + 0.75, width=side + 2.2, left_inch=0.65, right_inch=1.5)


def shard_bars(counts: Sequence[int], ranks: Sequence[int], reference: float | None, reference_name: str) -> str:
    """One bar per rank with its count at the end, and a line at what each should have read.

    Args:
        counts: samples per rank.
        ranks: rank of each bar.
        reference: where the line goes; ``None`` = no line.
        reference_name: direct label of the line.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    num_ranks = len(ranks)
    common = max(set(counts), key=lambda value: (list(counts).count(value), value))

    def draw(axes: Axes) -> None:
        hatches = ["" if value == common else "////" for value in counts]
        axes.barh(
            range(num_ranks),
            counts,
            height=0.72,
            color=["#0072b2" if value == common else "#e69f00" for value in counts],
            hatch=hatches,
            edgecolor="#ffffff",
            linewidth=0,
            zorder=2,
        )
        top = max([*counts, reference or 0, 1])
        for row, value in enumerate(counts):
            if num_ranks <= 24 or value != common or row == 0:
                axes.annotate(
                    f"{value:,}".replace(",", " "),
                    xy=(value, row),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8 if num_ranks <= 24 else 6.5,
                    bbox={"facecolor": "#ffffff", "edgecolor": "none", "pad": 1},
                    zorder=4,
                )
        if reference is not None:
            axes.axvline(reference, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=3)
            axes.annotate(
                reference_name,
                xy=(reference, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center" if reference < 0.75 * top else "right",
                va="bottom",
                fontsize=8,
                color=_INK,
            )
        axes.set_xlim(0, top * 1.12)
        axes.set_ylim(num_ranks - 0.4, -0.6)
        every = 1 if num_ranks <= 24 else 8
        axes.set_yticks(range(0, num_ranks, every), [str(rank) for rank in ranks[::every]])
        axes.set_ylabel("rank")
        axes.set_xlabel("samples")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", " ")))
        axes.spines["left"].set_visible(False)

    return _figure(
        "shards", draw, height=1.05 + min(6.4, max(0.5, (0.27 if num_ranks <= 24 else 0.075) * num_ranks)), top_inch=0.3
    )


def _figure(
    name: str,
    draw: Callable[[Axes], None],
    *,
    height: float,
    width: float = _WIDTH,
    right: float | None = None,
    left_inch: float = 0.65,
    right_inch: float = 0.2,
    top_inch: float = 0.12,
) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change the page
        matplotlib.rcParams.update(_RC)
        figure: Figure = Figure(figsize=(width, height))
        canvas: Any = FigureCanvasSVG(figure)
        axes = figure.add_axes(
            (
                left_inch / width,
                0.55 / height,
                (right if right is not None else 1 - right_inch / width) - left_inch / width,
                1 - (0.55 + top_inch) / height,
            )
        )
        draw(axes)
        out = io.StringIO()
        canvas.print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return strict_svg(out.getvalue(), name)


def strict_svg(svg: str, name: str) -> str:
    """matplotlib's SVG for inlining: no ``style``, no metadata, no ids but those referred to.

    Args:
        svg: as matplotlib wrote it.
        name: of the figure, one per page; its ids become ``name-0``, ``name-1``, …
    """
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    references = re.findall(r"""(?:url\(\s*|href=")#([^)"]+)""", ElementTree.tostring(root, encoding="unicode"))
    ids = {old: f"{name}-{number}" for number, old in enumerate(dict.fromkeys(references))}
    for element in root.iter():
        for key, value in _declarations(element.attrib.pop("style", "")):
            element.set(key, value)
        href = element.attrib.pop(f"{{{_XLINK}}}href", None)
        if href is not None:
            element.set("href", f"#{ids[href[1:]]}" if href.startswith("#") else href)
        for key, value in element.attrib.items():
            element.set(key, re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{ids[match.group(1)]})", value))
        old = element.attrib.pop("id", None)
        if old in ids:
            element.set("id", ids[old])
    width, height = (float(part) for part in str(root.get("viewBox")).split()[2:])
    for key in ("version", "width", "height"):
        root.attrib.pop(key, None)
    # Width as an attribute keeps the size where a server forbids our style sheet.
    root.set("width", f"{width * _SCALE:.0f}")
    root.set("height", f"{height * _SCALE:.0f}")
    root.set("class", "plot")
    root.set("font-family", _FONT)
    return ElementTree.tostring(root, encoding="unicode")


def _declarations(style: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for part in re.split(r";(?![^(]*\))", style):
        name, colon, value = part.partition(":")
        name, value = name.strip(), value.strip()
        if not colon:
            continue
        if name == "font":  # a shorthand has no attribute; the family is the root's
            match = re.search(r"([\d.]+)px", value)
            out.append(("font-size", match.group(1) if match else "9"))
        elif name == "font-size":
            out.append((name, value.removesuffix("px")))
        elif name == "image-rendering":
            out.append((name, "pixelated"))
        elif name != "font-family":
            out.append((name, value))
    return out


def _runs(notes: Sequence[str]) -> list[tuple[int, int, str]]:
    """Rows with equal notes, as (first, past the last, note): each row's up to 16 rows, else each run's."""
    if len(notes) <= 16:
        return [(row, row + 1, note) for row, note in enumerate(notes)]
    runs: list[tuple[int, int, str]] = []
    for row, note in enumerate(notes):
        if runs and runs[-1][2] == note:
            runs[-1] = (runs[-1][0], row + 1, note)
        else:
            runs.append((row, row + 1, note))
    # A label needs about 1.4 rows at 64 ranks; where runs are shorter the table has the rest.
    return [run for run in runs if run[1] - run[0] >= 2] if len(notes) > 24 else runs
