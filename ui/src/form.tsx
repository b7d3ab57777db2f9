// Fields made from the JSON Schema of a type. What no field fits is written as JSON.
import { useState } from "preact/hooks";
import { json } from "./format";

export interface Schema {
  type?: string | string[];
  enum?: unknown[];
  anyOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema | boolean;
  default?: unknown;
  title?: string;
  description?: string;
  $ref?: string;
  $defs?: Record<string, Schema>;
}

// A value, or the reason why there is none yet.
export type Entered = { value: unknown } | { problem: string };

export function valueOf(entered: Entered): unknown {
  if ("problem" in entered) throw new Error(entered.problem);
  return entered.value;
}

// An object of initial values and of what was entered since, or the first problem.
function together(first: Record<string, unknown>, parts: Record<string, Entered>): Entered {
  const value = { ...first };
  for (const [name, part] of Object.entries(parts)) {
    if ("problem" in part) return part;
    value[name] = part.value;
  }
  return { value };
}

function resolved(schema: Schema | null | undefined, root: Schema | null | undefined): Schema | null {
  let found = schema ?? null;
  for (let i = 0; found?.$ref && i < 20; i++) found = root?.$defs?.[found.$ref.split("/").pop()!] ?? null;
  return found;
}

export function blank(schema: Schema | null | undefined, root = schema): unknown {
  const found = resolved(schema, root);
  if (!found) return "";
  if (found.default !== undefined) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return found.anyOf.some((each) => each.type === "null") ? null : blank(found.anyOf[0], root);
  switch (found.type) {
    case "boolean":
      return true;
    case "integer":
    case "number":
      return 0;
    case "array":
      return [];
    case "null":
      return null;
    case "object":
      return Object.fromEntries(Object.entries(found.properties ?? {}).map(([name, part]) => [name, blank(part, root)]));
    default:
      return "";
  }
}

// One or more fields for a value. `change` is called for what a person enters; until then the value
// is the initial one, or else that of `blank`.
export function Field({ label, hint, schema, root, initial, change }: { label: string; hint?: string; schema: Schema | null; root?: Schema | null; initial?: unknown; change: (entered: Entered) => void }) {
  const whole = root ?? schema;
  const found = resolved(schema, whole);
  const first = initial !== undefined ? initial : blank(schema, whole);
  const [text, setText] = useState(typeof first === "string" && found?.type === "string" && !found.enum ? first : json(first));
  const [parts, setParts] = useState<Record<string, Entered>>({});
  const named = (
    <span class="name">
      <code>{label}</code> {hint && <span class="dim">{hint}</span>}
    </span>
  );
  if (found?.type === "object" && found.properties && Object.keys(found.properties).length > 0) {
    const given = (first ?? {}) as Record<string, unknown>;
    const enter = (name: string, entered: Entered) => {
      const all = { ...parts, [name]: entered };
      setParts(all);
      change(together(given, all));
    };
    return (
      <fieldset>
        <legend>{named}</legend>
        {Object.entries(found.properties).map(([name, part]) => (
          <Field key={name} label={name} hint={resolved(part, whole)?.description} schema={part} root={whole} initial={given[name]} change={(entered) => enter(name, entered)} />
        ))}
      </fieldset>
    );
  }
  const isText = found?.type === "string";
  const isNumber = found?.type === "integer" || found?.type === "number";
  const enter = (next: string) => {
    setText(next);
    if (isText && !found.enum) return change({ value: next });
    try {
      change({ value: JSON.parse(next) });
    } catch {
      change({ problem: `${label} is no JSON: ${next.slice(0, 40) || "empty"}. Write a text in quotes, a number, true, false or null.` });
    }
  };
  if (found?.enum || found?.type === "boolean") {
    return (
      <label>
        {named}
        <select value={text} onChange={(event) => enter(event.currentTarget.value)}>
          {(found.enum ?? [true, false]).map((each) => (
            <option key={json(each)} value={json(each)}>
              {typeof each === "string" ? each : json(each)}
            </option>
          ))}
        </select>
      </label>
    );
  }
  return (
    <label>
      {named}
      {isText || isNumber || text.length < 60 ? (
        <input value={text} type={isNumber ? "number" : "text"} step={found?.type === "integer" ? 1 : "any"} onInput={(event) => enter(event.currentTarget.value)} spellcheck={false} />
      ) : (
        <textarea rows={4} value={text} onInput={(event) => enter(event.currentTarget.value)} spellcheck={false} />
      )}
    </label>
  );
}
