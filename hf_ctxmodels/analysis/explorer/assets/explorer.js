"use strict";
// The explorer: asks the server for JSON. Texts become text nodes; figures are HTML that the server has escaped.
(() => {
  const byId = (id) => document.getElementById(id);
  const { create, enhance } = window.ctxReport;
  let models = [];
  let text = "";
  let run = 0; // number of the last submitted sentence
  let query = location.search; // of the address, which names the sentence for a reload and the back button
  const layers = new Map(); // model -> selected layer
  const requests = new WeakMap(); // node -> its last request: answers to earlier ones are dropped

  async function ask(action, values = {}) {
    let response;
    try {
      response = await fetch(`/api/${action}`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values),
      });
    } catch {
      throw new Error("The server does not answer. Start `hf-ctxmodels analyze explore` again.");
    }
    const answer = await response.json().catch(() => ({ error: `The server failed (${response.status}).` }));
    if (!response.ok) throw new Error([answer.error, answer.hint && `Fix: ${answer.hint}`].filter(Boolean).join(" "));
    return answer;
  }

  // Fills a node with the content that an answer gives, or with its error.
  async function fill(node, action, values, makeContent) {
    requests.set(node, values);
    node.classList.add("busy");
    node.setAttribute("aria-busy", "true");
    let content;
    try {
      content = makeContent(await ask(action, values));
    } catch (error) {
      content = [create("p", { class: "error", role: "alert" }, error.message)];
    }
    if (requests.get(node) !== values) return;
    node.classList.remove("busy");
    node.removeAttribute("aria-busy");
    node.replaceChildren(...content);
    node.querySelectorAll("figure.plot").forEach(enhance);
  }

  const figureNodes = (answer) => {
    const holder = create("div");
    holder.innerHTML = answer.figure;
    return [...holder.children];
  };

  const side = (model, ...children) => create("div", { class: "card" }, create("h3", {}, create("bdi", {}, model.name)), ...children);

  function predictionNodes(answer) {
    return answer.predictions.flatMap((blank, index) => {
      const title = answer.task === "causal" ? "Next token" : `Blank ${index + 1} of ${answer.predictions.length}`;
      const items = blank.map(({ token, probability }) => {
        const bar = create("span", { class: "bar", "aria-hidden": "true" });
        bar.style.width = `${100 * probability}%`;
        const value = create("span", { class: "value" }, `${(100 * probability).toFixed(1)}%`);
        return create("li", {}, bar, create("bdi", {}, /^[\p{C}\s]*$/u.test(token) ? JSON.stringify(token) : token), value);
      });
      return [create("p", { class: "muted" }, title), create("ol", { class: "bars" }, ...items)];
    });
  }

  function neighborNodes(answer) {
    const items = answer.neighbors.map(({ context, cosine }) =>
      create("li", {}, create("span", { class: "value" }, cosine.toFixed(3)), create("bdi", {}, context)));
    return [create("p", { class: "muted" }, "Nearest words of the corpus, by cosine"), create("ol", { class: "neighbors" }, ...items)];
  }

  function showContexts(words) {
    const section = byId("contexts");
    const fieldset = section.querySelector("fieldset");
    const sides = section.querySelector(".sides");
    const panels = models.map((model) => {
      const neighbors = create("div"), senses = create("div");
      const layer = create("select", {}, ...model.layers.map((number) => create("option", { value: number }, number)));
      layer.value = layers.get(model.name) ?? model.layers[model.layers.length - 1];
      const update = () => {
        layers.set(model.name, layer.value);
        const word = fieldset.querySelector("input:checked");
        if (!word) return;
        const values = { model: model.name, text, word: Number(word.value), layer: Number(layer.value) };
        fill(neighbors, "neighbors", values, neighborNodes);
        fill(senses, "senses", values, figureNodes);
      };
      layer.addEventListener("change", update);
      const controls = create("div", { class: "controls" }, create("label", {}, "Layer", layer));
      return { node: side(model, controls, neighbors, senses), update };
    });
    const choices = words.map((word, index) => {
      const radio = create("input", { type: "radio", name: "word", value: index });
      radio.addEventListener("change", () => panels.forEach(({ update }) => update()));
      return create("label", {}, radio, create("bdi", {}, word));
    });
    fieldset.replaceChildren(fieldset.querySelector("legend"), ...choices);
    sides.replaceChildren(...panels.map(({ node }) => node));
    section.hidden = false;
  }

  const showError = (error) => byId("status").replaceChildren(create("span", { class: "error", role: "alert" }, error.message));
  const hideResults = () => byId("results").querySelectorAll("section").forEach((section) => { section.hidden = true; });

  async function show() {
    text = byId("text").value;
    run += 1;
    const number = run;
    byId("status").textContent = "Computing …";
    let words;
    try {
      await (opened = opened.catch(openModels)); // asks again after an error
      words = (await ask("words", { text })).words;
    } catch (error) {
      if (number !== run) return;
      hideResults();
      showError(error);
      return;
    }
    if (number !== run) return;
    const answers = [];
    const perModel = (id, action, makeContent, select) => {
      const section = byId(id), shown = models.filter(select);
      const panels = shown.map(() => create("div"));
      section.querySelector(".sides").replaceChildren(...shown.map((model, index) => side(model, panels[index])));
      section.hidden = !shown.length;
      shown.forEach((model, index) => answers.push(fill(panels[index], action, { model: model.name, text }, makeContent)));
    };
    perModel("predictions", "predictions", predictionNodes, (model) => model.task !== null);
    const isLanguageModel = models.some((model) => model.is_language_model);
    byId("comparison").hidden = !isLanguageModel;
    if (isLanguageModel) answers.push(fill(byId("comparison").querySelector(".panel"), "comparison", { text }, figureNodes));
    perModel("attention", "attention", figureNodes, () => true);
    if (models.some((model) => model.corpus_words)) showContexts(words);
    await Promise.all(answers);
    if (number === run) byId("status").textContent = "Done.";
  }

  function showAddress() {
    query = location.search;
    const typed = new URLSearchParams(query).get("text");
    if (typed !== null) {
      byId("text").value = typed;
      show();
      return;
    }
    run += 1;
    byId("form").reset();
    byId("status").textContent = "";
    hideResults();
  }

  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const previous = query;
    query = `?${new URLSearchParams({ text: byId("text").value })}`;
    if (query !== previous) history.pushState(null, "", query);
    show();
  });
  addEventListener("popstate", () => {
    if (location.search !== query) showAddress(); // not for a link within the page
  });

  const openModels = () => ask("models").then((answer) => {
    models = answer.models;
    byId("models").replaceChildren(...models.map((model) =>
      create("span", { class: "model" }, create("bdi", {}, model.name), `: ${model.class}, ${model.is_language_model ? `${model.task ?? ""} language model`.trim() : "no masked or causal language model"}`)));
  });
  let opened = openModels();
  opened.catch(showError);
  if (query) showAddress();
})();
