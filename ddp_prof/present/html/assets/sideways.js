// What is wider than its place on the page is marked, so that a narrow page says that one can scroll there (page.css).
const PLACES = ".scroll, .wide:has(.sortable), .below";

const sizes = new ResizeObserver((changed) => {
  for (const place of new Set(changed.map(({ target }) => target.closest(PLACES)))) {
    place?.classList.toggle("sideways", place.scrollWidth > place.clientWidth);
  }
});
for (const place of document.querySelectorAll(PLACES)) {
  for (const part of [place, ...place.children]) sizes.observe(part);
}
