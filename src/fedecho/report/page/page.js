"use strict";
(() => {
  const root = document.documentElement;
  const narrow = () => window.innerWidth < 600;
  let figures = JSON.parse(document.getElementById("report").textContent);

  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  setTheme(preferred.matches);

  const ink = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function styled(layout, bars) {
    const axis = { gridcolor: ink("--grid"), linecolor: ink("--line"), zerolinecolor: ink("--grid"), tickcolor: ink("--line") };
    return {
      ...layout,
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "inherit", size: narrow() ? 11 : 12, color: ink("--ink") },
      margin: { l: 50, r: 12, t: 8, b: 40 },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom", ...(layout.legend || {}) },
      hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("--soft"), activecolor: ink("--accent") },
      dragmode: narrow() ? false : "zoom", bargap: 0.2, uirevision: "kept",
    };
  }

  function named(low, high) { const range = high === null ? `${low}+` : low === high ? `${low}` : `${low}–${high}`; return `staleness ${range}`; }

  function spanTraces(spans) {
    const kinds = spans.bins.map(([low, high, color]) => ({ name: named(low, high), color, dash: "solid", fits: (s, k) => s === "accepted" && k >= low && (high === null || k <= high) }));
    kinds.push({ name: "lost", color: "#888888", dash: "dot", end: "x", fits: (s) => s === "lost" });
    kinds.push({ name: "rejected", color: "#d00000", dash: "solid", end: "x", fits: (s) => s === "rejected" });
    kinds.push({ name: "in progress", color: "#7f9fc8", dash: "dot", fits: (s) => s === "in progress" });
    return kinds.map((kind) => spanTrace(spans, kind)).filter((trace) => trace.x.length);
  }

  function spanTrace(spans, kind) {
    const trace = { type: "scatter", mode: kind.end ? "lines+markers" : "lines", name: kind.name, x: [], y: [], text: [],
      line: { color: kind.color, width: 6, dash: kind.dash }, hovertemplate: "%{text}<extra></extra>" };
    const symbols = [];
    spans.row.forEach((row, i) => {
      if (!kind.fits(spans.status[i], spans.staleness[i])) { return; }
      const [start, end] = [spans.start[i], spans.end[i]];
      const staleness = spans.status[i] === "in progress" ? "" : `, staleness ${spans.staleness[i]}`;
      const text = `${spans.rows[row]}: ${spans.status[i]}<br>from version ${spans.base[i]}${staleness}<br>${start.toPrecision(4)} to ${end.toPrecision(4)}`;
      trace.x.push(start, (start + end) / 2, end, null);
      trace.y.push(row, row, row, null);
      trace.text.push(text, text, text, null);
      symbols.push(0, 0, 9, 0);
    });
    if (kind.end) {
      trace.line.width = 2;
      trace.marker = { symbol: kind.end, size: symbols, color: kind.color };
    }
    return trace;
  }

  /* Breaks a long method name between its settings, and within a setting only if that is too long itself. */
  function wrapped(label, most) {
    const lines = [""];
    const settings = label.split(/(?<=,) | (?=\()/).flatMap((part) => (part.length > most ? part.split(" ") : [part]));
    for (const word of settings) {
      const longer = lines[lines.length - 1] ? `${lines[lines.length - 1]} ${word}` : word;
      if (longer.length > most && lines[lines.length - 1]) { lines.push(word); } else { lines[lines.length - 1] = longer; }
    }
    return lines.join("<br>");
  }

  /* The height at which row labels of several lines do not overlap; 0 if all have one line. */
  function tallEnough(labels) {
    const lines = Math.max(...labels.map((label) => label.split("<br>").length));
    return lines === 1 ? 0 : 140 + labels.length * (17 * lines + 6);
  }

  /* The number of rows of the legend, for which space is added above the plot. */
  function legendRows(names, width) {
    const lines = (name) => name.split("<br>");
    const widest = 58 + 7 * Math.max(...names.flatMap((name) => lines(name).map((line) => line.length)));
    const columns = Math.max(1, Math.floor((width - 62) / widest));
    return Math.ceil(names.length / columns) * Math.max(...names.map((name) => lines(name).length));
  }

  function prepared(figure, place) {
    let { traces, layout } = figure;
    const width = place.clientWidth || 370;
    if (figure.spans.length) {
      const spans = figure.spans[0];
      traces = spanTraces(spans);
      layout = { ...layout, yaxis: { ...layout.yaxis, tickvals: spans.rows.map((_, i) => i), ticktext: spans.rows, range: [spans.rows.length - 0.4, -0.6], autorange: false } };
    }
    const sideBar = traces.some((trace) => trace.type === "heatmap");
    if (sideBar && narrow()) {
      traces = traces.map((trace) => ({ ...trace, texttemplate: undefined, colorbar: { ...trace.colorbar, title: { text: "" }, thickness: 8 } })); }
    if (sideBar) {
      const labels = traces[0].y.map((label) => wrapped(String(label), narrow() ? 17 : 34));
      const height = Math.max(layout.height, tallEnough(labels));
      layout = { ...layout, height, yaxis: { ...layout.yaxis, tickvals: traces[0].y, ticktext: labels } };
    }
    if (layout.barmode === "stack" && traces[0].x.join().length > 48) {
      /* Bars with long names are horizontal, so that the names are readable. */
      const labels = traces[0].x;
      const ticktext = labels.map((label) => wrapped(label, 20));
      const named = { type: "category", autorange: "reversed", automargin: true, tickvals: labels, ticktext };
      layout = { ...layout, height: Math.max(layout.height, tallEnough(ticktext)), xaxis: { ...layout.yaxis }, yaxis: named };
      traces = traces.map((trace) => ({ ...trace, x: trace.y, y: trace.x, orientation: "h", hovertemplate: "%{y}: %{x:.4~g}" }));
    }
    traces = traces.map((trace) => (trace.name ? { ...trace, name: wrapped(trace.name, Math.floor((width - 110) / 7)) } : trace));
    const named = traces.filter((trace) => trace.name && trace.showlegend !== false);
    const showlegend = named.length > 0 && !sideBar;
    const rows = showlegend && named.length > 1 ? legendRows(named.map((trace) => trace.name), width) : 1;
    const more = 19 * Math.max(rows - 2, 0);
    place.style.height = `${layout.height + more}px`;
    return [traces, styled({ ...layout, height: layout.height + more, showlegend, legend: { maxheight: 24 * rows + 20 } }, sideBar)];
  }

  /* An explicit list, because the default has a button that uploads the chart to plotly. */
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover", showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  async function draw() {
    let drawn = 0;
    for (const figure of figures) {
      const place = document.getElementById(figure.slug);
      if (place) {
        const [traces, layout] = prepared(figure, place);
        await Plotly.react(place, traces, layout, { ...config, toImageButtonOptions: { format: "svg", filename: figure.slug } });
        drawn += 1;
      }
    }
    document.body.dataset.drawn = String(drawn);
  }

  document.getElementById("theme").addEventListener("click", () => { setTheme(root.dataset.theme !== "dark"); draw(); });
  preferred.addEventListener("change", (event) => { setTheme(event.matches); draw(); });
  let before = null;
  /* Paper is white and narrow. Only colors and the width change: recomputed margins would come too late for printing. */
  window.addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    setTheme(false);
    const [line, grid] = [ink("--line"), ink("--grid")];
    const colors = { "font.color": ink("--ink"), "xaxis.gridcolor": grid, "yaxis.gridcolor": grid, "xaxis.linecolor": line, "yaxis.linecolor": line, "xaxis.zerolinecolor": grid, "yaxis.zerolinecolor": grid };
    figures.forEach((figure) => Plotly.relayout(figure.slug, { ...colors, width: 700 }));
  });
  window.addEventListener("afterprint", () => {
    setTheme(before === "dark");
    figures.forEach((figure) => Plotly.relayout(figure.slug, { width: null, autosize: true }));
    draw();
  });

  /* Polls the server of a live page. */
  let tag = null;
  async function refresh() {
    const pulse = document.getElementById("pulse");
    pulse.hidden = false;
    try {
      const answer = await fetch("report.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      pulse.classList.remove("lost");
      if (answer.status === 304) { pulse.textContent = "live"; return; }
      if (!answer.ok) { pulse.classList.add("lost"); pulse.textContent = (await answer.text()).trim(); return; }
      tag = answer.headers.get("ETag");
      const update = await answer.json();
      if (update.figures.map((f) => f.slug).join() !== figures.map((f) => f.slug).join()) { window.location.reload(); return; }
      figures = update.figures;
      document.getElementById("subtitle").textContent = update.subtitle;
      Object.entries(update.tables).forEach(([slug, html]) => { document.querySelector(`#${slug} .tables`).innerHTML = html; });
      pulse.textContent = update.finished ? "finished" : "live";
      await draw();
    } catch (error) {
      pulse.classList.add("lost");
      pulse.textContent = "connection lost";
    }
  }
  /* One request at a time: a busy server is not asked again before it has answered. */
  async function poll() {
    await refresh();
    window.setTimeout(poll, 2000);
  }
  draw().then(() => {
    if (document.body.dataset.live !== "true") { return; }
    poll();
  });
})();
