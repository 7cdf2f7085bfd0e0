// Puts the page together from its payload: the title stands in the file, then one section per task, so that it is painted early.

const SECTIONS = { ring: ringSection, balance: balanceSection, faults: faultsSection, hiding: hidingSection, memory: memorySection, questions: questionsSection,
  text: textSection, facts: factsSection, table: tableSection, curves: curvesSection, bars: barsSection, gantt: ganttSection };

function main() {
  const payload = JSON.parse(document.getElementById('payload').textContent);
  const shells = payload.sections.map((section) => h('section', { 'data-id': section.id, class: 'section', 'data-kind': section.kind, 'aria-label': section.title },
    h('h2', { tabindex: -1 }, section.title), (section.lead || []).map((text) => h('p', { class: 'lead' }, text))));
  document.body.prepend(patternDefs());
  const header = document.querySelector('header');
  header.append(...navigation(payload.sections));
  const lesson = payload.sections.find((section) => section.kind === 'ring' && section.choices);
  if (lesson) { header.classList.add('with-hero'); header.querySelector('.lead').after(buildHero(lesson)); }
  document.getElementById('page').append(h('main', {}, shells), footer(payload));
  const fillNext = (i) => {
    if (i === shells.length) { finish(); return; }
    const built = SECTIONS[payload.sections[i].kind](payload.sections[i]);
    shells[i].append(built.element);
    built.render();
    setTimeout(fillNext, 0, i + 1);
  };
  fillNext(0);
}

function navigation(sections) {
  if (sections.length < 3) return [];
  const links = sections.map((section) => h('a', { href: linkTo({ at: section.id }), onclick: (event) => { event.preventDefault(); scrollToSection(section.id); } }, section.nav || section.title));
  return [h('nav', { 'aria-label': 'Sections' }, links)];
}

function footer({ version, command, foot }) {
  return h('footer', {}, h('p', {}, `Made by ringspan ${version}`, command ? ' with ' : '.', command ? h('code', {}, command) : null), h('p', {}, foot));
}

function finish() {
  document.body.dataset.ready = 'true';
  scrollToSection(fromFragment().at);
}

// After the first paint; where nothing is painted, as in a hidden tab, a moment later.
let isBegun = false;
const begin = () => { if (!isBegun) { isBegun = true; main(); } };
requestAnimationFrame(() => setTimeout(begin, 0));
setTimeout(begin, 200);
