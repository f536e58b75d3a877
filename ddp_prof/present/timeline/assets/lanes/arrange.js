// Places the lanes: which are folded or left out, and the top and height of the others, in pixels.

import { FONT_PX, widthOf } from "../base/letters.js";

/**
 * @typedef {Object} Group lanes that are folded together: all lanes of calls, all lanes of ranges, or a single lane
 * @property {string} key the same on all ranks
 * @property {string} title
 * @property {Lane[]} lanes
 * @property {boolean} folded
 * @property {number} top
 * @property {number} bottom
 */

/**
 * @typedef {Object} Space
 * @property {boolean} narrow whether titles are above the lanes
 * @property {number} room for all lanes, in pixels
 * @property {number[]} headers heights of the panels' headers, in pixels
 */

/** @type {Record<string, number>} */
const LEVEL = { host: 16, compute: 18, strip: 32, ranges: 15, calls: 15 };
const OTHER_LEVEL = 17;
const LOW_STRIP = 20, LOW_GAP = 4; // of a file whose only rank is one bar
const LOWEST_LEVEL = 1.3, TALLEST_STACK = 44, MOST_LEVELS = 12;
export const GAP = { panel: 12, rank: 15, lane: 3 }, PANEL_HEADER = 32, LOWEST_RANK = 72, LABEL = 17, RANK_LINE = 24;
export const MARGIN = { t: 44, b: 62, l: 300, r: 28 }, NARROW = 760, NARROW_SIDE = 10, NARROW_LEGEND = 10;
export const LEGEND_LINE = 19, LEGEND_ITEM = 42, LEGEND_FREE = 22; // pixels of a line, beside an entry's text, free in any case
export const TOGETHER = { calls: "CUDA calls", ranges: "ranges" };

/** The reader's choices: which lanes are folded, and a filter on the titles of lanes. */
export class Folding {
  constructor() {
    /** @type {Map<string, boolean>} only lanes that the reader folded or unfolded */
    this.chosen = new Map();
    this.filter = "";
  }

  /** A filter unfolds the lanes that it shows, except those that the reader folded. */
  isFolded({ key, lanes: [lane] }) {
    return this.chosen.get(key) ?? (lane.folded && !this.filter);
  }

  passes({ title, kind }) {
    const words = this.filter.trim().toLowerCase();
    return title.toLowerCase().includes(words) || kind.includes(words);
  }

  set(key, folded) {
    this.chosen.set(key, folded);
  }
}

/** @returns {Group[]} the lanes of a rank that pass the filter */
function groupsOf(lanes, rank, folding) {
  const groups = new Map();
  for (const lane of lanes) {
    if (lane.rank !== rank || !folding.passes(lane)) continue;
    const key = lane.kind in TOGETHER ? lane.kind : lane.title;
    if (!groups.has(key)) groups.set(key, { key, lanes: [] });
    groups.get(key).lanes.push(lane);
  }
  return [...groups.values()].map((group) => ({ ...group, folded: folding.isFolded(group), title: titleOf(group) }));
}

function titleOf({ key, lanes }) {
  return lanes.length > 1 ? `${TOGETHER[key]}, ${lanes.length} threads` : lanes[0].title;
}

/** Sets for each lane whether it is seen, its top, and the height of a level. */
export class Arrangement {
  /**
   * @param {PageData} data @param {Folding} folding @param {Space} space
   */
  constructor(data, folding, { narrow, room, headers }) {
    this.data = data;
    this.narrow = narrow;
    this.headers = headers;
    this.height = 0;
    /** @type {number[]} */
    this.panelTops = [];
    /** @type {Array<{top: number, bottom: number, isLow: boolean}>} */
    this.rankPlaces = [];
    this.groups = data.ranks.map((_, rank) => groupsOf(data.lanes, rank, folding));
    this.isLow = this.groups.map((groups) => groups.every(({ lanes: [{ kind }] }) => kind === "strip")); // one bar: its label is a line
    this.isCompact = data.panels.map((_, panel) => data.panels.length > 1 && this.#only(panel) !== null);
    /** Panels without a header: the label of their rank and the header above say the same. */
    this.isHeadless = data.panels.map((_, panel) => this.#repeats(panel));
    this.#place(1);
    const flexible = this.#seen().reduce((sum, lane) => sum + lane.levels * lane.level, 0);
    const stretch = 1 + (room - this.height) / Math.max(1, flexible);
    if (stretch > 1) this.#place(stretch);
  }

  /** The rank of a panel, if it is the only one and one bar. @returns {?number} */
  #only(panel) {
    const ranks = [...this.data.ranks.keys()].filter((rank) => this.data.ranks[rank].panel === panel);
    return ranks.length === 1 && this.isLow[ranks[0]] ? ranks[0] : null;
  }

  #repeats(panel) {
    if (!panel || !this.isCompact[panel] || !this.isCompact[panel - 1]) return false;
    const [before, here] = [panel - 1, panel].map((at) => {
      const { title, device, facts } = this.data.panels[at], name = this.data.ranks[this.#only(at)].title;
      return title.endsWith(name) ? JSON.stringify([title.slice(0, -name.length), device, facts]) : null;
    });
    return here !== null && before === here;
  }

  #seen() {
    return this.data.lanes.filter(({ seen }) => seen);
  }

  #place(stretch) {
    const { ranks, panels, lanes } = this.data;
    for (const lane of lanes) lane.seen = false;
    this.panelTops = [];
    this.rankPlaces = [];
    let top = 0;
    panels.forEach((_, panel) => {
      top += panel && !this.isHeadless[panel] ? GAP.panel : 0;
      this.panelTops.push(top);
      top += this.isHeadless[panel] ? 0 : this.headers[panel] ?? PANEL_HEADER;
      ranks.forEach((rank, at) => {
        if (rank.panel !== panel) return;
        const start = top, end = this.#placeRank(this.groups[at], start + (this.narrow ? RANK_LINE : 0), stretch);
        const isLow = this.isLow[at];
        top = this.narrow || isLow ? end : Math.max(end, start + LOWEST_RANK);
        this.rankPlaces.push({ top: start, bottom: top, isLow });
        top += this.isCompact[panel] ? LOW_GAP : GAP.rank;
      });
    });
    this.height = top;
  }

  #placeRank(groups, start, stretch) {
    let top = start;
    for (const group of groups) {
      group.top = top;
      top = group.folded ? top + LABEL : this.#placeLanes(group.lanes, top, stretch);
      group.bottom = top;
      top += GAP.lane;
    }
    return top - GAP.lane;
  }

  #placeLanes(lanes, start, stretch) {
    let top = start;
    for (const lane of lanes) {
      top += this.narrow ? LABEL : 0;
      Object.assign(lane, { seen: true, top, level: (this.isCompact[this.data.ranks[lane.rank].panel] ? LOW_STRIP : levelHeight(lane)) * stretch });
      top += lane.level * lane.levels + GAP.lane;
    }
    return top - GAP.lane;
  }
}

/** The height of a level, which is lower in a high stack. */
function levelHeight({ kind, levels }) {
  const full = LEVEL[kind] ?? OTHER_LEVEL;
  if (kind === "host" || kind === "strip" || levels === 1) return full;
  const tallest = kind in TOGETHER ? MOST_LEVELS * full : TALLEST_STACK;
  return Math.max(LOWEST_LEVEL, Math.min(full, tallest / levels));
}

/** The place of a level of a lane, with a gap to the next level. @returns {{top: number, bottom: number}} */
export function placeOf({ top, level, levels }, at) {
  const start = top + at * level;
  return { top: start, bottom: start + level - (levels === 1 ? 0 : Math.min(1, level / 10)) };
}

/** The pixels that a legend needs above its free room; in several lines all entries are as wide as the widest. */
export function legendRoom(categories, width, narrow) {
  const scale = narrow ? NARROW_LEGEND / FONT_PX : 1, { l, r } = narrow ? { l: NARROW_SIDE, r: NARROW_SIDE } : MARGIN;
  const entries = categories.filter(({ in_legend: isIn }) => isIn).map(({ legend }) => widthOf(legend) * scale + LEGEND_ITEM);
  const sum = entries.reduce((all, each) => all + each, 0), room = width - l - r;
  const lines = sum <= room ? 1 : Math.ceil(entries.length / Math.max(1, Math.floor(room / Math.max(...entries))));
  return Math.max(0, lines * LEGEND_LINE - LEGEND_FREE);
}
