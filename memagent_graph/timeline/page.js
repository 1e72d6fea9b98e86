"use strict";
// Draws the timeline from the JSON in #data. Text becomes text nodes and nothing else: no markup is ever parsed here.
(() => {
  const NEAR = 1200;            // pixels around the window in which steps are filled in
  const KEPT = 160;             // at most so many characters of unchanged memory beside a change
  const SHORTEST_FOLD = 3;      // dull chunks in a row that become one line
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const steps = data.steps;
  const branched = data.branches.length > 1;
  const laneOf = new Map(data.branches.map((branch, lane) => [branch, lane]));
  const laneSteps = data.branches.map(() => []);   // lane -> its steps, left to right
  placed();
  const columns = Math.max(...steps.map((step) => step.column)) + 1;
  const folds = new Map(data.folds.map((fold) => [fold.from, fold]));   // first step -> the dull steps in a row
  const indexOf = new Map(steps.map((step, index) => [step.anchor, index]));
  const memories = rebuilt();
  const passages = new Map();   // step -> the quotes from its chunk, with their memory lines
  data.lines.forEach((line, index) => line.quotes.forEach((quote) => {
    if (!passages.has(quote.at)) passages.set(quote.at, []);
    passages.get(quote.at).push({ line: index, quote });
  }));
  const state = {
    filter: "all", branch: null, selected: -1, query: "", hits: [], hit: -1, hovered: -1,
    unfolded: new Set(), whole: new Set(), items: new Map(), passage: null, holding: [],
  };
  const found = typeof Highlight === "function" && CSS.highlights ? new Highlight() : null;
  if (found) CSS.highlights.set("found", found);

  // ---- small tools

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
  const number = (value) => value.toLocaleString("en");
  const plural = (count, one) => `${number(count)} ${count === 1 ? one : `${one}s`}`;
  const span = ([start, end]) => `characters ${number(start)}–${number(end)}`;
  const link = (index, text = steps[index].name) => el("a", { href: `#${steps[index].anchor}` }, text);
  const title = (name) => name[0].toUpperCase() + name.slice(1);
  function duration(seconds) {
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  const changed = (step) => step.diff !== undefined;

  /** Give every step its place on the strip: its branch's lane, and behind what it comes from. */
  function placed() {
    steps.forEach((step, index) => {
      step.index = index;
      step.joins = step.from.length > 0 && step.from.join() !== String(index - 1);
      step.lane = laneOf.get(step.branch);
      const lane = laneSteps[step.lane], before = lane.length ? steps[lane[lane.length - 1]].column : -1;
      step.column = Math.max(before, ...step.from.map((each) => steps[each].column)) + 1;
      lane.push(index);
    });
  }
  /** The memory that a step began from: those of the steps it comes from, below each other. */
  function based(step, all) {
    return step.from.map((index) => all[index]).filter((memory) => memory).join("\n");
  }
  /** The memory after every step, put together from the differences. */
  function rebuilt() {
    const all = [];
    for (const step of steps) {
      let memory = based(step, all);
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

  // ---- head

  function drawHead() {
    $("question").textContent = data.question;
    $("answer").textContent = data.answer === null ? "The run has not answered." : data.answer;
    document.querySelector(".answer").classList.toggle("none", data.answer === null);
    $("answer-notes").append(...(data.answerEvents || []).map(eventNode));
    if (data.rawAnswer) {
      $("answer-notes").append(el("details", {}, el("summary", {}, "The whole completion"), el("p", {}, data.rawAnswer)));
    }
    if (data.excerpt) drawExcerpt();
    for (const [name, value] of data.facts) {
      $("facts").append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    }
  }
  /** An excerpt was shown instead of chunks: its passages support the answer, and there may be no timeline at all. */
  function drawExcerpt() {
    $("excerpt").append(el("h2", {}, "What supports the answer"),
      ...data.excerpt.map((quote) => quotation(quote)),
      data.excerpt.length ? "" : el("p", { class: "hint" }, data.unquoted));
    $("excerpt").hidden = false;
    document.querySelector("main").hidden = $("bar").hidden = !steps.length;
  }
  function eventNode(event) {
    const rule = event.rule ? `, ${event.rule}` : "";
    return el("span", { class: "event" }, `${event.kind}${rule}${event.detail ? `: ${event.detail}` : ""}`);
  }

  // ---- final memory

  function drawMemory() {
    const quoted = data.lines.filter((line) => line.quotes.length).length;
    $("memory-hint").textContent = data.lines.length
      ? `${number(quoted)} of ${plural(data.lines.length, "line")} ${quoted === 1 ? "quotes" : "quote"} the document. Choose a line to see where it came from.`
      : "The memory is empty.";
    data.lines.forEach((line, index) => {
      const text = el("button", { type: "button", class: "line-text", onclick: () => follow(index, 0) },
        ...line.parts.map(([part, supports]) => supports
          ? el("mark", { class: "supports", title: "The answer repeats this" }, part) : part));
      const meta = el("div", { class: "line-meta" },
        el("span", {}, line.edited ? el("span", { class: "edited" }, "edited by a person at ") : "from ", link(line.at)));
      if (line.reworded.length) meta.append(rewordings(line.reworded));
      meta.append(el("span", {}, line.quotes.length
        ? `${Math.round(line.coverage * 100)}% of its words quoted` : "no verbatim quote"));
      const quotes = el("ul", { class: "quotes", role: "list" }, ...line.quotes.map((quote, which) => el("li", {},
        `“${shortened(quote.text, 220)}” `,
        el("a", { class: "where", href: `#${steps[quote.at].anchor}`, "data-line": index, "data-quote": which },
          quote.section || steps[quote.at].name))));
      $("lines").append(el("li", {
        class: "line", "data-line": index, onmouseenter: () => hover(index), onmouseleave: () => hover(-1),
      }, text, meta, line.quotes.length ? quotes : null));
    });
    if (data.lost.length) drawLost();
  }
  function rewordings(places) {
    const shown = places.slice(0, 4);
    const node = el("span", {}, "reworded at ");
    shown.forEach((place, index) => node.append(index ? ", " : "", link(place, steps[place].name.replace(/^chunk /, "").replace(", branch", " on branch"))));
    if (places.length > shown.length) node.append(` and ${places.length - shown.length} more`);
    return node;
  }
  function drawLost() {
    const more = data.lostTotal - data.lost.length;
    $("lost").hidden = false;
    $("lost-title").textContent = `Lost on the way: ${plural(data.lostTotal, "line")}`;
    $("lost").addEventListener("toggle", () => {
      if ($("lost-lines").childElementCount) return;
      $("lost-lines").append(...data.lost.map((line) => el("li", {}, el("del", {}, line.text),
        el("span", { class: "where" }, "from ", link(line.at), ", gone after ", link(line.gone)))),
        more > 0 ? el("li", { class: "hint" }, `and ${number(more)} that were there for fewer chunks`) : "");
    });
  }
  function shortened(text, most) {
    const flat = text.replace(/\s+/g, " ");
    return flat.length <= most ? flat : `${flat.slice(0, most / 2)} … ${flat.slice(-most / 2)}`;
  }
  function hover(line) {
    state.hovered = line;
    drawStrip();
  }
  function follow(line, which) {
    const quote = data.lines[line].quotes[which];
    state.passage = quote ? { line, quote } : null;
    goTo(quote ? quote.at : data.lines[line].at, { push: true });
    markLine(line);
  }
  function markLine(line) {
    document.querySelectorAll(".line").forEach((node, index) => node.classList.toggle("current", index === line));
  }

  // ---- the list of chunks

  function shown(step) {
    if (state.branch !== null && step.branch !== state.branch) return false;
    if (state.filter === "changed") return changed(step);
    if (state.filter === "events") return step.events !== undefined;
    return true;
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) fill(Number(entry.target.dataset.index));
  }, { rootMargin: `${NEAR}px 0px` });

  function drawSteps() {
    observer.disconnect();
    state.items.clear();
    const list = document.createDocumentFragment();
    for (let index = 0; index < steps.length; index++) {
      if (!shown(steps[index])) continue;
      const fold = folds.get(index);
      if (state.filter === "all" && fold && fold.to - index >= SHORTEST_FOLD && !state.unfolded.has(index)) {
        list.append(foldNode(fold));
        index = fold.to - 1;
      } else list.append(stepNode(index));
    }
    $("steps").replaceChildren(list);
    $("nothing").hidden = $("steps").childElementCount > 0;
    for (const node of state.items.values()) if (node.dataset.empty) observer.observe(node);
    mark();
  }
  function foldNode({ from, to, label }) {
    return el("li", { class: "fold", "data-from": from, "data-to": to },
      el("button", { type: "button", "aria-expanded": "false", onclick: () => unfold(from, to) }, title(label)));
  }
  function unfold(from, to) {
    state.unfolded.add(from);
    const old = $("steps").querySelector(`.fold[data-from="${from}"]`);
    if (!old) return;
    const nodes = [];
    for (let index = from; index < to; index++) nodes.push(stepNode(index));
    const focused = old.contains(document.activeElement);
    old.replaceWith(...nodes);
    if (focused) nodes[0].querySelector("a").focus({ preventScroll: true });
  }
  function stepNode(index) {
    const step = steps[index];
    const [chunk, prompt, completion] = step.tokens;
    const head = el("div", { class: "step-head" },
      el("h3", {}, link(index, title(step.name))),
      changed(step)
        ? el("span", {}, step.words[0] ? el("span", { class: "plus" }, `+${number(step.words[0])} `) : null,
          step.words[1] ? el("span", { class: "minus" }, `−${number(step.words[1])} `) : null,
          step.words[0] || step.words[1] ? "words" : "only spacing or punctuation changed")
        : el("span", {}, step.state),
      step.section ? el("span", {}, step.section) : null);
    const sources = step.joins ? el("span", { class: "joined" }, "from ",
      ...step.from.flatMap((each, which) => which ? [", ", link(each)] : [link(each)])) : null;
    const meta = el("div", { class: "step-meta" }, step.span ? el("span", {}, span(step.span)) : null, sources,
      step.span ? el("span", {}, `${number(chunk)} tokens read`) : null,
      el("span", {}, `${number(prompt)} in, ${number(completion)} out`), el("span", {}, duration(step.seconds)));
    if (!step.notable) head.append(meta.firstChild, meta.lastChild);
    const node = el("li", { class: step.notable ? "step" : "step dull", id: step.anchor, "data-index": index },
      head, step.notable ? meta : null);
    if (step.events) node.append(el("div", { class: "events" }, ...step.events.map(eventNode)));
    if (changed(step) || passages.has(index)) {
      node.dataset.empty = "yes";
      if (changed(step)) node.append(el("div", { class: "body pending" }));
    }
    state.items.set(index, node);
    return node;
  }
  /** Give a step its memory and its passages, once it is near the window. */
  function fill(index) {
    const node = state.items.get(index);
    if (!node || !node.dataset.empty) return;
    delete node.dataset.empty;
    observer.unobserve(node);
    const body = node.querySelector(".body");
    if (body) drawBody(index, body);
    const here = passages.get(index);
    if (here) {
      node.append(el("div", { class: "sources" }, el("h4", {}, "Quoted in the final memory"), ...here.map(passage)));
    }
    findIn(node);
  }
  function passage({ line, quote }) {
    const node = quotation(quote, { onmouseenter: () => { markLine(line); hover(line); }, onmouseleave: () => hover(-1) });
    quote.node = node;
    return node;
  }
  function quotation(quote, attributes) {
    return el("blockquote", { class: "passage", ...attributes },
      el("span", { class: "where" }, `${span(quote.span)}${quote.section ? `, ${quote.section}` : ""} `, inDocument(quote)),
      quote.before ? `…${quote.before}` : "", el("mark", {}, quote.text), quote.after ? `${quote.after}…` : "");
  }
  /** A link to the passage where a server shows the document, or to its page in the PDF file. */
  function inDocument(quote) {
    if (data.pdf && quote.page) return el("a", { href: `${data.pdf}#page=${quote.page}` }, "open the page");
    return data.documentLink ? el("a", { href: `${data.documentLink}/${quote.span.join("/")}` }, "in the document") : "";
  }
  function drawBody(index, body) {
    const step = steps[index];
    const before = based(step, memories);
    const whole = state.whole.has(index);
    const sought = (text) => state.query !== "" && text.toLowerCase().includes(state.query);
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
      const head = position ? lineEnd(text) : "", tail = position < step.diff.length - 1 ? lineStart(text) : "";
      const left = text.slice(head.length, text.length - tail.length);
      if (whole || head.length + tail.length >= text.length || left.length < KEPT || sought(left)) {
        return nodes.push(el("span", { class: "kept" }, text));
      }
      cut = true;
      const lines = left.trim().split("\n").length;
      return nodes.push(el("span", { class: "kept" }, head.trimEnd(),
        el("span", { class: "elided" }, lines > 1 ? `⋯ ${lines} lines as before` : "⋯"), tail.trimStart()));
    });
    body.classList.remove("pending");
    body.replaceChildren(...nodes);
    if (cut || state.whole.has(index)) {
      body.append(" ", el("button", { type: "button", class: "more", onclick: () => {
        state.whole[cut ? "add" : "delete"](index);
        drawBody(index, body);
        findAll();
      } }, cut ? "Show the whole memory" : "Show only what changed"));
    }
    if (!memories[index]) body.append(el("span", { class: "kept" }, " (memory is empty now)"));
  }
  /** The rest of the line that a change stands on, or as much of it as is worth showing. */
  function lineEnd(text) {
    const end = text.indexOf("\n");
    return end >= 0 && end <= KEPT ? text.slice(0, end) : text.slice(0, Math.max(0, text.lastIndexOf(" ", KEPT)));
  }
  function lineStart(text) {
    const start = text.lastIndexOf("\n") + 1;
    if (start && text.length - start <= KEPT) return text.slice(start);
    const space = text.indexOf(" ", text.length - KEPT);
    return space < 0 ? "" : text.slice(space + 1);
  }
  function setFilter(filter, branch = state.branch) {
    state.filter = filter;
    state.branch = branch;
    $("branch").value = branch === null ? "" : String(laneOf.get(branch));
    document.querySelectorAll("[data-filter]").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.filter === filter)));
    drawSteps();
    if (state.items.has(state.selected)) scrollTo(state.selected);
    else findAll();
  }

  // ---- moving

  function goTo(index, { push = false } = {}) {
    if (!steps[index]) return false;
    if (!shown(steps[index])) setFilter("all", null);
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
    // What stands near must have its height before the window moves there.
    for (let near = index - 6; near <= index + 6; near++) fill(near);
    const node = state.items.get(index);
    mark();
    const quote = state.passage && state.passage.quote;
    document.querySelectorAll(".passage.current").forEach((each) => each.classList.remove("current"));
    node.scrollIntoView({ block: "start" });
    if (quote && quote.at === index && quote.node) {
      quote.node.classList.add("current");
      if (quote.node.getBoundingClientRect().bottom > window.innerHeight) quote.node.scrollIntoView({ block: "center" });
    }
    state.passage = null;
  }
  function mark() {
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
      strip.setAttribute("aria-valuetext", describe(Math.max(0, state.selected)));
    }
    drawStrip();
  }
  /** Where the reader is: the selected step while it can be seen, else the one at the top of the window. */
  function position() {
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
  function move(direction) {
    const wanted = state.filter === "events" ? (step) => step.events !== undefined : changed;
    for (let index = position() + direction; index >= 0 && index < steps.length; index += direction) {
      if (wanted(steps[index]) && (state.branch === null || shown(steps[index]))) return goTo(index);
    }
    return false;
  }

  // ---- the strip

  const strip = $("strip");
  if (data.share < 1) strip.style.width = `${100 * data.share}%`;  // the rest was not read
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let stripDue = false;
  function drawStrip() {
    if (stripDue) return;
    stripDue = true;
    requestAnimationFrame(() => { stripDue = false; paintStrip(); });
  }
  /** Where a lane lies: its bars between top and bottom, events at `above`, sources of memory lines at `below`. */
  function band(lane, height) {
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
    const bands = data.branches.map((_, lane) => band(lane, height));
    const of = (step) => bands[step.lane];
    pen.fillStyle = color("--sunken");
    steps.forEach((step) => pen.fillRect(at(step), of(step).top, each, of(step).bottom - of(step).top));
    pen.fillStyle = color("--change-mark");
    // A few steps that rewrite everything, the first among them, shall not flatten the others.
    const densities = steps.filter(changed).map((step) => step.density).sort((a, b) => a - b);
    const full = Math.max(0.05, densities[Math.floor(densities.length * 0.98)] || 0);
    const bar = Math.max(1, each > 4 ? each - 1 : each);
    steps.forEach((step) => {
      if (!changed(step)) return;
      const { top, bottom } = of(step);
      const tall = Math.max(3, Math.sqrt(Math.min(1, step.density / full)) * (bottom - top));
      pen.fillRect(at(step), bottom - tall, bar, tall);
    });
    if (branched) paintJoins(pen, center, of, each);
    pen.fillStyle = color("--found-mark");
    for (const index of state.holding) pen.fillRect(at(steps[index]), of(steps[index]).bottom - 3, Math.max(1, each), 3);
    pen.fillStyle = color("--event-mark");
    steps.forEach((step) => { if (step.events) diamond(pen, center(step), of(step).above); });
    const lit = new Set(state.hovered < 0 ? [] : linePlaces(data.lines[state.hovered]));
    for (const index of passages.keys()) dot(pen, center(steps[index]), of(steps[index]).below, 2.5, color("--source-mark"));
    for (const index of lit) {
      const x = center(steps[index]), { top, bottom, below } = of(steps[index]);
      pen.fillStyle = color("--source-mark");
      pen.fillRect(x - 0.75, top, 1.5, bottom - top);
      dot(pen, x, below, 4, color("--source-mark"));
    }
    if (state.selected >= 0) {
      const step = steps[state.selected], { top, bottom } = of(step);
      pen.fillStyle = color("--ink");
      pen.fillRect(center(step) - 1, top - 2, 2, bottom - top + 4);
    }
  }
  /** Lines from one lane to another, where a branch leaves or several meet. */
  function paintJoins(pen, center, of, each) {
    pen.strokeStyle = color("--muted");
    pen.lineWidth = 1;
    pen.beginPath();
    for (const step of steps) for (const index of step.from) {
      const source = steps[index];
      if (source.lane === step.lane) continue;
      const x = center(source) + each / 2, y = (of(source).top + of(source).bottom) / 2;
      pen.moveTo(x, y);
      pen.lineTo(center(step), (of(step).top + of(step).bottom) / 2);
    }
    pen.stroke();
  }
  const linePlaces = (line) => [line.at, ...line.quotes.map((quote) => quote.at)];
  function diamond(pen, x, y) {
    pen.beginPath();
    pen.moveTo(x, y - 3.5); pen.lineTo(x + 3.5, y); pen.lineTo(x, y + 3.5); pen.lineTo(x - 3.5, y);
    pen.fill();
  }
  function dot(pen, x, y, radius, fill) {
    pen.fillStyle = fill;
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fill();
  }
  function describe(index) {
    const step = steps[index], said = [title(step.name)];
    if (step.section) said.push(step.section);
    said.push(changed(step) ? `${Math.max(1, Math.round(step.density * 100))}% of the words changed` : step.state);
    if (step.events) said.push(plural(step.events.length, "event"));
    const here = passages.get(index);
    if (here) said.push(`source of ${plural(new Set(here.map((each) => each.line)).size, "memory line")}`);
    return said.join(" · ");
  }
  /** The step under the pointer, or a notable one of its lane within a few pixels of it. */
  function pointed(event) {
    const box = strip.getBoundingClientRect(), each = box.width / columns, count = data.branches.length;
    const lane = laneSteps[Math.min(count - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * count)))];
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
    strip.addEventListener("click", (event) => goTo(pointed(event), { push: true }));
    strip.addEventListener("mousemove", (event) => {
      const tip = $("tip"), box = strip.getBoundingClientRect();
      tip.textContent = describe(pointed(event));
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
  let lowered = null;
  /** Hits are the steps at which the query came into memory or went from it, those whose events say it, and the answer. */
  function search(query) {
    state.query = query.toLowerCase();
    state.hits = [];
    state.holding = [];
    state.hit = -1;
    if (state.query) {
      lowered = lowered || memories.map((memory) => memory.toLowerCase());
      if (`${data.answer || ""}\n${data.rawAnswer || ""}`.toLowerCase().includes(state.query)) state.hits.push(ANSWER);
      const counts = [];
      steps.forEach((step, index) => {
        const before = step.from.reduce((sum, each) => sum + counts[each], 0);
        const count = changed(step) ? lowered[index].split(state.query).length - 1 : before;
        counts.push(count);
        if (count) state.holding.push(index);
        const said = (step.events || []).some((event) => `${event.kind} ${event.detail}`.toLowerCase().includes(state.query));
        if (count !== before || said) state.hits.push(index);
      });
    }
    state.items.forEach((node, index) => {
      const body = node.querySelector(".body");
      if (body && !node.dataset.empty) drawBody(index, body);
    });
    findAll();
    drawStrip();
    sayHits();
  }
  function sayHits() {
    const count = state.hits.length;
    $("hits").textContent = !state.query ? "" : !count ? "not found"
      : `${state.hit < 0 ? plural(count, "place") : `${number(state.hit + 1)} of ${number(count)}`}, `
        + `in memory at ${plural(state.holding.length, branched ? "step" : "chunk")}`;
    $("previous-hit").disabled = $("next-hit").disabled = !count;
    $("key-hit").hidden = !state.holding.length;
  }
  function moveHit(direction) {
    const count = state.hits.length;
    if (!count) return;
    state.hit = state.hit < 0 ? (direction > 0 ? 0 : count - 1) : (state.hit + direction + count) % count;
    const hit = state.hits[state.hit];
    if (hit === ANSWER) {
      state.selected = -1;
      mark();
      window.scrollTo(0, 0);
    } else {
      goTo(hit);
      showFirstFound(state.items.get(hit));
    }
    sayHits();
  }
  function showFirstFound(node) {
    const first = node && rangesIn(node)[0];
    if (!first) return;
    const box = first.getBoundingClientRect();
    if (box.bottom > window.innerHeight - 16) window.scrollBy(0, box.bottom - window.innerHeight / 2);
  }
  function findAll() {
    if (!found) return;
    found.clear();
    if (!state.query) return;
    [$("answer"), $("lines"), ...$("steps").querySelectorAll(".step:not([data-empty])")].forEach(findIn);
  }
  function findIn(root) {
    if (found && state.query) for (const range of rangesIn(root)) found.add(range);
  }
  /** Where the query stands under a node. A hit may cross elements, but does not begin or end in deleted text. */
  function rangesIn(root) {
    const ranges = [...root.querySelectorAll("del")].flatMap((node) => rangesOver(node, () => true));
    return [...rangesOver(root, (node) => !node.parentElement.closest("del, .more, .elided, .step-head, .step-meta")), ...ranges];
  }
  function rangesOver(root, wanted) {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, {
      acceptNode: (node) => wanted(node) ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT,
    });
    const nodes = [], starts = [];
    let text = "";
    while (walker.nextNode()) {
      nodes.push(walker.currentNode);
      starts.push(text.length);
      text += walker.currentNode.data.toLowerCase();
    }
    const ranges = [];
    const place = (offset, last) => {
      let low = 0;
      while (low + 1 < starts.length && starts[low + 1] + (last ? 1 : 0) <= offset) low++;
      return [nodes[low], Math.min(nodes[low].length, offset - starts[low])];
    };
    for (let at = text.indexOf(state.query); at >= 0 && state.query; at = text.indexOf(state.query, at + state.query.length)) {
      const range = document.createRange();
      range.setStart(...place(at, false));
      range.setEnd(...place(at + state.query.length, true));
      ranges.push(range);
    }
    return ranges;
  }
  function endSearch() {
    $("query").value = "";
    search("");
    $("query").blur();
  }

  // ---- what the reader does

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
    $("previous").addEventListener("click", () => move(-1));
    $("next").addEventListener("click", () => move(1));
    document.querySelectorAll("[data-filter]").forEach((button) =>
      button.addEventListener("click", () => setFilter(button.dataset.filter)));
    $("query").addEventListener("input", () => search($("query").value.trim()));
    $("query").addEventListener("keydown", (event) => {
      if (event.key === "Escape") endSearch();
      if (event.key === "Enter" && event.shiftKey) { event.preventDefault(); moveHit(-1); }
    });
    $("search").addEventListener("submit", (event) => { event.preventDefault(); moveHit(1); });
    $("previous-hit").addEventListener("click", () => moveHit(-1));
    $("help-button").addEventListener("click", () => $("help").showModal());
    $("go-cancel").addEventListener("click", () => $("go").close());
    $("go-form").addEventListener("submit", () => goTo(readAt(Number($("go-number").value)), { push: true }));
    $("branch").addEventListener("change", () =>
      setFilter(state.filter, $("branch").value === "" ? null : data.branches[Number($("branch").value)]));
    document.addEventListener("click", (event) => {
      const node = event.target.closest('a[href^="#"]'), index = node ? indexOf.get(node.getAttribute("href").slice(1)) : undefined;
      if (index === undefined || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      if (node.dataset.line) follow(Number(node.dataset.line), Number(node.dataset.quote));
      else goTo(index, { push: true });
    });
    document.addEventListener("keydown", onKey);
    window.addEventListener("popstate", openFragment);
    window.addEventListener("beforeprint", () => steps.forEach((_, index) => fill(index)));
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
      j: () => move(1), k: () => move(-1), g: openGo, "/": () => $("query").focus(), "?": () => $("help").showModal(),
      a: () => setFilter("all"), c: () => setFilter("changed"), e: () => setFilter("events"), Escape: endSearch,
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }
  function openFragment() {
    return goTo(indexOf.get(location.hash.slice(1)));
  }
  /** Where a chunk was read: on the branch that is shown, or the first that read it. */
  function readAt(chunk) {
    const places = steps.filter((step) => step.chunk === chunk);
    return (places.find((step) => step.branch === state.branch) || places[0] || { index: -1 }).index;
  }
  /** One lane for each branch, and the choice of one. */
  function drawBranches() {
    if (!branched) return;
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
