// Reference pictures: further pictures for the model to look at, as a list that can be filled and ordered.
import { byId, el, thumbnailOf } from "./dom.js";
import { acceptFiles } from "./files.js";
import { counted } from "./format.js";
import { openPicture } from "./picture.js";
import { toast } from "./toast.js";

/** Holds references, {file, thumbnail: canvas} each, in the order in which they are sent. */
export class References {
  #pictures = [];
  #most = 0; // that the model sees
  #list = byId("references");
  #report;
  #settled = Promise.resolve();

  /** report(error): a file cannot be read. */
  constructor(report) {
    this.#report = report;
    acceptFiles(byId("add-references"), byId("references-box"), (files) => this.#add(files));
  }

  /** Offer as many as the model sees; nothing where it sees none. */
  offer(most) {
    this.#most = most;
    byId("references-box").hidden = most === 0;
    this.#show();
  }

  get all() {
    return [...this.#pictures];
  }

  set all(pictures) {
    this.#pictures = [...pictures];
    this.#show();
  }

  /** Resolves when the files that were given so far are in the list. */
  get settled() {
    return this.#settled;
  }

  #add(files) {
    this.#settled = this.#settled.then(() => this.#read(files));
  }

  async #read(files) {
    const refused = [];
    for (const file of files) {
      if (this.#pictures.length < this.#most) await this.#open(file);
      else refused.push(`“${file.name}”`);
    }
    this.#show();
    this.#tell(this.#room);
    if (refused.length) toast(`This model sees at most ${counted(this.#most, "reference")}. Not added: ${refused.join(", ")}.`, "error");
  }

  async #open(file) {
    try {
      const { file: sent, view } = await openPicture(file, file.name);
      this.#pictures.push({ file: sent, thumbnail: thumbnailOf(view) });
      view.close();
    } catch (error) {
      this.#report(error);
    }
  }

  #move(index, by) {
    const [picture] = this.#pictures.splice(index, 1);
    this.#pictures.splice(index + by, 0, picture);
    this.#show();
    this.#focus(index + by, by < 0 ? ["earlier", "later"] : ["later", "earlier"]);
    this.#tell(`“${picture.file.name}” is reference ${index + by + 1} of ${this.#pictures.length}.`);
  }

  #remove(index) {
    const [picture] = this.#pictures.splice(index, 1);
    this.#show();
    if (this.#pictures.length) this.#focus(Math.min(index, this.#pictures.length - 1), ["remove"]);
    else byId("add-references").focus();
    this.#tell(`“${picture.file.name}” is removed. ${this.#room}`);
  }

  // ------------------------------------------------------------------------------------------------------- elements

  get #room() {
    return `${this.#pictures.length} of ${counted(this.#most, "reference")}.`;
  }

  #show() {
    this.#list.replaceChildren(...this.#pictures.map((picture, index) => this.#item(picture, index)));
    byId("references-room").textContent = `${this.#pictures.length} of ${this.#most}`;
  }

  #item({ file, thumbnail }, index) {
    const isLast = index === this.#pictures.length - 1;
    const named = `reference ${index + 1}, ${file.name}`;
    const button = (action, sign, label, isOff, click) =>
      el("button", { type: "button", class: "quiet", "data-action": action, "aria-label": label, title: label, disabled: isOff, onclick: click }, sign);
    return el(
      "li",
      {},
      el("b", {}, String(index + 1)),
      thumbnail,
      el("span", { class: "name", title: file.name }, file.name),
      el(
        "div",
        { class: "group" },
        button("earlier", "↑", `Move ${named}, earlier`, index === 0, () => this.#move(index, -1)),
        button("later", "↓", `Move ${named}, later`, isLast, () => this.#move(index, 1)),
        button("remove", "×", `Remove ${named}`, false, () => this.#remove(index)),
      ),
    );
  }

  /** Focus the first button of these actions that can be used. */
  #focus(index, actions) {
    const buttons = actions.map((action) => this.#list.children[index].querySelector(`[data-action=${action}]`));
    buttons.find((button) => !button.disabled).focus();
  }

  /** Announce a change to those who do not see it. */
  #tell(text) {
    byId("references-news").textContent = text;
  }
}
