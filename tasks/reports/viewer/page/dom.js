/** Elements of the page. Whatever text they get is text: nothing here, and nothing that calls it, reads HTML. */

const SVG = "http://www.w3.org/2000/svg";

function furnish(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Makes an element: attributes by name, listeners by the name of their event, children that are elements or text. */
export function element(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

/** Makes an element of a drawing. */
export function drawn(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

/** Finds a fixed element of the page by its id. */
export const byId = (id) => document.getElementById(id);

/** Sets the choices of a list, and the one that is taken; a choice is `[value, text]`, a group `{label, options}`. */
export function fillSelect(select, choices, value) {
  const option = ([key, text]) => element("option", { value: key }, text);
  const group = ({ label, options }) => element("optgroup", { label }, options.map(option));
  select.replaceChildren(...choices.map((choice) => (Array.isArray(choice) ? option(choice) : group(choice))));
  select.value = value;
}

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Writes a whole number with its thousands apart. */
export const counted = (number) => whole.format(number);

/** Writes a step short enough for an axis. */
export const shortStep = (step) => compact.format(step).toLowerCase();

/** Writes how many there are of something. */
export const plural = (number, word) => `${counted(number)} ${word}${number === 1 ? "" : "s"}`;

const whole01 = (value) => Math.abs(value) === 0 || Math.abs(value) === 1;

/** Writes a measured value with the digits that it has to say something with: 49,998 of 50,000 is not 1.000. */
export function measured(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1000) return counted(Math.round(value));
  const written = [0, 1, 2, 3].map((more) => value.toFixed(digits + more));
  return (written.find((text) => whole01(value) || !whole01(Number(text))) ?? written[0]).replace("-", "−");
}

/** Writes a difference with its sign. */
export const signed = (value, digits = 3) => (value > 0 ? "+" : "") + measured(value, digits);

/** Writes how likely something is by chance. */
export function chance(p) {
  if (p === null || p === undefined) return "not known";
  if (p < 0.0001) return "below 0.0001";
  return p < 0.01 ? p.toFixed(4) : p.toFixed(3);
}
