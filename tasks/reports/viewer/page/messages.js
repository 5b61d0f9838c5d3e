/** What the page says in place of a picture, and what went wrong. */

import { byId, element } from "./dom.js";
import { ViewError } from "./source.js";

/** Says why there is nothing to see, or how far it is; `more` is an element that helps. */
export function sayEmpty(title, text, { progress, busy, more } = {}) {
  byId("picture").hidden = byId("table").hidden = true;
  const bar = busy ? element("progress", { "aria-label": title }) : progress && element("progress", { value: progress.read, max: progress.of, "aria-label": title });
  byId("empty").replaceChildren(element("strong", {}, title), ...[text && element("p", {}, text), bar, more].filter(Boolean));
  byId("empty").hidden = false;
}

/** Says that a benchmark is on its way, and hides what is of no use until then. */
export function sayLoading() {
  document.querySelector("main").classList.add("alone");
  byId("tools").hidden = byId("above").hidden = byId("legend").hidden = true;
  byId("metric-field").hidden = byId("run-field").hidden = true;
  sayEmpty("Loading questions", "", { busy: true });
}

/** Says what was expected, what was found and what to do. */
export function sayProblem(error) {
  const text = error instanceof ViewError
    ? `Expected: ${error.expected}.\nFound: ${error.found}.\nTo do: ${error.remedy}`
    : `The page met an error of its own: ${error.message}. Load it again.`;
  if (!byId("empty").hidden && byId("empty").querySelector("progress")) sayEmpty("Nothing to show yet", "The reason stands above.");
  byId("problem").textContent = text;
  byId("problem").hidden = false;
  if (!(error instanceof ViewError)) console.error(error);
}

/** Says that an address names what is not here, and that something else is shown instead. */
export function sayMissing(names) {
  sayProblem(new ViewError({
    expected: `${names.join(" and ")}, which the address names`,
    found: "no such name in these records, so others are shown",
    remedy: "Ask whoever sent the address which records it was made from, or choose again.",
  }));
}
