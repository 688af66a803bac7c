// The API key: asked for when the server wants one, and held in this module's memory alone.
import { byId } from "./dom.js";

let key = "";
let asking = null; // the promise of the answer, while the dialog is open

/** Headers that go with every call of the API. */
export function keyHeaders() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Whether this server asks for a key. */
export function hasKey() {
  return key !== "";
}

/** Ask the user. Resolves to true when there is a key to try, false when they would rather not. */
export function askKey() {
  asking ??= ask().finally(() => {
    asking = null;
  });
  return asking;
}

async function ask() {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-again").hidden = !key; // the one that was given is not right
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const given = field.value.trim();
  field.value = "";
  if (dialog.returnValue !== "ok" || !given) return false;
  key = given;
  return true;
}
