"""Make a picture of a run's report in a browser: its top, or one section such as the timeline.

python -m docs.images.report RUN PICTURE [SECTION]

``report.png`` in the README is the top of the report of ``rlinf run experiment=arithmetic_grpo
iterations=24 evaluate.every=4 rollout.batch_size=32 rollout.horizon=8``, and ``gantt.png`` is the
section ``gantt`` (the last three iterations) of a shorter run.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from pipeline.report import write_report
from tests.browser import browser

WIDTH, HEIGHT = 1400, 1085
"""Size of the picture of the top, pixels. A section has the same width."""


def main(run: Path, picture: Path, section: str = "") -> None:
    """Write the report of a run and photograph its top, or the section with this id."""
    page = write_report(run.resolve())
    with browser(WIDTH, HEIGHT) as opened:
        opened.size(WIDTH, HEIGHT)
        opened.prefer("light")
        opened.open(page)
        opened.run("document.documentElement.style.scrollbarWidth = 'none'")
        opened.wait(
            "return [...document.querySelectorAll('#group-0 .draw')].every((draw) => "
            "draw.plot.u && draw.plot.u.width === draw.clientWidth)"
        )
        if section:
            # Nothing else is left on the page, so that the window can have the section's size.
            height = opened.run(
                "const e = document.getElementById(arguments[0]);"
                "document.body.replaceChildren(e);"
                "window.dispatchEvent(new Event('resize'));"
                "return e.getBoundingClientRect().bottom",
                section,
            )
            opened.size(WIDTH, math.ceil(height))
            if section == "gantt":
                opened.run("document.querySelector('[data-gantt=last]').click()")
        opened.picture(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
