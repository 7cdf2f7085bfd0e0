// Bars over time on a canvas, for a handful of bars or for tens of thousands: hover, arrow keys, zoom.

const LANE = { label: 64, axis: 24 };
const KIND_NAMES = { compute: 'computes', message: 'receives', wait: 'waits', start: 'starts a message:' };

function buildGantt({ title, lanes, bars, totalS, summary, overlay }) {
  const laneHeight = lanes.length > 32 ? 12 : lanes.length > 12 ? 20 : 32;
  const canvas = h('canvas', { tabindex: 0, role: 'img' });
  const detail = h('output', { class: 'detail' }, 'Point at a bar, or focus the chart and use the arrow keys.');
  const byLane = groupByLane(lanes.length, bars);
  const view = { from: 0, to: totalS };
  let chosen = null;
  let asked = 0;
  const zoom = bars.length > 200 ? zoomControls(view, totalS, () => ask()) : null;
  const ask = () => { if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); }); };
  function draw() {
    const width = Math.max(240, canvas.parentElement ? canvas.parentElement.clientWidth : 600);
    const height = lanes.length * laneHeight + LANE.axis;
    const scale = Math.min(2, devicePixelRatio || 1);
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext('2d');
    context.scale(scale, scale);
    const paints = paintsOf(context);
    drawAxis(context, view, width, height, paints);
    byLane.forEach((of, lane) => drawLane(context, of, lane, { view, width, laneHeight, paints, name: lanes[lane] }));
    if (overlay) overlay.forEach((bar) => outline(context, bar, { view, width, laneHeight, paints }, paints.ink, [3, 2]));
    if (chosen) outline(context, chosen, { view, width, laneHeight, paints }, paints.ink, []);
  }
  function tell(bar) {
    chosen = bar;
    detail.textContent = bar ? describeBar(bar, lanes) : 'Point at a bar, or focus the chart and use the arrow keys.';
    ask();
  }
  canvas.addEventListener('pointermove', (event) => tell(barAt(event, canvas, byLane, view, laneHeight)));
  canvas.addEventListener('pointerleave', () => tell(null));
  canvas.addEventListener('focus', () => { detail.setAttribute('aria-live', 'polite'); if (!chosen && bars.length) tell(byLane.find((of) => of.length)[0]); });
  canvas.addEventListener('blur', () => detail.removeAttribute('aria-live'));
  canvas.addEventListener('keydown', (event) => {
    const next = chosen && nextBar(event.key, chosen, byLane);
    if (!next) return;
    event.preventDefault();
    tell(next);
  });
  canvas.setAttribute('aria-label', `${title}: ${summary || `${format.plural(bars.length, 'bar')} on ${format.plural(lanes.length, 'lane')}, ${format.seconds(totalS)} in all`}. Use the arrow keys to go from bar to bar.`);
  const box = h('div', { class: 'canvas-box' }, canvas);
  new ResizeObserver(ask).observe(box);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', ask);
  return { element: h('figure', { class: 'gantt' }, h('figcaption', {}, title), zoom, box, detail), draw, view, ask };
}

function groupByLane(numLanes, bars) {
  const byLane = Array.from({ length: numLanes }, () => []);
  for (const bar of bars) if (byLane[bar[0]]) byLane[bar[0]].push(bar);
  for (const of of byLane) of.sort((a, b) => a[2] - b[2]);
  return byLane;
}

function paintsOf(context) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const looks = Array.from({ length: NUM_LOOKS }, (_, look) => colour(`--look-${look}`));
  return { looks, ink: colour('--ink'), muted: colour('--muted'), line: colour('--line'), onLook: colour('--on-look'),
    message: hatch(context, colour('--message'), 'M'), start: colour('--message'), wait: hatch(context, colour('--wait'), 'W') };
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

function drawLane(context, bars, lane, at) {
  const { paints, view } = at;
  const reach = { compute: -1, message: -1, wait: -1, start: -1 };
  context.font = `${Math.min(12, at.laneHeight - 2)}px system-ui, sans-serif`;
  context.textBaseline = 'middle';
  if (at.laneHeight > 11) {
    context.fillStyle = paints.ink;
    context.fillText(shorten(at.name, 9), 2, (lane + 0.5) * at.laneHeight);
  }
  for (const bar of bars) {
    if (bar[3] < view.from || bar[2] > view.to) continue;
    const { x, y, w, h: height } = placeBar(bar, at);
    if (x + w <= reach[bar[1]] + 0.75) continue; // nothing new at this resolution
    reach[bar[1]] = x + w;
    context.fillStyle = bar[1] === 'compute' ? paints.looks[lane % NUM_LOOKS] : paints[bar[1]];
    context.fillRect(x, y, Math.max(w - (w > 3 ? 1 : 0), 0.6), height);
    if (bar[1] === 'compute' && w > 24 && height > 11 && w > context.measureText(bar[4]).width + 8) {
      context.fillStyle = paints.onLook;
      context.fillText(bar[4], x + 4, y + height / 2);
    }
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
  const at = { view, width: box.width, laneHeight };
  return (lane && lane.find((bar) => { const place = placeBar(bar, at); return x >= place.x - 1 && x <= place.x + Math.max(place.w, 2) && y >= place.y && y <= place.y + place.h; })) || null;
}

function nextBar(key, [lane, , start], byLane) {
  const of = byLane[lane];
  const index = of.findIndex((bar) => bar[2] === start);
  if (key === 'ArrowRight') return of[Math.min(of.length - 1, Math.max(index + 1, of.findIndex((bar) => bar[2] > start)))];
  if (key === 'ArrowLeft') return of[Math.max(0, index - 1)];
  const other = { ArrowDown: byLane.slice(lane + 1), ArrowUp: byLane.slice(0, lane).reverse() }[key];
  const found = other && other.find((bars) => bars.length);
  return found && found.reduce((best, bar) => (Math.abs(bar[2] - start) < Math.abs(best[2] - start) ? bar : best), found[0]);
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
  const charts = section.charts.map((chart) => buildGantt({ title: chart.title, lanes: chart.lanes, bars: chart.bars, totalS: chart.total_s, overlay: chart.overlay }));
  return { element: h('div', {}, ganttLegend(section.charts.some((chart) => chart.bars.some(([, kind]) => kind === 'start'))), charts.map((chart) => chart.element)), render: () => charts.forEach((chart) => chart.ask()) };
}
