// The control picture: what a ControlNet sees beside the picture to edit, and how strongly and when it steers.
import { byId, el, thumbnailOf } from "./dom.js";
import { acceptFiles } from "./files.js";
import { openPicture } from "./picture.js";
import { BadField, decimal } from "./settings.js";

const DECIMALS = { scale: "Control scale", start: "Control start", end: "Control end" };

/** Holds one picture, {file, thumbnail: canvas}, or none. */
export class ControlPicture {
  #picture = null;
  #isOffered = false; // the model has ControlNets
  #list = byId("control");
  #type = byId("control-type");
  #report;
  #settled = Promise.resolve();

  /** report(error): a file cannot be read. */
  constructor(report) {
    this.#report = report;
    acceptFiles(byId("add-control"), byId("control-box"), ([file]) => this.#add(file));
  }

  /** Offer the model's control types, and the scale that it has by default; nothing where it has no ControlNet. */
  offer(types, scale) {
    this.#isOffered = types.length > 0;
    byId("control-box").hidden = byId("control-fields").hidden = !this.#isOffered;
    byId("control-type-box").hidden = types.length < 2;
    this.#type.replaceChildren(...types.map((name) => el("option", { value: name }, name)));
    byId("control-scale").placeholder = scale;
  }

  /** {file, thumbnail, type, scale, start, end}, null where a number is left to the server; null: no picture, or no use for one. */
  get settings() {
    if (!this.#picture || !this.#isOffered) return null;
    const numbers = Object.entries(DECIMALS).map(([name, label]) => [name, decimal(`control-${name}`, label)]);
    const steering = Object.fromEntries(numbers);
    if ((steering.start ?? 0) >= (steering.end ?? 1)) throw new BadField(byId("control-start"), "Control start is below control end.");
    return { ...this.#picture, type: this.#type.value, ...steering };
  }

  set settings(given) {
    this.#picture = given && { file: given.file, thumbnail: given.thumbnail };
    if (given) this.#type.value = given.type;
    for (const name of Object.keys(DECIMALS)) byId(`control-${name}`).value = given?.[name] ?? "";
    this.#show();
  }

  /** Resolves when the file that was given last is shown. */
  get settled() {
    return this.#settled;
  }

  #add(file) {
    this.#settled = this.#settled.then(() => this.#open(file));
  }

  async #open(file) {
    try {
      const { file: sent, view } = await openPicture(file, file.name);
      this.#picture = { file: sent, thumbnail: thumbnailOf(view) };
      view.close();
      this.#show();
      this.#tell(`“${sent.name}” is the control picture.`);
    } catch (error) {
      this.#report(error);
    }
  }

  #remove() {
    const { file } = this.#picture;
    this.#picture = null;
    this.#show();
    byId("add-control").focus();
    this.#tell(`“${file.name}” is removed.`);
  }

  #show() {
    this.#list.replaceChildren(...(this.#picture ? [this.#item(this.#picture)] : []));
  }

  #item({ file, thumbnail }) {
    const label = `Remove control picture, ${file.name}`;
    const remove = el("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: () => this.#remove() }, "×");
    return el("li", {}, thumbnail, el("span", { class: "name", title: file.name }, file.name), remove);
  }

  /** Announce a change to those who do not see it. */
  #tell(text) {
    byId("control-news").textContent = text;
  }
}
