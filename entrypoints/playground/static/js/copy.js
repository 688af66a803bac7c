// Text for the clipboard.
import { byId } from "./dom.js";
import { toast } from "./toast.js";

/** Copy it; where the browser does not let the page, show it selected and wait until that is closed. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    await showText(text); // no clipboard at all over plain HTTP, but for the machine itself
    return;
  }
  toast("Copied.");
}

function showText(text) {
  const dialog = byId("copy-dialog");
  byId("copy-text").value = text;
  dialog.showModal();
  byId("copy-text").select();
  return new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
}
