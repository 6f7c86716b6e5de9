showTheme(storage.get("theme"));
makePlots();
makeGantt();
makeTranscripts();
makeSettings();
// After two frames everything in view is drawn.
requestAnimationFrame(() => requestAnimationFrame(() => {
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}));
