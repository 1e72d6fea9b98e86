// The live page. All texts are shown as text nodes; markup in them is never parsed.
const $ = (id) => document.getElementById(id);
const SOON = 250;               // milliseconds from the last key press to the search
const PAGE = 50;                // reads that are loaded at once
const MOST_STEPS = 200;         // steps that are shown
const KEPT = 160;               // maximum characters of unchanged memory shown beside a change
const VIEWS = ["sign-in", "home", "read", "document"];
const WORKS = new Set(["running", "waiting"]);
const TRUNK = "";
const state = { files: [], reads: new Map(), total: 0, read: null, source: null, query: "", editing: null };

// ---- helpers

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
const number = (value) => value.toLocaleString("en");
const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
const shortened = (text, most) => text.length <= most ? text : `${text.slice(0, most - 1)}…`;
const percent = (share) => share === null ? "" : `${Math.floor(share * 100)} %`;

function showNotice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}
/** Send a request to the server and return its JSON. Throws an Error with the server's message. */
async function ask(method, path, body) {
  const headers = { "X-Memagent-Page": "1" };
  if (body !== undefined && !(body instanceof FormData)) headers["Content-Type"] = "application/json";
  const sent = body === undefined || body instanceof FormData ? body : JSON.stringify(body);
  const reply = await fetch(path, { method, headers, body: sent });
  if (reply.ok) return reply.status === 204 ? null : reply.json();
  const failure = await reply.json().catch(() => null);
  const error = new Error(failure?.error?.message || `The server answered ${reply.status}.`);
  if (reply.status === 401 && path !== "/page/session") show("sign-in");
  throw error;
}
/** Run an action of the page; show its error, if there is one. */
async function doing(work) {
  try {
    showNotice("");
    return await work();
  } catch (error) {
    showNotice(error.message);
    return undefined;
  }
}
function diffNodes(parts) {
  return parts.map(([op, text], index) => {
    if (op === "insert") return el("ins", {}, text);
    if (op === "delete") return el("del", {}, text);
    if (text.length <= 2 * KEPT) return el("span", { class: "kept" }, text);
    const head = index ? text.slice(0, KEPT) : "", tail = index < parts.length - 1 ? text.slice(-KEPT) : "";
    return el("span", { class: "kept" }, head, el("span", { class: "elided" }, "⋯"), tail);
  });
}
const place = (id) => `/page/reads/${encodeURIComponent(id)}`;

// ---- which view is shown

function show(view) {
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== view;
  $("sign-out").hidden = view === "sign-in";
  if (view === "sign-in") {
    follow(null);
    $("token").focus();
  }
}
async function route() {
  const [what, ...rest] = location.hash.slice(1).split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  if (what === "main") return;
  showNotice("");
  document.title = "memagent";
  state.read = null;
  if (what === "read" && rest[0]) openRead(rest[0]);
  else if (what === "document" && rest[2]) await doing(() => openDocument(rest[0], rest[1], rest[2]));
  else await openHome();
}
async function begin() {
  if (location.hash.startsWith("#token=")) {
    const token = location.hash.slice("#token=".length);
    history.replaceState(null, "", "/");
    await doing(() => ask("POST", "/page/session", { token }));
  }
  try {
    const who = await ask("GET", "/page/session");
    $("who").textContent = who.owner === "local" ? who.model : `${who.owner}, ${who.model}`;
  } catch (error) {
    show("sign-in");
    return;
  }
  await route();
}

// ---- events from the server

function follow(run) {
  state.source?.close();
  state.source = null;
  if ($("view-sign-in").hidden === false) return;
  const source = state.source = new EventSource(run ? `/page/events?run=${encodeURIComponent(run)}` : "/page/events");
  const on = (name, work) => source.addEventListener(name, (event) => { if (source === state.source) work(JSON.parse(event.data)); });
  on("reads", (reads) => reads.forEach(changedRead));
  on("snapshot", (value) => takeSnapshot(value));
  on("update", (value) => takeUpdate(value));
  on("state", (value) => takeState(value));
  on("gone", (message) => showNotice(message));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED && source === state.source) setTimeout(() => begin(), 3000);
  });
}

// ---- home: documents, questions, reads

async function openHome() {
  show("home");
  follow(null);
  await doing(() => loadReads());
}
async function addFiles(files) {
  for (const file of files) {
    const entry = { name: file.name, note: "uploading", id: null };
    state.files.push(entry);
    drawFiles();
    const form = new FormData();
    form.append("file", file, file.name);
    try {
      const kept = await ask("POST", "/page/files", form);
      entry.id = kept.id;
      entry.note = kept.text_bytes === null ? "" : `${number(Math.ceil(kept.text_bytes / 1024))} KiB of text`;
    } catch (error) {
      entry.note = error.message;
      entry.bad = true;
    }
    drawFiles();
  }
}
function drawFiles() {
  $("files").replaceChildren(...state.files.map((file, index) => el("li", {},
    el("span", {}, file.name), el("span", { class: file.bad ? "bad" : "hint" }, file.note),
    el("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, onclick: () => {
      state.files.splice(index, 1);
      drawFiles();
      $("choose").focus();
    } }, "Remove"))));
}
async function beginReads() {
  const questions = $("questions").value.split("\n").map((line) => line.trim()).filter((line) => line);
  const files = state.files.filter((file) => file.id).map((file) => file.id);
  if (state.files.some((file) => !file.id && !file.bad)) throw new Error("A document is still being uploaded.");
  if (!files.length) throw new Error("Choose a document, drop one, or paste a text.");
  $("ask-status").textContent = "Starting.";
  $("begin").disabled = true;
  try {
    const { reads } = await ask("POST", "/page/reads", { files, questions, read_again: $("read_again").checked });
    state.files = [];
    drawFiles();
    $("questions").value = "";
    if (reads.length === 1) location.hash = `read/${encodeURIComponent(reads[0])}`;
    else await loadReads();
  } finally {
    $("begin").disabled = false;
    $("ask-status").textContent = "";
  }
}
async function loadReads(more = false) {
  const query = state.query, skip = more ? state.reads.size : 0;
  const found = await ask("GET", `/page/reads?${new URLSearchParams({ q: query, newest: PAGE, skip })}`);
  if (query !== state.query) return;
  if (!more) state.reads.clear();
  found.reads.forEach((read) => state.reads.set(read.id, read));
  state.total = found.total;
  drawReads();
}
function drawReads() {
  const rows = [...state.reads.values()];
  const old = new Map([...$("reads").children].map((row) => [row.dataset.id, row]));
  $("reads").replaceChildren(...rows.map((read) => {
    const row = old.get(read.id);
    return row && row.dataset.drawn === drawn(read) ? row : readRow(read);
  }));
  $("found").textContent = plural(state.total, "read");
  $("more").hidden = rows.length >= state.total;
}
const drawn = (read) => `${read.state} ${read.progress} ${read.edited} ${read.answer}`;
function readRow(read) {
  const when = new Date(read.began * 1000).toLocaleString();
  return el("li", { "data-id": read.id, "data-drawn": drawn(read) },
    el("div", {}, el("a", { href: `#read/${encodeURIComponent(read.id)}` }, shortened(read.question, 300)),
      read.answer ? el("p", { class: "row-answer" }, shortened(read.answer, 300)) : null,
      el("div", { class: "about" }, `${read.document} · ${when}${read.edited ? " · edited by a person" : ""}`)),
    el("span", { class: `state state-${read.state}` }, `${read.state} ${WORKS.has(read.state) ? percent(read.progress) : ""}`.trim()));
}
function changedRead(read) {
  if ($("view-home").hidden) return;
  const known = state.reads.get(read.id);
  if (known) {
    state.reads.set(read.id, read);
    const row = [...$("reads").children].find((each) => each.dataset.id === read.id);
    if (row && !row.contains(document.activeElement)) row.replaceWith(readRow(read));
    else if (row) row.querySelector(".state").replaceWith(readRow(read).querySelector(".state"));
  } else if (!state.query) {
    state.reads = new Map([[read.id, read], ...state.reads]);
    state.total += 1;
    drawReads();
  }
}

// ---- one read

function openRead(id) {
  state.read = { id, branches: new Map(), before: new Map(), value: null };
  state.editing = null;
  for (const name of ["read-question", "read-state", "read-run", "read-answer", "earlier", "memory-hint"]) $(name).textContent = "";
  for (const name of ["steps", "branches", "answers", "source-lines"]) $(name).replaceChildren();
  $("answer-box").hidden = true;
  $("sources").open = false;
  $("run-page").href = `${place(id)}/page`;
  show("read");
  follow(id);
  $("main").focus();
}
function takeSnapshot({ updates, earlier }) {
  const read = state.read;
  read.branches.clear();
  state.editing = null;
  $("steps").replaceChildren();
  updates.forEach((update) => addStep(update));
  $("earlier").textContent = earlier ? `${plural(earlier, "earlier step")} on the run page` : "";
  drawBranches();
}
function takeUpdate(update) {
  addStep(update);
  drawBranches();
  drawState();
}
function addStep(update) {
  const read = state.read;
  read.before.set(update.branch, new Set((read.branches.get(update.branch)?.memory || "").split("\n")));
  read.branches.set(update.branch, update);
  read.progress = update.progress;
  const tokens = update.tokens ? `${number(update.tokens)} tokens read` : "";
  $("steps").prepend(el("li", { class: update.diff.length || update.events.length ? "step" : "step dull" },
    el("div", { class: "step-head" }, el("h3", {}, update.name[0].toUpperCase() + update.name.slice(1)),
      el("span", {}, update.diff.length ? "" : "unchanged"), el("span", {}, tokens), el("span", {}, `${update.seconds} s`)),
    update.events.length ? el("div", { class: "events" }, ...update.events.map((event) =>
      el("span", { class: "event" }, `${event.kind}${event.rule ? `, ${event.rule}` : ""}${event.detail ? `: ${event.detail}` : ""}`))) : null,
    update.diff.length ? el("div", { class: "body" }, ...diffNodes(update.diff)) : null));
  while ($("steps").childElementCount > MOST_STEPS) $("steps").lastElementChild.remove();
}
function takeState(value) {
  const read = state.read;
  read.value = value;
  $("read-question").textContent = value.question;
  document.title = shortened(value.question, 60);
  const about = [value.document, value.model, value.strategy, value.edited ? "edited by a person" : ""];
  $("read-run").textContent = about.filter((each) => each).join(" · ");
  const done = value.answer !== null && value.state === "finished";
  $("answer-box").hidden = !done;
  $("read-answer").textContent = done ? value.answer : "";
  drawThumbs(value.thumb);
  drawState();
  drawBranches();
  if (done) $("sources").open = true;
  loadSources();
}
function drawThumbs(thumb) {
  $("thumb-up").setAttribute("aria-pressed", String(thumb === 1));
  $("thumb-down").setAttribute("aria-pressed", String(thumb === 0));
}
const atWork = () => WORKS.has(state.read?.value?.state);
function drawState() {
  const { value, progress } = state.read;
  if (!value) return;
  const share = value.state === "finished" ? 1 : progress ?? value.progress;
  if (share === null || share === undefined) $("read-progress").removeAttribute("value");
  else $("read-progress").value = share;
  const label = { waiting: "waiting for other reads", running: "reading" }[value.state] || value.state;
  $("read-state").textContent = [label, share ? percent(share) : "", value.error || ""].filter((each) => each).join(" · ");
  const had = document.activeElement;
  $("pause").hidden = $("stop").hidden = !atWork();
  $("continue").hidden = atWork() || value.state === "finished";
  if (had === $("pause") && $("pause").hidden) $("continue").focus();
  if (had === $("continue") && $("continue").hidden && atWork()) $("pause").focus();
  $("memory-hint").textContent = atWork() ? "Pause to edit a line." : "";
}
function drawBranches() {
  const read = state.read;
  if (state.editing) return;
  const key = document.activeElement?.dataset?.key;
  const names = [...read.branches.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  $("branches").replaceChildren(...names.map((branch) => branchNode(branch, names.length > 1)));
  if (key) [...$("branches").querySelectorAll("button")].find((button) => button.dataset.key === key)?.focus();
}
function branchNode(branch, several) {
  const update = state.read.branches.get(branch), known = state.read.before.get(branch) || new Set();
  const lines = update.memory.split("\n");
  const items = lines.map((line, index) => line.trim() ? lineNode(update, lines, line, index, !known.has(line)) : null);
  const title = branch === TRUNK ? "Trunk" : `Branch ${branch}`;
  const where = update.chunk === null ? "the merge" : `chunk ${update.chunk + 1}`;
  return el("article", { class: "branch", "aria-label": `Memory, ${title}` },
    el("h3", {}, several ? `${title}, after ${where}` : `after ${where}`),
    items.some((item) => item) ? el("ol", { class: "lines" }, ...items) : el("p", { class: "hint" }, "empty"));
}
function lineNode(update, lines, line, index, isNew) {
  const short = shortened(line, 60), key = (what) => `${what}/${update.branch}/${index}`;
  const editable = update.chunk !== null && !atWork();
  const why = editable ? null : update.chunk === null ? "A merge cannot be edited" : "Pause to edit";
  const item = el("li", { class: `line${isNew ? " new" : ""}` }, el("p", {}, line),
    el("div", { class: "tools" },
      el("button", { type: "button", "data-key": key("edit"), "aria-label": `Edit: ${short}`, title: why, disabled: !editable,
        onclick: () => editLine(item, update, lines, index) }, "Edit"),
      el("button", { type: "button", "data-key": key("delete"), "aria-label": `Delete: ${short}`, title: why, disabled: !editable,
        onclick: () => doing(() => replaceMemory(update, lines.filter((_, other) => other !== index))) }, "Delete")));
  return item;
}
function editLine(item, update, lines, index) {
  state.editing = item;
  const box = el("textarea", { rows: 3, "aria-label": "The line" });
  box.value = lines[index];
  const close = () => { state.editing = null; drawBranches(); };
  const save = () => doing(async () => {
    await replaceMemory(update, lines.map((line, other) => other === index ? box.value : line));
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
  });
  item.replaceChildren(box, el("div", { class: "group" },
    el("button", { type: "button", class: "primary", onclick: save }, "Save"),
    el("button", { type: "button", onclick: close }, "Cancel")));
  box.focus();
}
async function replaceMemory(update, lines) {
  const text = lines.join("\n");
  await ask("POST", `${place(state.read.id)}/memory`, { chunk: update.chunk, branch: update.branch, before: update.memory, text });
  state.editing = null;
  $("continue").focus();
}
async function loadSources() {
  const read = state.read;
  if (!$("sources").open || !read || atWork()) return;
  const { lines } = await ask("GET", `${place(read.id)}/sources`);
  if (read !== state.read) return;
  $("source-lines").replaceChildren(...lines.map((line) => el("li", { class: "line" }, el("p", {}, line.line),
    el("div", { class: "line-meta" }, `${line.edited ? "edited by a person at" : "from"} ${line.from}`),
    el("ul", { class: "quotes" }, ...line.quotes.map((quote) => el("li", {}, `“${shortened(quote.text, 220)}” `,
      el("a", { href: `#document/${encodeURIComponent(read.id)}/${quote.start}/${quote.end}` }, quote.section || "in the document")))))));
}
async function askNow(question) {
  const read = state.read;
  const { answer } = await ask("POST", `${place(read.id)}/answer`, { question });
  if (read !== state.read) return;
  const after = [...read.branches.values()].pop();
  $("answers").prepend(el("li", {}, el("p", { class: "hint" }, `${question} · ${after ? `after ${after.name}` : "before the first chunk"}`), answer || "no answer"));
}

// ---- a passage of a document

async function openDocument(id, start, end) {
  show("document");
  follow(null);
  const value = await ask("GET", `${place(id)}/passage?${new URLSearchParams({ start, end })}`);
  $("document-place").textContent = `characters ${number(value.start)}–${number(value.end)}`;
  $("document-title").textContent = value.document;
  const mark = el("mark", { tabindex: "-1" }, value.passage);
  $("passage").replaceChildren(value.begins ? "" : "… ", value.before, mark, value.after, value.ends ? "" : " …");
  mark.focus({ preventScroll: true });
  mark.scrollIntoView();
}

// ---- clicks and keys

function listen() {
  window.addEventListener("hashchange", () => location.hash.startsWith("#token=") ? begin() : route());
  $("sign-in").addEventListener("submit", (event) => {
    event.preventDefault();
    doing(async () => {
      await ask("POST", "/page/session", { token: $("token").value.trim() });
      $("token").value = "";
      await begin();
    });
  });
  $("sign-out").addEventListener("click", () => doing(async () => {
    await ask("DELETE", "/page/session");
    show("sign-in");
  }));
  $("choose").addEventListener("change", () => {
    addFiles([...$("choose").files]);
    $("choose").value = "";
  });
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name === "drop" && !$("view-home").hidden) addFiles([...event.dataTransfer.files]);
    });
  }
  $("add-paste").addEventListener("click", () => {
    if (!$("paste").value.trim()) return;
    addFiles([new File([$("paste").value], "pasted text.txt", { type: "text/plain" })]);
    $("paste").value = "";
    $("questions").focus();
  });
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); doing(() => beginReads()); });
  $("questions").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  let timer = 0;
  $("find").addEventListener("submit", (event) => event.preventDefault());
  $("find-text").addEventListener("input", () => {
    clearTimeout(timer);
    state.query = $("find-text").value.trim();
    timer = setTimeout(() => doing(() => loadReads()), SOON);
  });
  $("more").addEventListener("click", () => doing(() => loadReads(true)));
  for (const name of ["pause", "continue", "stop"]) {
    $(name).addEventListener("click", () => doing(() => ask("POST", `${place(state.read.id)}/${name}`)));
  }
  $("ask-now").addEventListener("click", () => {
    $("now-question").value = state.read.value?.question || "";
    $("now").showModal();
    $("now-question").select();
  });
  $("now-cancel").addEventListener("click", () => $("now").close());
  $("now-form").addEventListener("submit", (event) => {
    event.preventDefault();
    $("now").close();
    doing(() => askNow($("now-question").value.trim()));
  });
  for (const [name, up] of [["thumb-up", true], ["thumb-down", false]]) {
    $(name).addEventListener("click", () => doing(async () => {
      await ask("POST", `${place(state.read.id)}/thumbs`, { up });
      drawThumbs(Number(up));
    }));
  }
  $("sources").addEventListener("toggle", () => doing(() => loadSources()));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select")) return;
    const reading = !$("view-read").hidden && state.read?.value;
    const keys = {
      p: () => reading && (atWork() ? $("pause") : $("continue")).click(),
      n: () => reading && $("ask-now").click(),
      "/": () => !$("view-home").hidden && $("find-text").focus(),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

listen();
begin();
