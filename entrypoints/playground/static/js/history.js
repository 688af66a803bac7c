// Results so far: held in this page's memory, the oldest given up first.
import { el } from "./dom.js";

const MOST = 24;
const MOST_BYTES = 256 * 2 ** 20;
const THUMB = 96; // px, of the longer side

/** Keeps entries ({blob, view, settings, ...}) and shows them as buttons that call `open(entry)`. */
export class History {
  #entries = [];
  #list;
  #box;
  #open;

  constructor(box, list, open) {
    this.#box = box;
    this.#list = list;
    this.#open = open;
  }

  /** The newest one. */
  add(entry) {
    this.#entries.unshift(entry);
    while (this.#entries.length > MOST || (this.#bytes > MOST_BYTES && this.#entries.length > 1)) this.#entries.pop();
    this.#list.prepend(this.#item(entry));
    while (this.#list.children.length > this.#entries.length) this.#list.lastElementChild.remove();
    this.#box.hidden = false;
    this.mark(entry);
  }

  /** Which one is shown; null: none. */
  mark(shown) {
    [...this.#list.querySelectorAll("button")].forEach((button, index) => {
      button.setAttribute("aria-pressed", String(this.#entries[index] === shown));
    });
  }

  get #bytes() {
    return this.#entries.reduce((sum, { blob }) => sum + blob.size, 0);
  }

  #item(entry) {
    const { prompt, lora, seed, exact } = entry.settings;
    const label = `${prompt}, ${lora ? `adapter ${lora}, ` : ""}seed ${seed}${exact ? ", exact" : ""}`;
    const button = el("button", { type: "button", title: label, "aria-label": label, onclick: () => this.#open(entry) }, thumbnail(entry.view));
    return el("li", {}, button);
  }
}

function thumbnail(view) {
  const scale = THUMB / Math.max(view.width, view.height);
  const canvas = el("canvas", { "aria-hidden": "true" });
  [canvas.width, canvas.height] = [Math.max(1, Math.round(view.width * scale)), Math.max(1, Math.round(view.height * scale))];
  canvas.getContext("2d").drawImage(view, 0, 0, canvas.width, canvas.height);
  return canvas;
}
