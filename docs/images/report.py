"""Make ``report.png``: the top of a run's report in a browser.

python -m docs.images.report RUN [FILE]

The picture in the README is of ``rlinf run experiment=arithmetic_grpo iterations=24
evaluate.every=4 rollout.batch_size=32 rollout.horizon=8``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.report import write_report
from tests.browser import browser

SIZE = (1400, 1085)
"""Width and height of the picture, pixels."""


def main(run: Path, picture: Path) -> None:
    """Write the report of a run and photograph its top."""
    page = write_report(run.resolve())
    with browser(*SIZE) as opened:
        opened.size(*SIZE)
        opened.prefer("light")
        opened.open(page)
        opened.run("document.documentElement.style.scrollbarWidth = 'none'")
        opened.wait(
            "return [...document.querySelectorAll('#group-0 .draw')].every((draw) => "
            "draw.plot.u && draw.plot.u.width === draw.clientWidth)"
        )
        opened.picture(picture)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if sys.argv[2:] else Path(__file__).with_name("report.png"),
    )
