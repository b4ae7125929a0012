// Draws the embedded series again, with a cursor and the reader's controls.
"use strict";
(() => {
  const { charts, geometry } = JSON.parse(document.getElementById("series").textContent);
  const { WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, STYLES } = geometry, TICKS = 5;
  const form = document.querySelector(".controls");

  // Longer numbers than 99999 would be cut at the edge of a chart.
  function short(value) {
    const power = Math.abs(value) < 1e5 ? 0 : Math.min(6, Math.floor(Math.log10(Math.abs(value)) / 3));
    return Number((value / 1000 ** power).toPrecision(5)) + ["", "k", "M", "G", "T", "P", "E"][power];
  }

  function element(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function settings(chart) {
    const first = Object.keys(chart.axes)[0];
    if (!chart.controls || !form) return { axis: first, smoothing: 0, logX: false, logY: false };
    const chosen = form.elements.axis ? form.elements.axis.value : first;
    return {
      axis: chosen in chart.axes ? chosen : first,
      smoothing: Number(form.elements.smoothing.value),
      logX: form.elements.log_x.checked,
      logY: form.elements.log_y.checked,
    };
  }

  // Exponential moving average, without the bias towards its start (Kingma and Ba 2015, section 3).
  function smoothed(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  // Points [x, y, value before smoothing] that the scales can show: a logarithm needs positive numbers.
  function pointsOf(line, chart, chosen) {
    const first = Object.keys(chart.axes)[0];
    const x = line[chosen.axis] || line[first].map((value) => value * line.factors[chosen.axis]);
    const y = chosen.smoothing ? smoothed(line.value, chosen.smoothing) : line.value;
    return x.map((value, place) => [value, y[place], line.value[place]])
      .filter(([left, height]) => (!chosen.logX || left > 0) && (!chosen.logY || height > 0));
  }

  function scale(values, isLog, begin, end) {
    const at = isLog ? Math.log10 : (value) => value;
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      low = Math.min(low, at(value));
      high = Math.max(high, at(value));
    }
    const half = Math.max(0.5, Math.abs(low) * 1e-3);
    if (!(high > low)) [low, high] = [low - half, high + half];
    const place = (value) => begin + (at(value) - low) / (high - low) * (end - begin);
    return { place, ticks: isLog ? logTicks(low, high) : roundValues(low, high) };
  }

  function roundValues(low, high) {
    const raw = (high - low) / TICKS, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
    const found = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
      found.push(number * step);
    }
    return found;
  }

  function logTicks(low, high) {
    if (high - low < 1) return roundValues(10 ** low, 10 ** high).filter((value) => value > 0);
    const stride = Math.ceil((high - low) / TICKS), found = [];
    for (let power = Math.ceil(low); power <= high; power += stride) found.push(10 ** power);
    return found;
  }

  function draw(chart, number) {
    const svg = document.getElementById(`chart-${number}`);
    if (!svg) return;
    const chosen = settings(chart);
    const lines = chart.lines.map((line) => pointsOf(line, chart, chosen));
    const all = lines.flat();
    svg.replaceChildren();
    svg.points = all.length ? lines : null;
    if (!all.length) {
      svg.append(element("text", { x: LEFT, y: HEIGHT / 2 }, "no positive numbers to draw"));
      return;
    }
    const across = scale(all.map((point) => point[0]), chosen.logX, LEFT, WIDTH - RIGHT);
    const down = scale(all.map((point) => point[1]), chosen.logY, HEIGHT - BOTTOM, TOP);
    for (const value of down.ticks) {
      const y = down.place(value);
      svg.append(element("path", { class: "grid", d: `M${LEFT} ${y}H${WIDTH - RIGHT}` }));
      svg.append(element("text", { class: "y", x: LEFT - 6, y: y + 4 }, short(value)));
    }
    for (const value of across.ticks) {
      svg.append(element("text", { class: "x", x: across.place(value), y: HEIGHT - BOTTOM + 15 }, short(value)));
    }
    lines.forEach((points, place) => {
      const number = chart.lines[place].style;
      const style = `line-${number % STYLES} dash-${Math.floor(number / STYLES) % 3}`;
      const path = points.map(([x, y]) => `${across.place(x).toFixed(1)},${down.place(y).toFixed(1)}`);
      svg.append(element("polyline", { class: style, points: path.join(" ") }));
      if (points.length > 30) return;
      for (const [x, y] of points) {
        svg.append(element("circle", { class: style, cx: across.place(x), cy: down.place(y), r: 2.5 }));
      }
    });
    const middle = (LEFT + WIDTH - RIGHT) / 2;
    svg.append(element("text", { class: "label", x: middle, y: HEIGHT - 4 }, chart.axes[chosen.axis]));
    svg.across = across;
    svg.steps = [...new Set(all.map((point) => point[0]))].sort((one, other) => one - other);
  }

  // Shows the point of each line that is nearest to x.
  function show(chart, number, x) {
    const svg = document.getElementById(`chart-${number}`);
    svg.querySelectorAll(".cursor").forEach((old) => old.remove());
    const at = svg.across.place(x);
    svg.append(element("path", { class: "cursor", d: `M${at} ${TOP}V${HEIGHT - BOTTOM}` }));
    const values = svg.points.map((points, place) => {
      if (!points.length) return "";
      const near = points.reduce((one, other) => Math.abs(other[0] - x) < Math.abs(one[0] - x) ? other : one);
      const raw = near[1] === near[2] ? "" : ` (${short(near[2])})`;
      return `${chart.lines[place].name} ${short(near[1])}${raw} at ${short(near[0])}`;
    });
    document.getElementById(`readout-${number}`).textContent = values.filter(Boolean).join(" · ");
  }

  function nearest(svg, x) {
    const distance = (value) => Math.abs(svg.across.place(value) - x);
    return svg.steps.reduce((one, other) => distance(other) < distance(one) ? other : one);
  }

  charts.forEach((chart, number) => {
    const svg = document.getElementById(`chart-${number}`);
    if (!svg) return;
    draw(chart, number);
    let place = 0;
    svg.addEventListener("pointermove", (event) => {
      if (!svg.points) return;
      const box = svg.getBoundingClientRect();
      const x = nearest(svg, (event.clientX - box.left) / box.width * WIDTH);
      place = svg.steps.indexOf(x);
      show(chart, number, x);
    });
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!svg.points || !(event.key in moves)) return;
      event.preventDefault();
      place = Math.max(0, Math.min(svg.steps.length - 1, place + moves[event.key]));
      show(chart, number, svg.steps[place]);
    });
  });

  if (form) {
    form.hidden = false;
    form.addEventListener("input", () => charts.forEach((chart, number) => chart.controls && draw(chart, number)));
    form.addEventListener("submit", (event) => event.preventDefault());
  }
})();
