/** A benchmark as it comes from the source: its questions, and the bytes of one metric. */

import { counted } from "./dom.js";
import { ScoreTable } from "./table.js";

/**
 * Loads the questions of a benchmark and the scores of a metric; null where no question has a score.
 *
 * `kept` is what was loaded before, of which the questions and flags stay good for another metric.
 */
export async function loadBenchmark(source, benchmark, wanted, { kept, signal, waited }) {
  const same = kept?.key === benchmark.key ? kept : null;
  const questions = same?.questions ?? (await source.json(`${benchmark.key}/questions.json`, { signal, waited }));
  if (!questions) return null;
  for (const [number, note] of Object.entries(questions.unreadable)) {
    Object.assign(benchmark.checkpoints[number], { samples: false, note });
  }
  if (!questions.metrics.length) return null;
  const unread = new Set(questions.unread);
  benchmark.checkpoints.forEach((checkpoint, number) => Object.assign(checkpoint, { unread: unread.has(number) }));
  const asOf = unread.size ? `?unread=${unread.size}` : "";
  const metric = chosenMetric(questions.metrics, benchmark.metrics, wanted);
  if (same?.metric === metric) return same;
  const size = questions.ids.length * benchmark.checkpoints.length;
  const [scores, flags] = await Promise.all([
    source.column(`${benchmark.key}/scores/${metric}.bin${asOf}`, size, { signal, waited }),
    same?.flags ?? source.column(`${benchmark.key}/flags.bin${asOf}`, size, { signal, waited }),
  ]);
  const runs = benchmark.checkpoints.map(lineOf);
  const table = new ScoreTable({ scores, flags, scale: questions.metrics[metric], runs });
  return { key: benchmark.key, asOf, questions, metric, flags, table, names: same?.names ?? namesOf(questions) };
}

/** Number of the metric of a name, else of the first that the benchmark publishes and its questions have. */
function chosenMetric(metrics, published, wanted) {
  const places = [wanted, ...published].map((name) => metrics.findIndex((metric) => metric.name === name));
  return places.find((place) => place >= 0) ?? 0;
}

/** Names of questions; where they are of several benchmarks, with the benchmark's before. */
function namesOf({ ids, parts, part }) {
  return part.length ? ids.map((id, question) => `${parts[part[question]]} ${id}`) : ids;
}

/** What a checkpoint is called: its run too, where there are several. */
export const titleOf = ({ run, name, merge }, severalRuns) => {
  const title = severalRuns ? `${run} · ${name}` : name;
  return merge && merge !== name ? `${title} (${merge})` : title;
};

/** What the checkpoints of a line share: the run; a checkpoint with a label is alone. */
export const lineOf = ({ run, label }) => (label ? `${run}/${label}` : run);

/** What a checkpoint is called in an address. */
export const labelOf = ({ run, name }) => `${run}/${name}`;

/** How far the source is with reading samples, in words. */
export const progressText = ({ read, of }) => `Reading samples: ${counted(read)} of ${counted(of)} files`;
