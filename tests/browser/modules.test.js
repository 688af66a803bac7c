// Modules that need no browser: the server's token rule in JavaScript, events, snippets, lanes, what is sent of a form.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { after, test } from "node:test";

import { ApiError, edit, get } from "../../entrypoints/playground/static/js/api.js";
import { ControlPicture } from "../../entrypoints/playground/static/js/control-picture.js";
import { keepPage } from "../../entrypoints/playground/static/js/files.js";
import { Mask } from "../../entrypoints/playground/static/js/mask.js";
import { waitForModels } from "../../entrypoints/playground/static/js/model.js";
import { addShortcuts } from "../../entrypoints/playground/static/js/shortcuts.js";
import { events } from "../../entrypoints/playground/static/js/sse.js";
import { asCurl, asPython, namedFiles } from "../../entrypoints/playground/static/js/snippets.js";
import { tensorText } from "../../entrypoints/playground/static/js/tensor.js";
import { lanesOf } from "../../entrypoints/playground/static/js/timeline.js";
import { activeTokens, generationSize } from "../../entrypoints/playground/static/js/tokens.js";
import { Tools } from "../../entrypoints/playground/static/js/tools.js";
import { pictures } from "./pictures.js";

/** Numbers that look random and are the same in every run. */
function* numbers() {
  for (let state = 7; ; state = (state * 1103515245 + 12345) % 2 ** 31) yield state / 2 ** 31;
}

function randomCase(random) {
  const whole = (low, high) => low + Math.floor(random.next().value * (high - low + 1));
  const [width, height] = [whole(1, 700), whole(1, 700)];
  const box = () => {
    const [left, top] = [whole(0, width - 1), whole(0, height - 1)];
    return [left, top, whole(left + 1, width), whole(top + 1, height)];
  };
  const native = [64, 256, 1024][whole(0, 2)];
  const side = [null, 3, 10, 32][whole(0, 3)];
  return { width, height, native, token: 16, side, margin: whole(0, 40), boxes: Array.from({ length: whole(1, 3) }, box) };
}

function maskOf({ width, height, boxes }) {
  const mask = new Uint8Array(width * height);
  for (const [left, top, right, bottom] of boxes) {
    for (let y = top; y < bottom; y += 1) mask.fill(1, y * width + left, y * width + right);
  }
  return mask;
}

test("the page reckons sizes and active tokens as the server does", () => {
  const random = numbers();
  const cases = Array.from({ length: 200 }, () => randomCase(random));
  const { answers } = pictures("tokens", [], JSON.stringify(cases));
  for (const [index, one] of cases.entries()) {
    const size = generationSize(one, one.native, one.token, one.side);
    assert.deepEqual([size.width, size.height], answers[index].size, JSON.stringify(one));
    const { active } = activeTokens(maskOf(one), one, size, one.token, one.margin);
    const indices = [...active.keys()].filter((token) => active[token]);
    assert.deepEqual(indices, answers[index].active, JSON.stringify(one));
  }
});

test("halves are rounded to the even number, as the server does", () => {
  const cases = [20, 60, 100, 140].map((height) => ({ width: 400, height, native: 1024, token: 16, side: 10, margin: 0, boxes: [] }));
  const sizes = cases.map((one) => generationSize(one, one.native, one.token, one.side));
  assert.deepEqual(pictures("tokens", [], JSON.stringify(cases)).answers.map(({ size }) => size), sizes.map(({ width, height }) => [width, height]));
  assert.deepEqual(sizes.map(({ height }) => height / 16), [1, 2, 2, 4]);
});

function bodyOf(text, size) {
  const bytes = new TextEncoder().encode(text);
  const pieces = Array.from({ length: Math.ceil(bytes.length / size) }, (_, index) => bytes.slice(index * size, (index + 1) * size));
  return new ReadableStream({
    start(controller) {
      pieces.forEach((piece) => controller.enqueue(piece));
      controller.close();
    },
  });
}

test("events are read however the stream is cut", async () => {
  const text = ': keep-alive\n\nevent: a\ndata: {"x":"é"}\n\ndata: one\r\ndata:two\r\n\r\ndata: cut off';
  for (const size of [1, 2, 3, 7, 1000]) {
    const found = [];
    for await (const data of events(bodyOf(text, size))) found.push(data);
    assert.deepEqual(found, ['{"x":"é"}', "one\ntwo"], `pieces of ${size} bytes`);
  }
});

test("snippets quote what a user wrote", () => {
  const settings = { prompt: 'it\'s "red" $HOME', references: [], control: null, inputs: {}, lora: "l'art", seed: "9223372036854775807", steps: 5, margin: 0, exact: false };
  const request = { base: "http://h/", picture: { file: { name: "a'b;.png" }, url: null }, maskText: "aGk=", settings, needsKey: true };
  const curl = asCurl(request);
  assert.match(curl, /--form-string 'prompt=it'\\''s "red" \$HOME'/);
  assert.match(curl, /--form-string 'lora=l'\\''art'/);
  assert.match(curl, /-F 'image=@"a'\\''b;\.png"'/);
  assert.match(curl, /Bearer \$STENCIL_API_KEY/);
  const python = asPython(request);
  assert.match(python, /prompt="it's \\"red\\" \$HOME"/);
  assert.match(python, /"seed": 9223372036854775807,/, "no digit is lost");
  assert.match(python, /"mask_margin": 0,/);
  assert.match(python, /"lora": "l'art",/);
  assert.match(python, /os\.environ\["STENCIL_API_KEY"\]/);
});

test("a long mask is a file of its own", () => {
  const settings = { prompt: "p", references: [], control: null, inputs: {}, lora: "", seed: "1", steps: null, margin: null, exact: true };
  const request = { base: "http://h/", picture: { file: { name: "a.png" }, url: "http://h/a.png" }, maskText: "a".repeat(20000), settings, needsKey: false };
  assert.match(asCurl(request), /-F mask_image=@mask\.png/);
  assert.match(asPython(request), /open\("mask\.png", "rb"\)/);
  assert.match(asPython(request), /"mask_aware": False,/);
  assert.doesNotMatch(asCurl(request) + asPython(request), /lora/);
});

test("snippets send references behind the picture, each under a name of its own", () => {
  const pictures = ["image.png", "o'k.png", "image.png", "image.png"].map((name) => ({ file: { name }, url: null }));
  const [picture, ...references] = pictures;
  const named = (picture, ...references) => namedFiles(picture, { references, control: null, inputs: {} }).map(({ name }) => name);
  assert.deepEqual(named(...pictures), ["image.png", "o'k.png", "image-2.png", "image-3.png"]);
  assert.deepEqual(named({ file: { name: "a" } }, { file: { name: "a" } }), ["a", "a-2"]);
  assert.deepEqual(named({ file: { name: "edited.png" } }, { file: { name: "mask.png" } }), ["edited-2.png", "mask-2.png"]);
  const settings = { prompt: "p", references, control: null, inputs: {}, lora: "", seed: "1", steps: null, margin: null, exact: false };
  const request = { base: "http://h/", picture, maskText: "aGk=", settings, needsKey: false };
  const fields = [...asCurl(request).matchAll(/-F '(\S+)=@"(.*)"' \\/g)].map(([, field, name]) => [field, name]);
  assert.deepEqual(fields, [["image", "image.png"], ["reference_image[]", "o'\\''k.png"], ["reference_image[]", "image-2.png"], ["reference_image[]", "image-3.png"]]);
  const opened = ["image.png", "o'k.png", "image-2.png", "image-3.png"].map((name) => `open("${name}", "rb")`);
  assert.ok(asPython(request).includes(`image=[${opened.join(", ")}],`), asPython(request));
});

test("an image keeps its lane, and a lane that is free is used again", () => {
  const steps = [["a"], ["a", "b"], ["b", "c"], ["c", "d"]].map((requests) => ({ requests }));
  const { of, count } = lanesOf(steps);
  assert.deepEqual(Object.fromEntries(of), { a: 0, b: 1, c: 0, d: 1 });
  assert.equal(count, 2);
});

const servers = [];

after(() => servers.forEach((server) => server.close()));

/** Let the page's calls reach a server that answers with these in turn: what it writes, {isTorn: it hangs up then}. */
async function answering(...answers) {
  const server = createServer((request, response) => {
    const { text, isTorn } = answers.shift();
    request.resume().on("end", () => {
      if (!isTorn) response.end(text);
      else response.write(text, () => response.destroy());
    });
  });
  servers.push(server);
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const base = `http://127.0.0.1:${server.address().port}/`;
  globalThis.fetch = (path, options) => nodeFetch(new URL(path, base), options);
}

const nodeFetch = globalThis.fetch;
const isBrokenOff = (error) => error instanceof ApiError && error.status === 0 && /broke off/.test(error.message);

test("an answer that broke off is told in words", async () => {
  await answering({ text: '{"models": [' }, { text: '{"models": [', isTorn: true });
  await assert.rejects(get("v1/engine/stats"), isBrokenOff);
  await assert.rejects(get("v1/engine/stats"), isBrokenOff);
});

test("the model is waited for though an answer broke off", async () => {
  await answering({ text: '{"models": [' }, { text: '{"models": [{"id": "m"}]}' });
  const told = [];
  assert.deepEqual(await waitForModels((text) => told.push(text)), [{ id: "m" }]);
  assert.equal(told.length, 1);
});

function event(type, more = {}) {
  return `event: ${type}\ndata: ${JSON.stringify({ type, b64_json: "aGk=", output_format: "png", ...more })}\n\n`;
}

test("a stream that ends before its last image is told in words", async () => {
  const [partial, completed] = [event("image_edit.partial_image"), event("image_edit.completed", { seed: 7, stencil: {} })];
  const isTorn = true;
  await answering({ text: partial }, { text: partial + completed }, { text: partial + completed, isTorn }, { text: partial + completed + completed });
  for (const wanted of [1, 2, 2]) {
    let count = 0;
    const read = async () => {
      for await (const _ of edit({ n: 2 })) count += 1;
    };
    await assert.rejects(read, isBrokenOff);
    assert.equal(count, wanted);
  }
  const seeds = [];
  for await (const { seed } of edit({ n: 2 })) seeds.push(seed);
  assert.deepEqual(seeds, [undefined, "7", "7"]);
});

test("a number that is none of a tensor's dtype is refused, not cut to its bits", () => {
  for (const [dtype, low, high] of [["uint8", 0, 255], ["int32", -(2 ** 31), 2 ** 31 - 1]]) {
    assert.deepEqual(JSON.parse(tensorText(JSON.stringify([low, high]), dtype)).shape, [2]);
    for (const number of [low - 1, high + 1, 1.5, true]) {
      assert.throws(() => tensorText(JSON.stringify([number]), dtype), new RegExp(`${number} is no ${dtype}`));
    }
  }
});

test("a number beyond a tensor's floats is refused, and not sent as infinite", () => {
  const most = { float16: 65504, float32: 2 ** 128 - 2 ** 104 };
  assert.deepEqual(JSON.parse(tensorText(`[${most.float32}, -1e-50]`, "float32")).shape, [2]);
  for (const [dtype, number] of Object.entries(most)) {
    for (const beyond of [1.01 * number, -1.01 * number]) {
      assert.throws(() => tensorText(`[${beyond}]`, dtype), /is no float/, dtype);
    }
  }
});

/** A document of which each element is there, and does nothing. */
function blankDocument() {
  const element = () => ({ value: "", validity: {}, addEventListener() {}, setAttribute() {}, append() {}, replaceChildren() {} });
  const elements = {};
  return { getElementById: (id) => (elements[id] ??= element()), createElement: element, addEventListener() {} };
}

test("a control picture is sent to no model without ControlNets", () => {
  globalThis.document = blankDocument();
  const control = new ControlPicture();
  control.settings = { file: { name: "edges.png" }, thumbnail: null, type: "edges" };
  const sent = [["edges"], [], ["edges"]].map((types) => {
    control.offer(types, 1);
    return control.settings?.file.name ?? null;
  });
  assert.deepEqual(sent, ["edges.png", null, "edges.png"], "it is there again for a model that has them");
  delete globalThis.document;
});

test("before a picture is open there is nothing to mask, and no change of it fails", () => {
  const mask = new Mask({ width: 300, height: 150, getContext: () => null }, "#ff2d78"); // as large as canvases are at first
  mask.invert();
  mask.clear();
  assert.ok(mask.isEmpty);
});

test("an edit begins once, however long its keys are held", () => {
  let press;
  globalThis.document = { addEventListener: (_, listener) => (press = listener), querySelector: () => null };
  let runs = 0;
  addShortcuts({ run: () => (runs += 1) });
  const key = { ctrlKey: true, key: "Enter", preventDefault() {} };
  for (const repeat of [false, true, true]) press({ ...key, repeat });
  assert.equal(runs, 1, "another run would stop the first");
  delete globalThis.document;
});

test("the page is kept for what is dropped on it, and text may be dragged into a field", () => {
  const heard = {};
  globalThis.window = { addEventListener: (type, listener) => (heard[type] = listener) };
  keepPage();
  const isPrevented = (type, isField, ...types) => {
    let prevented = false;
    heard[type]({ target: { matches: () => isField }, dataTransfer: { types }, preventDefault: () => (prevented = true) });
    return prevented;
  };
  for (const type of ["dragover", "drop"]) {
    assert.ok(isPrevented(type, true, "Files"));
    assert.ok(isPrevented(type, false, "text/plain", "text/uri-list"));
    assert.ok(!isPrevented(type, true, "text/plain"), type);
  }
  delete globalThis.window;
});

test("a gesture that is under way ends with its tool, and draws nothing", () => {
  globalThis.document = { createElementNS: () => ({ setAttribute() {}, append() {} }) };
  const heard = {};
  const area = { addEventListener: (type, listener) => (heard[type] = listener), setPointerCapture() {} };
  const stage = { area, toMask: ({ clientX: x, clientY: y }) => ({ x, y }), showDraft() {} };
  const done = [];
  const mask = { begin: () => done.push("begin"), extend() {}, cancel: () => done.push("cancel"), fill: () => done.push("fill") };
  const tools = new Tools(stage, mask, () => {});
  const at = (clientX) => ({ clientX, clientY: 5, pointerId: 1, pointerType: "mouse", button: 0, buttons: 1 });
  heard.pointerdown(at(5));
  tools.name = "rectangle";
  heard.pointermove(at(9));
  heard.pointerup(at(9));
  assert.deepEqual(done, ["begin", "cancel"]);
  delete globalThis.document;
});
