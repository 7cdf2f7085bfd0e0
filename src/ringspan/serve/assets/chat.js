// A chat with the server that sent this page, and what each turn reused, ran and took.

const messages = [];
const talk = h('div', { class: 'talk', 'aria-live': 'polite' });
const status = h('p', { class: 'status', role: 'status' });
const question = h('textarea', { id: 'question', rows: 4, required: true, onkeydown: sendOnEnter });
const key = h('input', { id: 'key', type: 'password', autocomplete: 'off' });
const keyRow = h('p', { hidden: true }, h('label', { for: 'key' }, 'API key '), key);
const button = h('button', { type: 'submit' }, 'Send');
const rows = h('tbody', {});
let model = null;
let running = null;

const headers = () => ({ 'Content-Type': 'application/json', ...(key.value ? { Authorization: `Bearer ${key.value}` } : {}) });

async function refuse(response) {
  if (response.status === 401) keyRow.hidden = false;
  let reason = `status ${response.status}`;
  try { reason = (await response.json()).error.message; } catch { /* not JSON: the status says enough */ }
  throw new Error(reason);
}

async function findModel() {
  const response = await fetch('/v1/models', { headers: headers() });
  if (!response.ok) await refuse(response);
  model = (await response.json()).data[0].id;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split('\n\n');
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith('data: ') && part !== 'data: [DONE]') yield JSON.parse(part.slice(6));
    }
  }
}

function tell(turn) {
  rows.append(h('tr', {}, ...[rows.children.length + 1, turn.prompt, turn.cached, format.seconds(turn.first), turn.rate, turn.algorithm]
    .map((value) => h('td', {}, String(value)))));
}

async function ask(text) {
  if (model === null) await findModel();
  const answer = h('p', {});
  const started = performance.now();
  let first = null, usage = null, said = '', count = 0, failure = null;
  running = new AbortController();
  const body = { model, messages: [...messages, { role: 'user', content: text }], temperature: 0, stream: true, stream_options: { include_usage: true } };
  const response = await fetch('/v1/chat/completions', { method: 'POST', headers: headers(), body: JSON.stringify(body), signal: running.signal });
  if (!response.ok) await refuse(response);
  talk.append(h('p', { class: 'lead' }, text), answer);
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const piece = chunk.choices && chunk.choices[0] && chunk.choices[0].delta.content;
      if (!piece) continue;
      first = first ?? (performance.now() - started) / 1000;
      count += 1;
      said += piece;
      answer.append(piece);
    }
  } catch (error) {
    failure = error;
  }
  messages.push({ role: 'user', content: text }, { role: 'assistant', content: said });
  if (usage) {
    const took = (performance.now() - started) / 1000;
    tell({
      prompt: format.count(usage.prompt_tokens),
      cached: format.count(usage.prompt_tokens_details.cached_tokens),
      first: first ?? took,
      rate: count > 1 ? format.seconds((took - first) / (count - 1)) : '–',
      algorithm: response.headers.get('x-ringspan-algorithm'),
    });
  }
  if (failure !== null) throw failure;
}

async function send(event) {
  event.preventDefault();
  if (running !== null) { running.abort(); return; }
  const text = question.value.trim();
  if (!text) return;
  button.textContent = 'Stop';
  status.textContent = 'Waiting for the first token …';
  try {
    running = new AbortController();
    await ask(text);
    question.value = '';
    status.textContent = '';
  } catch (error) {
    status.textContent = error.name === 'AbortError' ? 'Stopped.' : `Failed: ${error.message}`;
  } finally {
    running = null;
    button.textContent = 'Send';
  }
}

function sendOnEnter(event) {
  // Enter that ends the input of a character, as in Japanese, sends nothing.
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (running === null) question.form.requestSubmit();
}

show(document.getElementById('page'),
  h('h1', {}, document.title),
  talk,
  h('form', { class: 'panel', onsubmit: send },
    keyRow,
    h('label', { for: 'question' }, 'Message (Enter sends it, Shift+Enter begins a line)'),
    question,
    h('p', {}, button),
    status),
  h('section', { class: 'panel' },
    h('h2', {}, 'Turns'),
    h('p', { class: 'note' }, 'Tokens of a prompt that the cache holds are not computed again.'),
    h('div', { class: 'scroll', tabindex: 0 },
      h('table', {},
        h('thead', {}, h('tr', {}, ...['Turn', 'Prompt tokens', 'Reused', 'First token after', 'Time per piece', 'Algorithm and reason']
          .map((name) => h('th', { scope: 'col' }, name)))),
        rows))));
