/**
 * Questions in numbers: when they were learned, lost again, how often they flipped; sorted, filtered and counted.
 *
 * Pure functions over a table: `{questions, runs, half, column(c), marks(c)}`, where `column` has a byte a question (0
 * worst, 254 best, 255 not there), `marks` a byte of flags, and `runs[c]` is the run of a checkpoint. A question counts as
 * right from the byte `half` on.
 */

export const MISSING = 255;
export const BEST = 254;
export const CUT = 1;
export const WITHHELD = 2;
export const TRUNCATED = 4;
export const NEVER = 0xffff;

const FINE = 1e8; // keys of a sort: what comes first is a multiple of this, what breaks ties less than it

/**
 * Looks along every row, checkpoint by checkpoint of each run.
 *
 * Returns, by question: `learned` the first place from which on a run has it right to its end, `lost` the first from
 * which on it has it wrong to its end though it was right before, both `NEVER` where no run does; `flips` between
 * neighbours of a run, `sum` and `seen` of its scores, `right` how often, `marks` all flags that it ever had.
 */
export function summarize(table, columns) {
  const { questions } = table;
  const found = {
    learned: new Uint16Array(questions).fill(NEVER),
    lost: new Uint16Array(questions).fill(NEVER),
    flips: new Uint16Array(questions),
    sum: new Float64Array(questions),
    seen: new Uint16Array(questions),
    right: new Uint16Array(questions),
    marks: new Uint8Array(questions),
  };
  const last = new Uint8Array(questions).fill(MISSING); // 1 right, 0 wrong
  const since = new Uint16Array(questions); // place from which on it is what it is
  const was = new Uint8Array(questions); // 1 if it was right before
  const endRun = () => {
    for (let question = 0; question < questions; question += 1) {
      if (last[question] === 1 && found.learned[question] === NEVER) found.learned[question] = since[question];
      if (last[question] === 0 && was[question] && found.lost[question] === NEVER) found.lost[question] = since[question];
    }
    last.fill(MISSING);
    was.fill(0);
  };
  columns.forEach((column, place) => {
    if (place && table.runs[column] !== table.runs[columns[place - 1]]) endRun();
    const scores = table.column(column);
    const flags = table.marks(column);
    for (let question = 0; question < questions; question += 1) {
      found.marks[question] |= flags[question];
      const score = scores[question];
      if (score === MISSING) continue;
      const isRight = score >= table.half ? 1 : 0;
      found.seen[question] += 1;
      found.sum[question] += score;
      found.right[question] += isRight;
      if (last[question] === isRight) continue;
      if (last[question] !== MISSING) found.flips[question] += 1;
      was[question] |= last[question] === 1 ? 1 : 0;
      since[question] = place;
      last[question] = isRight;
    }
  });
  endRun();
  return found;
}

/** Orders that rows can have, by the name that stands in the address. */
export const SORTS = {
  learned: "when learned",
  lost: "lost again",
  flips: "most flips",
  mean: "mean score",
  id: "id",
};

const KEYS = {
  learned: ({ learned, sum }, question) => learned[question] * FINE - sum[question],
  lost: ({ lost, learned, sum }, question) =>
    (lost[question] === NEVER ? NEVER + learned[question] : lost[question]) * FINE - sum[question],
  flips: ({ flips, sum }, question) => -flips[question] * FINE - sum[question],
  mean: ({ seen, sum }, question) => (seen[question] ? sum[question] / seen[question] : Infinity),
};

/**
 * Questions in an order, as places in the table.
 *
 * `sort` is a name of `SORTS`, with `-` before it for the other way round; `ids` is needed for the order of ids alone.
 */
export function sortRows(found, sort, ids) {
  const [, reverse, name] = /^(-?)(.*)$/.exec(sort);
  const order = Uint32Array.from(found.learned.keys());
  if (name === "id") {
    const { compare } = new Intl.Collator("en", { numeric: true });
    order.sort((a, b) => compare(ids[a], ids[b]) || a - b);
  } else {
    const key = KEYS[name] ?? KEYS.learned;
    const keys = Float64Array.from(order, (question) => key(found, question));
    order.sort((a, b) => keys[a] - keys[b] || a - b);
  }
  return reverse ? order.reverse() : order;
}

/** Kinds of questions between two checkpoints, in the order of their counts. */
export const [NEITHER, LOST, WON, BOTH] = [0, 1, 2, 3];

/**
 * Says of every question what two checkpoints made of it, and how many there are of each kind: won with a better score at
 * the second, lost with a worse one, and of those alike right at both, or at neither.
 */
export function pairUp(table, a, b) {
  const kinds = new Uint8Array(table.questions).fill(MISSING);
  const counts = [0, 0, 0, 0];
  if (a !== null && b !== null) {
    const before = table.column(a);
    const after = table.column(b);
    for (let question = 0; question < table.questions; question += 1) {
      if (before[question] === MISSING || after[question] === MISSING) continue;
      const change = after[question] - before[question];
      kinds[question] = change > 0 ? WON : change < 0 ? LOST : after[question] >= table.half ? BOTH : NEITHER;
      counts[kinds[question]] += 1;
    }
  }
  return { kinds, counts };
}

/** Filters by the name that stands in the address; those of the second group look at the two checkpoints A and B. */
export const FILTERS = {
  right: "right for all checkpoints",
  wrong: "wrong for all checkpoints",
  cut: "cut at the length limit",
  withheld: "withheld or left out",
  flipped: "flipped between A and B",
  won: "won: better at B",
  lost: "lost: worse at B",
  both: "both: right at A and B",
  neither: "neither: wrong at A and B",
};

const KEEPS = {
  right: ({ found }, question) => found.seen[question] > 0 && found.right[question] === found.seen[question],
  wrong: ({ found }, question) => found.seen[question] > 0 && found.right[question] === 0,
  cut: ({ found }, question) => (found.marks[question] & CUT) !== 0,
  withheld: ({ found }, question) => (found.marks[question] & WITHHELD) !== 0,
  flipped: ({ pairs }, question) => pairs.kinds[question] === WON || pairs.kinds[question] === LOST,
  won: ({ pairs }, question) => pairs.kinds[question] === WON,
  lost: ({ pairs }, question) => pairs.kinds[question] === LOST,
  both: ({ pairs }, question) => pairs.kinds[question] === BOTH,
  neither: ({ pairs }, question) => pairs.kinds[question] === NEITHER,
};

/** Rows that a filter keeps, of those that contain the searched text where `hits` names them. */
export function filterRows(order, filter, { found, pairs, hits }) {
  const keeps = KEEPS[filter];
  if (!keeps && !hits) return order;
  return order.filter(
    (question) => (!hits || hits.has(question)) && (!keeps || keeps({ found, pairs }, question)),
  );
}

/** How many questions each filter keeps. */
export function countFilters(found, pairs) {
  const counts = Object.fromEntries(Object.keys(KEEPS).map((name) => [name, 0]));
  for (let question = 0; question < found.learned.length; question += 1) {
    for (const [name, keeps] of Object.entries(KEEPS)) if (keeps({ found, pairs }, question)) counts[name] += 1;
  }
  return counts;
}

/** Mean score of rows `begin` to `end` at one checkpoint, in bytes; `MISSING` where none has one. */
export function meanOf(scores, rows, begin, end) {
  let sum = 0;
  let seen = 0;
  for (let row = begin; row < end; row += 1) {
    const score = scores[rows[row]];
    if (score !== MISSING) {
      sum += score;
      seen += 1;
    }
  }
  return seen ? Math.round(sum / seen) : MISSING;
}

/** The choice that is the right answer, as far as the target names one: by its text, its letter or its number. */
export function rightChoice(choices, target) {
  if (target === null || target === undefined) return -1;
  const named = target.trim();
  const byText = choices.findIndex((choice) => choice.trim() === named);
  if (byText >= 0) return byText;
  const place = /^\(?[A-Za-z]\)?\.?$/.test(named)
    ? named.replace(/[().]/g, "").toUpperCase().charCodeAt(0) - 65
    : /^\d+$/.test(named) ? Number(named) : -1;
  return place < choices.length ? place : -1;
}
