// The page's side of mask-worker.js.

const waiting = new Map(); // id -> {resolve, reject}
let worker = null;
let lastId = 0;

/** The mask of `canvas` at the picture's own size: {blob, tokens}. See mask-worker.js. */
export async function exportMask(canvas, size, grid) {
  const bitmap = await createImageBitmap(canvas);
  const id = (lastId += 1);
  const answer = new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
  theWorker().postMessage({ id, bitmap, size, grid }, [bitmap]);
  return answer;
}

/** Start the worker ahead of the first use. */
export function theWorker() {
  if (!worker) {
    worker = new Worker(new URL("./mask-worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => take(data.id).resolve(data);
    worker.onerror = (event) => {
      for (const id of [...waiting.keys()]) take(id).reject(new Error(event.message || "the mask could not be made"));
    };
  }
  return worker;
}

function take(id) {
  const entry = waiting.get(id);
  waiting.delete(id);
  return entry;
}
