// Charts of uPlot. They are built when they come into view; zoom and smoothing apply to all of them.
const plots = [];
const view = { range: null, smoothing: 0.6 };
const onZoom = [];

// Bias-corrected exponential moving average; missing values are skipped.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function columns(spec) {
  const x = data.xs[spec.x];
  if (spec.stack) {
    const sums = new Array(x.length).fill(0);
    const layers = spec.series.map((s) => s.y.map((value, i) => (sums[i] += value ?? 0)));
    return [x, ...layers.reverse()];
  }
  const out = [x];
  for (const series of spec.series) {
    out.push(series.y);
    if (series.kind === "metric") out.push(smooth(series.y, view.smoothing));
  }
  return out;
}

function quantile(values, share) {
  const sorted = Float64Array.from(values).sort();
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}

// One slow iteration must not make all others look flat.
function stackTop(u, min, max) {
  const from = u.scales.x.min ?? -Infinity, to = u.scales.x.max ?? Infinity;
  const visible = u.data[1].filter((_, i) => u.data[0][i] >= from && u.data[0][i] <= to);
  return [0, Math.min(max, 1.5 * quantile(visible, 0.98)) || 1];
}

// Indices of points between two gaps, which a line does not show.
function isolatedIndices(u, series) {
  const y = u.data[series];
  return [...y.keys()].filter((i) => (y[i] ?? null) !== null && (y[i - 1] ?? null) === null && (y[i + 1] ?? null) === null);
}

function seriesOptions(spec) {
  const out = [{}];
  const series = spec.stack ? [...spec.series].reverse() : spec.series;
  for (const { colour: name, kind, y } of series) {
    const stroke = () => colour(name);
    const faint = () => colour(name) + "55";
    const points = hasIsolated(y) ? { show: true, size: 5, fill: stroke, filter: isolatedIndices } : { show: false };
    if (spec.stack) out.push({ stroke, fill: stroke, width: 0.5, points: { show: false } });
    else if (kind === "points") out.push({ stroke, width: 1.6, spanGaps: true, points: { show: true, size: 5, fill: stroke } });
    else if (kind === "bars") out.push({ stroke, fill: faint, width: 1.4, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } });
    else if (kind === "metric") {
      out.push({ stroke: faint, width: 1, points: { show: false } });
      out.push({ stroke, width: 1.8, points });
    } else out.push({ stroke, width: 1.4, points });
  }
  return out;
}

// Show the value of every series at an index, or the last values.
function showValues(plot, index) {
  const { spec, value } = plot;
  const x = data.xs[spec.x];
  value.replaceChildren();
  let i = index;
  if (i === null || i === undefined) {
    i = x.length - 1;
    while (i > 0 && spec.series.every((s) => s.y[i] === null)) i -= 1;
  }
  if (i < 0) return;
  const unit = { learning: "iteration", rows: "iteration", stages: "iteration", versions: "version", sft: "step", sft_losses: "step" }[spec.x];
  if (unit) value.append(unit + " " + number(x[i]) + "  ");
  else value.append("from " + number(x[i]) + "  ");
  for (const series of spec.series) {
    const y = series.y[i];
    if (y === null && spec.series.length > 1) continue;
    if (spec.series.length > 1) value.append(el("i", { class: "dot", style: `background: ${colour(series.colour)}; margin: 0 4px 0 8px` }));
    value.append(el("b", {}, number(y, spec.percent) + (spec.unit && y !== null ? " " + spec.unit : "")));
  }
}

// Iterations are whole numbers: ticks between them have no label.
function xLabels(ticks, whole) {
  const visible = ticks.filter((tick) => !whole || Number.isInteger(tick));
  const labels = new Map(tickLabels(visible, number).map((label, i) => [visible[i], label]));
  return ticks.map((tick) => labels.get(tick) ?? "");
}

function build(plot) {
  if (plot.u) return;
  const { spec, draw } = plot;
  const axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width: Math.max(50, draw.clientWidth),
    height: draw.clientHeight,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    scales: {
      x: { time: false, range: (u, min, max) => xRange(min, max) },
      y: spec.stack ? { range: stackTop } : { range: (u, min, max) => yRange(min, max, spec.zero) },
    },
    axes: [
      { ...axis, size: 24, gap: 3, values: (u, ticks) => xLabels(ticks, spec.linked !== false) },
      { ...axis, size: (u, labels) => axisWidth(labels), gap: 4, space: 26, values: (u, ticks) => tickLabels(ticks, number) },
    ],
    series: seriesOptions(spec),
    cursor: {
      drag: { x: true, y: false, setScale: spec.linked === false },
      sync: spec.linked ? { key: "iterations", scales: ["x", null] } : undefined,
      points: { size: 6 },
      bind: spec.linked ? { dblclick: () => () => zoom(null) } : {},
    },
    hooks: {
      setCursor: [(u) => showValues(plot, u.cursor.left >= 0 ? u.cursor.idx : null)],
      setSelect: spec.linked ? [(u) => {
        if (u.select.width > 3) zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
        u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }] : [],
    },
  };
  if (spec.stack) options.series.forEach((series, i) => { if (i) series.paths = uPlot.paths.bars({ size: [1, Infinity] }); });
  plot.u = new uPlot(options, columns(spec), draw);
  draw.querySelector("canvas").setAttribute("aria-hidden", "true");
  if (spec.linked && view.range) plot.u.setScale("x", { min: view.range[0], max: view.range[1] });
}

function fullRange() {
  const ends = plots.filter((p) => p.spec.linked).map((p) => data.xs[p.spec.x]).filter((x) => x.length);
  return [Math.min(...ends.map((x) => x[0])), Math.max(...ends.map((x) => x[x.length - 1]))];
}

// Show some iterations in all charts; null: all of them.
function zoom(range) {
  if (range && !(range[1] - range[0] > 0)) return;
  view.range = range;
  const [low, high] = range ?? fullRange();
  for (const { u, spec } of plots) {
    if (u && spec.linked) u.setScale("x", { min: low, max: high === low ? low + 1 : high });
  }
  byId("from").value = Math.ceil(low);
  byId("to").value = Math.floor(high);
  for (const follow of onZoom) follow(range);
}

function makePlots() {
  const host = byId("plots");
  const visibilityObserver = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) build(entry.target.plot);
  }, { rootMargin: "200px" });
  const sizeObserver = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const { u } = target.plot;
      if (u && target.clientWidth && target.clientWidth !== u.width) u.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  function fill(grid, specs) {
    for (const spec of specs) {
      const value = el("span", { class: "value" });
      const draw = el("div", { class: "draw", role: "img", "aria-label": spec.title });
      const box = el("div", { class: "plot" + (spec.wide ? " wide" : spec.half ? " half" : ""), id: "plot-" + spec.id },
        el("header", {}, el("h3", { title: spec.title }, spec.title), spec.name.includes("/") ? el("code", {}, spec.name) : "", value));
      if (spec.series.length > 1) {
        const legend = el("div", { class: "legend" });
        for (const s of spec.series) {
          legend.append(el("span", {}, el("i", { class: "dot", style: `background: var(--${s.colour})` }), s.label));
        }
        box.append(legend);
      }
      box.append(draw);
      grid.append(box);
      const plot = { spec, draw, value, box, u: null };
      draw.plot = plot;
      plots.push(plot);
      showValues(plot, null);
      visibilityObserver.observe(draw);
      sizeObserver.observe(draw);
    }
  }
  data.groups.forEach((group, position) => {
    const grid = el("div", { class: "plots" });
    host.append(el("section", { id: "group-" + position }, el("h2", {}, group.title), grid));
    fill(grid, group.plots);
  });
  const constant = byId("constant");
  if (constant !== null) fill(constant.querySelector(".plots"), data.constant);
  if (plots.some((p) => p.spec.linked)) {
    const [low, high] = fullRange();
    for (const id of ["from", "to"]) {
      Object.assign(byId(id), { min: low, max: high, value: id === "from" ? low : high });
      byId(id).addEventListener("change", () => zoom([Number(byId("from").value), Number(byId("to").value)]));
    }
  }
  byId("whole").addEventListener("click", () => zoom(null));
  byId("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    byId("smoothed").value = view.smoothing.toFixed(2);
    for (const { u, spec } of plots) {
      if (u && spec.series.some((s) => s.kind === "metric")) {
        u.setData(columns(spec), false);
        u.redraw();
      }
    }
  });
  byId("filter").addEventListener("input", (event) => {
    const query = event.target.value.toLowerCase();
    for (const { box, spec } of plots) box.hidden = !(spec.name + " " + spec.title).toLowerCase().includes(query);
    for (const section of host.children) section.hidden = !section.querySelector(".plot:not([hidden])");
    if (constant !== null) {
      constant.hidden = !constant.querySelector(".plot:not([hidden])");
      constant.open = query !== "" && !constant.hidden;
    }
  });
  onTheme.push(() => {
    for (const plot of plots) {
      if (plot.u) plot.u.redraw(false, true);
      showValues(plot, null);
    }
  });
  addEventListener("beforeprint", () => plots.forEach(build));
}
