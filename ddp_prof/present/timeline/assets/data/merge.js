// Selects what to draw of a row in a window: long boxes one by one, short boxes merged by pixel column.

/** @import { Row, View } from "./rows.js" */
/** @import { Track } from "./tracks.js" */

/** If there were more boxes and cells to draw, pixel columns become wider. */
const MOST_BOXES = 20000;

/**
 * @typedef {Object} Box a box of at least a pixel
 * @property {Track} track
 * @property {number} at
 */
/**
 * @typedef {Object} Cell short boxes of one category within one pixel column, or the part of it between long boxes
 * @property {Track} track
 * @property {number} from
 * @property {number} to
 * @property {number} first the first box in it
 * @property {number} count boxes that start in it; a box that started before the window counts at its start
 * @property {number} share of [from, to) that is covered
 * @property {number} base share covered by the categories below
 */

/**
 * Merges the boxes of all rows.
 * @param {Row[]} rows @param {View} view @param {number} columns
 */
export function mergeAll(rows, view, columns) {
  for (let width = columns; ; width = Math.ceil(width / 2)) {
    const drawn = rows.map((row) => ({ row, ...merge(row.tracks, ...view.on(row), width) }));
    const boxes = drawn.reduce((sum, { boxes, cells }) => sum + boxes.length + cells.length, 0);
    if (boxes <= MOST_BOXES || width === 1) return { drawn, boxes, columns: width };
  }
}

/**
 * Each box of the window is returned or counted in one cell; the shares times the widths sum to the covered time.
 * @param {Track[]} tracks of one row
 * @param {number} from @param {number} to the window
 * @param {number} columns its width in pixels
 * @returns {{boxes: Box[], cells: Cell[]}}
 */
export function merge(tracks, from, to, columns) {
  const pixel = (to - from) / columns;
  const boxes = longBoxes(tracks, from, to, pixel);
  const gaps = new Gaps(tracks, from, pixel);
  let cursor = from;
  for (const { track, at } of boxes) {
    gaps.fill(cursor, track.start[at], true);
    gaps.counted[tracks.indexOf(track)] = at + 1;
    cursor = track.end[at];
  }
  gaps.fill(cursor, to, false);
  return { boxes, cells: gaps.cells };
}

/** @returns {Box[]} in order */
function longBoxes(tracks, from, to, pixel) {
  const boxes = [];
  for (const track of tracks) {
    const stop = track.startingFrom(to);
    let at = track.nextLong(track.endingAfter(from), stop, pixel);
    for (; at < stop; at = track.nextLong(at + 1, stop, pixel)) boxes.push({ track, at });
  }
  return tracks.length < 2 ? boxes : boxes.sort((one, other) => one.track.start[one.at] - other.track.start[other.at]);
}

/** Merges the short boxes between long boxes, from left to right. */
class Gaps {
  constructor(tracks, origin, pixel) {
    this.tracks = tracks;
    this.origin = origin;
    this.pixel = pixel;
    /** For each track, the first box that is in no cell yet. */
    this.counted = tracks.map((track) => Math.min(track.endingAfter(origin), track.startingFrom(origin)));
    /** @type {Cell[]} */
    this.cells = [];
  }

  /**
   * @param {number} from @param {number} to
   * @param {boolean} closed whether boxes without length at its end belong to it
   */
  fill(from, to, closed) {
    for (let cursor = from; cursor <= to; ) {
      const start = this.#nextStart(cursor);
      if (start > to || (start === to && !closed)) return;
      const column = this.#columnOf(start);
      const low = Math.max(from, this.#edge(column)), high = Math.min(to, this.#edge(column + 1));
      this.#fillColumn(low, high, closed && high === to);
      if (high === to) return;
      cursor = high;
    }
  }

  /** Start of the next box after the cursor, or the cursor if a box covers it; so empty columns cost nothing. */
  #nextStart(cursor) {
    let earliest = Infinity;
    for (let each = 0; each < this.tracks.length; each++) {
      const track = this.tracks[each], at = this.counted[each];
      if (at > 0 && track.end[at - 1] > cursor) return cursor;
      if (at < track.length) earliest = Math.min(earliest, track.start[at]);
    }
    return Math.max(earliest, cursor);
  }

  #edge(column) {
    return this.origin + column * this.pixel;
  }

  /** The column that contains a time; the loops correct rounding errors of the division. */
  #columnOf(time) {
    let column = Math.floor((time - this.origin) / this.pixel);
    while (this.#edge(column + 1) <= time) column++;
    while (this.#edge(column) > time) column--;
    return column;
  }

  #fillColumn(from, to, closed) {
    let base = 0;
    for (let each = 0; each < this.tracks.length; each++) {
      const track = this.tracks[each], first = this.counted[each];
      let stop = Math.max(first, track.startingFrom(to));
      while (closed && stop < track.length && track.end[stop] === to) stop++;
      const share = to > from ? track.covered(from, to) / (to - from) : 0;
      this.counted[each] = stop;
      if (stop === first && !share) continue;
      this.cells.push({ track, from, to, first: stop > first ? first : first - 1, count: stop - first, share, base });
      base += share;
    }
  }
}
