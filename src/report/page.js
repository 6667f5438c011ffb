"use strict";
// Draws the scenes in the data block. `boxes()` computes the pixels of each rectangle, and painting uses nothing else.
// It draws on a canvas: 10,000 rectangles zoom in 19 ms per frame there, and in 106 ms as SVG (Chromium 156, two busy cores).
(() => {
  const $ = id => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const scenes = data.scenes;
  const colours = Object.fromEntries(data.palette.map(p => [p.kind, p]));
  const several = scenes.length > 1;
  const partLooks = Object.fromEntries(data.parts.map(p => [p.part, p]));
  const canvas = $("canvas"), tip = $("tip"), find = $("find");
  const pen = canvas.getContext("2d");
  const titles = { activation: "arena", constant: "constants", state: "state", input: "inputs", output: "outputs", staging: "staging", backend: "the backend's own" };
  const FONT = "11px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif";
  const GAP = 18, CURVE = 76, HEAD = 22;
  /** The height of a segment that lasts: of one whose buffers have names, and of another. */
  const NAMED = 34, BAND = 22;
  /** The gap between columns that have a scale each. */
  const SCALE = 64;

  // ---- Words

  const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  /** Rounded up, as in the reports. */
  function human(bytes) {
    if (bytes < 1024) return `${bytes} B`;
    let power = 0, unit = 1;
    while (bytes >= 1024 * unit) { unit *= 1024; power++; }
    return `${(Math.ceil(100 * bytes / unit) / 100).toFixed(2)} ${UNITS[power - 1]}`;
  }
  const short = bytes => bytes === 0 ? "0" : human(bytes).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
  const grouped = n => String(n).replace(/\B(?=(\d{3})+$)/g, ",");
  const exact = bytes => `${human(bytes)} (${grouped(bytes)} bytes)`;
  const elapsed = us => us < 1000 ? `${us.toFixed(1)} us` : `${(us / 1000).toFixed(3)} ms`;
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "-";

  // Text from the data enters the page as text nodes, never as markup.
  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "style") Object.assign(node.style, value);
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }
  const swatch = (kind, ...words) =>
    make("li", {}, make("i", { style: { background: colours[kind] ? colours[kind].fill : kind } }), ...words);

  /** The colour of a class of segments. */
  const kindOf = of => (colours[of === "backend" ? "staging" : of] || { fill: data.arena }).fill;

  /** The operator and the kernel of a step. If the kernel computes several nodes, the operator is that of the last. */
  const operator = step => `${step.operator} ${step.name}${step.operator === step.kernel ? "" : ` (kernel ${step.kernel})`}`;
  const stepName = (scene, s) => `${s} ${scene.steps[s].operator} ${scene.steps[s].name}`;

  /** A buffer's name in the picture: the path of its module leads, if the file names modules. */
  const shown = item => item.module ? `${item.module}: ${item.name}` : item.name;

  /** The description of a buffer: pairs of label and text. */
  function facts(scene, b) {
    const item = scene.buffers[b], out = [];
    const using = scene.uses[b];
    out.push(["bytes", exact(item.bytes)], ["type", item.type], ["class", item.class]);
    if (using.writes.length) out.push(["operator", operator(scene.steps[using.writes[0]])]);
    if (item.module) out.push(["module", item.module]);
    if (item.uses) out.push(["life", item.uses[0] === item.uses[1] ? `step ${item.uses[0]}` : `steps ${item.uses[0]} to ${item.uses[1]}`]);
    out.push(["address", several && !scene.planned ? `byte ${grouped(item.offset)} of its segment` : `segment ${item.segment}, byte ${grouped(item.offset)}`]);
    if (item.takes_from !== null) out.push(["in place of", scene.buffers[item.takes_from].name]);
    return out;
  }

  // ---- The model

  for (const scene of scenes) {
    scene.uses = scene.buffers.map(() => ({ reads: [], writes: [] }));
    scene.steps.forEach((step, s) => {
      for (const b of new Set(step.reads)) scene.uses[b].reads.push(s);
      for (const b of new Set(step.writes)) scene.uses[b].writes.push(s);
    });
    scene.parted = scene.steps.some(step => step.part);
    scene.streams = 1 + Math.max(0, ...new Set(scene.steps.map(s => s.stream)));
    scene.main = scene.spaces.filter(space => space.class === null || space.class === "activation");
    scene.rest = scene.spaces.filter(space => !scene.main.includes(space));
  }
  /** Segments outside the arena are drawn where all scenes share them. */
  const lasting = !several || data.shared ? scenes[0].rest : [];
  /** The buffers of a segment that lasts, once where programs or a state and its update have the same bytes. */
  function lastingIn(space) {
    const at = new Map(), number = scenes[0].spaces.indexOf(space);
    scenes.forEach((scene, k) => {
      for (const rect of scene.spaces[number].rects) if (!at.has(rect.bytes[0])) at.set(rect.bytes[0], { k, rect });
    });
    return [...at.values()];
  }
  for (const space of lasting) space.lasting = lastingIn(space);

  const last = 2 * Math.max(1, ...scenes.map(s => s.steps.length));
  /** A scene without the buffers that keep their bytes for all of the run: constants and states. What is above them moves down. */
  function bare(scene) {
    const lasts = rect => ["constant", "state"].includes(scene.buffers[rect.buffer].class) && rect.time[0] <= 0 && rect.time[1] >= 2 * scene.steps.length;
    let gone = 0;
    const main = scene.main.map(space => {
      // Where each stretch of such bytes begins and ends, and how many are gone up to its end.
      const stretches = [];
      for (const [from, to] of space.rects.filter(lasts).map(rect => rect.bytes).sort((a, b) => a[0] - b[0])) {
        const before = stretches.length ? stretches[stretches.length - 1] : { to: 0, sum: 0 }, begin = Math.max(from, before.to);
        if (to > begin) stretches.push({ from: begin, to, sum: before.sum + to - begin });
      }
      const down = byte => {
        let low = 0, high = stretches.length;
        while (low < high) {
          const middle = (low + high) >> 1;
          if (stretches[middle].from < byte) low = middle + 1;
          else high = middle;
        }
        const stretch = stretches[low - 1];
        return stretch ? byte - stretch.sum + Math.max(0, stretch.to - byte) : byte;
      };
      const moved = part => ({ ...part, bytes: part.bytes.map(down) });
      gone += space.bytes - down(space.bytes);
      return { ...space, bytes: down(space.bytes), areas: space.areas.map(moved).filter(area => area.bytes[0] < area.bytes[1]), rects: space.rects.filter(rect => !lasts(rect)).map(moved) };
    });
    const less = bytes => Math.max(0, bytes - gone);
    return { main, live: scene.live.map(less), reserved: scene.reserved.map(less), gone };
  }
  const whole = scenes.map(({ main, live, reserved }) => ({ main, live, reserved }));
  const stripped = several && !data.shared ? scenes.map(bare) : [];
  let isBare = false;
  let tallest, highest;
  function measure() {
    tallest = scenes.map(s => Math.max(1, ...s.main.map(space => space.bytes)));
    highest = Math.max(...tallest);
  }
  measure();
  // Beside one that takes far more, the others would be flat.
  let own = several && highest > 4 * Math.min(...tallest);
  /** The bytes that a column's height stands for, and the limit if it is drawn. */
  function scale(k) {
    const most = own ? tallest[k] : highest, { limit } = scenes[0];
    // A limit far above the data would leave no height for the rest.
    const cap = limit !== null && !isBare && limit <= 1.6 * most ? limit : 0;
    return { extent: Math.max(most, cap), cap };
  }

  // ---- Layers

  /** The path to a step or a buffer: that of its module, of the weight's owner, or the folders of its name. */
  function pathOf(one) {
    if (one.module) return one.module.split(".");
    const name = one.name.replace(/^copy of /, "").replace(/^gradient of /, "");
    if (["constant", "state"].includes(one.class)) return name.split("/").pop().split(".").slice(0, -1);
    return name.split("/").filter(Boolean).slice(0, -1);
  }

  /** Colours by layer, in turn. */
  const LAYERS = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#caaccb", "#f4a736", "#90c987"];
  /** More layers than this cannot be told apart, so paths are cut to where there are fewer. */
  const MOST_LAYERS = 40;
  const paths = new Map(scenes.flatMap(s => [...s.steps, ...s.buffers]).map(one => [one, pathOf(one)]));
  const layerAt = (one, depth) => paths.get(one).slice(0, depth).join(".");
  function layered(depth) {
    return [...new Set(scenes.flatMap(s => s.steps.map(step => layerAt(step, depth))).filter(Boolean))];
  }
  let depth = 1, layers = layered(1);
  for (let next = 2, more; next < 8 && (more = layered(next)).length <= MOST_LAYERS; next++) {
    if (more.length > layers.length) [depth, layers] = [next, more];
  }
  const layerFills = new Map(layers.map((layer, i) => [layer, LAYERS[i % LAYERS.length]]));
  let byLayer = false;

  /** The colour of a step or a buffer. */
  function fillOf(one) {
    if (!byLayer) return colours[one.kind].fill;
    // A weight may have an owner inside a layer, or around layers.
    for (let at = depth; at > 0; at--) {
      const fill = layerFills.get(layerAt(one, at));
      if (fill) return fill;
    }
    return colours.staging.fill;
  }

  // ---- Time

  /** The ends of the steps in measured microseconds, after a zero. */
  const ends = scenes.map(scene => {
    let sum = 0;
    return [0, ...scene.times.map(time => sum += time)];
  });
  const longest = Math.max(...ends.map(all => all[all.length - 1]));
  const measured = longest > 0 && scenes.every((scene, k) => ends[k].length === scene.steps.length + 1);
  // Steps are equally wide, or as wide as they took.
  let timed = false;

  /** The place of a half step on the axis. */
  function place(k, half) {
    if (!timed) return half;
    const all = ends[k], s = Math.min(half >> 1, all.length - 1), from = all[s], to = all[Math.min(s + 1, all.length - 1)];
    return last * (from + (to - from) * (half - 2 * s) / 2) / longest;
  }

  /** The number of steps that end at or before a place of the axis: the step there. */
  function stepAt(k, at) {
    if (!timed) return Math.floor(at / 2);
    let low = 0, high = ends[k].length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (last * ends[k][middle] / longest <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The visible part: half steps, and fractions of each main panel's height. */
  const view = { x0: 0, x1: last, y0: 0, y1: 1 };
  let pinned = null, hovered = null, drag = null, matches = null, colour = {};
  let panels = [], width = 0, height = 0, gutter = 0, queued = false;

  function layout() {
    width = canvas.clientWidth;
    panels = [];
    pen.font = FONT;
    gutter = 16 + Math.max(68, ...lasting.map(space => wide(space.title)));
    const gap = own ? SCALE : GAP;
    const column = (width - gutter - gap * (scenes.length - 1)) / scenes.length;
    const tall = Math.max(300, Math.min(620, innerHeight * 0.52));
    let low = 0;
    scenes.forEach((scene, k) => {
      const left = gutter + k * (column + gap), w = Math.max(20, column);
      let y = several ? 44 : HEAD;
      const add = (kind, h, more) => { panels.push({ kind, scene, k, x: left, y, w, h, ...more }); y += h; };
      const spare = several || scene.limit === null ? 0 : scene.limit - scene.planned + scene.arena;
      const room = spare > 0 && spare <= 1.6 * scene.arena ? spare : 0;
      add("curve", CURVE, { extent: several ? scale(k).extent : Math.max(1, scene.arena, room), room });
      y += 14;
      const sum = scene.main.reduce((n, s) => n + s.bytes, 0) || 1;
      for (const space of scene.main) {
        const { extent, cap } = several ? scale(k) : { extent: Math.max(1, space.bytes), cap: 0 };
        add("main", several ? tall : Math.max(60, tall * space.bytes / sum), { space, extent, cap });
        y += 8;
      }
      if (scene.parted) { add("part", 16, { extent: 1 }); y += 4; }
      add("strip", 10 * Math.min(8, scene.streams), {});
      y += 26;
      if (scene.times.length) { add("time", 40, { extent: Math.max(...scene.times) || 1 }); y += 12; }
      low = Math.max(low, y);
    });
    for (const space of lasting) {
      const h = space.lasting.length ? NAMED : BAND;
      panels.push({ kind: "band", scene: scenes[0], k: 0, x: gutter, y: low, w: Math.max(20, width - gutter), h, space, extent: Math.max(1, space.bytes) });
      low += h + 6;
    }
    height = low + 4;
    const ratio = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  const px = (panel, half) => panel.x + panel.w * (place(panel.k, half) - view.x0) / (view.x1 - view.x0);
  function py(panel, bytes) {
    const [y0, y1] = panel.kind === "main" ? [view.y0, view.y1] : [0, 1];
    return panel.y + panel.h * (1 - (bytes / panel.extent - y0) / (y1 - y0));
  }

  /** The pixels of a range of time and bytes within its panel, or null. */
  function clip(panel, time, bytes) {
    const x0 = Math.max(panel.x, px(panel, time[0])), x1 = Math.min(panel.x + panel.w, px(panel, time[1]));
    const y0 = Math.max(panel.y, py(panel, bytes[1])), y1 = Math.min(panel.y + panel.h, py(panel, bytes[0]));
    return x1 > x0 && y1 > y0 ? { x: x0, y: y0, w: x1 - x0, h: y1 - y0 } : null;
  }

  /** All visible rectangles, in the order of painting. */
  function boxes() {
    const out = [];
    for (const panel of panels) {
      if (!panel.space) continue;
      if (panel.kind === "band") {
        // What lasts has no time: its bytes go from left to right.
        for (const { k, rect } of panel.space.lasting) {
          const [x0, x1] = rect.bytes.map(byte => panel.x + panel.w * byte / panel.extent);
          out.push({ k, buffer: rect.buffer, rect, panel, held: null, x: x0, y: panel.y, w: x1 - x0, h: panel.h });
        }
        continue;
      }
      for (const rect of panel.space.rects) {
        if (place(panel.k, rect.held[1]) <= view.x0 || place(panel.k, rect.held[0]) >= view.x1) continue;
        const at = clip(panel, rect.time, rect.bytes);
        const held = rect.held[0] < rect.time[0] || rect.held[1] > rect.time[1] ? clip(panel, rect.held, rect.bytes) : null;
        if (at || held) out.push({ k: panel.k, buffer: rect.buffer, rect, panel, held, ...(at || { x: 0, y: 0, w: 0, h: 0 }) });
      }
    }
    return out;
  }

  const inside = (p, x, y) => x >= p.x && x < p.x + p.w && y >= p.y && y < p.y + p.h;
  const panelAt = (x, y) => panels.find(p => inside(p, x, y));

  /** The buffer or step at a point of the canvas, or null. */
  function hit(x, y) {
    const panel = panelAt(x, y);
    if (!panel) return null;
    if (["strip", "curve", "part", "time"].includes(panel.kind)) {
      const s = stepAt(panel.k, view.x0 + (x - panel.x) / panel.w * (view.x1 - view.x0));
      const stream = panel.kind === "strip" ? Math.floor((y - panel.y) / 10) : null;
      const step = panel.scene.steps[s];
      return step && (stream === null || panel.scene.streams === 1 || step.stream === stream) ? { k: panel.k, step: s } : null;
    }
    // A pointer within 1.5 pixels of a rectangle hits it, so that thin ones can be hit.
    let best = null;
    for (const box of boxes()) {
      if (box.panel !== panel) continue;
      const dx = Math.max(box.x - x, 0, x - box.x - box.w), dy = Math.max(box.y - y, 0, y - box.y - box.h);
      const away = Math.max(dx, dy);
      if (away <= 1.5 && (!best || away <= best.away)) best = { k: box.k, buffer: box.buffer, away };
    }
    return best && { k: best.k, buffer: best.buffer };
  }

  const same = (a, b) => a && b && a.k === b.k && a.buffer === b.buffer && a.step === b.step;

  // ---- Painting

  function draw() {
    queued = false;
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    for (const panel of panels) {
      pen.fillStyle = colour.panel;
      if (panel.kind !== "strip") pen.fillRect(panel.x, panel.y, panel.w, panel.h);
    }
    const shown = boxes();
    for (const panel of panels.filter(p => p.space)) {
      pen.fillStyle = panel.space.rects.length ? colour.unused : kindOf(panel.space.class);
      pen.strokeStyle = colour.line;
      for (const area of panel.space.areas) {
        const at = panel.kind === "band" ? panel : clip(panel, area.time, area.bytes);
        if (!at) continue;
        pen.fillRect(at.x, at.y, at.w, at.h);
        if (several && at.h > 3) pen.strokeRect(at.x + .5, at.y + .5, at.w - 1, at.h - 1);
      }
    }
    for (const panel of panels) if (panel.kind === "main") grid(panel);
    const partners = pinned ? related(pinned) : null;
    const dim = box => matches && !matches.has(`${box.k}:${box.buffer}`);
    for (const box of shown) {
      pen.fillStyle = fillOf(scenes[box.k].buffers[box.buffer]);
      if (box.held) {
        pen.globalAlpha = dim(box) ? .08 : .3;
        pen.fillRect(box.held.x, box.held.y, box.held.w, box.held.h);
      }
      pen.globalAlpha = dim(box) ? .16 : 1;
      // Draw a seam between rectangles if they are large enough.
      const sx = box.w > 4 ? 1 : box.w > 2 ? .5 : 0, sy = box.h > 4 ? 1 : box.h > 2 ? .5 : 0;
      pen.fillRect(box.x, box.y, Math.max(box.w - sx, .75), Math.max(box.h - sy, .75));
    }
    pen.globalAlpha = 1;
    panels.forEach(peakMark);
    let limited = false;
    for (const panel of panels.filter(p => p.cap)) {
      const y = py(panel, panel.cap);
      if (y < panel.y || y > panel.y + panel.h) continue;
      rule(panel.x, y, panel.x + panel.w, y, colour.limit);
      if (!limited || own) words(`limit ${human(panel.cap)}`, panel.x + 4, y + 8, "left", colour.limit);
      limited = true;
    }
    if (partners) {
      for (const panel of panels.filter(p => p.k === pinned.k && p.kind === "main")) {
        for (const s of partners.steps) wash(panel, s);
      }
    }
    for (const box of shown) if (!dim(box)) label(box);
    for (const box of shown) {
      const chosen = same(pinned, { k: box.k, buffer: box.buffer, step: undefined });
      const near = hovered && hovered.k === box.k && hovered.buffer === box.buffer;
      const partner = partners && box.k === pinned.k && partners.buffers.has(box.buffer);
      if (chosen || near || partner) outline(box, chosen ? colour.mark : colour.ink, chosen ? 2.5 : 1.5, partner && !chosen);
    }
    for (const panel of panels) {
      if (panel.kind === "curve") curve(panel);
      if (panel.kind === "part") parts(panel);
      if (panel.kind === "strip") strip(panel, partners);
      if (panel.kind === "time") times(panel);
      if (panel.kind === "band") {
        words(panel.space.title, panel.x - 8, panel.y + panel.h / 2, "right", colour.muted);
        if (!panel.space.rects.length) words(human(panel.space.bytes), panel.x + 6, panel.y + panel.h / 2, "left", colour.label);
      }
    }
    if (drag && drag.box) {
      const { x, y, w, h } = drag.box;
      pen.fillStyle = colour.band;
      pen.fillRect(x, y, w, h);
      pen.strokeStyle = colour.mark;
      pen.lineWidth = 1;
      pen.strokeRect(x + .5, y + .5, w, h);
    }
  }

  function words(text, x, y, align, fill, bold) {
    pen.textAlign = align;
    pen.fillStyle = fill;
    if (bold) pen.font = `600 ${FONT}`;
    pen.fillText(text, x, y);
    pen.font = FONT;
  }

  function outline(box, stroke, thick, dashed) {
    pen.strokeStyle = stroke;
    pen.lineWidth = thick;
    pen.setLineDash(dashed ? [4, 3] : []);
    pen.strokeRect(box.x + thick / 2 - 1, box.y + thick / 2 - 1, Math.max(box.w - thick + 1, 1.5), Math.max(box.h - thick + 1, 1.5));
    pen.setLineDash([]);
    pen.lineWidth = 1;
  }

  function rule(x0, y0, x1, y1, stroke, dash) {
    pen.strokeStyle = stroke;
    pen.setLineDash(dash || []);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.setLineDash([]);
  }

  function grid(panel) {
    const shown = panel.extent * (view.y1 - view.y0);
    let step = 1;
    while (step < shown / Math.max(1, panel.h / 60)) step *= 2;
    for (let at = Math.ceil(panel.extent * view.y0 / step) * step; at <= panel.extent * view.y1; at += step) {
      const y = Math.round(py(panel, at)) + .5;
      rule(panel.x, y, panel.x + panel.w, y, colour.line);
      if (panel.k === 0 || own) words(short(at), panel.x - 8, y, "right", colour.muted);
    }
  }

  const widths = new Map();
  function wide(text) {
    if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
    return widths.get(text);
  }

  /** A text with its middle left out if it is too long, or nothing if too little of it would be left. A path's beginning and end tell most. */
  function fit(text, room) {
    if (wide(text) <= room) return text;
    const letters = [...text], least = 12;
    for (let kept = Math.ceil(letters.length * room / wide(text)); kept >= least; kept--) {
      const head = Math.floor(kept / 3);
      const cut = `${letters.slice(0, head).join("")}…${letters.slice(letters.length - kept + head).join("")}`;
      if (pen.measureText(cut).width <= room) return cut;
    }
    return null;
  }

  /** Writes name and size into a box: upwards if it is tall and its width has no room for the name. */
  function label(box) {
    const item = scenes[box.k].buffers[box.buffer], name = shown(item), turned = box.h > box.w && wide(name) > box.w - 12;
    const [length, height] = turned ? [box.h, box.w] : [box.w, box.h], room = length - 12;
    if (height < 14 || length < 34) return;
    const lines = [fit(name, room), [`${human(item.bytes)}  ${item.type}`, human(item.bytes)].find(t => wide(t) <= room)];
    const told = lines.filter(Boolean).slice(0, height >= 30 ? 2 : 1);
    told.forEach((text, i) => {
      const across = (i - (told.length - 1) / 2) * 14;
      if (!turned) return words(text, box.x + 6, box.y + box.h / 2 + across, "left", colour.label);
      pen.save();
      pen.translate(box.x + box.w / 2 + across, box.y + box.h - 6);
      pen.rotate(-Math.PI / 2);
      words(text, 0, 0, "left", colour.label);
      pen.restore();
    });
  }

  function wash(panel, s) {
    const at = clip(panel, [2 * s, 2 * s + 2], [view.y0 * panel.extent, view.y1 * panel.extent]);
    if (!at) return;
    pen.fillStyle = colour.band;
    pen.fillRect(at.x, at.y, Math.max(at.w, 1), at.h);
  }

  function peakMark(panel) {
    const peak = panel.scene.peak;
    if (!peak || panel.kind !== "main" && panel.kind !== "curve") return;
    const x0 = px(panel, 2 * peak.step), x1 = Math.max(px(panel, 2 * peak.step + 2), x0 + 1.5);
    if (x1 < panel.x || x0 > panel.x + panel.w) return;
    const from = Math.max(panel.x, x0), to = Math.min(panel.x + panel.w, x1), top = panel.kind === "main" ? panel.y - 14 : panel.y;
    pen.fillStyle = colour.band;
    pen.fillRect(from, top, to - from, panel.y + panel.h - top);
    for (const x of [from, to]) rule(Math.round(x) + .5, top, Math.round(x) + .5, panel.y + panel.h, colour.muted, panel.kind === "main" ? [2, 4] : []);
  }

  /** The steps in sight: the first, and one after the last. */
  function visible({ k, scene }) {
    return [Math.max(0, stepAt(k, view.x0)), Math.min(scene.steps.length, stepAt(k, view.x1) + 1)];
  }

  function curve(panel) {
    const { scene } = panel, y = bytes => py(panel, bytes);
    pen.save();
    pen.beginPath();
    pen.rect(panel.x, panel.y - 1, panel.w, panel.h + 2);
    pen.clip();
    const [from, to] = visible(panel);
    const trace = values => {
      pen.beginPath();
      pen.moveTo(px(panel, 2 * from), y(0));
      for (let s = from; s < to; s++) {
        pen.lineTo(px(panel, 2 * s), y(values[s]));
        pen.lineTo(px(panel, 2 * s + 2), y(values[s]));
      }
      pen.lineTo(px(panel, 2 * to), y(0));
    };
    if (scene.reserved.length) {
      trace(scene.reserved);
      pen.fillStyle = colour.reserved;
      pen.fill();
      pen.strokeStyle = colour.muted;
      pen.stroke();
    }
    trace(scene.live);
    pen.fillStyle = colour.live;
    pen.fill();
    pen.restore();
    if (!several) rule(panel.x, y(scene.bound), panel.x + panel.w, y(scene.bound), colour.ink, [4, 3]);
    if (panel.room && !several) {
      rule(panel.x, y(panel.room), panel.x + panel.w, y(panel.room), colour.limit);
      words(`limit leaves ${human(panel.room)}`, panel.x + panel.w - 4, y(panel.room) + 8, "right", colour.limit);
    }
    peakMark(panel);
    if (panel.k === 0) {
      words("live bytes", panel.x - 8, panel.y + panel.h / 2, "right", colour.muted);
      words("0", panel.x - 8, panel.y + panel.h, "right", colour.muted);
    }
    const peak = scene.peak;
    if (several) {
      words(scene.name, panel.x, panel.y - 32, "left", colour.ink, true);
      const most = list => human(list.reduce((a, b) => Math.max(a, b), 0));
      const reserved = scene.reserved.length ? `${most(scene.reserved)} reserved, ` : "";
      const live = `${most(scene.live)} live`, room = panel.w + GAP - 8;
      words([`${reserved}${live}`, live].find(told => wide(told) <= room) || "", panel.x, panel.y - 14, "left", colour.muted);
    } else if (peak) {
      const told = `peak: ${human(peak.bytes)} live at step ${peak.step}`, half = wide(told) * .6;
      const over = scene.arena - scene.bound;
      const bound = over > 0 ? `lower bound ${human(scene.bound)}, arena ${human(over)} over` : `lower bound ${human(scene.bound)}, reached`;
      const x = Math.min(Math.max(px(panel, 2 * peak.step + 1), panel.x + half), panel.x + panel.w - half);
      words(told, x, panel.y - 11, "center", colour.ink, true);
      if (panel.x + panel.w - wide(bound) > x + half + 12) words(bound, panel.x + panel.w, panel.y - 11, "right", colour.muted);
      else if (panel.x + wide(bound) < x - half - 12) words(bound, panel.x, panel.y - 11, "left", colour.muted);
    }
  }

  /** Of a training, the part of an update that the steps compute. */
  function parts(panel) {
    const { steps } = panel.scene, [first, end] = visible(panel);
    for (let from = first, to; from < end; from = to) {
      for (to = from + 1; to < end && steps[to].part === steps[from].part;) to++;
      const { label, fill } = partLooks[steps[from].part], at = clip(panel, [2 * from, 2 * to], [0, 1]);
      if (!at) continue;
      pen.fillStyle = fill;
      pen.fillRect(at.x, at.y, at.w, at.h);
      if (wide(label) < at.w - 10) words(label, at.x + 5, at.y + at.h / 2, "left", colour.label);
    }
    if (panel.k === 0) words("part", panel.x - 8, panel.y + panel.h / 2, "right", colour.muted);
  }

  function strip(panel, partners) {
    const { scene } = panel;
    const [from, to] = visible(panel);
    for (let s = from; s < to; s++) {
      const step = scene.steps[s], y = panel.y + 10 * Math.min(7, step.stream);
      const x0 = Math.max(panel.x, px(panel, 2 * s)), x1 = Math.min(panel.x + panel.w, px(panel, 2 * s + 2));
      if (x1 <= x0) continue;
      pen.fillStyle = fillOf(step);
      pen.fillRect(x0, y, x1 - x0 > 4 ? x1 - x0 - 1 : x1 - x0, 8);
      if (pinned && pinned.k === panel.k && pinned.step === s) {
        pen.strokeStyle = colour.mark;
        pen.lineWidth = 2;
        pen.strokeRect(x0, y - 1, Math.max(2, x1 - x0 - 1), 10);
        pen.lineWidth = 1;
      }
    }
    if (panel.k === 0) words(scene.streams > 1 ? "streams" : "steps", panel.x - 8, panel.y + panel.h / 2 - 1, "right", colour.muted);
    const each = panel.w * 2 / (view.x1 - view.x0), y = panel.y + panel.h + 8;
    if (timed) {
      clock(panel, y);
    } else {
      const told = several ? [] : scene.steps.slice(from, to).map((step, i) => `${from + i} ${step.kernel}`);
      const named = told.length > 0 && told.length < 400 && told.every(t => wide(t) < each - 8);
      let every = 1;
      for (let n = 0; every * each < wide(String(scene.steps.length)) + 18; n++) every = [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3);
      for (let s = Math.ceil(from / every) * every; s < to; s += every) {
        const x = px(panel, 2 * s + 1);
        if (x < panel.x || x > panel.x + panel.w) continue;
        words(named ? told[s - from] : String(s), x, y, "center", colour.muted);
      }
    }
    if (partners && pinned.k === panel.k && pinned.buffer !== undefined) {
      for (const [steps, mark] of [[scene.uses[pinned.buffer].reads, "read"], [scene.uses[pinned.buffer].writes, "write"]]) {
        for (const s of steps) {
          const x = px(panel, 2 * s + 1);
          if (x < panel.x || x > panel.x + panel.w) continue;
          pen.beginPath();
          pen.arc(x, panel.y + 10 * Math.min(7, scene.steps[s].stream) + 4, 3.5, 0, 7);
          pen.fillStyle = mark === "write" ? colour.label : "#ffffff";
          pen.strokeStyle = colour.label;
          pen.fill();
          pen.stroke();
        }
      }
    }
  }

  /** Milliseconds below a panel whose steps are as wide as they took. */
  function clock(panel, y) {
    const unit = longest / last / 1000, shown = (view.x1 - view.x0) * unit;
    let every = 10 ** Math.floor(Math.log10(shown)) / 10;
    for (let n = 0; every * panel.w / shown < 60; n++) every *= [2, 2.5, 2][n % 3];
    for (let n = Math.ceil(view.x0 * unit / every); n * every <= view.x1 * unit; n++) {
      const x = panel.x + panel.w * (n * every / unit - view.x0) / (view.x1 - view.x0);
      const told = `${Number((n * every).toPrecision(4))} ms`;
      if (x + wide(told) / 2 <= panel.x + panel.w + GAP / 2) words(told, x, y, "center", colour.muted);
    }
  }

  /** A bar per step: the time that it takes by itself. */
  function times(panel) {
    const { scene } = panel;
    const [from, to] = visible(panel);
    for (let s = from; s < to; s++) {
      const at = clip(panel, [2 * s, 2 * s + 2], [0, scene.times[s]]);
      if (!at) continue;
      pen.fillStyle = fillOf(scene.steps[s]);
      pen.fillRect(at.x, at.y, at.w > 4 ? at.w - 1 : at.w, at.h);
    }
    words("time", panel.x - 8, panel.y + panel.h / 2, "right", colour.muted);
    words(elapsed(panel.extent), panel.x - 8, panel.y + 6, "right", colour.muted);
  }

  /** The steps that use a buffer, or the buffers that a step uses. */
  function related(at) {
    const scene = scenes[at.k];
    if (at.buffer !== undefined) {
      const { reads, writes } = scene.uses[at.buffer];
      return { steps: new Set([...reads, ...writes]), buffers: new Set() };
    }
    const step = scene.steps[at.step];
    return { steps: new Set([at.step]), buffers: new Set([...step.reads, ...step.writes]) };
  }

  function redraw() {
    if (queued) return;
    queued = true;
    requestAnimationFrame(draw);
  }

  // ---- Details

  function told(at) {
    const scene = scenes[at.k];
    if (at.buffer !== undefined) return [scene.buffers[at.buffer].name, facts(scene, at.buffer)];
    const step = scene.steps[at.step], sum = list => exact([...new Set(list)].reduce((n, b) => n + scene.buffers[b].bytes, 0));
    const out = [["operator", step.operator], ["kernel", step.kernel], ["reads", sum(step.reads)], ["writes", sum(step.writes)], ["live", exact(scene.live[at.step])]];
    if (step.module) out.push(["module", step.module]);
    if (step.algorithm) out.push(["algorithm", step.algorithm]);
    if (step.part) out.push(["part", partLooks[step.part].label]);
    if (scene.times.length) {
      const time = scene.times[at.step], all = scene.times.reduce((a, b) => a + b, 0);
      out.push(["time", `${elapsed(time)}, ${share(time, all)} of all steps`]);
    }
    if (scene.reserved.length) out.push(["reserved", exact(scene.reserved[at.step])]);
    if (scene.streams > 1) out.push(["stream", String(step.stream)]);
    return [`step ${at.step}: ${step.name}`, out];
  }

  const list = pairs => make("dl", {}, ...pairs.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));

  function showTip(x, y) {
    tip.hidden = !hovered;
    if (!hovered) return;
    const [name, pairs] = told(hovered);
    tip.replaceChildren(make("strong", {}, several ? `${scenes[hovered.k].name}: ${name}` : name), list(pairs));
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = `${Math.max(0, x + 16 + w > width ? x - w - 12 : x + 16)}px`;
    tip.style.top = `${Math.max(0, y + 16 + h > height ? y - h - 12 : y + 16)}px`;
  }

  function pin(at, reveal) {
    pinned = at;
    if (at && reveal) show(at);
    const box = $("pinned");
    if (!at) {
      box.replaceChildren(make("p", { class: "muted" }, "Click a rectangle or a step to pin it here."));
    } else {
      const scene = scenes[at.k], [name, pairs] = told(at);
      const rows = [];
      const step = s => make("button", { onclick: () => pin({ k: at.k, step: s }, true) }, stepName(scene, s));
      const buffer = b => make("button", { onclick: () => pin({ k: at.k, buffer: b }, true) }, scene.buffers[b].name);
      const some = (label, items, to) => {
        if (!items.length) return;
        const few = items.slice(0, 12).map(i => make("div", {}, to(i)));
        if (items.length > 12) few.push(`and ${items.length - 12} more`);
        rows.push(make("dt", {}, label), make("dd", {}, ...few));
      };
      if (at.buffer !== undefined) {
        some("written by", scene.uses[at.buffer].writes, step);
        some("read by", scene.uses[at.buffer].reads, step);
      } else {
        some("reads", [...new Set(scene.steps[at.step].reads)], buffer);
        some("writes", [...new Set(scene.steps[at.step].writes)], buffer);
      }
      const details = list(pairs);
      details.append(...rows);
      box.replaceChildren(make("h2", {}, several ? `${scene.name}: ${name}` : name), details);
    }
    redraw();
  }

  /** Scrolls to a buffer or a step, unless it is visible. */
  function show(at) {
    const scene = scenes[at.k];
    let time = [2 * at.step, 2 * at.step + 2];
    if (at.buffer !== undefined) {
      const panel = panels.find(p => p.k === at.k && p.space && p.space.rects.some(r => r.buffer === at.buffer));
      if (!panel) return;
      const rect = panel.space.rects.find(r => r.buffer === at.buffer);
      time = rect.time;
      if (panel.kind === "main") {
        const size = view.y1 - view.y0, [low, high] = rect.bytes.map(b => b / panel.extent);
        if (high > view.y1) view.y0 = Math.min(1, high) - size;
        if (low < view.y0) view.y0 = low;
        view.y0 = Math.max(0, Math.min(1 - size, view.y0));
        view.y1 = view.y0 + size;
      }
    }
    const [from, to] = time.map(half => place(at.k, half));
    if (scene.steps.length && (from >= view.x1 || to <= view.x0)) {
      const size = view.x1 - view.x0, middle = (from + to) / 2;
      view.x0 = Math.max(0, Math.min(last - size, middle - size / 2));
      view.x1 = view.x0 + size;
    }
  }

  /** What the bytes of a plan hold: label, bytes and colour. */
  function holdings(scene) {
    if (data.training) {
      const fills = { weights: colours.weight, optimizer: colours.optimizer, arena: { fill: data.arena }, constants: colours.constant, staging: colours.staging, "the backend's own": colours.staging };
      // Those that are indented further are parts of these.
      const rows = data.training.bytes.filter(([label]) => /^  \S/.test(label));
      return rows.map(([label, bytes]) => [label.trim(), bytes, (fills[label.trim()] || colours.state).fill]);
    }
    const sums = new Map();
    for (const space of scene.spaces) sums.set(space.class, (sums.get(space.class) || 0) + space.bytes);
    return [...sums].filter(([, bytes]) => bytes).map(([of, bytes]) => [titles[of], bytes, kindOf(of)]);
  }

  /** All bytes of a plan: a bar, and its legend. */
  function total(scene) {
    const whole = Math.max(scene.planned, scene.limit || 0) || 1;
    const bar = make("div", { class: "bar", role: "img", "aria-label": `${human(scene.planned)} planned` });
    const list = make("ul", {}, make("li", {}, make("strong", {}, `${human(scene.planned)} planned `), make("span", {}, `${grouped(scene.planned)} bytes`)));
    for (const [title, bytes, fill] of holdings(scene)) {
      bar.append(make("i", { title: `${title}: ${exact(bytes)}`, style: { width: `${100 * bytes / whole}%`, background: fill } }));
      list.append(swatch(fill, `${title} ${human(bytes)} `, make("span", {}, share(bytes, scene.planned))));
    }
    if (scene.limit !== null) {
      bar.append(make("b", { title: `limit: ${exact(scene.limit)}`, style: { left: `calc(${100 * scene.limit / whole}% - 2px)` } }));
      const left = scene.limit - scene.planned;
      list.append(swatch("var(--limit)", `limit ${human(scene.limit)} `, make("span", {}, left < 0 ? `${human(-left)} too few` : `${human(left)} left`)));
    }
    return [bar, list];
  }

  function summary() {
    const scene = scenes[0];
    $("title").textContent = data.title;
    document.querySelector("main").classList.toggle("wide", several);
    if (!several || data.shared) $("totals").replaceChildren(...total(scene));
    legend();
    choice(layers.length > 1 && layers.length <= MOST_LAYERS, "colour by layer", byLayer, on => { byLayer = on; legend(); });
    choice(several, "a scale for each", own, on => own = on);
    choice(stripped.some(scene => scene.gone), "without constants", isBare, on => {
      isBare = on;
      scenes.forEach((scene, k) => Object.assign(scene, (on ? stripped : whole)[k]));
      measure();
    });
    choice(measured, "measured time", timed, on => timed = on);
    if (several && scene.figures.length) {
      const table = make("table", {}, make("tr", {}, make("th"), ...scenes.map(s => make("th", { class: "n" }, s.name))));
      scene.figures.forEach(([name], i) =>
        table.append(make("tr", {}, make("th", {}, name), ...scenes.map(s => make("td", { class: "n" }, (s.figures[i] || ["", "-"])[1])))));
      $("totals").append(table);
    }
    for (const note of several && data.notes || []) $("totals").append(make("p", { class: "muted" }, note));
    if (!several && scene.peak) {
      const table = make("table", {});
      scene.peak.buffers.slice(0, 12).forEach(b => {
        const name = make("button", { onclick: () => pin({ k: 0, buffer: b }, true) }, shown(scene.buffers[b]));
        table.append(make("tr", {}, make("td", { class: "n" }, human(scene.buffers[b].bytes)), make("td", {}, name)));
      });
      const more = scene.peak.buffers.slice(12);
      if (more.length) {
        const bytes = more.reduce((n, b) => n + scene.buffers[b].bytes, 0);
        table.append(make("tr", {}, make("td", { class: "n" }, human(bytes)), make("td", { class: "muted" }, `in ${more.length} more`)));
      }
      const step = make("button", { onclick: () => pin({ k: 0, step: scene.peak.step }, true) }, stepName(scene, scene.peak.step));
      $("peak").replaceChildren(make("h2", {}, `Live at the peak: ${human(scene.peak.bytes)}`), make("p", { class: "muted" }, "step ", step), table);
    }
    largest();
    const orders = data.summary && data.summary.orders || [];
    if (orders.length > 1) {
      const table = make("table", {}, make("tr", {}, make("th", {}, "order"), make("th", { class: "n" }, "bound"), make("th", { class: "n" }, "arena")));
      const best = Math.min(...orders.map(o => o.peak));
      const first = orders.findIndex(o => o.peak === best);
      orders.forEach((o, i) => table.append(make("tr", i === first ? { class: "at" } : {},
        make("td", {}, o.name), make("td", { class: "n" }, human(o.bound)), make("td", { class: "n" }, human(o.peak)))));
      $("orders").replaceChildren(make("h2", {}, "Orders that were tried"), table);
    }
  }

  /** Lists the largest buffers that last: weights, mostly. */
  function largest() {
    const all = lasting.flatMap(space => space.lasting).map(({ k, rect }) => ({ k, b: rect.buffer, item: scenes[k].buffers[rect.buffer] }));
    if (!all.length) return;
    all.sort((a, b) => b.item.bytes - a.item.bytes);
    const table = make("table", {}), few = all.slice(0, 12);
    for (const { k, b, item } of few) {
      const name = make("button", { onclick: () => pin({ k, buffer: b }, true) }, shown(item));
      table.append(make("tr", {}, make("td", { class: "n" }, human(item.bytes)), make("td", {}, name)));
    }
    const bytes = all.slice(12).reduce((sum, { item }) => sum + item.bytes, 0);
    if (bytes) table.append(make("tr", {}, make("td", { class: "n" }, human(bytes)), make("td", { class: "muted" }, `in ${all.length - 12} more`)));
    $("largest").replaceChildren(make("h2", {}, `Largest of what lasts: ${[...new Set(few.map(({ item }) => titles[item.class]))].join(", ")}`), table);
  }

  /** What the colours mean. */
  function legend() {
    const used = new Set(scenes.flatMap(s => s.main.flatMap(p => p.rects.map(r => s.buffers[r.buffer].kind)).concat(s.steps.map(t => t.kind))));
    for (const space of lasting) for (const { k, rect } of space.lasting) used.add(scenes[k].buffers[rect.buffer].kind);
    const kinds = data.palette.filter(p => used.has(p.kind)).map(p => swatch(p.kind, p.label));
    $("legend").replaceChildren(...(byLayer ? layers.map(layer => swatch(layerFills.get(layer), layer)) : kinds));
    const parted = new Set(scenes.flatMap(s => s.steps.map(step => step.part)));
    $("legend").append(...data.parts.filter(p => parted.has(p.part)).map(p => swatch(p.fill, p.label)));
    if (scenes.some(s => s.main.some(p => p.rects.some(r => r.held[0] < r.time[0] || r.held[1] > r.time[1])))) {
      $("legend").append(swatch("#77aadd4d", "pale: held, but not in use"));
    }
    if (scenes.some(s => s.main.some(p => p.rects.length))) $("legend").append(make("li", {}, make("i", { class: "unused" }), several ? "reserved, not in use" : "not in use"));
  }

  /** A box to tick above the keys, which changes how all is drawn. */
  function choice(offered, name, on, set) {
    if (!offered) return;
    const box = make("input", { type: "checkbox", onchange: () => { set(box.checked); layout(); reset(); } });
    box.checked = on;
    $("choices").append(make("label", {}, box, ` ${name}`));
  }

  // ---- Training

  /** Lists the bytes of a training by what they hold, beside its losses if it has run. */
  function training() {
    if (!data.training) return;
    const { losses, bytes } = data.training;
    $("training").hidden = false;
    $("training").classList.toggle("planned", !losses);
    $("losses").hidden = !losses;
    const table = make("table", {});
    for (const [label, size] of bytes) {
      table.append(make("tr", {}, make("td", {}, label), make("td", { class: "n" }, human(size)), make("td", { class: "n muted" }, share(size, bytes[0][1]))));
    }
    $("bytes").replaceChildren(table);
    if (losses) curveOf(losses);
  }

  /** At most six round numbers within a range, at equal distances. */
  function rounds(low, high) {
    const most = 5;
    let step = 10 ** Math.floor(Math.log10((high - low) / most));
    for (let n = 0; (high - low) / step > most; n++) step *= [2, 2.5, 2][n % 3];
    const from = Math.ceil(low / step), to = Math.floor(high / step);
    return Array.from({ length: Math.max(0, to - from + 1) }, (_, n) => Number(((from + n) * step).toPrecision(12)));
  }

  /** Powers of ten within a range, with twice and five times each if these are few. */
  function powersOfTen(low, high) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), between = to - from < 4 ? [1, 2, 5] : [1];
    const all = Array.from({ length: to - from + 1 }, (_, n) => between.map(factor => Number((factor * 10 ** (from + n)).toPrecision(1))));
    return all.flat().filter(value => low <= value && value <= high);
  }

  /** Draws the losses over the steps, those of validation too. Falls of a factor of ten and more are on a scale of powers. */
  function curveOf({ each, points, steps, valid }) {
    const width = 1000, height = 240, left = 64, right = 12, top = 14, bottom = 24;
    const element = (tag, attributes, text) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      if (text !== undefined) node.textContent = text;
      return node;
    };
    const values = points.concat(valid.map(v => v.loss)).filter(Number.isFinite);
    const low = Math.min(...values), high = Math.max(...values);
    const powers = low > 0 && high >= 10 * low;
    const up = value => powers ? Math.log10(value) : value;
    const [from, to] = high > low ? [up(low), up(high)] : [up(high) - 1, up(high) + 1];
    const x = step => left + (width - left - right) * step / Math.max(1, steps);
    const y = value => top + (height - top - bottom) * (to - up(value)) / (to - from);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Loss over ${steps} steps` });
    for (const value of powers ? powersOfTen(low, high) : rounds(from, to)) {
      svg.append(element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      svg.append(element("text", { class: "loss", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)));
    }
    for (const step of rounds(0, steps).filter(Number.isInteger)) {
      svg.append(element("text", { class: "step", x: x(step), y: height - 8, "text-anchor": step === 0 ? "start" : step === steps ? "end" : "middle" }, grouped(step)));
    }
    // A point is the mean of `each` steps, and stands in their middle.
    const curve = points.map((loss, i) => [(i + .5) * each, loss]);
    const line = (shown, name) => element("polyline", { class: name, points: shown.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ") });
    svg.append(line(curve, "loss"), line(valid.map(v => [v.step, v.loss]), "valid"));
    for (const v of valid) svg.append(element("circle", { cx: x(v.step).toFixed(1), cy: y(v.loss).toFixed(1), r: 2.5 }));
    const told = make("ul", { class: "muted" });
    const number = value => value.toPrecision(4);
    const last = valid[valid.length - 1];
    const rightShare = v => v.accuracy === null ? "" : `, accuracy ${(100 * v.accuracy).toFixed(2)} %`;
    const whole = () => told.replaceChildren(swatch("var(--mark)", "loss"), ...(last ? [swatch("var(--limit)", `validation: ${number(last.loss)}${rightShare(last)} at the end`)] : []));
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      const step = ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * steps;
      const near = curve[Math.max(0, Math.min(curve.length - 1, Math.floor(step / each)))];
      if (!near) return;
      const first = near[0] - each / 2, seen = valid.filter(v => v.step <= step).pop();
      const at = each > 1 ? `steps ${grouped(first)} to ${grouped(first + each - 1)}` : `step ${grouped(first)}`;
      told.textContent = `${at}: loss ${number(near[1])}${seen ? `; validation after ${grouped(seen.step)} steps: ${number(seen.loss)}${rightShare(seen)}` : ""}`;
    });
    svg.addEventListener("pointerleave", whole);
    whole();
    $("losses").replaceChildren(make("h2", {}, powers ? "Loss over the steps, on a logarithmic scale" : "Loss over the steps"), svg, told);
  }

  let most = 200;
  function rows() {
    if (!$("all").open) return;
    const all = scenes.flatMap((scene, k) => scene.buffers.map((item, b) => ({ scene, k, item, b })))
      .filter(r => !matches || matches.has(`${r.k}:${r.b}`));
    all.sort((a, b) => b.item.bytes - a.item.bytes || a.k - b.k || a.b - b.b);
    const head = ["bytes", "name", "type", "class", "steps", "segment", "offset", "written by"];
    const table = make("table", {}, make("caption", { class: "muted" }, `${grouped(Math.min(most, all.length))} of ${grouped(all.length)} buffers, the largest first`),
      make("tr", {}, ...(several ? [make("th", {}, "run")] : []), ...head.map((h, i) => make("th", i === 0 || i > 4 && i < 7 ? { class: "n", scope: "col" } : { scope: "col" }, h))));
    for (const { scene, k, item, b } of all.slice(0, most)) {
      const name = make("button", { onclick: () => { pin({ k, buffer: b }, true); canvas.scrollIntoView({ block: "nearest" }); } }, item.name);
      const from = scene.uses[b].writes[0];
      table.append(make("tr", {}, ...(several ? [make("td", {}, scene.name)] : []), make("td", { class: "n" }, grouped(item.bytes)), make("td", {}, name), make("td", {}, item.type),
        make("td", {}, item.class), make("td", {}, item.uses ? `${item.uses[0]} to ${item.uses[1]}` : ""), make("td", { class: "n" }, String(item.segment)),
        make("td", { class: "n" }, grouped(item.offset)), make("td", {}, from === undefined ? "" : stepName(scene, from))));
    }
    const more = make("button", { onclick: () => { most *= 4; rows(); } }, "Show more");
    $("rows").replaceChildren(table, ...(all.length > most ? [more] : []));
  }

  // ---- Input

  const MIN_X = 1, MIN_Y = 1e-6;
  function zoom(panel, x, y, factor, axes) {
    if (axes.includes("x")) {
      const size = Math.min(last, Math.max(MIN_X, (view.x1 - view.x0) * factor));
      const at = view.x0 + (x - panel.x) / panel.w * (view.x1 - view.x0);
      view.x0 = Math.max(0, Math.min(last - size, at - (x - panel.x) / panel.w * size));
      view.x1 = view.x0 + size;
    }
    if (axes.includes("y")) {
      const part = 1 - (y - panel.y) / panel.h, size = Math.min(1, Math.max(MIN_Y, (view.y1 - view.y0) * factor));
      const at = view.y0 + part * (view.y1 - view.y0);
      view.y0 = Math.max(0, Math.min(1 - size, at - part * size));
      view.y1 = view.y0 + size;
    }
    redraw();
  }

  function pan(dx, dy) {
    const w = view.x1 - view.x0, h = view.y1 - view.y0;
    view.x0 = Math.max(0, Math.min(last - w, view.x0 + dx));
    view.x1 = view.x0 + w;
    view.y0 = Math.max(0, Math.min(1 - h, view.y0 + dy));
    view.y1 = view.y0 + h;
    redraw();
  }

  function reset() {
    Object.assign(view, { x0: 0, x1: last, y0: 0, y1: 1 });
    redraw();
  }

  const where = event => {
    const at = canvas.getBoundingClientRect();
    return [event.clientX - at.left, event.clientY - at.top];
  };
  /** The panel whose axes a point is on, and the axes: `x`, `y` or `xy`. */
  function axesAt(x, y) {
    const panel = panelAt(x, y);
    // What lasts has neither axis.
    if (panel && panel.kind === "band") return [undefined, ""];
    if (panel) return [panel, panel.kind === "main" ? "xy" : "x"];
    const beside = panels.find(p => p.kind === "main" && y >= p.y && y < p.y + p.h && x < p.x && x >= p.x - gutter);
    if (beside) return [beside, "y"];
    const below = panels.find(p => p.kind === "strip" && x >= p.x && x < p.x + p.w && y >= p.y && y < p.y + 40);
    return [below, "x"];
  }

  canvas.addEventListener("wheel", event => {
    const [x, y] = where(event);
    const [panel, free] = axesAt(x, y);
    if (!panel) return;
    const whole = view.x1 - view.x0 >= last && view.y1 - view.y0 >= 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && !event.shiftKey) {
      if (whole) return;
      pan(event.deltaX / panel.w * (view.x1 - view.x0), 0);
    } else {
      const delta = event.deltaY || event.deltaX;
      // Everything is visible, so let the wheel scroll the page.
      if (whole && delta > 0) return;
      zoom(panel, x, y, Math.exp(delta * .0016), event.shiftKey ? "x" : event.altKey ? "y" : free);
    }
    event.preventDefault();
  }, { passive: false });

  canvas.addEventListener("pointerdown", event => {
    if (event.button > 1) return;
    const [x, y] = where(event);
    const [panel] = axesAt(x, y);
    drag = { x, y, panel, moved: false, pans: event.shiftKey || event.button === 1, from: [x, y] };
    canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener("pointermove", event => {
    const [x, y] = where(event);
    if (drag && drag.panel && (drag.moved || Math.hypot(x - drag.x, y - drag.y) > 4)) {
      drag.moved = true;
      hovered = null;
      showTip();
      const p = drag.panel;
      if (drag.pans) {
        pan((drag.from[0] - x) / p.w * (view.x1 - view.x0), (y - drag.from[1]) / p.h * (view.y1 - view.y0));
        drag.from = [x, y];
      } else {
        const clamp = (v, low, size) => Math.max(low, Math.min(low + size, v));
        const [x0, x1] = [drag.x, x].map(v => clamp(v, p.x, p.w)).sort((a, b) => a - b);
        const [y0, y1] = p.kind === "main" ? [drag.y, y].map(v => clamp(v, p.y, p.h)).sort((a, b) => a - b) : [p.y, p.y + p.h];
        drag.box = { x: x0, y: y0, w: x1 - x0, h: y1 - y0 };
        redraw();
      }
      return;
    }
    const at = hit(x, y);
    if (!same(at, hovered) || !at !== !hovered) { hovered = at; redraw(); }
    showTip(x, y);
  });

  canvas.addEventListener("pointerup", event => {
    const was = drag;
    drag = null;
    if (!was) return;
    const [x, y] = where(event);
    if (!was.moved) {
      if (event.button === 0) pin(hit(x, y), false);
      return;
    }
    if (was.box && (was.box.w > 4 || was.box.h > 4)) {
      const { box, panel: p } = was, w = view.x1 - view.x0, h = view.y1 - view.y0, { x0, y0 } = view;
      const wide = Math.max(MIN_X, box.w / p.w * w);
      view.x0 = Math.max(0, Math.min(last - wide, x0 + (box.x - p.x) / p.w * w));
      view.x1 = view.x0 + wide;
      if (p.kind === "main" && box.h > 4) {
        const tall = Math.max(MIN_Y, box.h / p.h * h);
        view.y0 = Math.max(0, Math.min(1 - tall, y0 + (1 - (box.y + box.h - p.y) / p.h) * h));
        view.y1 = view.y0 + tall;
      }
    }
    redraw();
  });

  canvas.addEventListener("pointerleave", () => { hovered = null; showTip(); redraw(); });
  canvas.addEventListener("dblclick", reset);

  /** Selects the next buffer in time (dx), or the next one above or below (dy). */
  function walk(dx, dy) {
    const k = pinned ? pinned.k : 0;
    const all = panels.filter(p => p.k === k && p.space).flatMap(panel => panel.space.rects.map(rect => ({ panel, rect })));
    if (!all.length) return;
    all.sort((a, b) => panels.indexOf(a.panel) - panels.indexOf(b.panel) || a.rect.time[0] - b.rect.time[0] || a.rect.bytes[0] - b.rect.bytes[0]);
    const at = pinned && pinned.buffer !== undefined ? all.findIndex(o => o.rect.buffer === pinned.buffer) : -1;
    let next = all[0];
    if (at >= 0 && dx) next = all[(at + dx + all.length) % all.length];
    if (at >= 0 && dy) {
      const { panel, rect } = all[at], order = panels.indexOf(panel);
      const meets = o => o.rect.time[0] < rect.time[1] && rect.time[0] < o.rect.time[1];
      const key = o => [-panels.indexOf(o.panel), o.rect.bytes[0]], own = [-order, rect.bytes[0]];
      const above = (a, b) => a[0] - b[0] || a[1] - b[1];
      const others = all.filter(o => meets(o) && above(key(o), own) * dy > 0).sort((a, b) => above(key(a), key(b)) * dy);
      next = others[0] || all[at];
    }
    pin({ k, buffer: next.rect.buffer }, true);
  }

  canvas.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const main = panels.find(p => p.kind === "main") || panels[0];
    const middle = f => zoom(main, main.x + main.w / 2, main.y + main.h / 2, f, "xy");
    const w = (view.x1 - view.x0) / 8, h = (view.y1 - view.y0) / 8, shift = event.shiftKey;
    const keys = {
      ArrowLeft: () => shift ? pan(-w, 0) : walk(-1, 0), ArrowRight: () => shift ? pan(w, 0) : walk(1, 0),
      ArrowUp: () => shift ? pan(0, h) : walk(0, 1), ArrowDown: () => shift ? pan(0, -h) : walk(0, -1),
      "+": () => middle(.7), "=": () => middle(.7), "-": () => middle(1 / .7), "0": reset, Home: reset, Escape: () => pin(null),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });

  document.addEventListener("keydown", event => {
    if (event.key !== "/" || event.target === find) return;
    find.focus();
    event.preventDefault();
  });

  /** The part that was visible before the search, which what is found replaces. */
  let before = null;

  /** Zooms to all matches at once, with some room around them, or back if there are none. */
  function frame() {
    if (!matches || !matches.size) {
      if (before) Object.assign(view, before);
      before = null;
      return;
    }
    before = before || { ...view };
    const x = [last, 0], y = [1, 0];
    for (const { k, space, extent } of panels.filter(p => p.kind === "main")) {
      for (const rect of space.rects) {
        if (!matches.has(`${k}:${rect.buffer}`)) continue;
        const [from, to] = rect.time.map(half => place(k, half));
        x[0] = Math.min(x[0], from);
        x[1] = Math.max(x[1], to);
        y[0] = Math.min(y[0], rect.bytes[0] / extent);
        y[1] = Math.max(y[1], rect.bytes[1] / extent);
      }
    }
    const around = ([low, high], whole, least) => {
      const size = Math.min(whole, Math.max(least, (high - low) * 1.1)), from = (low + high - size) / 2;
      const start = Math.max(0, Math.min(whole - size, from));
      return [start, start + size];
    };
    // Constants and states alone lie in no plot that zooms along its bytes.
    [view.x0, view.x1] = around(x[0] < x[1] ? x : [0, last], last, MIN_X);
    [view.y0, view.y1] = around(y[0] < y[1] ? y : [0, 1], 1, MIN_Y);
  }

  function search() {
    const term = find.value.trim().toLowerCase();
    matches = null;
    if (term) {
      matches = new Map();
      scenes.forEach((scene, k) => scene.buffers.forEach((item, b) => {
        if (shown(item).toLowerCase().includes(term) || item.type.toLowerCase().includes(term)) matches.set(`${k}:${b}`, { k, buffer: b });
      }));
    }
    $("found").textContent = matches ? `${grouped(matches.size)} of ${grouped(scenes.reduce((n, s) => n + s.buffers.length, 0))}` : "";
    rows();
    frame();
    redraw();
  }
  find.addEventListener("input", search);
  find.addEventListener("keydown", event => {
    if (event.key === "Escape") { find.value = ""; search(); canvas.focus(); }
    if (event.key !== "Enter" || !matches || !matches.size) return;
    const all = [...matches.values()], at = all.findIndex(m => same(m, pinned));
    pin(all[(at + 1) % all.length], true);
  });

  // ---- Start

  function theme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["panel", "ink", "muted", "line", "label", "live", "reserved", "stripe", "limit", "mark", "band"]) {
      colour[name] = style.getPropertyValue(`--${name}`).trim();
    }
    // Stripes, for bytes that are there and in no use.
    const tile = new OffscreenCanvas(6, 6), ink = tile.getContext("2d");
    ink.fillStyle = several ? colour.reserved : colour.panel;
    ink.fillRect(0, 0, 6, 6);
    ink.strokeStyle = colour.stripe;
    for (const x of [-6, 0, 6]) {
      ink.moveTo(x - 1, 7);
      ink.lineTo(x + 7, -1);
    }
    ink.stroke();
    colour.unused = pen.createPattern(tile, "repeat");
    redraw();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
  new ResizeObserver(() => {
    if (canvas.clientWidth === width) return;
    layout();
    redraw();
  }).observe($("plot"));
  $("all").addEventListener("toggle", rows);
  summary();
  training();
  layout();
  theme();
  pin(null);
  draw();

  /** For tests and for the console: the data, the visible part, and the buffer or step at each pixel. */
  window.plimsoll = { data, view, boxes, hit, draw, panels: () => panels, pinned: () => pinned, hovered: () => hovered, matches: () => matches };
})();
