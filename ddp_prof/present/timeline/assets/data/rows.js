// The rows of the page, and the window of time that is shown.

/** @import { Columns } from "./columns.js" */
/** @import { Track } from "./tracks.js" */
import { firstAbove, tracksOf } from "./tracks.js";
import { placeOf } from "../lanes/arrange.js";

/** A level of a lane; its boxes do not overlap. */
export class Row {
  /** @param {Lane} lane @param {RowCount} row @param {number} panel */
  constructor(lane, { lane: place, level, count }, panel) {
    this.lane = lane.title;
    this.kind = lane.kind;
    this.rank = lane.rank;
    /** Whether its lane is folded at first. */
    this.folded = lane.folded;
    /** Whether boxes last from launch to completion. */
    this.from_launch = lane.from_launch;
    this.place = place;
    this.level = level;
    this.count = count;
    this.panel = panel;
    this.seen = false;
    this.top = 0;
    this.bottom = 0;
    this.first = 0;
    this.stop = 0;
    /** @type {?Columns} */
    this.columns = null;
    /** @type {?Track[]} */
    this.made = null;
  }

  /**
   * @param {Columns} columns that hold its boxes @param {number} first position of them @param {number} count
   * @returns {number} the first position of the next row
   */
  fill(columns, first, count = this.count) {
    Object.assign(this, { columns, first, stop: first + count, made: null });
    return this.stop;
  }

  /** @returns {Track[]} made on first use */
  get tracks() {
    this.made ??= this.columns ? tracksOf(this.columns, this.first, this.stop) : [];
    return this.made;
  }

  /** @param {Lane[]} lanes as they are arranged */
  arrange(lanes) {
    const lane = lanes[this.place];
    this.seen = lane.seen;
    if (lane.seen) Object.assign(this, placeOf(lane, this.level));
  }
}

/** Finds a box by its position in the columns. @param {Row[]} rows @param {number} source @returns {{row: Row, track: Track, at: number}} */
export function locate(rows, source) {
  const row = rows.find(({ first, count }) => first <= source && source < first + count);
  for (const track of row.tracks) {
    const at = firstAbove(track.source, source) - 1;
    if (at >= 0 && track.source[at] === source) return { row, track, at };
  }
  throw new Error(`no box ${source}`);
}

/** A window of the axis; each panel may be shifted on the axis. */
export class View {
  /** @param {number} from @param {number} to ns on the axis @param {number[]} offsets */
  constructor(from, to, offsets) {
    this.from = from;
    this.to = to;
    /** For each panel, its own time at 0 of the axis. */
    this.offsets = offsets;
  }

  get span() {
    return this.to - this.from;
  }

  /** The window in a row's own time. @param {{panel: number}} row @returns {[number, number]} */
  on(row) {
    const offset = this.offsets[row.panel];
    return [this.from + offset, this.to + offset];
  }

  /** A row's own time as ms on the axis. */
  ms(row, time) {
    return (time - this.offsets[row.panel]) / 1e6;
  }

  moved(from, to) {
    return new View(from, to, this.offsets);
  }
}
