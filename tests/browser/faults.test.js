// What goes wrong in a page, or comes when something else was expected.
import assert from "node:assert/strict";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { chooseTool, dismissMessages, drag, edit, lastForm, openPlayground, selectedShare } from "./actions.js";
import { LAN_NAME, launch, withPage } from "./browser.js";
import { OPEN_URL, ROOT, WORKFLOWS_URL } from "./server.js";

let browser;

before(async () => {
  browser = await launch();
});

after(() => browser?.close());

const desktop = (use, expected) => withPage(browser, {}, use, expected);
const runSays = (page, text) => page.waitForFunction((text) => document.querySelector("#run").textContent === text, text);

/** Example `index` is open, and marked so. */
async function openOther(page, index) {
  await page.locator("#gallery button").nth(index).click();
  await page.waitForFunction((index) => document.querySelectorAll("#gallery button")[index].getAttribute("aria-pressed") === "true", index);
}

test("a mask that cannot be made ends its edit alone", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    const inWorker = async (program) => {
      while (!page.workers().length) await page.waitForEvent("worker");
      await page.workers().at(-1).evaluate(program);
    };
    await inWorker("self.onmessage = () => {}");
    await page.fill("#prompt", "a hat");
    await page.click("#run");
    await runSays(page, "Stop");
    await page.click("#run");
    await runSays(page, "Edit");
    await edit(page, "a blue shirt"); // by a new worker
    await inWorker("OffscreenCanvas.prototype.getContext = () => null");
    await page.click("#run");
    await page.locator(".toast.error", { hasText: "The mask could not be made" }).waitFor();
    await runSays(page, "Edit");
    await inWorker("self.onmessage = () => { throw new Error('torn'); }");
    await page.click("#run");
    await page.locator(".toast.error", { hasText: "torn" }).waitFor();
    await runSays(page, "Edit");
    await dismissMessages(page);
    await edit(page, "a blue shirt");
  }, [/The mask could not be made/, /torn/]));

test("a picture that is opened while run exact runs stays open", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.click("#parts button");
    await page.click("text=Advanced");
    await page.fill("#steps", "100");
    await edit(page, "a teal shirt");
    await page.click("#run-exact");
    await openOther(page, 2);
    await runSays(page, "Edit");
    assert.equal(await page.locator("#gallery button").nth(2).getAttribute("aria-pressed"), "true");
    assert.ok(await page.isHidden("#result"));
  }));

/** The page hears of an answer all up to its first image, and then nothing until it stops listening. */
function holdAfterFirst() {
  const { fetch } = window;
  window.fetch = async (path, options) => {
    const response = await fetch(path, options);
    if (!(options?.body instanceof FormData)) return response;
    const text = await response.text();
    const first = text.slice(0, text.indexOf("\n\n", text.indexOf(".completed")) + 2);
    const start = (controller) => {
      controller.enqueue(new TextEncoder().encode(first));
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    };
    return new Response(new ReadableStream({ start }));
  };
}

test("a finished image of several is not drawn over another picture", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#images", "2");
    await page.fill("#prompt", "a pink shirt");
    await page.evaluate(holdAfterFirst);
    await page.click("#run");
    await page.waitForSelector("#history button");
    await openOther(page, 1);
    await runSays(page, "Edit");
    assert.ok(await page.isHidden("#result"));
    assert.equal(await page.getAttribute("#sheet", "data-mode"), "draw");
    await page.click("#history button"); // and yet it is kept
    assert.equal(await page.locator("#gallery button").first().getAttribute("aria-pressed"), "true");
    assert.ok(await page.isVisible("#result"));
  }));

test("where the browser lets no page copy, the text is shown and selected", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL.replace("127.0.0.1", LAN_NAME));
    assert.equal(await page.evaluate(() => window.isSecureContext), false);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    await page.click("#copy-curl");
    await page.waitForSelector("#copy-dialog[open]");
    assert.match(await page.evaluate(() => getSelection().toString()), /^curl [^]*prompt=a red shirt[^]*> edited\.png\s*$/);
    await page.keyboard.press("Escape");
    await page.waitForSelector("#copy-dialog:not([open])", { state: "attached" });
  }, [/Cross-Origin-Opener-Policy/]));

const PERSON = join(ROOT, "entrypoints/playground/static/examples/person.png");

/** Requests of paths that end in `path` wait until what this returns is called. */
async function holdBack(page, path) {
  let release;
  const released = new Promise((resolve) => (release = resolve));
  await page.route((url) => url.pathname.endsWith(path), async (route) => {
    await released;
    await route.continue();
  });
  return release;
}

const isOpen = (page, name) => page.waitForFunction((name) => document.querySelector("#size-note").textContent.startsWith(name), name);

test("a picture that comes late opens over none that was asked for after it", () =>
  desktop(async (page) => {
    const release = await holdBack(page, "/person.png");
    await page.goto(OPEN_URL);
    await page.waitForFunction(() => document.querySelector("#model").textContent.includes(", cpu"));
    const wide = await page.evaluate(async () => {
      const canvas = new OffscreenCanvas(640, 320);
      canvas.getContext("2d").fillRect(0, 0, 640, 320);
      return [...new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer())];
    });
    await page.setInputFiles("#upload", { name: "wide.png", mimeType: "image/png", buffer: Buffer.from(wide) });
    await isOpen(page, "640 × 320");
    await drag(page, [0.2, 0.2], [0.4, 0.4]);
    const drawn = await selectedShare(page);
    const late = page.waitForEvent("requestfinished", (request) => request.url().endsWith("/person.png"));
    release();
    await late;
    await page.waitForTimeout(300); // for it to be decoded
    assert.match(await page.textContent("#size-note"), /^640 × 320/);
    assert.equal(await selectedShare(page), drawn);
  }));

test("a gesture ends with the picture that it began on", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await chooseTool(page, "rectangle");
    const box = await page.locator("#sheet").boundingBox();
    await page.mouse.move(box.x + 50, box.y + 50);
    await page.mouse.down();
    await page.mouse.move(box.x + 200, box.y + 200, { steps: 4 });
    await page.evaluate(() => document.querySelectorAll("#gallery button")[1].click());
    await page.waitForFunction(() => document.querySelectorAll("#gallery button")[1].getAttribute("aria-pressed") === "true");
    await page.mouse.up();
    assert.equal(await selectedShare(page), 0);
  }));

test("without the examples a picture of one's own is edited all the same", () =>
  desktop(async (page) => {
    await page.route("**/examples.json", (route) => route.fulfill({ status: 503, body: "busy" }));
    await page.goto(OPEN_URL);
    await page.locator(".toast.error", { hasText: "examples.json cannot be had." }).waitFor();
    await page.waitForFunction(() => document.querySelector("#model").textContent.includes(", cpu"));
    await page.setInputFiles("#upload", PERSON);
    await page.waitForFunction(() => document.querySelector("#mask").width === 256);
  }, [/503/]));

test("an edit is made by the model that is shown, though its facts cannot be had at first", () =>
  desktop(async (page) => {
    await openPlayground(page, WORKFLOWS_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.fill("#prompt", "a hat");
    await page.route("**/v1/models", (route) => route.fulfill({ status: 503, body: "busy" }));
    await page.selectOption("#served", "plain");
    for (let failures = 0; failures < 2; failures += 1) {
      if (failures) await page.click("#run");
      await page.locator(".toast.error", { hasText: "status 503" }).waitFor();
      await dismissMessages(page);
    }
    assert.equal(await page.evaluate(() => window.sentForms.length), 0);
    await page.unroute("**/v1/models");
    await page.click("#run");
    await page.waitForSelector("#result:not([hidden])");
    assert.equal((await lastForm(page)).fields.model, "plain");
  }, [/503/]));
