// What users' models made beside pictures: as text, or as JSON.
import { el } from "./dom.js";
import { save } from "./files.js";

const MOST_CHARACTERS = 2000; // of one value; a tensor may have millions

/** An element that shows values by name, and gives all of them as a file. */
export function valuesBox(values) {
  const rows = Object.entries(values).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, shortened(shown(value)))]);
  const download = el("button", { type: "button", onclick: () => save(fileOf(values), "values.json") }, "Download JSON");
  return el("div", { class: "values" }, el("dl", {}, ...rows), el("div", { class: "actions" }, download));
}

function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function shortened(text) {
  return text.length <= MOST_CHARACTERS ? text : `${text.slice(0, MOST_CHARACTERS)}… (${text.length} characters)`;
}

function fileOf(values) {
  return new Blob([JSON.stringify(values, null, 2)], { type: "application/json" });
}
