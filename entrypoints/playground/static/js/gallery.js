// The example templates that the server ships, with masks of their parts and prompts that fit them.
import { fileAt } from "./api.js";
import { el } from "./dom.js";

const FOLDER = new URL("../examples/", import.meta.url);

/** [{title, url, name, garments: [{kind, maskUrl, prompts}]}] */
export async function readExamples() {
  const { examples } = JSON.parse(await (await fileAt(new URL("examples.json", FOLDER))).text());
  return examples.map(({ image, title, garments }) => ({
    title,
    name: image,
    url: new URL(image, FOLDER).href,
    garments: garments.map(({ kind, mask, prompts }) => ({ kind, prompts, maskUrl: new URL(mask, FOLDER).href })),
  }));
}

/** Fill `list` with a button per example, which calls `open(example)`. */
export function showGallery(list, examples, open) {
  list.replaceChildren(
    ...examples.map((example) => {
      const image = el("img", { src: example.url, alt: example.title, width: 256, height: 256, loading: "lazy" });
      const button = el("button", { type: "button", "aria-pressed": "false", onclick: () => open(example) }, image);
      return el("li", {}, button);
    }),
  );
}

/** Mark the button of `example`; null: none of them is open. */
export function markExample(list, examples, example) {
  [...list.querySelectorAll("button")].forEach((button, index) => {
    button.setAttribute("aria-pressed", String(examples[index] === example));
  });
}

/** Fill `list` with a button per text, which calls `choose(text, index)`. */
export function showChips(list, texts, choose) {
  list.replaceChildren(
    ...texts.map((text, index) => el("li", {}, el("button", { type: "button", class: "chip", onclick: () => choose(text, index) }, text))),
  );
}
