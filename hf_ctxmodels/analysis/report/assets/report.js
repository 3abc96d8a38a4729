"use strict";
// Makes a report interactive. Texts of the data become text nodes and attributes, never markup.
window.ctxReport = (() => {
  const create = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const createSvg = (figure, tag, attributes = {}, text = "") => {
    const node = document.createElementNS(figure.querySelector("svg").namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
    return node;
  };
  const select = (label, options, onChange) => {
    const node = create("select", {}, ...options.map(([value, text]) => create("option", { value }, text)));
    node.addEventListener("change", onChange);
    return [create("label", {}, label, node), node];
  };
  const format = (value, digits) =>
    value === null ? "–" : value.toLocaleString("en", {
      minimumFractionDigits: digits, maximumFractionDigits: digits, signDisplay: "negative", // no "-0.00"
    });
  const digitsOf = (values, digits) => values.every((value) => value === null || Number.isInteger(value)) ? 0 : digits;
  const dataOf = (figure) => JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  const addReadout = (figure, text) => {
    const readout = create("output", { class: "readout", dir: "auto", "aria-live": "polite" }, text);
    figure.querySelector(".scroll").after(readout);
    return readout;
  };
  const addControls = (figure, ...nodes) => {
    const controls = create("div", { class: "controls" }, ...nodes);
    figure.prepend(controls);
    return controls;
  };
  const tint = (node, fraction, color = "--accent") => {
    node.classList.add("tinted");
    node.style.setProperty("--tint", `color-mix(in srgb, var(${color}) ${Math.round(100 * fraction)}%, var(--card))`);
  };

  // Tables: a click on the name of a column sorts, a second one reverses.
  function sortable(table) {
    const columns = [...table.tHead.rows[0].cells];
    columns.forEach((header, column) => {
      if (!column) return;
      const button = create("button", { type: "button" }, ...header.childNodes);
      header.replaceChildren(button);
      button.addEventListener("click", () => {
        const descending = header.getAttribute("aria-sort") !== "descending";
        columns.forEach((other) => other.removeAttribute("aria-sort"));
        header.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const key = (row) => row.cells[column];
        const compare = (a, b) => {
          const values = [a, b].map((row) => key(row).dataset.value);
          if (values.every((value) => value !== undefined)) return values[0] - values[1];
          return key(a).textContent.localeCompare(key(b).textContent);
        };
        const isEmpty = (row) => key(row).dataset.value === undefined && !key(row).classList.contains("text");
        const rows = [...table.tBodies[0].rows];
        const present = rows.filter((row) => !isEmpty(row)).sort(compare);
        if (descending) present.reverse();
        table.tBodies[0].append(...present, ...rows.filter(isEmpty));
      });
    });
  }

  // Maps: the text of a point by pointer, or by the arrow keys in the order of the axes; a search and a group.
  function scatterMap(figure) {
    const svg = figure.querySelector("svg");
    const points = [...svg.querySelectorAll(".point")];
    if (!points.length) return;
    const region = figure.querySelector(".scroll");
    const readout = addReadout(figure, "Point at a mark, or focus the map and use the arrow keys.");
    const ring = createSvg(figure, "circle", { class: "ring", r: 8, visibility: "hidden" });
    svg.append(ring);
    let current = -1;
    const center = (point) => {
      const box = point.getBBox();
      return [box.x + box.width / 2, box.y + box.height / 2];
    };
    const show = (index) => {
      current = index;
      const [x, y] = center(points[index]);
      for (const [name, value] of [["cx", x], ["cy", y], ["visibility", "visible"]]) ring.setAttribute(name, value);
      readout.textContent = points[index].dataset.text;
    };
    const isShown = (point) => !point.classList.contains("dim");
    region.addEventListener("keydown", (event) => {
      const axis = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1] }[event.key];
      if (!axis) return;
      event.preventDefault();
      const order = points.map((point, index) => [center(point)[axis[0]], index]).filter(([, i]) => isShown(points[i]));
      order.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      if (!order.length) return;
      const position = order.findIndex(([, index]) => index === current);
      const next = position < 0 ? 0 : Math.min(Math.max(position + axis[1], 0), order.length - 1);
      show(order[next][1]);
      ring.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
    points.forEach((point, index) => {
      point.addEventListener("pointerenter", () => show(index));
      point.addEventListener("click", () => show(index));
    });
    const search = create("input", { type: "search", size: 18 });
    const count = create("span", { class: "muted", "aria-live": "polite" });
    const filter = () => {
      const words = search.value.toLowerCase();
      points.forEach((point) => point.classList.toggle("dim", !point.dataset.text.toLowerCase().includes(words)));
      count.textContent = words ? `${points.filter(isShown).length} of ${points.length}` : `${points.length} points`;
    };
    search.addEventListener("input", filter);
    addControls(figure, create("label", {}, "Search", search), count);
    filter();
  }

  // Heat maps without numbers: the value of a cell by pointer or arrow keys.
  function compactHeatmap(figure) {
    const data = dataOf(figure);
    const area = figure.querySelector(".cells");
    const region = figure.querySelector(".scroll");
    const readout = addReadout(figure, "Point at a cell, or focus the map and use the arrow keys.");
    const ring = createSvg(figure, "rect", { class: "ring", visibility: "hidden" });
    figure.querySelector("svg").append(ring);
    let cell = [0, 0];
    const [left, top, width, height] = ["x", "y", "width", "height"].map((name) => Number(area.getAttribute(name)));
    const digits = digitsOf(data.values.flat(), Math.max(data.digits, 3));
    const size = [height / data.rows.length, width / data.columns.length];
    const show = (row, column) => {
      cell = [row, column].map((index, axis) => Math.min(Math.max(index, 0), data[axis ? "columns" : "rows"].length - 1));
      const box = { x: left + cell[1] * size[1], y: top + cell[0] * size[0], width: size[1], height: size[0], visibility: "visible" };
      for (const [name, value] of Object.entries(box)) ring.setAttribute(name, value);
      const value = data.values[cell[0]][cell[1]];
      readout.textContent = `${data.rows[cell[0]]}, ${data.columns[cell[1]]}: ${format(value, digits)}`;
    };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const fraction = [(event.clientY - box.top) / box.height, (event.clientX - box.left) / box.width];
      show(Math.floor(fraction[0] * data.rows.length), Math.floor(fraction[1] * data.columns.length));
    });
    region.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      show(cell[0] + step[0], cell[1] + step[1]);
      ring.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }

  // Attention: one head, or the mean of a layer's heads, as a matrix or as lines between two copies of the sentence.
  function attentionView(figure) {
    const { words, attention } = dataOf(figure);
    const layerOptions = attention.map((_, layer) => [layer, layer]);
    const [layerLabel, layers] = select("Layer", layerOptions, () => update(true));
    const [headLabel, heads] = select("Head", [], () => update(false));
    const [viewLabel, views] = select("View", [["matrix", "matrix"], ["lines", "lines"]], () => update(false));
    const overview = figure.querySelector(".scroll");
    const frame = createSvg(figure, "rect", { class: "frame", rx: 2 });
    figure.querySelector("svg").append(frame);
    const panel = create("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Selected head: ${figure.dataset.title}` });
    const readout = addReadout(figure, "");
    overview.before(panel);
    panel.after(readout);
    addControls(figure, layerLabel, headLabel, viewLabel);

    const weightsOf = () => {
      const matrices = attention[layers.value];
      if (heads.value !== "mean") return matrices[heads.value];
      return words.map((_, i) => words.map((_, j) => matrices.reduce((sum, m) => sum + m[i][j], 0) / matrices.length));
    };
    const describe = (i, weights) => {
      const order = words.map((_, j) => j).sort((a, b) => weights[i][b] - weights[i][a]).slice(0, 5);
      readout.textContent = `${words[i]} → ${order.map((j) => `${words[j]} ${weights[i][j].toFixed(2)}`).join(", ")}`;
    };
    const matrix = (weights) => {
      const head = create("tr", {}, create("td"), ...words.map((word) => create("th", { scope: "col" }, create("span", { dir: "auto" }, word))));
      const body = words.map((word, i) => {
        const row = create("tr", {}, create("th", { scope: "row", dir: "auto" }, word));
        weights[i].forEach((weight, j) => {
          const text = weight >= 0.995 ? "1" : weight >= 0.005 ? weight.toFixed(2).slice(1) : "";
          const cell = create("td", { title: `${word} → ${words[j]}: ${weight.toFixed(3)}` }, text);
          tint(cell, weight);
          row.append(cell);
        });
        row.addEventListener("pointerenter", () => describe(i, weights));
        return row;
      });
      return create("table", { class: "attention" }, create("thead", {}, head), create("tbody", {}, ...body));
    };
    const lines = (weights) => {
      const width = 440;
      const height = words.length * 22 + 8;
      const svg = createSvg(figure, "svg", { class: "lines", width, height, viewBox: `0 0 ${width} ${height}` });
      const paths = [];
      weights.forEach((row, i) => row.forEach((weight, j) => {
        if (weight < 0.02) return;
        const data = `M150 ${i * 22 + 15}C220 ${i * 22 + 15} 220 ${j * 22 + 15} 290 ${j * 22 + 15}`;
        const path = createSvg(figure, "path", { d: data, "stroke-width": 0.8 + 3 * weight, "stroke-opacity": weight });
        paths.push([i, path, weight]);
        svg.append(path);
      }));
      const focus = (i) => {
        paths.forEach(([row, path, weight]) => path.setAttribute("stroke-opacity", i === null || row === i ? weight : 0));
        if (i !== null) describe(i, weights);
      };
      words.forEach((word, i) => {
        const text = word.length > 20 ? `${word.slice(0, 19)}…` : word;
        const source = createSvg(figure, "text", { x: 142, y: i * 22 + 19, "text-anchor": "end", tabindex: 0 }, text);
        source.addEventListener("pointerenter", () => focus(i));
        source.addEventListener("pointerleave", () => focus(null));
        source.addEventListener("focus", () => focus(i));
        source.addEventListener("blur", () => focus(null));
        svg.append(source, createSvg(figure, "text", { x: 298, y: i * 22 + 19 }, text));
      });
      return svg;
    };
    const update = (isNewLayer) => {
      if (isNewLayer) {
        const previous = heads.value;
        const names = [...attention[layers.value].map((_, head) => [head, head]), ["mean", "mean of all"]];
        heads.replaceChildren(...names.map(([value, text]) => create("option", { value }, text)));
        if (names.some(([value]) => String(value) === previous)) heads.value = previous;
      }
      const weights = weightsOf();
      panel.replaceChildren(views.value === "matrix" ? matrix(weights) : lines(weights));
      readout.textContent = "Rows attend to columns. Point at a row, or focus a word of the lines.";
      const selected = figure.querySelector(`.head[data-layer="${layers.value}"][data-head="${heads.value}"] rect`);
      frame.setAttribute("visibility", selected ? "visible" : "hidden");
      for (const name of selected ? ["x", "y", "width", "height"] : []) frame.setAttribute(name, selected.getAttribute(name));
    };
    figure.querySelectorAll(".head").forEach((thumbnail) => thumbnail.addEventListener("click", () => {
      layers.value = thumbnail.dataset.layer;
      update(true);
      heads.value = thumbnail.dataset.head;
      update(false);
    }));
    update(true);
  }

  // Tokens: the text, colored by one of the columns; all numbers of a token by pointer or focus.
  function tokenComparison(figure) {
    const { tokens, columns, texts, digits } = dataOf(figure);
    const write = (name, index) => format(columns[name][index], digitsOf(columns[name], digits));
    const names = Object.keys(columns);
    if (!names.length) return;
    const [label, column] = select("Color by", names.map((name) => [name, name]), () => update());
    column.value = names[names.length - 1];
    const flow = create("div", { class: "tokens" });
    const readout = addReadout(figure, "Point at a token, or focus it, for all its numbers.");
    figure.querySelector(".scroll").before(flow, readout);
    addControls(figure, label);
    const show = (index) => {
      const numbers = names.map((name) => `${name}: ${write(name, index)}`).join(" · ");
      readout.textContent = `${tokens[index]}  ${numbers}${texts && texts[index] ? `\n${texts[index]}` : ""}`;
    };
    const nodes = tokens.map((token, index) => {
      const node = create("span", { class: "token", tabindex: 0 }, create("bdi", {}, token || "␣"), create("small"));
      node.addEventListener("pointerenter", () => show(index));
      node.addEventListener("focus", () => show(index));
      return node;
    });
    flow.append(...nodes);
    const update = () => {
      const values = columns[column.value];
      const present = values.filter((value) => value !== null);
      const [low, high] = [Math.min(...present), Math.max(...present)];
      const isSigned = low < 0 && high > 0;
      const largest = Math.max(-low, high) || 1;
      nodes.forEach((node, index) => {
        const value = values[index];
        node.lastChild.textContent = write(column.value, index);
        const fraction = value === null ? 0 : isSigned ? Math.abs(value) / largest : (value - low) / (high - low || 1);
        tint(node, 0.85 * fraction, isSigned && value < 0 ? "--second" : "--accent");
      });
    };
    update();
  }

  // Series: figures of successive layers, one at a time.
  function series(card) {
    const figures = [...card.querySelectorAll("figure.plot")];
    const slider = create("input", { type: "range", min: 0, max: figures.length - 1, value: 0 });
    const name = create("output", { class: "muted" });
    const update = () => {
      figures.forEach((figure, index) => { figure.hidden = index !== Number(slider.value); });
      name.textContent = figures[slider.value].dataset.title;
      slider.setAttribute("aria-valuetext", name.textContent);
    };
    slider.addEventListener("input", update);
    figures[0].before(create("div", { class: "controls" }, create("label", {}, "Figure", slider), name));
    update();
  }

  const types = { ScatterMap: scatterMap, AttentionView: attentionView, TokenComparison: tokenComparison };
  function enhance(figure) {
    const type = figure.dataset.type;
    if (types[type]) types[type](figure);
    else if (type === "Heatmap" && figure.querySelector(".cells")) compactHeatmap(figure);
  }

  const theme = document.getElementById("theme");
  if (theme) {
    const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
      (document.documentElement.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
    const relabel = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
    theme.hidden = false;
    theme.addEventListener("click", () => {
      document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
      relabel();
    });
    relabel();
    const contents = document.querySelector("nav details");
    if (contents && matchMedia("(max-width: 860px)").matches) contents.open = false;
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("figure.plot").forEach(enhance);
  document.querySelectorAll(".series").forEach(series);
  return { create, enhance };
})();
