// The address of the page: it is written when something else is shown, and followed when it changes.

/** @import { Details } from "./details.js" */
/** @import { BoxPlace } from "./model.js" */
/** @import { Timeline } from "./timeline.js" */
import { byId } from "../base/dom.js";
import { searchFor } from "./controls.js";
import { hashOf, selectionOf, showWindowOf, wordsOf } from "./hash.js";

const WRITE_AFTER = 300; // ms; browsers limit how often the address may change
const COPIED_FOR = 2000; // ms

export class Address {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    /** @type {Array<[Element, string]>} */
    this.links = [...document.querySelectorAll('a[data-page="why"]')].map((link) => [link, link.getAttribute("href")]);
    addEventListener("hashchange", () => this.follow());
  }

  /**
   * Writes the address from now on; not earlier, because the selection in it could not be followed before.
   * @param {Details} details
   */
  start(details) {
    this.details = details;
    this.#followSelection();
    byId("copy-link").addEventListener("click", () => this.copy());
    this.timeline.onDraw(() => {
      clearTimeout(this.pending);
      this.pending = setTimeout(() => this.write(), WRITE_AFTER);
    });
  }

  /** Shows what the address says. */
  follow() {
    this.known = location.hash;
    showWindowOf(this.timeline, query());
    if (this.details) this.#followSelection();
  }

  #followSelection() {
    const { timeline, details } = this, words = wordsOf(query());
    if (words !== timeline.search.words) searchFor(words);
    const selected = selectionOf(timeline, query());
    if (selected?.row) details.showBox(/** @type {BoxPlace} */ (selected));
    else if (selected) details.showRange(selected.from, selected.to);
    else if (timeline.selected) details.clear();
  }

  /** Copies the address; if the browser refuses that, shows it in a field, selected. */
  async copy() {
    this.write();
    const note = byId("copied"), field = byId("link");
    try {
      await navigator.clipboard.writeText(location.href);
      note.textContent = "copied";
      setTimeout(() => (note.textContent = ""), COPIED_FOR);
    } catch {
      field.value = location.href;
      field.hidden = false;
      field.select();
      field.addEventListener("blur", () => (field.hidden = true), { once: true });
    }
  }

  /** Writes the address, unless it changed meanwhile: then `hashchange` is about to come, and `follow` with it. */
  write() {
    if (location.hash !== this.known) return;
    const { step } = this.timeline, hash = hashOf(this.timeline);
    if (hash !== location.hash) history.replaceState(null, "", hash || "#");
    this.known = location.hash;
    for (const [link, page] of this.links) link.setAttribute("href", step === null ? page : `${page}#step=${step}`);
  }
}

function query() {
  return new URLSearchParams(location.hash.slice(1));
}
