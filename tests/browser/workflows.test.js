// Forms for what workflows take: on their own page, and beside the fields of a model that has one.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { violations } from "./accessibility.js";
import { chooseTool, copied, dismissMessages, download, drag, edit, lastForm, openPlayground, openWorkflows } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { OPEN_URL, PYTHON, ROOT, WORKFLOWS_URL } from "./server.js";

const PERSON = join(ROOT, "entrypoints/playground/static/examples/person.png");
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true };

let browser, folder, stamp;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "workflows-"));
  stamp = join(folder, "stamp.png");
  execFileSync(PYTHON, ["-c", "import sys; from PIL import Image; Image.new('RGB', (20, 10), 'teal').save(sys.argv[1])", stamp]);
  browser = await launch();
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

const run = async (page) => {
  await page.click("#run");
  await page.waitForSelector("#result:not([hidden])");
};
const toast = (page) => page.locator(".toast.error p").last().textContent();
const valueOf = (page, name) => page.locator(`#result dt:text-is("${name}") + dd`).textContent();

test("a form has a field for each input, sends what is written, and shows what comes", () =>
  withPage(browser, {}, async (page) => {
    await openWorkflows(page, WORKFLOWS_URL);
    assert.deepEqual(await page.locator("#workflow option").allTextContents(), ["inspect", "sum", "length", "count"]);
    assert.match(await page.textContent("#makes"), /^It makes style \(picture\), .*, means \(tensor\)\.$/);
    await page.setInputFiles("#input-image", PERSON);
    await page.fill("#input-count", "9007199254740992"); // more than a number of JavaScript holds
    await page.selectOption("#input-flip", "false");
    await page.fill("#input-words", " grüße");
    await run(page);
    const { fields, files } = await lastForm(page);
    assert.deepEqual(fields, { model: "inspect", count: "9007199254740992", flip: "false", words: " grüße" });
    assert.ok(files.image.equals(readFileSync(PERSON)));
    assert.equal(await valueOf(page, "words"), " grüße!");
    assert.equal(await valueOf(page, "count"), "9007199254740993");
    assert.match(await valueOf(page, "means"), /^\{"dtype":"float32","shape":\[3\],"base64":"/);
    const sizes = await page.locator("#result img").evaluateAll((images) => images.map((image) => [image.alt, image.naturalWidth, image.naturalHeight]));
    assert.deepEqual(sizes, [["picture", 256, 256], ["style", 1, 1]]);
  }));

test("what is not as declared is told at its field, before anything is sent", () =>
  withPage(browser, {}, async (page) => {
    await openWorkflows(page, WORKFLOWS_URL);
    const refused = async (told) => {
      await dismissMessages(page);
      await page.click("#run");
      await page.waitForFunction((told) => document.querySelector(".toast.error:last-child p")?.textContent === told, told);
    };
    await refused("image is missing: it is up to 2048 × 2048 px.");
    await page.setInputFiles("#input-image", PERSON);
    await refused("count is missing: it is a whole number.");
    await page.fill("#input-count", "9223372036854775808");
    await refused("count is a whole number.");
    assert.equal(await page.evaluate(() => document.activeElement.id), "input-count");
    await page.fill("#input-count", "1");
    await page.fill("#input-words", "ü".repeat(9));
    await refused("words is text of up to 16 bytes.");
    await page.selectOption("#workflow", "count");
    await page.fill("#input-number", "1");
    await page.fill("#input-rounds", "201");
    await refused("rounds is a whole number from 1 to 200.");
    assert.equal(await page.evaluate(() => window.sentForms.length), 0);
    await page.fill("#input-rounds", "3");
    await dismissMessages(page);
    await run(page);
    assert.equal(await valueOf(page, "number"), "7");
  }));

test("a tensor is written as numbers", () =>
  withPage(browser, {}, async (page) => {
    await openWorkflows(page, WORKFLOWS_URL);
    await page.selectOption("#workflow", "sum");
    for (const [text, told] of [["[[1, 2], [3]]", /rows have different lengths/], ["[1, 2", /write its numbers as JSON/], ['["a"]', /"a" is no float64/]]) {
      await page.fill("#input-numbers", text);
      await page.click("#run");
      assert.match(await toast(page), told);
    }
    await page.fill("#input-numbers", "[[1, 2.5], [-3, 4]]");
    await page.fill("#input-flags", "[true, false, true]");
    await run(page);
    assert.equal(await valueOf(page, "sum"), "6.5");
  }));

test("what fails is told, and the form stays", () =>
  withPage(browser, {}, async (page) => {
    await openWorkflows(page, WORKFLOWS_URL);
    await page.setInputFiles("#input-image", PERSON);
    await page.fill("#input-count", "1");
    await page.fill("#input-words", "fail");
    await page.click("#run");
    assert.match(await toast(page), /^A class of the workflow failed at this request/);
    assert.equal(await page.inputValue("#input-words"), "fail");
    assert.ok(await page.isHidden("#result"));
  }, [/status of 422/]));

test("a server without workflows says so", () =>
  withPage(browser, {}, async (page) => {
    await page.goto(`${OPEN_URL}workflows`);
    await page.waitForSelector("#none:not([hidden])");
    assert.ok(await page.isHidden("#form"));
    await openPlayground(page, OPEN_URL);
    assert.ok(await page.isHidden("#inputs-box"));
  }));

test("inputs of a model's workflow are beside its fields, in its result and in its copied requests", () =>
  withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    await openPlayground(page, WORKFLOWS_URL);
    await chooseTool(page, "rectangle");
    await drag(page, [0.3, 0.3], [0.7, 0.7]);
    await page.fill("#prompt", "a red shirt");
    await page.click("#run");
    assert.match(await toast(page), /^times is missing: it is a whole number\.$/);
    await page.fill("#input-times", "2");
    await page.setInputFiles("#input-stamp", stamp);
    await page.click("text=Advanced");
    await page.fill("#steps", "4");
    await edit(page, "a red shirt");
    const { fields, files } = await lastForm(page);
    assert.deepEqual([fields.times, fields.partial_images, fields.model], ["2", "3", undefined]);
    assert.ok(files.stamp.equals(readFileSync(stamp)));
    assert.equal(await valueOf(page, "stamped"), "400");
    const shown = readFileSync(await download(page, "#download", join(folder, "shown.png")));
    for (const [selector, command, flag] of [["#copy-python", PYTHON, "-c"], ["#copy-curl", "sh", "-c"]]) {
      execFileSync(command, [flag, await copied(page, selector)], { cwd: folder, env: { ...process.env, PYTHONPATH: "" } });
      assert.ok(readFileSync(join(folder, "edited.png")).equals(shown), selector);
      rmSync(join(folder, "edited.png"));
    }
    await page.click("#back-to-mask");
    await page.fill("#input-times", "0");
    await page.setInputFiles("#input-stamp", []);
    await page.locator("#history button").first().click();
    assert.equal(await page.inputValue("#input-times"), "2");
    assert.equal(await page.locator("#input-stamp").evaluate(({ files: [file] }) => file.name), "stamp.png");
  }));

for (const [device, options] of Object.entries({ desktop: {}, phone: PHONE })) {
  test(`workflows fit and are accessible on ${device}`, () =>
    withPage(browser, options, async (page) => {
      await openWorkflows(page, WORKFLOWS_URL);
      await page.setInputFiles("#input-image", PERSON);
      await page.fill("#input-count", "1");
      await run(page);
      assert.deepEqual(await violations(page), []);
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth), 0);
      await page.selectOption("#workflow", "sum");
      assert.deepEqual(await violations(page), []);
      await openPlayground(page, WORKFLOWS_URL);
      assert.deepEqual(await violations(page), []);
    }));
}

test("the model is chosen, goes into copied requests, and comes back with its results", () =>
  withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    await openPlayground(page, WORKFLOWS_URL);
    assert.deepEqual(await page.locator("#served option").allTextContents(), ["stamped", "plain"]);
    await chooseTool(page, "rectangle");
    await drag(page, [0.3, 0.3], [0.7, 0.7]);
    await page.selectOption("#served", "plain");
    await page.waitForSelector("#inputs-box", { state: "hidden" });
    assert.match(await page.textContent("#model"), /^plain, /);
    await page.click("text=Advanced");
    await page.fill("#steps", "4");
    await edit(page, "a red shirt");
    const { fields } = await lastForm(page);
    assert.deepEqual([fields.model, fields.times], ["plain", undefined]);
    const shown = readFileSync(await download(page, "#download", join(folder, "shown.png")));
    execFileSync("sh", ["-c", await copied(page, "#copy-curl")], { cwd: folder });
    assert.ok(readFileSync(join(folder, "edited.png")).equals(shown));
    await page.click("#back-to-mask");
    await page.selectOption("#served", "stamped");
    await page.waitForSelector("#inputs-box");
    await page.locator("#history button").first().click();
    assert.equal(await page.inputValue("#served"), "plain");
    assert.ok(await page.isHidden("#inputs-box"));
    assert.deepEqual(await violations(page), []);
  }));
