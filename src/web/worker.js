'use strict';
// The worker of the page: it holds the library, reads the files, and replays records on WebGPU. Messages are `{number, ...request}` and are
// answered by `{number, ...answer}`, one at a time.

// Data of tensors from so many bytes on stay in the file.
const LONG = 1 << 16;
// A file that cannot be walked is given to the library as it is, up to so many bytes: it says what is wrong.
const MOST = 1 << 28;

// ---- Files ----

const blobs = new Map();
let own = '';

function slice(file, start, bytes) {
  try {
    return new Uint8Array(new FileReaderSync().readAsArrayBuffer(file.slice(start, start + bytes)));
  } catch (error) {
    // The page reads a file as it was when it was dropped; a folder is none.
    throw new Error(`${file.name} cannot be read: it has changed, is gone, or is a folder; drop it again`);
  }
}

// Reads a file through a window, front to back.
class Reader {
  constructor(file) {
    this.file = file;
    this.window = new Uint8Array(0);
    this.start = 0;
  }

  bytes(at, count) {
    if (at + count > this.file.size) throw new Error('it ends too early');
    if (at < this.start || at + count > this.start + this.window.length) {
      this.window = slice(this.file, at, Math.max(count, 1 << 18));
      this.start = at;
    }
    return this.window.subarray(at - this.start, at - this.start + count);
  }

  // A varint as [value, the place behind it]. Lengths may be above 32 bits; what is above 53 bits is no length.
  varint(at) {
    let value = 0;
    for (let power = 1; power < 2 ** 63; power *= 128) {
      const byte = this.bytes(at++, 1)[0];
      value += (byte & 127) * power;
      if (byte < 128) return [value, at];
    }
    throw new Error('a number is too long');
  }
}

// The fields of ONNX's messages in which tensors are.
const MESSAGES = {
  model: {7: 'graph', 20: 'training', 25: 'func'},
  training: {1: 'graph', 2: 'graph'},
  func: {7: 'node'},
  graph: {1: 'node', 5: 'tensor', 15: 'sparse'},
  node: {5: 'attribute'},
  attribute: {5: 'tensor', 6: 'graph', 10: 'tensor', 11: 'graph', 22: 'sparse', 23: 'sparse'},
  sparse: {1: 'tensor', 2: 'tensor'},
  tensor: {},
};
// The types whose elements lie in a file as the library reads them from one of data: not bools, and not those that share bytes.
const PLAIN = new Set([1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 16, 17, 18, 19, 20]);
// The data of a tensor: raw, and as packed floats and doubles, which are the same bytes.
const isData = (field, type) => field === 9 ? PLAIN.has(type) : field === 4 ? type === 1 : field === 10 && type === 11;

function varint(value) {
  const bytes = [];
  for (; value >= 128; value = Math.floor(value / 128)) bytes.push(value % 128 + 128);
  return [...bytes, value];
}

function field(number, bytes) {
  return [...varint(number * 8 + 2), ...varint(bytes.length), ...bytes];
}

// What stands in the place of data: where they are.
function external(offset, length) {
  const text = value => [...new TextEncoder().encode(value)];
  const entry = (key, value) => field(13, [...field(1, text(key)), ...field(2, text(String(value)))]);
  return [...entry('location', own), ...entry('offset', offset), ...entry('length', length), 14 * 8, 1];
}

// Pieces of a message without long data. Messages that are short have none.
function walk(reader, kind, at, end) {
  const pieces = [];
  let kept = at, type = 0, found = 0;
  const keep = to => {
    if (to > kept) pieces.push(slice(reader.file, kept, to - kept));
  };
  while (at < end) {
    const begin = at;
    let tag, length;
    [tag, at] = reader.varint(at);
    const number = Math.floor(tag / 8);
    if (!number) throw new Error('it is no message');
    switch (tag % 8) {
      case 0:
        [length, at] = reader.varint(at);
        if (kind === 'tensor' && number === 2) type = length;
        continue;
      case 1: at += 8; continue;
      case 5: at += 4; continue;
      case 2: break;
      default: throw new Error('it is no message');
    }
    [length, at] = reader.varint(at);
    const inner = MESSAGES[kind][number], start = at;
    at += length;
    if (at > end) throw new Error('a field is longer than its message');
    if (length < LONG) continue;
    if (kind === 'tensor' && isData(number, type)) {
      // Data in several pieces are no stretch of the file.
      if (found++) throw new Error('its data are in pieces');
      keep(begin);
      pieces.push(Uint8Array.from(external(start, length)));
    } else if (inner) {
      keep(begin);
      const within = walk(reader, inner, start, at);
      const size = within.reduce((sum, piece) => sum + piece.length, 0);
      pieces.push(Uint8Array.from([...varint(tag), ...varint(size)]), ...within);
    } else continue;
    kept = at;
  }
  keep(end);
  return pieces;
}

function joined(pieces) {
  const all = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}

// The model without long data.
function model(file) {
  if (!file.name.endsWith('.onnxtxt')) {
    try {
      return joined(walk(new Reader(file), 'model', 0, file.size));
    } catch (error) {
      // The library finds the fault anew, and has words for it: it reads the file, or says why it cannot.
    }
  }
  return slice(file, 0, Math.min(file.size, MOST));
}

// ---- WebGPU ----

let device = null, why = '', isLost = false;
const buffers = new Map(), records = new Map();
let slot = null;

const LIMITS = ['minStorageBufferOffsetAlignment', 'maxBufferSize', 'maxStorageBufferBindingSize', 'maxStorageBuffersPerShaderStage',
  'maxComputeInvocationsPerWorkgroup', 'maxComputeWorkgroupSizeX', 'maxComputeWorkgroupStorageSize', 'maxComputeWorkgroupsPerDimension'];

// Opens the adapter with all that it has. Returns its limits, or null where there is none.
async function openDevice() {
  if (!device) {
    const adapter = await navigator.gpu?.requestAdapter({powerPreference: 'high-performance'});
    why = navigator.gpu ? 'WebGPU has no adapter here' : 'this browser has no WebGPU';
    if (!adapter) return null;
    const required = Object.fromEntries(LIMITS.map(name => [name, adapter.limits[name]]));
    device = await adapter.requestDevice({requiredLimits: required});
    device.label = [adapter.info?.vendor, adapter.info?.architecture].filter(Boolean).join(' ') || 'adapter';
    device.lost.then(lost => {
      if (lost.reason === 'destroyed') return;
      device = null;
      // What the library has there is gone with it.
      library = null;
      isLost = true;
    });
  }
  return {name: device.label, ...Object.fromEntries(LIMITS.map(name => [name, device.limits[name]]))};
}

// Runs calls; the first error that the device raises is thrown.
async function scoped(calls) {
  const filters = ['out-of-memory', 'validation', 'internal'];
  filters.forEach(filter => device.pushErrorScope(filter));
  let result, thrown;
  try {
    result = await calls();
  } catch (error) {
    thrown = error;
  }
  const found = await Promise.all(filters.map(() => device.popErrorScope()));
  const error = found.find(Boolean);
  if (thrown || error) throw thrown ?? new Error(`WebGPU: ${error.message}`);
  return result;
}

function makeRecord({texts, steps}) {
  const layouts = new Map();
  const layout = modes => {
    const key = modes.join();
    if (!layouts.has(key)) {
      const type = only => ({type: only ? 'read-only-storage' : 'storage'});
      const entries = modes.map((only, binding) => ({binding, visibility: GPUShaderStage.COMPUTE, buffer: type(only)}));
      layouts.set(key, device.createBindGroupLayout({entries}));
    }
    return layouts.get(key);
  };
  const known = new Map();
  const pipelines = texts.map(({name, wgsl, modes}) => {
    if (!wgsl) return null;
    const bindGroupLayouts = [layout(modes)];
    const key = modes.join() + wgsl;
    if (!known.has(key)) {
      const compute = {module: device.createShaderModule({label: name, code: wgsl}), entryPoint: 'main'};
      known.set(key, device.createComputePipeline({label: name, layout: device.createPipelineLayout({bindGroupLayouts}), compute}));
    }
    return {pipeline: known.get(key), layout: bindGroupLayouts[0]};
  });
  const ready = steps => steps.map(step => {
    if (step.of) return {times: step.times, of: ready(step.of)};
    const entries = step.bind.map(([segment, offset, size], binding) =>
      ({binding, resource: {buffer: buffers.get(segment), offset, size}}));
    const {pipeline, layout} = pipelines[step.text];
    return {pipeline, group: device.createBindGroup({layout, entries}), groups: step.groups};
  });
  return ready(steps);
}

function replay(steps) {
  const encoder = device.createCommandEncoder(), pass = encoder.beginComputePass();
  const run = step => {
    if (step.of) {
      for (let time = 0; time < step.times; time++) step.of.forEach(run);
      return;
    }
    pass.setPipeline(step.pipeline);
    pass.setBindGroup(0, step.group);
    pass.dispatchWorkgroups(...step.groups);
  };
  steps.forEach(run);
  pass.end();
  device.queue.submit([encoder.finish()]);
}

// The bytes of slices, one after another, which come through the planned slot.
async function fetched(wanted) {
  const all = new Uint8Array(wanted.reduce((sum, [, , bytes]) => sum + bytes, 0));
  let to = 0;
  for (const [segment, offset, bytes] of wanted) {
    for (let at = 0; at < bytes; at += slot.size) {
      const part = Math.min(slot.size, bytes - at), words = Math.ceil(part / 4) * 4;
      const encoder = device.createCommandEncoder();
      encoder.copyBufferToBuffer(buffers.get(segment), offset + at, slot, 0, words);
      device.queue.submit([encoder.finish()]);
      await slot.mapAsync(GPUMapMode.READ, 0, words);
      all.set(new Uint8Array(slot.getMappedRange(0, words), 0, part), to + at);
      slot.unmap();
    }
    to += bytes;
  }
  return all;
}

// ---- The library ----

let code = null, library = null, panic = '';
const view = (at, bytes) => new Uint8Array(library.memory.buffer, at >>> 0, bytes >>> 0);
const text = (at, bytes) => new TextDecoder().decode(view(at, bytes));

const page = {
  read(name, length, offset, into, bytes) {
    const file = blobs.get(text(name, length).split('/').pop());
    if (!file) return 1;
    if (offset + (bytes >>> 0) > file.size) return 2;
    // In parts: what is read is there twice.
    for (let at = 0; at < bytes >>> 0; at += 1 << 24) {
      const part = slice(file, offset + at, Math.min(1 << 24, (bytes >>> 0) - at));
      view((into >>> 0) + at, part.length).set(part);
    }
    return 0;
  },
  failed(at, bytes) { panic = text(at, bytes); },
  alloc(segment, bytes, kind) {
    // Writes go through memory of the browser's own: the slot to upload from is counted, and not needed.
    const {STORAGE, COPY_SRC, COPY_DST, MAP_READ} = GPUBufferUsage;
    const usage = kind === 2 ? MAP_READ | COPY_DST : STORAGE | COPY_SRC | COPY_DST;
    const buffer = kind === 1 ? null : device.createBuffer({label: `segment ${segment}`, size: Math.max(4, bytes), usage});
    buffers.set(segment, buffer);
    if (kind === 2) slot = buffer;
  },
  free(segment) {
    buffers.get(segment)?.destroy();
    buffers.delete(segment);
  },
  write(segment, offset, data, bytes) {
    const whole = bytes - bytes % 4;
    if (whole) device.queue.writeBuffer(buffers.get(segment), offset, view(data, whole));
    if (whole < bytes) {
      const last = new Uint8Array(4);
      last.set(view((data >>> 0) + whole, bytes - whole));
      device.queue.writeBuffer(buffers.get(segment), offset + whole, last);
    }
  },
  record(number, at, bytes) { records.set(number, makeRecord(JSON.parse(text(at, bytes)))); },
  replay(number) { replay(records.get(number)); },
};

async function start() {
  buffers.forEach(buffer => buffer?.destroy());
  buffers.clear();
  library = (await WebAssembly.instantiate(code, {page})).exports;
}

// Calls the library. Its answer's bytes are copied.
function call(request, data = new Uint8Array(0)) {
  const put = bytes => {
    const at = library.plimsoll_web_alloc(bytes.length);
    view(at, bytes.length).set(bytes);
    return [at, bytes.length];
  };
  try {
    const at = library.plimsoll_web_call(...put(new TextEncoder().encode(JSON.stringify(request))), ...put(data));
    const [told, length, bytes, count] = new Uint32Array(library.memory.buffer, at >>> 0, 4);
    const answer = JSON.parse(text(told, length));
    if (answer.error) throw Object.assign(new Error(answer.error), {fits: answer.fits, told: true});
    return {...answer, data: view(bytes, count).slice(), memory: library.memory.buffer.byteLength};
  } catch (error) {
    // What stops the library in the middle of a call leaves it unusable: it is made anew.
    if (!error.told) library = null;
    if (error instanceof WebAssembly.RuntimeError) {
      const why = panic || `${error}: the model may be larger than what a page can hold`;
      panic = '';
      throw new Error(`the library stopped: ${why}`);
    }
    throw error;
  }
}

function open(file, files) {
  blobs.clear();
  files.forEach(file => blobs.set(file.name, file));
  blobs.set(file.name, file);
  own = file.name;
  return call({do: 'open', name: own}, model(file));
}

let opened = null;

const serve = {
  async code({wasm}) {
    const packed = new Blob([Uint8Array.from(atob(wasm), c => c.charCodeAt(0))]);
    const whole = new Response(packed.stream().pipeThrough(new DecompressionStream('deflate-raw')));
    code = await WebAssembly.compile(await whole.arrayBuffer());
    return {};
  },
  open({file, files}) {
    opened = [file, files];
    return open(file, files);
  },
  async load({options, on}) {
    const limits = on === 'cpu' ? null : await openDevice();
    if (!limits && on === 'webgpu') throw new Error(why);
    const load = () => call({do: 'load', options, limits});
    return {device: limits ? `WebGPU, ${limits.name}` : 'CPU, 1 thread', ...(limits ? await scoped(load) : load())};
  },
  async run({seed}) {
    const run = async () => {
      let answer = call({do: 'run', seed});
      while (answer.wanted) answer = call({do: 'fetched'}, await fetched(answer.wanted));
      return answer;
    };
    const begin = performance.now();
    const answer = device && buffers.size ? await scoped(run) : await run();
    return {...answer, ms: performance.now() - begin};
  },
  give: ({name, file}) => call({do: 'give', name}, slice(file, 0, file.size)),
};

let last = Promise.resolve();
onmessage = ({data: {number, ...request}}) => {
  last = last.then(async () => {
    try {
      // One that has stopped is made anew, and given the model again.
      if (code && !library) {
        await start();
        if (opened && request.do !== 'open') open(...opened);
      }
      const answer = await (serve[request.do] ? serve[request.do](request) : call(request));
      postMessage({number, ...answer}, answer.data ? [answer.data.buffer] : []);
    } catch (error) {
      const lost = isLost ? 'the GPU was lost: run again, or on the CPU' : null;
      isLost = false;
      postMessage({number, error: lost ?? error.message, fits: error.fits});
    }
  });
};
