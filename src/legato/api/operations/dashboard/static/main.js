/** Ties the parts of the page together: the stream of records, the drawings, the controls. */

import { drawBlocks } from "./blocks.js";
import { Palette } from "./canvas.js";
import { Connection } from "./connection.js";
import { drawDistribution } from "./distribution.js";
import { showFigures } from "./figures.js";
import { duration, integer, setting } from "./format.js";
import { drawLanes, lateFrom } from "./lanes.js";
import { PastePanel } from "./paste_panel.js";
import { SettingsForm } from "./settings.js";
import { LiveState } from "./state.js";
import { drawSteps, runningSummary, stepSummary } from "./steps.js";

const FRAME_MS = 100; // the server may share this machine's cores
const REDUCED_FRAME_MS = 1000;
const FIGURES_MS = 400;
const NARROW_WINDOW_S = "2"; // in which a phone's ticks can be told apart

const element = (id) => document.getElementById(id);
if (matchMedia("(max-width: 600px)").matches) element("window").value = NARROW_WINDOW_S;
const palette = new Palette();
const state = new LiveState(Number(element("window").value));
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const panel = new PastePanel(state);
const form = new SettingsForm({
  form: element("settings"), message: element("settings-message"), undo: element("undo"),
  copy: element("copy-flags"),
}, (settings) => {
  state.settings = settings;
  form.show(settings);
});
const connection = new Connection({
  box: element("connection"), text: element("connection-text"), button: element("key-button"),
  dialog: element("key-dialog"), dialogText: element("key-text"), form: element("key-form"),
  cancel: element("key-cancel"),
}, (update) => {
  state.take(update);
  if (update.about) {
    element("model").textContent = update.about.model;
    panel.enable();
  }
  if (update.settings) form.show(update.settings, update.flags);
});
let pausedAtS = null;

// Drawings

let drawnMs = -Infinity;
let figuresMs = -Infinity;

function frame(nowMs) {
  requestAnimationFrame(frame);
  if (nowMs - drawnMs < (reducedMotion.matches ? REDUCED_FRAME_MS : FRAME_MS)) return;
  drawnMs = nowMs;
  const view = { endS: shownUntilS(), windowS: state.windowS };
  drawLanes(element("lanes"), state, view, palette);
  drawSteps(element("steps"), state, view, palette);
  if (nowMs - figuresMs >= FIGURES_MS) {
    figuresMs = nowMs;
    showAll();
  }
}

/** Now, but while nothing is heard of the server: what it does then is not known. */
function shownUntilS() {
  return pausedAtS ?? (connection.isLive ? state.nowS() : state.heardS);
}

function showAll() {
  const slos = state.settings?.resolved;
  drawBlocks(element("blocks"), state, palette);
  drawLatency("itl-chart", "Inter-token latency", state.gaps, slos?.itl_slo_s ?? null);
  drawLatency("ttft-chart", "Time to first token", state.ttfts, slos?.ttft_slo_s ?? null);
  element("last-step").textContent = stepSummary(state, shownUntilS());
  element("last-step").classList.toggle("is-late", runningSummary(state, shownUntilS()) !== null);
  element("late-key").textContent = `gap over ${setting(lateFrom(state))}`;
  showFigures(state);
  showTrouble();
  if (element("table-details").open) showTable();
  panel.show(palette);
}

function drawLatency(id, title, measured, sloS) {
  drawDistribution(element(id), measured.map(({ seconds }) => seconds), sloS, title, palette);
}

/** Why there is no engine, or why the latest step could not keep an SLO. */
function showTrouble() {
  const broken = state.stats?.broken_promise;
  const text = state.latest?.trouble || (broken ? `An SLO cannot be kept: ${broken}` : "");
  element("trouble").hidden = !text;
  if (element("trouble").textContent !== text) element("trouble").textContent = text;
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

// Controls

element("window").addEventListener("change", (event) => {
  state.windowS = Number(event.target.value);
});
element("pause").addEventListener("click", () => {
  pausedAtS = pausedAtS === null ? state.nowS() : null;
  element("pause").textContent = pausedAtS === null ? "Pause" : "Resume";
  element("pause").setAttribute("aria-pressed", String(pausedAtS !== null));
});

connection.follow();
requestAnimationFrame(frame);
