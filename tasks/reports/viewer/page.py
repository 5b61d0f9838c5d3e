"""The page: its files for a server, and a single file of the page with all its data.

The files are in `page/`: `index.html` has each style sheet as `<link rel="stylesheet" href="NAME.css">` and the first
module as `<script type="module" src="NAME.js"></script>`, each on a line of its own. A single file inlines them in
place of these lines. So modules must import each other by `import { … } from "./NAME.js";` and export by `export`
before a declaration, without renaming, and no two modules may declare the same name.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from html import escape
from importlib.resources import files

from resources.storage import storage
from tasks.records.record import FoundRecord
from tasks.records.samples import SAMPLES_NAME
from tasks.records.search import RecordFilter
from tasks.reports.viewer.columns import packed
from tasks.reports.viewer.view import IN_MEMORY, View

CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Content types of the page's files by extension."""
MOST_ANSWERS = IN_MEMORY
"""Largest number of answers in a file, about 30 MB if they are short."""
MOST_BYTES = 128 * 2**20
"""Largest size of the sample files for a page, as stored (compressed); about 400 MB of text."""
MOST_ANSWERS_NEXT_TO_A_REPORT = 20_000
"""Largest number of answers at which a report gets this page without a request: takes 1 s and about 5 MB."""
MOST_BYTES_NEXT_TO_A_REPORT = 16 * 2**20
"""Largest size of the sample files for such a page: 20,000 short answers have 2 MB, answers of 30 kB 200 MB."""
_QUESTIONS_PER_PART = 32
_STYLE = re.compile(r'^[ \t]*<link rel="stylesheet" href="([\w-]+\.css)">[ \t]*$', re.MULTILINE)
_SCRIPT = re.compile(r'^[ \t]*<script type="module" src="([\w-]+\.js)"></script>[ \t]*$', re.MULTILINE)
_IMPORT = re.compile(r'^import\s+\{[^}]*\}\s+from\s+"\./([\w-]+\.js)";[ \t]*\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export[ \t]+(?=(?:async|class|const|function|let)\b)", re.MULTILINE)
_HEAD = re.compile(r"<head>\n?")


@cache
def page_files() -> Mapping[str, bytes]:
    """Returns every file of the page by name."""
    folder = files("tasks.reports.viewer") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in CONTENT_TYPES}


def answers_of(entries: Sequence[FoundRecord]) -> int:
    """Returns the number of answers stored with records."""
    return sum(entry.record.samples or 0 for entry in entries)


def bytes_of(entries: Sequence[FoundRecord]) -> int:
    """Returns the size of the sample files of records in bytes, as stored."""
    folders = [storage.join(entry.cell_uri, entry.record.attempt) for entry in entries if entry.record.samples]
    files = (file for folder in folders for file in storage.list_files(folder))
    return sum(file.size for file in files if storage.basename(file.uri) == SAMPLES_NAME)


def write_page(
    entries: Sequence[FoundRecord], uri: str, *, title: str, location: str, filters: RecordFilter | None = None
) -> str:
    """Writes the page of some records with all its data as a single file and returns its URI.

    `location` is the folder or store of the records; `filters` selects benchmarks.
    """
    with closing(View(entries, title=title, location=location, filters=filters)) as view:
        storage.write_bytes(uri, single_file(view.contents(questions_per_part=_QUESTIONS_PER_PART)))
    return uri


def write_next_to_report(entries: Sequence[FoundRecord], report: str, *, title: str, location: str) -> str | None:
    """Writes the page next to a report and returns its URI; None without answers, or with too many."""
    if not 0 < answers_of(entries) <= MOST_ANSWERS_NEXT_TO_A_REPORT or bytes_of(entries) > MOST_BYTES_NEXT_TO_A_REPORT:
        return None
    return write_page(entries, f"{report.removesuffix('.html')}-questions.html", title=title, location=location)


def single_file(contents: Mapping[str, bytes]) -> bytes:
    """Returns the page as a single file with the contents, by the names of `columns`, embedded."""
    parts = {name: content.decode() for name, content in page_files().items()}
    styles: list[str] = []
    scripts: list[str] = []

    def style(match: re.Match[str]) -> str:
        styles.append(f"\n{parts[match[1]]}")
        return f"<style>{styles[-1]}</style>"

    def script(match: re.Match[str]) -> str:
        scripts.append(f"\n{_modules(match[1], parts, seen=set())}")
        return f'{held}\n<script type="module">{scripts[-1]}</script>'

    held = "\n".join(
        f'<script type="application/octet-stream" data-name="{escape(name)}">'
        f"{base64.b64encode(packed(content)).decode()}</script>"
        for name, content in contents.items()
    )
    page = _SCRIPT.sub(script, _STYLE.sub(style, parts["index.html"]))
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    rule = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return _HEAD.sub(lambda match: rule, page, count=1).encode()


def _modules(name: str, parts: Mapping[str, str], *, seen: set[str]) -> str:
    seen.add(name)
    text = parts[name]
    before = [_modules(other, parts, seen=seen) for other in _IMPORT.findall(text) if other not in seen]
    return "\n".join([*before, _EXPORT.sub("", _IMPORT.sub("", text))])


def _hashes(texts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
