// The rows of the page, and the window through which they are seen.

/** A level of a lane: boxes that do not overlap. */
class Row {
  /** @param {Object} lane @param {{lane: number, level: number, count: number}} row @param {number} panel */
  constructor(lane, { lane: place, level, count, overview }, panel) {
    const { title, kind, rank, folded, from_launch } = lane;
    /** The title of its lane; whether that is folded at first; whether boxes last from launch to completion. */
    Object.assign(this, { lane: title, kind, rank, folded, from_launch });
    Object.assign(this, { place, level, count, overview, panel, seen: false, top: 0, bottom: 0 });
  }

  /** @param {Columns} columns that hold its boxes @param {number} first of them @param {number} count @returns {number} the next row's first */
  fill(columns, first, count = this.count) {
    Object.assign(this, { columns, first, stop: first + count, made: null });
    return this.stop;
  }

  /** @returns {Track[]} made when they are first asked for */
  get tracks() {
    this.made ??= this.columns ? tracksOf(this.columns, this.first, this.stop) : [];
    return this.made;
  }

  /** @param {Object[]} lanes as they are arranged */
  arrange(lanes) {
    const lane = lanes[this.place];
    this.seen = lane.seen;
    if (lane.seen) Object.assign(this, placeOf(lane, this.level));
  }
}

/** A box by its row in the columns. @param {Row[]} rows @param {number} source @returns {{row, track, at}} */
function locate(rows, source) {
  const row = rows.find(({ first, count }) => first <= source && source < first + count);
  for (const track of row.tracks) {
    const at = firstAbove(track.source, source) - 1;
    if (at >= 0 && track.source[at] === source) return { row, track, at };
  }
  throw new Error(`no box ${source}`);
}

/** What of time is seen: a window on the axis, on which each panel may be shifted. */
class View {
  constructor(from, to, offsets) {
    this.from = from;
    this.to = to;
    /** Of each panel: its own time where the axis shows 0. */
    this.offsets = offsets;
  }

  get span() {
    return this.to - this.from;
  }

  /** The window on a row's own time. */
  on(row) {
    const offset = this.offsets[row.panel];
    return [this.from + offset, this.to + offset];
  }

  /** A row's time on the axis. */
  ms(row, time) {
    return (time - this.offsets[row.panel]) / 1e6;
  }

  moved(from, to) {
    return new View(from, to, this.offsets);
  }
}
