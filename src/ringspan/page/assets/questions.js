// Questions that the page itself answers, checked at once. The answers were computed with everything else.

function questionsSection(section) {
  const items = section.questions.map((question, number) => questionItem(question, number));
  return { element: h('ol', { class: 'questions' }, items), render() {} };
}

function questionItem(question, number) {
  const verdict = h('output', { class: 'verdict', 'aria-live': 'polite' });
  const id = `question-${number}`;
  const field = question.choices
    ? h('div', { role: 'radiogroup', 'aria-labelledby': id, class: 'answers' }, question.choices.map((choice, i) => h('label', {}, h('input', { type: 'radio', name: id, value: i }), ` ${choice}`)))
    : h('div', { class: 'answers' }, h('input', { type: 'text', inputmode: 'decimal', 'aria-labelledby': id, autocomplete: 'off', size: 12 }), question.unit ? h('span', {}, ` ${question.unit}`) : null);
  const form = h('form', { onsubmit: (event) => { event.preventDefault(); judge(); } }, field, h('span', { class: 'check' }, h('button', { type: 'submit', class: 'choice' }, 'Check'),
    h('a', { href: linkTo(question.look), class: 'look', onclick: followLink }, 'Show me')), verdict);
  function judge() {
    const given = question.choices ? form.querySelector('input:checked')?.value : form.querySelector('input').value;
    const isGiven = given !== undefined && String(given).trim() !== '';
    const isRight = isGiven && isAnswer(question, given);
    verdict.className = `verdict ${isRight ? 'good' : isGiven ? 'bad' : ''}`;
    verdict.textContent = !isGiven ? 'Give an answer first.' : isRight ? `✓ Right. ${question.because}` : '✗ Not this. "Show me" leads to where it stands.';
  }
  return h('li', {}, h('p', { id }, question.text), form);
}

function isAnswer(question, given) {
  if (question.choices) return Number(given) === question.answer;
  const value = Number(String(given).replace(/[,%\s]/g, ''));
  return Number.isFinite(value) && Math.abs(value - question.answer) <= question.tolerance;
}
