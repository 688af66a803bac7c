// The cost strip: what an edit computed, what it took from the cache, and where its time went. From `stencil` alone.
import { el } from "./dom.js";
import { count, duration, percent } from "./format.js";

const PARTS = {
  queue: "waiting",
  preprocess: "reading the upload",
  encode: "encoding",
  prime: "priming",
  denoise: "denoising",
  decode: "decoding",
  postprocess: "pasting and writing",
};

/** An element that tells it. ms: what the person waited, firstMs: until the first picture came, or null. */
export function costStrip(stencil, ms, firstMs) {
  return el("div", { class: "cost" }, facts(stencil, ms, firstMs), el("p", {}, inWords(stencil)), stageBar(stencil.ms), ...remarks(stencil));
}

/** Tokens of all steps: {computed, skipped}. */
export function tokenSums(stencil) {
  const full = Math.min(stencil.full_steps, stencil.steps_computed);
  const masked = stencil.steps_computed - full;
  return {
    computed: full * stencil.image_tokens + masked * stencil.active_tokens,
    skipped: masked * (stencil.image_tokens - stencil.active_tokens),
  };
}

function facts(stencil, ms, firstMs) {
  const cells = [
    ["Time", duration(ms), firstMs === null ? "until the result" : `first picture after ${duration(firstMs)}`],
    ["Mask ratio", percent(stencil.mask_ratio), `${stencil.active_tokens} of ${stencil.image_tokens} tokens`],
    ["Cache", cacheName(stencil), cacheMeaning(stencil)],
  ];
  const shown = cells.map(([name, value, detail]) => el("div", {}, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", {}, detail))));
  return el("dl", { class: "facts" }, ...shown);
}

function cacheName(stencil) {
  if (stencil.cache === "off") return "exact";
  if (stencil.cache === "own") return "own";
  if (stencil.primed) return "primed";
  return stencil.cache === "hit" ? "warm" : "joined";
}

function cacheMeaning(stencil) {
  if (stencil.cache === "off") return "nothing was taken from the cache";
  if (stencil.cache === "own") return "its full steps made what the others read";
  if (stencil.primed) return "this picture was new: edit it again";
  return stencil.cache === "hit" ? `all was there (${stencil.tier})` : "waited for another edit's priming";
}

function inWords(stencil) {
  const { computed, skipped } = tokenSums(stencil);
  const asked = stencil.num_inference_steps, done = stencil.steps_computed;
  const steps = `${done === asked ? "" : `${done} of `}${asked} step${asked === 1 ? "" : "s"}`;
  if (!skipped) return `In ${steps} all ${count(computed)} tokens were computed.`;
  const share = percent(skipped / (computed + skipped));
  const full = stencil.full_steps ? ` ${stencil.full_steps} of the steps computed every token, since the mask is large.` : "";
  const whose = stencil.cache === "own" ? "the edit's own full steps" : "the picture's cached activations";
  return `In ${steps} ${count(computed)} tokens were computed and ${count(skipped)} skipped: ${share} came from ${whose}.${full}`;
}

/** A bar of the parts and a list that names them. */
function stageBar(ms) {
  const parts = Object.keys(PARTS).filter((part) => ms[part] > 0.05);
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  for (const part of parts) {
    const segment = el("span", { class: `part-${part}` });
    segment.style.flexGrow = ms[part];
    bar.append(segment);
  }
  const items = parts.map((part) => el("li", {}, el("i", { class: `part-${part}`, "aria-hidden": "true" }), `${PARTS[part]} `, el("b", {}, duration(ms[part]))));
  return el("div", { class: "stages" }, bar, el("ul", {}, ...items));
}

function remarks(stencil) {
  const notes = [...stencil.notes];
  if (stencil.prompt_truncated) notes.push("The prompt was longer than the model reads, and was cut.");
  if (stencil.ignored.length) notes.push(`Without effect here: ${stencil.ignored.join(", ")}.`);
  return notes.map((note) => el("p", { class: "note" }, note));
}
