// Decodes the columns that encoding.py packed.

/**
 * @typedef {Object} Columns
 * @property {Float64Array} start of each box, in ns of its panel's time
 * @property {Float64Array} end
 * @property {Uint8Array} category
 * @property {Int32Array | Float64Array} title
 * @property {Int32Array | Float64Array} step
 * @property {Int32Array | Float64Array} bytes
 */

/** @param {string} base64 @returns {Promise<Uint8Array>} */
export async function inflate(base64) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : bytesOf(atob(base64));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @param {string} binary @returns {Uint8Array<ArrayBuffer>} */
export function bytesOf(binary) {
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/**
 * Decodes tables.
 * @param {Uint8Array} bytes table after table, in each column after column, in each plane after plane
 * @param {Table[]} tables
 * @returns {Numbers[]} columns; Int32Array if four bytes are enough
 */
export function unpack(bytes, tables) {
  let offset = 0;
  return tables.map(([rows, blocksOf]) => {
    /** @type {Numbers} */
    const columns = {};
    for (const [name, blocks] of Object.entries(blocksOf)) {
      columns[name] = numbers(bytes.subarray(offset), blocks, rows);
      for (const [planes, count] of blocks) offset += planes * count;
    }
    return columns;
  });
}

/** Turns gaps and durations into times. @param {Numbers} packed @returns {Columns} */
export function boxesOf({ gap, duration, step, category, title, bytes }) {
  const start = new Float64Array(gap.length), end = new Float64Array(gap.length);
  for (let at = 0, time = 0; at < gap.length; at++) {
    start[at] = time + gap[at];
    time = end[at] = start[at] + duration[at];
  }
  return { start, end, bytes, title, step: summed(step), category: new Uint8Array(category) };
}

/**
 * Replaces positions by times, in rows whose boxes start and end at times of other rows, or at extra times.
 * @param {Columns} columns @param {Array<[number, number]>} rows that hold positions, each from and to
 * @param {Array<[number, number]>} others rows that hold times @param {Float64Array} extra further times, sorted
 */
export function toTimes({ start, end }, rows, others, extra) {
  const known = others.map(([from, to]) => {
    const times = new Float64Array(2 * (to - from));
    for (let at = from; at < to; at++) {
      times[2 * (at - from)] = start[at];
      times[2 * (at - from) + 1] = end[at];
    }
    return times;
  });
  const times = [...known, extra].sort((one, other) => one.length - other.length).reduce(together, new Float64Array());
  for (const [from, to] of rows) {
    for (let each = from; each < to; each++) {
      start[each] = times[start[each]];
      end[each] = times[end[each]];
    }
  }
}

/** The union of two sorted lists. @param {Float64Array} one @param {Float64Array} other */
function together(one, other) {
  const times = new Float64Array(one.length + other.length);
  let count = 0;
  for (let here = 0, there = 0; here < one.length || there < other.length; ) {
    const time = there === other.length || one[here] <= other[there] ? one[here++] : other[there++];
    if (!count || time !== times[count - 1]) times[count++] = time;
  }
  return times.subarray(0, count);
}

/** Turns differences into the numbers themselves, in place. @template {Int32Array | Float64Array} T @param {T} column @returns {T} */
export function summed(column) {
  for (let at = 1; at < column.length; at++) column[at] += column[at - 1];
  return column;
}

/** Decodes numbers from planes of bytes, the lowest byte first: 0, 1, 2, 3, ... mean 0, -1, 1, -2, ... */
function numbers(bytes, blocks, rows) {
  const width = blocks.reduce((most, [planes]) => Math.max(most, planes), 0);
  const natural = new (width > 4 ? Float64Array : Uint32Array)(rows);
  for (let plane = 0, offset = 0; plane < width; plane++) {
    let row = 0;
    for (const [planes, count] of blocks) {
      if (plane < planes) {
        const block = natural.subarray(row, row + count), digits = bytes.slice(offset, offset += count);
        if (plane) addPlane(block, digits, 256 ** plane);
        else block.set(digits);
      }
      row += count;
    }
  }
  return width > 4 ? signed(natural) : signedInt(natural);
}

function signedInt(natural) {
  const column = new Int32Array(natural.buffer);
  for (let at = 0; at < column.length; at++) column[at] = (natural[at] >>> 1) ^ -(natural[at] & 1);
  return column;
}

function signed(natural) {
  for (let at = 0; at < natural.length; at++) {
    const half = Math.floor(natural[at] / 2);
    natural[at] = half * 2 === natural[at] ? half : -half - 1;
  }
  return natural;
}

/** Adds the bytes of a plane times a factor. High bytes are nearly all zero, so four zeros are skipped at once. */
function addPlane(column, plane, factor) {
  const fours = new Int32Array(plane.buffer, 0, plane.length >> 2);
  for (let four = 0; four < fours.length; four++) {
    if (!fours[four]) continue;
    for (let at = 4 * four, stop = at + 4; at < stop; at++) column[at] += plane[at] * factor;
  }
  for (let at = 4 * fours.length; at < plane.length; at++) column[at] += plane[at] * factor;
}
