"""The page: its own files as a server sends them, and one file that holds it with everything that it shows.

The files lie in `page/`: `index.html`, which names every style sheet as `<link rel="stylesheet" href="NAME.css">` and
its first module as `<script type="module" src="NAME.js"></script>`, each on a line of its own. For one file they are
put in place of these lines, so modules import each other by `import { … } from "./NAME.js";` and export by `export`
before a declaration, nothing is renamed by either, and no two modules declare one name.
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
from tasks.viewing.columns import packed
from tasks.viewing.view import IN_MEMORY, View

CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Kinds of files that the page has, by the ends of their names."""
MOST_ANSWERS = IN_MEMORY
"""Answers that a file holds at most, some 30 MB where they are short."""
MOST_BYTES = 128 * 2**20
"""Bytes of the files of samples that a file holds at most, as they are kept: some 400 MB of text."""
BESIDE_A_REPORT = 20_000
"""Answers up to which a report has such a file beside it without being asked: a second, and some 5 MB."""
BYTES_BESIDE_A_REPORT = 16 * 2**20
"""Bytes of the files of samples up to which it has: 20,000 short answers have 2 MB, as many of 30 kB 200 MB."""
_QUESTIONS_PER_PART = 32
_STYLE = re.compile(r'^[ \t]*<link rel="stylesheet" href="([\w-]+\.css)">[ \t]*$', re.MULTILINE)
_SCRIPT = re.compile(r'^[ \t]*<script type="module" src="([\w-]+\.js)"></script>[ \t]*$', re.MULTILINE)
_IMPORT = re.compile(r'^import\s+\{[^}]*\}\s+from\s+"\./([\w-]+\.js)";[ \t]*\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export[ \t]+(?=(?:async|class|const|function|let)\b)", re.MULTILINE)
_HEAD = re.compile(r"<head>\n?")


@cache
def page_files() -> Mapping[str, bytes]:
    """Every file of the page by its name."""
    folder = files("tasks.viewing") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in CONTENT_TYPES}


def answers_of(found: Sequence[FoundRecord]) -> int:
    """Answers that were kept with records."""
    return sum(item.record.samples or 0 for item in found)


def bytes_of(found: Sequence[FoundRecord]) -> int:
    """Bytes of the files of samples beside records, as they are kept."""
    folders = [storage.join(item.cell_uri, item.record.attempt) for item in found if item.record.samples]
    files = (file for folder in folders for file in storage.list_files(folder))
    return sum(file.size for file in files if storage.basename(file.uri) == SAMPLES_NAME)


def write_page(
    found: Sequence[FoundRecord], uri: str, *, title: str, location: str, wanted: RecordFilter | None = None
) -> str:
    """Writes the page of some records with all that it shows as one file, and returns where.

    Args:
        found: the records.
        uri: where the file is to lie.
        title: heading.
        location: folder or place that the records lie below.
        wanted: the benchmarks that it shows; all if left out.
    """
    with closing(View(found, title=title, location=location, wanted=wanted)) as view:
        storage.write_bytes(uri, one_file(view.contents(questions_per_part=_QUESTIONS_PER_PART)))
    return uri


def write_beside_report(found: Sequence[FoundRecord], report: str, *, title: str, location: str) -> str | None:
    """Writes the page beside a report, and returns where; None where there are no answers, or too many for that."""
    if not 0 < answers_of(found) <= BESIDE_A_REPORT or bytes_of(found) > BYTES_BESIDE_A_REPORT:
        return None
    return write_page(found, f"{report.removesuffix('.html')}-questions.html", title=title, location=location)


def one_file(contents: Mapping[str, bytes]) -> bytes:
    """The page in one file, with what it asks for in it.

    Args:
        contents: content by the names of `columns`.
    """
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
