// The window in the address of the page, so that a view can be sent: #step=3&from=-1000&to=2000, in ns on the axis.

const WRITE_AFTER = 300; // ms; browsers refuse to be told too often

class Address {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.links = [...document.querySelectorAll("a[data-keeps-step]")].map((link) => [link, link.getAttribute("href")]);
    addEventListener("hashchange", () => this.follow());
    timeline.onDraw(() => {
      clearTimeout(this.pending);
      this.pending = setTimeout(() => this.write(), WRITE_AFTER);
    });
  }

  /** Shows what the address says; what is not there is passed over. */
  follow() {
    const { timeline } = this, asked = new URLSearchParams(location.hash.slice(1));
    const [step, from, to] = ["step", "from", "to"].map((name) => Number(asked.get(name) ?? NaN));
    if (timeline.stepNumbers.includes(step)) timeline.showStep(step);
    else if (asked.has("from")) timeline.showAll();
    if (from < to) timeline.show(from, to);
  }

  write() {
    const { step, view, limits } = this.timeline, parts = new URLSearchParams();
    const isAll = step === null && view.from <= limits[0] && view.to >= limits[1];
    if (step !== null) parts.set("step", step);
    if (!isAll) {
      parts.set("from", Math.round(view.from));
      parts.set("to", Math.round(view.to));
    }
    const hash = parts.size ? `#${parts}` : "";
    if (hash !== location.hash) history.replaceState(null, "", hash || "#");
    for (const [link, page] of this.links) link.setAttribute("href", step === null ? page : `${page}#step=${step}`);
  }
}
