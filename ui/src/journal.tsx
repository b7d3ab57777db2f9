// The picture of a run: left its steps as code, right the time that each took.
import { useState } from "preact/hooks";
import { type Attempt, type Details, type Step, read } from "./api";
import { clock, counted, duration, glyph, ms } from "./format";
import { go, link, place } from "./place";
import { Rows, RunLink, second } from "./parts";
import { type Scale, scaleOf } from "./scale";

const FOLD_FROM = 20;
const INDENT_MAX = 6;

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
    let end = i + 1;
    while (end < steps.length && likeness(steps[end]!) === likeness(step)) end++;
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
  const nowMs = isOpen ? Math.max(second.value, ms(run.now)) : ms(run.completed_at);
  const due = steps.filter((step) => step.state === "open").map((step) => ms(step.due_at));
  const next = run.attempts.map((attempt) => attempt.next_ms);
  const future = [...due, ...next].filter((time) => time > nowMs);
  const end = Math.max(nowMs, ...future) + 1;
  const start = steps.length && earlier.length === 0 && run.events_left_out ? ms(steps[0]!.since) : ms(run.created_at);
  const scale = scaleOf([...timesOf(steps), nowMs, ...future], start, end);
  const lines = linesOf(steps, opened, "", 0);
  for (let i = lines.length - 1; i >= 0; i--) {
    const child = lines[i]!.step?.child;
    if (child && opened.has(`child-${child}`)) {
      const found = children.get(child);
      const below = found ? linesOf(found.steps, opened, `${child}/`, lines[i]!.depth + 1) : [{ key: `${child}-wait`, depth: lines[i]!.depth + 1, note: "Reading…" }];
      lines.splice(i + 1, 0, ...below);
    }
  }
  const attempts = new Map(run.attempts.map((attempt) => [attempt.activity_id, attempt]));
  const select = (step: Step) => go(link("run", { id: run.id, execution: place.value.given.get("execution"), step: chosen === step.event ? null : step.event }), true);

  return (
    <section class="journal" aria-label="Journal: the steps of the run in the order of the code">
      <Axis scale={scale} nowMs={isOpen ? nowMs : null} />
      <div class="line head">
        <span class="code">
          <span class="text">
            <b>{run.name}</b>({args(run.input)})
          </span>
        </span>
        <span class="lane" aria-hidden="true">
          <Bar scale={scale} from={start} to={nowMs} kind={`whole ${run.status.toLowerCase()}`} />
        </span>
        <span class="took">{duration(nowMs - ms(run.created_at))}</span>
      </div>
      {left > 0 && (
        <button class="quiet" onClick={readEarlier}>
          {counted(left, "earlier event")}: read more
        </button>
      )}
      <Rows
        items={lines}
        height={30}
        render={(line) =>
          line.group ? (
            <GroupLine key={line.key} line={line} scale={scale} nowMs={nowMs} isOpen={opened.has(line.key)} toggle={() => toggle(line.key)} />
          ) : line.step ? (
            <StepLine
              key={line.key}
              line={line}
              scale={scale}
              nowMs={nowMs}
              attempt={line.key.includes("/") ? undefined : attempts.get(line.step.event)}
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
        <button class="quiet" onClick={() => setDropped(!dropped)}>
          {dropped ? "hide steps that were not needed" : `${counted(hidden, "step")} not needed: show`}
        </button>
      )}
    </section>
  );
}

function args(input: unknown): string {
  return Array.isArray(input) ? input.map((each) => JSON.stringify(each)).join(", ").slice(0, 160) : "";
}

function Axis({ scale, nowMs }: { scale: Scale; nowMs: number | null }) {
  return (
    <div class="axis" aria-hidden="true">
      <span class="space" />
      <span class="lane">
        <span class="tick first">0</span>
        {scale.folds.map((fold) => (
          <span class="fold" style={{ left: `${scale.at(fold.from) * 100}%`, width: `${(scale.at(fold.to) - scale.at(fold.from)) * 100}%` }} title={`nothing happened for ${duration(fold.to - fold.from)}`}>
            ⋯<br />
            {duration(fold.to - fold.from)}
          </span>
        ))}
        {(nowMs === null || scale.at(nowMs) < 0.85) && <span class="tick last">{duration(scale.end - scale.start)}</span>}
        {nowMs !== null && (
          <span class="now" style={{ left: `${scale.at(nowMs) * 100}%` }}>
            now
          </span>
        )}
      </span>
      <span class="took" />
    </div>
  );
}

function Bar({ scale, from, to, kind, title }: { scale: Scale; from: number; to: number; kind: string; title?: string }) {
  const left = scale.at(from) * 100;
  const width = Math.max(0.4, scale.at(to) * 100 - left);
  return <span class={`bar ${kind}`} style={{ left: `${Math.min(left, 99.6)}%`, width: `${width}%` }} title={title} />;
}

function StepLine(given: { line: Line; scale: Scale; nowMs: number; attempt?: Attempt; isChosen: boolean; isOpen: boolean; select: () => void; openChild: () => void }) {
  const { line, scale, nowMs, attempt } = given;
  const step = line.step!;
  const from = ms(step.since);
  const to = ms(step.ended_at) || nowMs;
  const dueMs = attempt && attempt.next_ms > nowMs ? attempt.next_ms : ms(step.due_at);
  const isRetrying = step.state === "open" && attempt?.last_error;
  const state = isRetrying ? "retrying" : step.state;
  const waits = ["timer", "event", "message"].includes(step.kind);
  return (
    <>
      <div class={`line ${state} ${given.isChosen ? "chosen" : ""}`} style={{ "--depth": line.depth }}>
        <button class="code" onClick={given.select} aria-expanded={given.isChosen}>
          <span class={`sign ${state}`} aria-hidden="true">
            {glyph(isRetrying ? "retrying" : step.state)}
          </span>
          <span class="text">
            <i>await</i> {step.call}
            <Outcome step={step} attempt={attempt} nowMs={nowMs} />
          </span>
        </button>
        {step.child && (
          <button class="quiet child" aria-expanded={given.isOpen} aria-label={`steps of ${step.child}`} onClick={given.openChild}>
            {given.isOpen ? "▾" : "▸"}
          </button>
        )}
        <span class="lane" aria-hidden="true">
          <Bar scale={scale} from={from} to={to} kind={`${waits ? "wait" : ""} ${state} ${step.attempts > 1 ? "again" : ""}`} title={`${clock(step.since)}, ${duration(to - from)}`} />
          {step.state === "open" && dueMs > nowMs && (
            <>
              <Bar scale={scale} from={nowMs} to={dueMs} kind="future" />
              <span class="due" style={{ left: `${scale.at(dueMs) * 100}%` }} title={`due in ${duration(dueMs - nowMs)}`} />
            </>
          )}
        </span>
        <span class="took">{duration(to - from)}</span>
      </div>
      {given.isChosen && <Panel step={step} attempt={attempt} nowMs={nowMs} />}
    </>
  );
}

function Outcome({ step, attempt, nowMs }: { step: Step; attempt?: Attempt; nowMs: number }) {
  const again = step.attempts > 1 ? ` (${step.attempts} attempts)` : "";
  if (step.state === "done") return step.result && step.result !== "null" ? <b class="result"> → {step.result}{again}</b> : <b class="result">{again}</b>;
  if (step.state === "failed") return <b class="error"> ✗ {step.error}{again}</b>;
  if (step.state === "dropped") return <b class="dim"> not needed</b>;
  if (attempt) {
    const number = attempt.of > 1 ? `attempt ${attempt.number} of ${attempt.of}` : "";
    const doing = attempt.next_ms > nowMs ? `next in ${duration(attempt.next_ms - nowMs)}` : attempt.is_running ? "running" : "queued";
    return (
      <b class={attempt.last_error ? "error" : "dim"}>
        {" "}
        {[number, doing].filter(Boolean).join(", ")}
        {attempt.last_error ? `: ${attempt.last_error}` : ""}
      </b>
    );
  }
  const left = ms(step.due_at) - nowMs;
  if (step.due_at) return <b class="dim"> {left > 0 ? `due in ${duration(left)}` : "due"}</b>;
  return <b class="dim"> {step.kind === "event" || step.kind === "message" ? "waiting" : "running"}</b>;
}

function GroupLine({ line, scale, nowMs, isOpen, toggle }: { line: Line; scale: Scale; nowMs: number; isOpen: boolean; toggle: () => void }) {
  const steps = line.group!;
  const took = steps.map((step) => (ms(step.ended_at) || nowMs) - ms(step.since)).sort((a, b) => a - b);
  const counts: Record<string, number> = {};
  for (const step of steps) counts[step.state] = (counts[step.state] ?? 0) + 1;
  const state = counts.failed ? "failed" : counts.open ? "open" : "done";
  const name = steps[0]!.call.split("(")[0];
  const totals = Object.entries(counts).map(([word, number]) => `${number} ${word}`).join(", ");
  const at = (part: number) => duration(took[Math.min(took.length - 1, Math.floor(part * took.length))]!);
  const from = Math.min(...steps.map((step) => ms(step.since)));
  const to = Math.max(...steps.map((step) => ms(step.ended_at) || nowMs));
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
          {steps.length} × {name} <b class="dim"> {totals}; min / median / max {at(0)} / {at(0.5)} / {at(1)}</b>
        </span>
      </button>
      <span class="lane" aria-hidden="true">
        {heat.map((number, i) => number > 0 && <span class={`heat ${state}`} style={{ left: `${(i / slots) * 100}%`, width: `${100 / slots}%`, opacity: 0.25 + 0.75 * (number / most) }} />)}
      </span>
      <span class="took">{duration(to - from)}</span>
    </div>
  );
}

function Panel({ step, attempt, nowMs }: { step: Step; attempt?: Attempt; nowMs: number }) {
  return (
    <dl class="panel">
      <dt>called at</dt>
      <dd>
        <code>{step.site}</code> · {clock(step.since)}
      </dd>
      <dt>took</dt>
      <dd>{duration((ms(step.ended_at) || nowMs) - ms(step.since))}</dd>
      <dt>{step.kind}</dt>
      <dd>
        <code>{step.call}</code>
      </dd>
      {step.result !== null && (
        <>
          <dt>result</dt>
          <dd>
            <code>{step.result}</code>
          </dd>
        </>
      )}
      {(step.error ?? attempt?.last_error) && (
        <>
          <dt>error</dt>
          <dd class="error">{step.error ?? attempt?.last_error}</dd>
        </>
      )}
      {step.child && (
        <>
          <dt>child</dt>
          <dd>
            <RunLink id={step.child} />
          </dd>
        </>
      )}
      <dt>event</dt>
      <dd>
        {step.event} · operation {step.op}
      </dd>
    </dl>
  );
}

function End({ run, scale, nowMs }: { run: Details; scale: Scale; nowMs: number }) {
  if (!run.completed_at) return null;
  const failed = run.status !== "Completed";
  return (
    <div class={`line end ${failed ? "failed" : "done"}`}>
      <span class="code">
        <span class={`sign ${failed ? "failed" : "done"}`} aria-hidden="true">
          {glyph(run.status)}
        </span>
        <span class="text">
          {failed ? (
            <b class="error">
              <i>raise</i> {run.failure?.type_name}: {run.failure?.message}
            </b>
          ) : (
            <>
              <i>return</i> {JSON.stringify(run.output)?.slice(0, 200)}
            </>
          )}
        </span>
      </span>
      <span class="lane" aria-hidden="true">
        <span class={`mark ${failed ? "failed" : "done"}`} style={{ left: `${scale.at(nowMs) * 100}%` }} />
      </span>
      <span class="took" />
    </div>
  );
}
