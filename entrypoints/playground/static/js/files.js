// Files that a user gives to the page, and takes from it.
import { byId, el } from "./dom.js";

/** Call `use(file)` with the first of those chosen, dropped or pasted. */
export function acceptFiles(use) {
  const useFirst = (files) => files.length && use(files[0]);
  byId("upload").addEventListener("change", ({ target }) => {
    useFirst(target.files);
    target.value = "";
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    useFirst(event.dataTransfer.files);
  });
  document.addEventListener("paste", (event) => useFirst(event.clipboardData.files));
}

/** Download it. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // a large file is still being written
}

export function base64Of(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}
