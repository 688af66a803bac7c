// The same edit twice, mask-aware and exact: side by side, with their times and what differs.
import { canvasOf, el } from "./dom.js";
import { duration } from "./format.js";

const AMPLIFY = 8;

/** An element that shows both, {view, stencil, ms} each. */
export function comparison({ aware, exact }) {
  const { canvas, mean, most } = difference(aware.view, exact.view);
  const ratio = exact.ms / aware.ms;
  const faster = ratio >= 1 ? `${ratio.toFixed(1)}× faster` : `${(1 / ratio).toFixed(1)}× slower`;
  const summary = `Mask-aware (warm) ${duration(aware.ms)}, exact ${duration(exact.ms)}: ${faster}. Both without partial images.`;
  return el(
    "div",
    { class: "comparison" },
    el("p", { role: "status" }, summary),
    el(
      "div",
      { class: "side-by-side" },
      figure(canvasOf(aware.view), "mask-aware", `${duration(aware.ms)}, denoising ${duration(aware.stencil.ms.denoise)}`),
      figure(canvasOf(exact.view), "exact", `${duration(exact.ms)}, denoising ${duration(exact.stencil.ms.denoise)}`),
      figure(canvas, `difference ×${AMPLIFY}`, `mean ${mean.toFixed(2)}, most ${most} of 255`),
    ),
  );
}

function figure(canvas, name, detail) {
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  return el("figure", {}, canvas, el("figcaption", {}, el("b", {}, name), ` ${detail}`));
}

/** How far two views are apart, as a picture; mean and most of 255, over all channels of all pixels. */
function difference(one, other) {
  const canvas = canvasOf(one);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const a = context.getImageData(0, 0, one.width, one.height);
  const b = pixelsOf(other);
  let [sum, most] = [0, 0];
  for (let index = 0; index < b.length; index += 1) {
    if (index % 4 === 3) continue;
    const apart = Math.abs(a.data[index] - b[index]);
    sum += apart;
    most = Math.max(most, apart);
    a.data[index] = AMPLIFY * apart; // clamped by its type
  }
  context.putImageData(a, 0, 0);
  return { canvas, mean: sum / (b.length * 0.75), most };
}

function pixelsOf(bitmap) {
  const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height).data;
}
