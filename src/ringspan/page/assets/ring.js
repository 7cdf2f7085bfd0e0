// The ring, stepped through: controls for the run, a player for the steps, and what every rank does.

const SPEEDS = { slow: 2600, normal: 1400, fast: 600 };

function ringSection(section) {
  const keys = section.runs.map((run) => run.key);
  declare('run', section.first, (key) => keys.includes(key));
  declare('step', '0', isWhole(0, 1e6));
  declare('query', String(section.first_query), isWhole(0, 1e9));
  const runs = new Map(section.runs.map((run) => [run.key, run]));
  const picture = buildRingPicture();
  const matrixBox = h('div', { class: 'matrix-box' });
  const status = h('p', { class: 'status', role: 'status' });
  const table = h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'What every rank does in this step' });
  const about = h('div', { class: 'named' });
  const whole = h('div', { class: 'whole' });
  const follow = buildFollow();
  const player = buildPlayer(picture);
  const chooser = section.choices ? buildChooser(section, runs) : buildRunList(section);
  let matrix = null;
  let drawnKey = null;
  function render() {
    const run = runs.get(get('run'));
    const t = Math.min(getNumber('step'), run.num_steps);
    if (run.key !== drawnKey) {
      matrix = buildMatrix(run, section.tables);
      show(matrixBox, matrix.element);
      drawnKey = run.key;
      describeRun(about, whole, run, chooser.describe(run));
    }
    const rows = section.tables.rows[run.rows];
    const row = nearest(run.queries.rows, getNumber('query'));
    picture.show(run, t);
    matrix.show(t, row);
    status.textContent = tellStep(run, t);
    show(table, stepTable(run, t));
    follow.show(run, rows, row, t);
    player.show(run, t);
    chooser.show(run);
  }
  onChange(['run', 'step', 'query'], render);
  const stage = h('div', { class: 'stage' },
    h('figure', { class: 'panel' }, h('figcaption', {}, 'The ranks'), picture.element,
      h('p', { class: 'legend' }, h('span', { class: 'key pill' }, 'a block on its way'), h('span', { class: 'key waits' }, 'a rank that waits'), ' A card says what its rank computes, and which blocks of others it holds beside its own.')),
    h('figure', { class: 'panel' }, h('figcaption', {}, 'Queries (rows) against keys (columns)'), matrixBox,
      h('p', { class: 'legend' }, h('span', { class: 'key now' }, 'this step'), h('span', { class: 'key done' }, 'done'), h('span', { class: 'key later' }, 'later'),
        h('span', { class: 'key none' }, 'hidden by the mask'), h('span', { class: 'key followed' }, 'the query that is followed below'), ' Colour and pattern: the rank that computes. Strips: the rank that owns the row or column.')));
  const body = h('div', { class: section.choices ? 'ring-section beside' : 'ring-section', onkeydown: (event) => player.onKey(event) },
    chooser.element, h('div', {}, about, player.element, status, stage, table, whole, follow.element));
  return { element: body, render };
}

function describeRun(about, whole, run, { name, command }) {
  const facts = [[run.num_steps, 'steps'], [format.bytes(run.sent[run.num_steps - 1].reduce((a, b) => a + b, 0)), 'sent by all ranks together'],
    [run.steps.flat().reduce((sum, [, , sends]) => sum + sends.length, 0), 'messages'],
    [`${run.imbalance.toFixed(2)} ×`, 'the time of a perfectly balanced run'], [format.error(run.error), 'largest error']];
  show(about, name ? h('h3', {}, name) : null, h('p', {}, run.about));
  show(whole, h('p', { class: 'caption' }, 'The whole run'), h('dl', { class: 'facts' }, facts.map(([value, name]) => h('div', {}, h('dt', {}, name), h('dd', {}, String(value))))),
    command ? h('p', { class: 'command legend' }, 'On your machine: ', h('code', {}, command)) : null);
}

const nearest = (values, wanted) => values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best), values[0]);

function tellStep(run, t) {
  if (t >= run.num_steps) return `Done after ${format.plural(run.num_steps, 'step')}: every visible pair is computed once; the largest error is ${format.error(run.error)}.`;
  const cells = run.steps[t];
  const pairs = cells.map(([, tiles]) => tiles.length);
  const waiting = cells.flatMap(([, tiles], rank) => (tiles.length ? [] : [rank]));
  const sends = cells.flatMap(([, , of]) => of);
  const bytes = sends.reduce((sum, [, , nbytes]) => sum + nbytes, 0);
  const computing = pairs.filter(Boolean).length;
  const parts = [`Step ${t} (${t + 1} of ${run.num_steps}): ${computing === run.ranks ? 'every rank computes' : computing ? `${format.plural(computing, 'rank')} of ${run.ranks} compute` : 'no rank computes'}`];
  parts.push(sends.length ? `; ${computing ? 'meanwhile ' : ''}${format.plural(sends.length, 'message')} with ${format.bytes(bytes)} travel${sends.length === 1 ? 's' : ''}.` : '; nothing travels.');
  if (waiting.length && computing) parts.push(` Waiting: rank${waiting.length > 1 ? 's' : ''} ${waiting.join(', ')}.`);
  return parts.join('') + tellOne(cells);
}

// One rank that both computes and sends, in words.
function tellOne(cells) {
  const rank = cells.findIndex(([, tiles, sends]) => tiles.length === 1 && sends.length > 0 && sends.length < 3);
  if (rank < 0) return '';
  const [, [[q, kv]], sends] = cells[rank];
  const whose = parseBlock(kv).owner === String(rank) ? 'its own keys and values' : `the keys and values of rank ${parseBlock(kv).owner}`;
  const queries = parseBlock(q).owner === String(rank) ? 'its queries' : `the queries of rank ${parseBlock(q).owner}`;
  return ` For example, rank ${rank} computes ${queries} against ${whose} (${q}×${kv}) and sends ${sends.map(([block, dst]) => `${block} to rank ${dst}`).join(' and ')}.`;
}

// Tiles by name; where every one of some queries meets every one of some keys, as one product.
function nameTiles(tiles) {
  const [qs, kvs] = [0, 1].map((side) => [...new Set(tiles.map((tile) => tile[side]))]);
  if (tiles.length < 3 || qs.length * kvs.length !== tiles.length) return tiles.map(([q, kv]) => `${q}×${kv}`);
  return [`${nameBlocks(qs)} × ${nameBlocks(kvs)}`];
}

// kv0, kv1, kv2 and q0[0:2], q1[0:2] as "kv0 to kv2, q0 to q1 [0:2]".
function nameBlocks(names) {
  const groups = new Map();
  for (const name of names) {
    const { kind, owner, heads } = parseBlock(name);
    const key = `${kind}|${heads}`;
    groups.set(key, [...(groups.get(key) || []), Number(owner)]);
  }
  return [...groups].map(([key, owners]) => {
    const [kind, heads] = key.split('|');
    const sorted = owners.sort((a, b) => a - b);
    const isRun = sorted.length > 2 && sorted.at(-1) - sorted[0] === sorted.length - 1;
    const list = isRun ? `${kind}${sorted[0]} to ${kind}${sorted.at(-1)}` : sorted.map((owner) => `${kind}${owner}`).join(', ');
    return heads ? `${list} ${heads}` : list;
  }).join('; ');
}

function stepTable(run, t) {
  const last = Math.min(t, run.num_steps - 1);
  const isDone = t >= run.num_steps;
  const heads = ['rank', 'holds of others', 'computes', 'pairs', 'sends', 'bytes sent so far', 'idle so far'];
  const cell = (name, column, isNumber, ...shown) => h('td', { 'data-name': name, 'data-label': heads[column], class: isNumber ? 'number' : null }, ...shown);
  const rows = run.steps[last].map(([held, tiles, sends], rank) => h('tr', { 'data-rank': rank },
    h('th', { scope: 'row' }, h('span', { class: `chip ${lookOf(rank)}` }, `rank ${rank}`)),
    cell('holds', 1, false, isDone ? '' : !held.length ? h('span', { class: 'none' }, 'nothing') : held.length > 4 ? nameBlocks(held) : held.map(chip)),
    cell('computes', 2, false, isDone ? '' : nameTiles(tiles).map((name) => h('span', { class: 'tile-name' }, name))),
    cell('pairs', 3, true, isDone ? '' : format.count(tiles.reduce((sum, [, , pairs]) => sum + pairs, 0))),
    cell('sends', 4, false, isDone ? '' : sends.map(([block, dst]) => h('span', { class: 'tile-name' }, `${block}→${dst}`))),
    cell('sent', 5, true, format.count(run.sent[last][rank])),
    cell('idle', 6, true, format.percent(run.idle[last][rank]))));
  return h('table', { class: 'ranks' }, h('caption', {}, isDone ? 'After the last step' : `In step ${t}; totals are those at its end`),
    h('thead', {}, h('tr', {}, heads.map((name, i) => h('th', { scope: 'col', class: i > 4 || i === 3 ? 'number' : null }, name)))), h('tbody', {}, rows));
}
