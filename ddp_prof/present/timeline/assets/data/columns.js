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
 * @returns {Object<string, Float64Array>[]}
 */
function unpack(bytes, tables) {
  let offset = 0;
  return tables.map(([rows, widths]) => {
    const columns = {};
    for (const [name, width] of Object.entries(widths)) {
      columns[name] = signed(natural(bytes, offset, width, rows));
      offset += width * rows;
    }
    return columns;
  });
}

/** A table of boxes, as encoding.py packs it. @returns {Columns} */
function boxesOf({ gap: start, duration: end, step, category, title, bytes }) {
  for (let at = 0, time = 0; at < start.length; at++) {
    start[at] += time;
    end[at] += start[at];
    time = end[at];
  }
  return {
    start, end, bytes, step: new Int32Array(summed(step)),
    category: new Uint8Array(category), title: new Int32Array(title),
  };
}

/**
 * Times instead of positions: each box of some rows starts and ends with a box of others, or with a time told apart.
 * @param {Columns} columns @param {Array<[number, number]>} rows of positions, from and to
 * @param {Array<[number, number]>} others that tell times @param {number[]} untold
 */
function toTimes({ start, end }, rows, others, untold) {
  const length = others.reduce((sum, [from, to]) => sum + 2 * (to - from), 0);
  const times = new Float64Array(length + untold.length);
  let at = 0;
  for (const [from, to] of others) {
    times.set(start.subarray(from, to), at);
    times.set(end.subarray(from, to), at + to - from);
    at += 2 * (to - from);
  }
  times.set(untold, at);
  times.sort();
  let count = 0;
  for (let each = 0; each < times.length; each++) if (!each || times[each] !== times[each - 1]) times[count++] = times[each];
  for (const [from, to] of rows) {
    for (let each = from; each < to; each++) {
      start[each] = times[start[each]];
      end[each] = times[end[each]];
    }
  }
}

/** Of differences the numbers themselves. */
function summed(column) {
  for (let at = 1; at < column.length; at++) column[at] += column[at - 1];
  return column;
}

/** Numbers of up to 2^53 out of planes of bytes; beyond 32 bits JavaScript's shifts cannot be used. */
function natural(bytes, offset, width, count) {
  const column = new Float64Array(count);
  for (let plane = 0, factor = 1; plane < width; plane++, factor *= 256) {
    const digits = bytes.subarray(offset + plane * count, offset + (plane + 1) * count);
    for (let at = 0; at < count; at++) {
      if (digits[at]) column[at] += digits[at] * factor;
    }
  }
  return column;
}

/** 0, 1, 2, 3, ... as 0, -1, 1, -2, ... */
function signed(column) {
  for (let at = 0; at < column.length; at++) {
    const half = Math.floor(column[at] / 2);
    column[at] = half * 2 === column[at] ? half : -half - 1;
  }
  return column;
}
