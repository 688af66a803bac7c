// A black and white PNG, one bit a pixel: a mask of twelve megapixels takes some kilobytes, and no time to write.

const SIGNATURE = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
const CRC = Uint32Array.from({ length: 256 }, (_, start) => {
  let value = start;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

/** mask: one byte per pixel, row by row, 1 = white. Resolves to a Blob. */
export async function bilevelPng(mask, { width, height }) {
  const header = new DataView(new ArrayBuffer(13));
  header.setUint32(0, width);
  header.setUint32(4, height);
  header.setUint8(8, 1); // bits a pixel, grey
  const rows = await deflate(pack(mask, width, height));
  const chunks = [chunk("IHDR", new Uint8Array(header.buffer)), chunk("IDAT", rows), chunk("IEND", new Uint8Array())];
  return new Blob([new Uint8Array(SIGNATURE), ...chunks], { type: "image/png" });
}

/** Eight pixels a byte, each row behind its filter byte: none. */
function pack(mask, width, height) {
  const stride = 1 + Math.ceil(width / 8);
  const packed = new Uint8Array(stride * height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      if (mask[y * width + x]) packed[y * stride + 1 + (x >> 3)] |= 128 >> (x & 7);
    }
  }
  return packed;
}

async function deflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new CompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function chunk(kind, content) {
  const bytes = new Uint8Array(12 + content.length);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, content.length);
  bytes.set([...kind].map((letter) => letter.charCodeAt(0)), 4);
  bytes.set(content, 8);
  view.setUint32(8 + content.length, crc(bytes.subarray(4, 8 + content.length)));
  return bytes;
}

function crc(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = CRC[(value ^ byte) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}
