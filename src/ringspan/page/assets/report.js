// The plain sections: text, facts, tables that sort, curves with bands, stacked bars.

function textSection(section) {
  return { element: h('div', { class: section.terms ? 'two' : null }, h('div', {}, section.paragraphs.map((text) => h('p', {}, text))),
    section.code ? h('pre', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': section.title }, section.code) : null, section.terms ? termList(section) : null), render() {} };
}

function termList({ terms_title: title, terms }) {
  return h('div', { class: 'panel' }, h('h3', {}, title), h('dl', { class: 'terms' }, terms.map(([term, meaning]) => h('div', {}, h('dt', {}, term), h('dd', {}, meaning)))));
}

function factsSection(section) {
  return { element: h('dl', { class: 'facts' }, section.rows.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))), render() {} };
}

const PAGE_ROWS = 25; // more rows are shown on demand

function tableSection(section) {
  const order = { column: -1, isUp: true };
  let most = PAGE_ROWS;
  const isCompact = !section.is_fixed && section.rows.every((row) => row.every((cell) => cell.text.length <= 44)); // no cell is broken over lines
  const body = h('tbody', {});
  const heads = section.columns.map((column, i) => h('th', { scope: 'col', class: column.numeric ? 'number' : null, 'aria-sort': section.is_fixed ? null : 'none' },
    section.is_fixed ? column.label : h('button', { type: 'button', onclick: () => sort(i) }, column.label, h('span', { class: 'arrow-mark', 'aria-hidden': 'true' }, ' ↕'))));
  const more = h('button', { type: 'button', class: 'choice', onclick: () => { most = Infinity; fillBody(); } }, `Show all ${format.count(section.rows.length)} rows`);
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
  return { element: h('div', {}, section.caption ? h('p', { class: 'caption' }, section.caption) : null, h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': section.title }, h('table', { class: isCompact ? 'compact' : null }, h('thead', {}, h('tr', {}, heads)), body)), more), render() {} };
}

const DASHES = ['', '7 3', '2 3', '9 3 2 3', '14 4', '5 2 1 2', '4 5', '1 4'];

function curvesSection(section) {
  const names = [...new Set(section.charts.flatMap((chart) => [...chart.lines, ...chart.dots].map((line) => line.name)))];
  return { element: h('div', { class: 'two' }, section.charts.map((chart) => drawCurves(chart, (line) => names.indexOf(line.name)))), render() {} };
}

// A name looks the same in every chart of the section.
function drawCurves(chart, lookOfLine) {
  const [width, height, left, right, top, bottom] = [fitWidth(520), 340, 64, 16, 14, 44];
  const all = [...chart.lines, ...chart.dots].flatMap((line) => line.points);
  const xs = all.map(([value]) => value);
  const [x0, x1] = [Math.log2(Math.min(...xs)), Math.log2(Math.max(...xs, 2 * Math.min(...xs)))];
  const lowest = Math.floor(Math.log10(Math.min(...all.map(([, , low]) => low))));
  const [y0, y1] = [lowest, Math.max(lowest + 1, Math.ceil(Math.log10(Math.max(...all.map(([, , , high]) => high)))))];
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
    const upper = line.points.map(([px, , , high]) => `${x(px)},${y(high)}`);
    const lower = line.points.map(([px, , low]) => `${x(px)},${y(low)}`).reverse();
    parts.push(s('polygon', { points: [...upper, ...lower].join(' '), class: `band ink-${i % NUM_LOOKS}` }));
  });
  chart.lines.forEach((line) => {
    const i = lookOfLine(line);
    parts.push(s('polyline', { points: line.points.map(([px, py]) => `${x(px)},${y(py)}`).join(' '), class: `curve ink-${i % NUM_LOOKS}`, 'stroke-dasharray': DASHES[i % DASHES.length] || null }));
    line.points.forEach((point) => parts.push(s('circle', { cx: x(point[0]), cy: y(point[1]), r: 3, class: `spot ink-${i % NUM_LOOKS}` }, s('title', {}, tellPoint(line, chart, point)))));
  });
  chart.dots.forEach((line) => line.points.forEach((point) => parts.push(
    s('circle', { cx: x(point[0]), cy: y(point[1]), r: 5, class: `dot-only ink-${lookOfLine(line) % NUM_LOOKS}` }, s('title', {}, tellPoint(line, chart, point))))));
  const dots = chart.dots.map((line) => h('li', {}, s('svg', { width: 34, height: 12, 'aria-hidden': 'true' }, s('circle', { cx: 17, cy: 6, r: 5, class: `dot-only ink-${lookOfLine(line) % NUM_LOOKS}` })), `${line.name}, measured`));
  const legend = chart.lines.map((line) => [line, lookOfLine(line)]).map(([line, i]) => h('li', {}, s('svg', { width: 34, height: 10, 'aria-hidden': 'true' }, s('path', { d: 'M0 5H34', class: `curve ink-${i % NUM_LOOKS}`, 'stroke-dasharray': DASHES[i % DASHES.length] || null })), line.name));
  const svg = s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart curves', role: 'img', 'aria-label': `${chart.title}: ${chart.lines.map((line) => `${line.name} ${format.seconds(line.points.at(-1)[1])} at ${format.tokens(line.points.at(-1)[0])}`).join(', ')}` }, ...parts.filter(Boolean));
  return h('figure', {}, h('figcaption', {}, chart.title), svg, h('ul', { class: 'lines' }, legend, dots), curveNumbers(chart));
}

function tellPoint(line, chart, point) {
  return `${line.name}, ${chart.x} ${format.tokens(point[0])}: ${tellValue(point)}`;
}

function tellValue([, y, low, high]) {
  return low === high ? format.seconds(y) : `${format.seconds(y)} (${format.seconds(low)} to ${format.seconds(high)})`;
}

// A column per line and a row per count.
function curveNumbers(chart) {
  const lines = [...chart.lines, ...chart.dots.map((line) => ({ ...line, name: `${line.name}, measured` }))];
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const rows = xs.map((x) => ({ label: format.tokens(x), values: lines.map((line) => line.points.find((point) => point[0] === x)) }));
  return numberTable(chart.x, lines.map((line) => line.name), rows, chart.title, (point) => (point ? tellValue(point) : ''));
}

const NUM_PIECES = 9;

function barsSection(section) {
  const used = section.parts.map((_, i) => i).filter((i) => section.rows.some((row) => row.values[i] > 0));
  const rows = section.rows.map((row) => ({ label: row.label, values: used.map((i) => row.values[i]) }));
  const parts = used.map((i) => section.parts[i]);
  const write = format[section.unit];
  return { element: h('div', {}, stackedBars(parts, rows, section.limit, write), barNumbers(parts, rows, section.title, write)), render() {} };
}

// A table whose bars are made of parts; the sums stand beside them.
function stackedBars(parts, rows, limit, write = format.bytes) {
  const sum = (row) => row.values.reduce((a, b) => a + b, 0);
  const most = Math.max(limit ? limit.value : 0, ...rows.map(sum)) || 1;
  const lines = rows.map((row) => {
    const pieces = row.values.map((value, i) => {
      const piece = h('span', { class: `piece piece-${i % NUM_PIECES}`, title: `${parts[i]}: ${write(value)}` });
      piece.style.width = `${(100 * value) / most}%`;
      return piece;
    });
    const told = row.values.map((value, i) => `${parts[i]} ${write(value)}`).join(', ');
    return h('tr', {}, h('th', { scope: 'row' }, row.label),
      h('td', { class: 'bar-cell' }, h('div', { class: 'stack', role: 'img', 'aria-label': told }, pieces, limit ? limitMark(limit, most) : null)),
      h('td', { class: 'number' }, write(sum(row))));
  });
  return h('div', {}, h('p', { class: 'legend' }, parts.map((part, i) => h('span', { class: `key piece-${i % NUM_PIECES}` }, part)), limit ? h('span', { class: 'key limit' }, limit.label) : null),
    h('table', { class: 'bars' }, h('tbody', {}, lines)));
}

// The same in numbers, for those who cannot point at a piece.
const barNumbers = (parts, rows, title, write) => numberTable('', parts, rows, title, write);

function numberTable(corner, parts, rows, title, write) {
  const head = h('tr', {}, h('td', {}, corner), parts.map((part) => h('th', { scope: 'col', class: 'number' }, part)));
  const lines = rows.map((row) => h('tr', {}, h('th', { scope: 'row' }, row.label), row.values.map((value) => h('td', { class: 'number' }, write(value)))));
  return h('details', {}, h('summary', {}, 'The same in numbers'),
    h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': `${title}, in numbers` }, h('table', {}, h('thead', {}, head), h('tbody', {}, lines))));
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
    const parts = ['own queries', 'own keys and values', 'output and buffers'];
    show(body, stackedBars(parts, rows), barNumbers(parts, rows, chosen.label, format.bytes));
  }
  onChange(['memory'], render);
  return { element: h('div', {}, h('div', { role: 'group', 'aria-label': 'Algorithm', class: 'choices' }, buttons), body), render };
}
