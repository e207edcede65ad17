// The loss curves, their gaps and their table.

const hiddenLosses = new Set();
function drawLosses() {
  const {groups, reference} = data.losses;
  // the reference is grey, the others have the colours
  const others = groups.filter((group) => group.name !== reference).map((group) => group.name);
  const ink = (name) => (name === reference ? 0 : others.indexOf(name) + 1);
  const shown = groups.filter((group) => !hiddenLosses.has(group.name));
  const styled = (name) => ({colour: colour(ink(name)), dash: dash(ink(name))});
  legend(
    byId("loss-legend"),
    groups.map((group) => ({name: group.name, ...styled(group.name)})),
    hiddenLosses,
    drawLosses,
  );
  const lines = [],
    bands = [],
    dots = [],
    gaps = [],
    gapBands = [];
  for (const group of shown) {
    const style = styled(group.name);
    for (const seed of group.seeds)
      lines.push({
        name: seed.name,
        steps: seed.steps,
        values: seed.values.map(value),
        colour: style.colour,
        width: 0.7,
        opacity: 0.28,
        said: false,
      });
    if (group.low) bands.push({steps: group.steps, low: group.low, high: group.high, colour: style.colour});
    lines.push({name: group.name, steps: group.steps, values: group.mean.map(value), ...style});
    for (const own of group.validation)
      for (const [step, loss] of own.points)
        dots.push({x: step, y: value(loss), colour: style.colour, name: own.name});
    if (group.name !== reference)
      gaps.push({name: group.name, steps: group.gap.steps, values: group.gap.mean.map(value), ...style});
    if (group.gap.low)
      gapBands.push({steps: group.gap.steps, low: group.gap.low, high: group.gap.high, colour: style.colour});
  }
  lineChart(byId("loss-chart"), {
    lines,
    bands,
    dots,
    label: dots.length ? "training loss; circles: validation loss" : "training loss",
    height: 272,
  });
  lineChart(byId("gap-chart"), {
    lines: gaps,
    bands: gapBands,
    label: reference === null ? "gap" : `gap to ${reference}, %`,
    height: 170,
    zero: true,
  });
}

function fillLosses() {
  const {table, reference} = data.losses;
  if (!table.length) {
    byId("loss-table").append(make("tr", {}, make("td", {}, "No losses are logged.")));
    return;
  }
  const head = ["", "seeds", "final loss", "spread", "gap, %", "gap / spread", "validation"];
  byId("loss-table").append(
    make("thead", {}, make("tr", {}, ...head.map((word, i) => make("th", {class: i ? "number" : ""}, word)))),
    make(
      "tbody",
      {},
      ...table.map((row) =>
        make(
          "tr",
          {},
          make("td", {}, row.name + (row.name === reference ? ", the reference" : "")),
          ...[
            String(row.seeds),
            said(row.final),
            said(row.spread, 2),
            said(row.gap, 3),
            said(row.gap_in_spreads, 3),
            said(row.validation),
          ].map((text) => make("td", {class: "number"}, text)),
        ),
      ),
    ),
  );
  const broken = table
    .filter((row) => row.diverged !== null)
    .map((row) => `${row.name}: the loss is not finite from step ${row.diverged} on.`);
  byId("loss-note").textContent = [...broken, data.rules[0]].join(" ");
}
