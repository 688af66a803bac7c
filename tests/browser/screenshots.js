// The pictures in the documentation: taken from the real pages on the embedded model.
import { execFileSync } from "node:child_process";

import { openPlayground } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { PYTHON, ROOT, startServer } from "./server.js";

const EDITS = 6; // beside each other, for the status page
const QUANTISE = "import sys; from PIL import Image; p = sys.argv[1]; Image.open(p).convert('RGB').quantize(256, dither=0).save(p, optimize=True)";

/** A screenshot in 256 colours. */
async function shoot(page, name) {
  const path = `${ROOT}docs/${name}`;
  await page.screenshot({ path, fullPage: true });
  execFileSync(PYTHON, ["-c", QUANTISE, path]);
}

async function selectAndEdit(page, example, part, prompt) {
  await page.locator("#gallery button").nth(example).click();
  await page.waitForFunction((index) => document.querySelectorAll("#gallery button")[index].ariaPressed === "true", example);
  await page.locator("#parts button").nth(part).click();
  await page.waitForFunction(() => document.querySelector("#coverage").textContent.includes("tokens"));
  await page.locator("#chips button").nth(prompt).click();
  await page.click("#run");
}

async function playground(browser, url) {
  await withPage(browser, { viewport: { width: 1200, height: 820 } }, async (page) => {
    await openPlayground(page, url);
    await selectAndEdit(page, 1, 0, 1);
    await page.waitForSelector("#result:not([hidden])");
    await page.click("#run-exact");
    await page.waitForSelector(".comparison");
    await page.locator("#slider").fill("50");
    await page.evaluate(() => document.activeElement.blur());
    await shoot(page, "playground.png");
  });
}

/** Edits beside each other, joining and leaving at different steps. */
async function edits(url) {
  const example = async (name) => new File([await (await fetch(`${url}playground/examples/${name}`)).blob()], name);
  const files = { image: await example("person.png"), mask_image: await example("person-shirt.png") };
  const one = async (index) => {
    await new Promise((resolve) => setTimeout(resolve, 500 * index));
    const form = new FormData();
    const fields = { prompt: "a teal shirt", num_inference_steps: 24 + 12 * index, seed: index, ...files };
    for (const [name, value] of Object.entries(fields)) form.append(name, value);
    await fetch(`${url}v1/images/edits`, { method: "POST", body: form });
  };
  await Promise.all(Array.from({ length: EDITS }, (_, index) => one(index)));
}

async function status(browser, url) {
  await withPage(browser, { viewport: { width: 1200, height: 700 } }, async (page) => {
    await page.goto(`${url}status`);
    await page.waitForSelector(".timeline");
    await edits(url);
    await page.waitForTimeout(1500); // the page asks once a second
    await shoot(page, "playground_status.png");
  });
}

const [server, browser] = await Promise.all([startServer(), launch()]);
try {
  await playground(browser, server.url);
  await status(browser, server.url);
} finally {
  await browser.close();
  await server.stop();
}
