// What is being looked at, kept in the fragment of the address, so that a link leads to the same view.

const state = { values: {}, listeners: [], rules: {} };

// A key with its default and a test for values that come from outside.
function declare(key, fallback, isLegal) {
  state.rules[key] = { fallback, isLegal };
  const given = fromFragment()[key];
  state.values[key] = given !== undefined && isLegal(given) ? given : fallback;
}

function fromFragment() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

const get = (key) => state.values[key];
const getNumber = (key) => Number(state.values[key]);

function set(patch) {
  let changed = false;
  for (const [key, value] of Object.entries(patch)) {
    if (state.values[key] !== String(value)) changed = true;
    state.values[key] = String(value);
  }
  if (!changed) return;
  writeFragment();
  announce();
}

function announce() {
  for (const listener of state.listeners) listener();
}

const onChange = (listener) => state.listeners.push(listener);

function writeFragment() {
  const entries = Object.entries(state.values).filter(([key, value]) => value !== state.rules[key].fallback);
  history.replaceState(null, '', `#${new URLSearchParams(entries)}`);
}

// The fragment of another view: what is being looked at, with some values changed.
function linkTo(patch) {
  return `#${new URLSearchParams({ ...patch })}`;
}

addEventListener('hashchange', () => {
  const given = fromFragment();
  for (const [key, { fallback, isLegal }] of Object.entries(state.rules)) {
    state.values[key] = given[key] !== undefined && isLegal(given[key]) ? given[key] : fallback;
  }
  announce();
  scrollToSection(given.at);
});

function scrollToSection(id) {
  const target = id && document.querySelector(`section[data-id="${CSS.escape(id)}"]`);
  if (!target) return;
  target.scrollIntoView({ behavior: reducesMotion() ? 'auto' : 'smooth' });
  target.querySelector('h2').focus({ preventScroll: true });
}

const isWhole = (low, high) => (text) => /^\d+$/.test(text) && Number(text) >= low && Number(text) <= high;
