// The picture of a run: left its steps as code, right the time that each took.
import { useEffect, useState } from "preact/hooks";
import { type Attempt, type Details, type Failure, type Step, read } from "./api";
import { may, rerun } from "./actions";
import { clock, counted, duration, glyph, ms, sideOf } from "./format";
import { go, inFile, place, runLink } from "./place";
import { Json, Rows, RunLink, isNarrow, second } from "./parts";
import { type Scale, scaleOf, ticksOf } from "./scale";

const FOLD_FROM = 20;
const INDENT_MAX = 6;
const ROW = 32;
const ROW_NARROW = 50;
const WAITS = new Set(["timer", "event", "message", "instance"]);

interface Line {
  key: string;
  depth: number;
  step?: Step;
  group?: Step[];
  note?: string;
}

// --- lines: the steps by branch, with fan-outs folded

function branchOf(step: Step): string {
  return step.op.split("/")[0] ?? "0";
}

function depthOf(path: string): number {
  return Math.min(INDENT_MAX, path.split(".").length - 1);
}

function likeness(step: Step): string {
  return `${step.kind} ${step.call.split("(")[0]} ${depthOf(branchOf(step))}`;
}

function linesOf(steps: Step[], opened: Set<string>, prefix: string, depth: number): Line[] {
  const lines: Line[] = [];
  for (let i = 0; i < steps.length; ) {
    const step = steps[i]!;
    const like = likeness(step);
    let end = i + 1;
    while (end < steps.length && likeness(steps[end]!) === like) end++;
    const own = depth + depthOf(branchOf(step));
    const key = `${prefix}${step.event}`;
    if (end - i > FOLD_FROM) {
      const group = steps.slice(i, end);
      lines.push({ key: `${key}-group`, depth: own, group });
      if (opened.has(`${key}-group`)) for (const each of group) lines.push({ key: `${prefix}${each.event}`, depth: own + 1, step: each });
    } else for (const each of steps.slice(i, end)) lines.push({ key: `${prefix}${each.event}`, depth: own, step: each });
    i = end;
  }
  return lines;
}

function timesOf(steps: Step[]): number[] {
  return steps.flatMap((step) => [ms(step.since), ms(step.ended_at) || ms(step.since)]);
}

// --- the picture

export function Journal({ run }: { run: Details }) {
  const [opened, setOpened] = useState(new Set<string>());
  const [children, setChildren] = useState(new Map<string, Details>());
  const [earlier, setEarlier] = useState<Step[]>([]);
  const [left, setLeft] = useState(run.events_left_out);
  const [dropped, setDropped] = useState(false);
  const chosen = Number(place.value.given.get("step") ?? 0);
  const toggle = (key: string) => {
    const next = new Set(opened);
    if (!next.delete(key)) next.add(key);
    setOpened(next);
  };
  const openChild = async (step: Step) => {
    const key = step.child!;
    toggle(`child-${key}`);
    if (!children.has(key)) setChildren(new Map(children).set(key, await read<Details>("/run", { id: key })));
  };
  const readEarlier = async () => {
    const part = await read<{ steps: Step[]; first_event: number }>("/run/journal", { id: run.id, execution: run.execution, after: left });
    setEarlier([...part.steps, ...earlier]);
    setLeft(part.first_event - 1);
  };

  const all = [...earlier, ...run.steps];
  const steps = dropped ? all : all.filter((step) => step.state !== "dropped");
  const hidden = all.length - steps.length;
  const isOpen = !run.completed_at;
  const times = timesOf(steps);
  // The first and last event may be some milliseconds outside of what the store says of the run.
  const ended = times.reduce((most, each) => Math.max(most, each), ms(run.completed_at));
  const nowMs = isOpen ? (inFile() ? ms(run.now) : Math.max(second.value, ms(run.now))) : ended;
  const due = steps.filter((step) => step.state === "open").map((step) => ms(step.due_at));
  const next = run.attempts.map((attempt) => attempt.next_ms);
  const future = [...due, ...next].filter((time) => time > nowMs);
  const end = future.reduce((most, each) => Math.max(most, each), nowMs);
  const began = times.reduce((least, each) => Math.min(least, each), ms(run.created_at));
  const start = steps.length && left > 0 ? ms(steps[0]!.since) : began;
  const scale = scaleOf([...times, nowMs, ...future], start, end);
  const lines = linesOf(steps, opened, "", 1);
  for (let i = lines.length - 1; i >= 0; i--) {
    const child = lines[i]!.step?.child;
    if (child && opened.has(`child-${child}`)) {
      const found = children.get(child);
      const below = found ? linesOf(found.steps, opened, `${child}/`, lines[i]!.depth + 1) : [{ key: `${child}-wait`, depth: lines[i]!.depth + 1, note: "Reading…" }];
      lines.splice(i + 1, 0, ...below);
    }
  }
  const mismatch = typeof run.block?.detail === "object" ? run.block.detail : null;
  const blockedOp = mismatch && sideOf(mismatch.recorded).op;
  const attempts = new Map(run.attempts.map((attempt) => [attempt.activity_id, attempt]));
  const select = (step: Step) => go(runLink(run.id, { execution: place.value.given.get("execution"), step: chosen === step.event ? null : step.event }), true);

  return (
    <section class={`journal ${isOpen ? "live" : ""}`} aria-label="Journal: the steps of the run in the order of the code">
      <Axis scale={scale} nowMs={isOpen ? nowMs : null} />
      <div class="line head">
        <span class="code">
          <span class="text">
            <i>async</i> {run.name}({args(run.input)})
          </span>
        </span>
        <span class="lane" aria-hidden="true">
          <Bar scale={scale} from={start} to={nowMs} kind={`whole ${run.status.toLowerCase()}`} />
        </span>
        <span class="took">{duration(nowMs - began)}</span>
      </div>
      {left > 0 && (
        <button class="quiet earlier" onClick={readEarlier}>
          ↑ {counted(left, "earlier event")}: show more
        </button>
      )}
      <Rows
        items={lines}
        height={isNarrow.value ? ROW_NARROW : ROW}
        render={(line) =>
          line.group ? (
            <GroupLine key={line.key} line={line} scale={scale} nowMs={nowMs} isOpen={opened.has(line.key)} toggle={() => toggle(line.key)} />
          ) : line.step ? (
            <StepLine
              key={line.key}
              run={run}
              line={line}
              scale={scale}
              nowMs={nowMs}
              attempt={line.key.includes("/") ? undefined : attempts.get(line.step.event)}
              instead={!line.key.includes("/") && line.step.op === blockedOp ? sideOf(mismatch!.performed).what : null}
              isChosen={chosen === line.step.event && !line.key.includes("/")}
              isOpen={line.step.child ? opened.has(`child-${line.step.child}`) : false}
              select={() => select(line.step!)}
              openChild={() => void openChild(line.step!)}
            />
          ) : (
            <div class="line dim" key={line.key}>
              {line.note}
            </div>
          )
        }
      />
      <End run={run} scale={scale} nowMs={nowMs} />
      {(hidden > 0 || dropped) && (
        <button class="quiet earlier" onClick={() => setDropped(!dropped)}>
          {dropped ? "hide steps that were not needed" : `${counted(hidden, "step")} not needed: show`}
        </button>
      )}
    </section>
  );
}

function args(input: unknown): string {
  return Array.isArray(input) ? input.map((each) => JSON.stringify(each)).join(", ").slice(0, 160) : "";
}

function percent(part: number): string {
  return `${(part * 100).toFixed(3)}%`;
}

// The times above, and the lines that run down behind the bars.
function Axis({ scale, nowMs }: { scale: Scale; nowMs: number | null }) {
  const now = nowMs === null ? null : scale.at(nowMs);
  return (
    <div class="axis" aria-hidden="true">
      {ticksOf(scale).map((tick) => {
        const at = scale.at(scale.start + tick);
        const isHidden = at > (isNarrow.value ? 0.85 : 0.94) || (now !== null && Math.abs(at - now) < 0.1);
        return (
          <span class={`tick ${at < 0.01 ? "first" : ""}`} style={{ left: percent(at) }}>
            {isHidden ? "" : tick === 0 ? "0" : duration(tick)}
          </span>
        );
      })}
      {scale.folds.map((fold) => (
        <span class="fold" style={{ left: percent(scale.at(fold.from)), width: percent(scale.at(fold.to) - scale.at(fold.from)) }} title={`nothing happened for ${duration(fold.to - fold.from)}`}>
          <b>{duration(fold.to - fold.from)}</b>
        </span>
      ))}
      {now !== null && (
        <span class={`now ${now > 0.9 ? "last" : ""}`} style={{ left: percent(now) }}>
          <b>now</b>
        </span>
      )}
    </div>
  );
}

function Bar({ scale, from, to, kind, title }: { scale: Scale; from: number; to: number; kind: string; title?: string }) {
  const left = scale.at(from);
  const width = Math.max(0.004, scale.at(to) - left);
  return <span class={`bar ${kind}`} style={{ left: percent(Math.min(left, 0.996)), width: percent(width) }} title={title} />;
}

function StepLine(given: { run: Details; line: Line; scale: Scale; nowMs: number; attempt?: Attempt; instead: string | null; isChosen: boolean; isOpen: boolean; select: () => void; openChild: () => void }) {
  const { line, scale, nowMs, attempt } = given;
  const step = line.step!;
  const from = ms(step.since);
  const to = ms(step.ended_at) || nowMs;
  const dueMs = attempt && attempt.next_ms > nowMs ? attempt.next_ms : ms(step.due_at);
  const isRetrying = step.state === "open" && attempt?.last_error;
  const isQueued = step.state === "open" && attempt && !attempt.is_running && !attempt.last_error;
  const isWaiting = step.state === "open" && WAITS.has(step.kind);
  const state = given.instead ? "blocked" : isRetrying ? "retrying" : isQueued ? "queued" : isWaiting ? "waiting" : step.state;
  const kind = isRetrying ? (attempt!.is_running ? "open" : "queued") : `${WAITS.has(step.kind) ? "wait" : ""} ${state} ${step.attempts > 1 ? "again" : ""}`;
  // Of a step that is tried again: attempts until the last failure, a pause until it is due again.
  const failedMs = isRetrying ? Math.max(from, Math.min(attempt!.enqueued_ms, nowMs)) : null;
  const readyMs = failedMs === null ? from : Math.max(failedMs, Math.min(attempt!.next_ms, nowMs));
  return (
    <>
      <div class={`line ${state} ${given.isChosen ? "chosen" : ""}`} style={{ "--depth": line.depth }}>
        <button class="code" onClick={given.select} aria-expanded={given.isChosen}>
          <span class={`sign ${state}`} aria-hidden="true">
            {glyph(state)}
          </span>
          <span class="text">
            <i>await</i> {step.call}
            {given.instead ? <b class="error"> but the code did {given.instead}</b> : <Outcome step={step} attempt={attempt} nowMs={nowMs} />}
          </span>
          <span class="site" title={step.site}>{step.site.split("/").pop()}</span>
        </button>
        {step.child && (
          <button class="quiet child" aria-expanded={given.isOpen} aria-label={`steps of ${step.child}`} onClick={given.openChild}>
            {given.isOpen ? "▾" : "▸"}
          </button>
        )}
        <span class="lane" aria-hidden="true">
          {failedMs !== null && (
            <>
              <Bar scale={scale} from={from} to={failedMs} kind="retrying" title={`${counted(attempt!.number - 1, "attempt")} failed`} />
              <Bar scale={scale} from={failedMs} to={readyMs} kind="pause" />
              <span class="mark failed" style={{ left: percent(scale.at(failedMs)) }} title="the last attempt failed" />
            </>
          )}
          {(failedMs === null || readyMs < nowMs) && <Bar scale={scale} from={readyMs} to={to} kind={kind} title={`${clock(step.since)}, ${duration(to - from)}`} />}
          {step.attempts > 1 && (
            <span class={`times ${scale.at(to) > 0.9 ? "inside" : ""}`} style={{ left: percent(scale.at(to)) }}>
              ×{step.attempts}
            </span>
          )}
          {step.state === "open" && dueMs > nowMs && (
            <>
              <Bar scale={scale} from={nowMs} to={dueMs} kind={`future ${isRetrying ? "retrying" : ""}`} />
              <span class={`due ${isRetrying ? "retrying" : ""}`} style={{ left: percent(scale.at(dueMs)) }} title={`due in ${duration(dueMs - nowMs)}`} />
            </>
          )}
        </span>
        <span class="took">{duration(to - from)}</span>
      </div>
      {given.isChosen && <Panel run={given.run} step={step} attempt={attempt} nowMs={nowMs} />}
    </>
  );
}

function Outcome({ step, attempt, nowMs }: { step: Step; attempt?: Attempt; nowMs: number }) {
  const again = step.attempts > 1 ? ` after ${step.attempts} attempts` : "";
  if (step.state === "done") return step.result && step.result !== "null" ? <b class="result"> → {step.result}</b> : null;
  if (step.state === "failed")
    return (
      <b class="error">
        {" "}
        ✗ {step.error}
        {again}
      </b>
    );
  if (step.state === "dropped") return <b class="dim"> not needed</b>;
  if (attempt) {
    const number = attempt.of > 1 ? `attempt ${attempt.number} of ${attempt.of}` : "";
    const doing = attempt.next_ms > nowMs ? `in ${duration(attempt.next_ms - nowMs)}` : attempt.is_running ? "running" : "waits for a worker";
    return (
      <b class={attempt.last_error ? "again" : "dim"}>
        {" "}
        {[number, doing].filter(Boolean).join(" ")}
        {attempt.last_error ? `: ${attempt.last_error}` : ""}
      </b>
    );
  }
  const left = ms(step.due_at) - nowMs;
  if (step.due_at) return <b class="dim"> {left > 0 ? `due in ${duration(left)}` : "due"}</b>;
  return <b class={WAITS.has(step.kind) ? "waits" : "dim"}> {WAITS.has(step.kind) ? "waiting" : "running"}</b>;
}

function GroupLine({ line, scale, nowMs, isOpen, toggle }: { line: Line; scale: Scale; nowMs: number; isOpen: boolean; toggle: () => void }) {
  const steps = line.group!;
  const took = steps.map((step) => (ms(step.ended_at) || nowMs) - ms(step.since)).sort((a, b) => a - b);
  const counts: Record<string, number> = {};
  for (const step of steps) counts[step.state] = (counts[step.state] ?? 0) + 1;
  const state = counts.failed ? "failed" : counts.open ? "open" : "done";
  const name = steps[0]!.call.split("(")[0];
  const totals = Object.entries(counts)
    .map(([word, number]) => `${number.toLocaleString("en")} ${word}`)
    .join(", ");
  const at = (part: number) => duration(took[Math.min(took.length - 1, Math.floor(part * took.length))]!);
  const from = steps.reduce((least, step) => Math.min(least, ms(step.since)), Infinity);
  const to = steps.reduce((most, step) => Math.max(most, ms(step.ended_at) || nowMs), 0);
  const slots = 60;
  const heat = new Array<number>(slots).fill(0);
  for (const step of steps) {
    const first = Math.floor(scale.at(ms(step.since)) * (slots - 1));
    const last = Math.floor(scale.at(ms(step.ended_at) || nowMs) * (slots - 1));
    for (let i = first; i <= last; i++) heat[i] = (heat[i] ?? 0) + 1;
  }
  const most = Math.max(...heat);
  return (
    <div class={`line fan ${state}`} style={{ "--depth": line.depth }}>
      <button class="code" aria-expanded={isOpen} onClick={toggle}>
        <span class={`sign ${state}`} aria-hidden="true">
          {isOpen ? "▾" : "▸"}
        </span>
        <span class="text">
          {steps.length.toLocaleString("en")} × {name}{" "}
          <b class="dim">
            {totals} · min {at(0)} · median {at(0.5)} · max {at(1)}
          </b>
        </span>
      </button>
      <span class="lane" aria-hidden="true">
        {heat.map((number, i) => number > 0 && <span class={`heat ${state}`} style={{ left: percent(i / slots), height: `${4 + 16 * (number / most)}px` }} />)}
      </span>
      <span class="took">{duration(to - from)}</span>
    </div>
  );
}

// --- the details of a step

interface Detail {
  input: unknown;
  output: unknown;
  failure: Failure | null;
}

function Panel({ run, step, attempt, nowMs }: { run: Details; step: Step; attempt?: Attempt; nowMs: number }) {
  const [detail, setDetail] = useState<Detail | null>(null);
  useEffect(() => {
    read<Detail>("/run/step", { id: run.id, execution: run.execution, event: step.event })
      .then(setDetail)
      .catch(() => {});
  }, [run.id, run.execution, step.event, step.state]);
  const error = detail?.failure?.traceback || step.error || attempt?.last_error;
  return (
    <div class="panel">
      <p class="dim">
        {step.kind} · called at <code>{step.site}</code> · {clock(step.since)} · {duration((ms(step.ended_at) || nowMs) - ms(step.since))} · event {step.event}
        {step.attempts > 1 && ` · ${step.attempts} attempts`}
        {attempt && ` · attempt ${attempt.number} of ${attempt.of}${attempt.deliveries > 1 ? `, handed out ${attempt.deliveries} times` : ""}`}
        {attempt?.heartbeat && ` · heartbeat ${attempt.heartbeat}`}
      </p>
      {step.child && (
        <p>
          child <RunLink id={step.child} />
        </p>
      )}
      <div class="columns">
        <div>
          <h2 class="sub">Call</h2>
          {detail && detail.input !== null ? <Json value={detail.input} /> : <pre tabIndex={0}>{step.call}</pre>}
        </div>
        <div>
          <h2 class="sub">Result</h2>
          {detail && detail.output !== null ? <Json value={detail.output} /> : <p class="dim">{step.result ?? (step.state === "open" ? "not yet" : "none")}</p>}
        </div>
      </div>
      {error && (
        <>
          <h2 class="sub">Error</h2>
          <pre class="error" tabIndex={0}>
            {error}
          </pre>
        </>
      )}
      {may("operate") && (
        <button class="small" onClick={() => rerun(run, step.event)}>
          Rerun from here
        </button>
      )}
    </div>
  );
}

function End({ run, scale, nowMs }: { run: Details; scale: Scale; nowMs: number }) {
  if (!run.completed_at) return null;
  const isDone = run.status === "Completed";
  const isFailed = run.status === "Failed";
  return (
    <div class={`line end ${isDone ? "done" : isFailed ? "failed" : "dropped"}`} style={{ "--depth": 1 }}>
      <span class="code">
        <span class={`sign ${run.status.toLowerCase()}`} aria-hidden="true">
          {glyph(run.status)}
        </span>
        <span class="text">
          {isDone ? (
            <>
              <i>return</i> <b class="result">{JSON.stringify(run.output)?.slice(0, 200)}</b>
            </>
          ) : (
            <>
              <i>{isFailed ? "raise" : run.status.toLowerCase()}</i>{" "}
              <b class={isFailed ? "error" : "dim"}>
                {run.failure?.type_name}
                {run.failure?.message ? `: ${run.failure.message}` : ""}
              </b>
            </>
          )}
        </span>
      </span>
      <span class="lane" aria-hidden="true">
        <span class={`mark ${isDone ? "" : "failed"}`} style={{ left: percent(scale.at(nowMs)) }} />
      </span>
      <span class="took" />
    </div>
  );
}
