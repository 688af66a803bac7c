// The status page: what the engines do, asked for every second while the page is seen.
import { ApiError, get } from "./api.js";
import { byId, el, tell } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";
import { inWords, timeline } from "./timeline.js";

const EVERY_MS = 1000;
const SPAN_MS = 10_000;
const MOST_STEPS = 512;
const SILENT_SECONDS = 2; // machines send something twice a second

async function poll() {
  for (;;) {
    if (!document.hidden) await update();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

async function update() {
  try {
    show(await get(`v1/engine/stats?steps=${MOST_STEPS}`));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    tell(byId("model"), error.status === 401 ? "an API key is needed: load this page again" : error.message);
    if (error.status === 401) throw error; // asked, and declined: do not ask every second
  }
}

function show(stats) {
  tell(byId("model"), named(stats.models) || "the model is loading…");
  byId("now").replaceChildren(...now(stats));
  showTimelines(stats.engines);
  byId("engines").replaceChildren(...stats.engines.map(engineRow));
  showMachines(stats.engines);
  byId("worker-models").replaceChildren(...stats.engines.flatMap(modelRows));
  showRefused(stats.engines);
  showCache(stats.cache);
}

/** The models with their devices; adapters, which run where their model does, by name alone. */
function named(models) {
  const adapters = models.filter(({ parent }) => parent).map(({ id }) => id);
  const names = models.filter(({ parent }) => !parent).map(({ id, device }) => `${id}, ${device}`);
  return [...names, ...(adapters.length ? [`adapters: ${adapters.join(", ")}`] : [])].join("; ");
}

function now({ queue, engines, totals }) {
  const alive = engines.filter((engine) => engine.alive).length;
  const tokens = totals.batch_tokens + totals.tokens_skipped;
  return [
    fact("Running", count(queue.running), "images that a worker has begun"),
    fact("Waiting", count(queue.waiting), `${count(queue.admitted)} of at most ${count(queue.limit)} admitted`),
    fact("Engines", `${alive} of ${engines.length}`, alive === engines.length ? "all serve" : "others start, or end"),
    fact("Tokens skipped", tokens ? percent(totals.tokens_skipped / tokens) : "–", `${count(totals.batch_tokens)} computed, ${count(totals.tokens_skipped)} skipped`),
  ];
}

function fact(name, value, detail) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", {}, detail)));
}

function showTimelines(engines) {
  const width = byId("timelines").clientWidth;
  const every = engines.map(({ recent_steps: steps }) => recent(steps));
  byId("steps-summary").textContent = inWords(every.flat());
  const shown = every.flatMap((steps, place) => [
    engines.length > 1 && el("p", { class: "note" }, `Engine ${engines[place].index}`),
    timeline(steps, SPAN_MS, width),
  ]);
  byId("timelines").replaceChildren(...shown.filter(Boolean));
}

function recent(steps) {
  return steps
    .filter((step) => step.ms_ago < SPAN_MS)
    .map((step) => ({ start: step.ms_ago, end: step.ms_ago - step.ms, requests: step.requests, degree: step.degree }));
}

const CAUSES = {
  load: "it could not be loaded",
  deaths: "its work ended workers",
  owner_deaths: "one key's requests ended workers; refused to that key alone",
};

/** What engines refuse for a while, one line each. */
function showRefused(engines) {
  const lines = engines.flatMap(({ index, quarantine }) => (quarantine ?? []).map((each) => refused(index, each)));
  byId("refused").replaceChildren(...lines.map((text) => el("li", {}, text)));
  byId("refused-card").hidden = !lines.length;
}

function refused(index, { model, controlnets, cause, times, seconds_left: left }) {
  const what = controlnets.length ? `the ControlNet ${controlnets.join(" with ")} of ${model}` : model;
  const next = left ? `tried again in ${duration(left * 1000)}` : "tried again with the next request";
  return `${what} on engine ${index}: ${CAUSES[cause]} (${count(times)}×); ${next}`;
}

/** A row for each machine of a cluster; a single machine is not shown. */
function showMachines(engines) {
  const machines = Map.groupBy(engines, ({ machine }) => machine);
  byId("machines-card").hidden = machines.size === 0 || (machines.size === 1 && machines.has(null));
  byId("machines").replaceChildren(...[...machines].map(machineRow));
}

function machineRow([machine, engines]) {
  const states = engines.map(({ index, state }) => `${index} ${state}`).join(", ");
  const silent = Math.max(...engines.map(({ silent_seconds: seconds }) => seconds ?? 0));
  const link = machine === null ? "–" : silent < SILENT_SECONDS ? "in contact" : `silent for ${duration(silent * 1000)}`;
  const cells = [String(engines.length), states, link];
  const name = machine ?? "the server's, or none yet";
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((text) => el("td", {}, text)));
}

function engineRow({ index, alive, state, load, totals, ranks, models }) {
  const workers = ranks?.length ?? 0;
  const living = (ranks ?? []).filter((rank) => rank.alive).length;
  const serving = living < workers ? `serves with ${living} of ${workers} workers` : "serves";
  const cells = [
    alive ? serving : state,
    load ? count(load.num_running) : "–",
    load ? count(load.num_waiting) : "–",
    load ? duration(load.drain_seconds * 1000) : "–",
    totals ? count(totals.steps) : "–",
    totals?.steps ? (totals.batch_requests / totals.steps).toFixed(2) : "–",
  ];
  const row = [el("th", { scope: "row" }, String(index)), ...cells.map((text) => el("td", {}, text))];
  return el("tr", {}, ...row, el("td", { title: names(models ?? {}) }, states(models ?? {})));
}

/** How many of an engine's models are loaded, and how many are in each other state. */
function states(models) {
  const counts = {};
  for (const state of Object.values(models)) counts[state] = (counts[state] ?? 0) + 1;
  return Object.entries(counts).map(([state, number]) => `${count(number)} ${state}`).join(", ") || "–";
}

function names(models) {
  return Object.entries(models).map(([name, state]) => `${name}: ${state}`).join("\n");
}

/** A row for each model that an engine's workers have, load or refuse. */
function modelRows({ index, ranks }) {
  return (ranks ?? []).flatMap(({ models }, rank) => models.map((each) => modelRow(`${index}.${rank}`, each)));
}

function modelRow(worker, { model, state, hits, loads, bytes: size, idle_seconds: idle }) {
  const used = idle === null ? "not yet" : `${duration(idle * 1000)} ago`;
  const cells = [model, state, count(hits), count(loads), bytes(size), used];
  return el("tr", {}, el("th", { scope: "row" }, worker), ...cells.map((text) => el("td", {}, text)));
}

function showCache(cache) {
  if (!cache) {
    byId("cache").replaceChildren(fact("Cache", "off", "this server computes every token of every edit"));
    byId("tiers").replaceChildren();
    return;
  }
  const hits = Object.values(cache.hits).reduce((sum, some) => sum + some, 0);
  byId("cache").replaceChildren(
    fact("Hit ratio", cache.hit_ratio === null ? "–" : percent(cache.hit_ratio), `${count(hits)} found, ${count(cache.misses)} not`),
    fact("Primed", count(cache.primed), "entries: a picture at one noise level"),
  );
  const tiers = Object.keys(cache.budget_bytes).filter((tier) => cache.budget_bytes[tier]);
  byId("tiers").replaceChildren(...tiers.map((tier) => tierFill(tier, cache)));
}

function tierFill(tier, cache) {
  const [used, budget] = [cache.used_bytes[tier] ?? 0, cache.budget_bytes[tier]];
  const detail = `${bytes(used)} of ${bytes(budget)}, ${count(cache.entries[tier] ?? 0)} entries`;
  const meter = el("progress", { max: budget, value: used, "aria-label": `${tier}: ${detail}` });
  return el("section", {}, el("div", {}, el("b", {}, tier), el("span", { class: "note" }, detail)), meter);
}

poll().catch((error) => {
  if (!(error instanceof ApiError)) throw error;
});
