// Timeline of every worker. Bars narrower than a pixel are summed: the height of a colour is its
// share of the pixel's time.
function makeGantt() {
  const chart = data.gantt, box = byId("gantt-box");
  if (!chart) {
    byId("gantt").hidden = true;
    return;
  }
  const unpack = (text, type) => new type(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const start = unpack(chart.start, Float64Array), length = unpack(chart.length, Float32Array);
  const iteration = unpack(chart.iteration, Uint32Array), kind = unpack(chart.kind, Uint8Array);
  const lanes = chart.lanes.length, kinds = 2 * chart.stages.length;
  const height = Math.max(10, Math.min(26, Math.floor(700 / lanes)));
  const top = 20, bottom = 22;
  let end = 0;
  for (let i = 0; i < start.length; i += 1) end = Math.max(end, start[i] + length[i]);
  const whole = [0, end || 1];
  // Maximum bar length of each lane: no visible bar begins earlier than that before the range.
  const maxLengths = chart.lanes.map((_, lane) => {
    let maxLength = 0;
    for (let i = chart.first[lane]; i < chart.first[lane + 1]; i += 1) maxLength = Math.max(maxLength, length[i]);
    return maxLength;
  });
  const windows = new Map(chart.windows.map(([i, from, to]) => [i, [from, to]]));
  let range = [...whole], labels = 0, frame = 0;

  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Gantt chart: lanes of workers over time" });
  const tip = el("div", { id: "gantt-tip", hidden: true }), pick = el("div", { id: "gantt-pick", hidden: true });
  box.append(canvas, pick, tip);
  const used = new Set(kind);
  for (let k = 0; k < kinds; k += 2) {
    if (used.has(k)) byId("gantt-legend").append(el("span", {}, el("i", { class: "dot", style: `background: var(--${chart.stages[k / 2]})` }), chart.stages[k / 2]));
  }
  if ([...used].some((k) => k % 2)) byId("gantt-legend").append(el("span", {}, "thin and pale: waiting, or moving data"));

  function firstBarFrom(lane, time) {
    let low = chart.first[lane], high = chart.first[lane + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  const width = () => canvas.clientWidth - labels;
  const toX = (time) => labels + ((time - range[0]) / (range[1] - range[0])) * width();
  const toTime = (x) => range[0] + ((x - labels) / width()) * (range[1] - range[0]);

  function draw() {
    frame = 0;
    const scale = devicePixelRatio || 1, totalWidth = canvas.clientWidth;
    const totalHeight = top + lanes * height + bottom;
    canvas.style.height = totalHeight + "px";
    if (canvas.width !== Math.round(totalWidth * scale) || canvas.height !== Math.round(totalHeight * scale)) {
      canvas.width = Math.round(totalWidth * scale);
      canvas.height = Math.round(totalHeight * scale);
    }
    const g = canvas.getContext("2d");
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, totalWidth, totalHeight);
    g.font = "11px system-ui, sans-serif";
    labels = Math.min(totalWidth * 0.35, 12 + Math.max(...chart.lanes.map((lane) => g.measureText(lane).width)));
    if (width() < 20) return;
    axes(g, totalHeight);
    const perPixel = (range[1] - range[0]) / width(), pixels = Math.ceil(width());
    const shares = new Float32Array(pixels * kinds);
    for (let lane = 0; lane < lanes; lane += 1) {
      const y = top + lane * height, high = height - 3;
      shares.fill(0);
      let hasNarrow = false;
      const wideBars = [];
      const to = firstBarFrom(lane, range[1]);
      for (let i = firstBarFrom(lane, range[0] - maxLengths[lane]); i < to; i += 1) {
        const last = start[i] + length[i];
        if (last < range[0]) continue;
        if (length[i] >= perPixel) { wideBars.push(i); continue; }
        hasNarrow = true;
        // A narrow bar may extend into the next pixel.
        const from = (start[i] - range[0]) / perPixel, pixel = Math.floor(from);
        const part = Math.min(pixel + 1 - from, length[i] / perPixel);
        if (pixel >= 0 && pixel < pixels) shares[pixel * kinds + kind[i]] += part;
        if (pixel + 1 >= 0 && pixel + 1 < pixels) shares[(pixel + 1) * kinds + kind[i]] += length[i] / perPixel - part;
      }
      if (hasNarrow) {
        for (let x = 0; x < pixels; x += 1) {
          let sum = 0;
          for (let k = 0; k < kinds; k += 2) sum += shares[x * kinds + k];
          if (!sum) continue;
          const fit = sum > 1 ? 1 / sum : 1;  // work items of one worker may overlap
          let base = y + high;
          for (let k = 0; k < kinds; k += 2) {
            const share = shares[x * kinds + k] * fit * high;
            if (!share) continue;
            g.fillStyle = colour(chart.stages[k / 2]);
            g.fillRect(labels + x, base - share, 1, share);
            base -= share;
          }
        }
      }
      for (const waits of [1, 0]) {
        for (const i of wideBars) {
          if (kind[i] % 2 !== waits) continue;
          const left = Math.max(labels, toX(start[i])), right = Math.min(totalWidth, toX(start[i] + length[i]));
          if (right <= left) continue;
          g.fillStyle = colour(chart.stages[kind[i] >> 1]);
          g.globalAlpha = waits ? 0.4 : 1;
          const gap = right - left > 4 ? 0.6 : 0;
          if (waits) g.fillRect(left, y + high * 0.62, right - left - gap, high * 0.3);
          else g.fillRect(left, y, right - left - gap, high);
        }
      }
      g.globalAlpha = 1;
    }
  }

  function axes(g, totalHeight) {
    const soft = colour("soft"), grid = colour("line");
    g.fillStyle = soft;
    g.textBaseline = "middle";
    g.textAlign = "right";
    chart.lanes.forEach((lane, i) => g.fillText(lane, labels - 8, top + (i + 0.5) * height - 1, labels - 8));
    g.textAlign = "center";
    const span = range[1] - range[0];
    const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
    const step = steps.find((s) => (s / span) * width() >= 80) ?? steps[steps.length - 1];
    for (let t = Math.ceil(range[0] / step) * step; t <= range[1]; t += step) {
      const x = toX(t);
      g.fillStyle = grid;
      g.fillRect(x, top, 1, lanes * height);
      g.fillStyle = soft;
      g.fillText(clock(t, step), Math.min(x, canvas.clientWidth - 20), totalHeight - bottom / 2);
    }
    let free = labels;
    for (const [i, [from, to]] of windows) {
      if (to < range[0] || from > range[1]) continue;
      const x = Math.max(labels, toX(from)), middle = x + 16;
      if (middle - 16 < free) continue;
      g.fillText("#" + i, middle, top / 2);
      g.fillRect(x, 3, 1, top - 4);
      free = middle + 26;
    }
  }

  function clock(t, step) {
    if (step < 1) return t.toFixed(step < 0.01 ? 3 : 2) + " s";
    if (step < 60 && range[1] < 600) return Math.round(t) + " s";
    const h = Math.floor(t / 3600), m = Math.floor((t % 3600) / 60), s = Math.round(t % 60);
    const two = (n) => String(n).padStart(2, "0");
    return step < 60 ? `${h}:${two(m)}:${two(s)}` : `${h}:${two(m)} h`;
  }

  function show(from, to) {
    const span = Math.max(1e-3, Math.min(whole[1] - whole[0], to - from));
    const low = Math.max(whole[0], Math.min(from, whole[1] - span));
    range = [low, low + span];
    if (!frame) frame = requestAnimationFrame(draw);
    box.dataset.range = range.join(" ");
  }
  const scaleBy = (factor, center = (range[0] + range[1]) / 2) => show(center - (center - range[0]) * factor, center + (range[1] - center) * factor);
  const moveBy = (share) => { const by = share * (range[1] - range[0]); show(range[0] + by, range[1] + by); };
  function showIterations(from, to) {
    const shown = chart.windows.filter(([i]) => i >= from && i <= to);
    if (shown.length) show(Math.min(...shown.map((w) => w[1])), Math.max(...shown.map((w) => w[2])));
  }
  const actions = {
    in: () => scaleBy(0.5), out: () => scaleBy(2), left: () => moveBy(-0.5), right: () => moveBy(0.5),
    all: () => show(...whole),
    last: () => { const ids = [...windows.keys()]; showIterations(ids[Math.max(0, ids.length - 3)], Infinity); },
  };
  for (const button of document.querySelectorAll("[data-gantt]")) button.addEventListener("click", actions[button.dataset.gantt]);
  byId("go").addEventListener("change", (event) => { const i = Number(event.target.value); showIterations(i, i); });
  onZoom.push((picked) => (picked ? showIterations(...picked) : show(...whole)));

  function barAt(x, y) {
    const lane = Math.floor((y - top) / height);
    if (lane < 0 || lane >= lanes || x < labels) return -1;
    const time = toTime(x), near = 2 * (range[1] - range[0]) / width();
    let best = -1, distance = near;
    for (let i = Math.min(firstBarFrom(lane, time + near), chart.first[lane + 1] - 1); i >= chart.first[lane]; i -= 1) {
      if (start[i] + maxLengths[lane] < time - near) break;
      const toBar = Math.max(0, start[i] - time, time - start[i] - length[i]) + (kind[i] % 2 ? near / 4 : 0);
      if (toBar < distance) { best = i; distance = toBar; }
    }
    return best;
  }
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button || event.offsetX < labels) return;
    from = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from !== null) {
      const [a, b] = [from, Math.max(labels, event.offsetX)].sort((p, q) => p - q);
      pick.hidden = false;
      pick.style.left = a + "px";
      pick.style.width = b - a + "px";
    }
    const i = barAt(event.offsetX, event.offsetY);
    tip.hidden = i < 0;
    if (i < 0) return;
    const stage = chart.stages[kind[i] >> 1];
    tip.replaceChildren(el("b", {}, stage), iteration[i] ? ` of iteration ${iteration[i]}` : "", el("br"),
      (kind[i] % 2 ? "waiting for " : "computing for ") + seconds(length[i]), el("br"), "from " + seconds(start[i]));
    tip.style.left = Math.min(event.offsetX + 14, canvas.clientWidth - tip.offsetWidth) + "px";
    tip.style.top = event.offsetY + 16 + "px";
  });
  canvas.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(event.offsetX - from) > 4) {
      const [a, b] = [from, Math.max(labels, event.offsetX)].sort((p, q) => p - q);
      show(toTime(a), toTime(b));
    }
    from = null;
    pick.hidden = true;
  });
  canvas.addEventListener("pointercancel", () => { from = null; pick.hidden = true; });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", actions.all);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) scaleBy(event.deltaY > 0 ? 1.25 : 0.8, toTime(event.offsetX));
    else if (event.deltaX) moveBy(event.deltaX / width());
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const action = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", End: "last" }[event.key];
    if (action) { actions[action](); event.preventDefault(); }
  });
  new ResizeObserver(() => { if (!frame) frame = requestAnimationFrame(draw); }).observe(box);
  onTheme.push(() => { if (!frame) frame = requestAnimationFrame(draw); });
  show(...whole);
}
