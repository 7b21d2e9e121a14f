/** The numbers above the drawings: the current state, and totals since the start. */

import { age, counted, duration, integer, percent } from "./format.js";
import { verdict } from "./distribution.js";
import { quantile } from "./state.js";

const RATES_S = 3; // window for counting tokens a second

const element = (id) => document.getElementById(id);

/** Show the numbers of `state`. */
export function showFigures(state) {
  const slos = state.settings?.resolved;
  showLatency("itl", state.gaps, slos?.itl_slo_s ?? null);
  showLatency("ttft", state.ttfts, slos?.ttft_slo_s ?? null);
  showPerToken(state.gaps);
  showNow(state);
  if (state.stats && state.totals) showTotals(state, state.totals);
}

function show(id, text, isLate = false) {
  if (element(id).textContent !== text) element(id).textContent = text;
  element(id).classList.toggle("is-late", isLate);
}

/** Shows the 99th percentile first: a median hides requests that wait. */
function showLatency(name, measured, sloS) {
  const seconds = measured.map((latency) => latency.seconds);
  const { num, late } = verdict(seconds, sloS);
  const kept = sloS === null || !num ? "" : late ? `, ▲ ${percent(late / num)} late` : ", ✓ in time";
  show(name, duration(quantile(seconds, 0.99)));
  show(`${name}-note`, num ? `median ${duration(quantile(seconds, 0.5))}${kept}` : "", late > 0);
}

/** The mean time per token: with drafts, a gap may bring several tokens. */
function showPerToken(gaps) {
  const sum = (name) => gaps.reduce((total, gap) => total + gap[name], 0);
  show("per-token", duration(gaps.length ? sum("seconds") / sum("numTokens") : null));
}

function showNow(state) {
  const { running, waiting } = state.counts;
  show("num-running", integer(running));
  show("num-waiting", `${integer(waiting)} waiting`);
  const sinceS = state.nowS() - RATES_S;
  const recent = state.steps.filter(({ endS }) => endS > sinceS);
  const sum = (name) => recent.reduce((total, step) => total + step[name], 0);
  const rate = (count) => integer(count / RATES_S);
  show("decode-rate", rate(sum("numDecode") + sum("numAccepted")));
  show("prefill-rate", `+ ${rate(sum("numPrefill"))} of prompts`);
  const drafts = sum("numDrafts");
  show("drafts-right", drafts ? percent(sum("numAccepted") / drafts) : "–");
  show("drafts-right-note", drafts ? `of ${integer(drafts / RATES_S)} a second` : "");
  const cache = state.cache;
  if (!cache) return;
  show("cache", percent(cache.numUsed / cache.numBlocks));
  show("cache-note", `+ ${percent(cache.numCached / cache.numBlocks)} cached`);
}

function showTotals({ stats, latest, about }, { refused, verdicts }) {
  const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
  const kept = verdicts.attained ?? 0;
  const owed = kept + (verdicts.missed ?? 0) + (verdicts.refused ?? 0);
  show("attainment", owed ? percent(kept / owed) : "–", owed > 0 && kept < owed);
  show("attainment-note", owed ? `of ${counted(owed, "request")}` : "none due");
  const numRefused = sum(refused);
  const reasons = Object.entries(refused).filter(([, count]) => count)
    .map(([reason, count]) => `${integer(count)} ${reason.replaceAll("_", " ")}`);
  show("refused", integer(numRefused), numRefused > 0);
  show("refused-note", reasons.join(", "));
  show("preemptions", integer(stats.num_preemptions), stats.num_preemptions > 0);
  const queries = stats.num_prefix_cache_queries;
  show("hit-rate", queries ? percent(stats.num_prefix_cache_hits / queries) : "–");
  show("hit-rate-note", queries ? `of ${counted(queries, "prompt token")}` : "");
  show("restarts", integer(latest.num_restarts), latest.num_restarts > 0);
  show("uptime", age(latest.now_s - about.started_s));
  show("version", `version ${about.version}`);
}
