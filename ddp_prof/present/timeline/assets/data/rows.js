// The rows of the page, and the window of time that is shown.

/** A level of a lane; its boxes do not overlap. */
class Row {
  /** @param {Object} lane @param {{lane: number, level: number, count: number}} row @param {number} panel */
  constructor(lane, { lane: place, level, count }, panel) {
    const { title, kind, rank, folded, from_launch } = lane;
    /** folded: whether its lane is folded at first; from_launch: whether boxes last from launch to completion. */
    Object.assign(this, { lane: title, kind, rank, folded, from_launch });
    Object.assign(this, { place, level, count, panel, seen: false, top: 0, bottom: 0 });
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

  /** @param {Object[]} lanes as they are arranged */
  arrange(lanes) {
    const lane = lanes[this.place];
    this.seen = lane.seen;
    if (lane.seen) Object.assign(this, placeOf(lane, this.level));
  }
}

/** Finds a box by its position in the columns. @param {Row[]} rows @param {number} source @returns {{row, track, at}} */
function locate(rows, source) {
  const row = rows.find(({ first, count }) => first <= source && source < first + count);
  for (const track of row.tracks) {
    const at = firstAbove(track.source, source) - 1;
    if (at >= 0 && track.source[at] === source) return { row, track, at };
  }
  throw new Error(`no box ${source}`);
}

/** A window of the axis; each panel may be shifted on the axis. */
class View {
  constructor(from, to, offsets) {
    this.from = from;
    this.to = to;
    /** For each panel, its own time at 0 of the axis. */
    this.offsets = offsets;
  }

  get span() {
    return this.to - this.from;
  }

  /** The window in a row's own time. */
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
