/** Eight streams of the page itself; their tokens are timed in the browser. */

import { events } from "./api.js";

const NUM_STREAMS = 8;
const STREAM_TOKENS = 3000;
const POLL_MS = 30;

const TOPICS = ["the sea", "a lighthouse", "winter", "the orchestra", "a night train", "bread",
  "the stars", "an old clock"];

/** They share a connection: a browser opens only six to a server. */
export class OwnStreams {
  /** @param {() => void} onChange told when they begin or end */
  constructor(onChange) {
    this.onChange = onChange;
    this.tokens = []; // {lane, atS}, in order
    this.error = null;
    this.aborter = null;
  }

  get isRunning() {
    return this.aborter !== null;
  }

  /** Starts the streams; they run until they are stopped or their context is full. */
  async start(maxModelLen) {
    const aborter = new AbortController();
    this.aborter = aborter;
    this.tokens = [];
    this.error = null;
    this.onChange();
    const body = {
      prompt: TOPICS.slice(0, NUM_STREAMS).map((topic) => `Once upon a time, about ${topic}:`),
      max_tokens: Math.min(STREAM_TOKENS, maxModelLen - 64),
      ignore_eos: true,
      stream: true,
    };
    try {
      const { signal } = aborter;
      for await (const event of events("v1/completions", { method: "POST", body, signal })) {
        if (event.error) throw new Error(event.error.message);
        for (const { index } of event.choices) this.tokens.push({ lane: index, atS: nowS() });
      }
    } catch (error) {
      if (!aborter.signal.aborted) this.error = error;
    }
    if (this.aborter === aborter) this.aborter = null;
    this.onChange();
  }

  stop() {
    this.aborter?.abort();
    this.aborter = null;
    this.onChange();
  }

  /** Waits until each has `count` tokens more; rejects if they end, or if `signal` is aborted. */
  async advance(count, signal) {
    const from = this.tokens.length;
    while (this.isRunning && fewest(this.tokens.slice(from)) < count) await sleep(POLL_MS, signal);
    if (!this.isRunning) throw this.error ?? new Error("the streams have ended");
  }
}

function fewest(tokens) {
  const counts = new Array(NUM_STREAMS).fill(0);
  for (const { lane } of tokens) counts[lane] += 1;
  return Math.min(...counts);
}

/** Returns the gaps between tokens of a lane: {startS, endS}, in order of their ends. */
export function gapsOf(tokens) {
  const last = new Map(); // key lane, value when its last token came
  const gaps = [];
  for (const { lane, atS } of tokens) {
    if (last.has(lane)) gaps.push({ startS: last.get(lane), endS: atS });
    last.set(lane, atS);
  }
  return gaps;
}

/** Returns the time on the browser's clock. */
export function nowS() {
  return performance.now() / 1000;
}

/** Waits; rejects at once if `signal` is aborted. */
export function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
  });
}
