// Finding boxes by what they are called.

class Search {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.clear();
  }

  clear() {
    this.words = "";
    /** @type {Map<Track, Int32Array>} boxes found in each track, in order */
    this.found = new Map();
    this.count = 0;
    /** How many of them the search goes to: those of devices, or all where there are none. */
    this.goals = 0;
    /** @type {?{row: Row, track: Track, at: number}} where the search stands */
    this.current = null;
  }

  /** Finds all boxes whose title holds the words, in capitals or not; of words in quotes those that are called so. */
  find(words) {
    this.clear();
    this.words = words.trim().toLowerCase();
    if (!this.words) return;
    const { titles, lanes } = this.timeline.data;
    const [, whole] = this.words.match(/^"(.+)"$/) ?? [];
    const isMeant = (title) => (whole ? nameOf(title).toLowerCase() === whole : title[0].toLowerCase().includes(this.words));
    const fits = Uint8Array.from(titles, (title) => (isMeant(title) ? 1 : 0));
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

  /** The first goal for which something holds, rather in the window than before it. @returns {?{row, track, at}} */
  first(holds) {
    let best = null, bestKey = null;
    for (const { row, index, track, found } of this.#rows()) {
      const [from] = this.timeline.view.on(row), isMeant = (at) => holds({ row, track, at });
      const at = found.find((at) => track.start[at] >= from && isMeant(at)) ?? found.find(isMeant);
      if (at === undefined) continue;
      const key = [track.start[at] < from ? Infinity : track.start[at] - from, index];
      if (!best || before(key, bestKey)) [best, bestKey] = [{ row, track, at }, key];
    }
    return best;
  }

  /**
   * Goes to the next goal in time, from row to row where several start together, and from the last to the first.
   * @param {1 | -1} direction
   */
  go(direction) {
    if (!this.count) return;
    const from = this.current ? this.#key(this.current) : [this.timeline.view.from, -1];
    this.current = this.#nearest(from, direction) ?? this.#nearest([-direction * Infinity, 0], direction);
    this.timeline.moveTo(this.current);
  }

  /** How many goals there are up to the current one. */
  get position() {
    if (!this.current) return 0;
    const here = this.#key(this.current);
    return this.#rows().reduce((sum, row) => sum + this.#upTo(row, here), 0);
  }

  /** @returns {Array<[Row, Track, number]>} rows with goals */
  #rows() {
    return this.timeline.rows.flatMap((row, index) => row.tracks.filter((track) => this.found.has(track) && this.goesTo(row))
      .map((track) => ({ row, index, track, found: this.found.get(track) })));
  }

  /** Order of matches: time on the axis, then row. */
  #key({ row, track, at }) {
    return [track.start[at] - this.timeline.view.offsets[row.panel], this.timeline.rows.indexOf(row)];
  }

  /** How many matches of a row lie at a key or before it. */
  #upTo({ row, index, track, found }, [time, rank]) {
    const own = time + this.timeline.view.offsets[row.panel];
    return lowest(found.length, (each) => {
      const start = track.start[found[each]];
      return start > own || (start === own && index > rank);
    });
  }

  #nearest(from, direction) {
    let best = null, bestKey = null;
    for (const entry of this.#rows()) {
      const upTo = this.#upTo(entry, from);
      const isHere = upTo > 0 && same(this.#key({ ...entry, at: entry.found[upTo - 1] }), from);
      const each = direction > 0 ? upTo : upTo - 1 - (isHere ? 1 : 0);
      if (each < 0 || each >= entry.found.length) continue;
      const match = { row: entry.row, track: entry.track, at: entry.found[each] }, key = this.#key(match);
      if (!best || before(key, bestKey) === direction > 0) [best, bestKey] = [match, key];
    }
    return best;
  }

  /** @returns {Array<[number, number]>} what to mark of a track in a window, at most once a pixel */
  marks(track, from, to, pixel) {
    const found = this.found.get(track), marks = [];
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

/** What a kernel is called, without its bucket. */
function nameOf([title, , bucket]) {
  return title.replace(`collective of bucket ${bucket}: `, "");
}

/** Whether a row holds what a device did, and not what the host did or what was derived. */
function isOfDevice({ kind }) {
  return !["host", "ranges", "calls", "waiting", "strip"].includes(kind);
}

function indicesWhere(length, holds) {
  const found = [];
  for (let at = 0; at < length; at++) if (holds(at)) found.push(at);
  return Int32Array.from(found);
}

/** The lowest number below `stop` for which something holds that holds for all higher ones; else `stop`. */
function lowest(stop, holds, low = 0) {
  let high = stop;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const same = ([time, row], [otherTime, otherRow]) => time === otherTime && row === otherRow;
const before = ([time, row], [otherTime, otherRow]) => time < otherTime || (time === otherTime && row < otherRow);
