// Bars over time on a canvas, for a handful of bars or for tens of thousands: hover, arrow keys, zoom.

const LANE = { label: 64, axis: 24 };
const KIND_NAMES = { compute: 'computes', message: 'receives', wait: 'waits', start: 'starts a message:' };

const HINT = 'Point at a bar or tap it, or focus the chart and use the arrow keys.';

// Draws what `load` is given: bars, the length of the time axis, and for a measured run the outlines of the predicted bars.
function buildGantt({ title, lanes }) {
  const laneHeight = lanes.length > 32 ? 12 : lanes.length > 12 ? 20 : 32;
  const canvas = h('canvas', { tabindex: 0, role: 'application', 'aria-roledescription': 'timeline' }); // screen readers hand it the arrow keys
  const still = document.createElement('canvas'); // everything but the chosen bar, so that pointing at bars draws one outline
  const detail = h('output', { class: 'detail' }, HINT);
  const view = { from: 0, to: 1 };
  const zoomBox = h('div', {});
  let byLane = [];
  let outlines = [];
  let chosen = null;
  let asked = 0;
  let isStale = true;
  const height = lanes.length * laneHeight + LANE.axis;
  const ask = () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); }); };
  const redraw = () => { isStale = true; ask(); };
  function load({ bars, totalS, summary, overlay }) {
    byLane = groupByLane(lanes.length, bars);
    outlines = overlay ? groupByLane(lanes.length, overlay) : [];
    Object.assign(view, { from: 0, to: totalS });
    tell(null);
    if (bars.length > 200) show(zoomBox, zoomControls(view, totalS, redraw));
    const told = summary || `${format.plural(bars.length, 'bar')} on ${format.plural(lanes.length, 'lane')}, ${format.seconds(totalS)} in all`;
    canvas.setAttribute('aria-label', `${title}: ${told}. Use the arrow keys to go from bar to bar.`);
    redraw();
  }
  function draw() {
    const width = Math.max(240, canvas.parentElement ? canvas.parentElement.clientWidth : 600);
    const scale = Math.min(2, devicePixelRatio || 1);
    if (isStale) drawStill(width, scale);
    const context = canvas.getContext('2d');
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(still, 0, 0);
    context.scale(scale, scale);
    if (chosen) outline(context, chosen, { view, width, laneHeight }, paintsOf(context).ink, []);
  }
  function drawStill(width, scale) {
    isStale = false;
    for (const one of [canvas, still]) {
      one.width = width * scale;
      one.height = height * scale;
    }
    canvas.style.height = `${height}px`;
    const context = still.getContext('2d');
    context.scale(scale, scale);
    const at = { view, width, laneHeight, paints: paintsOf(context) };
    drawAxis(context, view, width, height, at.paints);
    byLane.forEach((lane, i) => drawLane(context, lane, i, { ...at, name: lanes[i] }));
    outlines.forEach((lane) => outlineLane(context, lane, at));
  }
  function tell(bar) {
    if (bar === chosen) return;
    chosen = bar;
    detail.textContent = bar ? describeBar(bar, lanes) : HINT;
    ask();
  }
  canvas.addEventListener('pointermove', (event) => tell(barAt(event, canvas, byLane, view, laneHeight)));
  canvas.addEventListener('pointerdown', (event) => tell(barAt(event, canvas, byLane, view, laneHeight)));
  canvas.addEventListener('pointerleave', (event) => { if (event.pointerType === 'mouse') tell(null); }); // a finger leaves when it is lifted
  const firstBar = () => byLane.find((lane) => lane.bars.length)?.bars[0] || null;
  canvas.addEventListener('focus', () => { detail.setAttribute('aria-live', 'polite'); if (!chosen) tell(firstBar()); });
  canvas.addEventListener('blur', () => detail.removeAttribute('aria-live'));
  canvas.addEventListener('keydown', (event) => {
    const next = event.key.startsWith('Arrow') && (chosen ? nextBar(event.key, chosen, byLane) : firstBar());
    if (!next) return;
    event.preventDefault();
    tell(next);
  });
  const box = h('div', { class: 'canvas-box' }, canvas);
  new ResizeObserver(redraw).observe(box);
  const recolour = () => { paints = null; isStale = true; draw(); }; // at once: printing does not wait for a frame
  for (const query of ['(prefers-color-scheme: dark)', 'print']) matchMedia(query).addEventListener('change', recolour);
  return { element: h('figure', { class: 'gantt' }, h('figcaption', {}, title), zoomBox, box, detail), load };
}

// Bars of each lane by their start; ends[i] is the latest end of the bars up to i, so that a time is found by halving.
function groupByLane(numLanes, bars) {
  const byLane = Array.from({ length: numLanes }, () => ({ bars: [], ends: [] }));
  for (const bar of bars) if (byLane[bar[0]]) byLane[bar[0]].bars.push(bar);
  for (const lane of byLane) {
    lane.bars.sort((a, b) => a[2] - b[2]);
    let latest = -Infinity;
    for (const bar of lane.bars) lane.ends.push((latest = Math.max(latest, bar[3])));
  }
  return byLane;
}

// The first index for which a test that is false, then true, is true.
function firstIndex(length, isTrue) {
  let [low, high] = [0, length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isTrue(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The bars of a lane that may meet a span of time.
function barsWithin({ bars, ends }, from, to) {
  return bars.slice(firstIndex(bars.length, (i) => ends[i] >= from), firstIndex(bars.length, (i) => bars[i][2] > to));
}

let paints = null; // of the colour scheme; computed styles are slow to read

function paintsOf(context) {
  paints ||= readPaints(context);
  return paints;
}

function readPaints(context) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const looks = Array.from({ length: NUM_LOOKS }, (_, look) => colour(`--look-${look}`));
  return { looks, ink: colour('--ink'), muted: colour('--muted'), line: colour('--line'), onLook: colour('--on-look'),
    message: hatch(context, colour('--message'), 'M'), start: colour('--message'), wait: hatch(context, colour('--wait'), 'W'),
    flat: { message: colour('--message'), start: colour('--message'), wait: colour('--wait') } };
}

// Stripes for messages, dots for waits: told apart without colour.
function hatch(context, colour, kind) {
  const tile = document.createElement('canvas');
  tile.width = tile.height = 6;
  const paint = tile.getContext('2d');
  paint.strokeStyle = paint.fillStyle = colour;
  paint.lineWidth = 2.2;
  if (kind === 'M') {
    paint.beginPath();
    for (const offset of [-6, 0, 6]) { paint.moveTo(offset, 6); paint.lineTo(offset + 6, 0); }
    paint.stroke();
  } else {
    paint.fillRect(1, 1, 2, 2);
  }
  return context.createPattern(tile, 'repeat');
}

const placeX = (time, { view, width }) => LANE.label + ((time - view.from) / (view.to - view.from)) * (width - LANE.label - 4);

function placeBar([lane, kind, start, stop], at) {
  const inner = at.laneHeight - 3;
  const messageHeight = Math.max(3, Math.round(inner * 0.3));
  const top = lane * at.laneHeight + 1;
  const [x0, x1] = [Math.max(LANE.label, placeX(start, at)), Math.min(at.width - 4, placeX(stop, at))];
  return kind === 'message' ? { x: x0, y: top + inner - messageHeight, w: x1 - x0, h: messageHeight } : { x: x0, y: top, w: x1 - x0, h: inner - messageHeight - 1 };
}

function drawLane(context, ofLane, lane, at) {
  const { view } = at;
  const reach = { compute: -1, message: -1, wait: -1, start: -1 };
  context.font = `${Math.min(12, at.laneHeight - 2)}px system-ui, sans-serif`;
  context.textBaseline = 'middle';
  if (at.laneHeight > 11) {
    context.fillStyle = at.paints.ink;
    context.fillText(shorten(at.name, 9), 2, (lane + 0.5) * at.laneHeight);
  }
  for (const bar of barsWithin(ofLane, view.from, view.to)) {
    const { x, y, w, h: height } = placeBar(bar, at);
    if (x + w <= reach[bar[1]] + 0.75) continue; // nothing new at this resolution
    reach[bar[1]] = x + w;
    context.fillStyle = bar[1] === 'compute' ? at.paints.looks[lane % NUM_LOOKS] : w < 3 ? at.paints.flat[bar[1]] : at.paints[bar[1]];
    context.fillRect(x, y, Math.max(w - (w > 3 ? 1 : 0), 0.6), height);
    if (bar[1] === 'compute' && w > 24 && height > 11 && w > context.measureText(bar[4]).width + 8) {
      context.fillStyle = at.paints.onLook;
      context.fillText(bar[4], x + 4, y + height / 2);
    }
  }
}

const NARROWEST = 4; // pixels of a predicted bar that is outlined; zoom in to see the others

function outlineLane(context, ofLane, at) {
  for (const bar of barsWithin(ofLane, at.view.from, at.view.to)) {
    if (placeX(bar[3], at) - placeX(bar[2], at) >= NARROWEST) outline(context, bar, at, at.paints.ink, [3, 2]);
  }
}

function outline(context, bar, at, colour, dash) {
  const { x, y, w, h: height } = placeBar(bar, at);
  if (w < 0) return;
  context.setLineDash(dash);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(x, y, Math.max(w - 1, 1), height);
  context.setLineDash([]);
}

function drawAxis(context, view, width, height, paints) {
  context.font = '12px system-ui, sans-serif';
  const count = width < 420 ? 2 : 4;
  for (let i = 0; i <= count; i += 1) {
    const time = view.from + ((view.to - view.from) * i) / count;
    const x = placeX(time, { view, width });
    context.fillStyle = paints.line;
    context.fillRect(x, 0, 1, height - LANE.axis + 4);
    context.fillStyle = paints.muted;
    context.textAlign = i === count ? 'right' : i ? 'center' : 'left';
    context.fillText(format.seconds(time), x, height - 6);
  }
  context.textAlign = 'left';
}

function barAt(event, canvas, byLane, view, laneHeight) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const lane = byLane[Math.floor(y / laneHeight)];
  if (!lane) return null;
  const at = { view, width: box.width, laneHeight };
  const perPixel = (view.to - view.from) / (box.width - LANE.label - 4);
  const time = view.from + (x - LANE.label) * perPixel;
  return barsWithin(lane, time - 3 * perPixel, time + 3 * perPixel).find((bar) => {
    const place = placeBar(bar, at);
    return x >= place.x - 1 && x <= place.x + Math.max(place.w, 2) && y >= place.y && y <= place.y + place.h;
  }) || null;
}

function nextBar(key, chosen, byLane) {
  const [lane, , start] = chosen;
  const { bars } = byLane[lane];
  const index = bars.indexOf(chosen);
  if (key === 'ArrowRight') return bars[Math.min(bars.length - 1, index + 1)];
  if (key === 'ArrowLeft') return bars[Math.max(0, index - 1)];
  const others = { ArrowDown: byLane.slice(lane + 1), ArrowUp: byLane.slice(0, lane).reverse() }[key];
  const found = others && others.find((other) => other.bars.length);
  return found && found.bars.reduce((best, bar) => (Math.abs(bar[2] - start) < Math.abs(best[2] - start) ? bar : best), found.bars[0]);
}

function describeBar([lane, kind, start, stop, label, note], lanes) {
  const what = kind === 'wait' ? (label.startsWith('wait ') ? label.replace('wait', 'waits') : 'waits') : `${KIND_NAMES[kind]} ${label}`;
  return `${lanes[lane]} ${what}: ${format.seconds(stop - start)}, from ${format.seconds(start)} to ${format.seconds(stop)}${note ? ` (${note})` : ''}`;
}

function zoomControls(view, totalS, changed) {
  const zoom = h('input', { type: 'range', min: 0, max: 100, value: 0, 'aria-label': 'Zoom' });
  const place = h('input', { type: 'range', min: 0, max: 1000, value: 0, 'aria-label': 'Position' });
  const update = () => {
    const span = totalS * 0.001 ** (zoom.value / 100);
    view.from = (totalS - span) * (place.value / 1000);
    view.to = view.from + span;
    changed();
  };
  zoom.addEventListener('input', update);
  place.addEventListener('input', update);
  return h('div', { class: 'zoom' }, h('label', { class: 'slider' }, 'zoom', zoom), h('label', { class: 'slider' }, 'position', place));
}

const ganttLegend = (hasStarts = false) => h('p', { class: 'legend' }, h('span', { class: 'key bar-compute' }, 'computing'), h('span', { class: 'key bar-message' }, 'a message on its way (striped)'), h('span', { class: 'key bar-wait' }, 'waiting (dotted)'), hasStarts ? h('span', { class: 'key bar-start' }, 'starting a message') : null);

function ganttSection(section) {
  const charts = section.charts.map((chart) => ({ chart, ...buildGantt(chart) }));
  return { element: h('div', {}, ganttLegend(section.charts.some((chart) => chart.bars.some(([, kind]) => kind === 'start'))), charts.map((chart) => chart.element)), render: () => charts.forEach(({ chart, load }) => load({ ...chart, totalS: chart.total_s })) };
}
