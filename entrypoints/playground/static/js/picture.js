// A picture that is edited: the file as it came, which is what is sent, and a view of bounded size, which is shown.

const VIEW_PIXELS = 1_000_000; // more than a screen shows, little enough to draw at once
const SIGNATURES = {
  "image/png": [0x89, 0x50, 0x4e, 0x47],
  "image/jpeg": [0xff, 0xd8, 0xff],
  "image/webp": [0x52, 0x49, 0x46, 0x46],
};

/** The file is none that the server reads, or is damaged. */
export class UnreadablePicture extends Error {}

/**
 * {file, size, view, url}: file: the File itself. size: of the upright picture, as the server sees it. view: ImageBitmap
 * of at most VIEW_PIXELS. url: where the server has this very file, null for a user's own.
 */
export async function openPicture(blob, name, url = null) {
  const type = await sniff(blob);
  if (!type) throw new UnreadablePicture(`“${name}” is not a PNG, WebP or JPEG file.`);
  const file = new File([blob], name, { type });
  try {
    const size = await sizeOf(file);
    return { file, size, view: await viewOf(file, size), url };
  } catch {
    throw new UnreadablePicture(`“${name}” cannot be read: the file is damaged, or too large for this browser.`);
  }
}

/** A bitmap of `blob` for a picture of `size`, scaled as every view of it is. */
export function viewOf(blob, size) {
  const view = viewSize(size);
  const isWhole = view.width === size.width;
  return createImageBitmap(blob, isWhole ? {} : { resizeWidth: view.width, resizeHeight: view.height, resizeQuality: "medium" });
}

/** The size at which a picture is shown and its mask is drawn. */
export function viewSize({ width, height }) {
  const scale = Math.min(1, Math.sqrt(VIEW_PIXELS / (width * height)));
  return { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) };
}

/** By its content alone, as the server tells it; null: no such file. */
async function sniff(blob) {
  const head = new Uint8Array(await blob.slice(0, 4).arrayBuffer());
  const found = Object.entries(SIGNATURES).find(([, bytes]) => bytes.every((byte, index) => head[index] === byte));
  return found ? found[0] : null;
}

/** Width and height as EXIF turns them, without the pixels being decoded. */
async function sizeOf(file) {
  const url = URL.createObjectURL(file);
  try {
    const image = new Image();
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = reject;
      image.src = url;
    });
    return { width: image.naturalWidth, height: image.naturalHeight };
  } finally {
    URL.revokeObjectURL(url);
  }
}
