// Which tokens an edit computes: the server's own rules (engine/images/image_ops.py), so that they can be drawn. Sizes are
// {width, height} in pixels.

/**
 * The size at which a picture is edited. nativeSize: side of the square whose area caps it. maxSide: tokens of the longest
 * side, null for any.
 */
export function generationSize({ width, height }, nativeSize, tokenSize, maxSide) {
  const limit = Math.floor(nativeSize / tokenSize) ** 2;
  const along = (side) => Math.max(1, Math.floor((side + Math.floor(tokenSize / 2)) / tokenSize));
  let [columns, rows] = [along(width), along(height)];
  if (columns * rows > limit) [columns, rows] = nearestGrid(width / height, limit);
  if (maxSide !== null && Math.max(columns, rows) > maxSide) {
    const longest = Math.max(width, height);
    [columns, rows] = [width, height].map((side) => Math.max(1, roundHalfEven((maxSide * side) / longest)));
  }
  return { width: columns * tokenSize, height: rows * tokenSize };
}

/** As Python rounds. */
function roundHalfEven(value) {
  const rounded = Math.round(value);
  return rounded - value === 0.5 && rounded % 2 ? rounded - 1 : rounded;
}

function nearestGrid(aspect, limit) {
  const best = { columns: Math.sqrt(limit * aspect), rows: Math.sqrt(limit / aspect) };
  let nearest = [1, 1];
  let least = Infinity;
  for (const side of [Math.floor(best.rows), Math.floor(best.rows) + 1]) {
    for (let columns = 1; columns <= limit; columns += 1) {
      const rows = Math.min(Math.max(1, side), Math.floor(limit / columns));
      const distance = Math.log(columns / best.columns) ** 2 + Math.log(rows / best.rows) ** 2;
      if (distance < least) [least, nearest] = [distance, [columns, rows]];
    }
  }
  return nearest;
}

/**
 * The tokens that a mask touches. mask: one byte per pixel, row by row, of a picture of `source` size, not 0 = edit.
 * size: generation size. Returns {columns, rows, active: Uint8Array}, row by row, 1 = computed.
 */
export function activeTokens(mask, source, size, tokenSize, margin) {
  const down = windows(source.height, size.height, tokenSize, margin);
  const across = windows(source.width, size.width, tokenSize, margin);
  const active = new Uint8Array(down.length * across.length);
  const touched = new Uint8Array(source.width);
  for (const [row, [top, bottom]] of down.entries()) {
    touched.fill(0);
    for (let y = top; y < bottom; y += 1) {
      const start = y * source.width;
      for (let x = 0; x < source.width; x += 1) if (mask[start + x]) touched[x] = 1;
    }
    for (const [column, [left, right]] of across.entries()) {
      if (touched.subarray(left, right).includes(1)) active[row * across.length + column] = 1;
    }
  }
  return { columns: across.length, rows: down.length, active };
}

/** Per token along a side, the source pixels [start, end) that touch it once grown by the margin. */
function windows(source, size, token, margin) {
  return Array.from({ length: size / token }, (_, index) => {
    const left = index * token - margin;
    const start = Math.floor((left * source) / size);
    const end = Math.ceil(((left + token + 2 * margin) * source) / size);
    return [Math.min(Math.max(start, 0), source), Math.min(Math.max(end, 0), source)];
  });
}

/** How many of them are computed. */
export function countActive({ active }) {
  return active.reduce((sum, one) => sum + one, 0);
}
