// A first visitor has chosen no theme, of which the theme complains.
document.documentElement.dataset.mode ||= "auto";

// A table or a formula that scrolls sideways gets a class while there is more to its right.
document.addEventListener("DOMContentLoaded", () => {
  const scrolls = (element) => /auto|scroll/.test(getComputedStyle(element).overflowX);
  const boxes = new Set();
  const look = (box) => {
    const more = box.scrollWidth - box.clientWidth - box.scrollLeft;
    box.classList.toggle("goes-on", more > 2);
  };
  const sizes = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      let box = target.querySelector(":scope > mjx-container") ?? target;
      while (box && !scrolls(box)) box = box.parentElement;
      if (!box) continue;
      if (!boxes.has(box)) sizes.observe(box);
      boxes.add(box);
      look(box);
    }
  });
  document.querySelectorAll("article table, article div.math").forEach((wide) => sizes.observe(wide));
  const scrolled = ({ target }) => boxes.has(target) && look(target);
  document.addEventListener("scroll", scrolled, { capture: true, passive: true });
});
