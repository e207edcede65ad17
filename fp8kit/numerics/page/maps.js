// Heat maps of layers over steps.

const RAMP = [
  [43, 33, 92],
  [45, 82, 138],
  [32, 130, 141],
  [60, 173, 116],
  [155, 210, 72],
  [250, 229, 60],
];
function ramp(t) {
  const at = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1),
    i = Math.min(Math.floor(at), RAMP.length - 2),
    part = at - i;
  return RAMP[i].map((v, k) => Math.round(v + part * (RAMP[i + 1][k] - v)));
}

function rangeOf(map) {
  let low = Infinity,
    high = -Infinity;
  const log = isLog(map.stat);
  for (const row of map.rows)
    for (const raw of row) {
      const v = value(raw);
      if (finite(v) && (!log || v > 0)) {
        low = Math.min(low, v);
        high = Math.max(high, v);
      }
    }
  if (!(high >= low)) return null;
  if (isShare(map.stat)) low = 0;
  const forward = log ? Math.log2 : isShare(map.stat) ? Math.sqrt : (v) => v;
  const back = log ? (v) => 2 ** v : isShare(map.stat) ? (v) => v * v : (v) => v;
  const start = forward(low),
    span = forward(high) - start;
  const place = (v) => {
    const t = span > 0 ? (forward(v) - start) / span : 0;
    return isLeast(map.stat) ? 1 - t : t;
  };
  return {low, high, middle: back(start + span / 2), place};
}

const PART = {layernorm_qkv: "qkv", layernorm_query: "query"};
const DROPPED = new Set([
  "layers",
  "blocks",
  "layer",
  "h",
  "model",
  "module",
  "decoder",
  "transformer",
  "self_attention",
  "layernorm_mlp",
  "mlp",
]);
function shortNames(names) {
  const short = names.map((name) =>
    name
      .split(".")
      .filter((word) => !DROPPED.has(word))
      .map((word) => PART[word] || word)
      .join(" "),
  );
  return new Set(short).size === names.length && short.every((name) => name) ? short : names;
}
const block = (name) => (name.match(/(?:^|\.)(\d+)(?:\.|$)/) || [null, null])[1];

const LABELS = 74,
  BOTTOM = 18;
const heat = (stat) =>
  Math.min(18, Math.max(4, Math.floor((stat.layers.length > 60 ? 420 : 264) / stat.layers.length)));

class Panel {
  constructor(index, stat) {
    this.index = index;
    this.stat = stat;
    this.select = make("select", {
      "aria-label": `statistic of panel ${index + 1}`,
      onchange: () => {
        this.stat = this.select.value;
        this.draw();
      },
    });
    this.bar = make("span", {class: "bar"});
    this.canvas = make("canvas", {id: `map-${index}`, role: "img"});
    this.canvas.addEventListener("mousemove", (event) => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => {
      hideTip();
      this.draw();
    });
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.node = make(
      "div",
      {class: "panel"},
      make("div", {class: "head"}, this.select, this.bar),
      this.canvas,
    );
  }

  fill(tensor) {
    this.maps = data.maps.filter((map) => map.tensor === tensor);
    options(
      this.select,
      this.maps.map((map) => [key(map), title(map.stat) + (map.gemm ? ` (${map.gemm})` : "")]),
      this.wanted(),
    );
    this.stat = this.select.value || this.stat;
    this.draw();
  }

  // the same statistic as before where the tensor has it, else one of its kind, of the run's recipe if that
  // is there, else another that no panel shows
  wanted() {
    const there = this.maps.map(key);
    const name = this.stat.split("|")[0];
    const alike = this.maps.filter((map) => stem(map.stat) === stem(name));
    const best = [
      alike.find((map) => key(map) === this.stat),
      alike.find((map) => map.stat === name),
      alike.find((map) => map.stat === `${data.about.recipe}_${stem(name)}`),
      alike[0],
    ].find((map) => map);
    return best ? key(best) : there[this.index % Math.max(1, there.length)];
  }

  draw(at = null) {
    const map = (this.map = this.maps.find((each) => key(each) === this.stat));
    const context = this.canvas.getContext("2d"),
      ratio = devicePixelRatio || 1,
      width = this.canvas.parentNode.clientWidth;
    if (!map || !width) return;
    const high = heat(map),
      height = high * map.layers.length + BOTTOM;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = height + "px";
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement),
      ink = (name) => style.getPropertyValue(name).trim();
    context.clearRect(0, 0, width, height);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const range = (this.range = rangeOf(map)),
      columns = map.from.length;
    const wide = (width - LABELS) / columns;
    map.rows.forEach((row, r) =>
      row.forEach((raw, c) => {
        const v = value(raw);
        let fill = ink("--hole");
        if (finite(v) && range && !(isLog(map.stat) && v <= 0))
          fill = `rgb(${ramp(range.place(v)).join(",")})`;
        else if (v !== null && Number.isNaN(v)) fill = ink("--bad");
        context.fillStyle = fill;
        const left = Math.round((LABELS + c * wide) * ratio) / ratio,
          right = Math.round((LABELS + (c + 1) * wide) * ratio) / ratio;
        context.fillRect(left, r * high, right - left, high);
      }),
    );
    context.fillStyle = ink("--soft");
    context.textBaseline = "middle";
    const names = shortNames(map.layers);
    let before = null;
    map.layers.forEach((name, r) => {
      const own = block(name),
        first = own !== before;
      before = own;
      if (first && r && own !== null) {
        context.globalAlpha = 0.5;
        context.fillRect(LABELS - 6, r * high, 6, 1);
        context.globalAlpha = 1;
      }
      if (high >= 11) label(context, names[r], r * high + high / 2);
      else if (first) label(context, own === null ? names[r] : `block ${own}`, r * high + 6);
    });
    context.textBaseline = "alphabetic";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const c = Math.min(columns - 1, Math.floor(share * columns));
      context.textAlign = share === 0 ? "left" : share === 1 ? "right" : "center";
      context.fillText(
        (share === 0 ? "step " : "") + map.to[c],
        LABELS + share * (width - LABELS),
        height - 4,
      );
    }
    if (at) {
      context.strokeStyle = ink("--text");
      context.lineWidth = 1.5;
      context.strokeRect(LABELS, at.r * high, width - LABELS, high);
    }
    const means = range ? [range.low, range.middle, range.high] : null;
    this.bar.replaceChildren(
      ...(means ? [said(means[0], 3), gradient(isLeast(map.stat)), said(means[2], 3)] : ["no finite value"]),
    );
    if (range) this.bar.title = `middle of the colours: ${said(range.middle, 3)}`;
    this.canvas.setAttribute(
      "aria-label",
      `${map.tensor}: ${title(map.stat)}, ${map.layers.length} layers, ${columns} columns of steps`,
    );
  }

  cell(event) {
    const map = this.map,
      box = this.canvas.getBoundingClientRect();
    if (!map) return null;
    const r = Math.floor((event.clientY - box.top) / heat(map));
    const c = Math.floor(((event.clientX - box.left - LABELS) / (box.width - LABELS)) * map.from.length);
    return r >= 0 && r < map.layers.length && c < map.from.length ? {r, c: Math.max(0, c)} : null;
  }

  hover(event) {
    const at = this.cell(event),
      map = this.map;
    if (!at) {
      hideTip();
      return;
    }
    if (!this.last || this.last.r !== at.r) this.draw(at);
    this.last = at;
    const from = map.from[at.c],
      to = map.to[at.c],
      when = from === to ? `step ${from}` : `steps ${from} to ${to}`;
    showTip(event, [
      map.layers[at.r],
      `${map.tensor}${map.gemm ? ", " + map.gemm : ""}, ${when}`,
      `${title(map.stat)}: ${said(map.rows[at.r][at.c])}`,
    ]);
  }

  click(event) {
    const at = this.cell(event),
      map = this.map;
    if (at) chooseLayer(map.layers[at.r], map.tensor, map.stat, map.to[at.c]);
  }
}

function label(context, text, at) {
  context.textAlign = "right";
  let shown = text;
  const fits = () => shown.length <= 3 || context.measureText(shown).width <= LABELS - 10;
  while (!fits()) shown = shown.slice(0, -2) + "…";
  context.fillText(shown, LABELS - 8, at);
}

const key = (map) => (map.gemm ? `${map.stat}|${map.gemm}` : map.stat);

function gradient(reversed) {
  const stops = RAMP.map((rgb) => `rgb(${rgb.join(",")})`);
  return make("i", {
    style: `background:linear-gradient(to right,${(reversed ? stops.reverse() : stops).join(",")})`,
  });
}

let panels = [];
function setUpMaps() {
  const tensors = [...new Set(data.maps.map((map) => map.tensor))];
  options(
    byId("tensor"),
    tensors.map((name) => [name, name]),
    tensors[0],
  );
  if (!tensors.length) {
    byId("panels").append(make("p", {class: "note"}, "No statistics are logged."));
    return;
  }
  panels = data.panels.map((stat, i) => new Panel(i, stat));
  byId("panels").append(...panels.map((panel) => panel.node));
  const fill = () => panels.forEach((panel) => panel.fill(byId("tensor").value));
  byId("tensor").addEventListener("change", fill);
  fill();
}
