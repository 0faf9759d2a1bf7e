// The pointer's readout. Everything is drawn without this script; it only answers "how much was it here?".
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [...document.querySelectorAll("figure.chart[data-x]")]
    .filter((figure) => data[figure.id])
    .map((figure) => ({
      ...data[figure.id],
      kind: figure.dataset.x,
      area: figure.querySelector(".area"),
      cursor: figure.querySelector(".cursor"),
      readout: figure.querySelector(".readout"),
    }));

  const nearest = (chart, share) => {
    const last = chart.x.length - 1;
    if (chart.kind === "log_ms") return Math.round(share * last); // x is spaced evenly on the log axis
    return Math.min(last, Math.max(0, Math.floor(share * chart.x.length)));
  };
  const digits = (value) =>
    value === null || value === undefined ? "–" : value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
  const time = (s) => {
    if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    if (s >= 60) return `${Math.floor(s / 60)} min ${(s % 60).toFixed(0)} s`;
    return `${s.toPrecision(3)} s`;
  };
  const ms = (v) => (v >= 1000 ? `${(v / 1000).toPrecision(3)} s` : `${v.toPrecision(3)} ms`);

  const line = (text, color) => {
    const row = document.createElement("div");
    if (color) {
      const key = document.createElement("i");
      key.className = `c${color}`;
      row.append(key);
    }
    const words = document.createElement("span");
    words.textContent = text;
    row.append(words);
    return row;
  };

  const hide = () => charts.forEach((chart) => (chart.cursor.hidden = chart.readout.hidden = true));

  const show = (source, share, withReadout) => {
    for (const chart of charts) {
      const follows = chart === source || (source.kind === "time" && chart.kind === "time");
      chart.cursor.hidden = !follows;
      chart.readout.hidden = true;
      if (!follows) continue;
      chart.cursor.style.left = `${share * 100}%`;
      if (chart !== source || !withReadout) continue;
      const i = nearest(chart, share);
      const at = chart.kind === "time" ? time(chart.x[i]) : `≤ ${ms(chart.x[i])}`;
      chart.readout.replaceChildren(
        line(at),
        ...chart.series.map((one) => {
          const top = one.peak && one.peak[i] !== null ? ` (max ${digits(one.peak[i])})` : "";
          return line(`${one.name}: ${digits(one.y[i])}${top}`, one.color);
        }),
      );
      chart.readout.hidden = false;
      const left = share < 0.5;
      chart.readout.style.left = left ? `calc(${share * 100}% + 8px)` : "auto";
      chart.readout.style.right = left ? "auto" : `calc(${(1 - share) * 100}% + 8px)`;
    }
  };

  for (const chart of charts) {
    const follow = (event) => {
      const box = chart.area.getBoundingClientRect();
      show(chart, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)), true);
    };
    chart.area.addEventListener("pointermove", follow);
    chart.area.addEventListener("pointerdown", follow);
    chart.area.addEventListener("pointerleave", hide);
  }
})();
