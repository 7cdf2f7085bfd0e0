// Puts the page together from its payload.

const SECTIONS = { ring: ringSection, faults: faultsSection, hiding: hidingSection, memory: memorySection, questions: questionsSection,
  text: textSection, facts: factsSection, table: tableSection, curves: curvesSection, bars: barsSection, gantt: ganttSection };

function main() {
  const payload = JSON.parse(document.getElementById('payload').textContent);
  const root = document.getElementById('page');
  const built = payload.sections.map((section) => ({ section, ...SECTIONS[section.kind](section) }));
  const links = built.map(({ section }) => h('a', { href: linkTo({ at: section.id }), onclick: (event) => { event.preventDefault(); scrollToSection(section.id); } }, section.nav || section.title));
  show(root,
    h('header', {}, h('h1', {}, payload.title), payload.lead.map((text) => h('p', { class: 'lead' }, text)), links.length > 2 ? h('nav', { 'aria-label': 'Sections' }, links) : null),
    h('main', {}, built.map(({ section, element }) => h('section', { 'data-id': section.id, class: 'section', 'data-kind': section.kind, 'aria-label': section.title }, h('h2', { tabindex: -1 }, section.title), (section.lead || []).map((text) => h('p', { class: 'lead' }, text)), element))),
    h('footer', {}, h('p', {}, `Made by ringspan ${payload.version}`, payload.command ? ' with ' : '.', payload.command ? h('code', {}, payload.command) : null), h('p', {}, payload.foot)));
  document.body.prepend(patternDefs());
  built.forEach(({ render }) => render());
  document.body.dataset.ready = 'true';
  scrollToSection(fromFragment().at);
}

main();
