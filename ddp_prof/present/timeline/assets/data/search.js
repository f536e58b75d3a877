// Finds boxes by their titles.

/** @import { BoxPlace, Model } from "../view/model.js" */
/** @import { Row } from "./rows.js" */
/** @import { Track } from "./tracks.js" */
import { lowest } from "./tracks.js";

export class Search {
  /** @param {Model} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.clear();
  }

  clear() {
    this.words = "";
    /** @type {Map<Track, Int32Array>} boxes found in each track, in order */
    this.found = new Map();
    this.count = 0;
    /** Number of goals: the boxes that "next" visits, which are those of devices, or all if there are none. */
    this.goals = 0;
    /** The goal visited last. @type {?BoxPlace} */
    this.current = null;
  }

  /** Finds all boxes whose title contains the words; if these are in quotes, the title must be equal. Ignores case. */
  find(words) {
    this.clear();
    this.words = words.trim().toLowerCase();
    if (!this.words) return;
    const { titles, lanes } = this.timeline.data;
    const [, whole] = this.words.match(/^"(.+)"$/) ?? [];
    const matches = (title) => (whole ? nameOf(title).toLowerCase() === whole : title[0].toLowerCase().includes(this.words));
    const fits = Uint8Array.from(titles, (title) => (matches(title) ? 1 : 0));
    for (const row of this.timeline.rows) {
      if (!this.timeline.folding.passes(lanes[row.place])) continue;
      for (const track of row.tracks) {
        const { title } = track.columns;
        const found = indicesWhere(track.length, (at) => fits[title[track.source[at]]]);
        if (found.length) this.found.set(track, found);
        this.count += found.length;
        if (isOfDevice(row)) this.goals += found.length;
      }
    }
    this.goesTo = this.goals ? isOfDevice : () => true;
    this.goals ||= this.count;
  }

  /** The first goal with a property in or after the window, else the first one before it. @returns {?BoxPlace} */
  first(holds) {
    /** @type {?BoxPlace} */
    let best = null, /** @type {?Key} */ bestKey = null;
    for (const { row, index, track, found } of this.#rows()) {
      const [from] = this.timeline.view.on(row), fits = (at) => holds({ row, track, at });
      const at = found.find((at) => track.start[at] >= from && fits(at)) ?? found.find(fits);
      if (at === undefined) continue;
      /** @type {Key} */
      const key = [track.start[at] < from ? Infinity : track.start[at] - from, index];
      if (!best || before(key, bestKey)) [best, bestKey] = [{ row, track, at }, key];
    }
    return best;
  }

  /**
   * Goes to the next goal in time (row by row if several start together); after the last one to the first.
   * @param {1 | -1} direction
   */
  go(direction) {
    if (!this.count) return;
    /** @type {Key} */
    const from = this.current ? keyOf(this.timeline, this.current) : [this.timeline.view.from, -1], tracks = this.#rows();
    this.current = nearest(this.timeline, tracks, from, direction) ?? nearest(this.timeline, tracks, [-direction * Infinity, 0], direction);
    this.timeline.moveTo(this.current);
  }

  /** Number of goals up to the current one. */
  get position() {
    if (!this.current) return 0;
    const here = keyOf(this.timeline, this.current);
    return this.#rows().reduce((sum, row) => sum + countUpTo(this.timeline, row, here), 0);
  }

  /** @returns {Array<{row: Row, index: number, track: Track, found: Int32Array}>} tracks with goals */
  #rows() {
    return this.timeline.rows.flatMap((row, index) => row.tracks.filter((track) => this.found.has(track) && this.goesTo(row))
      .map((track) => ({ row, index, track, found: this.found.get(track) })));
  }

  /** @returns {Array<[number, number]>} intervals to mark in a window, at most one per pixel */
  marks(track, from, to, pixel) {
    const found = this.found.get(track);
    /** @type {Array<[number, number]>} */
    const marks = [];
    if (!found) return marks;
    let each = lowest(found.length, (at) => track.end[found[at]] > from);
    while (each < found.length && track.start[found[each]] < to) {
      const start = track.start[found[each]], end = Math.max(track.end[found[each]], start + 2 * pixel);
      marks.push([Math.max(from, start), Math.min(to, end)]);
      each = lowest(found.length, (at) => track.start[found[at]] >= start + pixel, each + 1);
    }
    return marks;
  }
}

/** The name of a kernel: its title without the bucket. */
export function nameOf([title, , bucket]) {
  return title.replace(`collective of bucket ${bucket}: `, "");
}

/** Whether a row holds device events, not host events or derived boxes. */
function isOfDevice({ kind }) {
  return !["host", "ranges", "calls", "waiting", "strip"].includes(kind);
}

function indicesWhere(length, holds) {
  const found = [];
  for (let at = 0; at < length; at++) if (holds(at)) found.push(at);
  return Int32Array.from(found);
}

/** A track, the index of its row, and which of its boxes, all by default. @typedef {{row: Row, index: number, track: Track, found?: Int32Array}} Candidates */
/** A time on the axis, and a row. @typedef {[number, number]} Key */

/** The key that orders boxes. @param {Model} timeline @param {BoxPlace} box @returns {Key} */
export function keyOf({ view, rows }, { row, track, at }) {
  return [track.start[at] - view.offsets[row.panel], rows.indexOf(row)];
}

/**
 * How many boxes of a track, of those found in it or of all, come up to a key.
 * @param {Model} timeline @param {Candidates} candidates @param {Key} key
 */
function countUpTo({ view }, { row, index, track, found }, [time, rank]) {
  const own = time + view.offsets[row.panel];
  return lowest(found?.length ?? track.length, (each) => {
    const start = track.start[found?.[each] ?? each];
    return start > own || (start === own && index > rank);
  });
}

/**
 * The box of some tracks that is next to a key, as above; null if there is none.
 * @param {Model} timeline @param {Candidates[]} tracks @param {Key} from @param {number} direction @returns {?BoxPlace}
 */
export function nearest(timeline, tracks, from, direction) {
  let best = null, bestKey = null;
  for (const entry of tracks) {
    const { row, track, found } = entry, boxAt = (each) => ({ row, track, at: found?.[each] ?? each });
    const upTo = countUpTo(timeline, entry, from);
    const isHere = upTo > 0 && same(keyOf(timeline, boxAt(upTo - 1)), from);
    const each = direction > 0 ? upTo : upTo - 1 - (isHere ? 1 : 0);
    if (each < 0 || each >= (found?.length ?? track.length)) continue;
    const key = keyOf(timeline, boxAt(each));
    if (!best || before(key, bestKey) === direction > 0) [best, bestKey] = [boxAt(each), key];
  }
  return best;
}

/** @param {Key} one @param {Key} other */
const same = ([time, row], [otherTime, otherRow]) => time === otherTime && row === otherRow;
/** @param {Key} one @param {Key} other */
const before = ([time, row], [otherTime, otherRow]) => time < otherTime || (time === otherTime && row < otherRow);
