"use strict";
// Draws the charts of the page from its data. Times are in 1/1,000,000 of a step, bytes in `unit` bytes.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg", TICKS = 1e6, LEFT = 100, MEMORY = 300, ROW = 34, FOOT = 26;
const FILL = { forward: "--s0", recompute: "--s1", backward: "--s2", optimizer: "--s4" };
const drawn = [];

function add(parent, tag, set = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const key in set) node.setAttribute(key, set[key]);
  if (text !== undefined) node.textContent = text;
  return parent.appendChild(node);
}
const digits = (x) => (x >= 99.95 ? Math.round(x).toLocaleString("en") : x >= 9.995 ? x.toFixed(1) : x.toFixed(2));
function inBytes(size) {
  let unit = 0;
  for (; size >= 999.5 && unit < 5; unit++) size /= 1024;
  return (unit ? digits(size) : Math.round(size)) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}
const inSeconds = (s) => (s >= 1 || !s ? digits(s) + " s" : s >= 1e-3 ? digits(s * 1e3) + " ms" : digits(s * 1e6) + " µs");
const onAxis = (words) => words.replace(/\.0+ /, " ");
function short(name, room) { // as many of the last parts of a dotted name as there is room for
  const parts = name.split(".");
  while (parts.length > 1 && parts.join(".").length > room) parts.shift();
  return parts.join(".");
}
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

function ticks(most, count, base = 10, least = 0) { // round steps; of bytes, in powers of two
  const raw = (most - least) / count, power = base ** Math.floor(Math.log(raw) / Math.log(base) + 1e-9);
  const step = power * ((base === 2 ? [1, 2] : [1, 2, 5, 10]).find((each) => power * each >= raw * 0.999) || 1), found = [];
  for (let number = Math.ceil(least / step - 1e-9); number * step <= most * (1 + 1e-9); number++) found.push(number * step);
  return found;
}
function range(values) { // from a little below the least to a little above the most
  const [least, most] = [Math.min(...values), Math.max(...values)], edge = (most - least) * 0.08 || most * 0.1 || 1;
  return [Math.max(0, least - edge), most + edge];
}
function search(sorted, value) { // the last index whose element is not above the value
  let low = 0, high = sorted.length;
  while (low < high) { const mid = (low + high) >> 1; if (sorted[mid] <= value) low = mid + 1; else high = mid; }
  return Math.max(0, low - 1);
}
function surface(parent, width, height, label) {
  const svg = add(parent, "svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  if (!label) svg.setAttribute("aria-hidden", "true");
  else for (const [key, value] of Object.entries({ tabindex: 0, class: "plot", role: "application",
    "aria-roledescription": "chart", "aria-label": label })) svg.setAttribute(key, value);
  return svg;
}

function step(figure, number) {
  const line = data.steps[number], axis = figure.querySelector(".left"), scroll = figure.querySelector(".scroll");
  const readout = figure.querySelector(".readout"), units = line.units;
  const stack = line.times.map((_, at) => line.levels.map(((sum) => (column) => (sum += column[at]))(0)));
  let zoom = 1, moment = search(line.times, line.peak.at), lane = 0, span = 0, pick, cursor, x;
  const focused = () => scroll.contains(document.activeElement) && document.activeElement.dataset.chart;

  function draw() {
    const kept = focused(), center = (scroll.scrollLeft + scroll.clientWidth / 2) / (scroll.scrollWidth || 1);
    axis.replaceChildren(); scroll.replaceChildren();
    const width = Math.max(120, Math.floor((scroll.clientWidth - 6) * zoom)), most = data.most * 1.12 || 1;
    const scale = width / data.seconds; x = (tick) => (tick / TICKS) * line.seconds * scale;
    const y = (nbytes) => MEMORY - (nbytes / most) * (MEMORY - 8), height = line.lanes.length * ROW + FOOT;
    const left = surface(axis, LEFT, MEMORY + 20 + height);
    const memory = surface(scroll, width, MEMORY + 20, line.about_memory), gantt = surface(scroll, width, height, line.about_lanes);
    memory.dataset.chart = "memory"; gantt.dataset.chart = "gantt";
    for (const nbytes of ticks(most, 5, 2)) {
      add(left, "text", { x: LEFT - 10, y: Math.max(10, y(nbytes) + 4), "text-anchor": "end" }, onAxis(inBytes(nbytes)));
      add(memory, "path", { class: "rule", d: `M0 ${y(nbytes)}H${width}` });
    }
    bands(memory, y);
    for (const [name, nbytes] of Object.entries(line.lines)) { // what is above the chart stands at its top
      const top = Math.max(8, y(nbytes)), isLimit = name === "limit", over = y(nbytes) < 8 ? " ↑" : "";
      add(memory, "path", { class: isLimit ? "limit" : "ink", d: `M0 ${top}H${width}` });
      add(memory, "text", { class: "halo", x: isLimit ? width - 6 : 6, y: isLimit && top > 20 ? top - 5 : top + 14,
        "text-anchor": isLimit ? "end" : "start" }, `${name} ${inBytes(nbytes)}${over}`);
    }
    const px = x(line.peak.at), py = y(line.peak.nbytes), after = px < width / 2;
    add(memory, "path", { class: "ink", d: `M${px} ${py}V${MEMORY}`, "stroke-dasharray": "2 3" });
    add(memory, "circle", { class: "dot peak", cx: clamp(px, 5, width - 5), cy: py, r: 5 });
    add(memory, "text", { class: "strong halo", x: px + (after ? 10 : -10), y: Math.max(13, py - 9),
      "text-anchor": after ? "start" : "end" }, "peak " + inBytes(line.peak.nbytes));
    cursor = add(memory, "path", { class: "ink", d: "" });
    const defs = add(add(gantt, "defs"), "pattern", { id: "wait" + number, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    add(defs, "rect", { width: 6, height: 6, style: "fill:var(--wait)" }); add(defs, "rect", { width: 2, height: 6, style: "fill:var(--paper);opacity:.55" });
    line.lanes.forEach((each, row) => {
      add(left, "text", { x: LEFT - 10, y: MEMORY + 20 + row * ROW + 19, "text-anchor": "end" }, each.name);
      spans(gantt, each, row, width);
    });
    for (const time of ticks(data.seconds, Math.max(3, Math.floor(width / 130)))) {
      const at = time * scale, end = at > width - 24 ? "end" : at < 24 ? "start" : "middle";
      add(gantt, "path", { class: "rule", d: `M${at} ${height - FOOT}v5` });
      add(gantt, "text", { x: at, y: height - 6, "text-anchor": end }, onAxis(inSeconds(time)));
    }
    pick = add(gantt, "rect", { class: "pick", width: 0, height: 0, rx: 2 });
    memory.addEventListener("pointermove", (event) => showMoment(search(line.times, at(event))));
    memory.addEventListener("keydown", memoryKey);
    gantt.addEventListener("pointermove", (event) => {
      const row = clamp(Math.floor(event.offsetY / ROW), 0, line.lanes.length - 1);
      if (line.lanes[row].starts.length) { lane = row; showSpan(search(line.lanes[row].starts, at(event))); }
    });
    gantt.addEventListener("keydown", ganttKey);
    for (const svg of [memory, gantt]) svg.addEventListener("focus", () => (svg === memory ? showMoment(moment) : showSpan(span)));
    scroll.scrollLeft = center * scroll.scrollWidth - scroll.clientWidth / 2;
    if (kept) (kept === "memory" ? memory : gantt).focus();
  }
  const at = (event) => (event.offsetX / x(TICKS)) * TICKS;

  function bands(svg, y) {
    data.kinds.forEach((kind, level) => {
      const low = (i) => y(level ? stack[i][level - 1] * data.unit : 0), high = (i) => y(stack[i][level] * data.unit);
      const until = (i) => x(i + 1 < line.times.length ? line.times[i + 1] : TICKS).toFixed(1);
      let up = "", down = "", best = [15, 0, 0];
      line.times.forEach((time, i) => {
        up += `${i ? "L" : "M"}${x(time).toFixed(1)} ${high(i).toFixed(1)}H${until(i)}`;
        down = `L${until(i)} ${low(i).toFixed(1)}H${x(time).toFixed(1)}` + down;
      });
      if (up) add(svg, "path", { class: "band", d: up + down + "Z", style: `fill:var(--k${data.colors[level]})` });
      const half = kind.length * 3.4 + 4; // the label stands where its band is highest over all of its width
      for (let middle = half; middle <= x(TICKS) - half; middle += 8) {
        let top = 0, bottom = MEMORY;
        for (let i = search(line.times, ((middle - half) / x(TICKS)) * TICKS); i < line.times.length && x(line.times[i]) < middle + half; i++)
          [top, bottom] = [Math.max(top, high(i)), Math.min(bottom, low(i))];
        if (bottom - top > best[0] + 1) best = [bottom - top, middle, (top + bottom) / 2];
      }
      if (best[1]) add(svg, "text", { class: "on", x: best[1], y: best[2] + 4, "text-anchor": "middle" }, kind);
    });
  }
  function spans(svg, each, row, width) {
    const paths = {}, top = row * ROW + 5, visible = [];
    add(svg, "path", { class: "rule", d: `M0 ${top + 24.5}H${width}` });
    each.starts.forEach((start, i) => {
      const from = x(start), wide = Math.max(0.75, x(each.ends[i]) - from), name = line.names[each.name_of[i]];
      const key = name + "|" + (each.units[i] & 1); // neighbours in two shades: the borders show without lines
      paths[key] = (paths[key] || "") + `M${from.toFixed(1)} ${top}h${wide.toFixed(1)}v24h-${wide.toFixed(1)}z`;
      const text = each.units[i] < 0 ? name : short(units[each.units[i]], Math.floor(wide / 7));
      if (text.length * 7 + 6 < wide && name !== "wait") visible.push([from + wide / 2, text]);
    });
    for (const key in paths) {
      const [name, shade] = key.split("|"), isWait = name === "wait";
      const fill = isWait ? `url(#wait${number})` : `var(${FILL[name] || "--s3"})`;
      add(svg, "path", { d: paths[key], style: `fill:${fill};opacity:${!isWait && +shade ? 0.86 : 1}` });
    }
    for (const [middle, text] of visible) add(svg, "text", { class: "on", x: middle, y: top + 16, "text-anchor": "middle" }, text);
  }
  function showMoment(to) {
    if (!line.times.length) return;
    moment = clamp(to, 0, line.times.length - 1);
    const top = stack[moment][data.kinds.length - 1] * data.unit;
    cursor.setAttribute("d", `M${x(line.times[moment])} 0V${MEMORY}`);
    const parts = data.kinds.map((kind, level) => [kind, line.levels[level][moment] * data.unit]).filter((part) => part[1]);
    readout.textContent = `${inSeconds((line.times[moment] / TICKS) * line.seconds)}: ${inBytes(top)}: ` +
      parts.sort((a, b) => b[1] - a[1]).map(([kind, nbytes]) => `${kind} ${inBytes(nbytes)}`).join(", ");
    reveal(x(line.times[moment]), x(line.times[moment]));
  }
  function showSpan(to) {
    const each = line.lanes[lane];
    if (!each || !each.starts.length) return;
    span = clamp(to, 0, each.starts.length - 1);
    const [start, end] = [each.starts[span], each.ends[span]], seconds = (tick) => (tick / TICKS) * line.seconds;
    const set = { x: x(start), y: lane * ROW + 4, width: Math.max(2, x(end) - x(start)), height: 26 };
    for (const key in set) pick.setAttribute(key, set[key]);
    const unit = each.units[span] < 0 ? "" : " " + units[each.units[span]], nbytes = each.nbytes[span];
    readout.textContent = `${each.name}: ${line.names[each.name_of[span]]}${unit}, ${inSeconds(seconds(end - start))} from ${inSeconds(seconds(start))}` +
      (nbytes ? `, ${inBytes(nbytes)} sent, ${inBytes(nbytes / (seconds(end - start) || 1))}/s` : "");
    reveal(x(start), x(end));
  }
  function reveal(from, to) {
    if (!focused() || (from >= scroll.scrollLeft && from <= scroll.scrollLeft + scroll.clientWidth)) return;
    scroll.scrollLeft = (from + to) / 2 - scroll.clientWidth / 2;
  }
  const magnify = (by) => { zoom = clamp(zoom * by, 1, 64); draw(); };
  function keys(event, moves) {
    const move = { "+": () => magnify(2), "=": () => magnify(2), "-": () => magnify(0.5), ...moves }[event.key];
    if (move && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); move(); }
  }
  const memoryKey = (event) => keys(event, { ArrowLeft: () => showMoment(moment - 1), ArrowRight: () => showMoment(moment + 1),
    PageUp: () => showMoment(moment - 25), PageDown: () => showMoment(moment + 25), Home: () => showMoment(0),
    End: () => showMoment(line.times.length), p: () => showMoment(search(line.times, line.peak.at)) });
  function change(by) { // to the next lane with a span, at the same time
    const time = line.lanes.length && line.lanes[lane].starts[span];
    for (let to = lane + by; line.lanes[to]; to += by)
      if (line.lanes[to].starts.length) { lane = to; return showSpan(search(line.lanes[to].starts, time)); }
  }
  const ganttKey = (event) => keys(event, { ArrowLeft: () => showSpan(span - 1), ArrowRight: () => showSpan(span + 1),
    ArrowUp: () => change(-1), ArrowDown: () => change(1), Home: () => showSpan(0), End: () => showSpan(1e9) });
  lane = Math.max(0, line.lanes.findIndex((each) => each.starts.length));
  figure.querySelector(".in").addEventListener("click", () => magnify(2));
  figure.querySelector(".out").addEventListener("click", () => magnify(0.5));
  drawn.push(draw);
}

function scatter(figure) {
  const found = data.search, place = figure.querySelector(".scatter"), readout = figure.querySelector(".readout");
  const points = found.points.map((point, index) => ({ ...point, index })).sort((a, b) => a.peak_bytes - b.peak_bytes || a.step_seconds - b.step_seconds);
  const limit = found.limit || 0, [left, right] = range([...points.map((each) => each.peak_bytes), ...(limit ? [limit] : [])]);
  const [bottom, top] = range(points.map((each) => each.step_seconds));
  let chosen = Math.max(0, points.findIndex((each) => each.index === found.best));
  function tell(point) {
    readout.textContent = `${point.name}: ${inSeconds(point.step_seconds)} a step, ${inBytes(point.peak_bytes)} at the peak. ` +
      (point.fits ? "" : "Does not fit: ") + (point.why ? `${point.why}. ` : "") +
      Object.entries(point.settings).map(([name, value]) => `${name} ${value}`).join(", ");
  }
  drawn.push(() => {
    const kept = place.contains(document.activeElement), width = Math.floor(place.clientWidth), height = Math.min(400, width * 0.8);
    place.replaceChildren();
    const svg = surface(place, width, height), base = height - 40;
    svg.removeAttribute("aria-hidden"); svg.setAttribute("role", "group"); svg.setAttribute("aria-label", found.about);
    const x = (nbytes) => 64 + ((nbytes - left) / (right - left)) * (width - 76);
    const y = (seconds) => base - ((seconds - bottom) / (top - bottom)) * (base - 20);
    for (const time of ticks(top, 5, 10, bottom)) {
      add(svg, "path", { class: "rule", d: `M64 ${y(time)}H${width}` });
      add(svg, "text", { x: 56, y: y(time) + 4, "text-anchor": "end" }, onAxis(inSeconds(time)));
    }
    for (const nbytes of ticks(right, width / 110, 2, left)) add(svg, "text", { x: x(nbytes), y: base + 18, "text-anchor": "middle" }, onAxis(inBytes(nbytes)));
    add(svg, "text", { x: width, y: height - 4, "text-anchor": "end" }, "peak memory →"); add(svg, "text", { x: 0, y: 12 }, "↑ step time");
    if (limit) {
      add(svg, "path", { class: "limit", d: `M${x(limit)} 18V${base}` });
      const after = x(limit) < 200; // left of it stand the times
      add(svg, "text", { class: "halo", x: x(limit) + (after ? 6 : -6), y: 30, "text-anchor": after ? "start" : "end" }, "limit " + inBytes(limit));
    }
    const front = points.filter((each) => each.pareto);
    add(svg, "path", { class: "front", d: front.map((each, i) => (i ? `H${x(each.peak_bytes)}V${y(each.step_seconds)}` : `M${x(each.peak_bytes)} ${y(each.step_seconds)}`)).join("") });
    const nodes = points.map((each, i) => {
      const best = each.index === found.best, kind = best ? " best" : each.pareto ? " pareto" : each.fits ? "" : " out";
      const node = add(svg, "circle", { class: "point" + kind, cx: x(each.peak_bytes), cy: y(each.step_seconds), r: best ? 7 : 5,
        tabindex: i === chosen ? 0 : -1, role: "img", "aria-label": `${best ? "best: " : ""}${each.name}, ${inSeconds(each.step_seconds)}, ${inBytes(each.peak_bytes)}${each.fits ? "" : ", does not fit"}` });
      node.addEventListener("pointerenter", () => tell(each));
      node.addEventListener("focus", () => { nodes[chosen].setAttribute("tabindex", -1); chosen = i; node.setAttribute("tabindex", 0); tell(each); });
      node.addEventListener("keydown", (event) => {
        const to = { ArrowRight: i + 1, ArrowUp: i + 1, ArrowLeft: i - 1, ArrowDown: i - 1, Home: 0, End: 1e9 }[event.key];
        if (to !== undefined) { event.preventDefault(); nodes[clamp(to, 0, nodes.length - 1)].focus(); }
      });
      return node;
    });
    const best = points.find((each) => each.index === found.best);
    if (best) add(svg, "text", { class: "strong halo", x: clamp(x(best.peak_bytes), 80, width - 16), y: y(best.step_seconds) + 22, "text-anchor": "middle" }, "best");
    if (kept) nodes[chosen].focus();
  });
}

const draw = () => drawn.forEach((each) => each());
document.querySelectorAll("figure.step").forEach(step);
document.querySelectorAll("figure.search").forEach(scatter);
draw();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
addEventListener("beforeprint", () => { document.body.classList.add("print"); draw(); });
addEventListener("afterprint", () => { document.body.classList.remove("print"); draw(); });
