/**
 * The grid: a row a question, a column a checkpoint, drawn for what is in the window alone.
 *
 * Rows thinner than a pixel are drawn as their means; rows grow until single cells can be read and hit. The canvas lies
 * behind an empty scrolled box, so that scroll bars, wheels and fingers are the browser's own.
 */

import { palette } from "./colours.js";
import { counted } from "./dom.js";
import { CUT, WITHHELD, meanOf } from "./model.js";

const ROW_HEIGHTS = [2, 4, 8, 14, 22];
const TALLEST = ROW_HEIGHTS.at(-1);
const WIDEST_COLUMN = 96;
const SMALLEST_TARGET = 4; // thinner rows are made taller by a click, since nobody hits one of them
const LABELLED = 14;
const WIDTH_FOR_LABELS = 420;
const GUTTER = 50; // room for numbers of rows, and for the range of the curve above
const NUMBERS_APART = 56;

export class Grid {
  /** `parts` are the frame, scrolled box, spacer, canvas and tip; `told` hears `moved`, `chosen`, `zoomed`, `laid`. */
  constructor(parts, told) {
    Object.assign(this, parts);
    this.told = told;
    this.table = null;
    this.rows = new Uint32Array();
    this.columns = [];
    this.ids = [];
    this.level = -1; // of ROW_HEIGHTS; -1: all rows fit
    this.cursor = { row: 0, place: 0, shown: false };
    this.marked = { a: null, b: null, question: null };
    this.whole = null;
    this.colours = palette();
    new ResizeObserver(() => this.lay()).observe(this.frame);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.scroller.addEventListener("pointermove", (event) => this.hover(event));
    this.scroller.addEventListener("pointerleave", () => this.hideTip());
    this.scroller.addEventListener("click", (event) => this.click(event));
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.scroller.addEventListener("focus", () => this.showCursor(this.scroller.matches(":focus-visible")));
    this.scroller.addEventListener("blur", () => this.showCursor(false));
    this.scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /** Shows rows and columns of a table, scrolled as before if it is `of` what it was and only has more columns read. */
  show({ table, rows, columns, ids, of }) {
    const again = table === this.table ? rows.length === this.rows.length : of === this.of;
    Object.assign(this, { table, rows, columns, ids, of, whole: null });
    this.cursor.row = Math.max(0, Math.min(this.cursor.row, rows.length - 1));
    this.cursor.place = Math.max(0, Math.min(this.cursor.place, columns.length - 1));
    if (!again) this.scroller.scrollTop = 0;
    this.lay();
  }

  /** Marks the two compared checkpoints, and the question that is open. */
  mark(marked) {
    this.marked = marked;
    this.draw();
  }

  recolour() {
    this.colours = palette();
    this.whole = null;
    this.draw();
  }

  /** Measures the window and gives rows and columns their size. */
  lay() {
    if (!this.table || !this.scroller.clientWidth || !this.scroller.clientHeight) return;
    this.fill();
    this.fill(); // once more, since scroll bars may have come or gone
    const { clientWidth: width, clientHeight: height } = this.scroller;
    const dense = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.whole = null;
    this.told.zoomed(this.canZoom(-1), this.canZoom(1));
    this.draw();
  }

  /** Chooses sizes for the window as it is, and makes what is scrolled as large. */
  fill() {
    const { clientWidth: width, clientHeight: height } = this.scroller;
    const fitting = height / Math.max(1, this.rows.length);
    while (this.level >= 0 && ROW_HEIGHTS[this.level] <= fitting) this.level += 1; // all of them fit at that height
    if (this.level >= ROW_HEIGHTS.length) this.level = -1;
    this.rowHeight = this.level < 0 ? Math.min(fitting, TALLEST) : ROW_HEIGHTS[this.level];
    this.labelled = this.rowHeight >= LABELLED && width >= WIDTH_FOR_LABELS;
    this.labels = this.labelled ? Math.min(220, Math.round(width * 0.28)) : GUTTER;
    const fit = (width - this.labels) / Math.max(1, this.columns.length);
    this.columnWidth = Math.min(WIDEST_COLUMN, Math.max(fit, this.level < 0 ? 0 : Math.min(this.rowHeight, LABELLED)));
    this.spacer.style.height = `${Math.floor(this.rows.length * this.rowHeight)}px`;
    this.spacer.style.width = `${Math.floor(this.labels + this.columns.length * this.columnWidth)}px`;
  }

  /** Draws in the next frame, once however often it is asked. */
  draw() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      if (this.table && this.canvas.width) this.paint();
    });
  }

  paint() {
    const context = this.canvas.getContext("2d", { alpha: false });
    const dense = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height, scrollLeft } = this.scroller;
    this.ink = styleOf(this.frame, ["--card", "--ink", "--muted", "--accent", "--mark-a", "--mark-b"]);
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.fillStyle = this.ink["--card"];
    context.fillRect(0, 0, width, height);
    const [begin, end] = this.visibleRows();
    if (end > begin && this.columns.length) {
      const thin = this.rowHeight < 1;
      const top = thin ? 0 : begin * this.rowHeight - this.scroller.scrollTop;
      const left = this.labels - scrollLeft;
      context.save();
      context.beginPath();
      context.rect(this.labels - 3, 0, width - this.labels + 3, height);
      context.clip();
      context.imageSmoothingEnabled = false;
      const image = thin ? (this.whole ??= this.means(Math.round(height * dense))) : this.cells(begin, end);
      const tall = thin ? height : (end - begin) * this.rowHeight;
      context.drawImage(image, left, top, this.columns.length * this.columnWidth, tall);
      if (this.rowHeight >= 6 && this.columnWidth >= 5) this.paintDetails(context, begin, end, left, top);
      this.paintMarks(context, height, left);
      context.restore();
      if (this.labelled) this.paintLabels(context, begin, end, top);
      else this.paintNumbers(context, begin, end);
    }
    this.told.laid({ left: this.labels, columnWidth: this.columnWidth, scrollLeft, width, begin, end });
  }

  /** All rows in as many lines of pixels as there are, each the mean of its rows. */
  means(lines) {
    return this.image(lines, (scores, line) =>
      meanOf(
        scores,
        this.rows,
        Math.floor((line * this.rows.length) / lines),
        Math.ceil(((line + 1) * this.rows.length) / lines),
      ),
    );
  }

  cells(begin, end) {
    return this.image(end - begin, (scores, line) => scores[this.rows[begin + line]]);
  }

  image(lines, byteOf) {
    const places = this.columns.length;
    const image = new OffscreenCanvas(places, lines);
    const pixels = new Uint32Array(places * lines);
    this.columns.forEach((column, place) => {
      const scores = this.table.column(column);
      for (let line = 0; line < lines; line += 1) pixels[line * places + place] = this.colours[byteOf(scores, line)];
    });
    const bytes = new Uint8ClampedArray(pixels.buffer);
    image.getContext("2d", { alpha: false }).putImageData(new ImageData(bytes, places, lines), 0, 0);
    return image;
  }

  /** Lines between cells, and marks of answers that were cut and questions that were left out. */
  paintDetails(context, begin, end, left, top) {
    const right = left + this.columns.length * this.columnWidth;
    context.fillStyle = this.ink["--card"];
    for (let row = begin; row <= end; row += 1) {
      context.fillRect(left, top + (row - begin) * this.rowHeight - 0.5, right - left, 1);
    }
    this.columns.forEach((column, place) => {
      const x = left + place * this.columnWidth;
      context.fillStyle = this.ink["--card"];
      context.fillRect(x - 0.5, 0, 1, this.scroller.clientHeight);
      const marks = this.table.marks(column);
      for (let row = begin; row < end; row += 1) {
        const mark = marks[this.rows[row]];
        if (!(mark & (CUT | WITHHELD))) continue;
        const y = top + (row - begin) * this.rowHeight;
        const size = Math.max(3, Math.min(7, this.rowHeight * 0.4, this.columnWidth * 0.5));
        for (const [colour, wider] of [["--card", 1.5], ["--ink", 0]]) { // on paper, so that it stands out on every colour
          context.fillStyle = this.ink[colour];
          context.beginPath();
          if (mark & WITHHELD) {
            context.rect(x + 2, y + this.rowHeight / 2 - 0.75 - wider, this.columnWidth - 4, 1.5 + 2 * wider);
          } else {
            const corner = x + this.columnWidth - 1;
            context.moveTo(corner, y + 1);
            context.lineTo(corner - size - 1.5 * wider, y + 1);
            context.lineTo(corner, y + 1 + size + 1.5 * wider);
          }
          context.fill();
        }
      }
    });
  }

  paintMarks(context, height, left) {
    for (const [column, colour] of [[this.marked.a, "--mark-a"], [this.marked.b, "--mark-b"]]) {
      const place = column === null ? -1 : this.columns.indexOf(column);
      if (place < 0) continue;
      const x = left + place * this.columnWidth;
      const end = Math.min(height, this.rows.length * this.rowHeight);
      context.fillStyle = this.ink["--card"];
      context.fillRect(x - 2.5, 0, 2.5, end);
      context.fillRect(x + this.columnWidth, 0, 2.5, end);
      context.fillStyle = this.ink[colour];
      context.fillRect(x - 1.5, 0, 1.5, end);
      context.fillRect(x + this.columnWidth, 0, 1.5, end);
    }
    const across = this.columns.length * this.columnWidth;
    const row = this.marked.question === null ? -1 : this.rowOf(this.marked.question);
    if (row >= 0) this.outline(context, left, this.yOf(row), across, this.rowHeight, 1.5);
    if (this.cursor.shown) {
      const x = left + this.cursor.place * this.columnWidth;
      this.outline(context, x, this.yOf(this.cursor.row), this.columnWidth, this.rowHeight, 2);
    }
  }

  /** A frame in ink on paper, so that it stands out on every colour; around a thin cell it is as large as a finger. */
  outline(context, x, y, width, height, thickness) {
    const wide = Math.max(width, 6);
    const tall = Math.max(height, 4);
    const box = [x - (wide - width) / 2, y - (tall - height) / 2, wide, tall];
    context.lineWidth = thickness + 2.5;
    context.strokeStyle = this.ink["--card"];
    context.strokeRect(...box);
    context.lineWidth = thickness;
    context.strokeStyle = this.ink["--ink"];
    context.strokeRect(...box);
  }

  paintLabels(context, begin, end, top) {
    context.textBaseline = "middle";
    context.font = this.rowHeight >= TALLEST ? "13px system-ui, sans-serif" : "11px system-ui, sans-serif";
    for (let row = begin; row < end; row += 1) {
      const open = this.rows[row] === this.marked.question;
      context.fillStyle = this.ink[open ? "--accent" : "--muted"];
      const text = shortened(context, this.ids[this.rows[row]] ?? "", this.labels - 22);
      context.fillText(text, 12, top + (row - begin + 0.5) * this.rowHeight);
    }
  }

  /** Numbers of rows at round distances, where there is no room for their names. */
  paintNumbers(context, begin, end) {
    const least = NUMBERS_APART / this.rowHeight;
    const power = 10 ** Math.floor(Math.log10(least));
    const every = Math.max(1, [1, 2, 5, 10].find((times) => times * power >= least) * power);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = this.ink["--muted"];
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let number = Math.max(every, Math.ceil(begin / every) * every); number <= end; number += every) {
      const y = this.yOf(number - 0.5);
      if (y > 6 && y < this.scroller.clientHeight - 6) context.fillText(counted(number), this.labels - 8, y);
    }
    context.textAlign = "left";
  }

  rowOf(question) {
    return this.rows.indexOf(question);
  }

  yOf(row) {
    return row * this.rowHeight - this.scroller.scrollTop;
  }

  /** First row in the window, and the one after its last. */
  visibleRows() {
    const { scrollTop, clientHeight } = this.scroller;
    const begin = Math.max(0, Math.floor(scrollTop / this.rowHeight));
    return [begin, Math.min(this.rows.length, Math.ceil((scrollTop + clientHeight) / this.rowHeight))];
  }

  /** The cell under a pointer, or null. */
  cellAt(event) {
    const box = this.scroller.getBoundingClientRect();
    const x = event.clientX - box.left - this.labels + this.scroller.scrollLeft;
    const row = Math.floor((event.clientY - box.top + this.scroller.scrollTop) / this.rowHeight);
    const place = Math.floor(x / this.columnWidth);
    const beside = event.clientX - box.left < this.labels;
    if (row < 0 || row >= this.rows.length || (!beside && place >= this.columns.length)) return null;
    return { row, place: beside ? this.cursor.place : place, beside };
  }

  hover(event) {
    const cell = event.pointerType === "touch" ? null : this.cellAt(event);
    if (!cell) return this.hideTip();
    this.tip.replaceChildren(...this.told.described(this.spanOf(cell.row), cell.beside ? null : cell.place));
    this.tip.hidden = false;
    const frame = this.frame.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top;
    const { offsetWidth: wide, offsetHeight: tall } = this.tip;
    this.tip.style.left = `${Math.max(4, x + 16 + wide > frame.width ? x - wide - 12 : x + 16)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(y + 16, frame.height - tall - 4))}px`;
    return undefined;
  }

  /** Rows that share a line of pixels with this one: itself alone where rows are as tall as one. */
  spanOf(row) {
    if (this.rowHeight >= 1) return [row, row + 1];
    const together = 1 / this.rowHeight;
    const line = Math.floor(row / together);
    return [Math.floor(line * together), Math.min(this.rows.length, Math.ceil((line + 1) * together))];
  }

  hideTip() {
    this.tip.hidden = true;
  }

  click(event) {
    const cell = this.cellAt(event);
    if (!cell) return;
    this.cursor = { ...this.cursor, row: cell.row, place: cell.place };
    if (this.rowHeight < SMALLEST_TARGET) this.zoom(ROW_HEIGHTS.indexOf(LABELLED) - this.level, event.clientY);
    else this.told.chosen(this.rows[cell.row], cell.beside ? null : this.columns[cell.place], event.shiftKey);
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1 : -1, event.clientY);
  }

  key(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / Math.max(this.rowHeight, 1)) - 1);
    const moves = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      PageUp: [-page, 0], PageDown: [page, 0], Home: [-Infinity, 0], End: [Infinity, 0],
    };
    const { row, place } = this.cursor;
    if (event.key in moves) this.moveTo(row + moves[event.key][0], place + moves[event.key][1]);
    else if (event.key === "Enter" || event.key === " ") {
      if (this.rows.length) this.told.chosen(this.rows[row], this.columns[place], event.shiftKey);
    } else return;
    event.preventDefault();
  }

  /** Puts the cursor on a cell, brings it into the window, and has it read out. */
  moveTo(row, place) {
    if (!this.rows.length) return;
    this.cursor.row = Math.max(0, Math.min(this.rows.length - 1, row));
    this.cursor.place = Math.max(0, Math.min(this.columns.length - 1, place));
    this.cursor.shown = true;
    this.reveal(this.cursor.row, this.cursor.place);
    this.told.moved(this.rows[this.cursor.row], this.columns[this.cursor.place]);
  }

  /** Brings a cell into the window, if it is not in it. */
  reveal(row, place = null) {
    const { scroller, rowHeight, columnWidth } = this;
    const y = row * rowHeight;
    const x = place === null ? null : place * columnWidth;
    if (y < scroller.scrollTop) scroller.scrollTop = y;
    else if (y + rowHeight > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = y + rowHeight - scroller.clientHeight;
    }
    const across = scroller.clientWidth - this.labels;
    if (x !== null && x < scroller.scrollLeft) scroller.scrollLeft = x;
    else if (x !== null && x + columnWidth > scroller.scrollLeft + across) scroller.scrollLeft = x + columnWidth - across;
    this.draw();
  }

  showCursor(shown) {
    this.cursor.shown = shown;
    this.draw();
  }

  canZoom(by) {
    return by < 0 ? this.level >= 0 : this.level < ROW_HEIGHTS.length - 1 && (this.rowHeight ?? 0) < TALLEST;
  }

  /** Makes rows taller or less tall by so many levels; what is at `clientY` (or the cursor) stays where it is. */
  zoom(by, clientY = null) {
    if (!this.table || !this.canZoom(by)) return;
    const box = this.scroller.getBoundingClientRect();
    const at = clientY === null ? box.height / 2 : clientY - box.top;
    const row = clientY === null && this.cursor.shown ? this.cursor.row : (this.scroller.scrollTop + at) / this.rowHeight;
    let level = this.level;
    if (level < 0 && by > 0) level = ROW_HEIGHTS.findIndex((height) => height > this.rowHeight) - 1;
    this.level = Math.max(-1, Math.min(ROW_HEIGHTS.length - 1, level + by));
    if (this.level >= 0 && by < 0 && ROW_HEIGHTS[this.level] * this.rows.length <= box.height) this.level = -1;
    this.lay();
    this.scroller.scrollTop = row * this.rowHeight - at;
    this.draw();
  }

  /** Shows all rows at once again. */
  fit() {
    this.level = -1;
    this.lay();
  }
}

function styleOf(element, names) {
  const style = getComputedStyle(element);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = Math.min(text.length, 60);
  while (kept > 1 && context.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return `${text.slice(0, kept)}…`;
}
