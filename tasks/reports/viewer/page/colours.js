/** Colours of scores, from the style sheet's: amber to blue, apart in brightness too, for whoever sees no red or green. */

import { BEST, MISSING } from "./model.js";

/** Reads a colour of the style sheet as red, green and blue. */
export function styled(name) {
  const written = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => Number.parseInt(written.slice(at, at + 2), 16));
}

/** A pixel for each byte of a score, as canvases hold them in memory: four bytes, red first. */
export function palette() {
  const [worst, middle, best, missing] = ["--wrong", "--halfway", "--right", "--missing"].map(styled);
  const mixed = (from, to, share) => from.map((part, at) => Math.round(part + (to[at] - part) * share));
  const pixels = new Uint8ClampedArray(256 * 4);
  for (let score = 0; score <= MISSING; score += 1) {
    const along = (score / BEST) * 2;
    const colour = score === MISSING ? missing : along < 1 ? mixed(worst, middle, along) : mixed(middle, best, along - 1);
    pixels.set([...colour, 255], score * 4);
  }
  return new Uint32Array(pixels.buffer);
}

/** Writes the pixel of a score as a style sheet does. */
export function asStyle(pixels, score) {
  const [red, green, blue] = new Uint8Array(pixels.buffer, score * 4, 3);
  return `rgb(${red} ${green} ${blue})`;
}
