// The smaller pages: errors, inbox, workers, definitions, the store, a file.
import { useState } from "preact/hooks";
import { type Run, read, report } from "../api";
import { SendForm, askTo, bulk, may, perform, startRun } from "../actions";
import { type Entered, Field, type Schema, blank, valueOf } from "../form";
import { ago, bytes, clock, counted, json, quoted, short, since } from "../format";
import { link, place } from "../place";
import { Code, Copy, Json, Loading, Problem, RunLink, Status, say, useRead } from "../parts";
import { RunPage } from "./run";

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
                <code title={group.line}>{group.line.split("/").slice(-2).join("/")}</code> ·{" "}
              </>
            )}
            {Object.entries(group.names)
              .map(([name, number]) => `${name} ${number}`)
              .join(", ")}{" "}
            · first {ago(group.first_at)}, last {ago(group.last_at)} · for example <RunLink id={group.sample_id} />
          </p>
          <div class="buttons">
            <a class="button" href={link("runs", { q: `id:${group.ids.slice(0, 50).join(",")}` })}>
              Show
            </a>
            {may("admin") && (
              <button class="primary" onClick={() => void bulk("retry", { ids: group.ids }, again)}>
                Retry all {group.count}
              </button>
            )}
            <Copy text={group.command} label="Copy command" />
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

interface Promised {
  key: string;
  since: string;
  awaited_by: string[];
}

export function InboxPage() {
  const { value, error, again } = useRead(() => read<{ waiting: Waiting[]; next_cursor: string | null }>("/inbox"), []);
  const promises = useRead(() => read<Promised[]>("/promises"), []);
  if (!value || !promises.value) return error ? <Problem error={error} /> : <Loading />;
  const open = promises.value;
  return (
    <>
      <h1>Inbox</h1>
      <p class="dim">Runs that wait for an event, a message or a promise, each with a form to answer.</p>
      {value.waiting.length + open.length === 0 && <p class="calm">✓ No run waits for an answer.</p>}
      {open.map((each) => (
        <PromiseItem key={each.key} each={each} done={promises.again} />
      ))}
      {value.waiting.map((wait) => (
        <section class="group" key={wait.run.id + wait.name + wait.since}>
          <h2>
            <RunLink id={wait.run.id} /> <span class="dim">{wait.run.name}</span>
          </h2>
          <p class="dim">
            waiting for {since(wait.since)} at <code>{wait.site}</code>
            {wait.run.custom_status !== null && <span> · {short(json(wait.run.custom_status), 100)}</span>}
          </p>
          {may("operate") ? <SendForm id={wait.run.id} name={wait.name} kind={wait.kind} done={again} /> : <p>{wait.kind} <code>{wait.name}</code></p>}
        </section>
      ))}
      {value.next_cursor && <p class="dim">Only the newest running instances are listed. Search for others in Runs.</p>}
    </>
  );
}

function PromiseItem({ each, done }: { each: Promised; done: () => void }) {
  const [entered, setEntered] = useState<Entered>({ value: true });
  const resolve = () => {
    try {
      void perform("/promise/resolve", { key: each.key, value: valueOf(entered) }, done);
    } catch (error) {
      say((error as Error).message, true);
    }
  };
  const reject = () => {
    let reason = "";
    askTo("/promise/reject", () => ({ key: each.key, reason }), done, {
      title: `Reject ${each.key}`,
      body: (
        <label>
          Reason, which the code gets with PromiseRejected
          <input onInput={(event) => (reason = event.currentTarget.value)} />
        </label>
      ),
      button: "Reject",
      danger: true,
      command: `perdure resolve ${quoted(each.key)} --reject REASON`,
      python: `await client.reject(${json(each.key)}, "REASON")`,
    });
  };
  return (
    <section class="group">
      <h2>
        promise <code>{each.key}</code>
      </h2>
      <p class="dim">
        waiting for {since(each.since)}
        {each.awaited_by.length > 0 && <> · awaited by {each.awaited_by.map((id, i) => [i > 0 && ", ", <RunLink id={id} />])}</>}
      </p>
      {may("operate") && (
        <form
          class="send"
          onSubmit={(event) => {
            event.preventDefault();
            resolve();
          }}
        >
          <Field label="value" hint="JSON" schema={null} initial={true} change={setEntered} />
          <button class="primary">Resolve</button>
          <button type="button" onClick={reject}>
            Reject…
          </button>
          <Code text={`perdure resolve ${quoted(each.key)} --data ${quoted("value" in entered ? json(entered.value) : "…")}`} />
        </form>
      )}
    </section>
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
  const { value, error } = useRead(() => read<Worker[]>("/workers"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Workers</h1>
      {value.length === 0 ? (
        <p class="calm">
          No worker is running. Start one: <code>perdure worker MODULE</code>
        </p>
      ) : (
        <table class="stack">
          <thead>
            <tr>
              <th>Worker</th>
              <th>Host</th>
              <th>Busy</th>
              <th>Started</th>
              <th>Last seen</th>
              <th>Serves</th>
            </tr>
          </thead>
          <tbody>
            {value.map((worker) => (
              <tr key={worker.id}>
                <td class="id">{worker.id}</td>
                <td>
                  {worker.host} <span class="dim">process {worker.process_id}, perdure {worker.version}</span>
                </td>
                <td>
                  <meter min={0} max={worker.slots} value={worker.busy} aria-label="Busy slots" /> {worker.busy} of {worker.slots}
                </td>
                <td data-label="started">{ago(worker.started_at)}</td>
                <td data-label="last seen">{ago(worker.seen_at)}</td>
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
  parameters: { name: string; type: string; required: boolean; schema: Schema | null }[] | null;
  doc: string;
}

export function DefinitionsPage() {
  const { value, error } = useRead(() => read<Definition[]>("/definitions"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <h1>Definitions</h1>
      {value.length === 0 && <p class="calm">No worker serves an orchestration, and there are no instances.</p>}
      {value.map((each) => (
        <DefinitionItem key={`${each.name}@${each.version}`} each={each} />
      ))}
    </>
  );
}

function DefinitionItem({ each }: { each: Definition }) {
  return (
    <section class="group">
      <h2>
        {each.name}
        <span class="dim">@{each.version}</span>
      </h2>
      {each.doc && <p>{each.doc}</p>}
      <p class="dim">
        {counted(each.workers, "worker")} · <a href={link("runs", { q: `name:${each.name} version:${each.version} status:open` })}>{each.open} open</a> ·{" "}
        <a href={link("runs", { q: `name:${each.name} version:${each.version}` })}>{each.total} in all</a> ·{" "}
        {!each.safe_to_remove ? "its code is needed" : each.total ? "✓ no open run needs this version: its code can be removed" : "no run yet"}
      </p>
      {may("operate") && <StartForm each={each} />}
    </section>
  );
}

// A field for each parameter, made from its type; without the code a JSON list of arguments.
function StartForm({ each }: { each: Definition }) {
  const [entered, setEntered] = useState<Record<string, Entered>>({});
  const [id, setId] = useState("");
  const parameters = each.parameters ?? [];
  const listed = (): unknown[] => {
    if (!each.parameters) {
      const values = valueOf(entered.arguments ?? { value: [] });
      if (!Array.isArray(values)) throw new Error("the arguments are a JSON list, such as [\"o-1\", 3]");
      return values;
    }
    return parameters.map((parameter) => valueOf(entered[parameter.name] ?? { value: blank(parameter.schema) }));
  };
  let shown = "…";
  try {
    shown = json(listed());
  } catch {
    // it is not complete yet
  }
  return (
    <details>
      <summary>Start one</summary>
      <form
        class="send"
        onSubmit={(event) => {
          event.preventDefault();
          try {
            void startRun(each.name, each.version, listed(), id);
          } catch (error) {
            say((error as Error).message, true);
          }
        }}
      >
        {each.parameters ? (
          parameters.map((parameter) => (
            <Field
              key={parameter.name}
              label={parameter.name}
              hint={`${parameter.type}${parameter.required ? "" : ", may be left out"}`}
              schema={parameter.schema}
              change={(next) => setEntered((before) => ({ ...before, [parameter.name]: next }))}
            />
          ))
        ) : (
          <Field label="arguments" hint="a JSON list" schema={null} initial={[]} change={(next) => setEntered({ arguments: next })} />
        )}
        <label>
          <span class="name">
            <code>id</code> <span class="dim">made up if empty; makes the start idempotent</span>
          </span>
          <input value={id} onInput={(event) => setId(event.currentTarget.value)} />
        </label>
        <button class="primary">Start</button>
        <Code text={`perdure start ${each.name} --input ${quoted(shown)}${id ? ` --id ${quoted(id)}` : ""}`} />
      </form>
    </details>
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
  started_in_a_day: number;
  bytes_of_an_instance: number | null;
  kept: { days: number; count: number; query: string; command: string }[];
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
  const { value, error, again } = useRead(() => read<Store>("/store"), []);
  const letters = useRead(() => read<Letter[]>("/letters"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  const each = value.bytes_of_an_instance;
  return (
    <>
      <h1>Store</h1>
      {value.moved_to && <div class="problem">This store was moved to {value.moved_to}.</div>}
      <dl class="facts">
        <dt>kind</dt>
        <dd>
          {value.provider} <span class="dim">{value.version}, schema {value.schema}</span>
        </dd>
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
        {Object.entries(value.details).map(([key, text]) => [<dt>{key}</dt>, <dd>{text}</dd>])}
      </dl>
      <h2>Growth</h2>
      <p>
        {counted(value.started_in_a_day, "run")} started in the last 24 hours
        {each !== null && (
          <>
            {" "}
            with {bytes(each)} on average: about {bytes(each * value.started_in_a_day)} a day, {bytes(each * value.started_in_a_day * 30)} in 30 days.
          </>
        )}
      </p>
      <h2>What could go</h2>
      <p class="dim">Ended runs stay until they are deleted, or for the time that a worker was given with keep. With their children, by age:</p>
      <ul class="strip">
        {value.kept.map((kept) => (
          <li key={kept.days}>
            <h3>older than {kept.days} days</h3>
            <p>
              <a href={link("runs", { q: kept.query })}>{counted(kept.count, "run")}</a>
              {each !== null && kept.count > 0 && <span class="dim"> · about {bytes(each * kept.count)}</span>}
            </p>
            <div class="buttons">
              {may("admin") && kept.count > 0 && (
                <button class="small" onClick={() => void bulk("delete", { q: kept.query }, again)}>
                  Delete…
                </button>
              )}
              <Copy text={kept.command} label="Copy command" />
            </div>
          </li>
        ))}
      </ul>
      <h2>Backup and checks</h2>
      <Code text="perdure db backup FILE" />
      <Code text="perdure db check" />
      <p class="dim">Both work while workers run. The first makes a copy, the second reads and checks everything.</p>
      <h2>Dead letters</h2>
      {letters.value?.length ? (
        letters.value.map((letter) => (
          <section class="group" key={letter.letter}>
            <p>
              {letter.kind} for <code>{letter.instance}</code>{" "}
              <span class="dim">
                since {clock(letter.dead_since)}: {letter.reason}
              </span>
            </p>
            <Json value={letter.message} />
            <div class="buttons">
              {may("operate") && <button onClick={() => void perform("/letter/requeue", { letter: letter.letter }, letters.again)}>Requeue</button>}
              {may("admin") && (
                <button class="warn" onClick={() => void perform("/letter/delete", { letter: letter.letter }, letters.again)}>
                  Delete
                </button>
              )}
              <Copy text={`perdure dead-letters requeue ${letter.letter}`} label="Copy command" />
            </div>
          </section>
        ))
      ) : (
        <p class="calm">✓ None.</p>
      )}
    </>
  );
}

// The runs of a file: an export that was dropped onto the page, or a page that was saved.
export function FilePage() {
  const file = report.value;
  if (!file)
    return (
      <p class="calm">
        Drop a file onto the page to look at it. <code>perdure export ID &gt; FILE</code> writes one.
      </p>
    );
  const ids = Object.keys(file.runs);
  const id = place.value.given.get("id") ?? file.first;
  return (
    <>
      <p class="banner" role="status">
        {file.origin}, {ids.length > 1 ? `${ids.length} runs, ` : ""}as it was on {clock(file.made_at)}. Nothing runs here.
      </p>
      {ids.length > 1 && (
        <nav class="views" aria-label="Runs of the file">
          {ids.slice(0, 50).map((each) => (
            <a key={each} href={link("file", { id: each })} aria-current={each === id ? "page" : undefined}>
              <Status run={file.runs[each]!.run} /> {short(each, 40)}
            </a>
          ))}
        </nav>
      )}
      <RunPage key={id} id={id} />
    </>
  );
}
