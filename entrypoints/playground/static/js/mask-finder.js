// Masks that the server finds, by words or at a point, as changes of the drawn one.
import { ApiError, findMask } from "./api.js";
import { byId } from "./dom.js";
import { percent } from "./format.js";
import { viewOf } from "./picture.js";
import { BadField } from "./settings.js";

/** Asks for one mask at a time. A question that comes meanwhile is dropped. */
export class MaskFinder {
  #mask;
  #reveal;
  #report;
  #abort = null; // AbortController while the server is asked
  #model = ""; // that has the segmenter; "": the first
  #asking = null; // the promise of whether it found something

  /** reveal(): show the mask, it is about to change. report(error): no mask came. */
  constructor(mask, { reveal, report }) {
    this.#mask = mask;
    this.#reveal = reveal;
    this.#report = report;
    byId("pick-removes").addEventListener("click", () => {
      byId("pick-removes").setAttribute("aria-pressed", String(!this.#removes));
    });
  }

  /** Offer the ways to ask that the model takes, of "words" and "points", and say which it does not take. model: see run.js. */
  offer(ways, model) {
    this.#model = model;
    const [words, points] = ["words", "points"].map((way) => ways.includes(way));
    const tool = byId("pick").querySelector("input");
    if (tool.checked && !points) document.querySelector("input[name=tool]").click();
    byId("pick").hidden = tool.disabled = !points; // hidden alone, its key would choose it
    byId("words-form").hidden = !words;
    const missing = [!words && "by words", !points && "by clicks"].filter(Boolean);
    byId("no-selecting").hidden = !missing.length;
    byId("no-selecting").textContent = `The server has no segmenter that selects ${missing.join(" or ")} (see --segmenter).`;
  }

  /** Select what the text field names, instead of what is selected. */
  byWords(picture) {
    const words = byId("words").value.trim();
    if (words) this.#find(picture, { mask_prompt: words }, `for “${words}”`, (found) => this.#replace(found));
    else this.#report(new BadField(byId("words"), "Say what to select: the field is empty."));
  }

  /** Add what is at a point of the mask, or remove it. */
  atPoint(picture, { x, y }, removes) {
    const { width, height } = this.#mask.size;
    if (x < 0 || y < 0 || x > width || y > height) return; // lifted beside the picture: not meant
    const pixel = (place, side, pixels) => Math.min(Math.floor((place / side) * pixels), pixels - 1);
    const point = [pixel(x, width, picture.size.width), pixel(y, height, picture.size.height)];
    this.#find(picture, { mask_points: JSON.stringify([point]) }, "there", (found) => this.#join(found, removes || this.#removes));
  }

  /** Give up the question that is under way. */
  cancel() {
    this.#abort?.abort();
  }

  /** Resolves when no question is under way: to false if the last one was and brought no mask. */
  get settled() {
    return this.#abort ? this.#asking : Promise.resolve(true);
  }

  // -------------------------------------------------------------------------------------------------------- inside

  get #removes() {
    return byId("pick-removes").getAttribute("aria-pressed") === "true";
  }

  #find(picture, asked, where, use) {
    if (this.#abort) return;
    this.#asking = this.#ask(picture, asked, use).then(
      () => true,
      (error) => {
        this.#report(error.code === "nothing_found" ? new ApiError(`Nothing found ${where}.`, error.status, error.code) : error);
        return false;
      },
    );
  }

  /** use(found): changes the mask, and returns the news of it. */
  async #ask(picture, asked, use) {
    const { signal } = (this.#abort = new AbortController());
    this.#show("Selecting…");
    let news = "";
    try {
      const file = await findMask({ image: picture.file, ...(this.#model && { model: this.#model }), ...asked }, signal);
      const found = opacityOf(await viewOf(file, picture.size));
      signal.throwIfAborted();
      this.#reveal();
      this.#mask.end(); // a stroke that is being drawn
      news = use(found);
    } finally {
      this.#abort = null;
      this.#show(news);
    }
  }

  #replace(found) {
    this.#mask.restore(found);
    return `Selected ${percent(this.#mask.share)} of the picture.`;
  }

  #join(found, removes) {
    const before = this.#mask.share;
    const joined = this.#mask.save().map((opacity, index) => (removes ? Math.min(opacity, 255 - found[index]) : Math.max(opacity, found[index])));
    this.#mask.restore(joined);
    return `${removes ? "Removed" : "Added"} ${percent(Math.abs(this.#mask.share - before))} of the picture.`;
  }

  /** news: what is under way, or how it ended. */
  #show(news) {
    const isBusy = this.#abort !== null;
    byId("select").textContent = isBusy ? news : "Select";
    byId("select").setAttribute("aria-disabled", String(isBusy)); // disabled, it would lose the focus
    byId("sheet").toggleAttribute("data-busy", isBusy);
    byId("found").textContent = news;
  }
}

/** A mask as the server answers it, transparent = edit, as one byte per pixel: its opacity when drawn. */
function opacityOf(bitmap) {
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const { data } = context.getImageData(0, 0, width, height);
  return new Uint8Array(width * height).map((_, index) => 255 - data[index * 4 + 3]);
}
