// Making and finding elements. Text goes in as text nodes, so nothing that a user or a server says becomes markup.

/** The element with this id; its absence is a bug. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`no element #${id}`);
  return element;
}

/** Write a text into a live region unless it is there already, since screen readers read out all that is written. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A new element: attributes (or on* listeners), then children; null and false are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== false && child !== undefined));
  return element;
}

const THUMBNAIL = 96; // px, of the longer side

/** A small canvas that shows a bitmap, for elements that name it in words. */
export function thumbnailOf(bitmap) {
  const scale = THUMBNAIL / Math.max(bitmap.width, bitmap.height);
  const canvas = el("canvas", { "aria-hidden": "true" });
  [canvas.width, canvas.height] = [Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale))];
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** A canvas of its own for a bitmap. */
export function canvasOf(bitmap, attributes = {}) {
  const canvas = el("canvas", attributes);
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  return canvas;
}

/** Call `send()` when a form is sent, but once for an Enter that is held: it would stop what it has begun. */
export function onSubmit(form, send) {
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.repeat && !event.target.matches("textarea")) event.preventDefault();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}
