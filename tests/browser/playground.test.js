// The playground in a real browser, on a real server with the embedded model.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { chooseTool, copied, download, drag, edit, lastForm, openPlayground, selectedShare } from "./actions.js";
import { launch, withPage } from "./browser.js";
import { pictures } from "./pictures.js";
import { OPEN_URL, PYTHON, ROOT } from "./server.js";

const PERSON = join(ROOT, "entrypoints/playground/static/examples/person.png");
const SHIRT = [0.4, 0.4, 0.6, 0.6];

let browser, folder;

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "playground-"));
  browser = await launch();
});

after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

const desktop = (use, expected) => withPage(browser, {}, use, expected);
const withClipboard = (use) => withPage(browser, { permissions: ["clipboard-read", "clipboard-write"] }, use);

function keep(name, content) {
  const path = join(folder, name);
  writeFileSync(path, content);
  return path;
}

const toast = (page) => page.locator(".toast.error p").last().textContent({ timeout: 20_000 });

test("a drawn mask is edited, and nothing outside it changes by a bit", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.38], [0.66, 0.4], [0.45, 0.5], [0.66, 0.6]);
    assert.match(await page.textContent("#coverage"), /about \d+ of 256 tokens/);
    await edit(page, "a red striped shirt");
    const { fields, files } = await lastForm(page);
    assert.equal(fields.prompt, "a red striped shirt");
    assert.ok(Number(await page.getAttribute("#sheet", "data-pictures")) >= 2, "partial images, then the result");
    assert.equal(await page.getAttribute("#sheet", "data-mode"), "result");
    const result = await download(page, "#download", join(folder, "result.png"));
    const found = pictures("compare", [PERSON, keep("mask.png", files.mask_image), result]);
    assert.deepEqual(found.size, [256, 256]);
    assert.equal(found.outside_changed, 0);
    assert.ok(found.inside > 1000 && found.inside_changed > 0.8 * found.inside, JSON.stringify(found));
  }));

test("the stage has no scroll bar where the picture fits", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const room = await page.evaluate(() => {
      const { clientWidth, clientHeight, scrollWidth, scrollHeight } = document.querySelector("#viewport");
      return { across: scrollWidth - clientWidth, down: scrollHeight - clientHeight };
    });
    assert.deepEqual(room, { across: 0, down: 0 });
  }));

test("partial images come in place while the edit runs", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.click("#parts button");
    await page.waitForFunction(() => document.querySelector("#coverage").textContent.includes("tokens"));
    await page.evaluate(() => {
      window.seen = [];
      const sheet = document.querySelector("#sheet");
      new MutationObserver(() => window.seen.push([sheet.dataset.mode, Number(sheet.dataset.pictures)])).observe(sheet, { attributes: true });
    });
    await page.click("text=Advanced");
    await page.fill("#steps", "20");
    await edit(page, "a teal shirt");
    const during = (await page.evaluate(() => window.seen)).filter(([mode]) => mode === "run").map(([, pictures]) => pictures);
    assert.ok(Math.max(...during) >= 2, `pictures while it ran: ${during}`);
  }));

test("the cost strip tells what the answer says, and the overlay shows as many tokens", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const tokensOf = async () => Number(/(\d+) of 256 tokens/.exec(await page.textContent("#result .facts"))[1]);
    for (const [index, end] of [[0.52, 0.45], [0.9, 0.9]].entries()) {
      if (index) await page.click("#back-to-mask");
      await chooseTool(page, "rectangle");
      await drag(page, [0.4, 0.4], end);
      await edit(page, "a blue shirt");
      await page.click("#show-tokens");
      const shown = await page.evaluate(() => {
        const canvas = document.querySelector("#tokens");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.filter((value, at) => at % 4 === 3 && value === 0).length;
      });
      assert.equal(shown, await tokensOf());
    }
    const names = await page.locator("#result .stages li").allTextContents();
    assert.ok(names.some((name) => /^denoising [\d.]+ m?s$/.test(name)), String(names));
  }));

test("run exact shows both, with times and what differs", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.locator("#parts button").nth(1).click();
    await page.waitForFunction(() => document.querySelector("#coverage").textContent.includes("tokens"));
    await edit(page, "brown trousers");
    await page.click("#run-exact");
    await page.waitForSelector(".comparison");
    assert.equal((await lastForm(page)).fields.mask_aware, "false");
    assert.equal(await page.locator(".comparison figure").count(), 3);
    assert.match(await page.textContent(".comparison p"), /^Mask-aware .+, exact .+: [\d.]+× (faster|slower)\./);
    const [mean, most] = /mean ([\d.]+), most (\d+) of/.exec(await page.locator("figcaption").last().textContent()).slice(1).map(Number);
    assert.ok(mean < 5 && most > 0, `mean ${mean}, most ${most}`);
    await page.locator("#history button").first().click(); // the exact one
    assert.match(await page.textContent("#result .facts"), /exact/);
    assert.equal(await page.locator("#run-exact").count(), 0);
  }));

test("the copied Python and curl make the same file", () =>
  withClipboard(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#steps", "6");
    await page.fill("#margin", "12");
    await edit(page, "it's a \"red\" shirt");
    const shown = readFileSync(await download(page, "#download", join(folder, "shown.png")));
    const run = (command, args) => execFileSync(command, args, { cwd: folder, env: { ...process.env, PYTHONPATH: "" } });
    run(PYTHON, ["-c", await copied(page, "#copy-python")]);
    assert.ok(readFileSync(join(folder, "edited.png")).equals(shown), "Python");
    rmSync(join(folder, "edited.png"));
    run("sh", ["-c", await copied(page, "#copy-curl")]);
    assert.ok(readFileSync(join(folder, "edited.png")).equals(shown), "curl");
  }));

test("several images, each with its own seed", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#images", "2");
    await page.fill("#seed", "41");
    await edit(page, "a pink shirt");
    const names = await page.locator("#history button").evaluateAll((buttons) => buttons.map((button) => button.title).sort());
    assert.deepEqual(names, ["a pink shirt, seed 41", "a pink shirt, seed 42"]);
    const wanted = page.locator("#history button[title$='41']");
    await wanted.click();
    assert.equal(await wanted.getAttribute("aria-pressed"), "true");
    const path = await download(page, "#download", join(folder, "41.png"));
    assert.match(readFileSync(path).subarray(1, 4).toString(), /PNG/);
  }));

test("a result becomes the picture that is edited next", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a purple shirt");
    const first = await download(page, "#download", join(folder, "first.png"));
    await page.click("#use-result");
    await page.waitForFunction(() => document.querySelector("#coverage").textContent.startsWith("Paint"));
    await drag(page, [0.45, 0.8], [0.6, 0.85]);
    await edit(page, "black trousers");
    assert.ok((await lastForm(page)).files.image.equals(readFileSync(first)));
  }));

test("who types meanwhile keeps the focus when a result is opened", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a purple shirt");
    await page.evaluate(() => {
      document.querySelector("#use-result").click();
      document.querySelector("#prompt").focus();
    });
    await page.waitForFunction(() => document.querySelector("#coverage").textContent.startsWith("Paint"));
    await page.waitForTimeout(200); // the focus would go after this
    assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await edit(page, "a red shirt");
    await page.focus("#use-result"); // which is gone then
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.activeElement.id === "area");
  }));

test("of two parts chosen quickly the second one is selected, though its mask comes first", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    let release;
    const released = new Promise((resolve) => {
      release = resolve;
    });
    await page.route("**/person-shirt.png*", async (route) => {
      await released;
      await route.continue();
    });
    await page.locator("#parts button").nth(0).click();
    await page.locator("#parts button").nth(1).click();
    await page.waitForFunction(() => document.querySelector("#coverage").textContent.startsWith("The mask covers"));
    const selected = await selectedShare(page);
    const late = page.waitForResponse(/person-shirt/);
    release();
    await (await late).finished();
    await page.waitForTimeout(500); // it would be decoded and selected
    assert.equal(await selectedShare(page), selected);
    assert.match(await page.inputValue("#prompt"), /trousers/);
  }));

test("a held Enter sends the form once", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.fill("#prompt", "a purple shirt");
    await page.click("text=Advanced");
    for (const [index, field] of ["#seed", "#run"].entries()) {
      await page.focus(field);
      await page.keyboard.down("Enter");
      await page.waitForFunction((number) => window.sentForms.length === number, index + 1);
      for (let times = 0; times < 2; times += 1) await page.keyboard.down("Enter"); // it is held
      await page.keyboard.up("Enter");
      await page.waitForSelector("#result:not([hidden])");
      await page.waitForFunction(() => document.querySelector("#run").textContent === "Edit");
      assert.equal(await page.evaluate(() => window.sentForms.length), index + 1);
      await page.click("#back-to-mask");
    }
    await page.focus("#prompt");
    for (let times = 0; times < 3; times += 1) await page.keyboard.down("Enter");
    await page.keyboard.up("Enter");
    assert.match(await page.inputValue("#prompt"), /\n\n\n/, "in a text it makes lines");
  }));

test("tools, undo and redo", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.45, 0.5], [0.55, 0.5]);
    const brushed = await selectedShare(page);
    assert.ok(brushed > 0.01 && brushed < 0.1, `brush: ${brushed}`);
    await chooseTool(page, "rectangle");
    await drag(page, [0.4, 0.4], [0.6, 0.6]);
    assert.ok((await selectedShare(page, SHIRT)) > 0.97);
    await chooseTool(page, "eraser");
    await drag(page, [0.4, 0.5], [0.6, 0.5]);
    const erased = await selectedShare(page, SHIRT);
    assert.ok(erased < 0.7, `eraser: ${erased}`);
    await chooseTool(page, "lasso");
    await drag(page, [0.1, 0.1], [0.3, 0.1], [0.3, 0.3], [0.1, 0.3]);
    assert.ok((await selectedShare(page, [0.12, 0.12, 0.28, 0.28])) > 0.97, "lasso");
    await page.click("#undo");
    assert.equal(await selectedShare(page, [0.12, 0.12, 0.28, 0.28]), 0, "undone");
    await page.click("#undo");
    assert.ok((await selectedShare(page, SHIRT)) > 0.97, "the eraser undone");
    await page.click("#redo");
    assert.equal(await selectedShare(page, SHIRT), erased, "redone");
    const all = await selectedShare(page);
    await page.click("#invert");
    assert.ok(Math.abs((await selectedShare(page)) - (1 - all)) < 1e-3, "inverted");
    await page.click("#clear");
    assert.equal(await selectedShare(page), 0);
    assert.match(await page.textContent("#coverage"), /^Paint over/);
  }));

test("all of it by keyboard", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.focus("#area");
    await page.keyboard.press("r");
    for (const key of ["Space", ...Array(4).fill("Shift+ArrowRight"), ...Array(4).fill("Shift+ArrowDown"), "Space"]) await page.keyboard.press(key);
    const share = await selectedShare(page);
    assert.ok(Math.abs(share - (64 / 256) ** 2) < 0.005, `a quarter of each side: ${share}`);
    await page.keyboard.press("Control+z");
    assert.equal(await selectedShare(page), 0);
    await page.keyboard.press("Control+Shift+Z");
    assert.equal(await selectedShare(page), share);
    const before = Number(await page.inputValue("#brush-size"));
    await page.keyboard.press("]");
    assert.ok(Number(await page.inputValue("#brush-size")) > before);
    await page.focus("#prompt");
    await page.keyboard.type("blue ex-librix"); // letters that are shortcuts elsewhere
    assert.equal(await selectedShare(page), share);
    await page.keyboard.press("Control+Enter");
    await page.waitForSelector("#result:not([hidden])");
    await page.focus("#slider");
    for (let press = 0; press < 5; press += 1) await page.keyboard.press("PageUp");
    assert.ok(Number(await page.inputValue("#slider")) > 20);
    await page.focus("#back-to-mask"); // which is gone then
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.id), "area");
    await page.focus("#run");
    await page.keyboard.press("?");
    assert.ok(await page.isVisible("#help-dialog"));
  }));

test("zoom keeps the picture under the pen", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    for (let click = 0; click < 3; click += 1) await page.click("#zoom-in");
    const sheet = await page.locator("#sheet").boundingBox();
    const viewport = await page.locator("#viewport").boundingBox();
    assert.ok(sheet.width > 2 * viewport.width * 0.7);
    const [x, y] = [viewport.x + viewport.width / 2, viewport.y + viewport.height / 2];
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.up();
    const [u, v] = [(x - sheet.x) / sheet.width, (y - sheet.y) / sheet.height];
    assert.ok((await selectedShare(page, [u - 0.02, v - 0.02, u + 0.02, v + 0.02])) > 0.9);
    await page.click("#zoom-fit");
    assert.ok((await page.locator("#sheet").boundingBox()).width <= viewport.width);
  }));

test("a file that is no picture is refused in words", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await page.setInputFiles("#upload", { name: "notes.png", mimeType: "image/png", buffer: Buffer.from("not a picture") });
    assert.match(await toast(page), /“notes\.png” is not a PNG, WebP or JPEG file/);
    const torn = readFileSync(PERSON).subarray(0, 3000);
    await page.setInputFiles("#upload", { name: "torn.png", mimeType: "image/png", buffer: torn });
    await page.waitForFunction(() => document.querySelectorAll(".toast").length > 1 || document.querySelector("#parts-box").hidden);
    await drag(page, [0.42, 0.4], [0.6, 0.55]); // the browser shows what is there of it, the server does not
    if (!(await page.locator(".toast.error").nth(1).isVisible())) {
      await page.fill("#prompt", "a hat");
      await page.click("#run");
      await page.locator(".toast.error").nth(1).waitFor();
    }
    assert.match(await toast(page), /damaged|check your image file/);
  }, [/status of 400/]));

test("what the server refuses is told in its words", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const path = join(folder, "large.png");
    pictures("flat", [path, "4000", "4000"]);
    await page.setInputFiles("#upload", path);
    await page.waitForFunction(() => document.querySelector("#size-note").textContent.startsWith("4000"));
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.fill("#prompt", "a hat");
    await page.click("#run");
    assert.match(await toast(page), /4000x4000 pixels are more than the 13000000 allowed/);
    assert.equal(await page.textContent("#run"), "Edit", "and another try is open");
  }, [/status of 400/]));

test("fields are checked before anything is sent", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    page.on("request", (request) => assert.equal(request.method(), "GET"));
    await page.click("#run");
    assert.match(await page.textContent(".toast p"), /Paint over/);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("#run");
    assert.match(await toast(page), /prompt is empty/);
    await page.fill("#prompt", "a hat");
    await page.click("text=Advanced");
    await page.fill("#seed", "-1");
    await page.click("#run");
    assert.match(await toast(page), /seed is a whole number/);
    await page.fill("#seed", "");
    await page.fill("#steps", "201");
    await page.click("#run");
    assert.match(await toast(page), /Steps is a whole number from 1 to 200/);
  }));

test("an edit can be stopped", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    await drag(page, [0.42, 0.4], [0.6, 0.55]);
    await page.click("text=Advanced");
    await page.fill("#steps", "200");
    await page.fill("#prompt", "a hat");
    await page.click("#run");
    await page.waitForFunction(() => document.querySelector("#run").textContent === "Stop");
    await page.click("#run");
    await page.waitForFunction(() => document.querySelector("#run").textContent === "Edit");
    assert.equal(await page.getAttribute("#sheet", "data-mode"), "draw");
    assert.ok(await page.isHidden("#result"));
    await page.fill("#steps", "");
    await edit(page, "a blue shirt");
  }));

test("pictures can be dropped and pasted", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const bytes = [...readFileSync(PERSON)];
    for (const kind of ["drop", "paste"]) {
      await page.evaluate(
        ([kind, bytes]) => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], `${kind}.png`, { type: "image/png" }));
          const event = kind === "drop" ? new DragEvent(kind, { dataTransfer: data, bubbles: true }) : new ClipboardEvent(kind, { clipboardData: data, bubbles: true });
          document.body.dispatchEvent(event);
        },
        [kind, bytes],
      );
      await page.waitForFunction(() => document.querySelector("#parts-box").hidden);
      await page.locator("#gallery button").nth(1).click();
      await page.waitForSelector("#parts-box:not([hidden])");
    }
  }));

test("text that is pasted with a picture of it stays text where text is typed", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const isOurs = await page.evaluate(
      (bytes) =>
        ["#prompt", "#seed", "#area"].map((selector) => {
          const data = new DataTransfer(); // as office programs copy it
          data.setData("text/plain", "a hat");
          data.setData("text/html", "<p>a hat</p>");
          data.items.add(new File([new Uint8Array(bytes)], "image.png", { type: "image/png" }));
          const field = document.querySelector(selector);
          field.closest("details")?.setAttribute("open", "");
          field.focus();
          return !field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
        }),
      [...readFileSync(PERSON)],
    );
    assert.deepEqual(isOurs, [false, false, true]);
    await page.waitForFunction(() => document.querySelector("#parts-box").hidden);
  }));

test("a photo of twelve megapixels is masked, edited and given back at its size", () =>
  desktop(async (page) => {
    await openPlayground(page, OPEN_URL);
    const path = join(folder, "photo.jpg");
    pictures("photo", [path]);
    await page.setInputFiles("#upload", path);
    await page.waitForFunction(() => document.querySelector("#size-note").textContent.startsWith("3000 × 4000"));
    assert.match(await page.textContent("#size-note"), /edits it at 224 × 288/);
    await drag(page, [0.3, 0.3], [0.6, 0.35], [0.4, 0.45]);
    await edit(page, "a yellow hat");
    const { files } = await lastForm(page);
    const result = await download(page, "#download", join(folder, "photo-edited.png"));
    const found = pictures("compare", [path, keep("photo-mask.png", files.mask_image), result]);
    assert.deepEqual(found.size, [3000, 4000]);
    assert.equal(found.outside_changed, 0);
    assert.ok(found.inside_changed > 0.8 * found.inside, JSON.stringify(found));
    assert.ok(await page.isEnabled("#show-tokens"), "the page knows which tokens were computed");
  }));
