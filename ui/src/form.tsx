// Fields made from the JSON Schema of a type. What no field fits is written as JSON.
import { useEffect, useState } from "preact/hooks";
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
    case "object": {
      const names = found.required ?? Object.keys(found.properties ?? {});
      return Object.fromEntries(names.map((name) => [name, blank(found.properties?.[name], root)]));
    }
    default:
      return "";
  }
}

export function Field({ label, hint, schema, root, initial, change }: { label: string; hint?: string; schema: Schema | null; root?: Schema | null; initial?: unknown; change: (entered: Entered) => void }) {
  const whole = root ?? schema;
  const found = resolved(schema, whole);
  const first = initial !== undefined ? initial : blank(schema, whole);
  const [text, setText] = useState(typeof first === "string" && found?.type === "string" ? first : json(first));
  const [parts, setParts] = useState<Record<string, unknown>>(typeof first === "object" && first !== null && !Array.isArray(first) ? (first as Record<string, unknown>) : {});
  useEffect(() => change({ value: first }), []);
  const named = (
    <span class="name">
      <code>{label}</code> {hint && <span class="dim">{hint}</span>}
    </span>
  );
  if (found?.enum || found?.type === "boolean") {
    const choices = found.enum ?? [true, false];
    return (
      <label>
        {named}
        <select
          value={json(first)}
          onChange={(event) => change({ value: JSON.parse(event.currentTarget.value) })}
        >
          {choices.map((each) => (
            <option key={json(each)} value={json(each)}>
              {typeof each === "string" ? each : json(each)}
            </option>
          ))}
        </select>
      </label>
    );
  }
  if (found?.type === "object" && found.properties && Object.keys(found.properties).length > 0) {
    return (
      <fieldset>
        <legend>{named}</legend>
        {Object.entries(found.properties).map(([name, part]) => (
          <Field
            key={name}
            label={name}
            hint={resolved(part, whole)?.description}
            schema={part}
            root={whole}
            initial={parts[name]}
            change={(entered) => {
              if ("problem" in entered) return change(entered);
              setParts((before) => {
                const next = { ...before, [name]: entered.value };
                change({ value: next });
                return next;
              });
            }}
          />
        ))}
      </fieldset>
    );
  }
  const isText = found?.type === "string";
  const isNumber = found?.type === "integer" || found?.type === "number";
  const enter = (next: string) => {
    setText(next);
    if (isText) return change({ value: next });
    try {
      change({ value: JSON.parse(next) });
    } catch {
      change({ problem: `${label} is no JSON: ${next.slice(0, 40) || "empty"}. Write a text in quotes, a number, true, false or null.` });
    }
  };
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
