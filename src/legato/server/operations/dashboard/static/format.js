/** Numbers as people read them. */

/** Seconds as "16.7 ms", "1.25 s" or, of none, a dash. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const ms = 1000 * seconds;
  return `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
}

/** Seconds that somebody chose, without digits that say nothing: "60 ms", "2 s". */
export function setting(seconds) {
  return seconds < 1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
}

export function integer(number) {
  return Math.round(number).toLocaleString("en-US");
}

export function percent(share) {
  return `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
}
