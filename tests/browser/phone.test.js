// The playground on a small screen, with fingers.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { edit, openPlayground, selectedShare } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { OPEN_URL } from "./server.js";

const PHONE = { viewport: { width: 360, height: 740 }, hasTouch: true, isMobile: true, deviceScaleFactor: 2 };

let browser;

before(async () => {
  browser = await launch();
});

after(() => browser?.close());

/** fingers: per moment, the places of all fingers that are down, as shares of the picture. */
async function touch(page, moments) {
  const session = await page.context().newCDPSession(page);
  const box = await page.locator("#sheet").boundingBox();
  const points = (shares) => shares.map(([x, y], id) => ({ x: box.x + x * box.width, y: box.y + y * box.height, id }));
  for (const [index, shares] of moments.entries()) {
    await session.send("Input.dispatchTouchEvent", { type: index ? "touchMove" : "touchStart", touchPoints: points(shares) });
  }
  await session.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] });
}

const overflow = (page) => page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);

test("it fits, and a finger draws", () =>
  withPage(browser, PHONE, async (page) => {
    await openPlayground(page, OPEN_URL);
    assert.equal(await overflow(page), 0, "nothing sticks out at 360 px");
    await page.locator("#sheet").scrollIntoViewIfNeeded();
    await touch(page, [[[0.4, 0.4]], [[0.5, 0.45]], [[0.6, 0.5]]]);
    assert.ok((await selectedShare(page, [0.45, 0.42, 0.55, 0.48])) > 0.9);
    await edit(page, "a red shirt");
    assert.equal(await overflow(page), 0, "nor with a result");
    const tooSmall = await page.locator("button:visible, input:visible").evaluateAll((controls) =>
      controls.filter((control) => !control.matches("[type=radio], [type=file]")).filter((control) => {
        const { width, height } = control.getBoundingClientRect();
        return Math.min(width, height) < 24 && !control.matches("[type=range]");
      }).map((control) => control.id || control.textContent),
    );
    assert.deepEqual(tooSmall, [], "fingers find every control");
  }));

test("two fingers zoom and draw nothing", () =>
  withPage(browser, PHONE, async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.locator("#sheet").scrollIntoViewIfNeeded();
    const before = (await page.locator("#sheet").boundingBox()).width;
    await touch(page, [[[0.45, 0.5]], [[0.45, 0.5], [0.55, 0.5]], [[0.35, 0.5], [0.65, 0.5]], [[0.25, 0.5], [0.75, 0.5]]]);
    assert.ok((await page.locator("#sheet").boundingBox()).width > 2 * before);
    assert.equal(await selectedShare(page), 0);
  }));

test("the status page fits", () =>
  withPage(browser, PHONE, async (page) => {
    await page.goto(`${OPEN_URL}status`);
    await page.waitForSelector(".timeline");
    assert.equal(await overflow(page), 0);
  }));
