// Why zigzag: the pairs that every rank computes in every step; a step is as wide as its busiest rank.

function balanceSection(section) {
  const longest = Math.max(...section.charts.map((chart) => chart.time));
  return { element: h('div', {}, h('p', { class: 'legend' }, section.caption), section.charts.map((chart) => balanceFigure(chart, longest))), render() {} };
}

function balanceFigure(chart, longest) {
  const ratio = `${chart.imbalance.toFixed(2)} × the time of a perfectly balanced run`;
  return h('figure', { class: 'balance', 'data-layout': chart.name },
    h('figcaption', {}, h('strong', {}, chart.name), `: ${format.count(chart.time)} pairs long, ${ratio}`), drawBalance(chart, longest));
}

function drawBalance({ name, pairs, time }, longest) {
  const [width, left, lane, top] = [fitWidth(640), 56, 26, 18];
  const height = top + pairs[0].length * lane;
  const scale = (width - left - 2) / longest;
  const parts = [];
  let x = left;
  pairs.forEach((step, t) => {
    const most = Math.max(...step);
    parts.push(s('text', { x: x + 2, y: 12, class: 'tick' }, !t || most * scale > 44 ? `step ${t}` : String(t)), s('path', { d: `M${x} ${top - 2}V${height}`, class: 'grid' }));
    step.forEach((count, rank) => {
      const place = { y: top + rank * lane + 2, height: lane - 5 };
      if (count < most) parts.push(s('rect', { ...place, x: x + count * scale, width: (most - count) * scale - 1.5, fill: 'url(#waiting)' }));
      if (!count) return;
      parts.push(s('rect', { ...place, x, width: count * scale - 1.5, rx: 2, fill: paintOf(rank), class: 'work', 'data-rank': rank, 'data-step': t }, s('title', {}, `step ${t}: rank ${rank} computes ${format.plural(count, 'pair')}, and waits for ${most - count}`)),
        s('rect', { x: x + 4, y: place.y + 3, width: 26, height: place.height - 6, rx: 7, class: 'name-plate' }), s('text', { x: x + 17, y: place.y + 15, class: 'chip-name' }, String(count)));
    });
    x += most * scale;
  });
  const told = pairs.map((step, t) => `step ${t}: ${step.join(', ')}`).join('; ');
  return s('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart wide', role: 'img', 'aria-label': `${name}, pairs of ranks 0 to ${pairs[0].length - 1}. ${told}. In all ${time} pairs long.` },
    ...pairs[0].map((_, rank) => s('text', { x: left - 6, y: top + rank * lane + 17, class: 'tick end' }, `rank ${rank}`)), ...parts);
}
