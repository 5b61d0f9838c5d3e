/** The rows that are in the window, as a table: for screen readers, and for whoever wants numbers. */

import { counted, element, measured, plural } from "./dom.js";
import { NEVER } from "./model.js";

const ROWS_SHOWN = 50;

/** A table of rows from `begin` on, with buttons that open a question and go on; `told` hears `opened` and `turned`. */
export function rowTable({ rows, begin, ids, found, table, checkpoints, columns, a, b, scoreText }, told) {
  const from = Math.max(0, Math.min(begin, rows.length - ROWS_SHOWN));
  const end = Math.min(rows.length, from + ROWS_SHOWN);
  const nameAt = (place) => (place === NEVER ? "–" : checkpoints[columns[place]].name);
  const compared = [[a, "A"], [b, "B"]].filter(([column]) => column !== null);
  const turn = (text, to, enabled) => element("button", { type: "button", disabled: !enabled, click: () => told.turned(to) }, text);
  return [
    element("div", { class: "scroll", role: "region", "aria-label": "Questions in the window", tabindex: "0" },
      element("table", {},
        element("caption", {}, `Questions ${counted(rows.length ? from + 1 : 0)} to ${counted(end)} of ${counted(rows.length)}, in the order of the grid`),
        element("thead", {}, element("tr", {},
          ["question", "learned", "lost again", "flips", "mean", ...compared.map(([column, letter]) => `${letter}: ${checkpoints[column].name}`)]
            .map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, [...rows.slice(from, end)].map((question) => element("tr", {},
          element("th", { scope: "row" }, element("button", { type: "button", class: "plain", click: () => told.opened(question) }, ids[question])),
          element("td", {}, nameAt(found.learned[question])),
          element("td", {}, nameAt(found.lost[question])),
          element("td", {}, counted(found.flips[question])),
          element("td", {}, found.seen[question] ? measured(table.value(Math.round(found.sum[question] / found.seen[question]))) : "–"),
          compared.map(([column]) => element("td", {}, scoreText(table.column(column)[question]))),
        ))))),
    element("div", { class: "turn" },
      turn(`Previous ${ROWS_SHOWN}`, from - ROWS_SHOWN, from > 0),
      turn(`Next ${plural(Math.min(ROWS_SHOWN, rows.length - end), "question")}`, end, end < rows.length)),
  ];
}
