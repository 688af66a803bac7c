// One edit: from what is on the page to a request, and its answers with the times a person sees.
import { edit } from "./api.js";
import { exportMask } from "./mask-export.js";
import { steeringOf } from "./steering.js";
import { countActive, generationSize } from "./tokens.js";

const SMALL_PIXELS = 1_048_576; // up to here three partial images, above one: each is as large as the result

/**
 * settings: {prompt, model, references, control, inputs, lora, seed (text), n, steps, margin, exact, partials}; model "":
 * the first; references and control: see references.js and control-picture.js; inputs: of the model's workflow, see
 * inputs.js; lora "": no adapter; steps and margin null: the server's own. Yields {partial: true, blob, ms} and, per image, {partial: false, blob, seed,
 * stencil, values, tokens, maskBlob, ms}: ms since the call, tokens: see tokens.js, null where the page cannot tell which
 * were computed.
 */
export async function* runEdit({ picture, maskCanvas, model, settings }, signal) {
  const started = performance.now();
  const mask = await exportMask(maskCanvas, picture.size, gridOf(picture, model, settings), signal);
  for await (const answer of edit(fieldsOf(picture, mask.blob, model, settings), signal)) {
    const ms = performance.now() - started;
    if (answer.partial) yield { ...answer, ms };
    else yield { ...answer, ms, maskBlob: mask.blob, tokens: computed(mask.tokens, answer.stencil) };
  }
}

/** Where tokens lie for this picture and these settings. */
export function gridOf(picture, model, settings) {
  const size = generationSize(picture.size, model.native_size, model.token_size, model.max_side);
  const margin = model.page_scheme && !settings.exact ? (settings.margin ?? model.page_scheme.mask_margin) : 0;
  return { size, tokenSize: model.token_size, margin };
}

function fieldsOf(picture, maskBlob, model, { prompt, model: named, references, control, inputs, lora, seed, n, steps, margin, exact, partials }) {
  const isSmall = picture.size.width * picture.size.height <= SMALL_PIXELS;
  const fields = { ...inputs, prompt, seed, n, stream: true };
  if (partials && n === 1 && model.partial_images) fields.partial_images = isSmall ? 3 : 1; // of several images the page could show but one
  if (named) fields.model = named;
  if (lora) fields.lora = lora;
  if (steps !== null) fields.num_inference_steps = steps;
  if (margin !== null && !exact) fields.mask_margin = margin;
  if (exact) fields.mask_aware = false;
  fields.image = picture.file;
  fields["reference_image[]"] = references.map(({ file }) => file);
  if (control) Object.assign(fields, { control_image: control.file, ...steeringOf(control) });
  fields.mask_image = new File([maskBlob], "mask.png", { type: "image/png" });
  return fields;
}

/** The tokens that the answer speaks of: its own count decides whether we drew the right ones. */
function computed(tokens, stencil) {
  if (stencil.cache === "off") return { ...tokens, active: new Uint8Array(tokens.active.length).fill(1) };
  return countActive(tokens) === stencil.active_tokens ? tokens : null;
}
