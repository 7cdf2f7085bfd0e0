// What is being looked at, kept in the fragment of the address, so that a link leads to the same view.

const state = { values: {}, listeners: [], rules: {}, given: fromFragment() };

// A key with its default and a test for values that come from outside.
function declare(key, fallback, isLegal) {
  state.rules[key] = { fallback, isLegal };
  const given = state.given[key];
  state.values[key] = given !== undefined && isLegal(given) ? given : fallback;
}

function fromFragment(hash = location.hash) {
  return Object.fromEntries(new URLSearchParams(hash.slice(1)));
}

const get = (key) => state.values[key];
const getNumber = (key) => Number(state.values[key]);

function set(patch) {
  const changed = Object.keys(patch).filter((key) => state.values[key] !== String(patch[key]));
  for (const key of changed) state.values[key] = String(patch[key]);
  if (!changed.length) return;
  writeFragment();
  announce(changed);
}

function announce(changed) {
  for (const [keys, listener] of state.listeners) if (keys.some((key) => changed.includes(key))) listener();
}

// Calls the listener after one of the keys has changed.
const onChange = (keys, listener) => state.listeners.push([keys, listener]);

// Browsers refuse more than 100 changes of the address in 30 seconds, which a slider exceeds: then the last one waits.
const WRITES = { most: 60, times: [], later: 0 };

function writeFragment() {
  const now = performance.now();
  WRITES.times = WRITES.times.filter((time) => now - time < 30_000);
  if (WRITES.times.length >= WRITES.most) {
    WRITES.later ||= setTimeout(() => { WRITES.later = 0; writeFragment(); }, 1000);
    return;
  }
  WRITES.times.push(now);
  const entries = Object.entries(state.values).filter(([key, value]) => value !== state.rules[key].fallback);
  writeAddress('replaceState', `#${new URLSearchParams(entries)}`);
}

// A page inside another page (an iframe with `srcdoc`) has no address to write to, and goes on without.
function writeAddress(method, hash) {
  try { history[method](null, '', hash); } catch (error) { if (error.name !== 'SecurityError') throw error; }
}

// The fragment of another view: what is being looked at, with some values changed.
function linkTo(patch) {
  return `#${new URLSearchParams({ ...patch })}`;
}

addEventListener('hashchange', () => showFragment(fromFragment()));

// Shows the view of a link, also if the address is that of the link already.
function followLink(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  writeAddress('pushState', event.currentTarget.hash);
  showFragment(fromFragment(event.currentTarget.hash));
}

function showFragment(given) {
  state.given = given;
  for (const [key, { fallback, isLegal }] of Object.entries(state.rules)) {
    state.values[key] = given[key] !== undefined && isLegal(given[key]) ? given[key] : fallback;
  }
  announce(Object.keys(state.rules));
  scrollToSection(given.at);
}

function scrollToSection(id) {
  const target = id && document.querySelector(`section[data-id="${CSS.escape(id)}"]`);
  if (!target) return;
  target.scrollIntoView({ behavior: reducesMotion() ? 'auto' : 'smooth' });
  target.querySelector('h2').focus({ preventScroll: true });
}

const isWhole = (low, high) => (text) => /^\d+$/.test(text) && Number(text) >= low && Number(text) <= high;
