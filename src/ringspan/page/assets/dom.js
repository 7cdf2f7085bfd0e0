// Elements, numbers and patterns: what every section draws with. Text only ever enters as text nodes.

const SVG_NS = 'http://www.w3.org/2000/svg';

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG_NS, tag), attributes, children);

const format = {
  count: (value) => Math.round(value).toLocaleString('en-US'),
  percent: (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}\u00a0%`,
  error: (value) => (value === 0 ? '0' : value.toExponential(1).replace('e+0', '').replace('e+', 'e')),
  bytes(value) {
    for (const [unit, size] of [['TB', 1e12], ['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) {
      if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
    }
    return `${value} bytes`;
  },
  seconds(value) {
    for (const [unit, size] of [['s', 1], ['ms', 1e-3], ['µs', 1e-6]]) {
      if (Math.abs(value) >= 0.9995 * size) return `${Number((value / size).toPrecision(3))} ${unit}`;
    }
    return `${Number((value / 1e-6).toPrecision(3)) || 0} µs`;
  },
  tokens(value) {
    for (const [unit, size] of [['M', 2 ** 20], ['K', 2 ** 10]]) {
      if (value >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
    }
    return `${value}`;
  },
  plural: (count, noun) => `${format.count(count)} ${noun}${count === 1 ? '' : 's'}`,
};

// A rank is told by its number, its colour and its pattern; eight of each, then they repeat.
const NUM_LOOKS = 8;
const STROKES = [
  [],
  [['path', { d: 'M-1 1L1 -1M0 4L4 0M3 5L5 3' }]],
  [['circle', { cx: 2, cy: 2, r: 0.8, class: 'dot' }]],
  [['path', { d: 'M0 2H4' }]],
  [['path', { d: 'M2 0V4' }]],
  [['path', { d: 'M-1 3L1 5M0 0L4 4M3 -1L5 1' }]],
  [['path', { d: 'M0 2H4M2 0V4' }]],
  [['circle', { cx: 2, cy: 2, r: 1.1 }]],
];

function patternDefs() {
  // Twice: for pictures drawn in pixels, and for the matrix, whose unit is a pair.
  const patterns = [['look', 1], ['cell', 0.3]].flatMap(([name, scale]) => STROKES.map((strokes, look) =>
    s('pattern', { id: `${name}-${look}`, width: 4, height: 4, patternUnits: 'userSpaceOnUse', patternTransform: `scale(${scale})`, class: `pattern look-${look}` },
      s('rect', { width: 4, height: 4 }), ...strokes.map(([tag, attributes]) => s(tag, { class: 'stroke', ...attributes })))));
  const waiting = s('pattern', { id: 'waiting', width: 6, height: 6, patternUnits: 'userSpaceOnUse' }, s('circle', { cx: 2, cy: 2, r: 1.2, class: 'wait-dot' }));
  return s('svg', { class: 'defs', 'aria-hidden': 'true', width: 0, height: 0 }, s('defs', {}, ...patterns, waiting,
    s('marker', { id: 'head', viewBox: '0 0 8 8', refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: 'userSpaceOnUse', orient: 'auto' },
      s('path', { d: 'M0 0L8 4L0 8z', class: 'head' }))));
}

const lookOf = (owner) => (owner === '*' ? 'look-all' : `look-${Number(owner) % NUM_LOOKS}`);
const paintOf = (owner, name = 'look') => (owner === '*' ? 'var(--all)' : `url(#${name}-${Number(owner) % NUM_LOOKS})`);

// A block's name, such as kv3 or q0[0:2], told apart.
function parseBlock(name) {
  const [, kind, owner, heads] = /^([a-z_]+)(\d+|\*)(\[\d+:\d+\])?$/.exec(name);
  return { kind, owner, heads: heads || '' };
}

// [0:2] as "heads 0 to 1".
function nameHeads(heads) {
  const [start, stop] = heads.slice(1, -1).split(':').map(Number);
  return stop - start === 1 ? `head ${start}` : `heads ${start} to ${stop - 1}`;
}

function chip(name) {
  return h('span', { class: `chip ${lookOf(parseBlock(name).owner)}` }, name);
}

// Empties an element and puts new children in.
function show(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

// The width of a chart: as drawn, or what a phone has, so that its text is not shrunk.
const fitWidth = (width) => Math.max(280, Math.min(width, innerWidth - 32));

const reducesMotion = () => matchMedia('(prefers-reduced-motion: reduce)').matches;
