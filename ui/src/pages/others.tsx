// The smaller pages: errors, inbox, workers, definitions, the store.
import { useState } from "preact/hooks";
import { type Run, read } from "../api";
import { SendForm, bulk, may, startRun } from "../actions";
import { ago, bytes, clock, counted, json, short } from "../format";
import { link } from "../place";
import { Copy, Json, Loading, Problem, RunLink, useRead } from "../parts";

interface ErrorGroup {
  type: string;
  line: string;
  shape: string;
  count: number;
  names: Record<string, number>;
  first_at: string;
  last_at: string;
  sample_id: string;
  sample_message: string;
  ids: string[];
  command: string;
}

export function ErrorsPage() {
  const { value, error, again } = useRead(() => read<ErrorGroup[]>("/errors"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Errors</h1>
      <p class="dim">The newest failed and blocked runs, grouped by exception, line and shape of the message.</p>
      {value.length === 0 && <p class="calm">✓ No run has failed or is blocked.</p>}
      {value.map((group) => (
        <section class="group" key={`${group.type}${group.line}${group.shape}`}>
          <h2>
            <span class="count">{group.count}</span> {group.type}
          </h2>
          <p>{short(group.sample_message, 300)}</p>
          <p class="dim">
            {group.line && (
              <>
                <code>{group.line}</code> ·{" "}
              </>
            )}
            {Object.entries(group.names)
              .map(([name, number]) => `${name} ${number}`)
              .join(", ")}{" "}
            · first {ago(group.first_at)}, last {ago(group.last_at)} · for example <RunLink id={group.sample_id} />
          </p>
          <div class="buttons">
            <a class="button" href={link("runs", { q: `id:${group.ids.slice(0, 50).join(",")}` })}>
              show
            </a>
            {may("admin") && (
              <button class="primary" onClick={() => void bulk("retry", { ids: group.ids }, again)}>
                retry all {group.count}
              </button>
            )}
            <Copy text={group.command} label="copy command" />
          </div>
        </section>
      ))}
    </>
  );
}

interface Waiting {
  run: Run;
  kind: string;
  name: string;
  since: string;
  site: string;
}

export function InboxPage() {
  const { value, error, again } = useRead(() => read<{ waiting: Waiting[]; next_cursor: string | null }>("/inbox"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Inbox</h1>
      <p class="dim">Runs that wait for an event or a message, with a form to answer.</p>
      {value.waiting.length === 0 && <p class="calm">✓ No run waits for an answer.</p>}
      {value.waiting.map((wait) => (
        <section class="group" key={wait.run.id + wait.name + wait.since}>
          <p>
            <RunLink id={wait.run.id} /> {wait.run.name} <span class="dim">waits since {ago(wait.since)} at {wait.site}</span>
            {wait.run.custom_status !== null && <span> · {short(json(wait.run.custom_status), 100)}</span>}
          </p>
          <SendForm id={wait.run.id} name={wait.name} kind={wait.kind} done={again} />
        </section>
      ))}
      {value.next_cursor && <p class="dim">Only the newest running instances are listed. Search for others in Runs.</p>}
    </>
  );
}

interface Worker {
  id: string;
  host: string;
  process_id: number;
  started_at: string;
  seen_at: string;
  version: string;
  slots: number;
  busy: number;
  handlers: string[];
  activities: string[];
}

export function WorkersPage() {
  const { value, error } = useRead(() => read<{ workers: Worker[] }>("/workers"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Workers</h1>
      {value.workers.length === 0 ? (
        <p class="calm">
          No worker is running. Start one: <code>perdure worker MODULE</code>
        </p>
      ) : (
        <table>
          <thead>
            <tr>
              <th>Worker</th>
              <th>Host</th>
              <th>Busy</th>
              <th>Started</th>
              <th>Seen</th>
              <th>Serves</th>
            </tr>
          </thead>
          <tbody>
            {value.workers.map((worker) => (
              <tr key={worker.id}>
                <td class="id">{worker.id}</td>
                <td>
                  {worker.host} <span class="dim">process {worker.process_id}, perdure {worker.version}</span>
                </td>
                <td>
                  <meter min={0} max={worker.slots} value={worker.busy} aria-label="Busy slots" /> {worker.busy} of {worker.slots}
                </td>
                <td>{ago(worker.started_at)}</td>
                <td>{ago(worker.seen_at)}</td>
                <td>
                  <details>
                    <summary>
                      {counted(worker.handlers.length, "orchestration")}, {worker.activities.length} activities
                    </summary>
                    <p>{worker.handlers.join(", ")}</p>
                    <p class="dim">{worker.activities.join(", ")}</p>
                  </details>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}

interface Definition {
  name: string;
  version: string;
  workers: number;
  open: number;
  total: number;
  safe_to_remove: boolean;
  parameters: { name: string; type: string; required: boolean }[] | null;
  doc: string;
}

export function DefinitionsPage() {
  const { value, error } = useRead(() => read<{ definitions: Definition[] }>("/definitions"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Definitions</h1>
      {value.definitions.length === 0 && <p class="calm">No worker serves an orchestration, and there are no instances.</p>}
      {value.definitions.map((each) => (
        <DefinitionItem key={`${each.name}@${each.version}`} each={each} />
      ))}
    </>
  );
}

function DefinitionItem({ each }: { each: Definition }) {
  const sample = each.parameters ? each.parameters.map((p) => (p.type === "int" || p.type === "float" ? 0 : p.type === "bool" ? true : "")) : [];
  const [text, setText] = useState(json(sample));
  const [id, setId] = useState("");
  return (
    <section class="group">
      <h2>
        {each.name}
        <span class="dim">@{each.version}</span>
      </h2>
      {each.doc && <p>{each.doc}</p>}
      <p>
        {counted(each.workers, "worker")} ·{" "}
        <a href={link("runs", { q: `name:${each.name} version:${each.version} status:open` })}>{each.open} open</a> ·{" "}
        <a href={link("runs", { q: `name:${each.name} version:${each.version}` })}>{each.total} in all</a> ·{" "}
        {each.safe_to_remove ? "no open run has this version: its code can be removed" : "its code is needed"}
      </p>
      {may("operate") && (
        <details>
          <summary>Start one</summary>
          <form
            class="send"
            onSubmit={(event) => {
              event.preventDefault();
              void startRun(each.name, each.version, text, id);
            }}
          >
            <label>
              {each.parameters ? `(${each.parameters.map((p) => `${p.name}: ${p.type}`).join(", ")})` : "arguments, a JSON list"}
              <input value={text} onInput={(event) => setText(event.currentTarget.value)} spellcheck={false} />
            </label>
            <label>
              id
              <input placeholder="made up" value={id} onInput={(event) => setId(event.currentTarget.value)} />
            </label>
            <button class="primary">Start</button>
            <code class="dim">
              perdure start {each.name} --input '{text}'
            </code>
          </form>
        </details>
      )}
    </section>
  );
}

interface Store {
  provider: string;
  version: string;
  location: string;
  schema: number;
  size_bytes: number | null;
  moved_to: string | null;
  details: Record<string, string>;
  instances: number;
  executions: number;
  events: number;
}
interface Letter {
  letter: number;
  instance: string;
  kind: string;
  dead_since: string;
  reason: string;
  message: unknown;
}

export function StorePage() {
  const { value, error } = useRead(() => read<Store>("/store"), []);
  const letters = useRead(() => read<{ letters: Letter[] }>("/letters"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Store</h1>
      {value.moved_to && <div class="problem">This store was moved to {value.moved_to}.</div>}
      <dl class="facts">
        <dt>kind</dt>
        <dd>{value.provider}</dd>
        <dt>place</dt>
        <dd>
          <code>{value.location}</code>
        </dd>
        <dt>size</dt>
        <dd>{bytes(value.size_bytes)}</dd>
        <dt>holds</dt>
        <dd>
          {counted(value.instances, "instance")}, {counted(value.executions, "execution")}, {counted(value.events, "event")}
        </dd>
        <dt>schema</dt>
        <dd>{value.schema}</dd>
        {Object.entries(value.details).map(([key, text]) => [<dt>{key}</dt>, <dd>{text}</dd>])}
      </dl>
      <p class="dim">
        <code>perdure db check</code> reads and checks everything, <code>perdure db backup FILE</code> makes a copy.
      </p>
      <h2>Dead letters</h2>
      {letters.value?.letters.length ? (
        letters.value.letters.map((letter) => (
          <section class="group" key={letter.letter}>
            <p>
              {letter.kind} for <code>{letter.instance}</code> <span class="dim">since {clock(letter.dead_since)}: {letter.reason}</span>
            </p>
            <Json value={letter.message} />
            <code class="dim">perdure dead-letters requeue {letter.letter}</code>
          </section>
        ))
      ) : (
        <p class="calm">✓ None.</p>
      )}
    </>
  );
}

