"""The report in a real browser: it opens, draws everything, and answers to the mouse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.report import stretch_run
from pipeline.report import write_report
from tests.browser import Browser, browser, missing
from tests.pipeline.test_report import HOSTILE, make_hostile

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        bool(missing()) and "RLINF_REQUIRE_BROWSER" not in os.environ, reason=missing()
    ),
]
ITERATIONS, WORKERS = 500, 8
SCORE = "#plot-learning .u-over"
LOSS = "#plot-train-loss .u-over"


@pytest.fixture(scope="module")
def long_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stretch_run(
        tiny_run, tmp_path_factory.mktemp("long") / "long", ITERATIONS, workers=WORKERS
    )


@pytest.fixture(scope="module")
def page(long_run: Path) -> Path:
    return write_report(long_run)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(window: Browser, page: Path) -> Browser:
    window.size(1300, 900)
    window.open(page)
    assert window.errors() == []
    return window


def test_every_metric_is_drawn_and_nothing_is_fetched(opened: Browser, long_run: Path) -> None:
    with (long_run / "metrics.jsonl").open() as stream:
        names = set(json.loads(stream.readline())) - {"iteration"}
    opened.run("document.getElementById('constant').open = true")
    # Not all at once: each is drawn when it comes into view.
    for number in range(int(opened.run("return document.querySelectorAll('.draw').length"))):
        opened.run("document.querySelectorAll('.draw')[arguments[0]].scrollIntoView()", number)
        opened.wait("return document.querySelectorAll('.draw')[arguments[0]].plot.u", number)
    blank = opened.run(
        """return [...document.querySelectorAll('.draw')].filter((draw) => {
          const canvas = draw.querySelector('canvas');
          const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const colours = new Set(new Uint32Array(pixels.data.buffer));
          return colours.size < 5 || draw.plot.u.series.length < 2;
        }).map((draw) => draw.plot.spec.name)"""
    )
    assert blank == []
    assert names <= set(
        opened.run("return [...document.querySelectorAll('.draw')].map((d) => d.plot.spec.name)")
    )
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.errors() == []


def test_a_drag_zooms_all_charts_and_a_double_click_shows_all_again(opened: Browser) -> None:
    opened.place("#plot-train-loss", 0.5)
    opened.wait("return document.querySelector(arguments[0])", LOSS)
    whole = shown(opened, LOSS)
    opened.drag(LOSS, 0.25, 0.5)
    low, high = shown(opened, LOSS)
    assert (low, high) == pytest.approx((125, 250), abs=8)
    assert shown(opened, SCORE) == [low, high]
    assert opened.run("return document.getElementById('from').value") == str(int(low) + 1)
    start, end = gantt_range(opened)
    opened.double_click(LOSS)
    assert shown(opened, LOSS) == pytest.approx([0, ITERATIONS])
    assert whole[1] == pytest.approx(ITERATIONS, abs=1)
    # The Gantt chart has followed.
    assert gantt_range(opened)[1] - gantt_range(opened)[0] > 3 * (end - start)


def test_hovering_tells_the_values_of_all_charts_there(opened: Browser) -> None:
    opened.place("#plot-train-loss", 0.5)
    opened.wait("return document.querySelector(arguments[0])", LOSS)
    opened.hover(LOSS, 0.5)
    values = "return document.querySelector(arguments[0] + ' .value').textContent"
    opened.wait(
        values + ".includes('iteration 250') || " + values[7:] + ".includes('iteration 251')",
        "#plot-train-loss",
    )
    assert "iteration 25" in opened.run(values, "#plot-train-entropy")


def test_the_line_of_constant_metrics_opens_and_a_search_opens_it_too(opened: Browser) -> None:
    hidden = "return !document.querySelector('#constant .plot').checkVisibility()"
    first = "return document.querySelector('#constant .plot code').textContent"
    name = opened.run(first)
    assert name in opened.run("return document.querySelector('#constant summary').textContent")
    assert opened.run(hidden)
    opened.run("document.querySelector('#constant summary').click()")
    assert not opened.run(hidden)
    opened.place("#constant .draw", 0.5)
    opened.wait("return document.querySelector('#constant .draw').plot.u")
    opened.run("document.querySelector('#constant summary').click()")
    opened.run(
        "const f = document.getElementById('filter'); f.value = arguments[0];"
        "f.dispatchEvent(new Event('input'))",
        name,
    )
    assert not opened.run(hidden)
    shown = opened.run(
        "return [...document.querySelectorAll('.plot')].filter((e) => e.checkVisibility())"
        ".map((e) => e.querySelector('code').textContent)"
    )
    assert shown == [name]


def test_every_iteration_has_its_bar_of_stage_times(opened: Browser) -> None:
    """The middle of each bar has the colour of a stage, the first and the last included."""
    opened.place("#plot-stage-times .draw", 0.5)
    opened.wait("return document.querySelector('#plot-stage-times .draw').plot.u")
    seen = opened.run(
        """const u = document.querySelector('#plot-stage-times .draw').plot.u;
        const { left, top, width, height } = u.bbox;
        const context = u.ctx.canvas.getContext('2d');
        const row = context.getImageData(left, top + height - 3, width, 1).data;
        return [1, 2, 250, 499, 500].map((x) => {
          const at = Math.round(u.valToPos(x, 'x', true) - left);
          const pixel = 4 * Math.min(Math.max(at, 1), width - 2);
          return [...row.slice(pixel, pixel + 4)];
        })"""
    )
    assert all(pixel[3] == 255 for pixel in seen), seen


def test_smoothing_changes_the_line_and_not_the_values(opened: Browser) -> None:
    opened.place("#plot-train-loss", 0.5)
    opened.wait("return document.querySelector(arguments[0])", LOSS)
    data = "return document.querySelector('#plot-train-loss .draw').plot.u.data[arguments[0]]"
    slide = (
        "const s = document.getElementById('smoothing'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))"
    )
    raw = opened.run(data, 1)
    opened.run(slide, 0)
    assert opened.run(data, 2) == raw
    opened.run(slide, 0.9)
    smooth = opened.run(data, 2)
    assert opened.run(data, 1) == raw
    assert smooth[0] == pytest.approx(raw[0])
    weights = [0.9**k for k in range(4)]
    expected = sum(w * y for w, y in zip(weights, raw[3::-1], strict=True)) / sum(weights)
    assert smooth[3] == pytest.approx(expected)


def test_the_gantt_chart_zooms_and_names_its_bars(opened: Browser) -> None:
    canvas = "#gantt-box canvas"
    whole = gantt_range(opened)
    opened.place(canvas, 0.5)
    drawn = (
        "const c = document.querySelector('#gantt-box canvas');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(new Uint32Array(d.buffer)).size"
    )
    assert opened.run(drawn) > 6
    opened.drag(canvas, 0.5, 0.6)
    part = gantt_range(opened)
    assert whole[0] < part[0] < part[1] < whole[1]
    assert (part[1] - part[0]) / (whole[1] - whole[0]) == pytest.approx(0.11, abs=0.03)
    opened.run(
        "const g = document.getElementById('go'); g.value = 321;"
        "g.dispatchEvent(new Event('change'))"
    )
    opened.wait("return document.querySelector('#gantt-box canvas').width > 0")
    for share in (0.15, 0.2, 0.25, 0.3):
        opened.hover(canvas, share)
        if opened.run("return !document.getElementById('gantt-tip').hidden"):
            break
    text = opened.run("return document.getElementById('gantt-tip').textContent")
    assert "of iteration 321" in text
    assert "computing for" in text
    opened.run("document.querySelector('[data-gantt=all]').click()")
    assert gantt_range(opened) == pytest.approx(whole)


def test_a_frame_of_the_gantt_chart_is_quick(opened: Browser) -> None:
    """A hang, not a speed, is what this finds: 20,000 bars take a few milliseconds."""
    opened.place("#gantt-box canvas", 0.5)
    opened.run(
        """window.frames = 0; const start = performance.now();
        const step = () => {
          document.querySelector(`[data-gantt=${window.frames % 2 ? 'out' : 'in'}]`).click();
          window.frames += 1;
          if (window.frames < 20) requestAnimationFrame(step);
          else window.took = performance.now() - start;
        }; step();"""
    )
    opened.wait("return window.took !== undefined")
    assert opened.run("return window.took") < 10_000


def test_light_and_dark(opened: Browser) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    line = "return document.querySelector('#plot-learning .draw').plot.u.series[1].stroke()"
    opened.prefer("light")
    light, pale = opened.run(ground), opened.run(line)
    opened.prefer("dark")
    assert opened.run(ground) != light
    opened.wait(line + " !== arguments[0]", pale)
    opened.run("document.getElementById('theme').click()")
    assert opened.run(ground) == light
    assert opened.run(line) == pale
    opened.run("document.getElementById('theme').click()")
    assert opened.run(ground) != light
    opened.run("localStorage.clear()")
    opened.prefer("light")


def test_a_narrow_window_does_not_scroll_sideways(opened: Browser) -> None:
    opened.size(390, 800)
    opened.wait("return innerWidth === 390")
    opened.run("document.querySelector('#gantt').scrollIntoView()")
    over = (
        "return [...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, pre, "
        "svg, .uplot') && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML"
        ".slice(0, 80))"
    )
    assert opened.run(over) == []
    # Charts that were drawn wide follow their boxes, which have shrunk, in a frame of their own.
    opened.wait("return document.documentElement.scrollWidth <= 390")


def test_transcripts_are_found(opened: Browser) -> None:
    rows = "return document.querySelectorAll('.sample').length"
    choose = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event(arguments[2]))"
    )
    content = "return JSON.parse(document.getElementById('data').textContent).transcripts.columns"
    known = opened.run(content)
    assert opened.run(rows) == min(20, len(known["text"]))
    opened.run(choose, "ended", "length", "change")
    count = int(opened.run("return parseInt(document.getElementById('found').textContent)"))
    assert count == known["stop"].count("length")
    opened.run(choose, "order", "longest", "change")
    opened.run(choose, "ended", "", "change")
    first = opened.run("return document.querySelector('.sample .head').textContent")
    assert f"{max(known['length'])} tokens" in first
    opened.run(choose, "which", "1", "change")
    count = int(opened.run("return parseInt(document.getElementById('found').textContent)"))
    assert count == known["iteration"].count(1)
    wanted = known["answer"][0]
    opened.run(choose, "search", wanted, "input")
    opened.wait("return document.querySelector('mark')")
    assert opened.run("return document.querySelector('mark').textContent") == wanted
    opened.run(choose, "search", "no such text", "input")
    opened.wait("return document.querySelectorAll('.sample').length === 0")


def test_markup_in_a_run_is_text_in_the_page(
    window: Browser, tiny_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "hostile"
    shutil.copytree(tiny_run, run)
    make_hostile(run)
    window.open(write_report(run))
    opened = window
    assert opened.run("return window.broken === undefined")
    assert opened.run("return document.images.length") == 0
    texts = opened.run(
        "return [...document.querySelectorAll('.sample .text')].map((e) => e.innerText)"
    )
    assert HOSTILE in texts
    titles = opened.run(
        "return [...document.querySelectorAll('.plot code')].map((e) => e.innerText)"
    )
    assert f"train/{HOSTILE}" in titles
    assert opened.errors() == []


def shown(opened: Browser, selector: str) -> list[float]:
    """The iterations that a chart shows."""
    found = opened.run(
        "const u = document.querySelector(arguments[0]).closest('.draw').plot.u;"
        "return [u.scales.x.min, u.scales.x.max]",
        selector,
    )
    return [float(value) for value in found]


def gantt_range(opened: Browser) -> list[float]:
    """The seconds that the Gantt chart shows."""
    text = opened.run("return document.getElementById('gantt-box').dataset.range")
    return [float(value) for value in text.split()]
