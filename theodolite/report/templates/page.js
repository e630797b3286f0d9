"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const themes = read("themes");
  const cards = read("cards");
  const text = (tag, content) => Object.assign(document.createElement(tag), { textContent: content });
  const option = (value) => Object.assign(text("option", value), { value });
  const payloads = new Map();
  const drawn = new Set();

  // On a dark page some colours give way to brighter ones.
  const swapped = new RegExp(Object.keys(themes.swaps).map((colour) => colour.replace(/[().]/g, "\\$&")).join("|"), "g");
  function payload(key) {
    const name = `${key} ${dark.matches}`;
    if (!payloads.has(name)) {
      const text = document.getElementById("data-" + key).textContent;
      payloads.set(name, JSON.parse(dark.matches ? text.replace(swapped, (colour) => themes.swaps[colour]) : text));
    }
    return payloads.get(name);
  }

  function compacted(data, layout) {
    const bare = { showticklabels: false, ticks: "", title: { text: "" }, zeroline: false, automargin: false };
    layout.xaxis = { ...layout.xaxis, ...bare };
    layout.yaxis = { ...layout.yaxis, ...bare };
    layout.margin = { l: 4, r: 4, t: 4, b: 4 };
    layout.showlegend = false;
    for (const trace of data) {
      if (trace.type === "heatmap") trace.showscale = false;
      if (trace.marker && trace.marker.size > 4) trace.marker.size = 3.5;
      else if (trace.marker) trace.marker.size = 2;
    }
  }

  // Square maps on a phone keep their width: the colour bar goes below.
  function narrowed(data) {
    for (const trace of data) {
      if (!trace.colorbar) continue;
      trace.colorbar = { ...trace.colorbar, orientation: "h", y: -0.12, yanchor: "top", title: { ...trace.colorbar.title, side: "top" } };
    }
  }

  // What is drawn: the figure's own traces with what its picker puts in place.
  function chosen(div) {
    const { data, layout, variants } = payload(div.dataset.figure);
    const patches = variants[div.dataset.variant] ?? [];
    const traces = data.map((trace, i) => structuredClone({ ...trace, ...patches[i] }));
    return { data: traces, layout: structuredClone(layout) };
  }

  function draw(div) {
    drawn.add(div);
    if (!window.Plotly) {
      div.textContent = "This figure needs plotly.min.js in the folder of this page.";
      return;
    }
    const { data, layout } = chosen(div);
    layout.template = dark.matches ? themes.dark : themes.light;
    layout.autosize = true;
    delete layout.height;
    if (touch) layout.dragmode = false;
    if (div.classList.contains("compact")) compacted(data, layout);
    else if (div.clientWidth < 460 && layout.yaxis.scaleanchor) narrowed(data);
    const config = {
      responsive: true, displaylogo: false, displayModeBar: touch || div.classList.contains("compact") ? false : "hover",
      // Nothing leaves this page, so there is no button that sends a figure away.
      modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    };
    window.Plotly.react(div, data, layout, config);
    const room = div.parentElement;
    if (room.scrollWidth > room.clientWidth + 1 && getComputedStyle(room).overflowX === "auto") {
      room.tabIndex = 0;  // so that a keyboard can scroll it
      room.setAttribute("role", "group");
      room.setAttribute("aria-label", "figure, wider than the screen");
    }
    if ("selectsHead" in div.dataset && !div.dataset.listens) {
      div.dataset.listens = "yes";
      div.on("plotly_click", ({ points: [point] }) => selectHead(point.y, point.x));
    }
  }

  // Figures are drawn when they come near the window, one at a time, so that the page can be read and used meanwhile:
  // Plotly's script, which is long, is waited for by nothing else.
  const waiting = [];
  let loaded = Boolean(window.Plotly) || document.readyState === "complete";
  function drawNext() {
    const div = loaded && waiting.shift();
    if (!div) return;
    if (!drawn.has(div)) draw(div);
    setTimeout(drawNext);
  }
  if (!loaded) addEventListener("load", () => { loaded = true; drawNext(); });
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      if (waiting.push(target) === 1) setTimeout(drawNext);
    }
  }, { rootMargin: "500px 0px" });
  all(".plot").forEach((div) => near.observe(div));
  dark.addEventListener("change", () => drawn.forEach(draw));

  function show(div, variant) {
    div.dataset.variant = variant;
    if (drawn.has(div)) draw(div);
  }
  const large = (key) => document.querySelector(`.plot[data-figure="${key}"]:not(.compact)`);
  function pick(key, value) {
    const select = document.querySelector(`select[data-picks="${key}"]`);
    if (select) select.value = value;
    const note = document.querySelector(`[data-note-of="${key}"]`);
    if (note) note.textContent = select.selectedOptions[0].dataset.note;
    for (const button of all(`button[data-shows="${key}"]`)) {
      button.setAttribute("aria-pressed", String(button.dataset.key === value));
    }
    show(large(key), value);
  }
  for (const select of all("select[data-picks]")) {
    select.addEventListener("change", () => pick(select.dataset.picks, select.value));
    pick(select.dataset.picks, select.value);
  }
  for (const button of all("button[data-shows]")) {
    button.addEventListener("click", () => {
      pick(button.dataset.shows, button.dataset.key);
      if (button.closest(".cell")) large(button.dataset.shows).scrollIntoView({ behavior: "smooth", block: "nearest" });
    });
  }

  // One head: its figures and its numbers follow two pickers, the arrows, and clicks in the maps.
  const byLayer = document.getElementById("pick-layer");
  const byHead = document.getElementById("pick-head");
  const heads = Object.keys(cards.heads ?? {}).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const headFigures = () => all("#head .plot[data-figure]");
  function group([title, pairs]) {
    const list = document.createElement("dl");
    for (const [name, value] of pairs) {
      const row = list.appendChild(document.createElement("div"));
      row.append(text("dt", name), text("dd", value));
    }
    const box = document.createElement("div");
    box.append(text("h3", title), list);
    return box;
  }
  function fillCard(key) {
    const [own, values] = cards.heads[key];
    const measured = new Map();
    cards.measures.forEach(([title, name], place) => {
      if (!measured.has(title)) measured.set(title, []);
      measured.get(title).push([name, values[place]]);
    });
    document.getElementById("head-card").replaceChildren(...own.map(group));
    document.getElementById("head-measures").replaceChildren(...[...measured].map(group));
  }
  function selectHead(layer, head, quiet = false, named = true) {
    if (!byLayer || !heads.includes(`${layer},${head}`)) return;
    const name = `L${layer}H${head}`;
    all("tr[data-head]").forEach((row) => row.classList.toggle("chosen", row.dataset.head === name));
    byLayer.value = layer;
    byHead.value = head;
    headFigures().forEach((div) => show(div, `${layer},${head}`));
    document.getElementById("head-title").textContent = `One head: ${name}`;
    fillCard(`${layer},${head}`);
    if (!quiet) {
      document.getElementById("head").scrollIntoView({ behavior: "smooth" });
      document.getElementById("head-title").focus({ preventScroll: true });
    }
    try {
      if (named) history.replaceState(null, "", `#${name}`);
    } catch { /* Some browsers take so many addresses in half a minute, and no more. */ }
  }
  if (byLayer && heads.length) {
    const numbers = (part) => [...new Set(heads.map((key) => Number(key.split(",")[part])))].sort((a, b) => a - b);
    byLayer.replaceChildren(...numbers(0).map(option));
    byHead.replaceChildren(...numbers(1).map(option));
    const changed = () => selectHead(byLayer.value, byHead.value, true);
    byLayer.addEventListener("change", changed);
    byHead.addEventListener("change", changed);
    for (const button of all("[data-step]")) {
      button.addEventListener("click", () => {
        const at = heads.indexOf(`${byLayer.value},${byHead.value}`) + Number(button.dataset.step);
        selectHead(...heads[(at + heads.length) % heads.length].split(","), true);
      });
    }
    selectHead(...(headFigures()[0]?.dataset.variant ?? heads[0]).split(","), true, false);
  }

  // A token's hint, under the pointer or the keyboard.
  const hint = document.getElementById("hint");
  function showHint(event) {
    const token = event.target.closest?.("[data-hint]");
    hint.hidden = !token;
    if (!token) return;
    hint.textContent = token.dataset.hint;
    const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - hint.offsetWidth - 12);
    hint.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, box.top - hint.offsetHeight - 6)}px)`;
  }
  for (const type of ["mouseover", "focusin", "click"]) document.addEventListener(type, showHint);
  addEventListener("scroll", () => { hint.hidden = true; }, { passive: true });
  addEventListener("keydown", ({ key }) => { if (key === "Escape") hint.hidden = true; });

  // Every head, layer and token that is named links to what the page has about it; so does an address that was sent.
  // A head's own row would be the target, where no script shows its card.
  for (const row of all("tr[id^='L']")) {
    row.dataset.head = row.id;
    row.removeAttribute("id");
  }
  function follow() {
    const [, layer, head] = /^#L(\d+)H(\d+)$/.exec(location.hash) ?? [];
    if (head) return selectHead(layer, head);
    const target = document.getElementById(location.hash.slice(1));
    for (let one = target?.parentElement; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
    if (target?.tagName !== "TR") return;
    target.closest("table").dispatchEvent(new Event("all"));
    all("tr.chosen").forEach((row) => row.classList.remove("chosen"));
    target.classList.add("chosen");
    target.scrollIntoView({ block: "center", behavior: "instant" });
  }
  addEventListener("hashchange", follow);
  document.addEventListener("click", ({ target }) => {
    const link = target.closest("a[href^='#']");
    if (link && link.hash === location.hash) follow();
  });

  // Long tables show their first rows, and what is looked for; what is shown can be saved.
  const FIRST = 25;
  function words(cell, isHead) {
    return isHead ? [`block ${/^L(\d+)/.exec(cell.textContent)[1]}`] : cell.textContent.split(", ");
  }
  function saved(table, rows) {
    // Words of a text must not be a spreadsheet's formulas.
    const harmless = (value) => /^[=+@\t\r]|^-(?![\d.])/.test(value) ? `'${value}` : value;
    const quoted = (value) => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
    const isNumber = (text) => !/\p{L}/u.test(text);
    const headings = all("th", table.tHead).map((heading) => heading.textContent);
    const withError = headings.map((_, place) => [...table.tBodies[0].rows].some((row) => row.cells[place].dataset.e));
    const line = (of) => headings.flatMap((_, place) => withError[place] ? of(place) : [of(place)[0]]).map(harmless).map(quoted).join(",");
    const lines = rows.map(({ cells }) => line((place) => {
      const { dataset: { v, e }, textContent } = cells[place];
      return [v !== undefined && isNumber(textContent) ? v : textContent, e ?? ""];
    }));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[line((place) => [headings[place], `${headings[place]}, standard error`]), ...lines, ""].join("\n")], { type: "text/csv" }));
    link.download = `${table.parentElement.getAttribute("aria-label")}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  }
  function tools(table) {
    const name = table.parentElement.getAttribute("aria-label");
    const rows = () => [...table.tBodies[0].rows];
    const bar = Object.assign(document.createElement("div"), { className: "tools" });
    const count = text("span", "");
    count.setAttribute("role", "status");
    const save = Object.assign(text("button", "Save as CSV"), { type: "button" });
    const more = Object.assign(text("button", ""), { type: "button" });
    const search = Object.assign(document.createElement("input"), { type: "search", placeholder: "filter" });
    search.setAttribute("aria-label", `Filter ${name} by their words`);
    let whole = rows().length <= FIRST;
    const picks = [];
    const matches = (row) => row.textContent.toLowerCase().includes(search.value.toLowerCase())
      && picks.every(({ place, isHead, select }) => !select.value || words(row.cells[place], isHead).includes(select.value));
    const found = () => rows().filter(matches);
    function update() {
      const kept = found();
      rows().forEach((row) => { row.hidden = true; });
      kept.forEach((row, place) => { row.hidden = !whole && place >= FIRST; });
      const few = !whole && kept.length > FIRST;
      count.textContent = few ? `${FIRST} of ${kept.length} rows` : `${kept.length} rows`;
      more.hidden = !few;
      more.textContent = `Show all ${kept.length}`;
    }
    if (!whole) {
      for (const heading of all("th[data-pick]", table.tHead)) {
        const place = heading.cellIndex, isHead = heading.textContent === "head";
        const select = document.createElement("select");
        select.setAttribute("aria-label", `Only rows of one ${isHead ? "block" : heading.textContent}`);
        const values = new Set(rows().flatMap((row) => words(row.cells[place], isHead)));
        select.append(Object.assign(option(`every ${isHead ? "block" : heading.textContent}`), { value: "" }), ...[...values].map(option));
        select.addEventListener("change", update);
        picks.push({ place, isHead, select });
      }
      bar.append(search, ...picks.map(({ select }) => select), count, more);
    }
    bar.append(save);
    table.parentElement.before(bar);
    search.addEventListener("input", update);
    more.addEventListener("click", () => { whole = true; update(); table.parentElement.focus(); });
    table.addEventListener("all", () => { whole = true; search.value = ""; picks.forEach(({ select }) => { select.value = ""; }); update(); });
    table.addEventListener("sorted", update);
    save.addEventListener("click", () => saved(table, found()));
    update();
  }

  // Tables sort by their headings' buttons: descending first, then ascending.
  for (const table of all("table[data-sortable]")) {
    tools(table);
    for (const heading of all("th", table.tHead)) {
      const button = Object.assign(text("button", heading.textContent), { type: "button", title: heading.title });
      heading.removeAttribute("title");
      heading.replaceChildren(button);
    }
    table.tHead.addEventListener("click", ({ target }) => {
      const heading = target.closest("th");
      if (!heading || !target.closest("button")) return;
      const column = heading.cellIndex;
      const sign = heading.getAttribute("aria-sort") === "descending" ? 1 : -1;
      all("th", table.tHead).forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.v ?? null;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null && y === null) return -sign * a.cells[column].textContent.localeCompare(b.cells[column].textContent);
        if (x === null || y === null) return x === null ? 1 : -1;
        return sign * (Number(x) - Number(y));
      });
      table.tBodies[0].replaceChildren(...rows);
      table.dispatchEvent(new Event("sorted"));
    });
  }
  follow();
});
