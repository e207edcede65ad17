// One layer: its histograms, and its statistics over steps.

const hiddenTensors = new Set();
const layers = [
  ...new Set([
    ...data.maps.flatMap((map) => map.layers),
    ...data.histograms.entries.map((entry) => entry.layer),
  ]),
];

function entriesOf(layer) {
  return data.histograms.entries.filter((entry) => entry.layer === layer);
}
const entryKey = (entry) => `${entry.tensor} ${entry.stat}`;

function fillHistograms(wanted) {
  const own = entriesOf(byId("layer").value);
  options(
    byId("histogram"),
    own.map((entry) => [entryKey(entry), entryKey(entry)]),
    wanted,
  );
  fillSteps();
}

function fillSteps(step = null) {
  const entry = currentEntry(),
    slider = byId("step");
  const last = entry ? entry.times.length - 1 : 0;
  slider.max = last;
  slider.disabled = last === 0;
  slider.value =
    step === null || !entry
      ? last
      : nearest(
          entry.times.map((time) => time.step),
          step,
        );
  drawHistogram();
}

const currentEntry = () =>
  entriesOf(byId("layer").value).find((entry) => entryKey(entry) === byId("histogram").value);

const FLOOR = -4; // log10 of the least share that is drawn, in %
function drawHistogram() {
  const box = byId("histogram-chart"),
    note = byId("histogram-said"),
    entry = currentEntry(),
    height = 300;
  box.replaceChildren();
  note.textContent = "";
  byId("step-said").textContent = "";
  const width = Math.max(260, box.clientWidth);
  const svg = draw(box, "svg", {
    viewBox: `0 0 ${width} ${height}`,
    height,
    role: "img",
    "aria-label": "histogram of exponents",
  });
  if (!entry) {
    draw(svg, "text", {x: 20, y: 40}, "no histogram of this layer is logged");
    return;
  }
  const time = entry.times[Number(byId("step").value)];
  byId("step-said").textContent = String(time.step);
  const range = time.ranges ? value(time.ranges[byId("range").value] || null) : null;
  // the same axis at all steps
  let low = Infinity,
    high = -Infinity;
  for (const each of entry.times) {
    if (each.shares.length) {
      low = Math.min(low, each.first - 127);
      high = Math.max(high, each.first + each.shares.length - 127);
    }
    const own = each.ranges && each.ranges[byId("range").value];
    if (own) {
      low = Math.min(low, Math.floor(own[1]));
      high = Math.max(high, Math.ceil(own[2]));
    }
  }
  if (!(high > low)) {
    low = -8;
    high = 8;
  }
  low -= 3;
  high += 1; // the zeros stand at the left
  const x = (e) => MARGIN.left + ((e - low) / (high - low)) * (width - MARGIN.left - MARGIN.right);
  const bottom = height - MARGIN.bottom,
    top = MARGIN.top + 30;
  const y = (share) => bottom - ((Math.max(Math.log10(share), FLOOR) - FLOOR) / (2 - FLOOR)) * (bottom - top);
  for (let power = FLOOR; power <= 2; power++) {
    const place = y(10 ** power);
    draw(svg, "line", {class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: place, y2: place});
    draw(svg, "text", {x: MARGIN.left - 6, y: place + 4, "text-anchor": "end"}, `${10 ** power} %`);
  }
  for (const e of ticks(low + 2, high, width / 70))
    if (Number.isInteger(e)) draw(svg, "text", {x: x(e), y: bottom + 16, "text-anchor": "middle"}, `2^${e}`);
  draw(
    svg,
    "text",
    {x: width - MARGIN.right, y: height - 2, "text-anchor": "end"},
    entry.kind === "scales" ? "scale" : "magnitude",
  );
  draw(svg, "line", {class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom});
  let below = 0,
    above = 0;
  const bar = (from, share, words, fill) => {
    if (!(share > 0)) return;
    const rect = draw(svg, "rect", {
      x: x(from) + 0.5,
      y: y(share),
      width: Math.max(1, x(from + 1) - x(from) - 1),
      height: Math.max(1, bottom - y(share)),
      style: `fill:${fill}`,
    });
    rect.addEventListener("mousemove", (event) =>
      showTip(event, [words, `${said(share, 3)} % of the elements`]),
    );
    rect.addEventListener("mouseleave", hideTip);
  };
  time.shares.forEach((share, i) => {
    const e = time.first - 127 + i;
    const out = range && (e + 1 <= range[1] ? "below" : e >= range[2] ? "above" : "");
    if (out === "below") below += share;
    if (out === "above") above += share;
    bar(
      e,
      share,
      e === -127 ? "subnormal numbers" : e === 128 ? "Inf and NaN" : `2^${e} to 2^${e + 1}`,
      out ? "var(--s1)" : "var(--s2)",
    );
  });
  bar(low + 0.5, time.zeros, "zeros", "var(--s0)");
  if (time.zeros > 0) draw(svg, "text", {x: x(low + 1), y: bottom + 16, "text-anchor": "middle"}, "0");
  if (range) {
    [
      [range[1], "smallest", "start"],
      [range[2], "largest", "end"],
    ].forEach(([at, word]) => {
      draw(svg, "line", {
        class: "format-range",
        x1: x(at),
        x2: x(at),
        y1: top - 12,
        y2: bottom,
        style: "stroke:var(--bad)",
        "stroke-width": 1.8,
      });
      draw(svg, "text", {x: x(at), y: top - 17, "text-anchor": "middle", style: "fill:var(--bad)"}, word);
    });
    const how = {
      logged: "at the logged scale",
      amax: "at the scale of the logged amax",
      histogram: "at the scale of the largest exponent",
    }[range[3]];
    note.textContent =
      `The lines are ${range[0]}'s smallest and largest magnitude ${how}: ${said(2 ** range[1], 3)} and ` +
      `${said(2 ** range[2], 3)}. ${said(below, 3)} % of the elements lie wholly below (orange), ` +
      `${said(above, 3)} % above, ${said(time.zeros, 3)} % are 0.`;
  } else {
    note.textContent =
      entry.kind === "exponents"
        ? "No published recipe says which format this tensor has, so that no range is drawn."
        : "Scales of the blocks, by their exponent.";
  }
}

function drawTime() {
  const layer = byId("layer").value,
    stat = byId("stat").value;
  const maps = data.maps.filter((map) => key(map) === stat && map.layers.includes(layer));
  const tensors = [...new Set(data.maps.map((map) => map.tensor))];
  const style = (name) => ({colour: colour(tensors.indexOf(name) + 1)});
  legend(
    byId("time-legend"),
    maps.map((map) => ({name: map.tensor, ...style(map.tensor)})),
    hiddenTensors,
    drawTime,
  );
  const lines = maps
    .filter((map) => !hiddenTensors.has(map.tensor))
    .map((map) => {
      const row = map.rows[map.layers.indexOf(layer)].map(value),
        there = row.map((_, i) => i).filter((i) => row[i] !== null);
      return {
        name: map.tensor,
        steps: there.map((i) => map.to[i]),
        values: there.map((i) => row[i]),
        ...style(map.tensor),
      };
    });
  const name = stat.split("|")[0];
  lineChart(byId("time-chart"), {
    lines,
    label: stat ? title(name) : "",
    height: 276,
    log: isLog(name),
    zero: isShare(name),
  });
}

function chooseLayer(layer, tensor, stat, step = null) {
  byId("layer").value = layer;
  const own = entriesOf(layer).find((entry) => entry.tensor === tensor && entry.kind === "exponents");
  fillHistograms(own ? entryKey(own) : byId("histogram").value);
  fillSteps(step);
  const map = data.maps.find((each) => each.stat === stat && each.tensor === tensor);
  if (map) byId("stat").value = key(map);
  drawTime();
  byId("exponents").scrollIntoView();
}

function setUpLayer() {
  options(
    byId("layer"),
    layers.map((name) => [name, name]),
    layers[0],
  );
  options(
    byId("range"),
    data.histograms.recipes.map((name) => [name, name]),
    data.about.recipe,
  );
  byId("range").disabled = !data.histograms.recipes.length;
  const stats = new Map(
    data.maps.map((map) => [key(map), title(map.stat) + (map.gemm ? ` (${map.gemm})` : "")]),
  );
  options(
    byId("stat"),
    [...stats],
    data.panels.find((name) => stats.has(name)),
  );
  byId("layer").addEventListener("change", () => {
    fillHistograms(byId("histogram").value);
    drawTime();
  });
  byId("histogram").addEventListener("change", () =>
    fillSteps(Number(byId("step-said").textContent) || null),
  );
  byId("range").addEventListener("change", drawHistogram);
  byId("step").addEventListener("input", drawHistogram);
  byId("stat").addEventListener("change", drawTime);
  fillHistograms(null);
  drawTime();
}
