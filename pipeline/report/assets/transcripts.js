// Prompts, responses and scores of the iterations whose trajectories are on disk.
function makeTranscripts() {
  const { prompts, columns, total, iterations, unreadable } = data.transcripts;
  const damaged = unreadable.length ? `; files of iterations ${unreadable.join(", ")} cannot be read` : "";
  const count = columns.text.length, page = 20;
  if (!count) {
    byId("transcripts").replaceChildren(el("h2", {}, "Transcripts"), el("p", { class: "hint" }, "None: the task has no texts, or no trajectories are on disk" + damaged + "."));
    return;
  }
  const fillSelect = (select, all, values) => {
    byId(select).append(el("option", { value: "" }, all));
    for (const value of values) byId(select).append(el("option", { value: String(value) }, String(value)));
  };
  fillSelect("which", "all on disk", iterations);
  fillSelect("ended", "any", [...new Set(columns.stop)].sort());
  for (const option of byId("ended").options) if (option.value === "length") option.textContent = "length (cut off)";
  let haystacks = null;
  const orders = {
    sampled: () => 0,
    worst: (a, b) => (columns.score[a] ?? Infinity) - (columns.score[b] ?? Infinity),
    best: (a, b) => (columns.score[b] ?? -Infinity) - (columns.score[a] ?? -Infinity),
    longest: (a, b) => columns.length[b] - columns.length[a],
  };
  let rows = [], numShown = 0;

  function highlight(text, query) {
    const out = el("div", { class: "text" });
    const low = query ? text.toLowerCase() : "";
    let position = 0;
    // If lower case changes the length of the text, positions differ, so nothing is highlighted.
    while (query && low.length === text.length) {
      const next = low.indexOf(query, position);
      if (next < 0) break;
      out.append(text.slice(position, next), el("mark", {}, text.slice(next, next + query.length)));
      position = next + query.length;
    }
    out.append(text.slice(position));
    return out;
  }

  function more() {
    const query = byId("search").value.toLowerCase();
    for (const i of rows.slice(numShown, numShown + page)) {
      const score = columns.score[i], cut = columns.stop[i] === "length";
      byId("samples").append(el("article", { class: "sample" },
        el("div", { class: "head" },
          el("span", {}, "iteration " + columns.iteration[i]), el("span", {}, "sample " + columns.sample[i]),
          el("span", {}, "score ", el("b", { class: score > 0.5 ? "right" : "wrong" }, number(score))),
          el("span", {}, `${number(columns.length[i])} ${data.step_unit}`),
          el("span", { class: cut ? "wrong" : "" }, cut ? "cut off at the length limit" : "stop reason: " + columns.stop[i])),
        el("div", {}, el("small", {}, "prompt"), highlight(prompts[columns.prompt[i]], query)),
        el("div", {}, el("small", {}, "response"), highlight(columns.text[i], query)),
        el("div", {}, el("small", {}, "reference"), highlight(columns.answer[i], query))));
    }
    numShown = Math.min(rows.length, numShown + page);
    byId("more").hidden = numShown >= rows.length;
    byId("more").textContent = `${Math.min(page, rows.length - numShown)} more`;
  }

  function select() {
    const query = byId("search").value.toLowerCase(), iteration = byId("which").value, stopReason = byId("ended").value;
    if (query && !haystacks) {
      haystacks = columns.text.map((text, i) => (prompts[columns.prompt[i]] + "\n" + text + "\n" + columns.answer[i]).toLowerCase());
    }
    rows = [];
    for (let i = 0; i < count; i += 1) {
      if (iteration && String(columns.iteration[i]) !== iteration) continue;
      if (stopReason && columns.stop[i] !== stopReason) continue;
      if (query && !haystacks[i].includes(query)) continue;
      rows.push(i);
    }
    rows.sort(orders[byId("order").value]);
    numShown = 0;
    byId("samples").replaceChildren();
    const selectionNote = count < total ? ` (chosen from ${number(total)} on disk: the worst, the best, some that were cut off, and an even sample of the rest)` : "";
    byId("found").textContent = `${number(rows.length)} of ${number(count)} transcripts${selectionNote}, from iterations ${iterations.join(", ")}. ` +
      "Trajectories of other iterations were removed by the retention policy (checkpoint.keep_trajectories) or do not fit on this page" + damaged + ".";
    more();
  }
  for (const id of ["which", "ended", "order"]) byId(id).addEventListener("change", select);
  let timer = 0;
  byId("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(select, 120); });
  byId("more").addEventListener("click", more);
  select();
}
