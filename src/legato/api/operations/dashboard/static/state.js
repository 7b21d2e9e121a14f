/**
 * State from the records of the last seconds: streams with their chunks, steps, latencies.
 *
 * All times are seconds on the server's clock. Fields of records keep their names (snake_case).
 */

/** How long records are kept for drawing, and latencies for percentiles. */
const KEPT_S = 40;
const LATENCY_S = 60;
const MOST_LATENCIES = 10_000;
/** After records were lost, a request without news for this long counts as ended. */
const LOST_S = 3;
const INTERACTIVE = "interactive";

/** The id of the only engine of a server without replicas. */
const ALONE = "";

/**
 * One request. `numPrompt` is null if only its steps are known; `hasGaps` is whether some of its
 * records were lost.
 */
class Stream {
  constructor(id, lane, arrivedS, numPrompt, sloClass) {
    Object.assign(this, { id, lane, arrivedS, numPrompt, sloClass });
    this.chunks = []; // {startS, endS, numTokens, isDecode, numCame, gapS}
    this.numComputed = 0;
    this.numOutput = 0;
    this.lastTokenS = null;
    this.lastGapS = null;
    this.endedS = null;
    this.hasGaps = false;
    this.heardS = arrivedS;
  }

  get phase() {
    if (this.endedS !== null) return "ended";
    if (!this.chunks.length && !this.numComputed) return "waiting";
    return this.lastTokenS === null ? "prefill" : "decode";
  }
}

export class LiveState {
  /** @param {number} windowS how much of the past is drawn; at most KEPT_S */
  constructor(windowS) {
    this.windowS = windowS;
    this.settings = null;
    this.flags = "";
    this.latest = null; // update
    this.totals = null;
    this.about = null;
    this.replicas = []; // ids; empty if the server has an engine of its own
    this.offsetS = 0;
    this.heardS = 0; // when the last update came
    this.#clear();
  }

  #clear() {
    this.streams = new Map(); // key request id
    this.steps = [];
    this.begun = new Map(); // key: replica; value: its running steps in order, by id
    this.lastSteps = new Map(); // key replica
    this.gaps = []; // {atS, seconds, numTokens}: how many came at its end
    this.ttfts = [];
  }

  /** Returns the time on the server's clock, estimated from the fastest update so far. */
  nowS() {
    return performance.now() / 1000 + this.offsetS;
  }

  get stats() {
    return this.latest?.stats ?? null;
  }

  get lastStep() {
    return this.steps.at(-1) ?? null;
  }

  /** The running step of each engine, if known. */
  get runningSteps() {
    return [...this.begun].flatMap(([replica, begun]) => {
      const [step] = begun.values();
      const endedS = this.lastSteps.get(replica)?.endS ?? -Infinity;
      return step ? [{ ...step, startS: Math.max(step.startS, endedS) }] : [];
    });
  }

  /** The running step that began first; null if no step runs. */
  get runningStep() {
    return this.runningSteps.reduce((one, other) => (one?.startS < other.startS ? one : other), null);
  }

  /** Blocks of the KV caches after the latest steps; null before the first. */
  get cache() {
    const steps = [...this.lastSteps.values()];
    if (!steps.length) return null;
    const sum = (name) => steps.reduce((total, step) => total + step[name], 0);
    const numBlocks = sum("numBlocks");
    const numUsed = Math.round(this.stats.kv_usage * numBlocks);
    return { numBlocks, numUsed, numCached: Math.min(sum("numCached"), numBlocks - numUsed) };
  }

  /** Running and waiting requests, in order of arrival. */
  get live() {
    return [...this.streams.values()].filter((stream) => stream.endedS === null);
  }

  /** Numbers of running requests, including those that the running step admits, and of others. */
  get counts() {
    if (!this.latest) return { running: 0, waiting: 0 };
    const admitted = this.runningSteps.flatMap(({ prefills }) => [...prefills.keys()])
      .filter((id) => this.streams.get(id)?.phase === "waiting");
    const running = this.stats.num_running + admitted.length;
    return { running, waiting: Math.max(0, this.latest.num_unfinished - running) };
  }

  /** Applies one update of the server. */
  take(update) {
    if (update.about) this.#begin(update);
    else if (update.num_restarts !== this.latest.num_restarts && !this.replicas.length) {
      this.#endAll(update.now_s); // a fleet reports what a lost replica ends
    }
    this.offsetS = Math.max(this.offsetS, update.now_s - performance.now() / 1000);
    this.heardS = update.now_s;
    const numDropped = this.latest?.num_dropped ?? 0;
    this.latest = update;
    if (update.settings) this.settings = update.settings;
    if (update.settings) this.flags = update.flags;
    if (update.totals) this.totals = update.totals;
    if (update.replicas) this.#setReplicas(update.replicas);
    for (const record of update.records) this.#record(record);
    if (!update.num_unfinished) this.begun.clear();
    if (numDropped !== update.num_dropped) this.#lose(update);
    this.#forget(update.now_s);
  }

  /** Starts anew with the history of a new connection, which may be to another server. */
  #begin(update) {
    this.about = update.about;
    this.offsetS = -Infinity; // server's clock minus the browser's
    this.latest = null;
    this.lostAtS = null;
    this.#clear();
    const { unfinished, steps } = update.history;
    for (const record of unfinished) this.#record(record);
    for (const step of steps) this.#step(step);
    const live = new Set(unfinished.map((record) => record.request_id));
    for (const stream of this.streams.values()) {
      if (!live.has(stream.id)) stream.endedS = stream.heardS;
    }
  }

  #setReplicas(replicas) {
    this.replicas = replicas;
    for (const replica of this.lastSteps.keys()) {
      if (replica !== ALONE && !replicas.includes(replica)) {
        this.lastSteps.delete(replica);
        this.begun.delete(replica);
      }
    }
  }

  /** Ends all running requests of a lost engine; waiting ones are sent to the next. */
  #endAll(nowS) {
    this.begun.clear();
    for (const stream of this.live) {
      if (stream.phase !== "waiting") stream.endedS = nowS;
    }
  }

  /** Notes that records were lost: missing tokens must not pass for a gap. */
  #lose(update) {
    this.lostAtS = update.now_s;
    this.begun.clear();
    for (const stream of this.streams.values()) {
      stream.lastTokenS = null;
      stream.hasGaps = true;
    }
  }

  #record(record) {
    if (record.kind === "sent" || record.kind === "arrived") {
      const stream = this.#stream(record.request_id, record.arrived_s);
      stream.arrivedS = record.arrived_s;
      stream.numPrompt = record.num_prompt_tokens;
      stream.sloClass = record.slo_class;
      stream.endedS = null; // another engine may take it
      stream.heardS = record.taken_s ?? record.arrived_s;
    } else if (record.kind === "ended") {
      const stream = this.#stream(record.request_id, record.ended_s);
      stream.endedS = record.ended_s;
    } else if (record.kind === "begun") {
      this.#begun(record);
    } else if (record.kind === "step") {
      this.#step(record);
    }
  }

  #begun(record) {
    const prefills = new Map(Object.entries(record.prefill_tokens)); // key request id
    const numPrefill = [...prefills.values()].reduce((sum, count) => sum + count, 0);
    if (!this.begun.has(record.replica_id)) this.begun.set(record.replica_id, new Map());
    this.begun.get(record.replica_id).set(record.step_id, {
      replica: record.replica_id, startS: record.planned_s, limitS: record.limit_s, predictedS: record.predicted_s,
      budget: record.budget_tokens, numDecode: record.num_decode_tokens, numPrefill, prefills,
      numDrafts: 0, numAccepted: 0, // unknown until the step has run: drafts count as decode tokens
    });
  }

  #step(record) {
    const step = {
      replica: record.replica_id, startS: record.planned_s, endS: record.ended_s,
      limitS: record.limit_s, predictedS: record.predicted_s, budget: record.budget_tokens,
      numDecode: 0, numPrefill: 0, numDrafts: 0, numAccepted: 0,
      numBlocks: record.num_blocks, numCached: record.num_cached_blocks,
    };
    const begun = this.begun.get(record.replica_id);
    for (const id of begun?.keys() ?? []) {
      if (id <= record.step_id) begun.delete(id);
    }
    this.lastSteps.set(record.replica_id, step);
    for (const [id, numCached] of Object.entries(record.admitted)) {
      this.#stream(id, record.planned_s).numComputed = numCached;
    }
    for (const id of record.preempted) this.#stream(id, record.planned_s).numComputed = 0;
    for (const chunk of record.chunks) this.#chunk(chunk, step);
    this.steps.push(step);
  }

  #chunk(record, step) {
    const stream = this.#stream(record.request_id, step.startS);
    const isDecode = record.kind !== "prefill";
    const numDrafts = record.kind === "verify" ? record.num_samples - 1 : 0;
    const chunk = {
      startS: step.startS, endS: step.endS, numTokens: record.num_tokens, isDecode,
      numCame: record.num_samples && 1 + record.num_accepted, gapS: null,
    };
    step[isDecode ? "numDecode" : "numPrefill"] += record.num_tokens - numDrafts;
    step.numDrafts += numDrafts;
    step.numAccepted += record.num_accepted;
    if (!stream.numOutput && stream.numPrompt !== null) {
      stream.numOutput = Math.max(0, record.start + 1 - stream.numPrompt); // before this page came
    }
    stream.numComputed = record.start + record.num_tokens - numDrafts + record.num_accepted;
    stream.heardS = step.endS;
    stream.chunks.push(chunk);
    if (chunk.numCame) this.#tokens(stream, chunk, step.endS);
  }

  /** Adds tokens; several at once are one delivery, without a gap between them. */
  #tokens(stream, chunk, atS) {
    const counts = (stream.sloClass ?? INTERACTIVE) === INTERACTIVE;
    if (stream.lastTokenS !== null) {
      chunk.gapS = stream.lastGapS = atS - stream.lastTokenS;
      if (counts) this.gaps.push({ atS, seconds: chunk.gapS, numTokens: chunk.numCame });
    } else if (stream.numComputed === stream.numPrompt && !stream.hasGaps && counts) {
      this.ttfts.push({ atS, seconds: atS - stream.arrivedS });
    }
    stream.lastTokenS = atS;
    stream.numOutput += chunk.numCame;
  }

  #stream(id, atS) {
    let stream = this.streams.get(id);
    if (!stream) {
      stream = new Stream(id, this.#freeLane(atS), atS, null, null);
      this.streams.set(id, stream);
    }
    return stream;
  }

  /** Returns the first lane without a running or visible stream. */
  #freeLane(atS) {
    const seen = [...this.streams.values()].filter(({ endedS }) =>
      endedS === null || endedS > atS - this.windowS);
    const taken = new Set(seen.map((stream) => stream.lane));
    let lane = 0;
    while (taken.has(lane)) lane += 1;
    return lane;
  }

  #forget(nowS) {
    dropBefore(this.steps, nowS - KEPT_S, (step) => step.endS);
    dropBefore(this.gaps, nowS - LATENCY_S, (gap) => gap.atS);
    if (this.gaps.length > MOST_LATENCIES) this.gaps.splice(0, this.gaps.length - MOST_LATENCIES);
    dropBefore(this.ttfts, nowS - 10 * LATENCY_S, (ttft) => ttft.atS);
    for (const stream of this.streams.values()) {
      dropBefore(stream.chunks, nowS - KEPT_S, (chunk) => chunk.endS);
      const isLost = this.lostAtS && stream.heardS < this.lostAtS && nowS - this.lostAtS > LOST_S;
      if (stream.endedS === null && isLost) stream.endedS = stream.heardS;
      if (stream.endedS !== null && stream.endedS < nowS - KEPT_S) this.streams.delete(stream.id);
    }
  }
}

function dropBefore(list, limitS, timeS) {
  let count = 0;
  while (count < list.length && timeS(list[count]) < limitS) count += 1;
  if (count) list.splice(0, count);
}

/** Returns the q-quantile of numbers, by the nearest rank; null without numbers. */
export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(q * sorted.length) - 1)];
}
