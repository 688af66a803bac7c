// A page of the real browser, as a person has it; whatever it puts on the console as an error fails its test.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

import { chromium } from "playwright-core";

const NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/** This machine, under a name that a browser trusts no more than any other. */
export const LAN_NAME = "stencil.test";

export function launch() {
  const args = [`--host-resolver-rules=MAP ${LAN_NAME} 127.0.0.1`];
  if (process.getuid() === 0) args.push("--no-sandbox"); // Chromium refuses root else
  return chromium.launch({ executablePath: findChromium(), args });
}

function findChromium() {
  for (const name of [process.env.CHROMIUM, ...NAMES].filter(Boolean)) {
    try {
      return execFileSync("sh", ["-c", 'command -v "$0"', name], { encoding: "utf8" }).trim();
    } catch {
      // not this one
    }
  }
  throw new Error("no Chromium: run tests/browser/install.sh");
}

/** Run `use(page, context)` on a new page; options are those of a browser context. expected: errors that must come. */
export async function withPage(browser, options, use, expected = []) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  context.setDefaultTimeout(60_000); // a busy machine fails no test
  const page = await context.newPage();
  page.on("filechooser", () => {}); // from the start: a busy browser heeds it late, and would open its own dialog till then
  const errors = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  try {
    await use(page, context);
    const unexpected = errors.filter((text) => !expected.some((pattern) => pattern.test(text)));
    assert.deepEqual(unexpected, [], "nothing goes wrong on the console");
  } finally {
    await context.close();
  }
}
