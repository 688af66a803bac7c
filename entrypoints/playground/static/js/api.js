// The server's API: calls, errors as ApiError, an edit as a stream of pictures. Paths are relative to the page's own
// address, so a proxy may serve both under a prefix.
import { askKey, keyHeaders } from "./key.js";
import { events } from "./sse.js";

/** What the server refused, in its own words. status 0: it could not be reached. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** GET as JSON. */
export async function get(path) {
  return jsonOf(await call(path, {}));
}

/** A file that comes with the page, as a Blob. */
export async function fileAt(url) {
  const response = await fetch(url).catch(() => null);
  const blob = response?.ok ? await response.blob().catch(() => null) : null;
  if (!blob) throw new ApiError(`${url} cannot be had.`, response?.status);
  return blob;
}

/** The mask that the server finds, as a PNG: transparent = edit. fields: as of `edit`. */
export async function findMask(fields, signal) {
  const { data } = await jsonOf(await call("v1/images/masks", { method: "POST", body: form(fields), signal }));
  return fromBase64(data[0].b64_json, "image/png");
}

async function jsonOf(response) {
  try {
    return await response.json();
  } catch (error) {
    throw brokenOff(error);
  }
}

/**
 * Run a workflow of its own: {pictures: [{name, blob}], values}. fields: as of `edit`, with `model`. A whole number beyond
 * what a number holds is text in `values`.
 */
export async function runWorkflow(fields, signal) {
  const response = await call("v1/images/edits", { method: "POST", body: form(fields), signal });
  const { data, values, output_format: format } = JSON.parse(await textOf(response), exactly);
  const pictures = await Promise.all(data.map(async ({ name, b64_json: text }) => ({ name, blob: await fromBase64(text, `image/${format}`) })));
  return { pictures, values };
}

async function textOf(response) {
  try {
    return await response.text();
  } catch (error) {
    throw brokenOff(error);
  }
}

/** A reviver of JSON that keeps the digits of large whole numbers, where the browser tells them. */
function exactly(key, value, context) {
  return typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source) ? context.source : value;
}

/**
 * Run an edit. fields: what the form says, files as Blobs with a name; an array is a field with several values. Yields
 * {partial: true, blob} and then, per image, {partial: false, blob, seed, stencil, values}; throws an ApiError if fewer
 * than fields.n of these came. seed is text, since it may exceed what a number holds. values: of users' models, or null.
 */
export async function* edit(fields, signal) {
  const response = await call("v1/images/edits", { method: "POST", body: form(fields), signal });
  let missing = fields.n;
  for await (const text of wholeEvents(response.body)) {
    const answer = await picture(text);
    if (!answer.partial) missing -= 1;
    yield answer;
  }
  if (missing > 0) throw brokenOff();
}

async function* wholeEvents(body) {
  try {
    yield* events(body);
  } catch (error) {
    throw brokenOff(error);
  }
}

/** What to throw when reading an answer failed with `error`, or it ended too early. */
function brokenOff(error = null) {
  return error?.name === "AbortError" ? error : new ApiError("The server's answer broke off.");
}

function form(fields) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    for (const each of [value].flat()) {
      if (each instanceof File) body.append(name, each, each.name);
      else body.append(name, String(each));
    }
  }
  return body;
}

async function call(path, options) {
  for (;;) {
    const response = await reach(path, options);
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status !== 401 || !(await askKey())) throw error;
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, { ...options, headers: keyHeaders(), cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.code);
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, response.status);
  }
}

async function picture(text) {
  const event = JSON.parse(text, exactly);
  if (event.type === "error") throw new ApiError(event.error.message, 200, event.error.code);
  const blob = await fromBase64(event.b64_json, `image/${event.output_format}`);
  if (!event.type.endsWith(".completed")) return { partial: true, blob };
  const seed = /"seed":(\d+)/.exec(text.slice(event.b64_json.length))[1];
  return { partial: false, blob, seed, stencil: event.stencil, values: event.values ?? null };
}

const SLICE = 1 << 20; // characters, a multiple of four

/** A base64 text as a Blob; large ones are decoded slice by slice, so that the page stays responsive. */
async function fromBase64(text, type) {
  const parts = [];
  for (let start = 0; start < text.length; start += SLICE) {
    if (start) await new Promise((resolve) => setTimeout(resolve));
    parts.push(bytesOf(atob(text.slice(start, start + SLICE))));
  }
  return new Blob(parts, { type });
}

function bytesOf(binary) {
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < bytes.length; index += 1) bytes[index] = binary.charCodeAt(index);
  return bytes;
}
