/** What a long prompt does to running streams, measured where they are read: in the browser. */

import { events, request } from "./api.js";
import { changeSettings } from "./settings.js";

const NUM_STREAMS = 8;
const STREAM_TOKENS = 3000;
const LONG_TOKENS = 7000;
const ANSWER_TOKENS = 4;
const SETTLE_TOKENS = 12; // of each stream, before the prompt is sent
const AFTER_MS = 800;

const TOPICS = ["the sea", "a lighthouse", "winter", "the orchestra", "a night train", "bread",
  "the stars", "an old clock"];
const CLAUSE = "The parties agree that nothing in this clause shall delay what is due to others, " +
  "and that each of them gives notice of any change in writing within thirty days. ";

/** Streams of the page's own, which share a connection: a browser has but six to a server. */
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

  /** Start them; they run until they are stopped or have written all that fits. */
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

  /** Until each has written `count` tokens more. */
  async advance(count) {
    const from = this.tokens.length;
    while (this.isRunning && fewest(this.tokens.slice(from)) < count) await sleep(30);
    if (!this.isRunning) throw this.error ?? new Error("the streams have ended");
  }
}

/**
 * Send a long prompt beside running streams, once whole and once in chunks, and put the settings
 * back.
 *
 * @param {OwnStreams} streams that run
 * @param {(text: string) => void} tell what is going on
 * @returns {Promise<{whole: object, chunks: object}>} each {tokens, pastedS, firstTokenS, gapS,
 *   ttftS}; the longest gap of any stream while the prompt was computed
 */
export async function comparePastes(streams, maxModelLen, tell) {
  const { asked: settings } = await request("settings"); // another page may have changed them
  const restore = (options) => changeSettings(settings, options);
  const restoreAtOnce = () => restore({ keepalive: true });
  addEventListener("pagehide", restoreAtOnce);
  try {
    const prompt = await longPrompt(maxModelLen);
    tell(`Computing ${prompt.numTokens} tokens whole …`);
    await changeSettings({
      enable_chunked_prefill: false, max_num_batched_tokens: null, itl_slo_s: null, tpot_slo_s: null,
    });
    const whole = await paste(streams, prompt.text);
    tell(`Computing ${prompt.numTokens} tokens in chunks …`);
    await changeSettings(chunked(settings));
    const chunks = await paste(streams, prompt.text);
    return { whole, chunks };
  } finally {
    removeEventListener("pagehide", restoreAtOnce);
    await restore();
  }
}

/** The settings with chunks, and a budget that goes with them. */
function chunked(settings) {
  if (settings.enable_chunked_prefill) return settings;
  return { ...settings, enable_chunked_prefill: true, max_num_batched_tokens: null };
}

async function paste(streams, prompt) {
  await streams.advance(SETTLE_TOKENS);
  const pastedS = nowS();
  const firstTokenS = await firstToken(prompt);
  await sleep(AFTER_MS);
  await streams.advance(1);
  const tokens = streams.tokens.filter(({ atS }) => atS > pastedS - 1);
  return {
    tokens, pastedS, firstTokenS, ttftS: firstTokenS - pastedS,
    gapS: longestGap(tokens, pastedS, firstTokenS),
  };
}

/** The prompt's text, and how many tokens of it there are: as many as a small context leaves. */
async function longPrompt(maxModelLen) {
  const { count } = await request("tokenize", { method: "POST", body: { prompt: CLAUSE } });
  const repeats = Math.floor(Math.min(LONG_TOKENS, maxModelLen - ANSWER_TOKENS - 32) / count);
  return { text: CLAUSE.repeat(repeats), numTokens: repeats * count };
}

async function firstToken(prompt) {
  const body = {
    prompt, max_tokens: ANSWER_TOKENS, ignore_eos: true, stream: true,
    cache_salt: `dashboard ${Math.random()}`, // computed anew each time
  };
  let firstS = null;
  for await (const event of events("v1/completions", { method: "POST", body })) {
    if (event.error) throw new Error(event.error.message);
    firstS ??= nowS();
  }
  return firstS;
}

/** The longest time that a lane of tokens stood still, of the gaps that end in or after a span. */
function longestGap(tokens, startS, endS) {
  const last = new Map(); // key lane, value when its last token came
  let longest = 0;
  for (const { lane, atS } of tokens) {
    const before = last.get(lane);
    const isBeside = before !== undefined && atS >= startS && before <= endS;
    if (isBeside) longest = Math.max(longest, atS - before);
    last.set(lane, atS);
  }
  return longest;
}

function fewest(tokens) {
  const counts = new Array(NUM_STREAMS).fill(0);
  for (const { lane } of tokens) counts[lane] += 1;
  return Math.min(...counts);
}

function nowS() {
  return performance.now() / 1000;
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
