/** Scores and flags of one benchmark and metric, byte by byte, as they are counted and drawn. */

import { BEST, MISSING } from "./model.js";

const MIDDLE = BEST / 2;

/** Bytes of a metric and of flags, checkpoint after checkpoint, with the best score always the highest byte. */
export class ScoreTable {
  /** `scale` is the metric's, `{higher_is_better, low, high}`; `runs` names the run of each checkpoint. */
  constructor({ scores, flags, scale, runs }) {
    this.scale = scale;
    this.runs = runs;
    this.questions = runs.length ? scores.length / runs.length : 0;
    this.turned = scale.higher_is_better === false;
    this.half = this.turned ? MIDDLE + 1 : MIDDLE; // in the middle itself only higher scores count as right
    this.scores = this.turned ? scores.map((score) => (score === MISSING ? MISSING : BEST - score)) : scores;
    this.flags = flags;
  }

  /** Bytes of one checkpoint, a question each. */
  column(checkpoint) {
    return this.scores.subarray(checkpoint * this.questions, (checkpoint + 1) * this.questions);
  }

  /** Flags of one checkpoint, a question each. */
  marks(checkpoint) {
    return this.flags.subarray(checkpoint * this.questions, (checkpoint + 1) * this.questions);
  }

  /** The score that a byte stands for, on the metric's own scale; null where there is none. */
  value(byte) {
    if (byte === MISSING) return null;
    const { low, high } = this.scale;
    return low + ((this.turned ? BEST - byte : byte) / BEST) * (high - low);
  }

  /** True if a question is either right or wrong, and nothing between. */
  get isBinary() {
    const { low, high } = this.scale;
    this.binary ??= low === 0 && high === 1 && this.scores.every((score) => score === 0 || score === BEST || score === MISSING);
    return this.binary;
  }
}
