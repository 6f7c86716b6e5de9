"""The style of static charts in reports, on the pages of plans and simulations, in benchmarks."""

from __future__ import annotations

import io
import re

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

TEXT_COLOUR, GRID_COLOUR = "#24292f", "#e4e7eb"
mpl.rcParams.update(
    {
        "font.size": 10,
        "axes.edgecolor": "#9aa4af",
        "axes.labelcolor": TEXT_COLOUR,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID_COLOUR,
        "axes.axisbelow": True,
        "text.color": TEXT_COLOUR,
        "xtick.color": TEXT_COLOUR,
        "ytick.color": TEXT_COLOUR,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "svg.hashsalt": "rlinf",
    }
)


def finish_chart(figure: Figure) -> Figure:
    """Apply the final layout of a chart."""
    figure.tight_layout()
    return figure


def inline_svg(figure: Figure, name: str) -> str:
    """Return a chart as SVG for a page, and close the figure."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return _inline(buffer.getvalue(), name)


def _inline(svg: str, name: str) -> str:
    """Return an SVG without XML header and links, with ids that are unique to the chart."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\b(id=")', rf"\1{name}-", body)
    body = re.sub(r'((?:xlink:)?href="#)', rf"\1{name}-", body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1),
        count=1,
    )
