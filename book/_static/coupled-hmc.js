// Two Hamiltonian Monte Carlo chains on a banana: the numbers of the picture at the head
// of the chapter on coupling. coupled-hmc-page.js puts them on the page; a test compares
// them with BlackJAX.

var coupledHMC = (function () {
  "use strict";

  const curvature = 0.5; // those of swindles.targets.banana()
  const scale = 1.5;
  const stepSize = 0.3;

  function logdensity([along, across]) {
    return -0.5 * ((along / scale) ** 2 + (across - curvature * along ** 2) ** 2);
  }

  function gradient([along, across]) {
    const above = across - curvature * along ** 2;
    return [-along / scale ** 2 + 2 * curvature * along * above, -above];
  }

  const plus = (x, size, y) => x.map((value, i) => value + size * y[i]);
  const energy = (x, p) => 0.5 * (p[0] ** 2 + p[1] ** 2) - logdensity(x);

  // The points of a trajectory, and the momentum at its end.
  function leapfrog(start, momentum, steps) {
    const points = [start];
    let x = start;
    let p = momentum;
    for (let i = 0; i < steps; i++) {
      p = plus(p, stepSize / 2, gradient(x));
      x = plus(x, stepSize, p);
      p = plus(p, stepSize / 2, gradient(x));
      points.push(x);
    }
    return { points, momentum: p };
  }

  // One step of HMC: go along a trajectory, then accept its end or stay.
  function move(position, momentum, uniform, steps) {
    const { points, momentum: last } = leapfrog(position, momentum, steps);
    const end = points[steps];
    const gained = energy(position, momentum) - energy(end, last);
    const probability = Math.min(1, Math.exp(gained)) || 0; // NaN: it flew away
    const accepted = uniform < probability;
    return { position: accepted ? end : position, points, probability, accepted };
  }

  // Uniform and normal numbers from a seed: mulberry32, and Box and Muller.
  function generator(seed) {
    let state = seed | 0;
    function uniform() {
      state = (state + 0x6d2b79f5) | 0;
      let bits = Math.imul(state ^ (state >>> 15), 1 | state);
      bits = (bits + Math.imul(bits ^ (bits >>> 7), 61 | bits)) ^ bits;
      return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
    }
    function normals() {
      const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
      const angle = 2 * Math.PI * uniform();
      return [radius * Math.cos(angle), radius * Math.sin(angle)];
    }
    return { uniform, normals };
  }

  const distance = (x, y) => Math.hypot(x[0] - y[0], x[1] - y[1]);
  const kept = 150; // steps that the picture shows

  // Two chains far apart.
  function start(seed) {
    const first = [-2, 2.5];
    const second = [2, -1];
    return {
      random: generator(seed),
      step: 0,
      chains: [first, second].map((x) => ({ position: x, path: [x], points: [x] })),
      distances: [distance(first, second)],
    };
  }

  // One step of both; how: "same", "opposite" or "own" momenta. The first chain is the
  // same whatever the second does: as many numbers are drawn.
  function step(pair, how, steps) {
    const { uniform, normals } = pair.random;
    const shared = { momentum: normals(), uniform: uniform() };
    const own = { momentum: normals(), uniform: uniform() };
    const sign = how === "opposite" ? -1 : 1;
    const second = how === "own" ? own : shared;
    const momenta = [shared.momentum, second.momentum.map((p) => sign * p)];
    const uniforms = [shared.uniform, second.uniform];
    pair.chains.forEach((chain, i) => {
      const moved = move(chain.position, momenta[i], uniforms[i], steps);
      chain.path = [...chain.path, moved.position].slice(-kept);
      Object.assign(chain, moved);
    });
    const [first, other] = pair.chains.map((chain) => chain.position);
    pair.distances = [...pair.distances, distance(first, other)].slice(-kept - 1);
    pair.step += 1;
  }

  return { curvature, scale, stepSize, kept, leapfrog, move, generator, start, step };
})();
