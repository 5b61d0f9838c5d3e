/** The address: what is looked at stands behind its `#`, so that a link shows somebody else the same. */

const FIELDS = ["b", "m", "run", "a", "c", "sort", "filter", "text", "q", "view"];

/**
 * Reads a selection out of the part of an address behind `#`: benchmark `b`, metric `m`, `run`, the two checkpoints `a`
 * and `c`, `sort`, `filter`, `text`, question `q` and `view`. What it does not name is the empty string.
 */
export function readAddress(fragment) {
  const found = new URLSearchParams(fragment.replace(/^#/, ""));
  return Object.fromEntries(FIELDS.map((field) => [field, found.get(field) ?? ""]));
}

/** Writes a selection as the part of an address behind `#`, and leaves out what is empty. */
export function writeAddress(selection) {
  const written = new URLSearchParams();
  for (const field of FIELDS) if (selection[field]) written.set(field, selection[field]);
  return `#${written}`;
}
