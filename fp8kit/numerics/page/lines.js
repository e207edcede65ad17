// A picture of lines over steps.

const MARGIN = {left: 60, right: 12, top: 8, bottom: 30};
const SKIPPED = 0.03; // the first steps do not decide how high a picture is

// lines: {name, steps, values, colour, dash, width, opacity, said}; bands: {steps, low, high, colour};
// dots: {x, y, colour, name}
function lineChart(box, {lines, bands = [], dots = [], label, height, log = false, zero = false}) {
  box.replaceChildren();
  const width = Math.max(260, box.clientWidth);
  const svg = draw(box, "svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label});
  const steps = lines.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]).filter(finite);
  if (!steps.length) {
    draw(svg, "text", {x: MARGIN.left, y: height / 2}, "nothing is logged");
    return;
  }
  const from = Math.min(...steps),
    to = Math.max(...steps, from + 1);
  const usable = (v) => finite(v) && (!log || v > 0);
  const scale = log ? Math.log2 : (v) => v;
  const inside = [];
  const late = from + SKIPPED * (to - from);
  for (const line of lines)
    line.values.forEach((v, i) => {
      if (usable(v) && (line.steps[i] >= late || line.steps.length < 20)) inside.push(scale(v));
    });
  for (const dot of dots) if (usable(dot.y)) inside.push(scale(dot.y));
  for (const band of bands)
    band.steps.forEach((step, i) => {
      for (const v of [value(band.low[i]), value(band.high[i])])
        if (usable(v) && (step >= late || band.steps.length < 20)) inside.push(scale(v));
    });
  if (zero) inside.push(0);
  let low = Infinity,
    high = -Infinity;
  for (const v of inside) {
    low = Math.min(low, v);
    high = Math.max(high, v);
  }
  if (!(high >= low)) {
    low = 0;
    high = 1;
  }
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  low -= pad;
  high += pad;
  const x = (step) => MARGIN.left + ((step - from) / (to - from)) * (width - MARGIN.left - MARGIN.right);
  const y = (v) =>
    height - MARGIN.bottom - ((scale(v) - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
  const clip = `clip-${box.id}`;
  draw(draw(draw(svg, "defs"), "clipPath", {id: clip}), "rect", {
    x: MARGIN.left,
    y: MARGIN.top,
    width: width - MARGIN.left - MARGIN.right,
    height: height - MARGIN.top - MARGIN.bottom,
  });
  for (const at of ticks(low, high, log ? 4 : Math.max(3, height / 50))) {
    if (log && !Number.isInteger(at)) continue;
    const place =
      height - MARGIN.bottom - ((at - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    draw(svg, "line", {class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: place, y2: place});
    draw(svg, "text", {x: MARGIN.left - 6, y: place + 4, "text-anchor": "end"}, log ? `2^${at}` : said(at));
  }
  for (const at of ticks(from, to, width / 90)) {
    draw(svg, "text", {x: x(at), y: height - MARGIN.bottom + 16, "text-anchor": "middle"}, said(at, 7));
  }
  draw(svg, "line", {
    class: "axis",
    x1: MARGIN.left,
    x2: width - MARGIN.right,
    y1: height - MARGIN.bottom,
    y2: height - MARGIN.bottom,
  });
  draw(svg, "text", {x: width - MARGIN.right, y: height - 2, "text-anchor": "end"}, "step");
  draw(svg, "text", {x: width - MARGIN.right, y: MARGIN.top + 11, "text-anchor": "end"}, label);
  const plot = draw(svg, "g", {"clip-path": `url(#${clip})`});
  for (const band of bands) {
    const there = band.steps
      .map((_, i) => i)
      .filter((i) => usable(value(band.low[i])) && usable(value(band.high[i])));
    const edge = [
      ...there.map((i) => [band.steps[i], band.high[i]]),
      ...there.reverse().map((i) => [band.steps[i], band.low[i]]),
    ];
    if (edge.length)
      draw(plot, "polygon", {
        points: edge.map(([s, v]) => `${x(s).toFixed(1)},${y(v).toFixed(1)}`).join(" "),
        style: `fill:${band.colour}`,
        opacity: 0.18,
      });
  }
  for (const line of lines) {
    let path = "",
      pen = false;
    line.values.forEach((v, i) => {
      if (!usable(v)) {
        pen = false;
        return;
      }
      path += `${pen ? "L" : "M"}${x(line.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
      pen = true;
    });
    draw(plot, "path", {
      d: path,
      fill: "none",
      style: `stroke:${line.colour}`,
      "stroke-width": line.width || 1.7,
      opacity: line.opacity || 1,
      "stroke-dasharray": line.dash || "",
      "stroke-linejoin": "round",
    });
  }
  for (const dot of dots)
    if (usable(dot.y))
      draw(plot, "circle", {
        cx: x(dot.x),
        cy: y(dot.y),
        r: 3.5,
        style: `fill:var(--card);stroke:${dot.colour}`,
        "stroke-width": 1.8,
      });
  const cursor = draw(svg, "line", {
    class: "cursor",
    y1: MARGIN.top,
    y2: height - MARGIN.bottom,
    visibility: "hidden",
  });
  const told = lines.filter((line) => line.said !== false);
  svg.addEventListener("mousemove", (event) => {
    const place = svg.getBoundingClientRect();
    const step =
      from +
      (((event.clientX - place.left) * (width / place.width) - MARGIN.left) /
        (width - MARGIN.left - MARGIN.right)) *
        (to - from);
    if (step < from - 0.02 * (to - from) || step > to + 0.02 * (to - from)) {
      hideTip();
      return;
    }
    const found = told.map((line) => {
      const i = nearest(line.steps, step);
      return [line.name, line.steps[i], line.values[i]];
    });
    if (!found.length) return;
    const own = found[0][1];
    cursor.setAttribute("x1", x(own));
    cursor.setAttribute("x2", x(own));
    cursor.setAttribute("visibility", "visible");
    showTip(event, [`step ${own}`, ...found.slice(0, 16).map(([name, , v]) => `${name}: ${said(v)}`)]);
  });
  svg.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip();
  });
}

function nearest(steps, step) {
  let low = 0,
    high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function legend(box, entries, hidden, redraw) {
  box.replaceChildren(
    ...entries.map(({name, colour: ink, dash: dashed}) => {
      const button = make("button", {
        type: "button",
        class: hidden.has(name) ? "off" : "",
        "aria-pressed": String(!hidden.has(name)),
      });
      draw(draw(button, "svg", {viewBox: "0 0 22 8"}), "line", {
        x1: 0,
        x2: 22,
        y1: 4,
        y2: 4,
        style: `stroke:${ink}`,
        "stroke-width": 2.4,
        "stroke-dasharray": dashed || "",
      });
      button.append(name);
      button.addEventListener("click", () => {
        hidden.has(name) ? hidden.delete(name) : hidden.add(name);
        redraw();
      });
      return button;
    }),
  );
}
