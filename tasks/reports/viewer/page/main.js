/** The page: what was chosen, which is the address, and everything that is shown of it. */

import { readAddress, writeAddress } from "./address.js";
import { drawCurve } from "./chart.js";
import { asStyle } from "./colours.js";
import { byId, counted, element, measured, plural } from "./dom.js";
import { showBenchmarks, showFields, showLegend } from "./fields.js";
import { follow, forget, remembered } from "./following.js";
import { Grid } from "./grid.js";
import { labelOf, loadBenchmark, progressText, titleOf } from "./loading.js";
import { mcnemar } from "./mcnemar.js";
import { sayEmpty, sayLoading, sayMissing, sayProblem } from "./messages.js";
import { CUT, FILTERS, LOST, MISSING, WITHHELD, WON, meanOf } from "./model.js";
import { pairView, turned } from "./pair.js";
import { questionView, scoreWord } from "./question.js";
import { rowTable } from "./rows.js";
import { ViewError, openSource } from "./source.js";

const TYPED_MILLISECONDS = 250;
const READ_MILLISECONDS = 1500; // after which what was read since is drawn
const NOTES = 3; // that are said where no question can be opened
const LEFT = 50; // room for the range of a curve without a grid below it
const narrow = matchMedia("(max-width: 999px)");
const source = openSource();
let index = null;
let chosen = readAddress(location.hash);
let loaded = null; // of one benchmark and metric
let now = null; // everything that follows from what was chosen
let search = { text: "", hits: null, stop: null, complete: true };
let loading = null;
let turn = 0;
let next = null; // time at which more is read
let tableBegins = null; // first row of the table, null for the picture
let inWindow = { begin: 0, end: 0, left: 0, columnWidth: 1, scrollLeft: 0 };

const grid = new Grid(
  { frame: byId("frame"), scroller: byId("scroller"), spacer: byId("spacer"), canvas: byId("canvas"), tip: byId("tip") },
  { moved: sayCell, chosen: open, zoomed: showZoom, laid: followGrid, described: describe },
);

/** Changes what is chosen, and with it the address; `step` is a step that the browser's back button takes back. */
function choose(patch, { step = false } = {}) {
  chosen = { ...chosen, ...patch };
  history[step ? "pushState" : "replaceState"](null, "", writeAddress(chosen));
  show();
}

async function show({ anew = false } = {}) {
  const mine = ++turn;
  clearTimeout(next);
  try {
    const benchmark = index.benchmarks.find(({ key }) => key === chosen.b) ?? index.benchmarks[0];
    if (!benchmark) return sayEmpty("Nothing to open yet", "No record was found here. Evaluate a checkpoint, or open the folder that has the records: assay view FOLDER.");
    loading?.abort();
    loading = new AbortController();
    showBenchmarks(index, benchmark);
    if (loaded?.key !== benchmark.key) sayLoading();
    const waited = (progress) => mine === turn && !anew && sayEmpty("Loading questions", progressText(progress), { progress });
    const found = await loadBenchmark(source, benchmark, chosen.m, { kept: anew ? null : loaded, signal: loading.signal, waited });
    if (mine !== turn) return undefined;
    byId("problem").hidden = true;
    loaded = found;
    now = follow({ benchmark, chosen, loaded, matching: search.hits });
    if (chosen.b && chosen.b !== benchmark.key) now.missing.push(`the benchmark ${chosen.b}`);
    if (now.missing.length) sayMissing(now.missing);
    showFields({ chosen, loaded, now });
    showGrid();
    if (loaded?.asOf) next = setTimeout(showMore, READ_MILLISECONDS);
    await showPane();
  } catch (error) {
    if (mine === turn && error.name !== "AbortError") sayProblem(error);
  }
  return undefined;
}

/** Draws what was read since, and leaves the focus where it was. */
async function showMore() {
  const focused = document.activeElement;
  const around = focused?.closest("#table, #question-pane, #pair-pane");
  const alike = () => [...around.querySelectorAll(focused.localName)];
  const place = around ? alike().indexOf(focused) : -1;
  await show({ anew: true });
  if (place >= 0 && !focused.isConnected && document.activeElement === document.body) alike()[place]?.focus({ preventScroll: true });
}

function showGrid() {
  const { checkpoints, columns, rows, found, table, names, a, b, question, unread } = now;
  byId("tools").hidden = byId("above").hidden = byId("legend").hidden = !loaded;
  byId("frame").hidden = !loaded;
  if (!loaded) {
    const notes = [...new Set(columns.map((column) => checkpoints[column].note).filter(Boolean))];
    const more = notes.length > NOTES && `And ${plural(notes.length - NOTES, "other reason")}.`;
    sayEmpty("No questions to open", ["No question of this benchmark has a score that can be read.", ...notes.slice(0, NOTES), more].filter(Boolean).join("\n"));
    byId("picture").hidden = false;
    const width = byId("curve").clientWidth;
    return followGrid({ left: LEFT, columnWidth: (width - LEFT) / columns.length, scrollLeft: 0, width, begin: 0, end: 0 });
  }
  if (search.text !== chosen.text && !(unread && chosen.text)) startSearch();
  const searching = chosen.text && (search.hits === null || search.text !== chosen.text);
  const of = `${plural(table.questions, "question")} × ${plural(columns.length, "checkpoint")}`;
  const waits = unread > 0 && [
    `, over the ${counted(columns.length - unread)} read so far `,
    element("progress", { value: columns.length - unread, max: columns.length, "aria-label": "Checkpoints read" }),
  ];
  byId("status").replaceChildren(...[searching
    ? (unread ? `Searching when all are read: ${of}` : "Searching …")
    : (rows.length === table.questions ? of : `${counted(rows.length)} of ${of}`) + (chosen.text && !search.complete ? ", the search stopped early" : ""), waits].flat().filter(Boolean));
  remembered("legend", [table, found], () => showLegend(now));
  if (!rows.length && !searching) {
    const all = element("button", { type: "button", click: () => choose({ filter: "", text: "" }) }, "Show all questions");
    return sayEmpty("No question is left", [FILTERS[chosen.filter], chosen.text && `with “${chosen.text}” in it`].filter(Boolean).join(", "), { more: all });
  }
  byId("empty").hidden = true;
  byId("picture").hidden = tableBegins !== null;
  byId("table").hidden = tableBegins === null;
  byId("as-table").setAttribute("aria-pressed", String(tableBegins !== null));
  if (tableBegins !== null) {
    const told = { opened: (row) => open(row, null, false), turned: (to) => { tableBegins = Math.max(0, to); showGrid(); } };
    byId("table").replaceChildren(...rowTable({ rows, begin: tableBegins, ids: names, found, table, checkpoints, columns, a, b, scoreText }, told));
    return undefined;
  }
  const shown = [table, rows, columns, names];
  remembered("shown", shown, () => grid.show({ table, rows, columns, ids: names, of: `${loaded.key} ${now.metric}` }));
  remembered("marked", [...shown, a, b, question], () => grid.mark({ a, b, question }));
  return undefined;
}

/** Where the grid is, drawn into the curve above it. */
function followGrid({ left, columnWidth, scrollLeft, width, begin, end }) {
  inWindow = { begin, end, left, columnWidth, scrollLeft };
  const { checkpoints, columns, metric, a, b } = now;
  remembered("curve", [checkpoints, columns, metric, a, b, left, columnWidth, scrollLeft, width], () => {
    const marked = [[columns.indexOf(a), "a"], [columns.indexOf(b), "b"]].filter(([place]) => place >= 0);
    drawCurve(byId("curve"), {
      checkpoints: columns.map((column) => ({ ...checkpoints[column], score: checkpoints[column].scores[metric] ?? null })),
      x: (place) => left + (place + 0.5) * columnWidth - scrollLeft,
      left, width, height: byId("curve").clientHeight, columnWidth, marked,
    });
  });
  if (!performance.getEntriesByName("first picture").length) performance.mark("first picture");
}

function showZoom(smaller, larger) {
  byId("smaller").disabled = byId("fit").disabled = !smaller;
  byId("larger").disabled = !larger;
}

const scoreText = (byte) => scoreWord(now.table, byte);

/** A cell in words, for the tip; of rows that share a line of pixels their mean. */
function describe([begin, end], place) {
  const { rows, names, columns, checkpoints, table } = now;
  const together = end - begin > 1;
  const lines = [element("b", {}, together ? `${plural(end - begin, "question")} from ${names[rows[begin]]} on` : names[rows[begin]])];
  if (place === null) return lines;
  const checkpoint = checkpoints[columns[place]];
  const byte = meanOf(table.column(columns[place]), rows, begin, end);
  const mean = together && byte !== MISSING ? `mean ${measured(table.value(byte))}` : scoreText(byte);
  lines.push(element("span", {}, `${titleOf(checkpoint, now.runs.length > 1)}: ${mean}`));
  const marks = together ? 0 : table.marks(columns[place])[rows[begin]];
  if (marks & CUT) lines.push(element("span", {}, "cut at the length limit"));
  if (marks & WITHHELD) lines.push(element("span", {}, "withheld or left out"));
  if (checkpoint.unread) lines.push(element("span", {}, "not read yet"));
  if (!checkpoint.samples) lines.push(element("span", {}, checkpoint.note ?? "no samples were kept"));
  return lines;
}

function sayCell(question, column) {
  const { names, checkpoints, table } = now;
  byId("cursor-said").textContent = `${names[question]}, ${checkpoints[column].name}: ${scoreText(table.column(column)[question])}`;
}

/** Opens a question; the checkpoint of the cell becomes B, or A with the shift key. */
function open(question, column, asA) {
  choose({ q: now.names[question], view: "question", ...marked(column, asA) }, { step: chosen.q === "" || narrow.matches });
  if (narrow.matches) byId("question-pane").focus(); // what was chosen from is no longer there
}

/** Makes a checkpoint B, or A; the other of both stays what it is, and one without answers is neither. */
function marked(column, asA) {
  const other = asA ? now.b : now.a;
  if (column === null || column === undefined || column === other || !now.checkpoints[column].samples) return {};
  return { [asA ? "a" : "c"]: labelOf(now.checkpoints[column]) };
}

function viewOf() {
  const view = ["grid", "question", "pair"].includes(chosen.view) ? chosen.view : chosen.q ? "question" : "grid";
  return view === "grid" && !narrow.matches ? "pair" : view;
}

async function showPane() {
  const view = viewOf();
  document.body.dataset.view = view;
  for (const name of ["grid", "question", "pair"]) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    if (name !== "grid") byId(`${name}-pane`).hidden = name !== view;
  }
  document.querySelector("main").classList.toggle("alone", !loaded);
  if (!loaded) return undefined;
  if (view === "pair") return showPair();
  return view === "question" ? showQuestion() : undefined;
}

async function showPair() {
  const mine = turn;
  const pane = byId("pair-pane");
  const { a, b, checkpoints, pairs, rows, names, table, metric } = now;
  if (a === null || a === b) return pane.replaceChildren(element("p", { class: "muted" }, "Choose two different checkpoints, A and B."));
  const nameOf = (first, second) => `${loaded.key}/pairs/${loaded.metric}-${first}-${second}.json`;
  pane.classList.add("busy");
  try {
    const pair = now.unread ? { reason: "not all samples are read yet" } : (await remembered("pair", [nameOf(a, b)], async () =>
      (await source.json(nameOf(a, b))) ?? (source.embedded ? turned(await source.json(nameOf(b, a))) : null))) ?? ownTest();
    if (mine !== turn) return undefined;
    const shown = { names: [a, b].map((column) => titleOf(checkpoints[column], now.runs.length > 1)), pair, counts: pairs.counts, questions: table.questions, filter: chosen.filter, rows, ids: names, metric };
    pane.replaceChildren(pairView(shown, {
      filtered: (filter) => choose({ filter, view: narrow.matches && filter ? "pair" : chosen.view }),
      opened: (question) => open(question, null, false),
    }));
  } catch (error) {
    forget("pair");
    if (mine === turn) sayProblem(error);
  } finally {
    if (mine === turn) pane.classList.remove("busy");
  }
  return undefined;
}

/** The test of a pair that the source has none of, where questions are right or wrong and stand alone. */
function ownTest() {
  const { clusters, parts } = loaded.questions;
  const { checkpoints, metric, a, b, pairs: { counts } } = now;
  const alone = parts.length < 2 && clusters.every((cluster) => cluster === null);
  if (!alone || !now.table.isBinary) return null;
  if (![a, b].every((column) => checkpoints[column].scores[metric])) return { reason: "it has no published value" };
  return {
    ...mcnemar(counts[WON], counts[LOST], counts.reduce((sum, count) => sum + count, 0)),
    note: "This file does not say if more than the weights differs between these two, as engine, harness or data may.",
  };
}

async function showQuestion() {
  const mine = turn;
  const pane = byId("question-pane");
  const { question, rows, names, checkpoints, columns, found, table, a, b } = now;
  if (question === null) {
    const says = chosen.q ? `This benchmark has no question called ${chosen.q}${now.unread ? " among what is read so far" : ""}.` : "Choose a question: click a cell of the grid, or press Enter on it.";
    return pane.replaceChildren(element("p", { class: "muted" }, says));
  }
  pane.classList.add("busy");
  try {
    const part = await source.part(loaded.key, Math.floor(question / loaded.questions.questions_per_part), { asOf: loaded.asOf });
    if (mine !== turn) return undefined;
    const asked = part.questions[question - part.first];
    const [first, second] = [a, b].map((column) => (column === null ? undefined : asked.answers[column]?.[0]?.output));
    const moved = pane.dataset.question !== names[question];
    const shown = {
      question, id: names[question], asked, metric: now.metric, checkpoints, columns, found, table, a, b, scoreText,
      colourOf: (byte) => asStyle(grid.colours, byte), textsDiffer: first !== second, width: Math.max(280, pane.clientWidth - 38),
    };
    const view = questionView(shown, { chosen: (column, asA) => choose(marked(column, asA)) });
    const focus = document.activeElement?.closest(".strip, .walk") && pane.contains(document.activeElement) ? document.activeElement.textContent : null;
    const unfolded = pane.querySelector("details")?.open && view.querySelector("details");
    pane.replaceChildren(walk(rows.indexOf(question)), view);
    if (!moved && unfolded) view.querySelector("details").open = true;
    pane.dataset.question = names[question];
    if (focus) [...pane.querySelectorAll(".walk button")].find((button) => button.textContent === focus)?.focus();
    else if (focus === "") pane.querySelector(".strip button.b")?.focus();
    if (moved) {
      pane.scrollTop = 0;
      const row = rows.indexOf(question);
      if (row >= 0 && tableBegins === null && grid.rowHeight) {
        grid.cursor.row = row;
        grid.reveal(row);
      }
    }
  } catch (error) {
    if (mine === turn) sayProblem(error);
  } finally {
    if (mine === turn) pane.classList.remove("busy");
  }
  return undefined;
}

/** Buttons to the questions before and after. */
function walk(row) {
  const button = (text, by, enabled) => element("button", { type: "button", disabled: !enabled, click: () => step(by) }, text);
  return element("div", { class: "walk" },
    button("Previous", -1, row > 0),
    button("Next", 1, row < now.rows.length - 1),
    element("p", {}, row < 0 ? "not among those shown" : `${counted(row + 1)} of ${counted(now.rows.length)}`));
}

function step(by) {
  if (!now?.rows?.length) return;
  const row = now.question === null ? -1 : now.rows.indexOf(now.question);
  const next = row < 0 ? 0 : Math.max(0, Math.min(now.rows.length - 1, row + by));
  choose({ q: now.names[now.rows[next]], view: "question" });
}

function stepCheckpoint(by) {
  if (!now?.answered?.length) return;
  const others = now.answered.filter((column) => column !== now.a);
  choose(marked(others[others.indexOf(now.b) + by], false));
}

function startSearch() {
  search.stop?.abort();
  search = { text: chosen.text, hits: null, stop: new AbortController(), complete: true };
  if (!chosen.text) return;
  const mine = search;
  const parts = Math.ceil(loaded.table.questions / loaded.questions.questions_per_part);
  source
    .search(loaded.key, mine.text, {
      parts, signal: mine.stop.signal,
      found: (hits, complete) => {
        if (mine !== search) return;
        Object.assign(mine, { hits: new Set(hits), complete });
        show();
      },
    })
    .catch((error) => mine === search && error.name !== "AbortError" && sayProblem(error));
}

function listen() {
  const changed = (id, patch) => byId(id).addEventListener("change", () => choose(patch(byId(id).value), { step: true }));
  changed("benchmark", (b) => ({ b, m: "", run: "", a: "", c: "", filter: "", text: "", q: "", view: narrow.matches ? "grid" : "" }));
  changed("metric", (m) => ({ m }));
  changed("run", (run) => ({ run, a: "", c: "" }));
  changed("filter", (filter) => ({ filter }));
  changed("sort", (sort) => ({ sort }));
  changed("a", (a) => ({ a }));
  changed("c", (c) => ({ c }));
  byId("reverse").addEventListener("click", () => {
    const sort = chosen.sort || "learned";
    choose({ sort: sort.startsWith("-") ? sort.slice(1) : `-${sort}` });
  });
  byId("swap").addEventListener("click", () => choose({ a: byId("c").value, c: byId("a").value }));
  let typed = null;
  byId("text").addEventListener("input", () => {
    clearTimeout(typed);
    typed = setTimeout(() => choose({ text: byId("text").value.trim() }), TYPED_MILLISECONDS);
  });
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  byId("smaller").addEventListener("click", () => grid.zoom(-1));
  byId("larger").addEventListener("click", () => grid.zoom(1));
  byId("fit").addEventListener("click", () => grid.fit());
  byId("as-table").addEventListener("click", () => {
    tableBegins = tableBegins === null ? inWindow.begin : null;
    showGrid();
  });
  byId("curve").addEventListener("click", (event) => {
    const x = event.clientX - byId("curve").getBoundingClientRect().left - inWindow.left + inWindow.scrollLeft;
    choose(marked(now.columns[Math.floor(x / inWindow.columnWidth)], event.shiftKey));
  });
  for (const view of ["grid", "question", "pair"]) byId(`tab-${view}`).addEventListener("click", () => choose({ view }));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tabs = ["grid", "question", "pair"].filter((view) => view !== "grid" || narrow.matches);
    if (!by) return;
    const view = tabs[(tabs.indexOf(viewOf()) + by + tabs.length) % tabs.length];
    choose({ view });
    byId(`tab-${view}`).focus();
  });
  byId("copy").addEventListener("click", copyLink);
  byId("keys").addEventListener("click", () => byId("help").showModal());
  document.addEventListener("keydown", pressed);
  addEventListener("popstate", () => {
    chosen = readAddress(location.hash);
    show();
  });
  narrow.addEventListener("change", () => showPane());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) > 24 && width && contentRect.width && viewOf() === "question") showPane();
    width = contentRect.width;
  }).observe(document.querySelector(".side"));
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    byId("copy").textContent = "Copied";
  } catch {
    byId("copy").textContent = "Copy it from the address bar";
  }
  setTimeout(() => (byId("copy").textContent = "Copy link"), 2000);
}

function pressed(event) {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (typing || event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
  if (event.key === "Escape" && chosen.q) {
    choose({ q: "", view: narrow.matches ? "grid" : "" });
    return byId("scroller").focus();
  }
  if (!byId("single-keys").checked) return undefined;
  const keys = {
    j: () => step(1), k: () => step(-1), "]": () => stepCheckpoint(1), "[": () => stepCheckpoint(-1),
    "+": () => grid.zoom(1), "-": () => grid.zoom(-1), 0: () => grid.fit(), "/": () => byId("text").focus(), "?": () => byId("help").showModal(),
  };
  if (!(event.key in keys)) return undefined;
  event.preventDefault();
  return keys[event.key]();
}

async function start() {
  listen();
  try {
    index = await source.json("index.json");
    if (!index) throw new ViewError({ expected: "index.json beside this page", found: "nothing of that name", remedy: "Open the address that assay view prints." });
    byId("title").textContent = index.title;
    if (!index.searches && !source.embedded) byId("text").closest("label").hidden = true;
    await show();
  } catch (error) {
    sayProblem(error);
  }
}

start();
