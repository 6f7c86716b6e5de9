// Prompts, responses and scores of the iterations whose trajectories are on disk.
function makeTranscripts() {
  const { prompts, columns, total, iterations, unreadable } = data.transcripts;
  const damaged = unreadable.length ? `; files of iterations ${unreadable.join(", ")} cannot be read` : "";
  const count = columns.text.length, page = 20;
  if (!count) {
    byId("transcripts").replaceChildren(el("h2", {}, "Transcripts"), el("p", { class: "hint" }, "None: the task has no texts, or no trajectories are on disk" + damaged + "."));
    return;
  }
  const choose = (select, all, values) => {
    byId(select).append(el("option", { value: "" }, all));
    for (const value of values) byId(select).append(el("option", { value: String(value) }, String(value)));
  };
  choose("which", "all on disk", iterations);
  choose("ended", "any", [...new Set(columns.stop)].sort());
  for (const option of byId("ended").options) if (option.value === "length") option.textContent = "length (cut off)";
  let haystacks = null;
  const orders = {
    sampled: () => 0,
    worst: (a, b) => (columns.score[a] ?? Infinity) - (columns.score[b] ?? Infinity),
    best: (a, b) => (columns.score[b] ?? -Infinity) - (columns.score[a] ?? -Infinity),
    longest: (a, b) => columns.length[b] - columns.length[a],
  };
  let rows = [], shown = 0;

  function marked(text, wanted) {
    const out = el("div", { class: "text" });
    const low = wanted ? text.toLowerCase() : "";
    let at = 0;
    // If lower case changes the length, positions differ, so nothing is marked.
    while (wanted && low.length === text.length) {
      const next = low.indexOf(wanted, at);
      if (next < 0) break;
      out.append(text.slice(at, next), el("mark", {}, text.slice(next, next + wanted.length)));
      at = next + wanted.length;
    }
    out.append(text.slice(at));
    return out;
  }

  function more() {
    const wanted = byId("search").value.toLowerCase();
    for (const i of rows.slice(shown, shown + page)) {
      const score = columns.score[i], cut = columns.stop[i] === "length";
      byId("samples").append(el("article", { class: "sample" },
        el("div", { class: "head" },
          el("span", {}, "iteration " + columns.iteration[i]), el("span", {}, "sample " + columns.sample[i]),
          el("span", {}, "score ", el("b", { class: score > 0.5 ? "right" : "wrong" }, number(score))),
          el("span", {}, `${number(columns.length[i])} ${data.step_unit}`),
          el("span", { class: cut ? "wrong" : "" }, cut ? "cut off at the length limit" : "stop reason: " + columns.stop[i])),
        el("div", {}, el("small", {}, "prompt"), marked(prompts[columns.prompt[i]], wanted)),
        el("div", {}, el("small", {}, "response"), marked(columns.text[i], wanted)),
        el("div", {}, el("small", {}, "reference"), marked(columns.answer[i], wanted))));
    }
    shown = Math.min(rows.length, shown + page);
    byId("more").hidden = shown >= rows.length;
    byId("more").textContent = `${Math.min(page, rows.length - shown)} more`;
  }

  function select() {
    const wanted = byId("search").value.toLowerCase(), which = byId("which").value, ended = byId("ended").value;
    if (wanted && !haystacks) {
      haystacks = columns.text.map((text, i) => (prompts[columns.prompt[i]] + "\n" + text + "\n" + columns.answer[i]).toLowerCase());
    }
    rows = [];
    for (let i = 0; i < count; i += 1) {
      if (which && String(columns.iteration[i]) !== which) continue;
      if (ended && columns.stop[i] !== ended) continue;
      if (wanted && !haystacks[i].includes(wanted)) continue;
      rows.push(i);
    }
    rows.sort(orders[byId("order").value]);
    shown = 0;
    byId("samples").replaceChildren();
    const part = count < total ? ` (chosen from ${number(total)} on disk: the worst, the best, some that were cut off, and an even sample of the rest)` : "";
    byId("found").textContent = `${number(rows.length)} of ${number(count)} transcripts${part}, from iterations ${iterations.join(", ")}. ` +
      "Trajectories of other iterations were removed by the retention policy (checkpoint.keep_trajectories) or do not fit on this page" + damaged + ".";
    more();
  }
  for (const id of ["which", "ended", "order"]) byId(id).addEventListener("change", select);
  let soon = 0;
  byId("search").addEventListener("input", () => { clearTimeout(soon); soon = setTimeout(select, 120); });
  byId("more").addEventListener("click", more);
  select();
}
