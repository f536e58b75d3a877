// Index over boxes: the cost of a query grows with its answer, not with the number of boxes.

/** @import { Columns } from "./columns.js" */

/** Boxes in a block, and blocks in a block of blocks; the longest duration of each is known. */
const FAN = 32;

/** The boxes of one category in one row, sorted and disjoint. */
export class Track {
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
    return lowest(this.length, (at) => this.start[at] >= time);
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

  /** First box at or after `at` and before `stop` with at least that duration; else `stop`. */
  nextLong(at, stop, least) {
    while (at < stop) {
      if (this.end[at] - this.start[at] >= least) return at;
      at = this.#overShort(at + 1, least);
    }
    return stop;
  }

  /** Skips blocks that begin at `at` and hold no box of at least that duration. */
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

/** The lowest number below `stop` for which a condition holds that also holds for all higher ones; else `stop`. */
export function lowest(stop, holds, low = 0) {
  let high = stop;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** @param {Float64Array|Int32Array} sorted @param {number} value @returns {number} first position of a larger value */
export function firstAbove(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The largest value of each block. */
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
export function tracksOf(columns, from, to) {
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
