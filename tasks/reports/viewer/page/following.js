/** Everything that follows from what was chosen: checkpoints, order and rows, computed again only where it must be. */

import { labelOf } from "./loading.js";
import { countFilters, filterRows, pairUp, sortRows, summarize } from "./model.js";

const memory = new Map();

/** Computes a value again only when what it is made of has changed. */
export function remembered(name, inputs, compute) {
  const kept = memory.get(name);
  if (kept && kept.inputs.length === inputs.length && kept.inputs.every((input, at) => input === inputs[at])) return kept.value;
  const value = compute();
  memory.set(name, { inputs, value });
  return value;
}

/** Has a value computed again the next time. */
export const forget = (name) => memory.delete(name);

/**
 * Turns what was chosen, in the names of the address, into numbers, and adds what follows; without samples that is little.
 *
 * `matching` are the questions with the searched text in them, null while they are not known.
 */
export function follow({ benchmark, chosen, loaded, matching }) {
  const { checkpoints } = benchmark;
  const runs = [...new Set(checkpoints.map(({ run }) => run))];
  const run = runs.includes(chosen.run) ? chosen.run : "";
  const columns = remembered("columns", [benchmark, run], () =>
    [...checkpoints.keys()].filter((column) => !run || checkpoints[column].run === run));
  const metric = loaded ? loaded.questions.metrics[loaded.metric].name : chosen.m || benchmark.metrics[0];
  const unread = columns.filter((column) => checkpoints[column].unread).length;
  const base = { missing: [], unread, benchmark, checkpoints, runs, run, columns, metric };
  if (!loaded) return base;
  const { table, names } = loaded;
  const answered = columns.filter((column) => checkpoints[column].samples && !checkpoints[column].unread);
  const missing = [];
  const named = (label, otherwise) => {
    const place = label ? checkpoints.findIndex((checkpoint) => labelOf(checkpoint) === label) : -1;
    if (label && place < 0) missing.push(`the checkpoint ${label}`);
    return place >= 0 ? place : otherwise ?? null;
  };
  const a = named(chosen.a, answered[0]);
  const b = named(chosen.c, answered.at(-1));
  const found = remembered("found", [table, columns], () => summarize(table, columns));
  const pairs = remembered("pairs", [table, a, b], () => pairUp(table, a, b));
  const counts = remembered("counts", [found, pairs], () => countFilters(found, pairs));
  const order = remembered("order", [found, chosen.sort, names], () => sortRows(found, chosen.sort || "learned", names));
  const hits = chosen.text ? matching : null;
  const rows = remembered("rows", [order, chosen.filter, pairs, hits], () => filterRows(order, chosen.filter, { found, pairs, hits }));
  const question = chosen.q ? names.indexOf(chosen.q) : -1;
  return { ...base, missing, table, names, answered, a, b, found, pairs, counts, rows, question: question < 0 ? null : question };
}

