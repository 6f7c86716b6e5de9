// Functions that all scripts of the page use. Text from the run becomes text nodes, never markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Colours come from the style sheet, because they depend on the theme.
let colours = {};
function colour(name) {
  if (!(name in colours)) {
    const style = getComputedStyle(document.documentElement);
    colours[name] = style.getPropertyValue("--" + name).trim() || style.getPropertyValue("--accent").trim();
  }
  return colours[name];
}
const onTheme = [];
function retheme() {
  colours = {};
  for (const redraw of onTheme) redraw();
}

function number(value, percent = false) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (percent) return (100 * value).toFixed(1) + " %";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

function seconds(value) {
  const size = Math.abs(value);
  if (size < 1) return (1000 * value).toPrecision(3) + " ms";
  if (size < 120) return Number(value.toPrecision(3)) + " s";
  if (size < 7200) return (value / 60).toFixed(1) + " min";
  return (value / 3600).toFixed(2) + " h";
}

const storage = {
  get(name) { try { return localStorage.getItem("rlinf-" + name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem("rlinf-" + name, value); } catch { /* not allowed in private windows */ } },
};

const dark = matchMedia("(prefers-color-scheme: dark)");
function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  retheme();
}
byId("theme").addEventListener("click", () => {
  const current = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  const next = current === "dark" ? "light" : "dark";
  storage.set("theme", next);
  showTheme(next);
});
dark.addEventListener("change", () => showTheme(null));
