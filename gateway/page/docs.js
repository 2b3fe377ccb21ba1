// Shows the API's document as a page: one foldable entry per operation, with the fields of its request and its answer.

import { byId, make } from "./dom.js";

const resolve = (document, schema) =>
  schema && schema.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema ?? {};

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map(typeOf))].filter((each) => each !== "null").join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type ?? "any";
}

function described(schema) {
  return schema.description ?? (schema.anyOf ?? []).map((each) => each.description).find(Boolean) ?? "";
}

function fields(document, title, schema) {
  const found = resolve(document, schema);
  const table = make("table", "fields");
  table.append(make("caption", "", title));
  for (const [name, each] of Object.entries(found.properties ?? {})) {
    const row = make("tr");
    const cell = make("td");
    cell.append(make("code", "", name + ((found.required ?? []).includes(name) ? " *" : "")));
    row.append(cell, make("td", "", typeOf(each)), make("td", "", described(each)));
    table.append(row);
  }
  return table.rows.length ? [table] : [];
}

function tables(document, title, schema) {
  const found = schema?.anyOf ?? [schema];
  return found.flatMap((each) => fields(document, each?.$ref ? `${title}: ${each.$ref.split("/").pop()}` : title, each));
}

function operation(document, path, method, shown) {
  const entry = make("details");
  const head = make("summary");
  head.append(make("span", "method", method.toUpperCase()), make("code", "", path), make("span", "about", shown.summary));
  entry.append(head);
  if (shown.parameters) {
    const properties = Object.fromEntries(shown.parameters.map((each) => [each.name, each.schema]));
    const required = shown.parameters.filter((each) => each.required).map((each) => each.name);
    entry.append(...fields(document, "In the URL", { properties, required }));
  }
  for (const [media, each] of Object.entries(shown.requestBody?.content ?? {})) {
    entry.append(...tables(document, `Body, ${media}`, each.schema));
  }
  for (const [media, each] of Object.entries(shown.responses["200"]?.content ?? {})) {
    const made = tables(document, `Answer, ${media}`, each.schema);
    entry.append(...(made.length ? made : [make("p", "hint", `Answer: ${media}.`)]));
  }
  return entry;
}

function group(path) {
  const parts = path.split("/");
  return parts[1] === "v1" ? `/v1/${parts[2]}` : `/${parts[1]}`;
}

try {
  const document = await (await fetch("openapi.json")).json();
  const sections = new Map();
  const firstTheApi = ([one], [other]) => other.startsWith("/v1/") - one.startsWith("/v1/");
  for (const [path, methods] of Object.entries(document.paths).sort(firstTheApi)) {
    const name = group(path);
    if (!sections.has(name)) {
      const section = make("section");
      section.append(make("h2", "", name));
      sections.set(name, section);
      byId("operations").append(section);
    }
    for (const [method, shown] of Object.entries(methods)) sections.get(name).append(operation(document, path, method, shown));
  }
} catch {
  byId("notice").textContent = "The API's document could not be read.";
  byId("notice").hidden = false;
}
