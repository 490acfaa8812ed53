// The picture at the head of the chapter on coupling: drawn, and with its controls.
// The drawings are strings, so that they can also be written to files: the still images
// for browsers without JavaScript (tools/still.py).

var coupledPicture = (function () {
  "use strict";

  const colors = ["#0072b2", "#d55e00"]; // swindles.style.COLORS: plus, minus
  const grey = "#6b6b6b"; // plain
  const width = 340;
  const height = 280;
  const line = (points) => points.map((p) => p.map((v) => v.toFixed(1)).join()).join(" ");

  function svg(label, inner) {
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}"
      role="img" aria-label="${label}" font-family="sans-serif" font-size="14"
      fill="none">${inner}</svg>`;
  }

  const toPanel = ([x, y]) => [width / 2 + 36 * x, 205 - 22 * y];

  // Where the density is that of a Gaussian at so many standard deviations.
  function contour(radius) {
    const { curvature, scale } = coupledHMC;
    const points = Array.from({ length: 121 }, (_, i) => {
      const along = radius * scale * Math.cos((2 * Math.PI * i) / 120);
      const above = radius * Math.sin((2 * Math.PI * i) / 120);
      return toPanel([along, curvature * along ** 2 + above]);
    });
    return `<polygon points="${line(points)}" fill="#000" fill-opacity="0.08"/>`;
  }

  function drawChain(chain, i) {
    const points = chain.points.map(toPanel);
    const [x, y] = toPanel(chain.position);
    const steps = points.map(([u, v]) => `<circle cx="${u.toFixed(1)}"
      cy="${v.toFixed(1)}" r="1.8" fill="${colors[i]}" stroke="none"/>`);
    return `<g stroke="${colors[i]}">
      <polyline points="${line(chain.path.slice(-25).map(toPanel))}" opacity="0.35"/>
      <polyline points="${line(points)}" stroke-width="2"/>${steps.join("")}
      <circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${i ? 5 : 8}"
        fill="${i ? colors[i] : "#fff"}" stroke-width="3"/></g>`;
  }

  function drawPaths(pair) {
    const names = ["first chain", "second chain"].map(
      (name, i) => `<text x="8" y="${20 + 20 * i}" font-weight="bold"
        fill="${colors[i]}">${name}</text>`,
    );
    return svg(
      "Two chains on a banana-shaped target, with the trajectories of their last step.",
      [3, 2, 1].map(contour).join("") + pair.chains.map(drawChain).join("") +
        names.join(""),
    );
  }

  function drawDistance(pair) {
    const { kept } = coupledHMC;
    const first = Math.max(0, pair.step - kept);
    const across = (step) => 52 + (272 * (step - first)) / kept;
    const down = (power) => 32 + 13 * (1 - Math.max(-16, power));
    const ticks = [0, -4, -8, -12, -16].map((power) => `
      <path d="M52 ${down(power)}H324" stroke="${grey}" stroke-opacity="0.25"/>
      <text x="46" y="${down(power) + 5}" text-anchor="end">10<tspan dy="-6"
        font-size="11">${power ? `\u2212${-power}` : 0}</tspan></text>`);
    const steps = [0, 50, 100, 150]
      .map((past) => past + 50 * Math.ceil(first / 50))
      .filter((step) => step <= first + kept)
      .map((step) => `<text x="${across(step)}" y="274"
        text-anchor="middle">${step}</text>`);
    const points = pair.distances.map((d, i) => [across(first + i), down(Math.log10(d))]);
    const [x, y] = points[points.length - 1];
    return svg(
      "The distance between the two chains against the number of steps, on a log axis.",
      `<g fill="#000">${ticks.join("")}${steps.join("")}
        <text x="8" y="16">distance</text>
        <text x="324" y="16" text-anchor="end">steps \u2192</text></g>
      <polyline points="${line(points)}" stroke="${grey}" stroke-width="2"/>
      <circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="4" fill="${grey}"/>`,
    );
  }

  const controls = `
    <fieldset><legend>The second chain's momentum is</legend>
      <label><input type="radio" name="momentum" value="same" checked> the same</label>
      <label><input type="radio" name="momentum" value="opposite"> the opposite</label>
      <label><input type="radio" name="momentum" value="own"> its own</label>
    </fieldset>
    <label class="length">Trajectory length <output></output>
      <input type="range" min="1" max="20" value="4"></label>
    <div class="buttons"><button type="button">Step</button>
      <button type="button">Run</button><button type="button">Start again</button></div>
    <div class="drawings"></div>
    <p role="status"></p>`;

  function describe(pair) {
    const gap = pair.distances[pair.distances.length - 1];
    const stays = ["first", "second"].filter((_, i) => pair.chains[i].accepted === false);
    const who = stays.length === 2 ? "Both chains stay" : `The ${stays[0]} chain stays`;
    return `Step ${pair.step}. Distance ${gap.toPrecision(2)}.` +
      (stays.length ? ` ${who} where it was.` : "");
  }

  // Make the element a picture to play with. It runs some steps by itself when it is
  // seen first, unless the reader asks for less motion or is faster.
  function play(element) {
    element.innerHTML = controls;
    const find = (selector) => element.querySelector(selector);
    const [stepButton, runButton, againButton] = element.querySelectorAll("button");
    const slider = find("[type=range]");
    let seed = 1;
    let pair = coupledHMC.start(seed);
    let timer = null;

    function draw() {
      const length = (coupledHMC.stepSize * slider.value).toFixed(1);
      find("output").textContent = length;
      slider.setAttribute("aria-valuetext", length);
      find(".drawings").innerHTML = drawPaths(pair) + drawDistance(pair);
      find("[role=status]").textContent = describe(pair);
    }
    function step() {
      coupledHMC.step(pair, find(":checked").value, Number(slider.value));
      draw();
    }
    function run(on, last = Infinity) {
      clearInterval(timer);
      timer = on ? setInterval(() => (pair.step < last ? step() : run(false)), 150) : null;
      runButton.textContent = on ? "Pause" : "Run";
      find("[role=status]").setAttribute("aria-live", on ? "off" : "polite");
    }
    function again() {
      seed += 1;
      pair = coupledHMC.start(seed);
      draw();
    }

    const seen = new IntersectionObserver((entries) => {
      if (entries[0].isIntersecting) {
        seen.disconnect();
        run(true, 60);
      }
    });
    stepButton.onclick = () => {
      run(false);
      step();
    };
    runButton.onclick = () => run(timer === null);
    againButton.onclick = again;
    slider.oninput = draw;
    for (const event of ["pointerdown", "keydown"]) {
      element.addEventListener(event, () => seen.disconnect());
    }
    draw();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) seen.observe(find("svg"));
  }

  return { drawPaths, drawDistance, play };
})();

if (typeof document !== "undefined") {
  coupledPicture.play(document.getElementById("coupled-hmc"));
}
