// The plain sections: text, facts, tables that sort, curves with bands, stacked bars.

function textSection(section) {
  return { element: h('div', {}, section.paragraphs.map((text) => h('p', {}, text)), section.code ? h('pre', { class: 'scroll', tabindex: 0 }, section.code) : null), render() {} };
}

function factsSection(section) {
  return { element: h('dl', { class: 'facts' }, section.rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))), render() {} };
}

const PAGE_ROWS = 25; // more rows are shown on demand

function tableSection(section) {
  const order = { column: -1, isUp: true };
  let most = PAGE_ROWS;
  const body = h('tbody', {});
  const heads = section.columns.map((column, i) => h('th', { scope: 'col', class: column.numeric ? 'number' : null, 'aria-sort': 'none' },
    h('button', { type: 'button', onclick: () => sort(i) }, column.label, h('span', { class: 'arrow-mark', 'aria-hidden': 'true' }, ' ↕'))));
  const more = h('button', { type: 'button', class: 'choice', onclick: () => { most = Infinity; fillBody(); } }, 'Show all rows');
  function sort(column) {
    order.isUp = order.column === column ? !order.isUp : true;
    order.column = column;
    heads.forEach((head, i) => {
      head.setAttribute('aria-sort', i !== column ? 'none' : order.isUp ? 'ascending' : 'descending');
      head.querySelector('.arrow-mark').textContent = i !== column ? ' ↕' : order.isUp ? ' ↑' : ' ↓';
    });
    fillBody();
  }
  function fillBody() {
    const rows = [...section.rows];
    if (order.column >= 0) {
      const key = (row) => row[order.column].value ?? row[order.column].text;
      rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order.isUp ? 1 : -1));
    }
    show(body, rows.slice(0, most).map((row) => h('tr', {}, row.map((cell, i) => h(i ? 'td' : 'th', { scope: i ? null : 'row', class: section.columns[i].numeric ? 'number' : null }, cell.text)))));
    more.hidden = rows.length <= most;
  }
  fillBody();
  return { element: h('div', {}, h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': section.title }, h('table', {}, h('caption', {}, section.caption || ''), h('thead', {}, h('tr', {}, heads)), body)), more), render() {} };
}

const DASHES = ['', '7 3', '2 3', '9 3 2 3', '14 4', '5 2 1 2', '4 5', '1 4'];

function curvesSection(section) {
  const names = [...new Set(section.charts.flatMap((chart) => chart.lines.map((line) => line.name)))];
  return { element: h('div', { class: 'two' }, section.charts.map((chart) => drawCurves(chart, (line) => names.indexOf(line.name)))), render() {} };
}

// A name looks the same in every chart of the section.
function drawCurves(chart, lookOfLine) {
  const [width, height, left, right, top, bottom] = [520, 340, 64, 16, 14, 44];
  const xs = chart.lines.flatMap((line) => line.points.map(([x]) => x));
  const ys = chart.lines.flatMap((line) => line.points.map(([, y]) => y));
  const [x0, x1] = [Math.log2(Math.min(...xs)), Math.log2(Math.max(...xs, 2 * Math.min(...xs)))];
  const [y0, y1] = [Math.floor(Math.log10(Math.min(...ys) * chart.low)), Math.ceil(Math.log10(Math.max(...ys) * chart.high))];
  const x = (value) => left + ((Math.log2(value) - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((Math.log10(value) - y0) / (y1 - y0)) * (height - top - bottom);
  const every = Math.max(1, Math.ceil((x1 - x0) / 6));
  const xTicks = Array.from({ length: Math.floor((x1 - Math.ceil(x0)) / every) + 1 }, (_, i) => 2 ** (Math.ceil(x0) + i * every));
  const yTicks = Array.from({ length: y1 - y0 + 1 }, (_, i) => 10 ** (y0 + i));
  const parts = [
    ...yTicks.flatMap((value) => [s('path', { d: `M${left} ${y(value)}H${width - right}`, class: 'grid' }), s('text', { x: left - 6, y: y(value) + 4, class: 'tick end' }, format.seconds(value))]),
    ...xTicks.map((value) => s('text', { x: x(value), y: height - bottom + 18, class: 'tick middle' }, format.tokens(value))),
    chart.mark ? s('path', { d: `M${x(chart.mark)} ${top}V${height - bottom}`, class: 'mark' }) : null,
    s('text', { x: (left + width - right) / 2, y: height - 6, class: 'tick middle' }, chart.x),
  ];
  chart.lines.forEach((line) => {
    const i = lookOfLine(line);
    const upper = line.points.map(([px, py]) => `${x(px)},${y(py * chart.high)}`);
    const lower = line.points.map(([px, py]) => `${x(px)},${y(py * chart.low)}`).reverse();
    parts.push(s('polygon', { points: [...upper, ...lower].join(' '), class: `band ink-${i % NUM_LOOKS}` }));
  });
  chart.lines.forEach((line) => {
    const i = lookOfLine(line);
    parts.push(s('polyline', { points: line.points.map(([px, py]) => `${x(px)},${y(py)}`).join(' '), class: `curve ink-${i % NUM_LOOKS}`, 'stroke-dasharray': DASHES[i % DASHES.length] || null }));
    line.points.forEach(([px, py]) => parts.push(s('circle', { cx: x(px), cy: y(py), r: 3, class: `spot ink-${i % NUM_LOOKS}` }, s('title', {}, `${line.name}, ${chart.x} ${format.tokens(px)}: ${format.seconds(py)} (${format.seconds(py * chart.low)} to ${format.seconds(py * chart.high)})`))));
  });
  const legend = chart.lines.map((line) => [line, lookOfLine(line)]).map(([line, i]) => h('li', {}, s('svg', { width: 34, height: 10, 'aria-hidden': 'true' }, s('path', { d: 'M0 5H34', class: `curve ink-${i % NUM_LOOKS}`, 'stroke-dasharray': DASHES[i % DASHES.length] || null })), line.name));
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart', role: 'img', 'aria-label': `${chart.title}: ${chart.lines.map((line) => `${line.name} ${format.seconds(line.points.at(-1)[1])} at ${format.tokens(line.points.at(-1)[0])}`).join(', ')}` }, ...parts.filter(Boolean));
  return h('figure', {}, h('figcaption', {}, chart.title), svg, h('ul', { class: 'lines' }, legend));
}

function barsSection(section) {
  return { element: stackedBars(section.parts, section.rows, section.limit), render() {} };
}

// A table whose bars are made of parts; the numbers stand beside them.
function stackedBars(parts, rows, limit) {
  const most = Math.max(limit ? limit.value : 0, ...rows.map((row) => row.values.reduce((a, b) => a + b, 0)));
  const lines = rows.map((row) => {
    const total = row.values.reduce((a, b) => a + b, 0);
    const pieces = row.values.map((value, i) => {
      const piece = h('span', { class: `piece piece-${i % 6}`, title: `${parts[i]}: ${format.bytes(value)}` });
      piece.style.width = `${(100 * value) / most}%`;
      return piece;
    });
    return h('tr', {}, h('th', { scope: 'row' }, row.label), h('td', { class: 'bar-cell' }, h('div', { class: 'stack', role: 'img', 'aria-label': row.values.map((value, i) => `${parts[i]} ${format.bytes(value)}`).join(', ') }, pieces, limit ? limitMark(limit, most) : null)), h('td', { class: 'number' }, format.bytes(total)));
  });
  return h('div', {}, h('p', { class: 'legend' }, parts.map((part, i) => h('span', { class: `key piece-${i % 6}` }, part)), limit ? h('span', { class: 'key limit' }, limit.label) : null),
    h('table', { class: 'bars' }, h('tbody', {}, lines)));
}

function limitMark(limit, most) {
  const mark = h('span', { class: 'limit-mark', title: limit.label });
  mark.style.left = `${(100 * limit.value) / most}%`;
  return mark;
}

function memorySection(section) {
  declare('memory', section.algorithms[0].key, (key) => section.algorithms.some((one) => one.key === key));
  const buttons = section.algorithms.map((one) => h('button', { type: 'button', class: 'choice', 'data-key': one.key, onclick: () => set({ memory: one.key }) }, one.label));
  const body = h('div', {});
  function render() {
    const chosen = section.algorithms.find(({ key }) => key === get('memory'));
    buttons.forEach((button) => button.setAttribute('aria-pressed', String(button.dataset.key === chosen.key)));
    const rows = section.ranks.map((ranks, i) => ({ label: format.plural(ranks, 'rank'), values: chosen.bytes[i] }));
    show(body, stackedBars(['own queries', 'own keys and values', 'output and buffers'], rows));
  }
  onChange(render);
  return { element: h('div', {}, h('div', { role: 'group', 'aria-label': 'Algorithm', class: 'choices' }, buttons), body), render };
}
