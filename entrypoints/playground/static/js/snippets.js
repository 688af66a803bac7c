// The request of a result as a curl command and as Python: with its seed, its mask and all that it asked for.
import { steeringOf } from "./steering.js";

const INLINE_MASK = 16384; // characters of base64; a longer mask is a file of its own
const OWN_FILES = ["mask.png", "edited.png"]; // that snippets read or write beside the pictures

/**
 * {base: address of the server, ends in "/"; picture: {file, url}; maskText: PNG in base64; settings: see run.js, with the
 * image's own seed; needsKey}. An example template is fetched from the server, a user's files are expected in the folder,
 * under the names of `namedFiles`.
 */
export function asCurl({ base, picture, maskText, settings, needsKey }) {
  const lines = [];
  const files = namedFiles(picture, settings);
  if (picture.url) lines.push(`curl -sS -o ${shell(files[0].name)} ${shell(picture.url)}`);
  const parts = Object.entries(scalars(settings)).map(([name, value]) => `--form-string ${shell(`${name}=${value}`)}`);
  parts.push(...files.map(({ field, name }) => fileField(field, name)));
  parts.push(isInline(maskText) ? `--form-string ${shell(`mask_image=${maskText}`)}` : "-F mask_image=@mask.png");
  if (needsKey) parts.unshift('-H "authorization: Bearer $STENCIL_API_KEY"');
  const save = 'import base64, json, sys; sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["data"][0]["b64_json"]))';
  lines.push(`curl -sS ${shell(`${base}v1/images/edits`)} \\\n  ${parts.join(" \\\n  ")} \\\n  | python3 -c '${save}' > edited.png`);
  return `${lines.join("\n")}\n`;
}

/** The same with the official client. */
export function asPython({ base, picture, maskText, settings, needsKey }) {
  const { prompt, ...rest } = scalars(settings);
  const mask = isInline(maskText) ? JSON.stringify(maskText) : 'base64.b64encode(open("mask.png", "rb").read()).decode()';
  const named = namedFiles(picture, settings);
  const files = named.map(({ field, name }) => [field, opened(name)]);
  const isPosted = settings.control || Object.values(settings.inputs).some((value) => value instanceof File);
  if (picture.url) files[0][1] = `(${JSON.stringify(named[0].name)}, urllib.request.urlopen(${JSON.stringify(picture.url)}).read())`;
  const fields = Object.entries(rest).map(([field, value]) => `        "${field}": ${python(value)},\n`);
  const more = `${fields.join("")}        "mask_image": ${mask},\n    }`;
  return [
    `import base64${needsKey ? "\nimport os" : ""}${picture.url ? "\nimport urllib.request" : ""}\n`,
    `from openai import OpenAI${isPosted ? "\nfrom openai.types import ImagesResponse" : ""}\n`,
    `client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=${needsKey ? 'os.environ["STENCIL_API_KEY"]' : '"none"'})`,
    ...(isPosted ? posted(files, prompt, more) : edited(files, prompt, more)),
    'open("edited.png", "wb").write(base64.b64decode(result.data[0].b64_json))\n',
  ].join("\n");
}

function edited(files, prompt, more) {
  const images = files.map(([, file]) => file);
  const image = images.length > 1 ? `[${images.join(", ")}]` : images[0];
  return ["result = client.images.edit(", `    image=${image},`, `    prompt=${JSON.stringify(prompt)},`, `    extra_body={\n${more},`, ")"];
}

/** The client's own call for edits takes no control picture, and no file of a workflow. */
function posted(files, prompt, more) {
  return [
    "result = client.post(",
    '    "/images/edits",',
    "    cast_to=ImagesResponse,",
    `    body={\n        "prompt": ${JSON.stringify(prompt)},\n${more},`,
    `    files=[${files.map(([field, file]) => `("${field}", ${file})`).join(", ")}],`,
    '    options={"headers": {"Content-Type": "multipart/form-data"}},',
    ")",
  ];
}

function opened(name) {
  return `open(${JSON.stringify(name)}, "rb")`;
}

/** The files of an edit, in the order in which they are sent: {field, file}. */
function filesOf(picture, { references, control, inputs }) {
  const files = [picture, ...references].map(({ file }, index) => ({ field: index ? "reference_image[]" : "image", file }));
  const own = Object.entries(inputs).filter(([, value]) => value instanceof File);
  const all = [...files, ...own.map(([field, file]) => ({ field, file }))];
  return control ? [...all, { field: "control_image", file: control.file }] : all;
}

/** The same, with the distinct names under which a copied request reads them. A name that is taken gets a number. */
export function namedFiles(picture, settings) {
  const names = [...OWN_FILES];
  const files = filesOf(picture, settings);
  for (const { file } of files) {
    const [, stem, suffix] = /^(.*?)(\.[^.]*)?$/s.exec(file.name);
    let name = file.name;
    for (let number = 2; names.includes(name); number += 1) name = `${stem}-${number}${suffix ?? ""}`;
    names.push(name);
  }
  return files.map((each, index) => ({ ...each, name: names[OWN_FILES.length + index] }));
}

/** Whether the mask is written out; else the snippet reads mask.png. */
export function isInline(maskText) {
  return maskText.length <= INLINE_MASK;
}

/** Fields by name; a seed may exceed what a number holds. */
function scalars({ prompt, model, control, inputs, lora, seed, steps, margin, exact }) {
  const texts = Object.fromEntries(Object.entries(inputs).filter(([, value]) => !(value instanceof File)));
  const fields = { ...texts, prompt, seed: BigInt(seed) };
  if (model) fields.model = model;
  if (lora) fields.lora = lora;
  if (steps !== null) fields.num_inference_steps = steps;
  if (exact) fields.mask_aware = false;
  else if (margin !== null) fields.mask_margin = margin;
  return control ? { ...fields, ...steeringOf(control) } : fields;
}

/** A file of a form, for curl. */
function fileField(field, name) {
  return `-F ${shell(`${field}=@"${name.replace(/(["\\])/g, "\\$1")}"`)}`;
}

function python(value) {
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value === "boolean") return value ? "True" : "False";
  return String(value);
}

/** One word of a shell command. */
function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
