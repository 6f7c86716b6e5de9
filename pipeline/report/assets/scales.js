// The range and the tick labels of an axis; nothing here needs a page.

// The least room around values, as a share of their size: what float64 and uPlot can tell apart.
const LEAST_SHARE = 1e-12;

// The range of a y axis for values between min and max. A constant lies in the middle.
function reach(min, max, zero) {
  if (!Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  if (zero) min = Math.min(0, min);
  const size = Math.max(Math.abs(min), Math.abs(max));
  if (max - min <= LEAST_SHARE * size) {
    const half = size * 0.1 || 1;
    return [zero ? Math.min(0, min) : min - half, max + half];
  }
  const room = 0.06 * (max - min);
  return [zero && min === 0 ? 0 : min - room, max + room];
}

// An x axis of one value has some room on both sides.
function span(min, max) {
  if (!Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  return min === max ? [min - 1, max + 1] : [min, max];
}

// Labels of ticks that all differ: with as many digits as the ticks need, and no more than float64
// has. Ticks that are one number all the same are labelled once.
function tickLabels(ticks, format) {
  for (let digits = 0; digits <= 17; digits += 1) {
    const labels = ticks.map((tick) => digits ? exact(tick, ticks, digits) : format(tick));
    if (new Set(labels).size === labels.length) return labels;
  }
  const seen = new Set();
  return ticks.map((tick) => {
    const label = exact(tick, ticks, 17);
    return seen.has(label) ? "" : (seen.add(label), label);
  });
}

// A tick with a number of significant digits, in the form that suits the largest of all.
function exact(tick, ticks, digits) {
  const size = Math.max(...ticks.map(Math.abs));
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return tick.toExponential(Math.min(digits, 16));
  return Number(tick.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 17, maximumSignificantDigits: digits });
}

// Whether values hold one between two gaps, or nothing but one: a line through it cannot be seen.
function hasLonely(values) {
  const there = (i) => i >= 0 && i < values.length && values[i] !== null && values[i] !== undefined;
  return values.some((_, i) => there(i) && !there(i - 1) && !there(i + 1));
}

if (typeof module !== "undefined") module.exports = { reach, span, tickLabels, hasLonely };
