// One query: how much of its softmax weight it has met, its log-sum-exp, and its error against dense attention.

const FLOOR = 1e-17;

function buildFollow() {
  const slider = h('input', { type: 'range', min: 0, 'aria-label': 'Query to follow', oninput: () => set({ query: slider.dataset.rows.split(',')[slider.value] }) });
  const name = h('output', {});
  const body = h('div', { class: 'follow-body' });
  const element = h('div', { class: 'follow panel' }, h('h3', {}, 'Follow one query'),
    h('p', {}, 'The result of a query grows block by block, merged by the log-sum-exp (lse). Its error stays large until the last visible key is in; then only rounding is left.'),
    h('label', { class: 'slider' }, name, slider), body);
  return {
    element,
    show(run, rows, row, t) {
      const index = run.queries.rows.indexOf(row);
      slider.max = run.queries.rows.length - 1;
      slider.value = index;
      slider.dataset.rows = run.queries.rows.join(',');
      const position = rows.positions[row];
      const owner = rows.owners[row] === '*' ? 'all ranks' : `rank ${rows.owners[row]}`;
      slider.setAttribute('aria-valuetext', `position ${position}, ${owner}`);
      name.textContent = `Query at position ${position}, on ${owner}, head 0`;
      const [lse, share, error] = ['lse', 'share', 'error'].map((key) => run.queries[key][index]);
      show(body, followTable(lse, share, error, t), h('figure', {}, h('figcaption', {}, 'Error of this query after each step, logarithmic'), errorChart(error, t)));
    },
  };
}

function followTable(lse, share, error, t) {
  const rows = lse.map((value, i) => h('tr', { class: i === t ? 'now' : i < t ? 'done' : 'later', 'data-step': i },
    h('th', { scope: 'row' }, `step ${i}`), h('td', { class: 'number' }, `${share[i]} %`),
    h('td', { class: 'number' }, value === null ? '−∞' : value.toFixed(2)), h('td', { class: 'number' }, format.error(error[i]))));
  return h('table', {}, h('thead', {}, h('tr', {}, ['after', 'share of the weight', 'lse', 'error'].map((head, i) => h('th', { scope: 'col', class: i ? 'number' : null }, head)))), h('tbody', {}, rows));
}

function errorChart(error, t) {
  const [width, height, left, right, top, bottom] = [Math.min(360, fitWidth(360) - 20), 178, 52, 14, 14, 38];
  const x = (i) => left + 10 + (error.length > 1 ? i / (error.length - 1) : 0.5) * (width - left - right - 10);
  const y = (value) => top + (Math.log10(Math.max(value, FLOOR)) - 1) / (Math.log10(FLOOR) - 1) * (height - top - bottom);
  const every = Math.ceil(error.length / 12);
  const points = error.map((value, i) => [x(i), y(value)]);
  return s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart', role: 'img', 'aria-label': `Error after each step: ${error.map(format.error).join(', ')}` },
    ...[1, 1e-5, 1e-10, 1e-15].flatMap((value) => [s('path', { d: `M${left} ${y(value)}H${width - right}`, class: 'grid' }), s('text', { x: left - 6, y: y(value) + 4, class: 'tick end' }, value === 1 ? '1' : value.toExponential(0))]),
    s('polyline', { points: points.map((point) => point.join(',')).join(' '), class: 'line' }),
    ...points.map(([cx, cy], i) => s('circle', { cx, cy, r: i === t ? 6 : 3.5, class: i === t ? 'point now' : 'point' })),
    ...error.map((_, i) => (i % every ? null : s('text', { x: x(i), y: height - 20, class: 'tick middle' }, String(i)))),
    s('text', { x: left, y: height - 4, class: 'tick' }, 'step'));
}
