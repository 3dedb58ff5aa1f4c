// The server's words are English. Some of its sentences, in the page's language: the log's lines use the same tables.
import { locale } from "./words.js";

const LANGUAGES = ["zh", "ja", "ko", "fr", "de", "es", "ru"];
const HOLE = /\{(\w+)\}/g;
const DEEPEST = 4; // sentences within sentences
let templates = [];

/** Reads the table of the page's language. Without it sentences stay English. */
export async function startSaid() {
  const language = locale().split("-")[0];
  if (!LANGUAGES.includes(language)) return;
  try {
    const answer = await fetch(new URL(`../said/${language}.json`, import.meta.url));
    templates = Object.entries(await answer.json()).map(([english, other]) => [patternOf(english), other]);
  } catch (error) {
    console.warn(`Slipstream: ${error.message}`);
  }
}

/** Such a sentence in the page's language; null where the page is English or the sentence is not known. */
export function said(text, depth = 0) {
  const bare = text?.replace(/^eager: /, "");
  if (!bare) return null;
  for (const [pattern, other] of templates) {
    const found = bare.match(pattern);
    if (found) return other.replace(HOLE, (_, name) => inHole(found.groups[name], depth));
  }
  return null;
}

/** The sentence in the page's language where that is known, else as it is. */
export function translated(text) {
  return said(text) ?? text;
}

function inHole(part, depth) {
  return (depth < DEEPEST && said(part, depth + 1)) || part;
}

function patternOf(english) {
  const parts = english.split(HOLE); // text, name, text, name, ..., text
  const made = parts.map((part, at) => (at % 2 ? `(?<${part}>.+?)` : part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")));
  return new RegExp(`^${made.join("")}$`, "s");
}
