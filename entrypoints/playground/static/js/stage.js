// The stage: the picture with its mask, or with a result over it, at any zoom. It shows, and decides nothing.
import { byId } from "./dom.js";

const MOST_ZOOM = 16;
const TALLEST = 0.72; // of the window

/** mode: "draw": the mask can be drawn. "run": pictures of an edit come in. "result": before and after. */
export class Stage {
  area = byId("area"); // takes pointers and keys
  #viewport = byId("viewport");
  #sheet = byId("sheet");
  #picture = byId("picture");
  #after = byId("after");
  #tokens = byId("tokens");
  #draft = byId("draft");
  #slider = byId("slider");
  #size = { width: 1, height: 1 }; // of the views on it
  #zoom = 1; // 1: all of it is seen

  constructor() {
    new ResizeObserver(() => this.#layOut()).observe(this.#viewport);
    this.#slider.addEventListener("input", () => this.#divide());
    this.#viewport.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
  }

  get mode() {
    return this.#sheet.dataset.mode;
  }

  set mode(mode) {
    this.#sheet.dataset.mode = mode;
    this.area.tabIndex = mode === "draw" ? 0 : -1;
    if (mode === "result") this.#divide();
  }

  /** Of the views on it, in pixels. */
  get size() {
    return this.#size;
  }

  /** Another picture: its view, without mask or result. */
  showPicture(view) {
    this.#size = { width: view.width, height: view.height };
    this.#draft.setAttribute("viewBox", `0 0 ${view.width} ${view.height}`);
    draw(this.#picture, view);
    this.hideTokens();
    this.#zoom = 1;
    this.mode = "draw";
    this.#layOut();
  }

  /** A partial or final picture, over the one that is edited. */
  showAfter(view) {
    draw(this.#after, view);
  }

  /** Which tokens were computed: see tokens.js. */
  showTokens({ columns, rows, active }) {
    const canvas = this.#tokens;
    [canvas.width, canvas.height] = [columns, rows];
    const pixels = new ImageData(columns, rows);
    active.forEach((isActive, index) => {
      if (!isActive) pixels.data.set([10, 12, 16, 190], index * 4);
    });
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    canvas.hidden = false;
  }

  hideTokens() {
    this.#tokens.hidden = true;
  }

  /** SVG elements that show a gesture, instead of those before. */
  showDraft(...marks) {
    this.#draft.replaceChildren(...marks);
  }

  /** Where on the mask an event happened, in its pixels. */
  toMask(event) {
    const box = this.#sheet.getBoundingClientRect();
    const scale = this.#size.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  }

  /** Zoom; what lies at `point` of the window stays there, by default the middle of the stage. */
  zoomBy(factor, point = middleOf(this.#viewport)) {
    const before = this.#sheet.getBoundingClientRect();
    const [x, y] = [(point.x - before.left) / before.width, (point.y - before.top) / before.height];
    this.#zoom = Math.min(Math.max(this.#zoom * factor, 1), MOST_ZOOM);
    this.#layOut();
    const after = this.#sheet.getBoundingClientRect();
    this.scrollBy(after.left + x * after.width - point.x, after.top + y * after.height - point.y);
  }

  /** All of it is seen again. */
  zoomOut() {
    this.#zoom = 1;
    this.#layOut();
  }

  scrollBy(x, y) {
    this.#viewport.scrollLeft += x;
    this.#viewport.scrollTop += y;
  }

  #layOut() {
    const room = { width: this.#viewport.clientWidth, height: window.innerHeight * TALLEST };
    const fit = Math.min(room.width / this.#size.width, room.height / this.#size.height);
    this.#sheet.style.width = `${this.#size.width * fit * this.#zoom}px`;
    this.#sheet.style.height = `${this.#size.height * fit * this.#zoom}px`;
    this.#viewport.style.height = `${this.#size.height * fit}px`;
  }

  #divide() {
    this.#sheet.style.setProperty("--divide", `${this.#slider.value}%`);
    this.#slider.setAttribute("aria-valuetext", `${this.#slider.value} % before, the rest after`);
  }

  #wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // without them it scrolls
    event.preventDefault();
    this.zoomBy(Math.exp(-event.deltaY / 300), { x: event.clientX, y: event.clientY });
  }
}

function draw(canvas, view) {
  [canvas.width, canvas.height] = [view.width, view.height];
  canvas.getContext("2d").drawImage(view, 0, 0);
}

function middleOf(element) {
  const box = element.getBoundingClientRect();
  return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
}

