// What will break first, and the settings.

const STATES = {broken: "broken", beyond: "beyond its limit", holds: "holds"};
function fillBreaks() {
  const rows = data.breaks,
    count = (state) => rows.filter((row) => row.state === state).length;
  const past = count("broken") + count("beyond"),
    moving = count("moving");
  byId("breaks-said").textContent = !rows.length
    ? "Nothing that has a limit is logged: " +
      "underflows%, overflows%, sqnr, relative_error, nan_count, inf_count."
    : past || moving
      ? `Of the ${rows.length} shown ${past} ${past === 1 ? "is" : "are"} beyond a limit and ` +
        `${moving} ${moving === 1 ? "moves" : "move"} towards one.`
      : "Nothing is beyond its limit, and nothing moves towards one. These are the nearest.";
  byId("breaks-rule").textContent = data.breaks_rule;
  if (!rows.length) return;
  byId("breaks-table").append(
    make(
      "thead",
      {},
      make("tr", {}, ...["", "layer", "tensor", "when", "why"].map((word) => make("th", {}, word))),
    ),
    make(
      "tbody",
      {},
      ...rows.map((row, i) =>
        make(
          "tr",
          {class: "clickable", onclick: () => chooseLayer(row.layer, row.tensor, row.stat)},
          make("td", {class: "number"}, String(i + 1)),
          make("td", {}, row.layer),
          make("td", {}, row.tensor),
          make(
            "td",
            {class: `state ${row.state}`},
            STATES[row.state] || `in ${said(value(row.left), 2)} steps`,
          ),
          make("td", {}, row.why),
        ),
      ),
    ),
  );
}

const plain = (thing) =>
  thing !== null && typeof thing === "object" ? JSON.stringify(thing) : String(thing);
function fillSettings() {
  const about = data.about;
  const tables = {
    model: about.model,
    settings: about.settings,
    versions: about.versions,
    run: {
      recipe: about.recipe ?? "high precision",
      published: data.source,
      device: about.device,
      "page made by": data.made_by,
    },
  };
  byId("settings-tables").append(
    ...Object.entries(tables).map(([name, entries]) =>
      make(
        "div",
        {},
        make("h3", {}, name),
        make(
          "table",
          {},
          make(
            "tbody",
            {},
            ...Object.entries(entries)
              .filter(([, v]) => v !== "")
              .map(([word, v]) => make("tr", {}, make("td", {}, word), make("td", {}, plain(v)))),
          ),
        ),
      ),
    ),
  );
  const names = {x: "activation", w: "weight", g: "gradient"};
  const rows = Object.entries(data.gemms).flatMap(([gemm, own]) =>
    Object.entries(own.operands).map(([matrix, cast]) => [
      gemm,
      names[matrix] || matrix,
      cast && cast.format ? cast.format : "as it is",
      (cast && cast.granularity) || "",
      (cast && cast.scale) || "",
      own.compute,
    ]),
  );
  if (rows.length)
    byId("gemms").append(
      make("h3", {}, "casts of the recipe"),
      make(
        "table",
        {},
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...["GEMM", "operand", "format", "granularity", "scale", "computed"].map((word) =>
              make("th", {}, word),
            ),
          ),
        ),
        make(
          "tbody",
          {},
          ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, String(cell))))),
        ),
      ),
    );
  byId("rules").append(...data.rules.map((rule) => make("li", {}, rule)));
}
