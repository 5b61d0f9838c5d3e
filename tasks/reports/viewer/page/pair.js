/** Two checkpoints: what was won and lost between them, if that is more than chance, and the questions behind it. */

import { chance, counted, element, measured, plural, signed } from "./dom.js";
import { BOTH, LOST, NEITHER, WON } from "./model.js";

const LISTED = 100;
const KINDS = [
  ["both", BOTH, "right at both"],
  ["lost", LOST, "worse at B"],
  ["won", WON, "better at B"],
  ["neither", NEITHER, "wrong at both"],
];

/**
 * The view of two checkpoints. `pair` is what the source says of them, null where it does not; `counts` and `rows` are
 * counted in the page. `told` hears `filtered` by a kind and `opened` with a question.
 */
export function pairView(shown, told) {
  const { names, pair, counts, questions, filter, rows, ids, metric } = shown;
  const compared = counts.reduce((sum, count) => sum + count, 0);
  return element(
    "article",
    { class: "pair" },
    element("h2", {}, element("bdi", {}, names[0]), element("span", { class: "arrow" }, " → "), element("bdi", {}, names[1])),
    compared === 0
      ? element("p", { class: "muted" }, "No question has a score at both checkpoints.")
      : [
          verdict(pair, metric),
          shareBar(counts, compared),
          element("div", { class: "kinds", role: "group", "aria-label": "Questions by what became of them" },
            KINDS.map(([name, kind, says]) => element(
              "button",
              { type: "button", class: `kind ${name}`, "aria-pressed": String(filter === name), click: () => told.filtered(filter === name ? "" : name) },
              element("span", { class: "name" }, name),
              element("strong", {}, counted(counts[kind])),
              element("span", { class: "says" }, says),
            ))),
          compared < questions && element("p", { class: "note" },
            `${plural(questions - compared, "question")} without a score at one of them ${questions - compared === 1 ? "is" : "are"} not counted.`),
        ],
    pair?.changes?.length ? element("div", { class: "warning" },
      element("strong", {}, "Not only the weights differ"),
      element("ul", {}, pair.changes.map((change) => element("li", {}, change)))) : null,
    KINDS.some(([name]) => name === filter) || filter === "flipped" ? listed(rows, ids, filter, told) : element("p", { class: "note" }, "Choose a number to see its questions, here and in the grid."),
  );
}

/** The first of two checkpoints against the second, out of the second against the first. */
export function turned(pair) {
  if (!pair) return null;
  const other = (value) => (value === null ? null : -value);
  return {
    ...pair, won: pair.lost, lost: pair.won, values: pair.values && [...pair.values].reverse(),
    difference: other(pair.difference), low: other(pair.high), high: other(pair.low),
    changes: pair.changes.map((change) => `${change} (from B to A)`),
  };
}

function verdict(pair, metric) {
  if (!pair) {
    return element("p", { class: "note" }, "This file holds no test of this pair: those of neighbours, and of the first and last checkpoint, are in it. What is counted below is whole.");
  }
  const facts = [];
  if (pair.values) facts.push(["A", measured(pair.values[0])], ["B", measured(pair.values[1])]);
  const interval = pair.low === null || pair.low === undefined ? null : `95 % interval ${signed(pair.low)} to ${signed(pair.high)}`;
  return [
    pair.difference !== null && pair.difference !== undefined && element("p", { class: "difference" },
      element("strong", {}, signed(pair.difference)),
      element("span", {}, ` ${metric}`),
      interval && element("span", { class: "muted" }, ` ${interval}`)),
    element("dl", { class: "facts" },
      facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
      pair.p !== null && pair.p !== undefined && element("div", {}, element("dt", {}, `p, ${pair.test}`), element("dd", {}, chance(pair.p))),
      pair.exact_p !== null && pair.exact_p !== undefined && element("div", {}, element("dt", {}, "p, McNemar exact"), element("dd", {}, chance(pair.exact_p)))),
    pair.reason && element("p", { class: "note" }, `Not tested: ${pair.reason}.`),
    pair.note && element("p", { class: "note" }, pair.note),
  ];
}

/** The four kinds as parts of a bar; the same numbers stand below. */
function shareBar(counts, compared) {
  const bar = element("div", { class: "shares", "aria-hidden": "true" });
  for (const [name, kind] of KINDS) {
    if (!counts[kind]) continue;
    const share = element("span", { class: name });
    share.style.flexGrow = String(counts[kind] / compared);
    bar.append(share);
  }
  return bar;
}

function listed(rows, ids, filter, told) {
  return [
    element("h3", {}, `${plural(rows.length, "question")} ${filter}`),
    element("ol", { class: "question-list" }, [...rows.slice(0, LISTED)].map((question) =>
      element("li", {}, element("button", { type: "button", class: "plain", click: () => told.opened(question) }, ids[question])))),
    rows.length > LISTED && element("p", { class: "note" }, `And ${counted(rows.length - LISTED)} more in the grid.`),
  ];
}
