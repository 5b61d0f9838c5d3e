/** Curves over checkpoints: of a benchmark's score above the grid, and of the log-probabilities of choices. */

import { drawn, measured, shortStep } from "./dom.js";
import { lineOf } from "./loading.js";

const TOP = 12;
const BOTTOM = 22;
const APART = 58; // pixels between labels of an axis
const NAMES_APART = 13;

const line = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** A scale of values onto heights, with a little room at both ends. */
function heights(values, height) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
  const room = (high - low) * 0.06;
  const [from, to] = [low - room, high + room];
  return { low, high, y: (value) => TOP + ((to - value) / (to - from)) * (height - TOP - BOTTOM) };
}

/** Breaks a row of points where one is missing. */
function unbroken(points) {
  const parts = [[]];
  for (const point of points) {
    if (point) parts.at(-1).push(point);
    else if (parts.at(-1).length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

/**
 * Draws the score of every checkpoint above its column.
 *
 * `checkpoints` have `run`, `step` and `score` (`{value, low, high}` or null); `x` is the middle of a column by place.
 */
export function drawCurve(svg, { checkpoints, x, left, width, height, columnWidth, marked }) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const scored = checkpoints.filter(({ score }) => score);
  const parts = [];
  if (scored.length) {
    const ends = scored.flatMap(({ score }) => [score.value, score.low ?? score.value, score.high ?? score.value]);
    const { low, high, y } = heights(ends, height);
    for (const value of low === high ? [low] : [low, high]) {
      parts.push(drawn("line", { class: "rule", x1: left, x2: width, y1: y(value), y2: y(value) }));
    }
    for (const [from, to] of linesOf(checkpoints)) {
      const places = checkpoints.slice(from, to).map(({ score }, at) => score && [x(from + at), score]);
      for (const part of unbroken(places)) {
        const upper = part.map(([at, { high: end, value }]) => [at, y(end ?? value)]);
        const lower = part.map(([at, { low: end, value }]) => [at, y(end ?? value)]).reverse();
        parts.push(drawn("path", { class: "band", d: `${line([...upper, ...lower])}Z` }));
        parts.push(drawn("path", { class: "score", d: line(part.map(([at, { value }]) => [at, y(value)])) }));
        if (part.length === 1 || columnWidth >= 12) {
          parts.push(...part.map(([at, { value }]) => drawn("circle", { class: "dot", cx: at, cy: y(value), r: 2.5 })));
        }
      }
    }
    const label = (value) => drawn("text", { class: "range", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, measured(value));
    parts.push(...(high > low ? [high, low] : [low]).map(label));
  } else {
    parts.push(drawn("text", { class: "range", x: left + 24, y: height / 2 }, "No score of this metric was published."));
  }
  parts.push(...ticks(checkpoints, x, height - 6, left, width));
  for (const [place, letter] of marked) {
    const at = Math.max(left - 4, Math.min(width - 10, x(place)));
    parts.push(
      drawn("line", { class: `mark ${letter}`, x1: x(place), x2: x(place), y1: TOP, y2: height }),
      drawn("circle", { class: `letter ${letter}`, cx: at, cy: 9, r: 8 }),
      drawn("text", { class: "letter", x: at, y: 12.5, "text-anchor": "middle" }, letter.toUpperCase()),
    );
  }
  svg.replaceChildren(...parts);
}

/** Places at which what `named` says of a checkpoint changes, each with the place before the next. */
function stretchesOf(checkpoints, named) {
  const begins = checkpoints.flatMap((checkpoint, place) => (place && named(checkpoints[place - 1]) === named(checkpoint) ? [] : [place]));
  return begins.map((begin, at) => [begin, begins[at + 1] ?? checkpoints.length]);
}

/** Places of checkpoints at which a run begins, each with the place after its last. */
export const runsOf = (checkpoints) => stretchesOf(checkpoints, ({ run }) => run);

/** The same of lines: a checkpoint with a label is on no line. */
const linesOf = (checkpoints) => stretchesOf(checkpoints, lineOf);

/** Steps along the bottom, as many as there is room for, and where a run begins its name. */
function ticks(checkpoints, x, y, left, width) {
  const parts = [];
  const runs = runsOf(checkpoints);
  let free = left - 20;
  checkpoints.forEach((checkpoint, place) => {
    const begins = runs.length > 1 && runs.some(([begin]) => begin === place);
    const step = checkpoint.label ?? shortStep(checkpoint.step);
    const text = begins ? `${checkpoint.run} ${step}` : step;
    const wide = text.length * 6.6;
    const at = x(place);
    if (begins && place) parts.push(drawn("line", { class: "rule", x1: (at + x(place - 1)) / 2, x2: (at + x(place - 1)) / 2, y1: TOP, y2: y + 6 }));
    const from = begins ? at - 4 : at - wide / 2;
    if (from < free || from + wide > width - 2) return;
    parts.push(drawn("text", { class: "tick", x: from, y }, text));
    free = Math.max(from + wide + 10, at + APART);
  });
  return parts;
}

/** Draws a curve for each choice; `series` have `values` by checkpoint and `right`, `marked` are places with a letter. */
export function choiceCurves({ series, checkpoints, width, marked }) {
  const height = 200;
  const left = 46;
  const right = width - 26;
  const across = Math.max(1, checkpoints.length - 1);
  const x = (place) => left + (checkpoints.length === 1 ? (right - left) / 2 : (place / across) * (right - left));
  const known = series.flatMap(({ values }) => values.filter((value) => value !== null));
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Log-probability of each choice by checkpoint; the same numbers for A and B stand in the table" });
  if (!known.length) return svg;
  const { low, high, y } = heights(known, height);
  const places = [low, (low + high) / 2, high];
  svg.append(
    ...places.map((value) => drawn("line", { class: "rule", x1: left, x2: right, y1: y(value), y2: y(value) })),
    ...places.map((value) => drawn("text", { class: "range", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, measured(value, 1))),
    ...ticks(checkpoints, x, height - 4, left - 20, width),
    ...marked.map(([place, letter]) => drawn("line", { class: `mark ${letter}`, x1: x(place), x2: x(place), y1: TOP, y2: height - BOTTOM })),
  );
  const named = [];
  series.forEach(({ values, right: isRight, number }, place) => {
    const kind = `series-${place % 7}${isRight ? " right" : ""}`;
    for (const [from, to] of linesOf(checkpoints)) {
      const points = values.slice(from, to).map((value, at) => value !== null && [x(from + at), y(value)]);
      for (const part of unbroken(points)) {
        svg.append(drawn("path", { class: `choice ${kind}`, d: line(part) }));
        if (part.length < 2 || checkpoints.length <= 12) {
          svg.append(...part.map(([cx, cy]) => drawn("circle", { class: `spot ${kind}`, cx, cy, r: isRight ? 3.5 : 2.5 })));
        }
      }
    }
    const last = values.findLast((value) => value !== null);
    if (last !== undefined) named.push({ kind, number, at: y(last) });
  });
  named.sort((one, other) => one.at - other.at);
  named.forEach((name, at) => {
    if (at) name.at = Math.max(name.at, named[at - 1].at + NAMES_APART);
    svg.append(drawn("text", { class: `name ${name.kind}`, x: right + 8, y: name.at + 4 }, name.number));
  });
  return svg;
}
