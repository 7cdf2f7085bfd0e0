// Time: for a length and a bandwidth, the timelines of two layouts, and where the ring hides its messages.

function hidingSection(section) {
  declare('tokens', '7', isWhole(0, section.tokens.length - 1));
  declare('rate', '5', isWhole(0, section.bandwidths.length - 1));
  const tokens = slider('Tokens', 'tokens', section.tokens.length - 1);
  const rate = slider('Bandwidth of a link', 'rate', section.bandwidths.length - 1);
  const sentence = h('p', { class: 'status', role: 'status' });
  const map = buildMap(section);
  const lanes = Array.from({ length: section.ranks }, (_, rank) => `rank ${rank}`);
  const charts = ['contiguous', 'zigzag'].map((name) => ({ name, gantt: buildGantt({ title: name, lanes }), facts: h('div', {}) }));
  function render() {
    const [i, j] = [getNumber('tokens'), getNumber('rate')];
    tokens.show(i, section.tokens[i]);
    rate.show(j, `${section.bandwidths[j]} GB/s`);
    map.show(i, j);
    const cell = section.cells[i][j];
    sentence.textContent = tellHiding(cell);
    for (const { name, gantt, facts } of charts) {
      gantt.load({ bars: hidingBars(section, cell, name), totalS: Math.max(cell.contiguous.s[0], cell.zigzag.s[0]), summary: `${format.seconds(cell[name].s[0])} in all` });
      show(facts, hidingFacts(cell[name]));
    }
  }
  onChange(['tokens', 'rate'], render);
  return { element: h('div', {}, h('div', { class: 'two' }, h('div', {}, tokens.element, rate.element, sentence), map.element), ganttLegend(), h('div', { class: 'two' }, charts.map(({ gantt, facts }) => h('div', {}, gantt.element, facts)))), render };
}

function slider(label, key, most) {
  const input = h('input', { type: 'range', min: 0, max: most, oninput: () => set({ [key]: input.value }), 'data-key': key });
  const value = h('output', {});
  return {
    element: h('label', { class: 'slider' }, h('span', {}, label, ': ', value), input),
    show(index, text) { input.value = index; input.setAttribute('aria-valuetext', text); value.textContent = text; },
  };
}

function tellHiding(cell) {
  const [plain, even] = [cell.contiguous, cell.zigzag];
  const how = even.hidden ? 'Under zigzag compute hides every message.' : `Under zigzag the busiest rank is blocked by messages for ${format.percent(even.s[2] / even.s[0])} of the time.`;
  const ratio = plain.s[0] / even.s[0];
  return `${how} Zigzag takes ${format.seconds(even.s[0])}, contiguous ${format.seconds(plain.s[0])}: ${ratio.toFixed(2)} times as long.`;
}

function hidingBars(section, cell, name) {
  const { tiles, messages } = section.layouts[name];
  const { begin, busy, moves, s: seconds } = cell[name];
  const unit = cell.unit_s;
  const bars = [];
  begin.forEach((of, t) => of.forEach((start, rank) => {
    const free = t ? begin[t - 1][rank] + busy[t - 1][rank] : 0;
    if (start > free) bars.push([rank, 'wait', free * unit, start * unit, '', `before step ${t}`]);
    if (busy[t][rank]) bars.push([rank, 'compute', start * unit, (start + busy[t][rank]) * unit, tiles[t][rank] || 'merge', `step ${t}`]);
  }));
  const last = begin.length - 1;
  begin[last].forEach((start, rank) => {
    const free = start + busy[last][rank];
    if (seconds[0] / unit - free > 2) bars.push([rank, 'wait', free * unit, seconds[0], '', 'for the others to finish']);
  });
  moves.forEach(([start, stop], i) => {
    const [t, src, dst, block] = messages[i];
    bars.push([dst, 'message', start * unit, stop * unit, block, `step ${t}, from rank ${src}`]);
  });
  return bars;
}

function hidingFacts({ s: [total, , exposed], idle }) {
  return h('dl', { class: 'facts small' }, [['time', format.seconds(total)], ['blocked by messages, at most', format.seconds(exposed)], ['not computing, ranks 0 to 3', idle.map((value) => `${value} %`).join(', ')]]
    .map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

// The whole table: where the ring hides its messages.
function buildMap(section) {
  const [numRows, numColumns] = [section.tokens.length, section.bandwidths.length];
  const [left, top, cellSize] = [44, 6, 22];
  const marks = section.cells.map((row, i) => row.map((cell, j) => {
    const isHidden = cell.zigzag.hidden;
    const square = s('rect', { x: left + j * cellSize, y: top + (numRows - 1 - i) * cellSize, width: cellSize - 2, height: cellSize - 2, rx: 3, class: isHidden ? 'map hides' : 'map shows', onclick: () => set({ tokens: i, rate: j }) });
    const dot = isHidden ? s('circle', { cx: left + (j + 0.5) * cellSize - 1, cy: top + (numRows - 0.5 - i) * cellSize - 1, r: 3, class: 'map-dot' }) : null;
    square.append(s('title', {}, `${section.tokens[i]} tokens, ${section.bandwidths[j]} GB/s: ${isHidden ? 'messages are hidden' : 'messages show'}`));
    return [square, dot];
  })).flat(2);
  const frame = s('rect', { width: cellSize + 1, height: cellSize + 1, rx: 4, class: 'map-frame' });
  const [width, height] = [left + numColumns * cellSize, top + numRows * cellSize + 34];
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart map-chart', role: 'img', 'aria-label': 'Where compute hides every message of the ring under zigzag: long sequences and fast links' },
    ...marks.filter(Boolean), frame,
    ...section.tokens.map((name, i) => (i % 2 ? s('text', { x: left - 6, y: top + (numRows - 0.5 - i) * cellSize + 4, class: 'tick end' }, name) : null)),
    ...section.bandwidths.map((value, j) => (j % 2 ? s('text', { x: left + (j + 0.5) * cellSize, y: height - 20, class: 'tick middle' }, String(value)) : null)),
    s('text', { x: left, y: height - 4, class: 'tick' }, 'GB/s across, tokens up'));
  return {
    element: h('figure', {}, h('figcaption', {}, 'Dotted: compute hides every message (zigzag)'), svg),
    show(i, j) { frame.setAttribute('x', left + j * cellSize - 1.5); frame.setAttribute('y', top + (numRows - 1 - i) * cellSize - 1.5); },
  };
}
