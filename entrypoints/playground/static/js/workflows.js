// The page of workflows: a form for each one that the server lists, and what it makes.
import { ApiError, get, runWorkflow } from "./api.js";
import { byId, el, onSubmit, tell } from "./dom.js";
import { save } from "./files.js";
import { duration } from "./format.js";
import { Inputs } from "./inputs.js";
import { waitForModels } from "./model.js";
import { BadField } from "./settings.js";
import { toast } from "./toast.js";
import { valuesBox } from "./values.js";

const inputs = new Inputs(byId("inputs"));

let workflows = [];
let running = null; // AbortController while one runs
let urls = []; // of the pictures that are shown

async function start() {
  onSubmit(byId("form"), () => run().catch(report));
  byId("workflow").addEventListener("change", choose);
  await waitForModels((text) => tell(byId("model"), text));
  const { data } = await get("v1/models");
  workflows = data.filter(({ modality }) => modality === "workflow");
  byId("model").textContent = "";
  byId("none").hidden = workflows.length > 0;
  byId("form").hidden = !workflows.length;
  byId("workflow").replaceChildren(...workflows.map(({ id }) => el("option", { value: id }, id)));
  if (workflows.length) choose();
}

function chosen() {
  return workflows.find(({ id }) => id === byId("workflow").value);
}

function choose() {
  running?.abort();
  const { inputs: taken, outputs: made } = chosen();
  inputs.offer(taken);
  byId("makes").textContent = `It makes ${made.map(({ name, type }) => `${name} (${type})`).join(", ")}.`;
  clear();
}

async function run() {
  if (running) {
    running.abort();
    return;
  }
  const fields = { ...inputs.values, model: chosen().id };
  const abort = (running = new AbortController());
  const started = performance.now();
  clear();
  byId("run").textContent = "Stop";
  byId("progress").textContent = "Running…";
  try {
    const made = await runWorkflow(fields, abort.signal);
    if (!abort.signal.aborted) show(made, performance.now() - started);
  } finally {
    running = null;
    byId("run").textContent = "Run";
    if (byId("result").hidden) byId("progress").textContent = "";
  }
}

function clear() {
  byId("result").hidden = true;
  byId("result").replaceChildren();
  urls.forEach((url) => URL.revokeObjectURL(url));
  urls = [];
}

function show({ pictures, values }, ms) {
  byId("progress").textContent = `Done in ${duration(ms)}.`;
  byId("result").append(el("h2", {}, `What ${chosen().id} made`), ...pictures.map(figure));
  if (Object.keys(values).length) byId("result").append(valuesBox(values));
  byId("result").hidden = false;
}

function figure({ name, blob }) {
  const url = URL.createObjectURL(blob);
  urls.push(url);
  const download = el("button", { type: "button", onclick: () => save(blob, `${name}.png`) }, "Download PNG");
  return el("figure", {}, el("img", { src: url, alt: name }), el("figcaption", {}, el("b", {}, name), " ", download));
}

/** Say what went wrong; what is nobody's fault goes to the console as well. */
function report(error) {
  if (error.name === "AbortError") return;
  if (error instanceof BadField) error.field.focus();
  toast(error.message, "error");
  if (!(error instanceof BadField || error instanceof ApiError)) console.error(error);
}

start().catch(report);
