/** Numbers as people read them. */

const MINUTE_S = 60;
const HOUR_S = 60 * MINUTE_S;
const DAY_S = 24 * HOUR_S;

/** Seconds as "16.7 ms" or "1.25 s"; a dash if there are none. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const ms = 1000 * seconds;
  return `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
}

/** Seconds of a setting, without needless digits: "60 ms", "2 s". */
export function setting(seconds) {
  return seconds < 1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
}

/** A long time in its two largest units: "45 s", "12 min", "3 h 5 min", "2 d 4 h". */
export function age(seconds) {
  const count = (unitS) => Math.floor(seconds / unitS);
  if (seconds < MINUTE_S) return `${count(1)} s`;
  if (seconds < HOUR_S) return `${count(MINUTE_S)} min`;
  if (seconds < DAY_S) return `${count(HOUR_S)} h ${count(MINUTE_S) % 60} min`;
  return `${count(DAY_S)} d ${count(HOUR_S) % 24} h`;
}

export function integer(number) {
  return Math.round(number).toLocaleString("en-US");
}

/** A count with its noun: "1 token", "1,921 tokens". */
export function counted(number, noun) {
  return `${integer(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function percent(share) {
  const digits = share && (share < 0.1 || (share > 0.99 && share < 1)) ? 1 : 0;
  const shown = (100 * share).toFixed(digits);
  // A share below 1 must not read as 100 %.
  return `${share < 1 && Number(shown) === 100 ? "99.9" : shown} %`;
}
