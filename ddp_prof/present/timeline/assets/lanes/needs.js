// Which operations waited for which collectives, and how long.

/** @import { BoxPlace } from "../view/model.js" */
import { milliseconds } from "../base/format.js";
import { summed } from "../data/columns.js";
import { locate } from "../data/rows.js";
import { firstAbove } from "../data/tracks.js";

export class Needs {
  /** @param {Numbers} columns a row per collective and per waiting box; see encoding.py */
  constructor({ box, ...columns }) {
    this.columns = columns;
    this.box = summed(box);
  }

  /** The row of a collective or of a waiting box. @returns {?Object} */
  at(source) {
    const row = firstAbove(this.box, source - 1);
    if (this.box[row] !== source) return null;
    const [of, blocking, held, slack, name, stream, after, consumer] =
      ["of", "blocking", "held", "slack", "name", "stream", "after", "consumer"].map((column) => this.columns[column][row]);
    return { of: of - 1, blocking, held: held - 1, slack, name, stream, after, consumer: consumer - 1 };
  }

  /** The collective with an index in a step of a rank. @returns {?BoxPlace} */
  collective(timeline, rank, step, index) {
    for (let at = 0; at < this.box.length; at++) {
      if (this.columns.index[at] !== index) continue;
      const box = locate(timeline.shownRows, this.box[at]), { row, track } = box;
      if (row.kind !== "communication" || timeline.data.ranks[row.rank].name !== rank) continue;
      if (!timeline.stepKeys.length || track.columns.step[track.source[box.at]] === step) return box;
    }
    return null;
  }

  /** The collectives whose consumer a box is. @returns {number[]} */
  neededBy(source) {
    const found = [];
    for (let row = 0; row < this.box.length; row++) if (this.columns.consumer[row] === source + 1) found.push(this.box[row]);
    return found;
  }
}

const exactly = (ns) => `${milliseconds(ns)} (${ns.toLocaleString("en")} ns)`;

/** Facts on blocking, slack and the consumer of a collective; for a consumer or a waiting box, on its collectives. */
export function needFacts(timeline, { row, track, at }) {
  const { needs, data } = timeline, source = track.source[at];
  if (!needs || row.folded) return [];
  const found = needs.at(source), nameOf = (box) => timeline.texts(box.track, box.at)[0];
  const boxAt = (source) => locate(timeline.shownRows, source);
  if (!found) return needs.neededBy(source).map((each) => ["needs", nameOf(boxAt(each)), boxAt(each)]);
  if (row.kind === "waiting") return found.of < 0 ? [] : [["waits for", nameOf(boxAt(found.of)), boxAt(found.of)]];
  const { blocking, held, slack, name, stream, after, consumer } = found, { whyUnknown, panel } = data.ranks[row.rank];
  const start = track.start[at] + after - timeline.view.offsets[row.panel];
  const known = blocking >= 0 ? exactly(blocking) : `not known: ${whyUnknown ?? "the trace does not tell"}`;
  const nobody = blocking >= 0 && data.panels[panel].device !== "cpu" ? [["needed by", "nothing that the trace shows"]] : [];
  return [
    ["blocking", known],
    ...(held < 0 ? nobody : [
      ["slack", slack < 0 ? `none: it ended ${exactly(-slack)} too late` : exactly(slack)],
      ["needed by", `${data.consumers[name]}, stream ${stream}, ${milliseconds(start)} on the axis`,
        consumer >= 0 ? boxAt(consumer) : null],
      ["held back by", HELD_BACK[data.heldBy[held]]],
    ]),
  ];
}

const HELD_BACK = {
  "collective": "this collective", "operation before": "the operation before it on its stream",
  "launch": "its launch", "other wait": "something else that it waits for",
};

/** Arrows from collectives to their consumers; a box of either kind is selected. @returns {Array<{x: number[], y: number[]}>} */
export function needArrows(timeline, { row, track, at }) {
  const { needs, view } = timeline, source = track.source[at];
  if (!needs || row.folded) return [];
  const found = needs.at(source);
  const collectives = found ? [found.of < 0 ? source : found.of] : needs.neededBy(source);
  return collectives.flatMap((each) => {
    const { consumer } = needs.at(each);
    if (consumer < 0) return [];
    const [from, to] = [each, consumer].map((source) => locate(timeline.shownRows, source));
    if (!from.row.seen || !to.row.seen) return [];
    const middle = ({ row }) => (row.top + row.bottom) / 2;
    return [{
      x: [view.ms(from.row, from.track.end[from.at]), view.ms(to.row, to.track.start[to.at])], y: [middle(from), middle(to)],
    }];
  });
}
