// Types of what comes from elsewhere: data that Python writes into a page, Plotly, and what browsers have since lately.

type Numbers = Record<string, Float64Array | Int32Array>;

interface Panel {
  title: string;
  device: string;
  facts: string[];
  /** Key, start and end of each. */
  steps: [number, number, number][];
  stepNames: Record<string, string>;
  stepLengths: Record<string, string>;
}

interface Rank {
  panel: number;
  title: string;
  name: string;
  share: number | null;
  infersBackward: boolean;
  knowsWait: boolean;
  whyUnknown: string | null;
  knowsBlocking: boolean;
  /** Parts of the strip that no step tells. */
  unknown: string[];
}

interface Lane {
  rank: number;
  title: string;
  kind: string;
  folded: boolean;
  from_launch: boolean;
  levels: number;
  /** Set where lanes are arranged, as the next two, which are pixels. */
  seen: boolean;
  top: number;
  level: number;
}

interface RowCount {
  lane: number;
  level: number;
  count: number;
}

interface Category {
  code: number;
  name: string;
  legend: string;
  color: string;
  in_legend: boolean;
}

/** Number of rows, and for each block of each column the numbers of planes and of rows. */
type Table = [number, Record<string, [number, number][]>];

/** See timeline_page.py. */
interface PageData {
  layout: any;
  notice: string;
  margin: number;
  start: number;
  end: number;
  home: [number, number];
  typical: number | null;
  categories: Category[];
  /** Words that filter lanes at first. */
  filter: string;
  strip: { code: number; name: string; label: string }[];
  phases: string[];
  panels: Panel[];
  ranks: Rank[];
  lanes: Lane[];
  rows: RowCount[];
  foldedRows: RowCount[];
  opening: { rows: [number, number, number][]; tables: Table[] } | null;
  tables: Table[];
  foldedTables: Table[];
  /** Title, label and bucket of each. */
  titles: [string, string, number][];
  shapes: [string, number][];
  consumers: string[];
  heldBy: string[];
  parts: [string, string][];
  fastest: number;
}

/** An element in which Plotly has drawn. */
interface Figure extends HTMLElement {
  _fullLayout?: any;
  _fullData?: any[];
  layout?: any;
  on(event: string, act: (event: any) => void): void;
}

declare const Plotly: { react(element: HTMLElement, data: any[], layout: any, config: any): Promise<void> };

interface Window {
  Plotly?: typeof Plotly;
  ddpProf: object;
}

interface Uint8ArrayConstructor {
  fromBase64?(base64: string): Uint8Array<ArrayBuffer>;
}
