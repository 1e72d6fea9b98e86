"use strict";
// Draws the timeline from the JSON in #data. Texts become text nodes only: markup in them is never parsed.
(() => {
  const FILL_MARGIN = 1200;     // steps within this many pixels of the window are filled
  const CONTEXT_CHARS = 160;    // maximum characters of unchanged memory next to a change
  const MIN_FOLD_STEPS = 3;     // minimum number of consecutive steps that are not notable to become one line
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const steps = data.steps;
  const hasBranches = data.branches.length > 1;
  const laneByBranch = new Map(data.branches.map((branch, lane) => [branch, lane]));
  const stepsByLane = data.branches.map(() => []);   // lane -> indices of its steps, left to right
  placeSteps();
  const columns = Math.max(...steps.map((step) => step.column)) + 1;
  const folds = new Map(data.folds.map((fold) => [fold.from, fold]));   // first step -> consecutive steps that are not notable
  const indexByAnchor = new Map(steps.map((step, index) => [step.anchor, index]));
  const memories = rebuildMemories();
  const quotesByStep = new Map();   // step -> the quotes from its chunk, with their memory lines
  data.lines.forEach((line, index) => line.quotes.forEach((quote) => {
    if (!quotesByStep.has(quote.at)) quotesByStep.set(quote.at, []);
    quotesByStep.get(quote.at).push({ line: index, quote });
  }));
  const state = {
    filter: "all", branch: null, selected: -1, query: "", hits: [], hit: -1, hovered: -1,
    unfolded: new Set(), wholeSteps: new Set(), items: new Map(), passage: null, stepsWithQuery: [],
  };
  const highlight = typeof Highlight === "function" && CSS.highlights ? new Highlight() : null;
  if (highlight) CSS.highlights.set("found", highlight);

  // ---- helpers

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "class") node.className = value;
      else node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== ""));
    return node;
  }
  const formatNumber = (value) => value.toLocaleString("en");
  const formatCount = (count, one) => `${formatNumber(count)} ${count === 1 ? one : `${one}s`}`;
  const describeSpan = ([start, end]) => `characters ${formatNumber(start)}–${formatNumber(end)}`;
  const makeLink = (index, text = steps[index].name) => el("a", { href: `#${steps[index].anchor}` }, text);
  const capitalize = (name) => name[0].toUpperCase() + name.slice(1);
  function formatDuration(seconds) {
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const hasChanged = (step) => step.diff !== undefined;

  /** Set the lane and the column of every step on the strip: its branch's lane, to the right of its sources. */
  function placeSteps() {
    steps.forEach((step, index) => {
      step.index = index;
      step.joins = step.from.length > 0 && step.from.join() !== String(index - 1);
      step.lane = laneByBranch.get(step.branch);
      const lane = stepsByLane[step.lane], before = lane.length ? steps[lane[lane.length - 1]].column : -1;
      step.column = Math.max(before, ...step.from.map((each) => steps[each].column)) + 1;
      lane.push(index);
    });
  }
  /** Return the memory before a step: the joined memories of its source steps. */
  function joinSourceMemories(step, all) {
    return step.from.map((index) => all[index]).filter((memory) => memory).join("\n");
  }
  /** Return the memory after every step, computed from the differences. */
  function rebuildMemories() {
    const all = [];
    for (const step of steps) {
      let memory = joinSourceMemories(step, all);
      if (step.diff) {
        let at = 0, next = "";
        for (const part of step.diff) {
          if (typeof part === "string") next += part;
          else if (part < 0) at -= part;
          else { next += memory.slice(at, at + part); at += part; }
        }
        memory = next;
      }
      all.push(memory);
    }
    return all;
  }

  // ---- question, answer and facts

  function drawHead() {
    $("question").textContent = data.question;
    $("answer").textContent = data.answer === null ? "The run has not answered." : data.answer;
    document.querySelector(".answer").classList.toggle("none", data.answer === null);
    $("answer-notes").append(...(data.answerEvents || []).map(makeEventNode));
    if (data.rawAnswer) {
      $("answer-notes").append(el("details", {}, el("summary", {}, "The whole completion"), el("p", {}, data.rawAnswer)));
    }
    if (data.excerpt) drawExcerpt();
    for (const [name, value] of data.facts) {
      $("facts").append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    }
  }
  /** Draw the quotes of a run that showed an excerpt instead of chunks. Such a run may have no steps. */
  function drawExcerpt() {
    $("excerpt").append(el("h2", {}, "What supports the answer"),
      ...data.excerpt.map((quote) => makeQuotation(quote)),
      data.excerpt.length ? "" : el("p", { class: "hint" }, data.unquoted));
    $("excerpt").hidden = false;
    document.querySelector("main").hidden = $("bar").hidden = !steps.length;
  }
  function makeEventNode(event) {
    const rule = event.rule ? `, ${event.rule}` : "";
    return el("span", { class: "event" }, `${event.kind}${rule}${event.detail ? `: ${event.detail}` : ""}`);
  }

  // ---- final memory

  function drawMemory() {
    const quoted = data.lines.filter((line) => line.quotes.length).length;
    $("memory-hint").textContent = data.lines.length
      ? `${formatNumber(quoted)} of ${formatCount(data.lines.length, "line")} ${quoted === 1 ? "quotes" : "quote"} the document. Choose a line to see where it came from.`
      : "The memory is empty.";
    data.lines.forEach((line, index) => {
      const text = el("button", { type: "button", class: "line-text", onclick: () => followLine(index, 0) },
        ...line.parts.map(([part, supports]) => supports
          ? el("mark", { class: "supports", title: "The answer repeats this" }, part) : part));
      const meta = el("div", { class: "line-meta" },
        el("span", {}, line.edited ? el("span", { class: "edited" }, "edited by a person at ") : "from ", makeLink(line.at)));
      if (line.reworded.length) meta.append(makeRewordings(line.reworded));
      meta.append(el("span", {}, line.quotes.length
        ? `${Math.round(line.coverage * 100)}% of its words quoted` : "no verbatim quote"));
      const quotes = el("ul", { class: "quotes", role: "list" }, ...line.quotes.map((quote, which) => el("li", {},
        `“${shorten(quote.text, 220)}” `,
        el("a", { class: "where", href: `#${steps[quote.at].anchor}`, "data-line": index, "data-quote": which },
          quote.section || steps[quote.at].name))));
      $("lines").append(el("li", {
        class: "line", "data-line": index, onmouseenter: () => hoverLine(index), onmouseleave: () => hoverLine(-1),
      }, text, meta, line.quotes.length ? quotes : null));
    });
    if (data.lost.length) drawLost();
  }
  function makeRewordings(places) {
    const shown = places.slice(0, 4);
    const node = el("span", {}, "reworded at ");
    shown.forEach((place, index) => node.append(index ? ", " : "", makeLink(place, steps[place].name.replace(/^chunk /, "").replace(", branch", " on branch"))));
    if (places.length > shown.length) node.append(` and ${places.length - shown.length} more`);
    return node;
  }
  function drawLost() {
    const more = data.lostTotal - data.lost.length;
    $("lost").hidden = false;
    $("lost-title").textContent = `Lost on the way: ${formatCount(data.lostTotal, "line")}`;
    $("lost").addEventListener("toggle", () => {
      if ($("lost-lines").childElementCount) return;
      $("lost-lines").append(...data.lost.map((line) => el("li", {}, el("del", {}, line.text),
        el("span", { class: "where" }, "from ", makeLink(line.at), ", gone after ", makeLink(line.gone)))),
        more > 0 ? el("li", { class: "hint" }, `and ${formatNumber(more)} that were there for fewer chunks`) : "");
    });
  }
  function shorten(text, most) {
    const flat = text.replace(/\s+/g, " ");
    return flat.length <= most ? flat : `${flat.slice(0, most / 2)} … ${flat.slice(-most / 2)}`;
  }
  function hoverLine(line) {
    state.hovered = line;
    drawStrip();
  }
  function followLine(line, which) {
    const quote = data.lines[line].quotes[which];
    state.passage = quote ? { line, quote } : null;
    goTo(quote ? quote.at : data.lines[line].at, { push: true });
    markLine(line);
  }
  function markLine(line) {
    document.querySelectorAll(".line").forEach((node, index) => node.classList.toggle("current", index === line));
  }

  // ---- the list of chunks

  function isShown(step) {
    if (state.branch !== null && step.branch !== state.branch) return false;
    if (state.filter === "changed") return hasChanged(step);
    if (state.filter === "events") return step.events !== undefined;
    return true;
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) fillStep(Number(entry.target.dataset.index));
  }, { rootMargin: `${FILL_MARGIN}px 0px` });

  function drawSteps() {
    observer.disconnect();
    state.items.clear();
    const list = document.createDocumentFragment();
    for (let index = 0; index < steps.length; index++) {
      if (!isShown(steps[index])) continue;
      const fold = folds.get(index);
      if (state.filter === "all" && fold && fold.to - index >= MIN_FOLD_STEPS && !state.unfolded.has(index)) {
        list.append(makeFoldNode(fold));
        index = fold.to - 1;
      } else list.append(makeStepNode(index));
    }
    $("steps").replaceChildren(list);
    $("nothing").hidden = $("steps").childElementCount > 0;
    for (const node of state.items.values()) if (node.dataset.empty) observer.observe(node);
    markSelected();
  }
  function makeFoldNode({ from, to, label }) {
    return el("li", { class: "fold", "data-from": from, "data-to": to },
      el("button", { type: "button", "aria-expanded": "false", onclick: () => unfold(from, to) }, capitalize(label)));
  }
  function unfold(from, to) {
    state.unfolded.add(from);
    const old = $("steps").querySelector(`.fold[data-from="${from}"]`);
    if (!old) return;
    const nodes = [];
    for (let index = from; index < to; index++) nodes.push(makeStepNode(index));
    const focused = old.contains(document.activeElement);
    old.replaceWith(...nodes);
    if (focused) nodes[0].querySelector("a").focus({ preventScroll: true });
  }
  function makeStepNode(index) {
    const step = steps[index];
    const [chunk, prompt, completion] = step.tokens;
    const head = el("div", { class: "step-head" },
      el("h3", {}, makeLink(index, capitalize(step.name))),
      hasChanged(step)
        ? el("span", {}, step.words[0] ? el("span", { class: "plus" }, `+${formatNumber(step.words[0])} `) : null,
          step.words[1] ? el("span", { class: "minus" }, `−${formatNumber(step.words[1])} `) : null,
          step.words[0] || step.words[1] ? "words" : "only spacing or punctuation changed")
        : el("span", {}, step.state),
      step.section ? el("span", {}, step.section) : null);
    const sources = step.joins ? el("span", { class: "joined" }, "from ",
      ...step.from.flatMap((each, which) => which ? [", ", makeLink(each)] : [makeLink(each)])) : null;
    const meta = el("div", { class: "step-meta" }, step.span ? el("span", {}, describeSpan(step.span)) : null, sources,
      step.span ? el("span", {}, `${formatNumber(chunk)} tokens read`) : null,
      el("span", {}, `${formatNumber(prompt)} in, ${formatNumber(completion)} out`), el("span", {}, formatDuration(step.seconds)));
    if (!step.notable) head.append(meta.firstChild, meta.lastChild);
    const node = el("li", { class: step.notable ? "step" : "step dull", id: step.anchor, "data-index": index },
      head, step.notable ? meta : null);
    if (step.events) node.append(el("div", { class: "events" }, ...step.events.map(makeEventNode)));
    if (hasChanged(step) || quotesByStep.has(index)) {
      node.dataset.empty = "yes";
      if (hasChanged(step)) node.append(el("div", { class: "body pending" }));
    }
    state.items.set(index, node);
    return node;
  }
  /** Draw the memory and the quotes of a step, when it is near the window. */
  function fillStep(index) {
    const node = state.items.get(index);
    if (!node || !node.dataset.empty) return;
    delete node.dataset.empty;
    observer.unobserve(node);
    const body = node.querySelector(".body");
    if (body) drawBody(index, body);
    const quotes = quotesByStep.get(index);
    if (quotes) {
      node.append(el("div", { class: "sources" }, el("h4", {}, "Quoted in the final memory"), ...quotes.map(makePassage)));
    }
    highlightIn(node);
  }
  function makePassage({ line, quote }) {
    const node = makeQuotation(quote, { onmouseenter: () => { markLine(line); hoverLine(line); }, onmouseleave: () => hoverLine(-1) });
    quote.node = node;
    return node;
  }
  function makeQuotation(quote, attributes) {
    return el("blockquote", { class: "passage", ...attributes },
      el("span", { class: "where" }, `${describeSpan(quote.span)}${quote.section ? `, ${quote.section}` : ""} `, makeDocumentLink(quote)),
      quote.before ? `…${quote.before}` : "", el("mark", {}, quote.text), quote.after ? `${quote.after}…` : "");
  }
  /** Return a link to the passage on a server that shows the document, or to its page in the PDF file. */
  function makeDocumentLink(quote) {
    if (data.pdf && quote.page) return el("a", { href: `${data.pdf}#page=${quote.page}` }, "open the page");
    return data.documentLink ? el("a", { href: `${data.documentLink}/${quote.span.join("/")}` }, "in the document") : "";
  }
  function drawBody(index, body) {
    const step = steps[index];
    const before = joinSourceMemories(step, memories);
    const whole = state.wholeSteps.has(index);
    const hasQuery = (text) => state.query !== "" && text.toLowerCase().includes(state.query);
    const nodes = [];
    let at = 0, cut = false;
    step.diff.forEach((part, position) => {
      if (typeof part === "string") {
        const text = part.replace(/^\n+/, "");
        return nodes.push(part.slice(0, part.length - text.length), text ? el("ins", {}, text) : "");
      }
      const text = before.slice(at, at + Math.abs(part));
      at += Math.abs(part);
      if (part < 0) return nodes.push(el("del", {}, text));
      const head = position ? takeLineEnd(text) : "", tail = position < step.diff.length - 1 ? takeLineStart(text) : "";
      const left = text.slice(head.length, text.length - tail.length);
      if (whole || head.length + tail.length >= text.length || left.length < CONTEXT_CHARS || hasQuery(left)) {
        return nodes.push(el("span", { class: "kept" }, text));
      }
      cut = true;
      const lines = left.trim().split("\n").length;
      return nodes.push(el("span", { class: "kept" }, head.trimEnd(),
        el("span", { class: "elided" }, lines > 1 ? `⋯ ${lines} lines as before` : "⋯"), tail.trimStart()));
    });
    body.classList.remove("pending");
    body.replaceChildren(...nodes);
    if (cut || state.wholeSteps.has(index)) {
      body.append(" ", el("button", { type: "button", class: "more", onclick: () => {
        state.wholeSteps[cut ? "add" : "delete"](index);
        drawBody(index, body);
        highlightAll();
      } }, cut ? "Show the whole memory" : "Show only what changed"));
    }
    if (!memories[index]) body.append(el("span", { class: "kept" }, " (memory is empty now)"));
  }
  /** Return the rest of the line after a change, at most `CONTEXT_CHARS`. */
  function takeLineEnd(text) {
    const end = text.indexOf("\n");
    return end >= 0 && end <= CONTEXT_CHARS ? text.slice(0, end) : text.slice(0, Math.max(0, text.lastIndexOf(" ", CONTEXT_CHARS)));
  }
  function takeLineStart(text) {
    const start = text.lastIndexOf("\n") + 1;
    if (start && text.length - start <= CONTEXT_CHARS) return text.slice(start);
    const space = text.indexOf(" ", text.length - CONTEXT_CHARS);
    return space < 0 ? "" : text.slice(space + 1);
  }
  function setFilter(filter, branch = state.branch) {
    state.filter = filter;
    state.branch = branch;
    $("branch").value = branch === null ? "" : String(laneByBranch.get(branch));
    document.querySelectorAll("[data-filter]").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.filter === filter)));
    drawSteps();
    if (state.items.has(state.selected)) scrollTo(state.selected);
    else highlightAll();
  }

  // ---- navigation

  function goTo(index, { push = false } = {}) {
    if (!steps[index]) return false;
    if (!isShown(steps[index])) setFilter("all", null);
    const folded = [...$("steps").querySelectorAll(".fold")].find((node) => index >= node.dataset.from && index < node.dataset.to);
    if (folded) unfold(Number(folded.dataset.from), Number(folded.dataset.to));
    state.selected = index;
    try {
      history[push ? "pushState" : "replaceState"](null, "", `#${steps[index].anchor}`);
    } catch { /* some viewers give pages no history */ }
    scrollTo(index);
    return true;
  }
  function scrollTo(index) {
    // Nearby steps must have their heights before the window scrolls there.
    for (let near = index - 6; near <= index + 6; near++) fillStep(near);
    const node = state.items.get(index);
    markSelected();
    const quote = state.passage && state.passage.quote;
    document.querySelectorAll(".passage.current").forEach((each) => each.classList.remove("current"));
    node.scrollIntoView({ block: "start" });
    if (quote && quote.at === index && quote.node) {
      quote.node.classList.add("current");
      if (quote.node.getBoundingClientRect().bottom > window.innerHeight) quote.node.scrollIntoView({ block: "center" });
    }
    state.passage = null;
  }
  function markSelected() {
    document.querySelectorAll(".step.current").forEach((node) => {
      node.classList.remove("current");
      node.removeAttribute("aria-current");
    });
    const node = state.items.get(state.selected);
    if (node) {
      node.classList.add("current");
      node.setAttribute("aria-current", "true");
    }
    const strip = $("strip"), step = steps[Math.max(0, state.selected)];
    if (step) {
      strip.setAttribute("aria-valuenow", step.index);
      strip.setAttribute("aria-valuetext", describeStep(Math.max(0, state.selected)));
    }
    drawStrip();
  }
  /** Return the current step: the selected step while it is visible, else the step at the top of the window. */
  function findPosition() {
    const node = state.items.get(state.selected);
    const top = $("bar").getBoundingClientRect().bottom;
    if (node) {
      const box = node.getBoundingClientRect();
      if (box.bottom > top && box.top < window.innerHeight) return state.selected;
    }
    for (const [index, each] of state.items) {
      if (each.getBoundingClientRect().bottom > top + 8) return window.scrollY < 10 ? -1 : index - 1;
    }
    return steps.length;
  }
  function moveToNext(direction) {
    const isWanted = state.filter === "events" ? (step) => step.events !== undefined : hasChanged;
    for (let index = findPosition() + direction; index >= 0 && index < steps.length; index += direction) {
      if (isWanted(steps[index]) && (state.branch === null || isShown(steps[index]))) return goTo(index);
    }
    return false;
  }

  // ---- the strip

  const strip = $("strip");
  if (data.share < 1) strip.style.width = `${100 * data.share}%`;  // the rest of the document was not read
  const readColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let isPaintDue = false;
  function drawStrip() {
    if (isPaintDue) return;
    isPaintDue = true;
    requestAnimationFrame(() => { isPaintDue = false; paintStrip(); });
  }
  /** Return the heights of a lane: bars between top and bottom, events at `above`, sources of memory lines at `below`. */
  function computeBand(lane, height) {
    const tall = height / data.branches.length, top = lane * tall + 1, bottom = (lane + 1) * tall - 1;
    return { top, bottom, above: top + 3, below: bottom - 2 };
  }
  function paintStrip() {
    const width = strip.clientWidth, height = strip.clientHeight, scale = window.devicePixelRatio || 1;
    strip.width = Math.round(width * scale);
    strip.height = Math.round(height * scale);
    const pen = strip.getContext("2d");
    pen.scale(scale, scale);
    const each = width / Math.max(1, columns);
    const at = (step) => step.column * each;
    const center = (step) => at(step) + each / 2;
    const bands = data.branches.map((_, lane) => computeBand(lane, height));
    const findBand = (step) => bands[step.lane];
    pen.fillStyle = readColor("--sunken");
    steps.forEach((step) => pen.fillRect(at(step), findBand(step).top, each, findBand(step).bottom - findBand(step).top));
    pen.fillStyle = readColor("--change-mark");
    // The scale ignores the largest changes, such as the first memory, which would flatten the others.
    const densities = steps.filter(hasChanged).map((step) => step.density).sort((a, b) => a - b);
    const full = Math.max(0.05, densities[Math.floor(densities.length * 0.98)] || 0);
    const bar = Math.max(1, each > 4 ? each - 1 : each);
    steps.forEach((step) => {
      if (!hasChanged(step)) return;
      const { top, bottom } = findBand(step);
      const tall = Math.max(3, Math.sqrt(Math.min(1, step.density / full)) * (bottom - top));
      pen.fillRect(at(step), bottom - tall, bar, tall);
    });
    if (hasBranches) paintJoins(pen, center, findBand, each);
    pen.fillStyle = readColor("--found-mark");
    for (const index of state.stepsWithQuery) pen.fillRect(at(steps[index]), findBand(steps[index]).bottom - 3, Math.max(1, each), 3);
    pen.fillStyle = readColor("--event-mark");
    steps.forEach((step) => { if (step.events) drawDiamond(pen, center(step), findBand(step).above); });
    const hoveredSteps = new Set(state.hovered < 0 ? [] : listLineSteps(data.lines[state.hovered]));
    for (const index of quotesByStep.keys()) drawDot(pen, center(steps[index]), findBand(steps[index]).below, 2.5, readColor("--source-mark"));
    for (const index of hoveredSteps) {
      const x = center(steps[index]), { top, bottom, below } = findBand(steps[index]);
      pen.fillStyle = readColor("--source-mark");
      pen.fillRect(x - 0.75, top, 1.5, bottom - top);
      drawDot(pen, x, below, 4, readColor("--source-mark"));
    }
    if (state.selected >= 0) {
      const step = steps[state.selected], { top, bottom } = findBand(step);
      pen.fillStyle = readColor("--ink");
      pen.fillRect(center(step) - 1, top - 2, 2, bottom - top + 4);
    }
  }
  /** Draw lines between lanes, where a branch begins or branches are merged. */
  function paintJoins(pen, center, findBand, each) {
    pen.strokeStyle = readColor("--muted");
    pen.lineWidth = 1;
    pen.beginPath();
    for (const step of steps) for (const index of step.from) {
      const source = steps[index];
      if (source.lane === step.lane) continue;
      const x = center(source) + each / 2, y = (findBand(source).top + findBand(source).bottom) / 2;
      pen.moveTo(x, y);
      pen.lineTo(center(step), (findBand(step).top + findBand(step).bottom) / 2);
    }
    pen.stroke();
  }
  const listLineSteps = (line) => [line.at, ...line.quotes.map((quote) => quote.at)];
  function drawDiamond(pen, x, y) {
    pen.beginPath();
    pen.moveTo(x, y - 3.5); pen.lineTo(x + 3.5, y); pen.lineTo(x, y + 3.5); pen.lineTo(x - 3.5, y);
    pen.fill();
  }
  function drawDot(pen, x, y, radius, fill) {
    pen.fillStyle = fill;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fill();
  }
  function describeStep(index) {
    const step = steps[index], parts = [capitalize(step.name)];
    if (step.section) parts.push(step.section);
    parts.push(hasChanged(step) ? `${Math.max(1, Math.round(step.density * 100))}% of the words changed` : step.state);
    if (step.events) parts.push(formatCount(step.events.length, "event"));
    const quotes = quotesByStep.get(index);
    if (quotes) parts.push(`source of ${formatCount(new Set(quotes.map((each) => each.line)).size, "memory line")}`);
    return parts.join(" · ");
  }
  /** Return the step under the pointer, or a notable step of its lane within three pixels. */
  function findPointedStep(event) {
    const box = strip.getBoundingClientRect(), each = box.width / columns, count = data.branches.length;
    const lane = stepsByLane[Math.min(count - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * count)))];
    const column = Math.floor((event.clientX - box.left) / each);
    const from = Math.min(lane.length - 1, Math.max(0, column - steps[lane[0]].column));
    let index = from;
    while (index > 0 && steps[lane[index]].column > column) index--;
    for (let away = 0; away * each <= 3; away++) {
      for (const near of [index - away, index + away]) if (near in lane && steps[lane[near]].notable) return lane[near];
    }
    return lane[index];
  }
  function listenToStrip() {
    if (!steps.length) {
      strip.setAttribute("aria-disabled", "true");
      return;
    }
    strip.setAttribute("aria-valuemin", 0);
    strip.setAttribute("aria-valuemax", steps.length - 1);
    strip.addEventListener("click", (event) => goTo(findPointedStep(event), { push: true }));
    strip.addEventListener("mousemove", (event) => {
      const tip = $("tip"), box = strip.getBoundingClientRect();
      tip.textContent = describeStep(findPointedStep(event));
      tip.hidden = false;
      const left = event.clientX - box.left - tip.offsetWidth / 2;
      tip.style.left = `${Math.max(0, Math.min(box.width - tip.offsetWidth, left))}px`;
    });
    strip.addEventListener("mouseleave", () => { $("tip").hidden = true; });
    strip.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const index = Math.min(steps.length - 1, Math.max(0, Math.max(0, state.selected) + moves[event.key]));
      goTo(index);
    });
  }

  // ---- search

  const ANSWER = -1;
  let lowerMemories = null;
  /** Find the hits: steps that add the query to the memory or remove it, steps with it in their events, and the answer. */
  function searchFor(query) {
    state.query = query.toLowerCase();
    state.hits = [];
    state.stepsWithQuery = [];
    state.hit = -1;
    if (state.query) {
      lowerMemories = lowerMemories || memories.map((memory) => memory.toLowerCase());
      if (`${data.answer || ""}\n${data.rawAnswer || ""}`.toLowerCase().includes(state.query)) state.hits.push(ANSWER);
      const counts = [];
      steps.forEach((step, index) => {
        const before = step.from.reduce((sum, each) => sum + counts[each], 0);
        const count = hasChanged(step) ? lowerMemories[index].split(state.query).length - 1 : before;
        counts.push(count);
        if (count) state.stepsWithQuery.push(index);
        const isInEvents = (step.events || []).some((event) => `${event.kind} ${event.detail}`.toLowerCase().includes(state.query));
        if (count !== before || isInEvents) state.hits.push(index);
      });
    }
    state.items.forEach((node, index) => {
      const body = node.querySelector(".body");
      if (body && !node.dataset.empty) drawBody(index, body);
    });
    highlightAll();
    drawStrip();
    showHitCount();
  }
  function showHitCount() {
    const count = state.hits.length;
    $("hits").textContent = !state.query ? "" : !count ? "not found"
      : `${state.hit < 0 ? formatCount(count, "place") : `${formatNumber(state.hit + 1)} of ${formatNumber(count)}`}, `
        + `in memory at ${formatCount(state.stepsWithQuery.length, hasBranches ? "step" : "chunk")}`;
    $("previous-hit").disabled = $("next-hit").disabled = !count;
    $("key-hit").hidden = !state.stepsWithQuery.length;
  }
  function moveHit(direction) {
    const count = state.hits.length;
    if (!count) return;
    state.hit = state.hit < 0 ? (direction > 0 ? 0 : count - 1) : (state.hit + direction + count) % count;
    const hit = state.hits[state.hit];
    if (hit === ANSWER) {
      state.selected = -1;
      markSelected();
      window.scrollTo(0, 0);
    } else {
      goTo(hit);
      showFirstFound(state.items.get(hit));
    }
    showHitCount();
  }
  function showFirstFound(node) {
    const first = node && findRanges(node)[0];
    if (!first) return;
    const box = first.getBoundingClientRect();
    if (box.bottom > window.innerHeight - 16) window.scrollBy(0, box.bottom - window.innerHeight / 2);
  }
  function highlightAll() {
    if (!highlight) return;
    highlight.clear();
    if (!state.query) return;
    [$("answer"), $("lines"), ...$("steps").querySelectorAll(".step:not([data-empty])")].forEach(highlightIn);
  }
  function highlightIn(root) {
    if (highlight && state.query) for (const range of findRanges(root)) highlight.add(range);
  }
  /** Return the ranges of the query under a node. A range may cross elements, but not the edge of deleted text. */
  function findRanges(root) {
    const ranges = [...root.querySelectorAll("del")].flatMap((node) => findRangesUnder(node, () => true));
    return [...findRangesUnder(root, (node) => !node.parentElement.closest("del, .more, .elided, .step-head, .step-meta")), ...ranges];
  }
  function findRangesUnder(root, isWanted) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, {
      acceptNode: (node) => isWanted(node) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT,
    });
    const nodes = [], starts = [];
    let text = "";
    while (walker.nextNode()) {
      nodes.push(walker.currentNode);
      starts.push(text.length);
      text += walker.currentNode.data.toLowerCase();
    }
    const ranges = [];
    const locate = (offset, last) => {
      let low = 0;
      while (low + 1 < starts.length && starts[low + 1] + (last ? 1 : 0) <= offset) low++;
      return [nodes[low], Math.min(nodes[low].length, offset - starts[low])];
    };
    for (let at = text.indexOf(state.query); at >= 0 && state.query; at = text.indexOf(state.query, at + state.query.length)) {
      const range = document.createRange();
      range.setStart(...locate(at, false));
      range.setEnd(...locate(at + state.query.length, true));
      ranges.push(range);
    }
    return ranges;
  }
  function endSearch() {
    $("query").value = "";
    searchFor("");
    $("query").blur();
  }

  // ---- input of the user

  function openGo() {
    if (!steps.length) return;
    const input = $("go-number"), chunks = steps.map((step) => step.chunk).filter((chunk) => chunk !== null);
    input.min = chunks.reduce((a, b) => Math.min(a, b), Infinity);
    input.max = chunks.reduce((a, b) => Math.max(a, b), 0);
    input.value = state.selected >= 0 && steps[state.selected].chunk !== null ? steps[state.selected].chunk : "";
    $("go").showModal();
    input.select();
  }
  function listen() {
    $("previous").addEventListener("click", () => moveToNext(-1));
    $("next").addEventListener("click", () => moveToNext(1));
    document.querySelectorAll("[data-filter]").forEach((button) =>
      button.addEventListener("click", () => setFilter(button.dataset.filter)));
    $("query").addEventListener("input", () => searchFor($("query").value.trim()));
    $("query").addEventListener("keydown", (event) => {
      if (event.key === "Escape") endSearch();
      if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); moveHit(-1); }
    });
    $("search").addEventListener("submit", (event) => { event.preventDefault(); moveHit(1); });
    $("previous-hit").addEventListener("click", () => moveHit(-1));
    $("help-button").addEventListener("click", () => $("help").showModal());
    $("go-cancel").addEventListener("click", () => $("go").close());
    $("go-form").addEventListener("submit", () => goTo(findStepOfChunk(Number($("go-number").value)), { push: true }));
    $("branch").addEventListener("change", () =>
      setFilter(state.filter, $("branch").value === "" ? null : data.branches[Number($("branch").value)]));
    document.addEventListener("click", (event) => {
      const node = event.target.closest('a[href^="#"]'), index = node ? indexByAnchor.get(node.getAttribute("href").slice(1)) : undefined;
      if (index === undefined || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      if (node.dataset.line) followLine(Number(node.dataset.line), Number(node.dataset.quote));
      else goTo(index, { push: true });
    });
    document.addEventListener("keydown", onKey);
    window.addEventListener("popstate", openFragment);
    window.addEventListener("beforeprint", () => steps.forEach((_, index) => fillStep(index)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawStrip);
    new ResizeObserver(() => {
      document.documentElement.style.setProperty("--bar-height", `${Math.round($("bar").offsetHeight)}px`);
      drawStrip();
    }).observe($("bar"));
  }
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select")) return;
    const keys = {
      j: () => moveToNext(1), k: () => moveToNext(-1), g: openGo, "/": () => $("query").focus(), "?": () => $("help").showModal(),
      a: () => setFilter("all"), c: () => setFilter("changed"), e: () => setFilter("events"), Escape: endSearch,
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }
  function openFragment() {
    return goTo(indexByAnchor.get(location.hash.slice(1)));
  }
  /** Return the step that read a chunk: on the chosen branch, or else on the first branch that read it. */
  function findStepOfChunk(chunk) {
    const places = steps.filter((step) => step.chunk === chunk);
    return (places.find((step) => step.branch === state.branch) || places[0] || { index: -1 }).index;
  }
  /** Show one lane for each branch, and the choice of a branch. */
  function drawBranches() {
    if (!hasBranches) return;
    strip.style.setProperty("--lanes", data.branches.length);
    strip.classList.add("lanes");
    $("branch-group").hidden = false;
    $("branch").append(...data.branches.map((branch, lane) => el("option", { value: lane }, branch ? `Branch ${branch}` : "Trunk")));
    $("key-join").hidden = false;
    $("timeline-title").textContent = "Step by step";
  }

  drawBranches();
  drawHead();
  drawMemory();
  listen();
  listenToStrip();
  drawSteps();
  openFragment();
  performance.mark("timeline-ready");
})();
