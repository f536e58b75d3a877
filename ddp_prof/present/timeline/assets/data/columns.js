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
 * @param {Array<[number, Object<string, Array<[number, number]>>]>} tables rows, and of each column, in order, the
 * blocks: how many planes they are in, how many rows
 * @returns {Object<string, Int32Array | Float64Array>[]} whole numbers; of up to four bytes as those
 */
function unpack(bytes, tables) {
  let offset = 0;
  return tables.map(([rows, blocksOf]) => {
    const columns = {};
    for (const [name, blocks] of Object.entries(blocksOf)) {
      columns[name] = numbers(bytes.subarray(offset), blocks, rows);
      for (const [planes, count] of blocks) offset += planes * count;
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

/** Adds the bytes of a plane times a factor. High bytes are nearly all zero: four such are passed over at once. */
function addPlane(column, plane, factor) {
  const fours = new Int32Array(plane.buffer, 0, plane.length >> 2);
  for (let four = 0; four < fours.length; four++) {
    if (!fours[four]) continue;
    for (let at = 4 * four, stop = at + 4; at < stop; at++) column[at] += plane[at] * factor;
  }
  for (let at = 4 * fours.length; at < plane.length; at++) column[at] += plane[at] * factor;
}
