// The choice of adapters: only where there are any, in the request and in its copies.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { copied, download, drag, edit, giveKey, lastForm, openPlayground, openWithKey } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { ADAPTER, GUARDED_URL, KEY, OPEN_URL, PYTHON } from "./server.js";

const REFUSED = [/status of 401/];

let browser, folder;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "adapters-"));
  browser = await launch();
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

test("a server without adapters offers none", () =>
  withPage(browser, {}, async (page) => {
    await openPlayground(page, OPEN_URL);
    assert.ok(await page.isHidden("#adapter"));
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    assert.equal((await lastForm(page)).fields.lora, undefined);
  }));

test("an adapter is chosen, and its result's copied request names it", () =>
  withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, async (page) => {
    const shown = async (name) => readFileSync(await download(page, "#download", join(folder, name)));
    const run = (command, args) => execFileSync(command, args, { cwd: folder, env: { ...process.env, PYTHONPATH: "", STENCIL_API_KEY: KEY } });
    await openWithKey(page, GUARDED_URL, KEY);
    assert.deepEqual(await page.locator("#adapter option").allTextContents(), ["none", ADAPTER]);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#seed", "3");
    await page.fill("#steps", "4");
    await edit(page, "a red shirt");
    assert.equal((await lastForm(page)).fields.lora, undefined);
    const plain = await shown("plain.png");
    await page.click("#back-to-mask");
    await page.getByLabel("Adapter").selectOption(ADAPTER);
    await edit(page, "a red shirt");
    assert.equal((await lastForm(page)).fields.lora, ADAPTER);
    const adapted = await shown("adapted.png");
    assert.ok(!adapted.equals(plain), "it paints something else");
    for (const [selector, command, flag] of [["#copy-python", PYTHON, "-c"], ["#copy-curl", "sh", "-c"]]) {
      run(command, [flag, await copied(page, selector)]);
      assert.ok(readFileSync(join(folder, "edited.png")).equals(adapted), selector);
      rmSync(join(folder, "edited.png"));
    }
    const titles = () => page.locator("#history button").evaluateAll((buttons) => buttons.map(({ title }) => title));
    assert.deepEqual(await titles(), [`a red shirt, adapter ${ADAPTER}, seed 3`, "a red shirt, seed 3"]);
    await page.locator("#history button").last().click();
    assert.equal(await page.inputValue("#adapter"), "", "what is shown is what the form says");
    await page.goto(`${GUARDED_URL}status`);
    await giveKey(page, KEY);
    await page.waitForFunction((text) => document.querySelector("#model").textContent === text, `stencil-embedded, cpu; adapters: ${ADAPTER}`);
  }, REFUSED));
