"use strict";
// The data of a figure as a table, for screen readers and for copying. Comes before page.js in one script.
const numbersOf = (() => {
  const MOST = { rows: 128, columns: 24 };
  const TYPES = { f4: Float32Array, f8: Float64Array, i1: Int8Array, u1: Uint8Array, i2: Int16Array, u2: Uint16Array, i4: Int32Array, u4: Uint32Array };

  // Plotly's typed arrays as plain (nested) lists.
  function plain(values) {
    if (!values || values.bdata === undefined) return values ?? [];
    const bytes = Uint8Array.from(atob(values.bdata), (character) => character.charCodeAt(0));
    const flat = [...new TYPES[values.dtype](bytes.buffer)];
    if (values.shape === undefined) return flat;
    const columns = Number(values.shape.split(",")[1]);
    return Array.from({ length: flat.length / columns }, (_, row) => flat.slice(row * columns, (row + 1) * columns));
  }
  const shown = (value) => typeof value !== "number" ? (value ?? "–") : Number.isNaN(value) ? "–" : String(Number(value.toPrecision(5)));
  const text = (tag, content) => Object.assign(document.createElement(tag), { textContent: content });
  const bare = (label) => String(label).replace(/<[^>]*>/g, " ");

  function titled(axis, otherwise) {
    return axis?.title?.text ? bare(axis.title.text) : otherwise;
  }
  function ofMap(trace, z) {
    const names = (values, length) => values.length ? values : Array.from({ length }, (_, index) => index);
    const words = Array.isArray(trace.text) ? trace.text : null;
    const across = names(plain(trace.x), z[0]?.length ?? 0), down = names(plain(trace.y), z.length);
    return { heads: ["row", ...across.map(bare)], rows: z.map((row, index) => [bare(down[index]), ...(words?.[index].map(bare) ?? row)]) };
  }
  function ofPoints(trace, layout) {
    const [x, y, labels] = [plain(trace.x), plain(trace.y), plain(trace.text)];
    const axis = (name) => layout[(trace[`${name}axis`] ?? name).replace(/^[xy]/, "$&axis")];
    const named = Array.isArray(labels) && labels.length === y.length;
    const heads = [...(named ? ["point"] : []), titled(axis("x"), "x"), titled(axis("y"), "y")];
    return { heads, rows: Array.from(y, (value, index) => [...(named ? [bare(labels[index])] : []), x[index] ?? index, value]) };
  }
  function table({ heads, rows }, name) {
    const wide = heads.slice(0, MOST.columns);
    const element = document.createElement("table");
    element.createCaption().textContent = name;
    const top = element.createTHead().insertRow();
    for (const head of wide) top.append(Object.assign(text("th", head), { scope: "col" }));
    const body = element.createTBody();
    for (const row of rows.slice(0, MOST.rows)) {
      const line = body.insertRow();
      for (const value of row.slice(0, MOST.columns)) line.append(text("td", shown(value)));
    }
    const box = Object.assign(document.createElement("div"), { className: "table", tabIndex: 0 });
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", name);
    box.append(element);
    const cut = rows.length > MOST.rows || heads.length > MOST.columns;
    return cut ? [box, text("p", `The first ${Math.min(rows.length, MOST.rows)} of ${rows.length} rows and ${wide.length} of ${heads.length} columns.`)] : [box];
  }

  // One table per trace that has values; `title` names those that have no name of their own.
  return (data, layout, title) => data.flatMap((trace, index) => {
    const z = trace.z === undefined ? null : plain(trace.z);
    const content = z ? ofMap(trace, z) : ofPoints(trace, layout);
    const hasValues = content.rows.some((row) => row.slice(1).some((value) => value !== null && value !== undefined));
    if (!hasValues || trace.hoverinfo === "skip" || trace.visible === false) return [];
    return table(content, `${title}: ${trace.name ? bare(trace.name) : `trace ${index + 1}`}`);
  });
})();
