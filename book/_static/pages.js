// A first visitor has chosen no theme, of which the theme complains.
document.documentElement.dataset.mode ||= "auto";

// A box that scrolls sideways gets a class while there is more to its right.
document.addEventListener("DOMContentLoaded", () => {
  const boxes = new Set(
    [...document.querySelectorAll("table")].flatMap((table) =>
      table.closest(".pst-scrollable-table-container, .cell_output .output > div") || []),
  );
  for (const box of boxes) {
    const look = () => {
      const more = box.scrollWidth - box.clientWidth - box.scrollLeft;
      box.classList.toggle("goes-on", more > 2);
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
  }
});
