// What the page does in the browser: draws the figures that Python sends as JSON, and tells of clicks in the map.
// `THEMES`, and the report's `numbersOf`, are put before this file by the server.
"use strict";
window.theodolite = (() => {
  const isDark = () => document.body.classList.contains("dark");
  const touch = matchMedia("(pointer: coarse)").matches;
  const swapped = new RegExp(Object.keys(THEMES.swaps).map((colour) => colour.replace(/[().]/g, "\\$&")).join("|"), "g");
  const figures = new Map();
  const shown = new Map();  // what is drawn in each, for its table

  // Cosines travel as hundredths, a byte a cell, row by row; -128 is a missing one.
  function unpacked(z) {
    const bytes = Int8Array.from(atob(z.bdata), (character) => character.charCodeAt(0));
    const [rows, columns] = z.shape.split(",").map(Number);
    return Array.from({ length: rows }, (_, row) =>
      Array.from(bytes.subarray(row * columns, (row + 1) * columns), (step) => (step === -128 ? null : step / z.steps)));
  }

  // On a phone a map keeps its width: the colour bar goes below.
  const TILED = 1150;
  function narrowed(data, layout) {
    for (const trace of data) {
      if (!trace.colorbar) continue;
      trace.colorbar = { ...trace.colorbar, orientation: "h", y: -0.25, yanchor: "top", title: { text: "" } };
    }
    for (const axis of [layout.xaxis, layout.yaxis]) axis.title = { text: "" };
    layout.margin = { ...layout.margin, l: 56, b: 92, r: 4 };
  }

  // As many tokens are written at an axis as can be read; sinks always are, and the room for them is made.
  const LINE = 11;
  function thinned(axis, room) {
    if (!axis?.tickvals || !axis.ticktext) return;
    const step = Math.ceil(axis.tickvals.length / Math.max(1, room / LINE));
    if (step === 1) return;
    const marked = axis.ticktext.map((text) => text.includes("▼"));
    const isShown = (i) => marked[i] || (i % step === 0 && !marked.some((sink, j) => sink && Math.abs(i - j) < step));
    const [tickvals, ticktext] = [axis.tickvals, axis.ticktext].map((all) => all.filter((_, i) => isShown(i)));
    Object.assign(axis, { tickvals, ticktext });
  }

  // A figure may have been drawn before its column had found its width.
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) if (figures.has(target) && target._fullLayout) fit(target);
  });
  function fit(plot) {
    const { width, height } = plot._fullLayout;
    if (Math.abs(width - plot.clientWidth) > 1 || Math.abs(height - plot.clientHeight) > 1) draw(plot);
  }

  function draw(plot) {
    const text = figures.get(plot);
    if (!text || !window.Plotly || !plot.isConnected) return;
    const source = JSON.parse(isDark() ? text.replace(swapped, (colour) => THEMES.swaps[colour]) : text);
    for (const trace of source.data) if (trace.z && trace.z.steps) trace.z = unpacked(trace.z);
    const layout = { ...source.layout, template: isDark() ? THEMES.dark : THEMES.light };
    // The panels of a tiled figure stay square where there is less room than it was made for.
    const room = plot.classList.contains("tiled") ? Math.min(1, plot.clientWidth / TILED) : 1;
    if (!plot.classList.contains("square")) plot.style.height = `${Math.round(layout.height * room)}px`;
    layout.width = plot.clientWidth;
    layout.height = plot.clientHeight;
    if (touch) layout.dragmode = false;
    if (plot.classList.contains("square")) {
      if (plot.clientWidth < 460) narrowed(source.data, layout);
      const room = layout.width - layout.margin.l - layout.margin.r - (plot.clientWidth < 460 ? 0 : 60);
      for (const axis of [layout.xaxis, layout.yaxis]) thinned(axis, room);
    } else if (room < 1) {
      const axes = Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name));
      for (const [, axis] of axes) thinned(axis, (layout.width / 3 - 40) / (axis.showticklabels ? 1 : Infinity));
    }
    plot.setAttribute("aria-label", layout.meta);
    window.Plotly.react(plot, source.data, layout, {
      displaylogo: false, displayModeBar: touch ? false : "hover",
      // Nothing leaves this page, so there is no button that sends a figure away.
      modeBarButtonsToRemove: ["sendChartToCloud", "select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    });
    for (const button of plot.querySelectorAll(".modebar-btn")) button.setAttribute("aria-label", button.dataset.title ?? "");
    shown.set(plot, source);
    const numbers = plot.parentElement.querySelector(".numbers");
    if (numbers?.open) listNumbers(numbers, plot);
    resized.observe(plot);
    plot.dataset.drawn = String(Number(plot.dataset.drawn ?? 0) + 1);
    if ("picks" in plot.dataset && !plot.dataset.listens) {
      plot.dataset.listens = "yes";
      plot.on("plotly_click", ({ points: [point] }) => plot.pick(`L${point.y}H${point.x}`));
    }
  }

  function listNumbers(numbers, plot) {
    const { data, layout } = shown.get(plot) ?? { data: [], layout: {} };
    numbers.replaceChildren(numbers.firstElementChild, ...numbersOf(data, layout, layout.meta ?? ""));
  }

  function whenReady(test, then) {
    if (test()) then();
    else setTimeout(() => whenReady(test, then), 40);
  }

  function figure(element, props, watch, trigger) {
    const show = () => {
      const plot = element.querySelector(".plot");
      const numbers = element.querySelector(".numbers");
      numbers.ontoggle = () => { if (numbers.open) listNumbers(numbers, plot); };
      plot.pick = (head) => trigger("select", { head });
      if (props.value) {
        figures.set(plot, props.value);
        whenReady(() => window.Plotly, () => draw(plot));
      } else if (figures.delete(plot)) {  // there is nothing to show
        window.Plotly.purge(plot);
        delete plot.dataset.listens;
        plot.style.height = "";
      }
    };
    watch("value", show);
    show();
  }

  function words(element, props, watch) {
    const show = () => { element.querySelector(".words").innerHTML = props.value ?? ""; };
    watch("value", show);
    show();
  }

  // The address keeps what is shown, so that it can be copied and opened again.
  function link(element, props, watch) {
    const keep = () => {
      if (!props.value) return;
      const address = new URL(location);
      for (const [name, value] of new URLSearchParams(props.value)) address.searchParams.set(name, value);
      history.replaceState(history.state, "", address);
    };
    const status = element.querySelector(".copied");
    element.querySelector(".copy-link").onclick = async () => {
      try {
        await navigator.clipboard.writeText(location.href);
        status.textContent = "Copied.";
      } catch {
        status.textContent = "The browser refused: copy the address above.";
      }
    };
    watch("value", keep);
    keep();
  }

  whenReady(() => document.body, () => {
    let dark = isDark();
    new MutationObserver(() => {
      if (dark === isDark()) return;
      dark = isDark();
      figures.forEach((_, plot) => draw(plot));
    }).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  });
  return { figure, words, link };
})();
