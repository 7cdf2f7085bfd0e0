// The matrix of queries and keys: every visible pair belongs to one tile, which one rank computes in one step.

const AXIS = 1.6; // of a cell, the strips that say who owns a row or a column

function buildMatrix(run, tables) {
  const rows = tables.rows[run.rows];
  const columns = tables.rows[run.columns];
  const visible = tables.visible[run.visible];
  const panels = new Map();
  run.steps.forEach((step, t) => step.forEach(([, tiles], rank) => tiles.forEach(([q, kv, pairs]) => {
    const heads = parseBlock(q).heads;
    if (!panels.has(heads)) panels.set(heads, []);
    panels.get(heads).push({ t, rank, q, kv, pairs });
  })));
  if (!panels.size) panels.set('', []);
  const drawn = [...panels].map(([heads, tiles]) => drawPanel(heads, tiles, rows, columns, visible));
  const element = h('div', { class: drawn.length > 4 ? 'matrices many' : drawn.length > 1 ? 'matrices' : 'matrix' }, drawn.map((panel) => panel.element));
  return { element, show: (t, query) => drawn.forEach((panel) => panel.show(t, query)) };
}

function drawPanel(heads, tiles, rows, columns, visible) {
  const [height, width] = [rows.positions.length, columns.positions.length];
  const unit = Math.max(1, Math.max(height, width) / 32);
  const axis = AXIS * unit;
  const paths = tiles.map((tile) => {
    const path = s('path', { d: tilePath(tile, rows, columns, visible), fill: paintOf(tile.rank, 'cell'), class: 'tile',
      'data-step': tile.t, 'data-rank': tile.rank, 'data-tile': `${tile.q}×${tile.kv}` });
    path.append(s('title', {}, `step ${tile.t}: rank ${tile.rank} computes ${tile.q}×${tile.kv}, ${format.plural(tile.pairs, 'pair')}`));
    return path;
  });
  const outline = s('path', { class: unit > 2 ? 'outline fine' : 'outline' });
  const marker = s('rect', { x: -axis, width: width + axis, height: 1, class: 'query-row' });
  const tall = height < width / 3 ? Math.min(3, width / 3 / height) : 1; // a few rows are drawn taller
  const svg = s('svg', { viewBox: `${-axis - 0.2} ${-axis - 0.2} ${width + axis + 0.4} ${height * tall + axis + 0.4}`, role: 'img',
    'aria-label': `Matrix of ${height} queries and ${width} keys${heads ? `, ${nameHeads(heads)}` : ''}` },
  s('g', { transform: `scale(1 ${tall})` },
    s('path', { d: pairsPath([...rows.positions.keys()], [...columns.positions.keys()], visible), class: 'visible' }),
    ...paths, outline,
    ...strip(rows.owners, (i) => ({ x: -axis, y: i, width: axis * 0.85, height: 1 }), unit, tall),
    marker),
  ...strip(columns.owners, (j) => ({ x: j, y: -axis, width: 1, height: axis * 0.85 }), unit, 1));
  return {
    element: h('figure', {}, heads ? h('figcaption', {}, nameHeads(heads)) : null, svg),
    show(t, query) {
      paths.forEach((path, i) => path.setAttribute('class', `tile ${tiles[i].t < t ? 'done' : tiles[i].t === t ? 'now' : 'later'}`));
      outline.setAttribute('d', tiles.filter((tile) => tile.t === t).map((tile) => outlinePath(tile, rows, columns, visible)).join(''));
      marker.setAttribute('y', query);
    },
  };
}

// One strip cell per row or column; neighbours of one owner share a label.
function strip(owners, place, unit, tall) {
  const parts = [];
  for (let i = 0, start = 0; i < owners.length; i += 1) {
    parts.push(s('rect', { ...place(i), fill: paintOf(owners[i], 'cell'), class: 'owner' }));
    if (owners[i + 1] === owners[i]) continue;
    const [first, last] = [place(start), place(i)];
    const [x, y] = [(first.x + last.x + last.width) / 2, (first.y + last.y + last.height) / 2];
    if (i - start + 1 >= unit) {
      const isAll = owners[i] === '*';
      parts.push(s('text', { x, y: y * tall, 'font-size': (isAll ? 0.7 : 1.05) * unit, 'stroke-width': 0.35 * unit, class: `owner-name ${lookOf(owners[i])}`, transform: tall > 1 ? `scale(1 ${1 / tall})` : null }, isAll ? 'all' : owners[i]));
    }
    start = i + 1;
  }
  return parts;
}

const ownedBy = (axis, block) => [...axis.owners.keys()].filter((i) => axis.owners[i] === parseBlock(block).owner);

function tilePath(tile, rows, columns, visible) {
  return pairsPath(ownedBy(rows, tile.q), ownedBy(columns, tile.kv), visible);
}

// The edges between the pairs of a tile and what does not belong to it.
function outlinePath(tile, rows, columns, visible) {
  const [inRows, inColumns] = [new Set(ownedBy(rows, tile.q)), new Set(ownedBy(columns, tile.kv))];
  const has = (i, j) => inRows.has(i) && inColumns.has(j) && visible[i][j] === '1';
  let path = '';
  for (const i of inRows) {
    for (const j of inColumns) {
      if (!has(i, j)) continue;
      if (!has(i - 1, j)) path += `M${j} ${i}h1`;
      if (!has(i + 1, j)) path += `M${j} ${i + 1}h1`;
      if (!has(i, j - 1)) path += `M${j} ${i}v1`;
      if (!has(i, j + 1)) path += `M${j + 1} ${i}v1`;
    }
  }
  return path;
}

// The outline of the visible pairs among some rows and columns: runs of equal extent in neighbouring rows are joined.
function pairsPath(rowIndices, columnIndices, visible) {
  let open = new Map();
  let path = '';
  const close = ({ from, to, top, bottom }) => { path += `M${from} ${top}H${to}V${bottom}H${from}Z`; };
  let previous = -2;
  for (const i of rowIndices) {
    const runs = new Map();
    let from = -1;
    for (let k = 0; k <= columnIndices.length; k += 1) {
      const j = columnIndices[k];
      const sees = k < columnIndices.length && visible[i][j] === '1';
      const goesOn = sees && from >= 0 && j === columnIndices[k - 1] + 1;
      if (from >= 0 && !goesOn) {
        const to = columnIndices[k - 1] + 1;
        const key = `${from}:${to}`;
        const above = i === previous + 1 ? open.get(key) : undefined;
        runs.set(key, above ? { ...above, bottom: i + 1 } : { from, to, top: i, bottom: i + 1 });
        if (above) open.delete(key);
        from = -1;
      }
      if (sees && from < 0) from = j;
    }
    open.forEach(close);
    open = runs;
    previous = i;
  }
  open.forEach(close);
  return path;
}
