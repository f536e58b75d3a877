// Evaluates expressions for tests/javascript.py, one a line. They know all that the modules of pages export, but for those
// that need a page, and `page`: the model of the timeline that was opened last.
import { createInterface } from "node:readline";

const assets = new URL(`file://${process.argv[2]}/`);
const names = {};
for (const path of process.argv.slice(3)) Object.assign(names, await import(new URL(path, assets)));
let page = null;

/** What start.js does, without drawing. */
names.open = async ({ data, boxes, folded }) => {
  const { inflate, unpack, boxesOf, Launches, Needs, Model } = names;
  const columnsIn = async (packed, tables) => unpack(await inflate(packed), tables);
  const [shown, extra] = await columnsIn(boxes, data.tables);
  page = new Model(data);
  page.fill(boxesOf(shown), extra);
  const [others, facts, collectives, needs] = await columnsIn(folded, data.foldedTables);
  page.fillFolded(boxesOf(others), new Launches(facts, collectives), new Needs(needs));
  page.arrange();
  page.open();
};

const Evaluation = Object.getPrototypeOf(async () => {}).constructor;
for await (const line of createInterface({ input: process.stdin })) {
  const { expression, argument } = JSON.parse(line);
  try {
    const evaluation = new Evaluation("page", "argument", ...Object.keys(names), `return (${expression});`);
    const value = await evaluation(page, argument, ...Object.values(names));
    console.log(JSON.stringify({ value: value ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.stack }));
  }
}
