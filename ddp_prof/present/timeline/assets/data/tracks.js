// Boxes that can be asked, at a cost that grows with the answer and not with their number.

/** How many boxes, or blocks of them, make a block of which the longest is known. */
const FAN = 32;

/** The boxes of one category in one row: sorted, none overlapping another. */
class Track {
  /** @param {number} category @param {Columns} columns @param {Int32Array} source row of each box in the columns */
  constructor(category, columns, source) {
    this.category = category;
    this.columns = columns;
    this.source = source;
    this.length = source.length;
    this.start = new Float64Array(this.length);
    this.end = new Float64Array(this.length);
    /** Time covered by all boxes before each one: whole ns, exact up to 2^53. */
    this.before = new Float64Array(this.length + 1);
    for (let at = 0; at < this.length; at++) {
      const start = columns.start[source[at]], end = columns.end[source[at]];
      this.start[at] = start;
      this.end[at] = end;
      this.before[at + 1] = this.before[at] + end - start;
    }
    /** @type {Float64Array[]} Longest duration of each block, of each block of blocks, and so on. */
    this.longest = [];
    let below = (at) => this.end[at] - this.start[at];
    for (let length = this.length; length > FAN; length = this.longest.at(-1).length) {
      const level = highest(below, length);
      this.longest.push(level);
      below = (at) => level[at];
    }
  }

  /** First box that ends after a time. */
  endingAfter(time) {
    return firstAbove(this.end, time);
  }

  /** First box that starts at a time or after it. */
  startingFrom(time) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.start[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Time that boxes cover before a time. */
  coveredBefore(time) {
    const at = this.endingAfter(time);
    return this.before[at] + (at < this.length ? Math.max(0, time - this.start[at]) : 0);
  }

  /** Time that boxes cover within [from, to). */
  covered(from, to) {
    return this.coveredBefore(to) - this.coveredBefore(from);
  }

  /** First box at or after `at`, before `stop`, that is at least so long; `stop` where there is none. */
  nextLong(at, stop, least) {
    while (at < stop) {
      if (this.end[at] - this.start[at] >= least) return at;
      at = this.#overShort(at + 1, least);
    }
    return stop;
  }

  /** Steps over blocks that begin here and hold no long box. */
  #overShort(at, least) {
    for (;;) {
      let skip = 0;
      for (let level = 0, size = FAN; level < this.longest.length; level++, size *= FAN) {
        if (at % size || at >= this.length || this.longest[level][at / size] >= least) break;
        skip = size;
      }
      if (!skip) return at;
      at += skip;
    }
  }
}

/** @param {Float64Array|Int32Array} sorted @param {number} value @returns {number} first position of a larger value */
function firstAbove(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The highest value of each block. */
function highest(valueAt, length) {
  const blocks = new Float64Array(Math.ceil(length / FAN));
  for (let at = 0; at < length; at++) {
    const block = (at / FAN) | 0, value = valueAt(at);
    if (value > blocks[block]) blocks[block] = value;
  }
  return blocks;
}

/**
 * The boxes of a row as tracks, in the order of categories.
 * @param {Columns} columns @param {number} from @param {number} to @returns {Track[]}
 */
function tracksOf(columns, from, to) {
  const counts = new Uint32Array(256);
  for (let at = from; at < to; at++) counts[columns.category[at]]++;
  const sources = Array.from(counts, (count) => new Int32Array(count));
  counts.fill(0);
  for (let at = from; at < to; at++) {
    const category = columns.category[at];
    sources[category][counts[category]++] = at;
  }
  return sources.flatMap((source, category) => (source.length ? [new Track(category, columns, source)] : []));
}
