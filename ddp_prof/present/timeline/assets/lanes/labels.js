// Labels beside the lanes, or above them on a narrow page: panels, ranks, and a button per lane.

/** @import { Timeline } from "../view/timeline.js" */
import { element } from "../base/dom.js";
import { percent } from "../base/format.js";
import { LABEL, PANEL_HEADER } from "./arrange.js";

export class Labels {
  /** @param {Timeline} timeline @param {HTMLElement} box that lies over the figure */
  constructor(timeline, box) {
    this.timeline = timeline;
    this.box = box;
    this.measuredAt = NaN;
    /** @type {number[]} */
    this.heights = [];
    this.shown = null;
  }

  /** The heights that the panels' headers need, which depend on the width of the figure. @returns {number[]} */
  headerHeights() {
    const { clientWidth } = this.timeline.element;
    if (clientWidth !== this.measuredAt) {
      this.measuredAt = clientWidth;
      this.box.replaceChildren(...this.timeline.data.panels.map(header));
      this.heights = [.../** @type {HTMLCollectionOf<HTMLElement>} */ (this.box.children)].map(({ offsetHeight }) => Math.max(PANEL_HEADER, offsetHeight + 8));
    }
    return this.heights;
  }

  update() {
    const { arrangement, element, width, margin } = this.timeline, { l, t } = element._fullLayout?._size ?? margin;
    Object.assign(this.box.style, { top: `${t}px` });
    this.box.style.setProperty("--left", `${l}px`);
    this.box.style.setProperty("--width", `${width}px`);
    if (arrangement === this.shown) return;
    this.shown = arrangement;
    const focused = /** @type {?HTMLElement} */ (document.activeElement)?.dataset.key;
    this.box.classList.toggle("narrow", arrangement.narrow);
    this.box.replaceChildren(...this.#panels(arrangement), ...this.#ranks(arrangement), ...this.#lanes(arrangement));
    if (focused) [...this.box.querySelectorAll("button")].find(({ dataset }) => dataset.key === focused)?.focus();
  }

  #panels({ panelTops, isHeadless }) {
    return this.timeline.data.panels.flatMap((panel, at) => (isHeadless[at] ? [] : [placed(header(panel), panelTops[at])]));
  }

  #ranks({ rankPlaces, isHeadless }) {
    return this.timeline.data.ranks.map(({ title, share, panel }, at) => {
      const { top, bottom, isLow } = rankPlaces[at];
      const figures = share === null ? ["n/a", "no overlap figure"] : [percent(share), "overlapped"];
      const label = element("div", element("b", title), " ", element("strong", figures[0]), " ", element("small", figures[1]));
      label.className = isLow ? "rank low" : "rank";
      if (isHeadless[panel]) label.title = header(this.timeline.data.panels[panel]).textContent;
      return placed(label, top, bottom - top);
    });
  }

  #lanes({ groups, narrow }) {
    return groups.flat().flatMap((group) => {
      if (group.folded) return [this.#button(group, group.title, group.top, LABEL)];
      return group.lanes.map((lane, at) => {
        const height = narrow ? LABEL : Math.max(LABEL, lane.level * lane.levels);
        return this.#button(group, lane.title, narrow ? lane.top - LABEL : lane.top, height, at);
      });
    });
  }

  #button({ key, folded, lanes }, title, top, height, at = 0) {
    const button = element("button", element("span", folded ? "▸" : "▾"), element("bdi", title));
    Object.assign(button, { className: "lane", title: `${title}: ${folded ? "unfold" : "fold"} on all ranks` });
    button.dataset.key = `${lanes[0].rank} ${at} ${key}`;
    button.setAttribute("aria-expanded", String(!folded));
    button.addEventListener("click", () => this.timeline.fold(key, !folded));
    return placed(button, top, height);
  }
}

function header({ title, device, facts }) {
  const made = element("div", element("b", element("bdi", title)), element("span", `device: ${device}`), ...facts.map((fact) =>
    element("span", element("bdi", fact))));
  made.className = `panel ${device}`;
  return made;
}

function placed(label, top, height) {
  label.style.top = `${top}px`;
  if (height) label.style.height = `${height}px`;
  return label;
}
