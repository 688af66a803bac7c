// Reference pictures in the playground: a list that is filled, ordered and sent, where the model sees any.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { violations } from "./accessibility.js";
import { copied, download, drag, edit, lastFileNames, lastForm, openPlayground } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { OPEN_URL, PYTHON, REFERENCES_URL, ROOT } from "./server.js";

const EXAMPLES = join(ROOT, "entrypoints/playground/static/examples");
const [ONE, TWO, THREE, FOUR] = ["person-4.png", "person-11.png", "person-12.png", "person-32.png"];
const REFERENCE_TOKENS = 256; // of an example: 256 px, 16 px a token
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

let browser, folder;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "references-"));
  browser = await launch();
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

const desktop = (use) => withPage(browser, {}, use);
const choose = (page, ...names) => page.setInputFiles("#add-references", names.map((name) => join(EXAMPLES, name)));
const listed = (page) => page.locator("#references .name").allTextContents();
const button = (page, name) => page.getByRole("button", { name });
const focused = (page) => page.evaluate(() => document.activeElement.ariaLabel ?? document.activeElement.id);
const sent = (page) => lastFileNames(page, "reference_image[]");

/** Choose them, and wait until they are in the list. */
async function add(page, ...names) {
  const wanted = [...(await listed(page)), ...names];
  await choose(page, ...names);
  await untilListed(page, ...wanted);
}

function untilListed(page, ...names) {
  return page.waitForFunction((names) => [...document.querySelectorAll("#references .name")].map(({ textContent }) => textContent).join() === names, names.join());
}

/** Press a key until `wanted` has the focus. */
async function press(page, key, wanted) {
  for (let left = 40; (await focused(page)) !== wanted; left -= 1) {
    assert.ok(left > 0, `${key} does not lead to ${wanted}`);
    await page.keyboard.press(key);
  }
}

/** Give the page a file as a drop on an element or a paste while it has the focus does. */
async function give(page, kind, selector, name) {
  await page.evaluate(
    ([kind, selector, name, bytes]) => {
      const data = new DataTransfer();
      data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
      const element = document.querySelector(selector);
      element.focus();
      const target = kind === "drop" ? element : document.body; // a paste goes to where text is selected
      const event = kind === "drop" ? new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }) : new ClipboardEvent(kind, { clipboardData: data, bubbles: true, cancelable: true });
      target.dispatchEvent(event);
    },
    [kind, selector, name, [...readFileSync(join(EXAMPLES, name))]],
  );
}

test("a model that sees no references is offered none", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    assert.ok(await page.isHidden("#references-box"));
    assert.ok(await page.isHidden("#add-references"));
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    assert.deepEqual(await sent(page), []);
  }));

test("references are added, moved and removed, and sent in their order", () =>
  desktop(async (page) => {
    await openPlayground(page, REFERENCES_URL);
    assert.equal(await page.textContent("#references-room"), "0 of 3");
    await add(page, ONE, TWO, THREE);
    assert.deepEqual(await page.locator("#references b").allTextContents(), ["1", "2", "3"]);
    assert.equal(await page.textContent("#references-news"), "3 of 3 references.");
    await button(page, `Move reference 3, ${THREE}, earlier`).click();
    assert.deepEqual(await listed(page), [ONE, THREE, TWO]);
    await button(page, `Move reference 1, ${ONE}, later`).click();
    assert.deepEqual(await listed(page), [THREE, ONE, TWO]);
    assert.equal(await page.textContent("#references-news"), `“${ONE}” is reference 2 of 3.`);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    const tokensOf = async (prompt) => {
      const answer = page.waitForResponse((response) => response.url().endsWith("v1/images/edits"));
      await edit(page, prompt);
      const data = (await (await answer).text()).split("\n").find((line) => line.startsWith("data:") && line.includes('"image_edit.completed"'));
      const { usage, stencil } = JSON.parse(data.slice("data:".length));
      return usage.input_tokens_details.image_tokens - stencil.image_tokens;
    };
    assert.equal(await tokensOf("a hat"), 3 * REFERENCE_TOKENS);
    assert.deepEqual(await sent(page), [THREE, ONE, TWO]);
    await button(page, `Remove reference 1, ${THREE}`).click();
    assert.deepEqual(await listed(page), [ONE, TWO]);
    await page.click("#back-to-mask");
    assert.equal(await tokensOf("a scarf"), 2 * REFERENCE_TOKENS);
    assert.deepEqual(await sent(page), [ONE, TWO]);
    const titles = await page.locator("#history button").evaluateAll((buttons) => buttons.map(({ title }) => title.replace(/\d+$/, "")));
    assert.deepEqual(titles, ["a scarf, 2 references, seed ", "a hat, 3 references, seed "]);
    await page.locator("#history button").last().click();
    assert.deepEqual(await listed(page), [THREE, ONE, TWO], "what is shown is what the form says");
    await page.click("#run-exact");
    await page.waitForSelector(".comparison");
    assert.deepEqual(await sent(page), [THREE, ONE, TWO]);
    assert.equal((await lastForm(page)).fields.mask_aware, "false");
  }));

test("one too many is refused with the number, and what is no picture by its name", () =>
  desktop(async (page) => {
    const errors = page.locator(".toast.error p");
    await openPlayground(page, REFERENCES_URL);
    await choose(page, ONE, TWO, THREE, FOUR);
    await untilListed(page, ONE, TWO, THREE);
    await errors.first().waitFor();
    assert.equal(await errors.last().textContent(), `This model sees at most 3 references. Not added: “${FOUR}”.`);
    await button(page, `Remove reference 2, ${TWO}`).click();
    await page.setInputFiles("#add-references", { name: "notes.png", mimeType: "image/png", buffer: Buffer.from("not a picture") });
    await errors.nth(1).waitFor();
    assert.match(await errors.last().textContent(), /“notes\.png” is not a PNG, WebP or JPEG file/);
    assert.deepEqual(await listed(page), [ONE, THREE]);
  }));

test("what is dropped or pasted on the list is a reference, elsewhere the picture to edit", () =>
  desktop(async (page) => {
    await openPlayground(page, REFERENCES_URL);
    await give(page, "drop", "#references-title", ONE);
    await untilListed(page, ONE);
    await give(page, "paste", "#add-references", TWO);
    await untilListed(page, ONE, TWO);
    assert.ok(await page.isVisible("#parts-box"), "the picture to edit stays");
    for (const kind of ["drop", "paste"]) {
      await give(page, kind, "#prompt", THREE);
      await page.waitForFunction(() => document.querySelector("#parts-box").hidden);
      await page.locator("#gallery button").nth(1).click();
      await page.waitForSelector("#parts-box:not([hidden])");
    }
    assert.deepEqual(await listed(page), [ONE, TWO]);
  }));

test("references by keyboard alone", () =>
  desktop(async (page) => {
    await openPlayground(page, REFERENCES_URL);
    await page.focus("#chips button:last-of-type");
    const chosen = page.waitForEvent("filechooser");
    await press(page, "Tab", "add-references");
    await page.keyboard.press("Space");
    await (await chosen).setFiles([ONE, TWO, THREE].map((name) => join(EXAMPLES, name)));
    await untilListed(page, ONE, TWO, THREE);
    await press(page, "Shift+Tab", `Move reference 3, ${THREE}, earlier`);
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), `Move reference 2, ${THREE}, earlier`, "it can be moved on");
    await page.keyboard.press("Enter");
    assert.deepEqual(await listed(page), [THREE, ONE, TWO]);
    assert.equal(await focused(page), `Move reference 1, ${THREE}, later`, "it cannot go further");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    assert.equal(await focused(page), `Remove reference 1, ${ONE}`, "that of the next one");
    await page.keyboard.press("Enter");
    await page.keyboard.press("Enter");
    assert.deepEqual(await listed(page), []);
    assert.equal(await focused(page), "add-references");
    assert.equal(await page.textContent("#references-news"), `“${TWO}” is removed. 0 of 3 references.`);
  }));

test("the copied Python and curl send the references", () =>
  withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    await openPlayground(page, REFERENCES_URL);
    await add(page, TWO, ONE);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    const shown = readFileSync(await download(page, "#download", join(folder, "shown.png")));
    for (const name of [ONE, TWO]) copyFileSync(join(EXAMPLES, name), join(folder, name));
    const run = (command, args) => execFileSync(command, args, { cwd: folder, env: { ...process.env, PYTHONPATH: "" } });
    for (const [selector, command] of [["#copy-python", PYTHON], ["#copy-curl", "sh"]]) {
      run(command, ["-c", await copied(page, selector)]);
      assert.ok(readFileSync(join(folder, "edited.png")).equals(shown), selector);
      rmSync(join(folder, "edited.png"));
    }
  }));

for (const [device, options] of [["a desktop", {}], ["a phone", PHONE]]) {
  test(`references fit and are accessible on ${device}`, () =>
    withPage(browser, options, async (page) => {
      await openPlayground(page, REFERENCES_URL);
      assert.deepEqual(await violations(page), [], "none yet");
      await add(page, ONE, TWO, THREE);
      await choose(page, FOUR);
      await page.waitForSelector(".toast.error");
      assert.deepEqual(await violations(page), [], "three, and one refused");
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth), 0);
      const sizes = await page.locator("#references button").evaluateAll((buttons) => buttons.map((each) => each.getBoundingClientRect()).map(({ width, height }) => Math.min(width, height)));
      assert.ok(sizes.length === 9 && Math.min(...sizes) >= 24, String(sizes));
    }));
}
