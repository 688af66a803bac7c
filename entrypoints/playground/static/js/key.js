// The API key: asked for when the server wants one, and held in this module's memory alone.
import { byId } from "./dom.js";

const WRITABLE = /^[\x21-\x7e]+$/; // what a header can hold

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
  let problem = key && "That key was not accepted.";
  for (;;) {
    const given = await showDialog(problem);
    if (!given) return false;
    if (WRITABLE.test(given)) {
      key = given;
      return true;
    }
    problem = "A key has letters, digits and signs of ASCII alone, and no spaces.";
  }
}

/** What the user gives; empty: nothing. problem: of what they gave before. */
async function showDialog(problem) {
  const dialog = byId("key-dialog");
  const field = byId("key-field");
  byId("key-problem").textContent = problem;
  byId("key-problem").hidden = !problem;
  field.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const given = field.value.trim();
  field.value = "";
  return dialog.returnValue === "ok" ? given : "";
}
