// The status page, the API key and accessibility.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { violations } from "./accessibility.js";
import { drag, edit, giveKey, openWithKey, untilReady } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { GUARDED_URL, KEY, OPEN_URL } from "./server.js";

const REFUSED = [/status of 401/];

let browser;

before(async () => {
  browser = await launch();
});

after(() => browser?.close());

/** In the page: what it shows of a step of three images, null while there is none. */
function sharedSteps() {
  const titles = [...document.querySelectorAll(".timeline .step title")].map((title) => title.textContent.split("\n"));
  const together = titles.find(([first]) => first.startsWith("3 images"));
  const links = document.querySelectorAll(".timeline .link").length;
  return together ? { together, links, summary: document.querySelector("#steps-summary").textContent } : null;
}

test("the key is asked for, sent, and kept nowhere but in memory", () =>
  withPage(browser, {}, async (page, context) => {
    await page.goto(GUARDED_URL);
    const problem = (words) => page.waitForFunction((words) => document.querySelector("#key-problem").textContent.includes(words), words);
    await giveKey(page, "schlüssel-€");
    await problem("ASCII alone");
    await giveKey(page, "wrong");
    await problem("not accepted");
    assert.ok(await page.isVisible("#key-problem"));
    assert.equal(await page.inputValue("#key-field"), "");
    await giveKey(page, KEY);
    await untilReady(page);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, document.documentElement.outerHTML]));
    assert.ok(!kept.includes(KEY));
    assert.deepEqual(await context.cookies(), []);
    await page.reload();
    await page.waitForSelector("#key-dialog[open]");
  }, REFUSED));

test("who declines is told what is missing, and asked again on the next try", () =>
  withPage(browser, {}, async (page) => {
    await page.goto(GUARDED_URL);
    await page.waitForSelector("#key-dialog[open]");
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => document.querySelector("#model").textContent === "an API key is needed");
    await page.waitForSelector("#parts button");
    await page.click("#run");
    await giveKey(page, KEY);
    await untilReady(page);
  }, REFUSED));

test("images that share a step share it on the timeline", () =>
  withPage(browser, {}, async (page, context) => {
    await openWithKey(page, GUARDED_URL, KEY);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#images", "3");
    await page.fill("#steps", "30");
    const status = await context.newPage();
    await status.goto(`${GUARDED_URL}status`);
    await giveKey(status, KEY);
    await status.waitForSelector(".timeline");
    const edited = edit(page, "a teal shirt");
    const { together, links, summary } = await (await status.waitForFunction(sharedSteps)).jsonValue();
    assert.equal(new Set(together.slice(1)).size, 3, String(together));
    assert.match(together[1], /^req_[0-9a-f]+-\d$/);
    assert.ok(links > 0);
    assert.match(summary, /\d+ steps, [\d.]+ images in each on average, 3 at most/);
    await edited;
    assert.match(await status.textContent("#cache"), /Hit ratio\d+ %/);
    assert.match(await status.textContent("#tiers"), /host.*entries/);
    assert.match(await status.textContent("#engines"), /serves/);
    const rows = await status.locator("#worker-models tr").allTextContents();
    assert.equal(rows.length, 1, "one worker with one model");
    assert.match(rows[0], /^0\.0stencil-embeddedresident[1-9]\d*1[\d.]+ MB[\d.]+ m?s ago$/);
  }, REFUSED));

test("what stays as it is is told once, and not each second", () =>
  withPage(browser, {}, async (page) => {
    await page.goto(`${OPEN_URL}status`);
    await page.waitForFunction(() => document.querySelector("#model").textContent.includes(", cpu"));
    const [told, polled] = await page.evaluate(async () => {
      const counts = { model: 0, now: 0 };
      for (const id of Object.keys(counts)) new MutationObserver(() => (counts[id] += 1)).observe(document.getElementById(id), { childList: true });
      while (counts.now < 2) await new Promise((resolve) => setTimeout(resolve, 50));
      return [counts.model, counts.now];
    });
    assert.deepEqual([told, polled], [0, 2]);
  }));

test("a hundred models with long names stay within their table", () =>
  withPage(browser, {}, async (page) => {
    const name = `<b>${"long-name-".repeat(30)}`;
    const model = { state: "resident", hits: 1, loads: 1, bytes: 1, idle_seconds: null };
    const models = Array.from({ length: 100 }, (_, index) => ({ model: `${name}${index}`, ...model }));
    await page.route("**/v1/engine/stats?*", async (route) => {
      const response = await route.fetch();
      const stats = await response.json();
      if (response.ok()) stats.engines[0].ranks[0].models = models;
      await route.fulfill({ response, json: stats });
    });
    await page.goto(`${GUARDED_URL}status`);
    await giveKey(page, KEY);
    await page.waitForFunction(() => document.querySelectorAll("#worker-models tr").length === 100);
    assert.equal(await page.textContent("#worker-models td"), `${name}0`);
    const [width, height] = await page.evaluate(() => {
      const { offsetHeight } = document.querySelector("#worker-models").closest(".scroll");
      return [document.documentElement.scrollWidth / window.innerWidth, offsetHeight / window.innerHeight];
    });
    assert.ok(width <= 1 && height <= 0.6, `${width} wide, ${height} high`);
  }, REFUSED));

test("machines of a cluster are listed with their engines", () =>
  withPage(browser, {}, async (page) => {
    await page.route("**/v1/engine/stats?*", async (route) => {
      const response = await route.fetch();
      const stats = await response.json();
      if (response.ok()) {
        const [engine] = stats.engines;
        const there = { machine: "10.0.0.2", silent_seconds: 0.4 };
        stats.engines = [
          { ...engine, ...there, state: "serving" },
          { ...engine, ...there, index: 3, state: "draining" },
          { ...engine, index: 5, machine: "10.0.0.4", silent_seconds: 7, state: "serving" },
        ];
      }
      await route.fulfill({ response, json: stats });
    });
    await page.goto(`${GUARDED_URL}status`);
    await giveKey(page, KEY);
    await page.waitForFunction(() => document.querySelectorAll("#machines tr").length === 2);
    const rows = await page.locator("#machines tr").allTextContents();
    assert.deepEqual(rows, ["10.0.0.220 serving, 3 drainingin contact", "10.0.0.415 servingsilent for 7.00 s"]);
    assert.ok(await page.isVisible("#machines-card"));
    await page.unroute("**/v1/engine/stats?*");
    await page.waitForFunction(() => document.querySelector("#machines-card").hidden);
  }, REFUSED));

for (const colorScheme of ["light", "dark"]) {
  test(`axe-core finds nothing (${colorScheme})`, () =>
    withPage(browser, { colorScheme }, async (page) => {
      await page.goto(GUARDED_URL);
      await page.waitForSelector("#key-dialog[open]");
      assert.deepEqual(await violations(page), [], "key dialog");
      await giveKey(page, KEY);
      await untilReady(page);
      await page.click("text=Advanced");
      assert.deepEqual(await violations(page), [], "drawing");
      await page.click("#run"); // with an empty mask: a message
      await page.waitForSelector(".toast");
      assert.deepEqual(await violations(page), [], "message");
      await page.click("#help");
      assert.deepEqual(await violations(page), [], "help");
      await page.click("#help-dialog button");
      await drag(page, [0.42, 0.4], [0.6, 0.55]);
      await edit(page, "a red shirt");
      await page.click("#run-exact");
      await page.waitForSelector(".comparison");
      assert.deepEqual(await violations(page), [], "result");
      await page.goto(`${GUARDED_URL}status`);
      await giveKey(page, KEY);
      await page.waitForSelector(".timeline");
      assert.deepEqual(await violations(page), [], "status");
    }, REFUSED));
}
