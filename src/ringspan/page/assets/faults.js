// Break it: one thing is done wrong; the error, and what the proof says of such a schedule.

function faultsSection(section) {
  declare('fault', section.faults[0].key, (key) => section.faults.some((fault) => fault.key === key));
  const buttons = section.faults.map((fault) => h('button', { type: 'button', class: 'choice', 'data-key': fault.key, onclick: () => set({ fault: fault.key }) }, fault.label));
  const body = h('div', { class: 'fault', role: 'status' });
  function render() {
    const fault = section.faults.find(({ key }) => key === get('fault'));
    buttons.forEach((button) => button.setAttribute('aria-pressed', String(button.dataset.key === fault.key)));
    show(body, h('p', { class: 'lead' }, fault.about), h('div', { class: 'two' }, faultFacts(fault), h('figure', {}, h('figcaption', {}, 'Error by query, logarithmic'), rowErrors(fault))), h('p', {}, fault.lesson), proof(fault));
  }
  onChange(['fault'], render);
  return { element: h('div', {}, h('div', { role: 'group', 'aria-label': 'Faults', class: 'choices' }, buttons), body), render };
}

function faultFacts(fault) {
  const isRight = fault.error < 1e-9;
  const isIdle = Math.max(...fault.idle) > 0.5;
  return h('dl', { class: 'facts' },
    h('div', { class: isRight ? 'good' : 'bad' }, h('dt', {}, 'largest error against dense attention'), h('dd', { 'data-name': 'error' }, `${isRight ? '✓' : '✗'} ${format.error(fault.error)}`)),
    h('div', {}, h('dt', {}, 'queries with a wrong output'), h('dd', { 'data-name': 'wrong' }, `${fault.wrong} of ${fault.total}`)),
    h('div', { class: isIdle ? 'bad' : null }, h('dt', {}, 'idle time of ranks 0 to 3'), h('dd', { 'data-name': 'idle' }, isIdle ? '✗ ' : '', fault.idle.map(format.percent).join(', '))));
}

// A bar per query, on a logarithmic scale.
function rowErrors(fault) {
  const [width, height, left, bottom] = [fitWidth(420), 158, 48, 34];
  const y = (value) => 8 + (Math.log10(Math.max(value, FLOOR)) - 1) / (Math.log10(FLOOR) - 1) * (height - bottom - 8);
  const step = (width - left) / fault.rows.length;
  return s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart', role: 'img', 'aria-label': `Error by query: ${fault.errors.map(format.error).join(', ')}` },
    ...[1, 1e-8, 1e-16].flatMap((value) => [s('path', { d: `M${left} ${y(value)}H${width}`, class: 'grid' }), s('text', { x: left - 5, y: y(value) + 4, class: 'tick end' }, value === 1 ? '1' : value.toExponential(0))]),
    ...fault.errors.map((value, i) => s('rect', { x: left + i * step + 2, width: step - 4, y: y(value), height: height - bottom - y(value), class: value < 1e-9 ? 'bar good' : 'bar bad' })),
    ...fault.rows.map((row, i) => (i % 3 === 0 ? s('text', { x: left + (i + 0.5) * step, y: height - 19, class: 'tick middle' }, String(row)) : null)),
    s('text', { x: left, y: height - 4, class: 'tick' }, 'query'));
}

function proof(fault) {
  const [reason, ...grid] = (fault.refusal || fault.grid).split('\n');
  if (fault.refusal === null) {
    return h('div', { class: 'proof good' }, h('h3', {}, '✓ ringspan.schedule.validate accepts this schedule'), gridText([reason, ...grid]));
  }
  return h('div', { class: 'proof bad' }, h('h3', {}, '✗ ringspan.schedule.validate refuses it'), h('p', { class: 'reason' }, reason), gridText(grid));
}

function gridText(lines) {
  return h('pre', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'The schedule: steps down, ranks across' },
    lines.map((line) => h('span', { class: line.startsWith('▶') ? 'marked' : null }, `${line}\n`)));
}
