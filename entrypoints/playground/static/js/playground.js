// The playground's page: wires picture, mask, form and results together, and holds what is open.
import { ApiError, fileAt } from "./api.js";
import { comparison } from "./comparison.js";
import { ControlPicture } from "./control-picture.js";
import { copyText } from "./copy.js";
import { costStrip } from "./cost.js";
import { byId, el, onSubmit, tell } from "./dom.js";
import { acceptFiles, base64Of, keepPage, save } from "./files.js";
import { duration, percent } from "./format.js";
import { markExample, readExamples, showChips, showGallery } from "./gallery.js";
import { History } from "./history.js";
import { Inputs } from "./inputs.js";
import { hasKey } from "./key.js";
import { theWorker } from "./mask-export.js";
import { MaskFinder } from "./mask-finder.js";
import { Mask } from "./mask.js";
import { waitForModels, workflowOf } from "./model.js";
import { openPicture, UnreadablePicture, viewOf } from "./picture.js";
import { References } from "./references.js";
import { gridOf, runEdit } from "./run.js";
import { BadField, offerAdapters, offerModels, readSettings, showDefaults } from "./settings.js";
import { addShortcuts } from "./shortcuts.js";
import { asCurl, asPython, isInline, namedFiles } from "./snippets.js";
import { Stage } from "./stage.js";
import { activeTokens, countActive, generationSize } from "./tokens.js";
import { toast } from "./toast.js";
import { Tools } from "./tools.js";
import { valuesBox } from "./values.js";

const MASK_COLOUR = "#ff2d78";

const stage = new Stage();
const mask = new Mask(byId("mask"), MASK_COLOUR);
const tools = new Tools(stage, mask, (point, removes) => find(() => finder.atPoint(picture, point, removes)));
const finder = new MaskFinder(mask, { reveal: backToMask, report });
const history = new History(byId("history-box"), byId("history"), (entry) => showEntry(entry));
const references = new References(report);
const controlPicture = new ControlPicture(report);
const inputs = new Inputs(byId("inputs"));

let served = []; // all that the server told of, the default model first
let model = null; // the chosen one; null until the server told
let examples = [];
let picture = null; // what is edited
let connecting = null; // the promise of `connect`, while it waits
let asked = 0; // pictures so far
let opened = 0; // number of the one that is open: what was asked for before it is dropped
let selections = 0; // parts so far that were asked for: the last one is selected
let running = null; // AbortController while an edit runs
let shown = null; // the history entry on the stage, null while the mask is drawn

// ----------------------------------------------------------------------------------------------------------- picture

/** Open the picture that `read` resolves to, see picture.js. example: that it is of. */
async function open(read, example = null) {
  const number = (asked += 1);
  try {
    const found = await read();
    if (number < opened) return;
    setPicture(found, number);
    mask.reset(stage.size);
    offerParts(example);
  } catch (error) {
    report(error);
  }
}

function openFile(blob, name) {
  return open(() => openPicture(blob, name));
}

/** number: one of the history is asked for now. */
function setPicture(found, number = (asked += 1)) {
  opened = number;
  running?.abort();
  tools.cancel();
  finder.cancel();
  picture = found;
  stage.showPicture(found.view);
  showResult(null);
  markExample(byId("gallery"), examples, examples.find(({ url }) => url === found.url) ?? null);
  fitBrush();
  tellSize();
}

function openExample(example) {
  return open(async () => openPicture(await fileAt(example.url), example.name, example.url), example);
}

/** Offer an example's parts to select, and prompts for them; nothing for a user's own picture. */
function offerParts(example) {
  const garments = example?.garments ?? [];
  byId("parts-box").hidden = !garments.length;
  showChips(byId("parts"), garments.map(({ kind }) => `the ${kind}`), (_, index) => selectPart(garments[index]));
  showPrompts(garments[0]?.prompts ?? []);
}

async function selectPart(garment) {
  const of = picture;
  const number = (selections += 1);
  try {
    const bitmap = await createImageBitmap(await fileAt(garment.maskUrl));
    if (picture !== of || number < selections) return;
    backToMask();
    mask.select(bitmap);
    const isOurs = !byId("prompt").value || examples.some(({ garments }) => garments.some(({ prompts }) => prompts.includes(byId("prompt").value)));
    if (isOurs) byId("prompt").value = garment.prompts[0];
    showPrompts(garment.prompts);
  } catch (error) {
    report(error);
  }
}

function showPrompts(prompts) {
  showChips(byId("chips"), prompts, (text) => {
    byId("prompt").value = text;
  });
}

/** Say at which size it is really edited. */
function tellSize() {
  const note = byId("size-note");
  note.textContent = "";
  if (!model || !picture) return;
  const { width, height } = picture.size;
  const size = generationSize(picture.size, model.native_size, model.token_size, model.max_side);
  if (size.width === width && size.height === height) return;
  note.textContent = `${width} × ${height} pixels. This model edits it at ${size.width} × ${size.height} and pastes what is under the mask back at full size; everything else stays as it is.`;
}

// -------------------------------------------------------------------------------------------------------------- mask

function fitBrush() {
  const slider = byId("brush-size");
  slider.max = Math.round(Math.max(32, Math.min(picture.view.width, picture.view.height) / 2));
  slider.value = Math.round(Math.max(8, Math.min(picture.view.width, picture.view.height) / 9));
  tools.size = Number(slider.value);
}

function onMaskChange() {
  byId("undo").disabled = !mask.canUndo;
  byId("redo").disabled = !mask.canRedo;
  byId("coverage").textContent = coverage();
  byId("run").classList.toggle("waits", !running && (mask.isEmpty || !model)); // a click says for what
}

/** What the mask will cost, reckoned from the view; the answer of the edit says it exactly. */
function coverage() {
  if (!picture) return "";
  if (mask.isEmpty) return "Paint over what should change.";
  const area = percent(mask.share);
  if (!model?.page_scheme) return `The mask covers ${area} of the picture.`;
  const margin = byId("margin").value === "" ? null : Number(byId("margin").value);
  const { size, tokenSize, margin: grown } = gridOf(picture, model, { margin, exact: false });
  const tokens = activeTokens(mask.selected, mask.size, size, tokenSize, grown);
  return `The mask covers ${area} of the picture: about ${countActive(tokens)} of ${tokens.active.length} tokens to compute.`;
}

function backToMask() {
  if (running) return;
  showResult(null);
  stage.mode = "draw";
  stage.hideTokens();
}

function changeMask() {
  backToMask();
  stage.area.focus(); // the button is gone
}

/** Ask the server for a mask, unless an edit runs. */
function find(ask) {
  if (picture && !running) ask();
}

// -------------------------------------------------------------------------------------------------------------- edit

async function run() {
  if (running) {
    running.abort();
    return;
  }
  try {
    if (!served.length) await connect(); // they declined to give a key, or it still loads
    while (model?.id !== byId("served").value) await choose(); // its facts have not come yet, or could not be had
    await Promise.all([references.settled, controlPicture.settled]);
    if (!(await finder.settled)) return; // why is told
    if (running) return; // by a second click meanwhile
    const settings = ready();
    if (settings) await runOnce(settings);
  } catch (error) {
    report(error);
  }
}

/** The settings, or null where something is missing, which is told. */
function ready() {
  if (!picture) return null;
  if (mask.isEmpty) {
    backToMask();
    stage.area.focus();
    toast("Paint over what should change first, or select a part.", "info");
    return null;
  }
  return { ...readSettings(), model: nameOf(model), references: references.all, control: controlPicture.settings, inputs: inputs.values, written: inputs.written };
}

/** The name that requests give for a model; "": none, for the first. */
function nameOf({ id }) {
  return id === served[0].id ? "" : id;
}

/** Edit what is open, and show what comes. isKept: it goes into the history. Returns the last image's entry. */
async function runOnce(settings, isKept = true) {
  const of = { picture, saved: mask.save(), model };
  const abort = (running = new AbortController());
  let [entry, firstMs] = [null, null];
  begin();
  try {
    for await (const answer of runEdit({ picture, maskCanvas: mask.canvas, model, settings }, abort.signal)) {
      firstMs ??= answer.ms;
      const view = await viewOf(answer.blob, of.picture.size);
      if (abort.signal.aborted) return null;
      stage.showAfter(view);
      byId("sheet").dataset.pictures = Number(byId("sheet").dataset.pictures) + 1;
      if (!answer.partial) {
        entry = entryOf(of, settings, { ...answer, view, firstMs: firstMs === answer.ms ? null : firstMs });
        if (isKept) history.add(entry);
      }
    }
  } finally {
    running = null;
    finish(entry?.picture === picture ? entry : null); // another one may have been opened meanwhile
  }
  return entry;
}

function begin() {
  tools.cancel();
  finder.cancel();
  showResult(null);
  stage.hideTokens();
  stage.showAfter(picture.view);
  byId("sheet").dataset.pictures = "0";
  stage.mode = "run";
  byId("viewport").scrollIntoView({ block: "nearest" });
  byId("run").textContent = "Stop";
  byId("run").classList.remove("waits");
  byId("progress").textContent = "Editing…";
}

function finish(entry) {
  byId("run").textContent = "Edit";
  byId("progress").textContent = entry ? `Done in ${duration(entry.ms)}.` : "";
  stage.mode = "draw";
  if (entry) showResult(entry);
  onMaskChange();
}

function entryOf(of, settings, answer) {
  return { ...answer, picture: of.picture, saved: of.saved, model: of.model, settings: { ...settings, seed: answer.seed, n: 1 }, compared: null };
}

/** The same edit with every token computed, beside it. Both are timed alike: warm, and without partial images. */
async function runExact(entry) {
  if (running) return;
  mask.restore(entry.saved); // what is drawn may have changed since, and what is chosen
  if (entry.model.id !== model.id) use(entry.model);
  try {
    const settings = { ...entry.settings, partials: false };
    const aware = await runOnce(settings, false);
    const exact = aware && (await runOnce({ ...settings, exact: true }));
    if (exact) entry.compared = { aware, exact };
  } catch (error) {
    report(error);
  }
  if (picture === entry.picture) showEntry(entry);
}

// ------------------------------------------------------------------------------------------------------------ result

function showEntry(entry) {
  if (running) return;
  finder.cancel();
  if (picture !== entry.picture) {
    setPicture(entry.picture);
    mask.reset(stage.size);
    offerParts(examples.find(({ url }) => url === entry.picture.url) ?? null);
  }
  mask.restore(entry.saved);
  if (entry.model.id !== model.id) use(entry.model);
  byId("prompt").value = entry.settings.prompt;
  references.all = entry.settings.references;
  controlPicture.settings = entry.settings.control;
  inputs.written = entry.settings.written;
  byId("adapter").value = entry.settings.lora;
  showResult(entry);
}

/** Show a result on the stage and below it; null: none. */
function showResult(entry) {
  shown = entry;
  history.mark(entry);
  byId("result").hidden = byId("view-buttons").hidden = !entry;
  byId("result").replaceChildren();
  if (!entry) return;
  stage.showAfter(entry.view);
  stage.hideTokens();
  stage.mode = "result";
  byId("result").append(el("h2", {}, "What it cost"), costStrip(entry.stencil, entry.ms, entry.firstMs), actions(entry));
  if (entry.values) byId("result").append(valuesBox(entry.values));
  if (entry.compared) byId("result").append(comparison(entry.compared));
}

function actions(entry) {
  const overlay = el("button", { type: "button", id: "show-tokens", "aria-pressed": "false", disabled: !entry.tokens }, "Show tokens");
  overlay.addEventListener("click", () => toggleTokens(overlay, entry));
  const button = (id, text, click) => el("button", { type: "button", id, onclick: click }, text);
  return el(
    "div",
    { class: "actions" },
    overlay,
    !entry.settings.exact && button("run-exact", "Run exact", () => runExact(entry)),
    el("button", { type: "button", id: "download", onclick: () => save(entry.blob, fileName(entry)) }, "Download PNG"),
    button("copy-curl", "Copy as curl", () => copy(entry, asCurl)),
    button("copy-python", "Copy as Python", () => copy(entry, asPython)),
    button("save-mask", "Save mask", () => save(entry.maskBlob, "mask.png")),
  );
}

function toggleTokens(button, entry) {
  const isOn = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(isOn));
  if (isOn) stage.showTokens(entry.tokens);
  else stage.hideTokens();
}

async function copy(entry, asSnippet) {
  try {
    const maskText = await base64Of(entry.maskBlob);
    const base = new URL("./", location.href).href;
    await copyText(asSnippet({ base, picture: entry.picture, maskText, settings: entry.settings, needsKey: hasKey() }));
    if (!isInline(maskText)) toast("It reads mask.png: save the mask beside it.");
    tellRenamed(entry);
  } catch (error) {
    report(error);
  }
}

/** Say which files a copied request reads under another name than they have: pasted pictures are all called alike. */
function tellRenamed({ picture, settings }) {
  const renamed = namedFiles(picture, settings).filter(({ file, name }) => file.name !== name);
  if (renamed.length) toast(`Names are taken: it reads ${renamed.map(({ file, name }) => `“${file.name}” as ${name}`).join(", ")}.`);
}

function fileName(entry) {
  return `${entry.picture.file.name.replace(/\.[^.]*$/, "")}-${entry.settings.seed}.png`;
}

async function useResult() {
  if (shown) await openFile(shown.blob, fileName(shown));
  if ([byId("use-result"), document.body].includes(document.activeElement)) stage.area.focus(); // the button is gone
}

/** Say what went wrong; what is nobody's fault goes to the console as well. */
function report(error) {
  if (error.name === "AbortError") return;
  if (error instanceof BadField) {
    error.field.closest("details")?.setAttribute("open", "");
    error.field.focus();
  }
  toast(error.message, "error");
  if (!(error instanceof BadField || error instanceof ApiError || error instanceof UnreadablePicture)) console.error(error);
}

// ------------------------------------------------------------------------------------------------------------ wiring

function wire() {
  mask.addEventListener("change", onMaskChange);
  byId("margin").addEventListener("input", onMaskChange);
  onSubmit(byId("form"), run);
  for (const radio of document.getElementsByName("tool")) {
    radio.addEventListener("change", () => {
      tools.name = radio.value;
      byId("pick-removes").hidden = radio.value !== "pick";
      backToMask();
    });
  }
  onSubmit(byId("words-form"), () => find(() => finder.byWords(picture)));
  byId("served").addEventListener("change", () => choose().catch(report));
  byId("brush-size").addEventListener("input", ({ target }) => {
    tools.size = Number(target.value);
  });
  onClick({ invert: () => mask.invert(), clear: () => mask.clear(), undo: () => mask.undo(), redo: () => mask.redo() }, backToMask);
  onClick({ "zoom-in": () => stage.zoomBy(1.5), "zoom-out": () => stage.zoomBy(1 / 1.5), "zoom-fit": () => stage.zoomOut() });
  onClick({ "back-to-mask": changeMask, "use-result": useResult, help: () => byId("help-dialog").showModal() });
  addShortcuts({ run, sizeBy });
  acceptFiles(byId("upload"), document, ([file]) => openFile(file, file.name));
  keepPage();
}

function onClick(handlers, before = () => {}) {
  for (const [id, handler] of Object.entries(handlers)) {
    byId(id).addEventListener("click", () => {
      before();
      handler();
    });
  }
}

function sizeBy(factor) {
  const slider = byId("brush-size");
  slider.value = Math.round(tools.size * factor) + Math.sign(factor - 1);
  tools.size = Number(slider.value);
}

async function start() {
  wire();
  theWorker();
  onMaskChange();
  await Promise.all([offerExamples(), connect()]);
}

/** Offer them, and open the first unless the user has been quicker. */
async function offerExamples() {
  examples = await readExamples();
  showGallery(byId("gallery"), examples, openExample);
  if (!asked) await openExample(examples[0]);
}

/** Wait until the server tells what it serves. */
function connect() {
  connecting ??= meetModel().finally(() => {
    connecting = null;
  });
  return connecting;
}

async function meetModel() {
  served = await waitForModels((text) => tell(byId("model"), text));
  offerModels(served.filter(({ parent }) => !parent).map(({ id }) => id));
  await choose();
}

/** Use the model that is chosen. */
async function choose() {
  const chosen = byId("served").value;
  const facts = served.find(({ id }) => id === chosen);
  const workflow = await workflowOf(facts);
  if (byId("served").value === chosen) use({ ...facts, ...workflow });
}

/** Offer what a model takes. */
function use(facts) {
  model = facts;
  byId("served").value = model.id;
  byId("model").textContent = `${model.id}, ${model.device}`;
  showDefaults(model);
  finder.offer(model.selects_by, nameOf(model));
  references.offer(model.references?.most ?? 0);
  controlPicture.offer(Object.keys(model.controls), model.edit_control_scale);
  inputs.offer(model.inputs);
  byId("inputs-box").hidden = !model.inputs.length;
  offerAdapters(served.filter(({ parent }) => parent === model.id).map(({ id }) => id));
  tellSize();
  onMaskChange();
}

start().catch(report);
