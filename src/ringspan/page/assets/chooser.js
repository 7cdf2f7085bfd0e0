// Which run: five controls. What this page does not have says which command makes it, or why it is refused.

const CONTROLS = ['ranks', 'layout', 'mask', 'algorithm', 'direction'];

function buildChooser(section, runs) {
  const note = h('p', { class: 'note', role: 'status' });
  const buttons = [];
  const groups = CONTROLS.map((control) => {
    const id = `label-${control}`;
    const of = section.choices[control].map((choice) => {
      const button = h('button', { type: 'button', class: 'choice', 'data-control': control, 'data-key': choice.key, onclick: () => choose(control, choice) }, choice.label);
      buttons.push({ button, control, choice });
      return button;
    });
    return h('div', { class: 'control' }, h('span', { id, class: 'control-name' }, control), h('div', { role: 'group', 'aria-labelledby': id, class: 'choices' }, of));
  });
  const presets = section.presets.map((preset) =>
    h('button', { type: 'button', class: 'preset', 'data-run': preset.key, onclick: () => { show(note); set({ run: preset.key, step: 0 }); } },
      h('strong', {}, preset.label), h('span', {}, preset.about)));
  const element = h('div', { class: 'chooser' }, h('div', { class: 'presets', role: 'group', 'aria-label': 'Presets' }, presets),
    h('details', { class: 'all-controls', open: innerWidth >= 1200 }, h('summary', {}, 'Choose ranks, layout, mask, algorithm and direction'), groups, note));
  const parts = () => Object.fromEntries(get('run').split('|').map((value, i) => [CONTROLS[i], value]));
  const find = (wanted) => [wanted.direction, '', 'forward'].map((direction) => CONTROLS.map((control) => (control === 'direction' ? direction : wanted[control])).join('|')).find((key) => runs.has(key));
  const match = (control, choice) => {
    const wanted = { ...parts(), [control]: choice.key };
    const found = find(wanted);
    return control === 'direction' && found !== CONTROLS.map((name) => wanted[name]).join('|') ? undefined : found;
  };
  function choose(control, choice) {
    const found = match(control, choice);
    if (found) {
      show(note);
      set({ run: found, step: Math.min(getNumber('step'), runs.get(found).num_steps) });
    } else {
      show(note, ...explain(section, { ...parts(), [control]: choice.key }, control, choice));
    }
  }
  return {
    element,
    // The run in words, and the command that makes it.
    describe() {
      const now = parts();
      const [ranks, ...labels] = CONTROLS.map((control) => chosenOf(section, now, control).label);
      const [layout, mask, ...others] = labels.filter(Boolean);
      return { name: [`${ranks} ranks`, `${layout} layout`, `${mask} mask`, ...others].join(', '), command: commandOf(section, now) };
    },
    show() {
      const now = parts();
      for (const { button, control, choice } of buttons) {
        button.setAttribute('aria-pressed', String(now[control] === choice.key));
        const isHere = now[control] === choice.key || match(control, choice) !== undefined;
        button.setAttribute('aria-disabled', String(!isHere));
        button.title = isHere ? choice.about : 'Not in this page; choose it to see the command that makes it.';
      }
      for (const preset of element.querySelectorAll('.preset')) preset.setAttribute('aria-pressed', String(preset.dataset.run === get('run')));
    },
  };
}

function explain(section, wanted, control, choice) {
  const refused = section.refusals[`${wanted.ranks}|${wanted.algorithm}`] || section.refusals[`${wanted.mask}|${wanted.algorithm}`];
  if (refused) return [h('strong', {}, 'Not possible. '), refused];
  const takes = section.directed.includes(wanted.algorithm);
  if (control === 'direction' && !takes) return [`This algorithm has no direction; ${choice.label} is for the two rings.`];
  const { label, option } = chosenOf(section, wanted, 'algorithm');
  return [`This page does not have that run. This command makes it${option ? '' : ` and calls it “${label}”`}: `, h('code', {}, commandOf(section, wanted))];
}

const chosenOf = (section, wanted, name) => section.choices[name].find(({ key }) => key === wanted[name]) || { label: '', option: '' };

function commandOf(section, wanted) {
  const option = (name) => chosenOf(section, wanted, name).option;
  const mesh = section.meshed.includes(wanted.algorithm) ? `--mesh 2x${wanted.ranks / 2}` : '';
  const way = section.directed.includes(wanted.algorithm) ? option('direction') : '';
  return ['ringspan simulate', option('ranks'), `--tokens ${section.tokens}`, option('mask'), option('layout'), option('algorithm'), way, mesh, '--html run.html'].filter(Boolean).join(' ');
}

// A plain list, for pages that hold the runs of one command.
function buildRunList(section) {
  const buttons = section.runs.map((run) => h('button', { type: 'button', class: 'choice', 'data-key': run.key, onclick: () => set({ run: run.key, step: 0 }) }, run.label));
  const element = h('div', { class: 'chooser', hidden: buttons.length < 2 }, h('div', { role: 'group', 'aria-label': 'Runs', class: 'choices' }, buttons));
  return { element, describe: () => ({}), show: (run) => buttons.forEach((button) => button.setAttribute('aria-pressed', String(button.dataset.key === run.key))) };
}
