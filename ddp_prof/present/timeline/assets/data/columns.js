// Reads the columns back that encoding.py packed.

/**
 * @typedef {Object} Columns
 * @property {Float64Array} start of each box, ns on its panel's time
 * @property {Float64Array} end
 * @property {Uint8Array} category
 * @property {Int32Array} title
 * @property {Int32Array} step
 * @property {Float64Array} bytes
 */

/** @param {string} base64 @returns {Promise<Uint8Array>} */
async function inflate(base64) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : bytesOf(atob(base64));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @param {string} binary @returns {Uint8Array} */
function bytesOf(binary) {
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

/**
 * Tables that lie one after the other.
 * @param {Uint8Array} bytes plane after plane, column after column, table after table
 * @param {Array<[number, Object<string, number>]>} tables rows, and planes of each column, in order
 * @returns {Object<string, Int32Array | Float64Array>[]} whole numbers; of up to four bytes as those
 */
function unpack(bytes, tables) {
  let offset = 0;
  return tables.map(([rows, widths]) => {
    const columns = {};
    for (const [name, width] of Object.entries(widths)) {
      columns[name] = numbers(bytes, offset, width, rows);
      offset += width * rows;
    }
    return columns;
  });
}

/** A table of boxes, as encoding.py packs it. @returns {Columns} */
function boxesOf({ gap, duration, step, category, title, bytes }) {
  const start = new Float64Array(gap.length), end = new Float64Array(gap.length);
  for (let at = 0, time = 0; at < gap.length; at++) {
    start[at] = time + gap[at];
    time = end[at] = start[at] + duration[at];
  }
  return { start, end, bytes, title, step: summed(step), category: new Uint8Array(category) };
}

/**
 * Times instead of positions: each box of some rows starts and ends with a box of others, or with a time told apart.
 * @param {Columns} columns @param {Array<[number, number]>} rows of positions, from and to
 * @param {Array<[number, number]>} others that tell times, each in order @param {Float64Array} untold in order
 */
function toTimes({ start, end }, rows, others, untold) {
  const told = others.map(([from, to]) => {
    const times = new Float64Array(2 * (to - from));
    for (let at = from; at < to; at++) {
      times[2 * (at - from)] = start[at];
      times[2 * (at - from) + 1] = end[at];
    }
    return times;
  });
  const times = [...told, untold].sort((one, other) => one.length - other.length).reduce(together, new Float64Array());
  for (const [from, to] of rows) {
    for (let each = from; each < to; each++) {
      start[each] = times[start[each]];
      end[each] = times[end[each]];
    }
  }
}

/** All times of both, in order, each once. @param {Float64Array} one in order @param {Float64Array} other in order */
function together(one, other) {
  const times = new Float64Array(one.length + other.length);
  let count = 0;
  for (let here = 0, there = 0; here < one.length || there < other.length; ) {
    const time = there === other.length || one[here] <= other[there] ? one[here++] : other[there++];
    if (!count || time !== times[count - 1]) times[count++] = time;
  }
  return times.subarray(0, count);
}

/** Of differences the numbers themselves. */
function summed(column) {
  for (let at = 1; at < column.length; at++) column[at] += column[at - 1];
  return column;
}

/** Numbers out of planes of bytes, the lowest first: 0, 1, 2, 3, ... stand for 0, -1, 1, -2, ... */
function numbers(bytes, offset, width, count) {
  const low = new Uint32Array(count), column = new Int32Array(low.buffer);
  if (width) low.set(bytes.subarray(offset, offset + count));
  for (let plane = 1; plane < Math.min(width, 4); plane++) addPlane(low, bytes, offset + plane * count, 256 ** plane);
  if (width <= 4) {
    for (let at = 0; at < count; at++) column[at] = (low[at] >>> 1) ^ -(low[at] & 1);
    return column;
  }
  const whole = new Float64Array(low);
  for (let plane = 4; plane < width; plane++) addPlane(whole, bytes, offset + plane * count, 256 ** plane);
  for (let at = 0; at < count; at++) {
    const half = Math.floor(whole[at] / 2);
    whole[at] = half * 2 === whole[at] ? half : -half - 1;
  }
  return whole;
}

/** Adds the bytes of a plane times a factor. High bytes are nearly all zero: four such are passed over at once. */
function addPlane(column, bytes, offset, factor) {
  const count = column.length, plane = bytes.slice(offset, offset + count), fours = new Int32Array(plane.buffer, 0, count >> 2);
  for (let four = 0; four < fours.length; four++) {
    if (!fours[four]) continue;
    for (let at = 4 * four, stop = at + 4; at < stop; at++) column[at] += plane[at] * factor;
  }
  for (let at = 4 * fours.length; at < count; at++) column[at] += plane[at] * factor;
}
