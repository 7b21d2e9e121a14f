/** Ties the parts of the page together: the stream of records, the drawings, the controls. */

import { ApiError, events, setKey } from "./api.js";
import { drawBlocks } from "./blocks.js";
import { Palette } from "./canvas.js";
import { drawDistribution, verdict } from "./distribution.js";
import { comparePastes, OwnStreams } from "./experiment.js";
import { duration, integer, percent, setting } from "./format.js";
import { drawLanes, lateFrom } from "./lanes.js";
import { commonWindow, drawPaste } from "./pastes.js";
import { SettingsForm } from "./settings.js";
import { LiveState, quantile } from "./state.js";
import { drawSteps, stepSummary } from "./steps.js";

const RETRY_MS = 1000;
const RATES_S = 3; // over which tokens a second are counted
const FRAME_MS = 100; // the server may share this machine's cores
const REDUCED_FRAME_MS = 1000;
const FIGURES_MS = 400;
const UNAUTHORIZED = 401;

const element = (id) => document.getElementById(id);
const palette = new Palette();
const state = new LiveState(Number(element("window").value));
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const form = new SettingsForm(element("settings"), element("settings-message"), (settings) => {
  state.settings = settings;
  form.show(settings);
});
const streams = new OwnStreams(showStreams);
let pausedAtS = null;
let pastes = null;

// The stream of records

async function listen() {
  for (;;) {
    try {
      for await (const update of events("dashboard/events")) {
        state.take(update);
        if (update.about) element("model").textContent = update.about.model;
        if (update.settings) form.show(update.settings);
        showConnection(update.num_dropped ? `live, ${update.num_dropped} records lost` : "live", true);
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === UNAUTHORIZED) {
        showConnection("waiting for an API key", false);
        element("key-button").hidden = false;
        await askForKey();
        continue;
      }
      console.warn(error);
    }
    showConnection("reconnecting", false);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function showConnection(text, isLive) {
  if (element("connection-text").textContent !== text) element("connection-text").textContent = text;
  element("connection").classList.toggle("is-live", isLive);
}

/** Resolves once a key was given. */
function askForKey() {
  if (!element("key-dialog").open) element("key-dialog").showModal();
  return new Promise((resolve) => {
    element("key-form").addEventListener("submit", resolve, { once: true });
  });
}

// Drawings

let drawnMs = -Infinity;
let figuresMs = -Infinity;

function frame(nowMs) {
  requestAnimationFrame(frame);
  if (nowMs - drawnMs < (reducedMotion.matches ? REDUCED_FRAME_MS : FRAME_MS)) return;
  drawnMs = nowMs;
  const view = { endS: pausedAtS ?? state.nowS(), windowS: state.windowS };
  drawLanes(element("lanes"), state, view, palette);
  drawSteps(element("steps"), state, view, palette);
  if (nowMs - figuresMs >= FIGURES_MS) {
    figuresMs = nowMs;
    showFigures();
  }
}

function showFigures() {
  const slos = state.settings?.resolved;
  drawBlocks(element("blocks"), state, palette);
  element("last-step").textContent = stepSummary(state.lastStep);
  element("late-key").textContent = `gap over ${setting(lateFrom(state))}`;
  showLatency("itl", "Inter-token latency", state.gaps, slos?.itl_slo_s ?? null);
  showLatency("ttft", "Time to first token", state.ttfts, slos?.ttft_slo_s ?? null);
  showCounts();
  showPromise();
  if (element("table-details").open) showTable();
  if (pastes) showPastes();
}

function showLatency(name, title, measured, sloS) {
  const seconds = measured.map((latency) => latency.seconds);
  drawDistribution(element(`${name}-chart`), seconds, sloS, title, palette);
  element(name).textContent = duration(quantile(seconds, 0.5));
  const { num, late } = verdict(seconds, sloS);
  const p99 = num ? `P99 ${duration(quantile(seconds, 0.99))}` : "";
  const kept = sloS === null || !num ? "" : late ? ` ▲ ${percent(late / num)}` : " ✓";
  element(`${name}-note`).textContent = p99 + kept;
  element(`${name}-note`).classList.toggle("is-late", late > 0);
}

function showCounts() {
  element("num-running").textContent = integer(state.stats?.num_running ?? 0);
  element("num-waiting").textContent = `${integer(state.stats?.num_waiting ?? 0)} waiting`;
  const sinceS = state.nowS() - RATES_S;
  const recent = state.steps.filter(({ endS }) => endS > sinceS);
  const rate = (name) => integer(recent.reduce((sum, step) => sum + step[name], 0) / RATES_S);
  element("decode-rate").textContent = rate("numDecode");
  element("prefill-rate").textContent = `${rate("numPrefill")} of prompts`;
  const cache = state.cache;
  if (!cache) return;
  element("cache").textContent = percent(cache.numUsed / cache.numBlocks);
  element("cache-note").textContent = `+ ${percent(cache.numCached / cache.numBlocks)} cached`;
}

/** Why the latest step could not keep an SLO, where it could not. */
function showPromise() {
  const reason = state.stats?.broken_promise;
  element("broken").hidden = !reason;
  element("broken").textContent = reason ? `⚠ An SLO cannot be kept: ${reason}` : "";
}

function showTable() {
  const rows = state.live.map((stream) => {
    const row = document.createElement("tr");
    const prompt = stream.numPrompt === null ? "unknown" : integer(stream.numPrompt);
    const cells = [stream.id, stream.phase, prompt, integer(stream.numComputed),
      integer(stream.numOutput), duration(stream.lastGapS)];
    for (const text of cells) row.insertCell().textContent = text;
    return row;
  });
  element("table").replaceChildren(...rows);
}

function showPastes() {
  const windowS = commonWindow(pastes.whole, pastes.chunks);
  for (const [name, paste] of Object.entries(pastes)) {
    drawPaste(element(name), paste, windowS, palette);
    element(`${name}-gap`).textContent = `${duration(paste.gapS)} longest gap`;
  }
  element("whole-gap").classList.toggle("is-late", pastes.whole.gapS > 2 * pastes.chunks.gapS);
}

// Controls

function showStreams() {
  element("streams").textContent = streams.isRunning ? "Stop the streams" : "Start 8 streams";
  element("streams").setAttribute("aria-pressed", String(streams.isRunning));
  if (streams.error) tellExperiment(streams.error.message, true);
}

function tellExperiment(text, isError = false) {
  element("experiment-message").textContent = text;
  element("experiment-message").classList.toggle("is-error", isError);
}

async function paste() {
  if (!state.about) return;
  element("paste").disabled = element("streams").disabled = true;
  const wasRunning = streams.isRunning;
  streams.stop();
  streams.start(state.about.max_model_len);
  try {
    tellExperiment("Starting 8 streams …");
    pastes = await comparePastes(streams, state.about.max_model_len, tellExperiment);
    element("results").hidden = false;
    showPastes();
    const [whole, chunks] = [duration(pastes.whole.gapS), duration(pastes.chunks.gapS)];
    tellExperiment(`Computed whole, the prompt stopped the streams for ${whole}; ` +
      `in chunks, for ${chunks} at most.`);
  } catch (error) {
    tellExperiment(error.message, true);
  } finally {
    if (!wasRunning) streams.stop();
    element("paste").disabled = element("streams").disabled = false;
  }
}

element("paste").addEventListener("click", paste);
element("streams").addEventListener("click", () => {
  if (streams.isRunning) streams.stop();
  else if (state.about) streams.start(state.about.max_model_len);
});
element("window").addEventListener("change", (event) => {
  state.windowS = Number(event.target.value);
});
element("pause").addEventListener("click", () => {
  pausedAtS = pausedAtS === null ? state.nowS() : null;
  element("pause").textContent = pausedAtS === null ? "Pause" : "Resume";
  element("pause").setAttribute("aria-pressed", String(pausedAtS !== null));
});
element("key-button").addEventListener("click", () => element("key-dialog").showModal());
element("key-cancel").addEventListener("click", () => element("key-dialog").close());
element("key-form").addEventListener("submit", () => {
  setKey(element("key").value);
  element("key").value = "";
});

listen();
requestAnimationFrame(frame);
