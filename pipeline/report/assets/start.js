showTheme(storage.get("theme"));
makePlots();
makeGantt();
makeTranscripts();
makeSettings();
// Two frames on, what is in view has been drawn.
requestAnimationFrame(() => requestAnimationFrame(() => {
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}));
