// Reads the columns of boxes back that timeline_columns.py packed.

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
 * @param {Uint8Array} bytes plane after plane, column after column
 * @param {Object<string, number>} widths planes of each column, in order
 * @param {number} count
 * @returns {Columns}
 */
function unpack(bytes, widths, count) {
  let offset = 0;
  /** @type {Object<string, Float64Array>} */
  const columns = {};
  for (const [name, width] of Object.entries(widths)) {
    columns[name] = signed(natural(bytes, offset, width, count));
    offset += width * count;
  }
  const { gap: start, duration: end, step } = columns;
  for (let at = 0, time = 0; at < count; at++) {
    start[at] += time;
    end[at] += start[at];
    time = end[at];
  }
  for (let at = 1; at < count; at++) step[at] += step[at - 1];
  return {
    start, end, bytes: columns.bytes,
    category: new Uint8Array(columns.category), title: new Int32Array(columns.title), step: new Int32Array(step),
  };
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
