// The tools: pointers and keys on the drawing area become strokes and shapes of the mask. Two fingers zoom and scroll.
import { svg } from "./dom.js";

const KEY_STEP = 4; // px of the mask that an arrow key moves the pen; with Shift four times that
const PICKS = { " ": false, Enter: false, Delete: true, Backspace: true }; // keys that pick: whether they remove
const PEN_ERASER = 32; // in PointerEvent.buttons
const BRUSHES = ["brush", "eraser"];

/** What a tool does between pen down and pen up. "erase" inverts brush and shapes alike. */
const SHAPES = { rectangle: ([first, last]) => corners(first, last), lasso: (points) => points };

export class Tools {
  #name = "brush";
  size = 24; // diameter of brush and eraser, px of the mask
  #stage;
  #mask;
  #pick;
  #points = null; // of the gesture that runs; for a rectangle its corners
  #isErasing = false;
  #pointers = new Map(); // pointer id -> {x, y} on the screen, of those that are down
  #pinch = null; // {distance, middle, zoom} at its last move
  #pen = null; // the keyboard's pen, {x, y}

  /** pick(point, removes): a place was picked, what is there joins the mask or is removed from it. */
  constructor(stage, mask, pick) {
    this.#stage = stage;
    this.#mask = mask;
    this.#pick = pick;
    const area = stage.area;
    area.addEventListener("pointerdown", (event) => this.#down(event));
    area.addEventListener("pointermove", (event) => this.#move(event));
    area.addEventListener("pointerup", (event) => this.#up(event));
    area.addEventListener("pointercancel", (event) => this.#up(event));
    area.addEventListener("pointerleave", () => this.#hover(null));
    area.addEventListener("keydown", (event) => this.#key(event));
    area.addEventListener("blur", () => this.#leave());
    area.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  /** brush, eraser, rectangle, lasso, pick. Another tool gives up the gesture that is under way. */
  get name() {
    return this.#name;
  }

  set name(name) {
    this.cancel();
    this.#name = name;
  }

  /** Forget a gesture that has not ended, such as when the picture changes under it. */
  cancel() {
    this.#points = null;
    this.#mask.cancel();
    this.#stage.showDraft();
  }

  // ------------------------------------------------------------------------------------------------------ pointers

  #down(event) {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    this.#stage.area.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    if (this.#pointers.size === 2) {
      this.cancel();
      this.#pinch = this.#spread();
    } else if (this.#pointers.size === 1) {
      this.#pen = null;
      this.#begin(this.#stage.toMask(event), event.altKey || (event.buttons & PEN_ERASER) !== 0);
    }
  }

  #move(event) {
    if (!this.#pointers.has(event.pointerId)) {
      this.#hover(this.#stage.toMask(event));
      return;
    }
    this.#pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    if (this.#pinch) this.#stretch();
    else if (this.#points) {
      const moves = event.getCoalescedEvents?.() ?? [];
      for (const move of moves.length ? moves : [event]) this.#extend(this.#stage.toMask(move));
      this.#draft();
    }
  }

  #up(event) {
    this.#pointers.delete(event.pointerId);
    if (this.#pointers.size < 2) this.#pinch = null;
    if (event.type === "pointercancel") this.cancel();
    else if (this.#pointers.size === 0 && this.#points) this.#end();
  }

  #spread() {
    const [one, other] = [...this.#pointers.values()];
    const middle = { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2 };
    return { distance: Math.hypot(one.x - other.x, one.y - other.y), middle };
  }

  #stretch() {
    const now = this.#spread();
    this.#stage.zoomBy(now.distance / Math.max(1, this.#pinch.distance), now.middle);
    this.#stage.scrollBy(this.#pinch.middle.x - now.middle.x, this.#pinch.middle.y - now.middle.y);
    this.#pinch = now;
  }

  // ------------------------------------------------------------------------------------------------------ keyboard

  #key(event) {
    const [x, y] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (x || y) this.#walk(x, y, event.shiftKey ? 4 * KEY_STEP : KEY_STEP);
    else if (this.name === "pick" && event.key in PICKS) this.#pick(this.#placedPen(), PICKS[event.key]);
    else if (event.key === " ") this.#press();
    else if (event.key === "Escape") this.cancel();
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.#draft();
  }

  #walk(x, y, step) {
    const { width, height } = this.#mask.size;
    const pen = this.#placedPen();
    const inside = (value, most) => Math.min(Math.max(value, 0), most);
    this.#pen = { x: inside(pen.x + x * step, width), y: inside(pen.y + y * step, height) };
    if (this.#points) this.#extend(this.#pen);
  }

  /** Space puts the keyboard's pen down, and lifts it. */
  #press() {
    const pen = this.#placedPen();
    if (this.#points) this.#end();
    else this.#begin(pen, false);
  }

  /** The keyboard's pen, at first in the middle. */
  #placedPen() {
    const { width, height } = this.#mask.size;
    this.#pen ??= { x: width / 2, y: height / 2 };
    return this.#pen;
  }

  #leave() {
    if (this.#pen && this.#points) this.#end();
    this.#pen = null;
    this.#stage.showDraft();
  }

  // ------------------------------------------------------------------------------------------------------- gesture

  get #isBrush() {
    return BRUSHES.includes(this.name);
  }

  #begin(point, erase) {
    this.#points = [point];
    this.#isErasing = erase || this.name === "eraser";
    if (this.#isBrush) this.#mask.begin(point, this.size, this.#isErasing);
    this.#draft();
  }

  #extend(point) {
    if (this.#isBrush) this.#mask.extend(point);
    if (this.name === "rectangle") this.#points = [this.#points[0], point];
    else this.#points.push(point);
  }

  #end() {
    const points = this.#points;
    this.#points = null;
    if (this.#isBrush) this.#mask.end();
    else if (this.name === "pick") this.#pick(points.at(-1), this.#isErasing);
    else if (points.length > 1) this.#mask.fill(SHAPES[this.name](points), this.#isErasing);
    this.#stage.showDraft();
    this.#draft();
  }

  #hover(point) {
    if (!this.#points && !this.#pen) this.#stage.showDraft(...(point && this.#isBrush ? [this.#ring(point)] : []));
  }

  /** Show what is under way: a shape's outline, or where the brush is. */
  #draft() {
    const marks = [];
    if (this.#points && this.name in SHAPES && this.#points.length > 1) {
      const points = SHAPES[this.name](this.#points).map(({ x, y }) => `${x},${y}`);
      marks.push(svg("polygon", { points: points.join(" ") }));
    } else if (this.#isBrush) {
      const point = this.#points?.at(-1) ?? this.#pen;
      if (point) marks.push(this.#ring(point));
    }
    if (this.#pen) marks.push(cross(this.#pen));
    this.#stage.showDraft(...marks);
  }

  #ring({ x, y }) {
    return svg("circle", { cx: x, cy: y, r: this.size / 2 });
  }
}

function corners(first, last) {
  return [first, { x: last.x, y: first.y }, last, { x: first.x, y: last.y }];
}

function cross({ x, y }) {
  return svg("path", { d: `M${x - 6},${y}h12M${x},${y - 6}v12` });
}
