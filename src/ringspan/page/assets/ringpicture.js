// The ranks on a ring: what each holds and computes in a step, and what travels between them.

const CARD = { width: 104, height: 66 };

function buildRingPicture() {
  const svg = s('svg', { class: 'ring-picture', role: 'img' });
  const element = h('div', { class: 'ring-box' }, svg);
  let drawn = null;
  let travelling = [];
  function draw() {
    if (!drawn) return;
    const width = Math.max(280, Math.round(element.clientWidth || 480));
    travelling = drawRing(svg, drawn.run, drawn.t, width);
  }
  new ResizeObserver(draw).observe(element);
  return {
    element,
    show(run, t) { drawn = { run, t }; draw(); },
    // Moves what travels to a share of its way, or to where its name can be read.
    move(share) { for (const arrow of travelling) arrow.moveTo(...(share === undefined ? arrow.rest : [share])); },
  };
}

function drawRing(svg, run, t, width) {
  const isDone = t >= run.num_steps;
  const numRanks = run.ranks;
  const small = width < 420;
  const columns = Math.max(1, Math.floor(width / (CARD.width + 8)));
  const onRing = numRanks <= 8;
  const isCrowded = run.steps.some((step) => listSends(step).length > numRanks);
  const height = onRing ? (small ? (numRanks > 4 ? 470 : isCrowded ? 410 : 330) : Math.min(numRanks > 4 ? 520 : 490, 0.9 * width)) : Math.ceil(numRanks / columns) * (CARD.height + 12) + 8;
  const centres = Array.from({ length: numRanks }, (_, rank) => {
    if (!onRing) return [(rank % columns + 0.5) * (width / columns), Math.floor(rank / columns) * (CARD.height + 12) + CARD.height / 2 + 4];
    if (small && numRanks > 4) return placeOnTrack(rank, numRanks, width, isCrowded ? 76 : 52);
    const angle = -Math.PI / 2 + (2 * Math.PI * rank) / numRanks;
    const radius = [Math.min(width / 2 - CARD.width / 2 - 4, 250), height / 2 - CARD.height / 2 - 4];
    return [width / 2 + radius[0] * Math.cos(angle), height / 2 + radius[1] * Math.sin(angle)];
  });
  const ys = centres.map(([, y]) => y);
  const [top, bottom] = [Math.min(...ys) - CARD.height / 2 - 4, Math.max(...ys) + CARD.height / 2 + 4];
  svg.setAttribute('viewBox', `0 ${top} ${width} ${bottom - top}`);
  svg.setAttribute('width', width);
  svg.setAttribute('height', bottom - top);
  const cells = isDone ? run.steps[run.num_steps - 1].map(() => [[], [], []]) : run.steps[t];
  const sends = listSends(cells);
  svg.setAttribute('aria-label', describeRing(cells, sends, t, isDone));
  const isLabelled = onRing && sends.length <= (numRanks > 4 && width < 480 ? 1 : 2) * numRanks; // where there is no room for twice as many names
  const arrows = onRing ? sends.map((send) => drawArrow(send, centres, isLabelled)) : [];
  const receivers = new Set(sends.map(({ dst }) => dst));
  const cards = centres.map((centre, rank) => drawCard(rank, centre, cells[rank], isDone ? [`out${rank} done`] : describeWork(cells[rank], receivers.has(rank)), isDone));
  const sum = onRing && !isLabelled ? [drawSum(sends, width / 2, centres)] : [];
  svg.replaceChildren(...arrows.map((arrow) => arrow.line), ...cards, ...arrows.map((arrow) => arrow.chipElement).filter(Boolean), ...sum);
  const named = arrows.filter((arrow) => arrow.chipElement);
  placeNames(named, centres, { left: 0, right: width, top, bottom });
  named.forEach((arrow) => arrow.moveTo(...arrow.rest));
  return named;
}

const listSends = (cells) => cells.flatMap(([, , of], src) => of.map(([block, dst, nbytes]) => ({ block, src, dst, nbytes })));

// Shares of the way, and pixels beside it; the first that covers least is taken.
const PLACES = [0, 14, -14, 26, -26].flatMap((aside) => [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8].map((share) => [share, aside]));
const meet = (a, b) => Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
const boxAround = ([x, y], half, high) => ({ left: x - half, right: x + half, top: y - high, bottom: y + high });

// Where on its way each block is drawn at rest: in the middle, or beside it if another name or a card is there.
function placeNames(arrows, centres, frame) {
  const taken = centres.map((centre) => boxAround(centre, CARD.width / 2, CARD.height / 2));
  for (const arrow of arrows) {
    const boxes = PLACES.map((place) => boxAround(arrow.pointAt(...place), arrow.half + 1, 12));
    const covered = boxes.map((box) => taken.reduce((sum, other) => sum + meet(box, other), meet(box, box) - meet(box, frame)));
    const best = covered.indexOf(Math.min(...covered));
    taken.push(boxes[best]);
    arrow.rest = PLACES[best];
  }
}

// The picture at the top of the lesson: the blocks go round once, then it stands still. It leads to the ring.
function buildHero({ id, runs, first }) {
  const picture = buildRingPicture();
  const run = runs.find(({ key }) => key === first);
  const lastTime = 4800; // motion of more than five seconds would need a button that stops it
  let begun = 0;
  const tick = (now) => {
    begun ||= now;
    const share = run.num_steps * Math.min(now - begun, lastTime) / lastTime;
    if (share >= run.num_steps) { picture.show(run, 1); return; }
    picture.show(run, Math.floor(share));
    picture.move(share % 1);
    requestAnimationFrame(tick);
  };
  picture.show(run, 1);
  if (!reducesMotion()) requestAnimationFrame(tick);
  return h('a', { class: 'hero', href: linkTo({ at: id }), 'aria-label': 'Step through the ring', onclick: (event) => { event.preventDefault(); scrollToSection(id); } }, picture.element);
}

// Where there is no room for a circle: down one side and up the other.
function placeOnTrack(rank, numRanks, width, gap) {
  const half = Math.ceil(numRanks / 2);
  const isDown = rank < half;
  return [width * (isDown ? 0.76 : 0.24), (isDown ? rank : numRanks - 1 - rank) * (CARD.height + gap)];
}

function describeRing(cells, sends, t, isDone) {
  if (isDone) return 'All steps are done; nothing travels.';
  const computing = cells.map(([, tiles], rank) => `rank ${rank} ${tiles.length ? `computes ${tiles.map(([q, kv]) => `${q}×${kv}`).join(' ')}` : 'waits'}`);
  const sending = sends.slice(0, 16).map(({ block, src, dst }) => `${block} from rank ${src} to rank ${dst}`);
  return `Step ${t}: ${computing.join(', ')}. ${sending.length ? `Travelling: ${sending.join(', ')}.` : 'Nothing travels.'}`;
}

function drawCard(rank, [x, y], [held, tiles], work, isDone) {
  const { width } = CARD;
  const room = 15; // characters
  const plate = 8 * `rank ${rank}`.length + 2;
  const shown = work.map((line) => shorten(line, room));
  const holds = isDone ? '' : held.length ? `own + ${held.length > 1 ? `${held.length} blocks` : held[0]}` : 'own blocks only';
  return s('g', { transform: `translate(${x - width / 2} ${y - CARD.height / 2})`, class: `card ${work[0] === 'waits' ? 'idle' : 'busy'}` },
    s('rect', { width, height: CARD.height, rx: 9, class: 'card-box' }),
    s('path', { d: `M0 22V9A9 9 0 0 1 9 0H${width - 9}A9 9 0 0 1 ${width} 9V22Z`, fill: paintOf(rank) }),
    s('rect', { x: 6, y: 3.5, width: plate, height: 15, rx: 7.5, class: 'name-plate' }),
    s('text', { x: 6 + plate / 2, y: 15, class: 'card-name' }, `rank ${rank}`),
    ...shown.map((line, i) => s('text', { x: width / 2, y: 38 + 15 * i, class: 'card-work' }, line)),
    shown.length < 2 ? s('text', { x: width / 2, y: 56, class: 'card-holds' }, shorten(holds, room + 2)) : null);
}

// Too many messages to name each: their number and what they are, as near to the middle as no card is covered.
function drawSum(sends, x, centres) {
  const kinds = [...new Set(sends.map(({ block }) => parseBlock(block).kind))].join(', ');
  const words = `${sends.length} messages: ${kinds}`;
  const half = 8 + 3.6 * words.length;
  const middle = centres.reduce((sum, [, y]) => sum + y, 0) / centres.length;
  const cards = centres.map((centre) => boxAround(centre, CARD.width / 2, CARD.height / 2));
  const y = [0, -52, 52, -72, 72].map((aside) => middle + aside).find((at) => cards.every((card) => !meet(card, boxAround([x, at], half, 15)))) ?? middle;
  return s('g', { class: 'sum' }, s('rect', { x: x - half, y: y - 13, width: 2 * half, height: 26, rx: 13, class: 'card-box' }), s('text', { x, y: y + 4, class: 'sum-name' }, words));
}

function describeWork([, tiles, sends], receives) {
  if (!tiles.length) return [sends.length ? (receives ? 'exchanges' : 'sends') : receives ? 'receives' : 'waits'];
  const heads = parseBlock(tiles[0][0]).heads;
  if (tiles.length > 2) return [`${tiles.length} tiles`, heads ? nameHeads(heads) : `${tiles[0][0]} × …`];
  return tiles.map(([q, kv]) => `${q} × ${kv}`);
}

const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function drawArrow({ block, src, dst }, centres, isLabelled) {
  const [[x0, y0], [x1, y1]] = [edge(centres[src], centres[dst]), edge(centres[dst], centres[src])];
  const [dx, dy] = [x1 - x0, y1 - y0];
  const bend = Math.abs(dx) < 5 && Math.abs(dy) > 150 ? 0.35 : 0.12; // past the cards in between
  const control = [(x0 + x1) / 2 + dy * bend, (y0 + y1) / 2 - dx * bend];
  const pointAt = (share, aside = 0) => {
    const left = 1 - share;
    return [0, 1].map((i) => left * left * [x0, y0][i] + 2 * left * share * control[i] + share * share * [x1, y1][i] + aside * [dy, -dx][i] / Math.hypot(dx, dy));
  };
  const line = s('path', { d: `M${x0} ${y0}Q${control} ${x1} ${y1}`, class: 'arrow', 'marker-end': 'url(#head)' });
  if (!isLabelled) return { line };
  const { owner } = parseBlock(block);
  const half = 9 + 3.8 * block.length;
  const chipElement = s('g', { class: 'travelling' },
    s('rect', { x: -half, y: -11, width: 2 * half, height: 22, rx: 11, fill: paintOf(owner), class: 'chip-edge' }),
    s('rect', { x: -half + 4, y: -7.5, width: 2 * half - 8, height: 15, rx: 7.5, class: 'name-plate' }),
    s('text', { x: 0, y: 4, class: 'chip-name' }, block));
  return { line, chipElement, half, pointAt, rest: PLACES[0], moveTo: (...place) => chipElement.setAttribute('transform', `translate(${pointAt(...place).map((value) => value.toFixed(1)).join(' ')})`) };
}

// Where the line between two cards leaves the first.
function edge([x, y], [toX, toY]) {
  const [dx, dy] = [toX - x, toY - y];
  const share = Math.min((CARD.width / 2 + 5) / Math.abs(dx || 1e-9), (CARD.height / 2 + 5) / Math.abs(dy || 1e-9));
  return [x + dx * share, y + dy * share].map((value) => Math.round(value * 10) / 10);
}
