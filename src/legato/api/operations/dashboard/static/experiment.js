/** Shows the effect of a long prompt on running streams: whole, in chunks, and under a promise. */

import { events, request } from "./api.js";
import { duration, setting } from "./format.js";
import { gapsOf, nowS, sleep } from "./own_streams.js";
import { changeSettings } from "./settings.js";
import { quantile } from "./state.js";

const LONG_TOKENS = 7000;
const ANSWER_TOKENS = 4;
const SETTLE_TOKENS = 12; // of each stream, before the prompt is sent
const AFTER_MS = 800;
const CHUNK_TOKENS = 512;
const PROMISED_STEPS = 6; // steps of the streams alone: still faster than anyone reads
const LONGEST_S = 600;
const PATIENCE = 6; // times the whole prompt's time; a prompt that waits longer is not admitted
const CLAUSE = "The parties agree that nothing in this clause shall delay what is due to others, " +
  "and that each of them gives notice of any change in writing within thirty days. ";

const NO_PROMISE = { itl_slo_s: "off", tpot_slo_s: null };

/**
 * Send a long prompt beside running streams three times, and put the settings back.
 *
 * @param {OwnStreams} streams that run
 * @param {{maxModelLen: number, signal: AbortSignal, onStart: Function, onEnd: Function}} how
 *   `onStart` gets {index, title, numTokens, requestId} of each pass as it begins, `onEnd` its
 *   result {title, promiseS, tokens, pastedS, firstTokenS, isGivenUp, gapS, ttftS}: the longest
 *   gap of any stream while the prompt was computed; if it was given up, times until then
 * @returns {Promise<object[]>} the results; rejects if `signal` is aborted
 */
export async function comparePastes(streams, { maxModelLen, signal, onStart, onEnd }) {
  const { asked, most_batched_tokens: most } = await request("settings"); // others may change them
  const restore = (options) => changeSettings(asked, options);
  const restoreAtOnce = () => restore({ keepalive: true });
  addEventListener("pagehide", restoreAtOnce);
  try {
    const prompt = await longPrompt(maxModelLen, signal);
    await streams.advance(SETTLE_TOKENS, signal);
    const passes = passesFor(asked, most, promiseFor(asked, streams));
    const results = [];
    for (const [index, { changes, ...pass }] of passes.entries()) {
      const requestId = `dashboard-${index}-${Math.random().toString(36).slice(2)}`;
      onStart({ index, title: pass.title, numTokens: prompt.numTokens, requestId });
      await changeSettings(changes);
      const patienceS = results.length ? PATIENCE * results[0].ttftS : LONGEST_S;
      results.push({ ...pass, ...await paste(streams, prompt.text, requestId, signal, patienceS) });
      onEnd(results.at(-1));
    }
    return results;
  } finally {
    removeEventListener("pagehide", restoreAtOnce);
    await restore();
  }
}

/** Returns the server's settings for each paste. */
function passesFor(asked, most, promiseS) {
  const tokens = Math.min(most, asked.max_num_batched_tokens ?? CHUNK_TOKENS);
  const chunked = { enable_chunked_prefill: true, policy: "stall-free" };
  return [
    {
      title: "Whole", promiseS: null,
      changes: { ...NO_PROMISE, enable_chunked_prefill: false, max_num_batched_tokens: null },
    },
    {
      title: `In chunks of ${tokens}`, promiseS: null,
      changes: { ...NO_PROMISE, ...chunked, max_num_batched_tokens: tokens },
    },
    {
      title: `Promised ${setting(promiseS)}`, promiseS,
      changes: { ...chunked, max_num_batched_tokens: null, tpot_slo_s: null, itl_slo_s: promiseS },
    },
  ];
}

/** Returns the server's promise, or one from the streams' pace, in hundredths of a second. */
function promiseFor(asked, streams) {
  if (typeof asked.itl_slo_s === "number") return asked.itl_slo_s;
  const gaps = gapsOf(streams.tokens).map(({ startS, endS }) => endS - startS);
  return Math.ceil(100 * PROMISED_STEPS * quantile(gaps, 0.5)) / 100;
}

async function paste(streams, prompt, requestId, signal, patienceS) {
  await streams.advance(SETTLE_TOKENS, signal);
  const pastedS = nowS();
  const answeredS = await firstToken(prompt, requestId, signal, patienceS);
  const firstTokenS = answeredS ?? nowS();
  await sleep(AFTER_MS, signal);
  await streams.advance(1, signal);
  const tokens = streams.tokens.filter(({ atS }) => atS > pastedS - 1);
  return {
    tokens, pastedS, firstTokenS, isGivenUp: answeredS === null, ttftS: firstTokenS - pastedS,
    gapS: longestGap(tokens, pastedS, firstTokenS),
  };
}

/** Returns the prompt's text and its number of tokens, limited by the model's context. */
async function longPrompt(maxModelLen, signal) {
  const most = Math.min(LONG_TOKENS, maxModelLen - ANSWER_TOKENS - 32);
  const text = CLAUSE.repeat(Math.floor(most / await countTokens(CLAUSE, signal)));
  return { text, numTokens: await countTokens(text, signal) };
}

async function countTokens(prompt, signal) {
  return (await request("tokenize", { method: "POST", body: { prompt }, signal })).count;
}

/** Returns when the first token came; null if it took longer than `patienceS`. */
async function firstToken(prompt, requestId, signal, patienceS) {
  const body = {
    prompt, max_tokens: ANSWER_TOKENS, ignore_eos: true, stream: true,
    cache_salt: requestId, // computed anew each time
  };
  const late = AbortSignal.timeout(1000 * patienceS);
  const options = { method: "POST", body, signal: AbortSignal.any([signal, late]), requestId };
  let firstS = null;
  try {
    for await (const event of events("v1/completions", options)) {
      if (event.error) throw new Error(event.error.message);
      firstS ??= nowS();
    }
  } catch (error) {
    if (!late.aborted || signal.aborted) throw error;
  }
  return firstS;
}

/** Returns the longest gap of any stream that touches a span. */
function longestGap(tokens, fromS, toS) {
  const gaps = gapsOf(tokens).filter(({ startS, endS }) => endS >= fromS && startS <= toS);
  return Math.max(0, ...gaps.map(({ startS, endS }) => endS - startS));
}

/** Describes the passes' results and the promise's cost in a sentence or two. */
export function verdictOf([whole, chunks, promised]) {
  const chunked = `Computed whole, the prompt stopped the streams for ${duration(whole.gapS)}; ` +
    `${chunks.title.toLowerCase()}, for ${duration(chunks.gapS)} at most; under a promise of ` +
    `${setting(promised.promiseS)}, `;
  if (promised.isGivenUp) {
    return `${chunked}it got no first token within ${duration(promised.ttftS)}: beside these ` +
      "streams, this machine has no time left for it. Promise more, or have fewer streams.";
  }
  const ratio = promised.ttftS / whole.ttftS;
  const price = ratio > 1.05
    ? `The price: its first token came after ${duration(promised.ttftS)} instead of ` +
      `${duration(whole.ttftS)}, ${ratio.toFixed(1)} times as long.`
    : `It cost nothing: its first token came after ${duration(promised.ttftS)}, and after ` +
      `${duration(whole.ttftS)} whole.`;
  return `${chunked}for ${duration(promised.gapS)}. ${price}`;
}
