// Search in the table of settings.
function makeSettings() {
  const search = byId("setting");
  if (search === null) return;
  search.addEventListener("input", () => {
    const query = search.value.toLowerCase();
    for (const row of document.querySelectorAll("tr.setting")) {
      row.hidden = !row.textContent.toLowerCase().includes(query);
    }
  });
}
