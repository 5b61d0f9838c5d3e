/** McNemar's test, for pairs of checkpoints whose test is not in the file. */

const NORMAL = 1.959963984540054; // of the 95 % interval

/** Logarithm of a factorial, by Stirling's series from 16 on, where it is exact to 15 digits. */
function logFactorial(number) {
  if (number < 16) {
    let sum = 0;
    for (let factor = 2; factor <= number; factor += 1) sum += Math.log(factor);
    return sum;
  }
  const n = number + 1;
  return (n - 0.5) * Math.log(n) - n + 0.5 * Math.log(2 * Math.PI) + 1 / (12 * n) - 1 / (360 * n ** 3) + 1 / (1260 * n ** 5);
}

/** The lower end of the score interval, as `score_bound` of the comparison finds it. */
function scoreBound(won, lost, questions) {
  let [low, high] = [-1, (won - lost) / questions];
  for (let halving = 0; halving < 50; halving += 1) {
    const middle = (low + high) / 2;
    const linear = (2 * questions - won + lost) * middle - won - lost;
    const root = linear ** 2 + 8 * questions * lost * middle * (1 - middle);
    const shareLost = (Math.sqrt(Math.max(0, root)) - linear) / (4 * questions);
    const variance = questions * (2 * shareLost + middle * (1 - middle));
    if ((won - lost - questions * middle) ** 2 > NORMAL ** 2 * variance) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * The second checkpoint's share of right answers less the first's, in the form of the source's pairs.
 *
 * As `assay compare` does it: the mid-p and the exact p, and the score interval (Tango 1998).
 */
export function mcnemar(won, lost, questions) {
  const difference = (won - lost) / questions;
  if (questions < 2) return { difference: questions ? difference : null, reason: "fewer than two questions" };
  const differing = won + lost;
  const chanceOf = (right) =>
    Math.exp(logFactorial(differing) - logFactorial(right) - logFactorial(differing - right) - differing * Math.LN2);
  let tail = 0;
  for (let right = Math.min(won, lost); right >= 0; right -= 1) tail += chanceOf(right);
  const exact = won === lost ? 1 : Math.min(1, 2 * tail);
  return {
    difference,
    low: scoreBound(won, lost, questions),
    high: -scoreBound(lost, won, questions),
    p: won === lost ? 1 : exact - chanceOf(Math.min(won, lost)),
    exact_p: exact,
    test: "McNemar, mid-p",
  };
}
