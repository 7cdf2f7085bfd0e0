// Steps forward and back, by button, slider, arrow key or by itself.

function buildPlayer(picture) {
  let run = null;
  let started = 0;
  let frame = 0;
  const go = (t) => set({ step: Math.max(0, Math.min(run.num_steps, t)) });
  const button = (label, text, action) => h('button', { type: 'button', class: 'play', 'aria-label': label, title: label, onclick: action }, text);
  const toggle = button('Play', '▶', () => (frame ? stop() : play()));
  const back = button('Back one step', '‹', () => { stop(); go(getNumber('step') - 1); });
  const forward = button('Forward one step', '›', () => { stop(); go(getNumber('step') + 1); });
  const slider = h('input', { type: 'range', min: 0, value: 0, 'aria-label': 'Step', oninput: () => { stop(); go(Number(slider.value)); } });
  const place = h('output', { class: 'place' });
  const speed = h('select', { 'aria-label': 'Speed' }, Object.keys(SPEEDS).map((name) => h('option', { value: name, selected: name === 'normal' }, name)));
  function play() {
    if (getNumber('step') >= run.num_steps) go(0);
    started = performance.now();
    mark(true);
    frame = requestAnimationFrame(tick);
  }
  function stop() {
    cancelAnimationFrame(frame);
    frame = 0;
    mark(false);
    picture.move();
  }
  function mark(isPlaying) {
    toggle.textContent = isPlaying ? '❚❚' : '▶';
    toggle.setAttribute('aria-label', isPlaying ? 'Pause' : 'Play');
    toggle.title = isPlaying ? 'Pause' : 'Play';
  }
  function tick(now) {
    const share = (now - started) / SPEEDS[speed.value];
    if (share >= 1) {
      go(getNumber('step') + 1);
      started = now;
      if (getNumber('step') >= run.num_steps) { stop(); return; }
    }
    picture.move(reducesMotion() ? undefined : Math.min(1, share));
    frame = requestAnimationFrame(tick);
  }
  return {
    element: h('div', { class: 'player', role: 'group', 'aria-label': 'Player' }, back, toggle, forward, slider, place, h('label', { class: 'speed' }, h('span', {}, 'speed '), speed)),
    show(shown, t) {
      run = shown;
      slider.max = run.num_steps;
      slider.value = t;
      slider.setAttribute('aria-valuetext', t < run.num_steps ? `step ${t}` : 'done');
      place.textContent = t < run.num_steps ? `step ${t} of ${run.num_steps - 1}` : 'done';
      back.disabled = t === 0;
      forward.disabled = t >= run.num_steps;
    },
    onKey(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || event.altKey || event.ctrlKey || event.metaKey || event.target.closest('input, select, .scroll')) return;
      event.preventDefault();
      stop();
      go(getNumber('step') + step);
    },
  };
}
