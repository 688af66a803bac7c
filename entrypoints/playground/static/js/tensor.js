// Tensors as a person writes them, and as requests carry them.

/** dtype -> [bytes of an element, the DataView's method that writes one]. */
const WRITERS = {
  bool: [1, "setUint8"],
  uint8: [1, "setUint8"],
  int32: [4, "setInt32"],
  int64: [8, "setBigInt64"],
  float16: [2, "setFloat16"],
  float32: [4, "setFloat32"],
  float64: [8, "setFloat64"],
};
const MOST = { float16: 65504, float32: 2 ** 128 - 2 ** 104 };
/** Least and greatest element, of those whose writer takes any number and keeps its lowest bits, or makes it infinite. */
const RANGES = { uint8: [0, 255], int32: [-(2 ** 31), 2 ** 31 - 1], float16: [-MOST.float16, MOST.float16], float32: [-MOST.float32, MOST.float32] };
const CHUNK = 1 << 15; // arguments of one call

/** The JSON of a tensor, {dtype, shape, base64}. text: its numbers, such as "[[1, 2], [3, 4]]". Throws an Error that says why not. */
export function tensorText(text, dtype) {
  const numbers = parsed(text);
  const shape = shapeOf(numbers);
  const [nbytes, method] = WRITERS[dtype];
  const flat = [numbers].flat(Infinity);
  const view = new DataView(new ArrayBuffer(nbytes * flat.length));
  flat.forEach((number, index) => view[method](index * nbytes, element(number, dtype), true));
  return JSON.stringify({ dtype, shape, base64: base64Of(new Uint8Array(view.buffer)) });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("write its numbers as JSON, such as [[1, 2], [3, 4]]");
  }
}

/** The length of each side. */
function shapeOf(numbers) {
  if (!Array.isArray(numbers)) return [];
  const inner = numbers.map(shapeOf);
  if (inner.some((shape) => String(shape) !== String(inner[0]))) throw new Error("its rows have different lengths");
  return [numbers.length, ...(inner[0] ?? [])];
}

/** A number as the DataView takes it. */
function element(number, dtype) {
  const isFloat = dtype.startsWith("float");
  const [low, high] = RANGES[dtype] ?? [-Infinity, Infinity];
  const isOne = dtype === "bool" ? typeof number === "boolean" : isFloat ? Number.isFinite(number) : Number.isSafeInteger(number);
  if (!isOne || number < low || number > high) throw new Error(`${JSON.stringify(number)} is no ${dtype}`);
  return dtype === "int64" ? BigInt(number) : Number(number);
}

function base64Of(bytes) {
  const parts = [];
  for (let start = 0; start < bytes.length; start += CHUNK) parts.push(String.fromCharCode(...bytes.subarray(start, start + CHUNK)));
  return btoa(parts.join(""));
}
