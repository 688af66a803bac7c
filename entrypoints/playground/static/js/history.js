// Results so far: held in this page's memory, the oldest given up first.
import { el, thumbnailOf } from "./dom.js";
import { counted } from "./format.js";

const MOST = 24;
const MOST_BYTES = 256 * 2 ** 20;

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
    const { prompt, references, control, lora, seed, exact } = entry.settings;
    const shown = `${references.length ? `${counted(references.length, "reference")}, ` : ""}${control ? `steered by ${control.type}, ` : ""}`;
    const label = `${prompt}, ${shown}${lora ? `adapter ${lora}, ` : ""}seed ${seed}${exact ? ", exact" : ""}`;
    const button = el("button", { type: "button", title: label, "aria-label": label, onclick: () => this.#open(entry) }, thumbnailOf(entry.view));
    return el("li", {}, button);
  }
}
