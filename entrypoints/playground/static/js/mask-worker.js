// The mask as it is sent, and the tokens it touches, away from the page's own thread: twelve megapixels take a while.
import { bilevelPng } from "./png.js";
import { activeTokens } from "./tokens.js";

const HALF = 128; // as the server binarises

/**
 * In: {id, bitmap: the mask at working size, opaque = edit; size: the picture's own; grid: {size, tokenSize, margin}}.
 * Out: {id, blob: PNG of that size, white = edit; tokens: see activeTokens}, or {id, error: text}.
 */
self.onmessage = async ({ data: { id, ...question } }) => {
  try {
    self.postMessage({ id, ...(await answer(question)) });
  } catch (error) {
    self.postMessage({ id, error: error.message }); // of a promise the page's onerror hears nothing
  }
};

async function answer({ bitmap, size, grid }) {
  const mask = selected(bitmap, size);
  const tokens = activeTokens(mask, size, grid.size, grid.tokenSize, grid.margin);
  return { blob: await bilevelPng(mask, size), tokens };
}

/** One byte per pixel of a picture of `size`, 1 = edit. */
function selected(bitmap, { width, height }) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  const mask = new Uint8Array(width * height);
  for (let index = 0; index < mask.length; index += 1) mask[index] = data[index * 4 + 3] >= HALF ? 1 : 0;
  return mask;
}
