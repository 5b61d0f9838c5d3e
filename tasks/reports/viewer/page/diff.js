/** Two answers word by word. */

const MOST_EDITS = 1200; // the search keeps a row of ends per edit: 1,200 are 6 MB, and no longer a diff that one reads

/** Splits a text into words, spaces and marks, which together are the text again. */
export const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/**
 * The words that only one of two texts has, by Myers' shortest edit script.
 *
 * Returns two lists of `[text, changed]`, which are the two texts in pieces; null where they differ in too much.
 */
export function compareTexts(before, after) {
  const a = words(before);
  const b = words(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const kept = editScript(a.slice(start, a.length - end), b.slice(start, b.length - end));
  if (kept === null) return null;
  const inA = new Set(kept.map(([x]) => x + start));
  const inB = new Set(kept.map(([, y]) => y + start));
  const stays = (place, length, same) => place < start || place >= length - end || same.has(place);
  return [pieces(a, (place) => stays(place, a.length, inA)), pieces(b, (place) => stays(place, b.length, inB))];
}

/** Pairs of places of words that both have, first to last; null beyond `MOST_EDITS`. */
function editScript(a, b) {
  const most = Math.min(a.length + b.length, MOST_EDITS);
  const rows = [];
  let ends = new Int32Array([0, 0, 0]); // ends[k + d + 1]: how far along `a` the diagonal k was followed in d edits
  for (let d = 0; d <= most; d += 1) {
    const now = new Int32Array(2 * d + 3);
    for (let k = -d; k <= d; k += 2) {
      const at = (diagonal) => ends[diagonal + d]; // those of d − 1 edits
      let x = 0;
      if (d > 0) x = k === -d || (k !== d && at(k - 1) < at(k + 1)) ? at(k + 1) : at(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      now[k + d + 1] = x;
      if (x >= a.length && x - k >= b.length) {
        rows.push(now);
        return traced(rows, a.length, b.length);
      }
    }
    rows.push(now);
    ends = now;
  }
  return null;
}

function traced(rows, length, other) {
  const kept = [];
  let x = length;
  let y = other;
  for (let d = rows.length - 1; d >= 0; d -= 1) {
    const k = x - y;
    const at = (diagonal) => rows[d - 1][diagonal + d];
    const down = d > 0 && (k === -d || (k !== d && at(k - 1) < at(k + 1)));
    const from = d === 0 ? 0 : down ? at(k + 1) : at(k - 1);
    const begin = d === 0 ? 0 : down ? from : from + 1;
    while (x > begin && x > 0 && y > 0) kept.push([(x -= 1), (y -= 1)]);
    x = from;
    y = d === 0 ? 0 : down ? from - k - 1 : from - k + 1;
  }
  return kept.reverse();
}

function pieces(parts, stays) {
  const found = [];
  parts.forEach((part, place) => {
    const changed = !stays(place);
    if (found.length && found.at(-1)[1] === changed) found.at(-1)[0] += part;
    else found.push([part, changed]);
  });
  return found;
}
