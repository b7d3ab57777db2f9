// Schedules: the rhythm of each, its next and last slots, and what can be done.
import { type ComponentChildren } from "preact";
import { read, write } from "../api";
import { askTo, may, perform } from "../actions";
import { ago, clock, counted, duration, glyph, json, moment, ms, quoted, short } from "../format";
import { link } from "../place";
import { Loading, Problem, RunLink, ask, second, useRead } from "../parts";

interface Slot {
  slot_ms: number;
  id?: string;
  status?: string;
  reason?: string;
  is_backfill?: boolean;
}
interface Schedule {
  id: string;
  spec: { orchestration: string; args?: unknown; overlap?: string; catch_up?: string; jitter?: number; pause_after_failures?: number };
  rhythm: string;
  status: string;
  next: string | null;
  paused: string | null;
  is_declared: boolean;
  has_vanished: boolean;
  failures: number;
  started: number;
  skipped: number;
  running: Slot[];
  queued: string[];
  recent: Slot[];
  coming: string[];
}

export function SchedulesPage() {
  const { value, error, again } = useRead(() => read<Schedule[]>("/schedules"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Schedules</h1>
      {value.length === 0 && (
        <p class="calm">
          None. Declare them in a worker: <code>Runtime(store, [flows], schedules=[Schedule("nightly", report, cron="30 2 * * *")])</code>
        </p>
      )}
      {value.map((each) => (
        <Item key={each.id} each={each} again={again} />
      ))}
    </>
  );
}

function Item({ each, again }: { each: Schedule; again: () => void }) {
  const slots = [...each.recent, ...each.running].slice(-24);
  const last = [...slots].reverse().find((slot) => slot.id);
  const isPaused = each.paused !== null;
  const args = Array.isArray(each.spec.args) ? each.spec.args.map((arg) => json(arg)).join(", ") : "";
  return (
    <section class="group schedule">
      <h2>
        <a class="id" href={link("run", { id: each.id })}>
          {each.id}
        </a>{" "}
        <span class="dim">
          {each.spec.orchestration}({short(args, 80)})
        </span>
      </h2>
      <p class="sentence">
        <State each={each} />
      </p>
      <Slots slots={slots} />
      <dl class="facts">
        <dt>rhythm</dt>
        <dd>
          <code>{each.rhythm}</code>
          {each.spec.jitter ? ` with up to ${duration(each.spec.jitter * 1000)} of jitter` : ""}
        </dd>
        <dt>next slots</dt>
        <dd>{each.coming.map((slot) => moment(slot)).join(" · ") || "none"}</dd>
        <dt>so far</dt>
        <dd>
          {counted(each.started, "run")} started, {each.skipped} skipped
          {each.failures > 0 && <span class="error">, {each.failures} failed in a row</span>}
          {each.queued.length > 0 && `, ${counted(each.queued.length, "slot")} queued`} · <a href={link("runs", { q: `id:${each.id}@*` })}>all runs</a>
          {last?.id && (
            <>
              {" "}
              · last <RunLink id={last.id} />
            </>
          )}
        </dd>
        <dt>rules</dt>
        <dd class="dim">
          overlap {each.spec.overlap ?? "skip"}, catch up {each.spec.catch_up ?? "latest"}
          {each.spec.pause_after_failures ? `, pauses after ${each.spec.pause_after_failures} failures` : ""}, {each.is_declared ? "declared by a worker" : "created by a client"}
        </dd>
      </dl>
      {may("operate") && (
        <div class="buttons">
          {isPaused ? (
            <button class="primary" onClick={() => void perform("/schedule/resume", { id: each.id }, again)}>
              Resume
            </button>
          ) : (
            <button onClick={() => pause(each, again)}>Pause…</button>
          )}
          <button onClick={() => trigger(each, again)}>Run now…</button>
          <button onClick={() => backfill(each, again)}>Backfill…</button>
          {may("admin") && (
            <button class="warn" onClick={() => remove(each, again)}>
              Remove…
            </button>
          )}
        </div>
      )}
    </section>
  );
}

function State({ each }: { each: Schedule }): ComponentChildren {
  if (each.status !== "Running" && each.status !== "Pending")
    return (
      <>
        <span class="status failed">
          <span aria-hidden="true">{glyph(each.status)}</span> {each.status.toLowerCase()}
        </span>
        It has stopped and starts nothing.
      </>
    );
  if (each.paused !== null)
    return (
      <>
        <span class="status paused">
          <span aria-hidden="true">{glyph("paused")}</span> paused
        </span>
        {each.paused || "Slots are skipped until it is resumed."}
      </>
    );
  const left = ms(each.next) - second.value;
  if (left < -60_000)
    return (
      <>
        <span class="status retrying">
          <span aria-hidden="true">▲</span> late
        </span>
        Its slot was due {ago(each.next!)}: no worker has started it.
      </>
    );
  return (
    <>
      <span class="status running">
        <span aria-hidden="true">{glyph("waiting")}</span> active
      </span>
      {each.running.length ? `${counted(each.running.length, "run")} running. ` : ""}
      {each.next ? (left > 0 ? `Next in ${duration(left)}` : "Due now") : "No further slot"}
      {each.has_vanished ? "; no running worker declares it any more" : ""}
    </>
  );
}

// The last slots, oldest first: one mark each.
function Slots({ slots }: { slots: Slot[] }) {
  if (slots.length === 0) return null;
  return (
    <ol class="slots" aria-label="Last slots, oldest first">
      {slots.map((slot) => {
        const status = (slot.status ?? "Running").toLowerCase();
        const said = `${clock(new Date(slot.slot_ms).toISOString())}: ${status}${slot.reason ? `, ${slot.reason}` : ""}`;
        return (
          <li key={`${slot.slot_ms}${slot.id}`}>
            {slot.id ? (
              <a href={link("run", { id: slot.id })} class={`slot ${status}`} title={said} aria-label={said}>
                {glyph(status)}
              </a>
            ) : (
              <span class={`slot ${status}`} title={said} role="img" aria-label={said}>
                –
              </span>
            )}
          </li>
        );
      })}
    </ol>
  );
}

// --- actions

function pause(each: Schedule, again: () => void): void {
  let reason = "";
  askTo("/schedule/pause", () => ({ id: each.id, reason }), again, {
    title: `Pause ${each.id}`,
    body: (
      <>
        <p>It starts no more runs until it is resumed. Slots of the meantime are skipped.</p>
        <label>
          Reason
          <input onInput={(event) => (reason = event.currentTarget.value)} />
        </label>
      </>
    ),
    button: "Pause",
    command: `perdure schedule pause ${quoted(each.id)} --reason REASON`,
    python: `await client.schedules.pause(${json(each.id)}, "REASON")`,
  });
}

function trigger(each: Schedule, again: () => void): void {
  askTo("/schedule/trigger", () => ({ id: each.id }), again, {
    title: `Run ${each.id} now`,
    body: <p>A run starts now, beside the slots, also if the schedule is paused.</p>,
    button: "Run now",
    command: `perdure schedule trigger ${quoted(each.id)}`,
    python: `await client.schedules.trigger(${json(each.id)})`,
  });
}

function backfill(each: Schedule, again: () => void): void {
  let start = "7d";
  let end = "0s";
  ask({
    title: `Backfill ${each.id}`,
    body: (
      <>
        <p>Slots of a past time that have no run are started, one after the other.</p>
        <label>
          From: a date, or an age such as 7d
          <input defaultValue={start} onInput={(event) => (start = event.currentTarget.value)} />
        </label>
        <label>
          To
          <input defaultValue={end} onInput={(event) => (end = event.currentTarget.value)} />
        </label>
      </>
    ),
    button: "Backfill",
    command: `perdure schedule backfill ${quoted(each.id)} --from 7d --to 0s --dry-run`,
    python: `await client.schedules.backfill(${json(each.id)}, start, end)`,
    act: async () => {
      const dry = await write<{ slots: string[] }>("/schedule/backfill", { id: each.id, start, end, dry_run: true });
      if (dry.slots.length === 0) return `${each.id}: every slot of that time has its run`;
      const answer = await write<{ said: string }>("/schedule/backfill", { id: each.id, start, end, dry_run: false });
      again();
      return `${each.id}: ${answer.said}`;
    },
  });
}

function remove(each: Schedule, again: () => void): void {
  askTo("/schedule/remove", () => ({ id: each.id }), again, {
    title: `Remove ${each.id}`,
    body: <p>The schedule is deleted. Its runs stay and go on. A worker whose code declares it creates it again when it starts.</p>,
    button: "Remove",
    danger: true,
    command: `perdure schedule remove ${quoted(each.id)}`,
    python: `await client.schedules.remove(${json(each.id)})`,
  });
}
