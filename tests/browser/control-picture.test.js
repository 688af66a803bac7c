// A control picture in the playground: given, described and sent where the model has ControlNets.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { violations } from "./accessibility.js";
import { copied, download, drag, edit, openPlayground } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { CONTROLLED_URL, OPEN_URL, PYTHON, REFERENCES_URL, ROOT } from "./server.js";

const EXAMPLES = join(ROOT, "entrypoints/playground/static/examples");
const [EDGES, DEPTH] = ["person-4.png", "person-11.png"];
const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

let browser, folder;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "control-picture-"));
  browser = await launch();
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

const shown = (page) => page.locator("#control .name").allTextContents();
const control = (page) => page.evaluate(() => Object.fromEntries([...window.sentForms.at(-1)].filter(([name]) => name.startsWith("control_")).map(([name, value]) => [name, value.name ?? value])));

async function give(page, name) {
  await page.setInputFiles("#add-control", join(EXAMPLES, name));
  await page.waitForFunction((name) => document.querySelector("#control .name")?.textContent === name, name);
}

async function select(page) {
  await drag(page, [0.42, 0.4], [0.6, 0.55]);
  await page.click("text=Advanced");
  await page.fill("#steps", "2");
}

test("a model without ControlNets is offered no control picture", () =>
  withPage(browser, {}, async (page) => {
    await openPlayground(page, REFERENCES_URL);
    await select(page);
    for (const id of ["#control-box", "#control-type", "#control-scale"]) assert.ok(await page.isHidden(id), id);
    await edit(page, "a red shirt");
    assert.deepEqual(await control(page), {});
  }));

test("the embedded model is offered a picture of edges", () =>
  withPage(browser, {}, async (page) => {
    await openPlayground(page, OPEN_URL);
    await select(page);
    await give(page, EDGES);
    await edit(page, "a red shirt");
    assert.deepEqual(await control(page), { control_image: EDGES, control_type: "edges" });
  }));

test("a control picture is given, described, sent and removed", () =>
  withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    await openPlayground(page, CONTROLLED_URL);
    assert.deepEqual(await page.locator("#control-type option").allTextContents(), ["edges", "depth"]);
    await select(page);
    await page.fill("#seed", "3");
    await edit(page, "a red shirt");
    assert.deepEqual(await control(page), {});
    const plain = readFileSync(await download(page, "#download", join(folder, "plain.png")));
    await page.click("#back-to-mask");
    await give(page, EDGES);
    assert.equal(await page.textContent("#control-news"), `“${EDGES}” is the control picture.`);
    await edit(page, "a red shirt");
    assert.deepEqual(await control(page), { control_image: EDGES, control_type: "edges" }, "the rest is left to the server");
    await page.click("#back-to-mask");
    await give(page, DEPTH);
    assert.deepEqual(await shown(page), [DEPTH], "one takes the other's place");
    await page.getByLabel("Type").selectOption("depth");
    await page.getByLabel("Control scale").fill("1.5");
    await page.getByLabel("Control end").fill("0.5");
    await edit(page, "a red shirt");
    const sent = { control_image: DEPTH, control_type: "depth", control_scale: "1.5", control_end: "0.5" };
    assert.deepEqual(await control(page), sent);
    const steered = readFileSync(await download(page, "#download", join(folder, "steered.png")));
    assert.ok(!steered.equals(plain), "it paints something else");
    copyFileSync(join(EXAMPLES, DEPTH), join(folder, DEPTH));
    for (const [selector, command] of [["#copy-python", PYTHON], ["#copy-curl", "sh"]]) {
      execFileSync(command, ["-c", await copied(page, selector)], { cwd: folder, env: { ...process.env, PYTHONPATH: "" } });
      assert.ok(readFileSync(join(folder, "edited.png")).equals(steered), selector);
      rmSync(join(folder, "edited.png"));
    }
    const entries = page.locator("#history button");
    const titles = await entries.evaluateAll((buttons) => buttons.map(({ title }) => title));
    assert.deepEqual(titles, ["a red shirt, steered by depth, seed 3", "a red shirt, steered by edges, seed 3", "a red shirt, seed 3"]);
    await entries.last().click();
    assert.deepEqual(await shown(page), [], "what is shown is what the form says");
    await entries.first().click();
    assert.deepEqual([await shown(page), await page.inputValue("#control-type"), await page.inputValue("#control-scale")], [[DEPTH], "depth", "1.5"]);
    await page.getByRole("button", { name: `Remove control picture, ${DEPTH}` }).click();
    await page.click("#back-to-mask");
    await edit(page, "a red shirt");
    assert.deepEqual(await control(page), {});
  }));

test("numbers that the server would refuse are told at their fields, a picture of other proportions by the server", () =>
  withPage(browser, {}, async (page) => {
    const errors = page.locator(".toast.error p");
    await openPlayground(page, CONTROLLED_URL);
    await select(page);
    await page.fill("#prompt", "a red shirt");
    await give(page, EDGES);
    for (const [id, value, said] of [["control-scale", "11", "Control scale is a number from 0 to 10."], ["control-start", "1", "Control start is below control end."]]) {
      await page.fill(`#${id}`, value);
      await page.click("#run");
      await page.waitForFunction((said) => [...document.querySelectorAll(".toast.error p")].at(-1)?.textContent === said, said);
      assert.equal(await page.evaluate(() => document.activeElement.id), id);
      await page.fill(`#${id}`, "");
    }
    const wide = await page.screenshot({ clip: { x: 0, y: 0, width: 300, height: 100 } });
    await page.setInputFiles("#add-control", { name: "wide.png", mimeType: "image/png", buffer: wide });
    await page.waitForFunction(() => document.querySelector("#control .name").textContent === "wide.png");
    const before = await errors.count();
    await page.click("#run");
    await errors.nth(before).waitFor();
    assert.match(await errors.last().textContent(), /Invalid 'control_image': it has 300x100 pixels, .*give one of these proportions/);
  }, [/status of 400/]));

test("a control picture by keyboard alone", () =>
  withPage(browser, {}, async (page) => {
    const focused = () => page.evaluate(() => document.activeElement.ariaLabel ?? document.activeElement.id);
    await openPlayground(page, CONTROLLED_URL);
    await page.focus("#control-type");
    await page.keyboard.press("d");
    assert.equal(await page.inputValue("#control-type"), "depth");
    await page.keyboard.press("Tab");
    assert.equal(await focused(), "add-control");
    const chosen = page.waitForEvent("filechooser");
    await page.keyboard.press("Space");
    await (await chosen).setFiles(join(EXAMPLES, EDGES));
    await page.waitForSelector("#control .name");
    await page.keyboard.press("Shift+Tab");
    await page.keyboard.press("Shift+Tab");
    assert.equal(await focused(), `Remove control picture, ${EDGES}`);
    await page.keyboard.press("Enter");
    assert.equal(await focused(), "add-control");
    assert.deepEqual(await shown(page), []);
  }));

for (const [device, options] of [["a desktop", {}], ["a phone", PHONE]]) {
  test(`a control picture fits and is accessible on ${device}`, () =>
    withPage(browser, options, async (page) => {
      await openPlayground(page, CONTROLLED_URL);
      await page.click("text=Advanced");
      assert.deepEqual(await violations(page), [], "none yet");
      await give(page, EDGES);
      assert.deepEqual(await violations(page), [], "one");
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth), 0);
    }));
}
