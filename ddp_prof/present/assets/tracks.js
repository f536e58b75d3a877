// Boxes that can be asked, at a cost that grows with the answer and not with their number.

/** How many boxes, or blocks of them, make a block of which the longest is known. */
const FAN = 32;

/** The boxes of one category in one row: sorted, none overlapping another. */
class Track {
  /** @param {number} category @param {number} count */
  constructor(category, count) {
    this.category = category;
    this.start = new Float64Array(count);
    this.end = new Float64Array(count);
    /** Row of each box in the columns. */
    this.source = new Int32Array(count);
    /** Time covered by all boxes before each one: whole ns, exact up to 2^53. */
    this.before = new Float64Array(count + 1);
    this.length = 0;
    /** @type {Float64Array[]} Longest duration of each block, of each block of blocks, and so on. */
    this.longest = [];
  }

  /** @param {Columns} columns @param {number} source */
  add(columns, source) {
    const at = this.length++;
    this.start[at] = columns.start[source];
    this.end[at] = columns.end[source];
    this.source[at] = source;
    this.before[at + 1] = this.before[at] + this.end[at] - this.start[at];
  }

  /** To be called once, when all boxes are in. */
  index() {
    let below = this.start.map((start, at) => this.end[at] - start);
    while (below.length > FAN) {
      const level = new Float64Array(Math.ceil(below.length / FAN));
      for (let at = 0; at < below.length; at++) {
        const block = (at / FAN) | 0;
        if (below[at] > level[block]) level[block] = below[at];
      }
      this.longest.push((below = level));
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

/**
 * The boxes of a row as tracks, in the order of categories.
 * @param {Columns} columns @param {number} from @param {number} to @returns {Track[]}
 */
function tracksOf(columns, from, to) {
  const counts = new Map();
  for (let at = from; at < to; at++) counts.set(columns.category[at], (counts.get(columns.category[at]) ?? 0) + 1);
  const tracks = new Map([...counts].sort(([one], [other]) => one - other)
    .map(([category, count]) => [category, new Track(category, count)]));
  for (let at = from; at < to; at++) tracks.get(columns.category[at]).add(columns, at);
  for (const track of tracks.values()) track.index();
  return [...tracks.values()];
}
