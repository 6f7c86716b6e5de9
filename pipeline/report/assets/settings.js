// The table of settings shows what is searched for.
function makeSettings() {
  const search = byId("setting");
  if (search === null) return;
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase();
    for (const row of document.querySelectorAll("tr.setting")) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
}
