// The request of a result as a curl command and as Python: with its seed, its mask and all that it asked for.

const INLINE_MASK = 16384; // characters of base64; a longer mask is a file of its own
const OWN_FILES = ["mask.png", "edited.png"]; // that snippets read or write beside the pictures

/**
 * {base: address of the server, ends in "/"; picture: {file, url}; maskText: PNG in base64; settings: see run.js, with the
 * image's own seed; needsKey}. An example template is fetched from the server, a user's files are expected in the folder,
 * under the names of `fileNames`.
 */
export function asCurl({ base, picture, maskText, settings, needsKey }) {
  const lines = [];
  const [file, ...others] = fileNames(picture, settings.references);
  if (picture.url) lines.push(`curl -sS -o ${shell(file)} ${shell(picture.url)}`);
  const parts = Object.entries(scalars(settings)).map(([name, value]) => `--form-string ${shell(`${name}=${value}`)}`);
  parts.push(fileField("image", file), ...others.map((name) => fileField("reference_image[]", name)));
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
  const [name, ...others] = fileNames(picture, settings.references).map((each) => JSON.stringify(each));
  const image = picture.url ? `(${name}, urllib.request.urlopen(${JSON.stringify(picture.url)}).read())` : `open(${name}, "rb")`;
  const images = others.length ? `[${[image, ...others.map((each) => `open(${each}, "rb")`)].join(", ")}]` : image;
  const extra = Object.entries(rest).map(([field, value]) => `        "${field}": ${python(value)},\n`);
  return [
    `import base64${needsKey ? "\nimport os" : ""}${picture.url ? "\nimport urllib.request" : ""}\n`,
    "from openai import OpenAI\n",
    `client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key=${needsKey ? 'os.environ["STENCIL_API_KEY"]' : '"none"'})`,
    "result = client.images.edit(",
    `    image=${images},`,
    `    prompt=${JSON.stringify(prompt)},`,
    `    extra_body={\n${extra.join("")}        "mask_image": ${mask},\n    },`,
    ")",
    'open("edited.png", "wb").write(base64.b64decode(result.data[0].b64_json))\n',
  ].join("\n");
}

/** Distinct names for the files of a picture and its references. A name that is taken gets a number. */
export function fileNames(picture, references) {
  const names = [...OWN_FILES];
  for (const { file } of [picture, ...references]) {
    const [, stem, suffix] = /^(.*?)(\.[^.]*)?$/s.exec(file.name);
    let name = file.name;
    for (let number = 2; names.includes(name); number += 1) name = `${stem}-${number}${suffix ?? ""}`;
    names.push(name);
  }
  return names.slice(OWN_FILES.length);
}

/** Whether the mask is written out; else the snippet reads mask.png. */
export function isInline(maskText) {
  return maskText.length <= INLINE_MASK;
}

/** Fields by name; a seed may exceed what a number holds. */
function scalars({ prompt, lora, seed, steps, margin, exact }) {
  const fields = { prompt, seed: BigInt(seed) };
  if (lora) fields.lora = lora;
  if (steps !== null) fields.num_inference_steps = steps;
  if (exact) fields.mask_aware = false;
  else if (margin !== null) fields.mask_margin = margin;
  return fields;
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
