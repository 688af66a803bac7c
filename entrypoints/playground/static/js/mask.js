// The mask: what is painted over, as the opacity of a canvas of bounded size, with undo. Strokes are drawn as they
// come, each point once, so a frame costs the same however large the picture and long the stroke.

const UNDO_BYTES = 48 * 2 ** 20;
const HALF = 128; // from this opacity on a pixel is selected

/** Tells "change" after every finished change, none while a stroke runs. Points are {x, y} in pixels of the canvas. */
export class Mask extends EventTarget {
  #canvas;
  #context;
  #colour;
  #alpha = new Uint8Array(0); // opacity of every pixel after the last finished change
  #count = 0; // of them, selected
  #past = []; // changes that undo takes back: {box, before, after}
  #future = [];
  #stroke = null; // {erase, size, last, box} while one runs

  constructor(canvas, colour) {
    super();
    this.#canvas = canvas;
    canvas.width = canvas.height = 0; // until the first picture, as there is no opacity yet
    this.#context = canvas.getContext("2d", { willReadFrequently: true });
    this.#colour = colour;
  }

  get canvas() {
    return this.#canvas;
  }

  get size() {
    return { width: this.#canvas.width, height: this.#canvas.height };
  }

  /** One byte per pixel, row by row, not 0 = selected. */
  get selected() {
    const selected = new Uint8Array(this.#alpha.length);
    for (let index = 0; index < selected.length; index += 1) selected[index] = this.#alpha[index] & HALF;
    return selected;
  }

  /** How much of the picture is selected, 0..1. */
  get share() {
    return this.#count / this.#alpha.length;
  }

  get isEmpty() {
    return this.#count === 0;
  }

  get canUndo() {
    return this.#past.length > 0;
  }

  get canRedo() {
    return this.#future.length > 0;
  }

  /** An empty mask for another picture; nothing to undo. */
  reset({ width, height }) {
    this.#canvas.width = width;
    this.#canvas.height = height;
    this.#alpha = new Uint8Array(width * height);
    this.#count = 0;
    this.#past = [];
    this.#future = [];
    this.#stroke = null;
    this.#tell();
  }

  // ------------------------------------------------------------------------------------------------------- drawing

  /** Put the brush down. size: its diameter. */
  begin(point, size, erase) {
    this.#stroke = { erase, size, last: point, box: boxAround([point], size / 2) };
    this.#dot(point);
  }

  /** Move the brush that is down. */
  extend(point) {
    const stroke = this.#stroke;
    if (!stroke) return;
    this.#line(stroke.last, point);
    stroke.last = point;
    stroke.box = union(stroke.box, boxAround([point], stroke.size / 2));
  }

  /** Lift it: the stroke becomes a change. */
  end() {
    const stroke = this.#stroke;
    this.#stroke = null;
    if (stroke) this.#commit(stroke.box);
  }

  /** The stroke that runs was not meant. */
  cancel() {
    const stroke = this.#stroke;
    this.#stroke = null;
    if (stroke) this.#show(stroke.box);
  }

  /** Select, or give up, what lies inside a closed line. */
  fill(points, erase) {
    const context = this.#pen(erase);
    context.beginPath();
    for (const { x, y } of points) context.lineTo(x, y);
    context.fill();
    this.#commit(boxAround(points, 1));
  }

  /** Select what is not selected, and the other way round. */
  invert() {
    this.#put(this.#alpha.map((alpha) => 255 - alpha));
  }

  clear() {
    this.#put(new Uint8Array(this.#alpha.length));
  }

  /** Select exactly what is bright in a bitmap. */
  select(bitmap) {
    const { width, height } = this.size;
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0, width, height);
    const { data } = context.getImageData(0, 0, width, height);
    this.#put(this.#alpha.map((_, index) => data[index * 4]));
  }

  /** A copy of the whole mask, and what brings it back. */
  save() {
    return this.#alpha.slice();
  }

  restore(saved) {
    this.#put(saved.slice());
  }

  undo() {
    this.#move(this.#past, this.#future, "before");
  }

  redo() {
    this.#move(this.#future, this.#past, "after");
  }

  // ------------------------------------------------------------------------------------------------------- inside

  #pen(erase) {
    const context = this.#context;
    context.globalCompositeOperation = erase ? "destination-out" : "source-over";
    context.fillStyle = context.strokeStyle = this.#colour;
    context.lineCap = context.lineJoin = "round";
    return context;
  }

  /** A line without a length would not be drawn. */
  #dot({ x, y }) {
    const context = this.#pen(this.#stroke.erase);
    context.beginPath();
    context.arc(x, y, this.#stroke.size / 2, 0, 2 * Math.PI);
    context.fill();
  }

  #line(from, to) {
    const context = this.#pen(this.#stroke.erase);
    context.lineWidth = this.#stroke.size;
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y);
    context.stroke();
  }

  /** What was drawn inside `box` becomes a change that can be taken back. */
  #commit(box) {
    const clipped = clip(box, this.size);
    if (!clipped) return;
    const { data } = this.#context.getImageData(clipped.left, clipped.top, clipped.width, clipped.height);
    const after = new Uint8Array(clipped.width * clipped.height);
    for (let index = 0; index < after.length; index += 1) after[index] = data[index * 4 + 3];
    this.#change(clipped, after);
  }

  /** The whole mask becomes `alpha`. */
  #put(alpha) {
    const everything = { left: 0, top: 0, ...this.size };
    this.#change(everything, alpha);
    this.#show(everything);
  }

  #change(box, after) {
    this.#past.push({ box, before: this.#crop(box), after });
    this.#future = [];
    this.#paste(box, after);
    while (bytesOf(this.#past) > UNDO_BYTES && this.#past.length > 1) this.#past.shift();
    this.#tell();
  }

  #move(from, to, which) {
    const change = from.pop();
    if (!change) return;
    to.push(change);
    this.#paste(change.box, change[which]);
    this.#show(change.box);
    this.#tell();
  }

  #crop({ left, top, width, height }) {
    const alpha = new Uint8Array(width * height);
    for (let row = 0; row < height; row += 1) {
      const start = (top + row) * this.#canvas.width + left;
      alpha.set(this.#alpha.subarray(start, start + width), row * width);
    }
    return alpha;
  }

  #paste(box, alpha) {
    this.#count += countSelected(alpha) - countSelected(this.#crop(box));
    const { left, top, width, height } = box;
    for (let row = 0; row < height; row += 1) {
      this.#alpha.set(alpha.subarray(row * width, (row + 1) * width), (top + row) * this.#canvas.width + left);
    }
  }

  /** Draw what the mask is inside `box`. */
  #show(box) {
    const clipped = clip(box, this.size);
    if (!clipped) return;
    const pixels = new ImageData(clipped.width, clipped.height);
    const colour = this.#rgb();
    const alpha = this.#crop(clipped);
    const words = new Uint32Array(pixels.data.buffer);
    for (let index = 0; index < alpha.length; index += 1) words[index] = colour | (alpha[index] << 24);
    this.#context.putImageData(pixels, clipped.left, clipped.top);
  }

  /** The colour as a pixel's lower three bytes: red is the lowest. */
  #rgb() {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(this.#colour.slice(at, at + 2), 16));
    return red | (green << 8) | (blue << 16);
  }

  #tell() {
    this.dispatchEvent(new Event("change"));
  }
}

function boxAround(points, reach) {
  const xs = points.map(({ x }) => x);
  const ys = points.map(({ y }) => y);
  const [left, top] = [Math.min(...xs) - reach, Math.min(...ys) - reach];
  return { left, top, width: Math.max(...xs) + reach - left, height: Math.max(...ys) + reach - top };
}

function union(one, other) {
  const left = Math.min(one.left, other.left);
  const top = Math.min(one.top, other.top);
  const right = Math.max(one.left + one.width, other.left + other.width);
  const bottom = Math.max(one.top + one.height, other.top + other.height);
  return { left, top, width: right - left, height: bottom - top };
}

/** In whole pixels inside a canvas, one more on each side for soft edges; null: nothing of it is inside. */
function clip(box, size) {
  const left = Math.max(0, Math.floor(box.left) - 1);
  const top = Math.max(0, Math.floor(box.top) - 1);
  const right = Math.min(size.width, Math.ceil(box.left + box.width) + 1);
  const bottom = Math.min(size.height, Math.ceil(box.top + box.height) + 1);
  return right > left && bottom > top ? { left, top, width: right - left, height: bottom - top } : null;
}

function countSelected(alpha) {
  let count = 0;
  for (let index = 0; index < alpha.length; index += 1) count += alpha[index] >> 7; // the bit of HALF
  return count;
}

function bytesOf(changes) {
  return changes.reduce((sum, { before, after }) => sum + before.length + after.length, 0);
}
