// Runs in a page before its own scripts, and knows when the page is at rest: it has been read, no frame is asked for, no
// timer of a second or less is pending, nothing is being animated, and its elements and sizes have stayed as they are for
// two frames. Such timers run at once instead of when they are due, so that no test waits for them.
(() => {
  const LONG_MS = 1000, QUIET_FRAMES = 2;
  const { requestAnimationFrame: askFrame, cancelAnimationFrame: cancelFrame, setTimeout: start, clearTimeout: stop } = window;
  const frames = new Set(), timers = new Map();
  let changes = 1, seen = 0, isLeaving = false, running = null;

  window.requestAnimationFrame = (act) => {
    changes++;
    const frame = askFrame((time) => {
      frames.delete(frame);
      changes++;
      act(time);
    });
    frames.add(frame);
    return frame;
  };
  window.cancelAnimationFrame = (frame) => {
    frames.delete(frame);
    cancelFrame(frame);
  };
  window.setTimeout = (act, ms = 0, ...values) => {
    changes++;
    const timer = start(() => run(timer), ms);
    timers.set(timer, { due: performance.now() + ms, isLong: ms > LONG_MS, act: () => act(...values) });
    return timer;
  };
  window.clearTimeout = (timer) => {
    timers.delete(timer);
    stop(timer);
  };
  addEventListener("beforeunload", () => (isLeaving = true));
  new MutationObserver(() => changes++).observe(document, { subtree: true, childList: true, attributes: true, characterData: true });

  function run(timer) {
    const { act } = timers.get(timer);
    window.clearTimeout(timer);
    changes++;
    act();
  }

  /** Runs the short timers that are pending, in the order in which they are due, and tells how many there were. */
  function runTimers() {
    const short = [...timers].filter(([, { isLong }]) => !isLong).sort(([, one], [, other]) => one.due - other.due);
    for (const [timer] of short) if (timers.has(timer)) run(timer);
    return short.length;
  }

  /** Resolves after the next frame, when the observers of sizes have been called, too. */
  function nextFrame() {
    return new Promise((done) => askFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = done;
      port2.postMessage(null);
    }));
  }

  const isStill = () => !frames.size && !isLeaving && !document.getAnimations().some(({ playState }) => playState === "running");

  async function settle(isWhole) {
    if (document.readyState !== "complete") await new Promise((done) => addEventListener("load", done, { once: true }));
    if (isWhole) await window.ddpProf?.ready;
    for (let quiet = 0; quiet < QUIET_FRAMES; ) {
      const before = changes;
      await nextFrame();
      const ran = runTimers();
      quiet = isStill() && !ran && before === changes ? quiet + 1 : 0;
    }
    seen = changes;
  }

  /** hasActed: whether something was done to the page; isWhole: whether a timeline must have been read to its end. */
  window.atRest = (hasActed, isWhole) => {
    if (!hasActed && seen === changes) return null;
    running ??= settle(isWhole).finally(() => (running = null));
    return running;
  };
  window.runTimers = runTimers;
})();
