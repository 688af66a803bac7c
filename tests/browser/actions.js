// What a person does on the playground's page.

/** Load it, and wait until it can be used. */
export async function openPlayground(page, url) {
  await recordForms(page);
  await page.goto(url);
  await untilReady(page);
}

/** The same where the API asks for a key. */
export async function openWithKey(page, url, key) {
  await recordForms(page);
  await page.goto(url);
  await giveKey(page, key);
  await untilReady(page);
}

/** The page of workflows, once the first one's form is there. */
export async function openWorkflows(page, url) {
  await recordForms(page);
  await page.goto(`${url}workflows`);
  await page.waitForSelector("#inputs .input");
}

/** Wait for the question and answer it. */
export async function giveKey(page, key) {
  await page.waitForSelector("#key-dialog[open]");
  await page.fill("#key-field", key);
  await page.click("#key-dialog button[value=ok]");
}

/** The first example is open and the model is known. */
export async function untilReady(page) {
  await page.waitForSelector("#parts button");
  await page.waitForFunction(() => document.querySelector("#model").textContent.includes(", cpu"));
}

/** Choose a tool by its name in the toolbar. */
export async function chooseTool(page, name) {
  await page.locator(`input[name=tool][value=${name}]`).check({ force: true });
}

/** Drag along points, given as shares of the picture's width and height. */
export async function drag(page, ...points) {
  const box = await page.locator("#sheet").boundingBox();
  const at = ([x, y]) => [box.x + x * box.width, box.y + y * box.height];
  await page.mouse.move(...at(points[0]));
  await page.mouse.down();
  for (const point of points.slice(1)) await page.mouse.move(...at(point), { steps: 8 });
  await page.mouse.up();
}

/** Close what the page has told: several messages cover the button below them for as long as they are shown. */
export function dismissMessages(page) {
  return page.getByLabel("Dismiss message").evaluateAll((buttons) => buttons.forEach((button) => button.click()));
}

/** Write the prompt, click on Edit and wait for the result. */
export async function edit(page, prompt) {
  await page.fill("#prompt", prompt);
  await page.click("#run");
  await page.waitForSelector("#result:not([hidden])");
}

/** The share of the picture that is selected, and of a box of it: [left, top, right, bottom] in shares. */
export function selectedShare(page, [left, top, right, bottom] = [0, 0, 1, 1]) {
  return page.evaluate(
    ([l, t, r, b]) => {
      const canvas = document.querySelector("#mask");
      const [x, y] = [Math.round(l * canvas.width), Math.round(t * canvas.height)];
      const [width, height] = [Math.round(r * canvas.width) - x, Math.round(b * canvas.height) - y];
      const { data } = canvas.getContext("2d").getImageData(x, y, width, height);
      let count = 0;
      for (let index = 3; index < data.length; index += 4) count += data[index] >= 128;
      return count / (width * height);
    },
    [left, top, right, bottom],
  );
}

/** Click on a button that downloads; the file's path. */
export async function download(page, selector, path) {
  const started = page.waitForEvent("download");
  await page.click(selector);
  await (await started).saveAs(path);
  return path;
}

/** Click on a button that copies; the text. */
export async function copied(page, selector) {
  await page.evaluate(() => navigator.clipboard.writeText(""));
  await page.click(selector);
  await page.waitForFunction(async () => (await navigator.clipboard.readText()) !== "");
  return page.evaluate(() => navigator.clipboard.readText());
}

/** The names of the files in a field of the last form that was sent, in order. */
export function lastFileNames(page, field) {
  return page.evaluate((field) => window.sentForms.at(-1).getAll(field).map(({ name }) => name), field);
}

/** Keeps the forms that the page sends: the browser tells nobody what is in files. */
async function recordForms(page) {
  await page.addInitScript(() => {
    window.sentForms = [];
    const { fetch } = window;
    window.fetch = (path, options) => {
      if (options?.body instanceof FormData) window.sentForms.push(options.body);
      return fetch(path, options);
    };
  });
}

/** The last form that was sent, as {fields: name -> text, files: name -> Buffer}. */
export async function lastForm(page) {
  const { fields, files } = await page.evaluate(async () => {
    const bytesOf = async (file) => Array.from(new Uint8Array(await file.arrayBuffer()));
    const entries = [...window.sentForms.at(-1)];
    const files = entries.filter(([, value]) => value instanceof File).map(async ([name, file]) => [name, await bytesOf(file)]);
    return { fields: Object.fromEntries(entries.filter(([, value]) => typeof value === "string")), files: await Promise.all(files) };
  });
  return { fields, files: Object.fromEntries(files.map(([name, bytes]) => [name, Buffer.from(bytes)])) };
}
