// A first visitor has chosen no theme, of which the theme complains.
document.documentElement.dataset.mode ||= "auto";

// A table that scrolls sideways gets a class while there is more to its right.
document.addEventListener("DOMContentLoaded", () => {
  const scrolls = (element) => /auto|scroll/.test(getComputedStyle(element).overflowX);
  for (const table of document.querySelectorAll("article table")) {
    let box = table.parentElement;
    while (box && !scrolls(box)) box = box.parentElement;
    if (!box) continue;
    const look = () => {
      const more = box.scrollWidth - box.clientWidth - box.scrollLeft;
      box.classList.toggle("goes-on", more > 2);
    };
    box.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(box);
  }
});
