// All of it, drawn, and drawn anew in another size or other colours.

byId("title").textContent = document.title;
byId("summary").textContent = [
  `${data.steps} steps`,
  `${layers.length} layers with statistics`,
  `on ${data.about.device}`,
].join(", ");
function redraw() {
  drawLosses();
  panels.forEach((panel) => panel.draw());
  drawHistogram();
  drawTime();
}
fillLosses();
fillBreaks();
setUpMaps();
fillSettings();
setUpLayer();
drawLosses();
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 60);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
