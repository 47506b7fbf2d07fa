"use strict";  // what the pages have in common
const data = JSON.parse(document.getElementById("data").textContent);
const style = getComputedStyle(document.documentElement);
const colour = name => style.getPropertyValue(name).trim();
const byId = id => document.getElementById(id);
const add = (parent, kind, text) => { const made = document.createElement(kind); made.textContent = text ?? ""; parent.append(made); return made; };
const fill = (table, rows) => rows.forEach((row, i) => { const line = add(byId(table), "tr"); row.forEach(cell => add(line, i ? "td" : "th", cell)); });
const legend = (where, entries) => entries.forEach(([label, paint]) => {
  const entry = add(byId(where), "span"); add(entry, "i").style.background = paint; entry.append(label);
});
const PAINTS = ["#2e86ab", "#d1495b", "#66a182", "#edae49", "#9c6ade", "#3d5a80", "#f28482", "#6d6875"];
const DASHES = [[[], ""], [[6, 4], " - -"], [[2, 3], " ···"]];  // and how a legend shows them
const short = number => number == null ? "" : Math.abs(number) >= 1e5 || (number && Math.abs(number) < 1e-3)
  ? (+number.toPrecision(3)).toExponential().replace("e+", "e") : number.toLocaleString("en", {maximumSignificantDigits: 6});
const decades = (_, axis, low, high) => {
  const first = Math.ceil(Math.log10(low)), number = Math.floor(Math.log10(high)) - first + 1, every = Math.ceil(number / 6) || 1;
  return Array.from({length: Math.ceil(number / every)}, (_, i) => +`1e${first + i * every}`);
};
const HUGE = Array.from({length: 300}, (_, power) => +`1e${power}`);  // uPlot's own end at 1e16: no axis beyond

function drawCharts() {
  const holders = data.charts.map(() => add(byId("charts"), "div"));  // all of them first: they share the width
  const charts = data.charts.map(({title, unit, x, xlabel, series, bars, log}, place) => {
    const axis = {stroke: colour("--soft"), grid: {stroke: colour("--line")}, ticks: {stroke: colour("--line")}, font: "12px system-ui"};
    const holder = holders[place], isHuge = series.some(([, values]) => values.some(each => Math.abs(each) > 1e14));
    const lines = series.map(([label, , run, part = 0], i) => ({label: label + DASHES[part % 3][1],
      stroke: PAINTS[(run ?? i) % 8], dash: DASHES[part % 3][0],
      width: run === undefined ? 1 : 1.5, value: (_, number) => number == null ? "--" : short(number), spanGaps: true, points: {show: x.length < 3},
      ...(bars ? {fill: PAINTS[i % 8] + "80", paths: uPlot.paths.bars({size: [.9, 100]})} : {})}));
    const chart = new uPlot({title, width: holder.clientWidth, height: 240, series: [{label: xlabel}, ...lines],
      scales: {x: {time: false}, y: log ? {distr: 3} : {range: (_, low, high) => [Math.min(0, low), high * 1.05 || 1]}},
      axes: [{...axis, label: xlabel, labelSize: 18, labelFont: "12px system-ui"},
        {...axis, size: 62, values: (_, ticks) => ticks.map(short), ...(isHuge ? {incrs: HUGE} : {}),
        ...(log ? {splits: decades, filter: (_, ticks) => ticks} : {}), label: unit, labelSize: 18, labelFont: "12px system-ui"}]},
      [x, ...series.map(each => each[1])], holder);
    return [chart, holder];
  });
  addEventListener("resize", () => charts.forEach(([chart, holder]) => chart.setSize({width: holder.clientWidth, height: 240})));
  return charts;
}
