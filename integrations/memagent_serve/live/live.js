// The live page. All texts are shown as text nodes, so markup in them is never parsed.
const $ = (id) => document.getElementById(id);
const SEARCH_DELAY_MS = 250;    // from the last key press to the search
const PAGE_SIZE = 50;           // reads that are loaded at once
const MAX_STEPS = 200;          // steps that are shown
const MAX_CONTEXT = 160;        // characters of unchanged memory that are shown next to a change
const VIEWS = ["sign-in", "home", "read", "document"];
const ACTIVE_STATES = new Set(["running", "waiting"]);
const TRUNK = "";
const state = { files: [], reads: new Map(), total: 0, read: null, source: null, query: "", editing: null };

// ---- helpers

function makeElement(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}
const formatNumber = (value) => value.toLocaleString("en");
const formatCount = (count, one, many = `${one}s`) => `${formatNumber(count)} ${count === 1 ? one : many}`;
const shorten = (text, maxLength) => text.length <= maxLength ? text : `${text.slice(0, maxLength - 1)}…`;
const formatPercent = (fraction) => fraction === null ? "" : `${Math.floor(fraction * 100)} %`;

function showNotice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}
/** Send a request to the server and return its JSON. Throws an Error with the server's message. */
async function sendRequest(method, path, body) {
  const headers = { "X-Memagent-Page": "1" };
  if (body !== undefined && !(body instanceof FormData)) headers["Content-Type"] = "application/json";
  const requestBody = body === undefined || body instanceof FormData ? body : JSON.stringify(body);
  const reply = await fetch(path, { method, headers, body: requestBody });
  if (reply.ok) return reply.status === 204 ? null : reply.json();
  const failure = await reply.json().catch(() => null);
  const error = new Error(failure?.error?.message || `The server answered ${reply.status}.`);
  error.status = reply.status;
  if (reply.status === 401 && path !== "/page/session") show("sign-in");
  throw error;
}
/** Run an action of the page, and show its error if it fails. */
async function runAction(action) {
  try {
    showNotice("");
    return await action();
  } catch (error) {
    showNotice(error.message);
    return undefined;
  }
}
function makeDiffNodes(parts) {
  return parts.map(([op, text], index) => {
    if (op === "insert") return makeElement("ins", {}, text);
    if (op === "delete") return makeElement("del", {}, text);
    if (text.length <= 2 * MAX_CONTEXT) return makeElement("span", { class: "kept" }, text);
    const beginning = index ? text.slice(0, MAX_CONTEXT) : "", ending = index < parts.length - 1 ? text.slice(-MAX_CONTEXT) : "";
    return makeElement("span", { class: "kept" }, beginning, makeElement("span", { class: "elided" }, "⋯"), ending);
  });
}
const getReadPath = (id) => `/page/reads/${encodeURIComponent(id)}`;

// ---- views

function show(view) {
  for (const name of VIEWS) $(`view-${name}`).hidden = name !== view;
  $("sign-out").hidden = view === "sign-in";
  if (view === "sign-in") {
    follow(null);
    $("token").focus();
  }
}
async function route() {
  const [viewName, ...parameters] = location.hash.slice(1).split("/").map((part) => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  if (viewName === "main" && state.source) return;
  showNotice("");
  document.title = "memagent";
  state.read = null;
  if (viewName === "read" && parameters[0]) openRead(parameters[0]);
  else if (viewName === "document" && parameters[2]) await runAction(() => openDocument(parameters[0], parameters[1], parameters[2]));
  else await openHome();
}
async function startPage() {
  if (location.hash.startsWith("#token=")) {
    const token = location.hash.slice("#token=".length);
    history.replaceState(null, "", "/");
    await runAction(() => sendRequest("POST", "/page/session", { token }));
  }
  try {
    const session = await sendRequest("GET", "/page/session");
    $("who").textContent = session.owner === "local" ? session.model : `${session.owner}, ${session.model}`;
  } catch (error) {
    if (error.status === 401) return show("sign-in");
    await route();
    return showNotice(error.message);
  }
  await route();
}

// ---- events from the server

function follow(runId) {
  state.source?.close();
  state.source = null;
  if ($("view-sign-in").hidden === false) return;
  const source = state.source = new EventSource(runId ? `/page/events?run=${encodeURIComponent(runId)}` : "/page/events");
  const onEvent = (name, handler) => source.addEventListener(name, (event) => { if (source === state.source) handler(JSON.parse(event.data)); });
  onEvent("reads", (reads) => reads.forEach(updateRead));
  onEvent("snapshot", (value) => showSnapshot(value));
  onEvent("update", (value) => showUpdate(value));
  onEvent("state", (value) => showState(value));
  onEvent("gone", (message) => showNotice(message));
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED && source === state.source) setTimeout(() => startPage(), 3000);
  });
}

// ---- home: documents, questions, reads

async function openHome() {
  show("home");
  follow(null);
  await runAction(() => loadReads());
}
async function addFiles(files) {
  for (const file of files) {
    const entry = { name: file.name, note: "uploading", id: null };
    state.files.push(entry);
    drawFiles();
    const form = new FormData();
    form.append("file", file, file.name);
    try {
      const upload = await sendRequest("POST", "/page/files", form);
      entry.id = upload.id;
      entry.note = upload.text_bytes === null ? "" : `${formatNumber(Math.ceil(upload.text_bytes / 1024))} KiB of text`;
    } catch (error) {
      entry.note = error.message;
      entry.bad = true;
    }
    drawFiles();
  }
}
function drawFiles() {
  $("files").replaceChildren(...state.files.map((file, index) => makeElement("li", {},
    makeElement("span", {}, file.name), makeElement("span", { class: file.bad ? "bad" : "hint" }, file.note),
    makeElement("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, onclick: () => {
      state.files.splice(index, 1);
      drawFiles();
      $("choose").focus();
    } }, "Remove"))));
}
async function startReads() {
  const questions = $("questions").value.split("\n").map((line) => line.trim()).filter((line) => line);
  const files = state.files.filter((file) => file.id).map((file) => file.id);
  if (state.files.some((file) => !file.id && !file.bad)) throw new Error("A document is still being uploaded.");
  if (!files.length) throw new Error("Choose a document, drop one, or paste a text.");
  $("ask-status").textContent = "Starting.";
  $("begin").disabled = true;
  try {
    const { reads } = await sendRequest("POST", "/page/reads", { files, questions, read_again: $("read_again").checked });
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
  const page = await sendRequest("GET", `/page/reads?${new URLSearchParams({ q: query, newest: PAGE_SIZE, skip })}`);
  if (query !== state.query) return;
  if (!more) state.reads.clear();
  page.reads.forEach((read) => state.reads.set(read.id, read));
  state.total = page.total;
  drawReads();
}
function drawReads() {
  const rows = [...state.reads.values()];
  const oldRows = new Map([...$("reads").children].map((row) => [row.dataset.id, row]));
  $("reads").replaceChildren(...rows.map((read) => {
    const row = oldRows.get(read.id);
    return row && row.dataset.drawn === getRowKey(read) ? row : makeReadRow(read);
  }));
  $("found").textContent = formatCount(state.total, "read");
  $("more").hidden = rows.length >= state.total;
}
const getRowKey = (read) => `${read.state} ${read.progress} ${read.edited} ${read.answer}`;
function makeReadRow(read) {
  const beganAt = new Date(read.began * 1000).toLocaleString();
  return makeElement("li", { "data-id": read.id, "data-drawn": getRowKey(read) },
    makeElement("div", {}, makeElement("a", { href: `#read/${encodeURIComponent(read.id)}` }, shorten(read.question, 300)),
      read.answer ? makeElement("p", { class: "row-answer" }, shorten(read.answer, 300)) : null,
      makeElement("div", { class: "about" }, `${read.document} · ${beganAt}${read.edited ? " · edited by a person" : ""}`)),
    makeElement("span", { class: `state state-${read.state}` }, `${read.state} ${ACTIVE_STATES.has(read.state) ? formatPercent(read.progress) : ""}`.trim()));
}
function updateRead(read) {
  if ($("view-home").hidden) return;
  if (state.reads.has(read.id)) {
    state.reads.set(read.id, read);
    const row = [...$("reads").children].find((item) => item.dataset.id === read.id);
    if (row && !row.contains(document.activeElement)) row.replaceWith(makeReadRow(read));
    else if (row) row.querySelector(".state").replaceWith(makeReadRow(read).querySelector(".state"));
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
  $("run-page").href = `${getReadPath(id)}/page`;
  show("read");
  follow(id);
  $("main").focus();
}
function showSnapshot({ updates, earlier }) {
  const read = state.read;
  read.branches.clear();
  state.editing = null;
  $("steps").replaceChildren();
  updates.forEach((update) => addStep(update));
  $("earlier").textContent = earlier ? `${formatCount(earlier, "earlier step")} on the run page` : "";
  drawBranches();
}
function showUpdate(update) {
  addStep(update);
  drawBranches();
  drawState();
}
function addStep(update) {
  const read = state.read;
  read.before.set(update.branch, new Set((read.branches.get(update.branch)?.memory || "").split("\n")));
  read.branches.set(update.branch, update);
  read.progress = update.progress;
  const tokens = update.tokens ? `${formatNumber(update.tokens)} tokens read` : "";
  $("steps").prepend(makeElement("li", { class: update.diff.length || update.events.length ? "step" : "step dull" },
    makeElement("div", { class: "step-head" }, makeElement("h3", {}, update.name[0].toUpperCase() + update.name.slice(1)),
      makeElement("span", {}, update.diff.length ? "" : "unchanged"), makeElement("span", {}, tokens), makeElement("span", {}, `${update.seconds} s`)),
    update.events.length ? makeElement("div", { class: "events" }, ...update.events.map((event) =>
      makeElement("span", { class: "event" }, `${event.kind}${event.rule ? `, ${event.rule}` : ""}${event.detail ? `: ${event.detail}` : ""}`))) : null,
    update.diff.length ? makeElement("div", { class: "body" }, ...makeDiffNodes(update.diff)) : null));
  while ($("steps").childElementCount > MAX_STEPS) $("steps").lastElementChild.remove();
}
function showState(value) {
  const read = state.read;
  read.value = value;
  $("read-question").textContent = value.question;
  document.title = shorten(value.question, 60);
  const details = [value.document, value.model, value.strategy, value.edited ? "edited by a person" : ""];
  $("read-run").textContent = details.filter((detail) => detail).join(" · ");
  const isFinished = value.answer !== null && value.state === "finished";
  $("answer-box").hidden = !isFinished;
  $("read-answer").textContent = isFinished ? value.answer : "";
  drawThumbs(value.thumb);
  drawState();
  drawBranches();
  if (isFinished) $("sources").open = true;
  loadSources();
}
function drawThumbs(thumb) {
  $("thumb-up").setAttribute("aria-pressed", String(thumb === 1));
  $("thumb-down").setAttribute("aria-pressed", String(thumb === 0));
}
const isActive = () => ACTIVE_STATES.has(state.read?.value?.state);
function drawState() {
  const { value, progress } = state.read;
  if (!value) return;
  const fraction = value.state === "finished" ? 1 : progress ?? value.progress;
  if (fraction === null || fraction === undefined) $("read-progress").removeAttribute("value");
  else $("read-progress").value = fraction;
  const label = { waiting: "waiting for other reads", running: "reading" }[value.state] || value.state;
  $("read-state").textContent = [label, fraction ? formatPercent(fraction) : "", value.error || ""].filter((text) => text).join(" · ");
  const focusedElement = document.activeElement;
  $("pause").hidden = $("stop").hidden = !isActive();
  $("continue").hidden = isActive() || value.state === "finished";
  if (focusedElement === $("pause") && $("pause").hidden) $("continue").focus();
  if (focusedElement === $("continue") && $("continue").hidden && isActive()) $("pause").focus();
  $("memory-hint").textContent = isActive() ? "Pause to edit a line." : "";
}
function drawBranches() {
  const read = state.read;
  if (state.editing) return;
  const key = document.activeElement?.dataset?.key;
  const names = [...read.branches.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  $("branches").replaceChildren(...names.map((branch) => makeBranchNode(branch, names.length > 1)));
  if (key) [...$("branches").querySelectorAll("button")].find((button) => button.dataset.key === key)?.focus();
}
function makeBranchNode(branch, isOneOfSeveral) {
  const update = state.read.branches.get(branch), linesBefore = state.read.before.get(branch) || new Set();
  const lines = update.memory.split("\n");
  const items = lines.map((line, index) => line.trim() ? makeLineNode(update, lines, line, index, !linesBefore.has(line)) : null);
  const title = branch === TRUNK ? "Trunk" : `Branch ${branch}`;
  const lastStep = update.chunk === null ? "the merge" : `chunk ${update.chunk + 1}`;
  return makeElement("article", { class: "branch", "aria-label": `Memory, ${title}` },
    makeElement("h3", {}, isOneOfSeveral ? `${title}, after ${lastStep}` : `after ${lastStep}`),
    items.some((item) => item) ? makeElement("ol", { class: "lines" }, ...items) : makeElement("p", { class: "hint" }, "empty"));
}
function makeLineNode(update, lines, line, index, isNew) {
  const shortLine = shorten(line, 60), key = (action) => `${action}/${update.branch}/${index}`;
  const isEditable = update.chunk !== null && !isActive();
  const tooltip = isEditable ? null : update.chunk === null ? "A merge cannot be edited" : "Pause to edit";
  const item = makeElement("li", { class: `line${isNew ? " new" : ""}` }, makeElement("p", {}, line),
    makeElement("div", { class: "tools" },
      makeElement("button", { type: "button", "data-key": key("edit"), "aria-label": `Edit: ${shortLine}`, title: tooltip, disabled: !isEditable,
        onclick: () => editLine(item, update, lines, index) }, "Edit"),
      makeElement("button", { type: "button", "data-key": key("delete"), "aria-label": `Delete: ${shortLine}`, title: tooltip, disabled: !isEditable,
        onclick: () => runAction(() => replaceMemory(update, lines.filter((_, other) => other !== index))) }, "Delete")));
  return item;
}
function editLine(item, update, lines, index) {
  state.editing = item;
  const textArea = makeElement("textarea", { rows: 3, "aria-label": "The line" });
  textArea.value = lines[index];
  const close = () => { state.editing = null; drawBranches(); };
  const save = () => runAction(async () => {
    await replaceMemory(update, lines.map((line, other) => other === index ? textArea.value : line));
  });
  textArea.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
  });
  item.replaceChildren(textArea, makeElement("div", { class: "group" },
    makeElement("button", { type: "button", class: "primary", onclick: save }, "Save"),
    makeElement("button", { type: "button", onclick: close }, "Cancel")));
  textArea.focus();
}
async function replaceMemory(update, lines) {
  const text = lines.join("\n");
  await sendRequest("POST", `${getReadPath(state.read.id)}/memory`, { chunk: update.chunk, branch: update.branch, before: update.memory, text });
  state.editing = null;
  $("continue").focus();
}
async function loadSources() {
  const read = state.read;
  if (!$("sources").open || !read || isActive()) return;
  const { lines } = await sendRequest("GET", `${getReadPath(read.id)}/sources`);
  if (read !== state.read) return;
  $("source-lines").replaceChildren(...lines.map((line) => makeElement("li", { class: "line" }, makeElement("p", {}, line.line),
    makeElement("div", { class: "line-meta" }, `${line.edited ? "edited by a person at" : "from"} ${line.from}`),
    makeElement("ul", { class: "quotes" }, ...line.quotes.map((quote) => makeElement("li", {}, `“${shorten(quote.text, 220)}” `,
      makeElement("a", { href: `#document/${encodeURIComponent(read.id)}/${quote.start}/${quote.end}` }, quote.section || "in the document")))))));
}
async function askNow(question) {
  const read = state.read;
  const { answer } = await sendRequest("POST", `${getReadPath(read.id)}/answer`, { question });
  if (read !== state.read) return;
  const lastUpdate = [...read.branches.values()].pop();
  $("answers").prepend(makeElement("li", {}, makeElement("p", { class: "hint" }, `${question} · ${lastUpdate ? `after ${lastUpdate.name}` : "before the first chunk"}`), answer || "no answer"));
}

// ---- a passage of a document

async function openDocument(id, start, end) {
  show("document");
  follow(null);
  const value = await sendRequest("GET", `${getReadPath(id)}/passage?${new URLSearchParams({ start, end })}`);
  $("document-place").textContent = `characters ${formatNumber(value.start)}–${formatNumber(value.end)}`;
  $("document-title").textContent = value.document;
  const mark = makeElement("mark", { tabindex: "-1" }, value.passage);
  $("passage").replaceChildren(value.begins ? "" : "… ", value.before, mark, value.after, value.ends ? "" : " …");
  mark.focus({ preventScroll: true });
  mark.scrollIntoView();
}

// ---- clicks and keys

function addListeners() {
  window.addEventListener("hashchange", () => location.hash.startsWith("#token=") ? startPage() : route());
  $("sign-in").addEventListener("submit", (event) => {
    event.preventDefault();
    runAction(async () => {
      await sendRequest("POST", "/page/session", { token: $("token").value.trim() });
      $("token").value = "";
      await startPage();
    });
  });
  $("sign-out").addEventListener("click", () => runAction(async () => {
    await sendRequest("DELETE", "/page/session");
    show("sign-in");
  }));
  $("choose").addEventListener("change", () => {
    addFiles([...$("choose").files]);
    $("choose").value = "";
  });
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
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
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); runAction(() => startReads()); });
  $("questions").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  let timer = 0;
  $("find").addEventListener("submit", (event) => event.preventDefault());
  $("find-text").addEventListener("input", () => {
    clearTimeout(timer);
    state.query = $("find-text").value.trim();
    timer = setTimeout(() => runAction(() => loadReads()), SEARCH_DELAY_MS);
  });
  $("more").addEventListener("click", () => runAction(() => loadReads(true)));
  for (const name of ["pause", "continue", "stop"]) {
    $(name).addEventListener("click", () => runAction(() => sendRequest("POST", `${getReadPath(state.read.id)}/${name}`)));
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
    runAction(() => askNow($("now-question").value.trim()));
  });
  for (const [name, up] of [["thumb-up", true], ["thumb-down", false]]) {
    $(name).addEventListener("click", () => runAction(async () => {
      await sendRequest("POST", `${getReadPath(state.read.id)}/thumbs`, { up });
      drawThumbs(Number(up));
    }));
  }
  $("sources").addEventListener("toggle", () => runAction(() => loadSources()));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select")) return;
    const reading = !$("view-read").hidden && state.read?.value;
    const keys = {
      p: () => reading && [$("pause"), $("continue")].find((button) => !button.hidden)?.click(),
      n: () => reading && $("ask-now").click(),
      "/": () => !$("view-home").hidden && $("find-text").focus(),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

addListeners();
startPage();
