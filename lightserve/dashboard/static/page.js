"use strict";
// Reads the events (server-sent, by fetch, so that the key is in a header), keeps five minutes of
// them, and draws. Text goes into the page as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const CLASSES = [["rt", "Real-time"], ["be", "Best-effort"]];
  const KINDS = [["rt", "real-time"], ["be", "best-effort"], ["cached", "cached"],
    ["checkpointed", "checkpointed"]];
  const KEPT = 300;       // ticks
  const SMOOTH = 5;       // ticks that a rate is taken over: reports come once a second, not in step
  const WINDOW = 30;      // ticks that quantiles and attainment are of
  const RETRY_S = [1, 2, 5];

  let key = "";           // in memory only
  let hello = null;
  let ticks = [];         // {at, families, picture}
  let isPaused = false;
  let charts = [];

  // ------------------------------------------------------------------ small things

  function make(tag, text = "", className = "") {
    const element = document.createElement(tag);
    if (text !== "") element.textContent = text;
    if (className) element.className = className;
    return element;
  }
  function resolved(name) {  // light-dark() as a plain color, for canvases
    const probe = $("state").appendChild(make("i"));
    probe.style.color = `var(--${name})`;
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }
  const palette = {};
  function readPalette() {
    for (const name of ["rt", "be", "cached", "checkpointed", "free", "text", "quiet", "line", "bad"])
      palette[name] = resolved(name);
  }
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
  function round(value) {
    if (!isNumber(value)) return "–";
    if (value === 0) return "0";
    if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en-US");
    return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  }
  function seconds(value) {
    if (!isNumber(value)) return "–";
    if (value < 1) return `${round(value * 1e3)} ms`;
    if (value < 120) return `${round(value)} s`;
    return value < 7200 ? `${round(value / 60)} min` : `${round(value / 3600)} h`;
  }
  const percent = (share) => (isNumber(share) ? `${(100 * share).toFixed(share > 0.995 && share < 1 ? 2 : 1)} %` : "–");
  const at = (list, back) => list[Math.max(0, list.length - 1 - back)];

  // ------------------------------------------------------------------ figures

  function value(tick, name, labels = "") {
    const series = tick && tick.families && tick.families[`lightserve_${name}`];
    return series && series[labels] ? series[labels][0] : null;
  }
  function sum(tick, name, accepts) {
    const series = (tick && tick.families && tick.families[`lightserve_${name}`]) || {};
    let total = 0;
    for (const [labels, values] of Object.entries(series))
      if (accepts(labels.split(","))) total += values[0];
    return total;
  }
  function rate(name, label, back = SMOOTH) {
    const now = at(ticks, 0), before = at(ticks, back);
    if (!now || now === before || now.at <= before.at) return null;
    const grown = (value(now, name, label) || 0) - (value(before, name, label) || 0);
    return Math.max(0, grown) / (now.at - before.at);
  }
  function grown(name, label, back) {  // a histogram's sum and counts within so many ticks
    const read = (tick) => (tick.families && tick.families[`lightserve_${name}`] || {})[label];
    const now = ticks.length ? read(at(ticks, 0)) : null;
    if (!now) return null;
    const before = read(at(ticks, back));
    return now.map((count, i) => Math.max(0, count - (before ? before[i] : 0)));
  }
  function quantile(name, label, share, back = WINDOW) {
    const values = grown(name, label, back);
    if (!values) return null;
    const counts = values.slice(1), total = counts.reduce((a, b) => a + b, 0);
    if (total === 0) return null;
    const bounds = hello.buckets[`lightserve_${name}`];
    let below = 0;
    for (let i = 0; i < counts.length; i++) {
      if (counts[i] > 0 && below + counts[i] >= share * total) {
        const low = i ? bounds[i - 1] : 0, high = i < bounds.length ? bounds[i] : bounds[i - 1];
        return low + (high - low) * (share * total - below) / counts[i];
      }
      below += counts[i];
    }
    return null;
  }
  function attainment(label, back = WINDOW) {
    const count = (tick, outcome) =>
      sum(tick, "slo_requests_total", (l) => l[0] === label && l[1] === "all" && l[2] === outcome);
    const now = at(ticks, 0), before = at(ticks, back);
    const met = count(now, "met") - count(before, "met");
    const missed = count(now, "missed") - count(before, "missed");
    return met + missed > 0 ? met / (met + missed) : null;
  }

  // ------------------------------------------------------------------ tiles

  const tiles = {};
  function makeTile(id, title, names, mark) {
    const tile = make("div", "", "tile"), heading = make("h2"), list = make("dl");
    if (mark) {
      const dot = make("span", "", "dot");
      dot.style.background = `var(--${mark})`;
      heading.append(dot);
    }
    heading.append(make("span", title));
    tiles[id] = {};
    for (const name of names) {
      const box = make("div"), data = make("dd", "–");
      box.append(make("dt", name), data);
      list.append(box);
      tiles[id][name] = data;
    }
    tile.append(heading, list);
    $("tiles").append(tile);
  }
  function makeTiles() {
    for (const [label, title] of CLASSES)
      makeTile(label, title, ["running", "waiting", "tokens/s", "attainment", "TTFT p50", "TTFT p99",
        "largest gap p99", "predicted wait"], label);
    makeTile("engine", "Engine", ["steps/s", "busy", "KV in use", "KV forecast", "paused/min",
      "preempted/min", "restarts", "uptime"]);
  }
  function drawTiles() {
    const now = at(ticks, 0);
    const show = (id, name, text) => { tiles[id][name].textContent = text; };
    for (const [label] of CLASSES) {
      show(label, "running", round(value(now, "num_requests_running", label)));
      show(label, "waiting", round(value(now, "num_requests_waiting", label)));
      show(label, "tokens/s", round(rate("generation_tokens_total", label)));
      show(label, "attainment", percent(attainment(label)));
      show(label, "TTFT p50", seconds(quantile("time_to_first_token_seconds", label, 0.5)));
      show(label, "TTFT p99", seconds(quantile("time_to_first_token_seconds", label, 0.99)));
      show(label, "largest gap p99", seconds(quantile("max_inter_token_latency_seconds", label, 0.99)));
      show(label, "predicted wait", seconds(value(now, "predicted_wait_seconds", label)));
    }
    const total = value(now, "kv_slots");
    const perMinute = (name, accepts = () => true) => {
      const before = at(ticks, 60);
      if (now.at <= before.at) return null;
      return 60 * (sum(now, name, accepts) - sum(before, name, accepts)) / (now.at - before.at);
    };
    show("engine", "steps/s", round(rate("steps_total", "")));
    show("engine", "busy", percent(rate("worker_busy_seconds_total", "")));
    show("engine", "KV in use", total ? percent(value(now, "kv_slots_used") / total) : "–");
    show("engine", "KV forecast", total ? percent(value(now, "kv_slots_forecast_peak") / total) : "–");
    show("engine", "paused/min", round(perMinute("pauses_total")));
    show("engine", "preempted/min", round(perMinute("num_preemptions_total")));
    show("engine", "restarts", round(sum(now, "process_restarts_total", () => true)));
    show("engine", "uptime", seconds(now.at - (value(now, "start_time_seconds") || now.at)));
  }

  // ------------------------------------------------------------------ charts

  const CHARTS = [
    { title: "Requests", unit: round, lines: [
      ["real-time running", "rt", (t) => value(t, "num_requests_running", "rt")],
      ["real-time waiting", "rt", (t) => value(t, "num_requests_waiting", "rt"), [6, 4]],
      ["best-effort running", "be", (t) => value(t, "num_requests_running", "be")],
      ["best-effort waiting", "be", (t) => value(t, "num_requests_waiting", "be"), [6, 4]]] },
    { title: "Tokens per second", unit: round, lines: [
      ["real-time", "rt", () => rate("generation_tokens_total", "rt")],
      ["best-effort", "be", () => rate("generation_tokens_total", "be")]] },
    { title: "Real-time: time to the first token", unit: seconds, target: "ttft_s", lines: [
      ["p50", "rt", () => quantile("time_to_first_token_seconds", "rt", 0.5), [6, 4]],
      ["p99", "rt", () => quantile("time_to_first_token_seconds", "rt", 0.99)]] },
    { title: "Real-time: largest gap between tokens", unit: seconds, target: "mtpot_s", lines: [
      ["p50", "rt", () => quantile("max_inter_token_latency_seconds", "rt", 0.5), [6, 4]],
      ["p99", "rt", () => quantile("max_inter_token_latency_seconds", "rt", 0.99)]] },
    { title: "Attainment of all targets", unit: percent, range: [0, 1], lines: [
      ["real-time", "rt", () => attainment("rt")], ["best-effort", "be", () => attainment("be")]] },
    { title: "KV slots", unit: round, lines: [
      ["used", "text", (t) => value(t, "kv_slots_used_peak")],
      ["forecast", "quiet", (t) => value(t, "kv_slots_forecast_peak"), [6, 4]],
      ["cached", "cached", (t) => value(t, "kv_slots_cached")],
      ["capacity", "bad", (t) => value(t, "kv_slots"), [2, 3]]] },
    { title: "Prefixes on the host, tokens", unit: round, lines: [
      ["held", "cached", (t) => value(t, "prefix_host_slots_used")],
      ["capacity", "bad", (t) => value(t, "prefix_host_slots"), [2, 3]]] },
    { title: "Step times, recent steps", unit: seconds, isOfSteps: true, lines: [
      ["predicted", "quiet", (s) => s.predicted_s, [6, 4]],
      ["took", "text", (s) => s.exec_s],
      ["limit", "bad", (s) => s.limit_s, [2, 3]]] },
    { title: "Step times, means", unit: seconds, lines: [
      ["predicted", "quiet", () => mean("predicted_step_time_seconds"), [6, 4]],
      ["took", "text", () => mean("step_time_seconds")]] },
  ];
  function mean(name) {
    const values = grown(name, "", SMOOTH);
    const total = values ? values.slice(1).reduce((a, b) => a + b, 0) : 0;
    return total ? values[0] / total : null;
  }
  const clock = (s) => new Date(s * 1e3).toLocaleTimeString("en-GB");

  function makeChart(spec, columns = null) {
    const box = make("div", "", "chart");
    box.append(make("h2", spec.title));
    $("charts").append(box);
    const target = spec.target && hello.targets[spec.target];
    const lines = target ? [...spec.lines, ["target", "bad", () => target, [2, 3]]] : spec.lines;
    const axis = { stroke: () => palette.quiet, font: "11px system-ui, sans-serif",
      grid: { stroke: () => palette.line, width: 1 }, ticks: { show: false } };
    const series = lines.map(([label, mark, , dash]) => ({ label, dash, width: 1.5, spanGaps: false,
      stroke: () => palette[mark], points: { show: false },
      value: (_, v) => (v === null || v === undefined ? "–" : spec.unit(v)) }));
    const options = {
      width: Math.max(200, box.clientWidth - 24), height: 170, pxAlign: 0,
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: spec.range || ((plot, _, high) => range(spec, plot, high)) } },
      axes: [
        { ...axis, size: 26, space: 70,
          values: (_, marks) => marks.map((m) => (spec.isOfSteps ? String(m) : clock(m))) },
        { ...axis, size: 62, values: (_, marks) => marks.map((m) => spec.unit(m)) }],
      series: [{ label: spec.isOfSteps ? "step" : "time",
        value: (_, v) => (v === null || v === undefined ? "–" : spec.isOfSteps ? String(v) : clock(v)) }, ...series],
    };
    const data = columns || [[], ...lines.map(() => [])];
    return { box, spec, lines, columns: data, plot: new uPlot(options, data, box) };
  }
  function range(spec, plot, high) {
    // A limit far above what steps take is not worth their being flat.
    const top = spec.isOfSteps ? Math.max(...plot.data[1], ...plot.data[2]) : high;
    return [0, isNumber(top) && top > 0 ? top * 1.08 : 1];
  }
  function feedCharts(tick) {
    for (const chart of charts) {
      if (chart.spec.isOfSteps) {
        const steps = (tick.picture && tick.picture.steps) || [];
        chart.columns = [steps.map((s) => s.step_id),
          ...chart.lines.map(([, , read]) => steps.map((s) => read(s)))];
        continue;
      }
      chart.columns[0].push(tick.at);
      chart.lines.forEach(([, , read], i) => chart.columns[i + 1].push(read(tick)));
      if (chart.columns[0].length > KEPT) chart.columns.forEach((column) => column.shift());
    }
  }
  function drawCharts() {
    for (const { plot, columns } of charts) {
      plot.setData(columns);
      if (!isNumber(plot.cursor.left) || plot.cursor.left < 0)
        plot.setLegend({ idx: columns[0].length - 1 });
    }
  }
  function fit() {
    for (const chart of charts)
      chart.plot.setSize({ width: Math.max(200, chart.box.clientWidth - 24), height: 170 });
    drawPool();
  }

  // ------------------------------------------------------------------ the pool

  function drawPool() {
    const pool = at(ticks, 0) && at(ticks, 0).picture && at(ticks, 0).picture.pool;
    const canvas = $("pool"), list = $("kinds");
    if (!pool || !pool.cells) {
      canvas.style.height = "0px";
      list.replaceChildren(make("li", pool ? "too fragmented to draw" : "unavailable", "quiet"));
      return;
    }
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
    const count = pool.cells.rt.length;
    let size = 20;
    while (size > 3 && Math.ceil(count / Math.floor(width / size)) * size > 260) size--;
    const columns = Math.max(1, Math.floor(width / size)), height = Math.ceil(count / columns) * size;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const inner = size > 4 ? size - 1 : size;
    for (let i = 0; i < count; i++) {
      let left = (i % columns) * size;
      const top = Math.floor(i / columns) * size, right = left + inner;
      context.fillStyle = palette.free;
      context.fillRect(left, top, inner, inner);
      for (const [kind] of KINDS) {
        const wide = Math.min(right - left, inner * (pool.cells[kind].charCodeAt(i) - 48) / 9);
        context.fillStyle = palette[kind];
        if (wide > 0) context.fillRect(left, top, wide, inner);
        left += wide;
      }
    }
    const total = pool.num_slots;
    const words = [...KINDS, ["free", "free"]].map(([kind, word]) => [kind,
      `${word} ${pool.num_slots_of[kind].toLocaleString("en-US")} (${percent(pool.num_slots_of[kind] / total)})`]);
    list.replaceChildren(...words.map(([kind, word]) => {
      const item = make("li"), dot = make("span", "", "dot");
      dot.style.background = `var(--${kind})`;
      item.append(dot, make("span", word));
      return item;
    }), make("li", `a square is ${pool.blocks_per_cell > 1 ? `${pool.blocks_per_cell} blocks` : "a block"}`
      + ` of ${pool.block_size} slots; ${pool.num_shared_blocks} blocks are shared by both classes`, "quiet"));
    canvas.setAttribute("aria-label", `KV pool: ${words.map(([, word]) => word).join(", ")}`);
  }

  // ------------------------------------------------------------------ tables

  function fill(table, heads, rows) {
    const head = make("thead"), top = make("tr"), body = make("tbody");
    heads.forEach((text) => { const cell = make("th", text); cell.scope = "col"; top.append(cell); });
    head.append(top);
    for (const row of rows) {
      const line = make("tr");
      for (const [text, className] of row) line.append(make("td", text, className || ""));
      body.append(line);
    }
    table.replaceChildren(head, body);
  }
  function drawBatches(picture, now) {
    const batches = picture && picture.batches;
    $("batches-card").hidden = !batches;
    if (!batches) return;
    const due = (s) => (s === null ? "not known yet" : s <= now ? "now" : `in ${seconds(s - now)}`);
    fill($("batches"), ["batch", "route", "lines", "failed", "done", "forecast", "promised", ""],
      batches.map((b) => [[b.id], [b.endpoint], [`${round(b.num_done + b.num_failed)} of ${round(b.num_lines)}`],
        [round(b.num_failed)], [percent((b.num_done + b.num_failed) / Math.max(1, b.num_lines))],
        [due(b.forecast_s)], [due(b.promised_s)],
        b.is_in_time === null ? [""] : b.is_in_time ? ["in time", "in-time"] : ["late", "late"]]));
    if (!batches.length) $("batches").replaceChildren(make("caption", "none", "quiet"));
  }
  function reasonsOf(step) {
    const parts = [];
    for (const [label] of CLASSES) {
      for (const [reason, count] of Object.entries(step.left_out[label] || {}))
        parts.push(`${label} ${count} ${reason}`);
      for (const [reason, count] of Object.entries(step.unseen[label] || {}))
        parts.push(`${label} ${count} not examined (${reason})`);
    }
    if (step.num_paused) parts.push(`${step.num_paused} paused`);
    if (step.num_preempted) parts.push(`${step.num_preempted} preempted`);
    return parts.join(", ");
  }
  function drawSteps(picture) {
    const steps = ((picture && picture.steps) || []).slice(-24).reverse();
    const share = (step, label) => (step.num_requests[label]
      ? `${step.num_requests[label]} req, ${step.num_tokens[label]} tok` : "–");
    fill($("steps"), ["step", "sent", "predicted", "took", "limit", "real-time", "best-effort", "skipped, by reason"],
      steps.map((s) => [[String(s.step_id)], [`${seconds(s.age_s)} ago`], [seconds(s.predicted_s)],
        [s.exec_s === null ? "runs" : seconds(s.exec_s), s.exec_s > s.limit_s && s.limit_s !== null ? "late" : ""],
        [seconds(s.limit_s)], [share(s, "rt")], [share(s, "be")], [reasonsOf(s), "reasons"]]));
    if (!steps.length) $("steps").replaceChildren(make("caption", "no recent steps", "quiet"));
  }

  // ------------------------------------------------------------------ events

  function onEvent(name, data) {
    if (name === "hello") {
      const isFirst = hello === null;
      hello = data;
      $("about").textContent = `${hello.model} · policy ${hello.policy} · version ${hello.version}`;
      $("login").hidden = true;
      $("main").hidden = false;
      if (isFirst) {
        makeTiles();
        charts = CHARTS.map((spec) => makeChart(spec));
      }
      return;
    }
    if (!data.figures) {
      say("no", "supervisor not responding");
      return;
    }
    const tick = { at: data.figures.time_s, families: data.figures.families, picture: data.picture };
    ticks.push(tick);
    if (ticks.length > KEPT) ticks.shift();
    if (ticks.length > WINDOW + 61) ticks[ticks.length - WINDOW - 62].families = {};
    feedCharts(tick);
    say("yes", isPaused ? "paused" : data.picture ? "live" : "live, router not responding");
    if (!isPaused) draw();
  }
  function draw() {
    if (!ticks.length) return;
    const now = at(ticks, 0);
    drawTiles();
    drawCharts();
    drawPool();
    drawBatches(now.picture, now.at);
    drawSteps(now.picture);
  }
  function say(isLive, text) {
    $("state").dataset.live = isLive;
    $("state").textContent = text;
  }
  function askForKey(why) {
    $("main").hidden = true;
    $("login").hidden = false;
    $("refusal").textContent = why;
    say("no", "needs a key");
    $("key").focus();
  }
  async function read(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value: text } = await reader.read();
      if (done) return;
      const parts = (rest + text).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const fields = Object.fromEntries(part.split("\n").map((line) => {
          const colon = line.indexOf(": ");
          return [line.slice(0, colon), line.slice(colon + 2)];
        }));
        if (fields.event) onEvent(fields.event, JSON.parse(fields.data));
      }
    }
  }
  async function follow() {
    for (let failures = 0; ;) {
      try {
        const headers = key ? { authorization: `Bearer ${key}` } : {};
        const answer = await fetch("dashboard/events", { headers, cache: "no-store", credentials: "omit" });
        if (answer.status === 401 || answer.status === 403) {
          askForKey(!key ? "" : answer.status === 401 ? "Unknown key." : "This is not an operator's key.");
          key = "";
          return;
        }
        if (answer.ok) {
          failures = 0;
          await read(answer.body);
          say("no", "reconnecting");
        } else {
          say("no", answer.status === 503 ? "unavailable, or too many viewers" : `status ${answer.status}`);
        }
      } catch {
        say("no", "no connection");
      }
      const delay = RETRY_S[Math.min(failures++, RETRY_S.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, 1e3 * delay));
    }
  }

  // ------------------------------------------------------------------ the page

  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    $("key").value = "";
    $("refusal").textContent = "";
    follow();
  });
  $("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    $("pause").setAttribute("aria-pressed", String(isPaused));
    $("pause").textContent = isPaused ? "Resume" : "Pause";
    say("yes", isPaused ? "paused" : "live");
    if (!isPaused) draw();
  });
  const THEMES = ["system", "light", "dark"];
  function onTheme() {
    readPalette();
    $("charts").replaceChildren();  // marks of their legends are drawn once
    charts = charts.map((chart) => makeChart(chart.spec, chart.columns));
    draw();
  }
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    document.documentElement.dataset.theme = next;
    $("theme").textContent = `Theme: ${next}`;
    onTheme();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onTheme);
  window.addEventListener("resize", fit);
  readPalette();
  say("no", "connecting");
  follow();
})();
