// The form: what is asked for besides picture and mask.
import { byId, el } from "./dom.js";

const MOST_SEED = 2n ** 63n - 1n;

/** A field holds what the server would refuse; `field` is its element. */
export class BadField extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** {prompt, lora, seed, n, steps, margin, exact, partials}: see run.js. A random seed is drawn here, so that it can be repeated. */
export function readSettings() {
  const prompt = byId("prompt").value.trim();
  if (!prompt) throw new BadField(byId("prompt"), "Say what should be there: the prompt is empty.");
  const n = wholeNumber("images", "Images") ?? 1;
  const [steps, margin] = [wholeNumber("steps", "Steps"), wholeNumber("margin", "Margin")];
  return { prompt, lora: byId("adapter").value, seed: readSeed(n), n, steps, margin, exact: false, partials: true };
}

/** What the server does with the fields that are left empty. */
export function showDefaults(model) {
  byId("steps").placeholder = model.default_num_inference_steps;
  byId("margin").placeholder = model.page_scheme ? model.page_scheme.mask_margin : "none";
  byId("margin").disabled = !model.page_scheme;
}

/** Offer the names of the models and of workflows for them; nothing where there is one. */
export function offerModels(names) {
  byId("served").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  byId("served-box").hidden = names.length < 2;
}

/** Offer the model's adapters, and none; nothing where it is served without. What was chosen stays, if it is there. */
export function offerAdapters(names) {
  const chosen = byId("adapter").value;
  byId("adapter").replaceChildren(el("option", { value: "" }, "none"), ...names.map((name) => el("option", { value: name }, name)));
  byId("adapter").value = names.includes(chosen) ? chosen : "";
  byId("adapter-box").hidden = !names.length;
}

function readSeed(n) {
  const text = byId("seed").value.trim();
  if (!text) return String(crypto.getRandomValues(new Uint32Array(1))[0] % (2 ** 32 - n));
  if (!/^\d{1,19}$/.test(text) || BigInt(text) > MOST_SEED) throw new BadField(byId("seed"), `The seed is a whole number from 0 to ${MOST_SEED}.`);
  return BigInt(text).toString();
}

function wholeNumber(id, name) {
  return number(id, `${name} is a whole number`, Number.isInteger);
}

/** What a field says; null: it is empty. */
export function decimal(id, name) {
  return number(id, `${name} is a number`, Number.isFinite);
}

/** rule: what the field says, in words; isOne(value): whether it does. null: it is empty. */
function number(id, rule, isOne) {
  const field = byId(id);
  if (!field.validity.badInput && field.value === "") return null;
  const { min, max } = field;
  const value = Number(field.value);
  if (field.validity.badInput || !isOne(value) || value < Number(min) || value > Number(max)) {
    throw new BadField(field, `${rule} from ${min} to ${max}.`);
  }
  return value;
}
