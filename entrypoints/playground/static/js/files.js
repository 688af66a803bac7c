// Files that a user gives to the page, and takes from it.
import { el } from "./dom.js";

/**
 * Call `use(files)` with files that are chosen with `input`, dropped on `zone`, or pasted while the focus is in it. Of
 * nested zones, the one that was registered first takes them.
 */
export function acceptFiles(input, zone, use) {
  const take = (event, place, { files }) => {
    if (event.defaultPrevented || !files.length || !zone.contains(place)) return;
    if (event.type === "paste" && takesText(place) && isText(event.clipboardData)) return;
    event.preventDefault();
    use([...files]);
  };
  input.addEventListener("change", () => {
    const files = [...input.files];
    input.value = "";
    if (files.length) use(files);
  });
  document.addEventListener("drop", (event) => take(event, event.target, event.dataTransfer));
  document.addEventListener("paste", (event) => take(event, document.activeElement, event.clipboardData));
}

/** Keep the browser from leaving the page for what is dropped on it. Text goes into the field that it is dragged to. */
export function keepPage() {
  const goesIn = ({ target, dataTransfer }) => takesText(target) && !dataTransfer.types.includes("Files");
  for (const type of ["dragover", "drop"]) window.addEventListener(type, (event) => goesIn(event) || event.preventDefault());
}

function takesText(element) {
  return element.matches?.("textarea:read-write, input:read-write") ?? false;
}

/** Whether it is text of which there is a picture too, as office programs copy it. A picture of a web page has HTML alone, a file its name alone. */
function isText({ types }) {
  return types.includes("text/plain") && types.includes("text/html");
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
