// The range and the tick labels of an axis. This file does not use the page, so Node can test it.

// Values with a smaller spread, relative to their size, count as constant: float64 resolves few.
const MIN_RELATIVE_SPREAD = 1e-12;

// The range of a y axis for values between min and max. A constant is in the middle.
function yRange(min, max, zero) {
  if (!Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  if (zero) min = Math.min(0, min);
  const size = Math.max(Math.abs(min), Math.abs(max));
  if (max - min <= MIN_RELATIVE_SPREAD * size) {
    const margin = size * 0.1 || 1;
    return [zero ? Math.min(0, min) : min - margin, max + margin];
  }
  const room = 0.06 * (max - min);
  return [zero && min === 0 ? 0 : min - room, max + room];
}

// The range of an x axis. A single value gets some room on both sides.
function xRange(min, max) {
  if (!Number.isFinite(min) || !Number.isFinite(max)) return [0, 1];
  return min === max ? [min - 1, max + 1] : [min, max];
}

// Distinct labels of ticks, with as few digits as possible and at most those of float64. Only the
// first of equal ticks has a label.
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

// A tick with a number of significant digits, in the notation that suits the largest tick.
function exact(tick, ticks, digits) {
  const size = Math.max(...ticks.map(Math.abs));
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return tick.toExponential(Math.min(digits, 16));
  return Number(tick.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 17, maximumSignificantDigits: digits });
}

// The pixels of a y axis with these labels, in a font of 11 pixels.
function axisWidth(labels) {
  return Math.max(58, 12 + 6.5 * Math.max(0, ...(labels || []).map((label) => label.length)));
}

// Whether any value has gaps on both sides, so that a line does not show it.
function hasIsolated(values) {
  const exists = (i) => i >= 0 && i < values.length && values[i] !== null && values[i] !== undefined;
  return values.some((_, i) => exists(i) && !exists(i - 1) && !exists(i + 1));
}

if (typeof module !== "undefined") module.exports = { yRange, xRange, tickLabels, axisWidth, hasIsolated };
