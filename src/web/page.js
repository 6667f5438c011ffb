'use strict';
// The page: fields, tables and files. The worker does the work.

const $ = id => document.getElementById(id);

function make(tag, content, more = {}) {
  const element = Object.assign(document.createElement(tag), more);
  element.append(...[content].flat());
  return element;
}

const worker = new Worker(URL.createObjectURL(new Blob([$('worker').textContent], {type: 'text/javascript'})));
const waiting = new Map();
let asked = 0;

worker.onmessage = ({data: {number, ...answer}}) => {
  const [done, fail] = waiting.get(number);
  waiting.delete(number);
  if (answer.error) fail(Object.assign(new Error(answer.error), {fits: answer.fits}));
  else done(answer);
};
worker.onerror = event => $('error').textContent = `the worker does not start: ${event.message}`;

function ask(request) {
  worker.postMessage({number: ++asked, ...request});
  return new Promise((...pair) => waiting.set(asked, pair));
}

const ready = ask({do: 'code', wasm: $('wasm').textContent});
$('wasm').textContent = '';

// The number of the model: what was asked of an earlier one says nothing of this one.
let current = 0;

// Does something, and shows how it goes where it was asked for: above, or beside the run. Returns what came of it; null after an error.
async function doing(what, work, [state, error] = ['state', 'error']) {
  const own = current;
  ['error', 'failed'].forEach(id => $(id).textContent = '');
  $(state).textContent = what;
  try {
    await ready;
    return await work();
  } catch (found) {
    if (own === current) $(error).textContent = found.message;
    return null;
  } finally {
    if (own === current) $(state).textContent = '';
  }
}

let file = null, data = [], arrays = new Map(), inputs = [], loaded = '';

function options() {
  const dims = Object.fromEntries([...$('dims').querySelectorAll('input')].filter(i => i.value).map(i => [i.name, Number(i.value)]));
  const limit = $('limit').value.trim();
  return {dims, ...(limit && {memory_limit: limit})};
}

const job = () => ({target: $('target').value, options: options()});

function drop(files) {
  files = [...files];
  const isModel = f => /\.onnx(txt)?$/.test(f.name), isArray = f => f.name.endsWith('.npy');
  const models = files.filter(isModel), rest = files.filter(f => !isModel(f) && !isArray(f));
  const found = models[0] ?? (file ? null : rest[0]);
  const say = async text => {
    $('error').textContent = text;
    return null;
  };
  if (models.length > 1) return say(`expected one model, found ${models.map(f => f.name).join(' and ')}: drop one at a time`);
  if (!found && !file) return say('expected a model: an .onnx file; arrays are for its inputs');
  loaded = '';
  if (found) arrays.clear();
  files.filter(isArray).forEach(f => arrays.set(f.name.slice(0, -4), f));
  if (!found && !rest.length) return plan();
  // What is no model joins the one that is open, as its data.
  if (found) [file, data] = [found, []];
  data = [...data.filter(f => !rest.some(other => other.name === f.name)), ...rest.filter(f => f !== file)];
  current++;
  ['state', 'doing'].forEach(id => $(id).textContent = '');
  $('run').disabled = false;
  $('planned').hidden = true;
  $('title').textContent = file.name;
  return doing(`reading ${file.name}`, async () => {
    let model;
    try {
      model = await ask({do: 'open', file, files: data});
    } catch (error) {
      [file, data] = [null, []];
      throw error;
    }
    $('dims').replaceChildren(...model.dims.map(name => make('label', [name, make('input', [], {name, type: 'number', min: 1, placeholder: 1})])));
    return plan();
  });
}

function plan() {
  loaded = '';
  ['table', 'advice', 'ran'].forEach(id => $(id).textContent = '');
  $('outputs').replaceChildren();
  return doing('planning', async () => {
    $('planned').hidden = false;
    $('svg').hidden = true;
    let planned;
    try {
      planned = await ask({do: 'plan', ...job()});
    } catch (error) {
      if (error.fits !== false) throw error;
      $('error').textContent = error.message;
      $('advice').textContent = (await ask({do: 'advise', ...job()})).text;
      return {error: error.message, advice: $('advice').textContent};
    }
    $('table').textContent = planned.table;
    if (planned.limit) $('advice').textContent = `fits: ${(planned.limit - planned.bytes).toLocaleString('en')} bytes to spare`;
    $('svg').src = `data:image/svg+xml,${encodeURIComponent(planned.svg)}`;
    $('svg').hidden = false;
    const row = ({name, dtype, shape}) => {
      const input = make('input', [], {type: 'file', accept: '.npy', ariaLabel: `an array for ${name}`});
      const taken = make('td', arrays.get(name)?.name ?? 'random');
      input.onchange = () => {
        const [array] = input.files;
        if (array) arrays.set(name, array);
        else arrays.delete(name);
        taken.textContent = array?.name ?? 'random';
        loaded = '';
      };
      return make('tr', [make('td', name), make('td', `${dtype}[${shape}]`), taken, make('td', input)]);
    };
    inputs = planned.inputs.map(input => input.name);
    // One array alone is for the only input, whatever its name.
    const [[name, array] = []] = arrays;
    if (inputs.length === 1 && arrays.size === 1 && name !== inputs[0]) arrays = new Map([[inputs[0], array]]);
    $('inputs').replaceChildren(...planned.inputs.map(row));
    return planned;
  }).then(found => {
    if (found?.error) $('error').textContent = found.error;
    return found;
  });
}

// Addresses of outputs, until there are others.
let links = [];

function run() {
  const seed = Number($('seed').value);
  if (!Number.isSafeInteger(seed) || seed < 0) return $('failed').textContent = `seed: expected a whole number from 0 on, found ${$('seed').value}`;
  $('run').disabled = true;
  return doing('loading', async () => {
    const wanted = JSON.stringify([options(), $('on').value]);
    if (loaded !== wanted) {
      loaded = '';
      const other = [...arrays.keys()].find(name => !inputs.includes(name));
      if (other) throw new Error(`${other}.npy: the model has no input '${other}'; its inputs: ${inputs.join(', ')}`);
      const told = await ask({do: 'load', options: options(), on: $('on').value});
      for (const [name, file] of arrays) await ask({do: 'give', name, file});
      loaded = wanted;
      $('ran').dataset.device = `${told.device}, ${told.bytes.toLocaleString('en')} bytes`;
    }
    $('doing').textContent = 'running';
    const {outputs, data, ms} = await ask({do: 'run', seed}).catch(error => {
      loaded = '';
      throw error;
    });
    links.splice(0).forEach(link => URL.revokeObjectURL(link));
    $('ran').textContent = `${$('ran').dataset.device}, ${ms.toFixed(1)} ms with inputs and outputs`;
    let at = 0;
    const row = output => {
      output.npy = data.subarray(at, at += output.bytes);
      links.push(URL.createObjectURL(new Blob([output.npy])));
      const link = make('a', 'save', {download: `${output.name}.npy`, href: links.at(-1)});
      const {name, dtype, shape, first} = output, more = shape.reduce((a, b) => a * b, 1) > first.length ? ' ...' : '';
      return make('tr', [make('td', name), make('td', `${dtype}[${shape}]`), make('td', first.join(' ') + more), make('td', link)]);
    };
    $('outputs').replaceChildren(...outputs.map(row));
    return {device: $('ran').dataset.device, outputs};
  }, ['doing', 'failed']).finally(() => $('run').disabled = false);
}

const submit = (id, work) => $(id).onsubmit = event => {
  event.preventDefault();
  work();
};
submit('asked', plan);
submit('running', run);
$('files').onchange = event => {
  const files = [...event.target.files];
  // The same file may be chosen again, as after another export.
  event.target.value = '';
  drop(files);
};
$('advise').onclick = () => doing('trying what would help', async () => $('advice').textContent = (await ask({do: 'advise', ...job()})).text);
$('picture').onclick = () => doing('drawing', async () => {
  const {html} = await ask({do: 'picture', ...job()});
  const href = URL.createObjectURL(new Blob([html], {type: 'text/html'}));
  make('a', [], {download: `${file.name}.html`, href}).click();
  setTimeout(() => URL.revokeObjectURL(href), 60000);
});
for (const [kind, over] of [['dragover', true], ['dragleave', false], ['drop', false]]) {
  addEventListener(kind, event => {
    event.preventDefault();
    $('drop').classList.toggle('over', over);
    if (kind === 'drop') drop(event.dataTransfer.files);
  });
}
