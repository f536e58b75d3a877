"use strict";
// The step that is shown, which the address carries: #step=3.
(() => {
  const menu = document.getElementById("steps"), figure = document.getElementById("collectives");
  if (!menu) return;
  const links = [...document.querySelectorAll("a[data-keeps-step]")].map((link) => [link, link.getAttribute("href")]);
  function show() {
    figure.dataset.shows = `step-${menu.value}`;
    for (const [link, page] of links) link.setAttribute("href", `${page}#step=${menu.value}`);
    draw();
  }
  function follow() {
    const asked = new URLSearchParams(location.hash.slice(1)).get("step");
    if ([...menu.options].some(({ value }) => value === asked)) menu.value = asked;
    show();
  }
  menu.addEventListener("change", () => {
    history.replaceState(null, "", `#step=${menu.value}`);
    show();
  });
  addEventListener("hashchange", follow);
  follow();
})();
