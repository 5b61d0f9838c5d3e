/** The fields above the grid with their choices, and the legend below it. */

import { byId, counted, element, fillSelect, measured } from "./dom.js";
import { labelOf, titleOf } from "./loading.js";
import { BEST, CUT, FILTERS, SORTS, WITHHELD } from "./model.js";

/** Fills the list of benchmarks, which is there while one of them is still loading. */
export function showBenchmarks(index, shown) {
  const several = (one) => index.benchmarks.filter(({ evaluator, benchmark }) => evaluator === one.evaluator && benchmark === one.benchmark).length > 1;
  const evaluators = [...new Set(index.benchmarks.map(({ evaluator }) => evaluator))];
  fillSelect(byId("benchmark"), evaluators.map((evaluator) => ({
    label: evaluator,
    options: index.benchmarks.filter((each) => each.evaluator === evaluator).map((each) => [
      each.key, several(each) ? `${each.benchmark} (${each.settings || each.evaluation_hash.slice(0, 8)})` : each.benchmark,
    ]),
  })), shown.key);
  document.title = `${shown.benchmark} · ${index.title}`;
}

/** Fills the other fields with what there is to choose, and with what was chosen. */
export function showFields({ chosen, loaded, now }) {
  const { benchmark, runs, run, checkpoints, a, b, counts } = now;
  const metrics = loaded ? loaded.questions.metrics.map(({ name }) => name) : benchmark.metrics;
  fillSelect(byId("metric"), metrics.map((name) => [name, name]), now.metric);
  fillSelect(byId("run"), [["", "all"], ...runs.map((name) => [name, name])], run);
  byId("metric-field").hidden = false;
  byId("run-field").hidden = runs.length < 2;
  byId("compared").hidden = !loaded;
  if (!loaded) return;
  const choices = now.answered.map((column) => [labelOf(checkpoints[column]), titleOf(checkpoints[column], runs.length > 1 && !run)]);
  for (const [id, column] of [["a", a], ["c", b]]) {
    const apart = column !== null && !now.answered.includes(column) ? [[labelOf(checkpoints[column]), titleOf(checkpoints[column], true)]] : [];
    fillSelect(byId(id), [...apart, ...choices], column === null ? "" : labelOf(checkpoints[column]));
  }
  const option = (name) => [name, `${FILTERS[name]} (${counted(counts[name])})`];
  const names = Object.keys(FILTERS);
  fillSelect(byId("filter"), [
    ["", `all questions (${counted(loaded.table.questions)})`],
    { label: now.unread ? "Over the checkpoints read so far" : "Over all checkpoints", options: names.slice(0, 4).map(option) },
    { label: "Between A and B", options: names.slice(4).map(option) },
  ], chosen.filter in FILTERS ? chosen.filter : "");
  const [, reversed, sort] = /^(-?)(.*)$/.exec(chosen.sort);
  fillSelect(byId("sort"), Object.entries(SORTS), sort in SORTS ? sort : "learned");
  byId("reverse").setAttribute("aria-pressed", String(reversed === "-"));
  if (document.activeElement !== byId("text")) byId("text").value = chosen.text;
}

/** Says what the colours and marks of a table mean. */
export function showLegend({ table, found }) {
  const marks = found.marks.reduce((all, mark) => all | mark, 0);
  const sign = (kind, text) => element("span", {}, element("i", { class: kind }), text);
  const ends = [0, BEST].map((byte) => measured(table.value(byte)));
  byId("legend").replaceChildren(...[
    ...(table.isBinary
      ? [sign("right", "right"), sign("wrong", "wrong")]
      : [element("span", {}, ends[0], element("i", { class: "ramp" }), ends[1])]),
    sign("missing", "no score"),
    marks & CUT && sign("cut", "cut at the length limit"),
    marks & WITHHELD && sign("withheld", "withheld or left out"),
  ].filter(Boolean));
}
