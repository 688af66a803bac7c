// The mask as it is sent, and the tokens it touches, away from the page's own thread: twelve megapixels take a while.
import { activeTokens } from "./tokens.js";

const HALF = 128; // as the server binarises

/**
 * In: {id, bitmap: the mask at working size, opaque = edit; size: the picture's own; grid: null, or {size, tokenSize,
 * margin}}. Out: {id, blob: PNG of that size, white = edit; tokens: null, or see activeTokens}.
 */
self.onmessage = async ({ data: { id, bitmap, size, grid } }) => {
  const canvas = new OffscreenCanvas(size.width, size.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0, size.width, size.height);
  bitmap.close();
  const pixels = context.getImageData(0, 0, size.width, size.height);
  const mask = binarise(pixels.data);
  context.putImageData(pixels, 0, 0);
  const tokens = grid && activeTokens(mask, size, grid.size, grid.tokenSize, grid.margin);
  self.postMessage({ id, blob: await canvas.convertToBlob({ type: "image/png" }), tokens });
};

/** Makes `data` (RGBA) black and white in place; returns one byte per pixel, 1 = edit. */
function binarise(data) {
  const mask = new Uint8Array(data.length / 4);
  for (let index = 0; index < mask.length; index += 1) {
    const at = index * 4;
    mask[index] = data[at + 3] >= HALF ? 1 : 0;
    data[at] = data[at + 1] = data[at + 2] = mask[index] * 255;
    data[at + 3] = 255;
  }
  return mask;
}
