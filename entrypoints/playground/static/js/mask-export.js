// The page's side of mask-worker.js.

const waiting = new Map(); // id -> {resolve, reject}
let worker = null;
let lastId = 0;

/**
 * The mask of `canvas` at the picture's own size: {blob, tokens}. See mask-worker.js. Rejects when the worker fails or
 * `signal` aborts.
 */
export async function exportMask(canvas, size, grid, signal) {
  const bitmap = await createImageBitmap(canvas);
  signal.throwIfAborted();
  const stop = () => worker && dropWorker(signal.reason); // what it computes cannot be stopped otherwise
  signal.addEventListener("abort", stop);
  try {
    return await ask({ bitmap, size, grid }, [bitmap]);
  } finally {
    signal.removeEventListener("abort", stop);
  }
}

/** Start the worker ahead of the first use. */
export function theWorker() {
  if (!worker) {
    worker = new Worker(new URL("./mask-worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => settle(data);
    worker.onerror = ({ message }) => dropWorker(failure(message || "its program failed"));
  }
  return worker;
}

function ask(question, transferred) {
  const id = (lastId += 1);
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    theWorker().postMessage({ id, ...question }, transferred);
  });
}

function settle({ id, error, ...answer }) {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (error === undefined) resolve(answer);
  else reject(failure(error));
}

/** The next mask starts a new one. */
function dropWorker(reason) {
  worker.onmessage = worker.onerror = null; // what it has sent already may come yet
  worker.terminate();
  worker = null;
  for (const { reject } of waiting.values()) reject(reason);
  waiting.clear();
}

function failure(message) {
  return new Error(`The mask could not be made: ${message}`);
}
