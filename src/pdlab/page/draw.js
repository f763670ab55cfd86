// Draws every plot in the colours of the scheme that is preferred, and again when that changes.
(() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { responsive: true, displayModeBar: false };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function trace(given) {
    const own = colour(`--${given.meta}`);
    const painted = { ...given, textfont: { color: colour("--text"), size: 13 } };
    if (given.mode === "lines") return { ...painted, line: { ...given.line, color: own } };
    painted.marker = { ...given.marker, color: own };
    if (given.marker.pattern) {
      painted.marker.pattern = { ...given.marker.pattern, fgcolor: colour("--card"), fgopacity: 1 };
    }
    if (given.error_x) painted.error_x = { ...given.error_x, color: own };
    return painted;
  }

  function layout(given) {
    const font = { family: "system-ui, sans-serif", size: 14, color: colour("--text") };
    const clear = "rgba(0, 0, 0, 0)";
    const painted = { ...given, font, paper_bgcolor: clear, plot_bgcolor: clear };
    const hover = { bgcolor: colour("--card"), bordercolor: colour("--line"), font };
    painted.hoverlabel = hover;
    for (const [name, axis] of Object.entries(given)) {
      if (/^[xy]axis/.test(name)) {
        const grid = { gridcolor: colour("--line"), zerolinecolor: colour("--line") };
        painted[name] = { ...axis, ...grid, linecolor: colour("--muted") };
        if (axis.title) painted[name].title = { ...axis.title, font: { ...font, size: 14 } };
      }
    }
    painted.shapes = (given.shapes || []).map((shape) => (
      { ...shape, line: { ...shape.line, color: colour("--muted") } }
    ));
    return painted;
  }

  async function draw() {
    for (const source of document.querySelectorAll("script[data-for]")) {
      const figure = JSON.parse(source.textContent);
      const place = document.getElementById(source.dataset.for);
      await Plotly.react(place, figure.data.map(trace), layout(figure.layout), config);
    }
    document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
  }

  dark.addEventListener("change", draw);
  draw();
})();
