// Fields for what a workflow takes, made of what /v1/models lists.
import { byId, el } from "./dom.js";
import { BadField } from "./settings.js";
import { tensorText } from "./tensor.js";

const MOST_INTEGER = 2n ** 63n - 1n;
const WHOLE = /^[+-]?\d{1,19}$/;

/** The fields of one workflow, in an element that holds nothing else. */
export class Inputs {
  #box;
  #inputs = [];

  constructor(box) {
    this.#box = box;
  }

  /** Make a field for each input: {name, type, required, and its range}. */
  offer(inputs) {
    this.#inputs = inputs;
    this.#box.replaceChildren(...inputs.map(field));
  }

  /** Name -> text or File, as a form sends it; an input that is left out has none. Throws BadField. */
  get values() {
    const given = this.#inputs.map((input) => [input.name, valueOf(input, byId(idOf(input)))]);
    return Object.fromEntries(given.filter(([, value]) => value !== null));
  }

  /** Show what was written, as `written` told it. */
  set written(given) {
    for (const input of this.#inputs) write(input, byId(idOf(input)), given[input.name]);
  }

  /** Name -> what is in its field: text, or a File. */
  get written() {
    return Object.fromEntries(this.#inputs.map((input) => [input.name, writtenIn(input, byId(idOf(input)))]));
  }
}

function idOf({ name }) {
  return `input-${name}`;
}

// ------------------------------------------------------------------------------------------------------------ elements

function field(input) {
  const id = idOf(input);
  const label = el("label", { for: id }, input.name);
  const hint = el("span", { class: "note", id: `${id}-hint` }, hintOf(input));
  return el("div", { class: "input" }, el("div", {}, label, " ", hint), control(input, { id, "aria-describedby": `${id}-hint` }));
}

function control(input, attributes) {
  switch (input.type) {
    case "boolean":
      return el("select", attributes, !input.required && el("option", { value: "" }, "left out"), ...["false", "true"].map((value) => el("option", { value }, value)));
    case "integer":
      return el("input", { type: "text", inputmode: "numeric", autocomplete: "off", ...attributes });
    case "number":
      return el("input", { type: "text", inputmode: "decimal", autocomplete: "off", ...attributes });
    case "picture":
      return chooser(attributes);
    default:
      return el("textarea", { rows: 2, spellcheck: "false", ...attributes });
  }
}

/** A button that chooses a file, and the name of what is chosen. */
function chooser(attributes) {
  const name = el("span", { class: "note" }, "none");
  const file = el("input", { type: "file", accept: "image/png,image/jpeg,image/webp", ...attributes });
  file.addEventListener("change", () => {
    name.textContent = file.files[0]?.name ?? "none";
  });
  return el("div", { class: "drop" }, el("label", { class: "button", for: attributes.id }, "Choose a picture"), file, name);
}

function hintOf(input) {
  return [rangeOf(input), !input.required && "may be left out"].filter(Boolean).join("; ");
}

function rangeOf({ type, minimum, maximum, max_bytes: bytes, max_width: width, max_height: height, dtype, max_shape: shape }) {
  switch (type) {
    case "integer":
      return minimum === undefined ? "a whole number" : `a whole number from ${minimum} to ${maximum}`;
    case "number":
      return "a number";
    case "string":
      return `text of up to ${bytes} bytes`;
    case "picture":
      return `up to ${width} × ${height} px`;
    case "tensor":
      return `${dtype} of up to ${shape.join(" × ") || "one number"}, such as ${shape.map(() => "[").join("")}${dtype === "bool" ? "true" : "1"}${shape.map(() => "]").join("")}`;
    default:
      return "";
  }
}

// -------------------------------------------------------------------------------------------------------------- values

function writtenIn(input, element) {
  return input.type === "picture" ? (element.files[0] ?? "") : element.value;
}

function write(input, element, value) {
  if (input.type !== "picture") {
    element.value = value;
    return;
  }
  const files = new DataTransfer(); // the one way to put a file into a field
  if (value) files.items.add(value);
  element.files = files.files;
  element.dispatchEvent(new Event("change"));
}

/** What a form sends for a field; null: it is left out. Throws BadField. */
function valueOf(input, element) {
  const written = writtenIn(input, element);
  const isEmpty = written === "" || (typeof written === "string" && input.type !== "string" && !written.trim());
  if (isEmpty && !input.required) return null;
  if (isEmpty && input.type !== "string") throw new BadField(element, `${input.name} is missing: it is ${rangeOf(input)}.`);
  const value = typeof written === "string" && input.type !== "string" ? written.trim() : written;
  if (input.type === "tensor") return tensorIn(input, element, value);
  if (!fits(input, value)) throw new BadField(element, `${input.name} is ${rangeOf(input)}.`);
  return value;
}

function tensorIn(input, element, text) {
  try {
    return tensorText(text, input.dtype);
  } catch (error) {
    throw new BadField(element, `${input.name}: ${error.message}.`);
  }
}

function fits({ type, minimum, maximum, max_bytes: bytes }, value) {
  switch (type) {
    case "integer":
      return WHOLE.test(value) && isWithin(BigInt(value.replace("+", "")), minimum ?? -MOST_INTEGER - 1n, maximum ?? MOST_INTEGER);
    case "number":
      return Number.isFinite(Number(value));
    case "string":
      return new TextEncoder().encode(value).length <= bytes;
    default:
      return true; // of a picture the server tells
  }
}

function isWithin(value, low, high) {
  return low <= value && value <= high;
}
