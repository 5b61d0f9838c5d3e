/** One question: as it was asked, its choices at every checkpoint, and the answers of two checkpoints side by side. */

import { choiceCurves } from "./chart.js";
import { compareTexts } from "./diff.js";
import { counted, element, measured, plural } from "./dom.js";
import { BEST, CUT, MISSING, NEVER, TRUNCATED, WITHHELD, rightChoice } from "./model.js";

const LONGEST_COMPARED_CHARACTERS = 60_000;

const block = (text, label) => element("pre", { tabindex: "0", role: "group", "aria-label": label }, text);

/** Everything about one question; `shown` is what the page has chosen, `told` hears `chosen` checkpoints and `moved`. */
export function questionView(shown, told) {
  const { question, id, asked, a, b } = shown;
  const answersOf = (checkpoint) => (checkpoint === null ? [] : asked.answers[checkpoint] ?? []);
  const first = answersOf(a);
  const second = answersOf(b);
  const own = second[0] ?? first[0] ?? {};
  const choices = own.choices ?? asked.choices;
  const target = own.target ?? asked.target;
  const right = rightChoice(choices, target);
  const context = own.context ?? asked.context;
  const moved = (one) => one?.prompt !== undefined && one?.prompt !== null;
  return element(
    "article",
    { class: "question" },
    element("header", {}, element("h2", {}, id), element("p", { class: "muted" }, factsOf(shown))),
    cellStrip(shown, told),
    element("h3", {}, "Asked"),
    context && element(
      "details",
      {},
      element("summary", {}, `Instructions and examples before it, ${plural(context.length, "character")}`),
      block(context, "Instructions and examples"),
    ),
    block(own.prompt ?? asked.prompt, "Prompt"),
    (moved(first[0]) || moved(second[0])) && element("p", { class: "note" }, "Not every checkpoint was asked in these words: those of B are shown."),
    target !== null && target !== undefined && element(
      "dl",
      { class: "target" },
      element("dt", {}, "Target"),
      element("dd", {}, right >= 0 && choices[right].trim() !== target.trim() ? `${target} (${choices[right].trim()})` : target),
    ),
    choicesOf({ ...shown, choices, right, first, second }),
    element("h3", {}, "Answered"),
    answersSideBySide(shown, first, second),
  );

  function factsOf({ found, checkpoints, columns }) {
    const at = (place) => `${checkpoints[columns[place]].name}`;
    const facts = [`right at ${counted(found.right[question])} of ${plural(found.seen[question], "checkpoint")}`];
    if (found.learned[question] !== NEVER) facts.push(`learned at ${at(found.learned[question])}`);
    if (found.lost[question] !== NEVER) facts.push(`lost again at ${at(found.lost[question])}`);
    if (found.flips[question]) facts.push(plural(found.flips[question], "flip"));
    return facts.join(" · ");
  }
}

/** A row of the grid, cell by cell a button where there are few. */
function cellStrip({ table, question, checkpoints, columns, a, b, colourOf, scoreText }, told) {
  const list = element("div", { class: columns.length > 60 ? "strip dense" : "strip", role: "group", "aria-label": "Score at every checkpoint" });
  for (const column of columns) {
    const byte = table.column(column)[question];
    const letter = column === a ? "a" : column === b ? "b" : "";
    const says = `${checkpoints[column].name}: ${scoreText(byte)}${letter ? `, ${letter.toUpperCase()}` : ""}`;
    const cell = element("button", {
      type: "button", title: says, "aria-label": says, "aria-pressed": String(letter !== ""), class: letter,
      tabindex: column === b ? "0" : "-1",
      click: (event) => told.chosen(column, event.shiftKey),
    });
    cell.style.backgroundColor = colourOf(byte);
    list.append(cell);
  }
  list.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[event.key];
    if (to) event.target[to]?.focus();
  });
  return list;
}

function choicesOf({ asked, choices, right, first, second, checkpoints, columns, a, b, width }) {
  const likely = (answer) => answer?.log_likelihoods ?? [];
  const size = Math.max(choices.length, ...columns.map((column) => likely(asked.answers[column]?.[0]).length));
  if (size < 2 || !columns.some((column) => likely(asked.answers[column]?.[0]).length === size)) return choiceList(choices, right);
  const places = [...Array(size).keys()];
  const valueAt = (column, place) => (likely(asked.answers[column]?.[0]).length === size ? likely(asked.answers[column][0])[place] : null);
  const series = places.map((place) => ({
    values: columns.map((column) => valueAt(column, place)), right: place === right, number: String(place + 1),
  }));
  const marked = [[a, "a"], [b, "b"]].map(([column, letter]) => [columns.indexOf(column), letter]).filter(([place]) => place >= 0);
  const picked = (answers) => {
    const values = likely(answers[0]);
    return values.length === size ? values.indexOf(Math.max(...values)) : -1;
  };
  const picks = { a: picked(first), b: picked(second) };
  const value = (answers, place, letter) => element(
    "td",
    { class: picks[letter] === place ? "likeliest" : null },
    likely(answers[0]).length === size ? measured(likely(answers[0])[place], 2) : "–",
    picks[letter] === place && element("span", { class: "unseen" }, " likeliest"),
  );
  return [
    element("h3", {}, "Choices"),
    element(
      "div",
      { class: "choices" },
      element(
        "div",
        { class: "scroll", role: "region", "aria-label": "Log-probability of each choice", tabindex: "0" },
        element(
          "table",
          {},
          element("thead", {}, element("tr", {},
            element("th", { scope: "col" }, "log-probability"),
            ["a", "b"].map((letter) => element("th", { scope: "col" }, element("span", { class: `letter ${letter}` }, letter.toUpperCase()))),
          )),
          element("tbody", {}, places.map((place) => element(
            "tr",
            { class: place === right ? "right" : null },
            element("th", { scope: "row" }, element("span", { class: "named" },
              element("span", { class: `swatch series-${place % 7}` }, String(place + 1)),
              element("span", {},
                element("span", { class: "text" }, choices.length === size ? choices[place].trim() : `request ${place + 1}`),
                place === right && element("span", { class: "badge good" }, "right")),
            )),
            value(first, place, "a"),
            value(second, place, "b"),
          ))),
        ),
      ),
      choiceCurves({ series, checkpoints: columns.map((column) => checkpoints[column]), width, marked }),
    ),
  ];
}

function choiceList(choices, right) {
  if (!choices.length) return null;
  return [
    element("h3", {}, "Choices"),
    element("ol", { class: "choice-list" }, choices.map((choice, place) =>
      element("li", { class: place === right ? "right" : null }, choice, place === right && element("span", { class: "badge good" }, "right")))),
  ];
}

function answersSideBySide({ metric, checkpoints, table, question, a, b, scoreText, colourOf, textsDiffer }, first, second) {
  const sides = [[a, "a", first], [b, "b", second]].filter(([column], at) => column !== null && (at === 0 || column !== a));
  const compared = sides.length === 2 && first.length === 1 && second.length === 1 && textsDiffer;
  const short = compared && first[0].output.length + second[0].output.length <= LONGEST_COMPARED_CHARACTERS;
  const diff = short ? compareTexts(first[0].output, second[0].output) : null;
  const note = compared && !diff && "The two answers differ in too much to be compared word by word.";
  return [
    note && element("p", { class: "note" }, note),
    element("div", { class: "answers" }, sides.map(([column, letter, answers], side) => {
      const checkpoint = checkpoints[column];
      const byte = table.column(column)[question];
      const heading = element("header", {},
        element("h4", {}, element("span", { class: `letter ${letter}` }, letter.toUpperCase()), checkpoint.name),
        element("span", { class: "score" }, swatchOf(colourOf(byte)), scoreText(byte)),
      );
      const body = answers.length
        ? answers.map((answer, number) => [
            answers.length > 1 && element("h5", {}, `Answer ${number + 1} of ${answers.length}`),
            element("p", { class: "muted facts" }, factsOfAnswer(answer, table.marks(column)[question], answers.length === 1 && metric)),
            answer.output === ""
              ? element("p", { class: "muted nothing" }, "The answer is empty.")
              : element("pre", { tabindex: "0", role: "group", "aria-label": `Answer at ${letter.toUpperCase()}` },
                  diff ? diff[side].map(([text, changed]) => (changed ? element(side ? "ins" : "del", {}, text) : text)) : answer.output),
          ])
        : element("p", { class: "muted nothing" }, checkpoint.unread
            ? "The samples of this checkpoint are not read yet."
            : checkpoint.samples ? "This checkpoint was not asked the question."
            : checkpoint.note ?? "No answers of this checkpoint were kept.");
      return element("section", { class: "answer", "aria-label": `Answer of ${checkpoint.name}` }, heading, body);
    })),
  ];
}

function swatchOf(colour) {
  const made = element("span", { class: "swatch-cell", "aria-hidden": "true" });
  made.style.backgroundColor = colour;
  return made;
}

function factsOfAnswer(answer, marks, said) {
  const facts = [];
  if (marks & WITHHELD) facts.push("without a score");
  if (answer.finish) facts.push(answer.finish === "length" || marks & CUT ? "cut at the length limit" : `finish reason ${answer.finish}`);
  if (answer.tokens !== null && answer.tokens !== undefined) facts.push(plural(answer.tokens, "token"));
  if (answer.truncated || marks & TRUNCATED) facts.push("prompt cut on the left");
  const scores = Object.entries(answer.scores ?? {}).filter(([name, score]) => score !== null && name !== said);
  facts.push(...scores.map(([name, score]) => `${name} ${measured(score)}`));
  return facts.join(" · ");
}

/** The word for a byte: right or wrong where there is nothing between, else the number on the metric's scale. */
export function scoreWord(table, byte) {
  if (byte === MISSING) return "no score";
  if (table.isBinary) return byte === BEST ? "right" : "wrong";
  return measured(table.value(byte));
}
