// How long a person waits in the playground, and how smoothly a photo of twelve megapixels is drawn on. Measures only.
// Prints a line a figure, and at the end all of them as one line of JSON.
import { mkdtempSync, rmSync } from "node:fs";
import { loadavg, tmpdir } from "node:os";
import { join } from "node:path";

import { drag, openPlayground } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { pictures } from "./pictures.js";
import { startServer } from "./server.js";

const ROUNDS = 3;
const PAUSE_MS = 400; // of a person, before each thing they do
const STROKES = 6;

/** Every picture of an edit, in ms since the click on Edit. */
async function watchPictures(page) {
  await page.evaluate(() => {
    const sheet = document.querySelector("#sheet");
    window.clicked = null;
    window.pictures = [];
    document.querySelector("#run").addEventListener("click", () => {
      [window.clicked, window.pictures] = [performance.now(), []];
    }, { capture: true });
    new MutationObserver(() => window.pictures.push(performance.now() - window.clicked)).observe(sheet, { attributeFilter: ["data-pictures"] });
  });
}

/** Page load, a brush over the shirt, a prompt, Edit: {person_s, first_picture_ms, result_ms}. */
async function person(browser, url, prompt) {
  let figures = null;
  await withPage(browser, {}, async (page) => {
    const started = performance.now();
    await openPlayground(page, url);
    await watchPictures(page);
    await page.waitForTimeout(PAUSE_MS);
    await drag(page, [0.42, 0.38], [0.66, 0.4], [0.45, 0.5], [0.66, 0.6]);
    await page.waitForTimeout(PAUSE_MS);
    await page.fill("#prompt", prompt);
    await page.waitForTimeout(PAUSE_MS);
    await page.click("#run");
    await page.waitForSelector("#result:not([hidden])");
    const person = (performance.now() - started) / 1000;
    const [, first] = await page.evaluate(() => window.pictures); // the one before is the reset to none
    figures = { person_s: person, first_picture_ms: first, result_ms: await page.evaluate(() => window.pictures.at(-1)) };
  });
  return figures;
}

/** Draw on a large photo: {open_ms, longest_frame_ms, longest_task_ms, edit_s}. */
async function largePhoto(browser, url, path) {
  let figures = null;
  await withPage(browser, {}, async (page) => {
    await openPlayground(page, url);
    const started = performance.now();
    await page.setInputFiles("#upload", path);
    await page.waitForFunction(() => document.querySelector("#size-note").textContent.startsWith("3000 × 4000"));
    const open = performance.now() - started;
    await page.evaluate(() => {
      [window.longestFrame, window.longestTask] = [0, 0];
      let last = performance.now();
      const frame = (now) => {
        window.longestFrame = Math.max(window.longestFrame, now - last);
        last = now;
        requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
      new PerformanceObserver((list) => {
        for (const { duration } of list.getEntries()) window.longestTask = Math.max(window.longestTask, duration);
      }).observe({ entryTypes: ["longtask"] });
    });
    for (let stroke = 0; stroke < STROKES; stroke += 1) {
      const y = 0.2 + stroke * 0.1;
      await drag(page, [0.2, y], [0.8, y + 0.05], [0.3, y + 0.1], [0.7, y]);
    }
    const smooth = await page.evaluate(() => ({ longest_frame_ms: window.longestFrame, longest_task_ms: window.longestTask }));
    await page.fill("#prompt", "a yellow hat");
    const clicked = performance.now();
    await page.click("#run");
    await page.waitForSelector("#result:not([hidden])", { timeout: 120_000 });
    figures = { open_ms: open, ...smooth, edit_s: (performance.now() - clicked) / 1000 };
  });
  return figures;
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}

function medians(rounds) {
  return Object.fromEntries(Object.keys(rounds[0]).map((name) => [name, Number(median(rounds.map((round) => round[name])).toFixed(2))]));
}

async function rounds(measure) {
  const found = [];
  for (let round = 0; round < ROUNDS; round += 1) found.push(await measure(round));
  return medians(found);
}

const folder = mkdtempSync(join(tmpdir(), "playground-"));
const [server, browser] = await Promise.all([startServer(), launch()]);
try {
  const path = join(folder, "photo.jpg");
  pictures("photo", [path]);
  await person(browser, server.url, "a blue shirt"); // warms the server
  const figures = {
    person: await rounds((round) => person(browser, server.url, ["a red shirt", "a teal shirt", "a pink shirt"][round])),
    large_photo: await rounds(() => largePhoto(browser, server.url, path)),
    load_average: Number(loadavg()[0].toFixed(1)),
  };
  for (const [name, value] of Object.entries(figures)) console.log(name, value);
  console.log(JSON.stringify(figures));
} finally {
  await browser.close();
  await server.stop();
  rmSync(folder, { recursive: true });
}
