// Selection by words and by clicks: what the server finds is in the mask, and can be worked on like what is drawn.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { violations } from "./accessibility.js";
import { chooseTool, drag, edit, lastForm, openPlayground, openWithKey, selectedShare } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { GUARDED_URL, KEY, OPEN_URL, ROOT } from "./server.js";

const PERSON = readFileSync(join(ROOT, "entrypoints/playground/static/examples/person.png")); // 256 x 256 px
const CORNER = [12, 12]; // px, a place of the background
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };
const NOTHING = {
  status: 422,
  json: { error: { message: "Invalid 'mask_prompt'.", type: "invalid_request_error", param: "mask_prompt", code: "nothing_found" } },
};

let browser;

before(async () => {
  browser = await launch();
});

after(() => browser?.close());

const desktop = (use, expected) => withPage(browser, {}, use, expected);
const onMasks = (page, handler) => page.route("**/v1/images/masks", handler);
const shareOf = (mask) => mask.filter(Boolean).length / mask.length;
const says = (page, text) => page.waitForFunction((text) => document.querySelector("#found").textContent === text, text);
const told = (page, verb, share) => says(page, `${verb} ${share < 0.01 ? "<1" : Math.round(share * 100)} % of the picture.`);
const union = (one, other) => one.map((is, index) => is || other[index]);
const without = (one, other) => one.map((is, index) => is && !other[index]);

/** Whether each pixel of the mask is selected, row by row. */
function selected(page) {
  return page.evaluate(() => {
    const canvas = document.querySelector("#mask");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return Array.from({ length: data.length / 4 }, (_, index) => data[index * 4 + 3] >= 128);
  });
}

/** The same of a PNG's pixels: whether `channel` of them is bright. */
function brightIn(page, bytes, channel) {
  return page.evaluate(
    async ([bytes, channel]) => {
      const bitmap = await createImageBitmap(new Blob([new Uint8Array(bytes)]));
      const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
      context.drawImage(bitmap, 0, 0);
      const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
      return Array.from({ length: data.length / 4 }, (_, index) => data[index * 4 + channel] >= 128);
    },
    [[...bytes], channel],
  );
}

/** What the API finds in the first example for these fields, like `selected`. */
async function found(page, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("image", new Blob([PERSON]), "person.png");
  const answer = await fetch(`${OPEN_URL}v1/images/masks`, { method: "POST", body: form });
  assert.equal(answer.status, 200);
  const { data } = await answer.json();
  const keep = await brightIn(page, Buffer.from(data[0].b64_json, "base64"), 3);
  return keep.map((is) => !is);
}

const foundAtCorner = (page) => found(page, { mask_points: JSON.stringify([CORNER]) });

async function selectByWords(page, words) {
  await page.getByLabel("Select by words").fill(words);
  await page.keyboard.press("Enter");
}

async function clickOn(page, [x, y], options = {}) {
  const box = await page.locator("#sheet").boundingBox();
  await page.locator("#area").click({ position: { x: ((x + 0.5) / 256) * box.width, y: ((y + 0.5) / 256) * box.height }, ...options });
}

const runSays = (page, text) => page.waitForFunction((text) => document.querySelector("#run").textContent === text, text);

test("words replace the mask by what the server finds, as one change, and the edit sends it", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.1, 0.1]);
    const drawn = await selected(page);
    const person = await found(page, { mask_prompt: "person" });
    await selectByWords(page, "person");
    await told(page, "Selected", shareOf(person));
    assert.deepEqual(await selected(page), person);
    await page.click("#undo");
    assert.deepEqual(await selected(page), drawn);
    await page.click("#redo");
    assert.deepEqual(await selected(page), person);
    await page.click("text=Advanced");
    await page.fill("#steps", "2");
    await edit(page, "a painted person");
    assert.deepEqual(await brightIn(page, (await lastForm(page)).files.mask_image, 0), person);
    await page.fill("#words", "the background");
    await page.click("#select");
    await told(page, "Selected", shareOf(await found(page, { mask_prompt: "the background" })));
    assert.equal(await page.getAttribute("#sheet", "data-mode"), "draw", "the mask is seen");
    await chooseTool(page, "eraser");
    const whole = await selectedShare(page);
    await drag(page, [0.05, 0.05]);
    assert.ok((await selectedShare(page)) < whole, "it can be erased");
  }));

test("a click adds what is there, and with Alt or Remove takes it out", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    assert.ok(await page.isHidden("#pick-removes"));
    for (const place of [[0.1, 0.1], [0.5, 0.5]]) await drag(page, place); // the background and the shirt
    const drawn = await selected(page);
    const there = await foundAtCorner(page);
    const joined = union(drawn, there);
    await chooseTool(page, "pick");
    await clickOn(page, CORNER);
    await told(page, "Added", shareOf(joined) - shareOf(drawn));
    assert.deepEqual(await selected(page), joined);
    assert.deepEqual((await lastForm(page)).fields, { mask_points: JSON.stringify([CORNER]) });
    await clickOn(page, CORNER, { modifiers: ["Alt"] });
    await told(page, "Removed", shareOf(joined) - shareOf(without(joined, there)));
    assert.deepEqual(await selected(page), without(joined, there));
    await page.click("#undo");
    assert.deepEqual(await selected(page), joined);
    await page.click("#undo");
    assert.deepEqual(await selected(page), drawn);
    await page.click("#pick-removes");
    await clickOn(page, CORNER);
    await told(page, "Removed", shareOf(drawn) - shareOf(without(drawn, there)));
    assert.deepEqual(await selected(page), without(drawn, there));
  }));

test("picks by keyboard alone", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.focus("#area");
    await page.keyboard.press("p");
    assert.ok(await page.isChecked("[name=tool][value=pick]"));
    for (const arrow of ["ArrowLeft", "ArrowUp"]) {
      for (let press = 0; press < 7; press += 1) await page.keyboard.press(`Shift+${arrow}`); // from 128 to 16
      await page.keyboard.press(arrow);
    }
    assert.equal(await page.locator("#draft path").count(), 1, "the pen is seen");
    const there = await foundAtCorner(page);
    await page.keyboard.press("Space");
    await told(page, "Added", shareOf(there));
    assert.deepEqual(await selected(page), there);
    await page.keyboard.press("Delete");
    await told(page, "Removed", shareOf(there));
    assert.equal(await selectedShare(page), 0);
    await page.keyboard.press("Enter");
    await told(page, "Added", shareOf(there));
    await page.keyboard.press("Control+z");
    assert.equal(await selectedShare(page), 0);
    assert.equal(await page.evaluate(() => document.activeElement.id), "area");
  }));

test("where nothing is found the mask stays, and the page says so", () =>
  desktop(async (page) => {
    const error = page.locator(".toast.error p").last();
    await openPlayground(page, OPEN_URL);
    await onMasks(page, (route) => route.fulfill(NOTHING));
    await drag(page, [0.5, 0.5]);
    const drawn = await selected(page);
    await selectByWords(page, "a zebra");
    await error.filter({ hasText: "Nothing found for “a zebra”." }).waitFor();
    await chooseTool(page, "pick");
    await clickOn(page, CORNER);
    await error.filter({ hasText: "Nothing found there." }).waitFor();
    await page.unroute("**/v1/images/masks");
    await onMasks(page, (route) => route.abort());
    await clickOn(page, CORNER);
    await error.filter({ hasText: "The server cannot be reached." }).waitFor();
    await selectByWords(page, " ");
    await error.filter({ hasText: "Say what to select: the field is empty." }).waitFor();
    assert.deepEqual(await selected(page), drawn);
    assert.equal(await page.textContent("#found"), "");
    await page.click("#undo");
    assert.equal(await selectedShare(page), 0, "the stroke was the last change");
    await page.click("#redo");
    await page.fill("#prompt", "a red shirt");
    await page.keyboard.press("Control+Enter"); // messages cover the button
    await runSays(page, "Stop");
  }, [/status of 422/, /ERR_FAILED/]));

test("one selection is under way at a time; an edit waits for it, and another picture drops it", () =>
  desktop(async (page) => {
    const waiting = [];
    const asked = async (count) => {
      for (let left = 1000; waiting.length < count; left -= 1) {
        assert.ok(left > 0, "it is not asked for");
        await page.waitForTimeout(10);
      }
    };
    await openPlayground(page, OPEN_URL);
    await onMasks(page, (route) => waiting.push(route));
    await selectByWords(page, "person");
    await asked(1);
    assert.equal(await page.textContent("#select"), "Selecting…");
    assert.equal(await page.getAttribute("#select", "aria-disabled"), "true");
    await says(page, "Selecting…");
    await page.keyboard.press("Enter");
    await page.locator("#select").click({ force: true });
    await chooseTool(page, "pick");
    await clickOn(page, CORNER);
    await page.fill("#prompt", "a painted person");
    await page.click("#run");
    assert.equal(waiting.length, 1);
    assert.equal(await page.textContent("#run"), "Edit");
    await waiting[0].continue();
    await runSays(page, "Stop");
    assert.deepEqual(await selected(page), await found(page, { mask_prompt: "person" }));
    assert.equal(await page.textContent("#select"), "Select");
    await page.click("#run");
    await runSays(page, "Edit");
    await selectByWords(page, "person");
    await asked(2);
    await page.locator("#gallery button").nth(1).click();
    await says(page, "");
    await waiting[1].abort();
    assert.equal(await selectedShare(page), 0);
    assert.equal(await page.locator(".toast").count(), 0);
  }));

test("what the server's segmenter does not take is not offered, and the page says why", async () => {
  const key = [/status of 401/];
  await desktop(async (page) => {
    await openWithKey(page, GUARDED_URL, KEY);
    assert.ok(await page.isHidden("#words-form"));
    assert.ok(await page.isHidden("#pick"));
    assert.equal(await page.textContent("#no-selecting"), "The server has no segmenter that selects by words or by clicks (see --segmenter).");
    await page.keyboard.press("p");
    assert.ok(await page.isChecked("[name=tool][value=brush]"));
    assert.deepEqual(await violations(page), []);
  }, key);
  await desktop(async (page) => {
    await page.route("**/v1/engine/stats*", async (route) => {
      const response = await route.fetch();
      const stats = await response.json();
      for (const model of stats.models) model.selects_by = ["words"];
      await route.fulfill({ response, json: stats });
    });
    await openPlayground(page, OPEN_URL);
    assert.ok(await page.isVisible("#words-form"));
    assert.ok(await page.isHidden("#pick"));
    assert.equal(await page.textContent("#no-selecting"), "The server has no segmenter that selects by clicks (see --segmenter).");
  });
});

for (const [device, options] of [["a desktop", {}], ["a phone", PHONE]]) {
  test(`selecting fits and is accessible on ${device}`, () =>
    withPage(browser, options, async (page) => {
      await openPlayground(page, OPEN_URL);
      await selectByWords(page, "the background");
      await page.waitForFunction(() => document.querySelector("#found").textContent.startsWith("Selected"));
      await chooseTool(page, "pick");
      for (const colorScheme of ["light", "dark"]) {
        await page.emulateMedia({ colorScheme });
        assert.deepEqual(await violations(page), [], colorScheme);
      }
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth), 0);
      if (options !== PHONE) return;
      const whole = await selectedShare(page);
      await page.tap("#pick-removes");
      const box = await page.locator("#sheet").boundingBox();
      await page.tap("#area", { position: { x: box.width / 20, y: box.height / 20 } });
      await page.waitForFunction(() => document.querySelector("#found").textContent.startsWith("Removed"));
      assert.ok((await selectedShare(page)) < whole);
      const sizes = await page.locator(".words button, .words input, #pick-removes").evaluateAll((all) => all.map((each) => each.getBoundingClientRect().height));
      assert.ok(Math.min(...sizes) >= 24, String(sizes));
    }));
}
