"""The git state of a job's files, for the tags in MLflow."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from resources.errors import BadInput
from tasks.records.provenance import git_output

CLEAN = "clean"


@dataclass(frozen=True)
class GitState:
    """A commit, and the differences of the working tree from it."""

    root: Path | None
    """Folder of the repository; None outside of a repository."""
    commit: str | None
    changed: tuple[str, ...] = ()
    """Files that differ from the commit, or are not in it."""
    pushed: bool = False
    """True if a remote branch has the commit."""

    @property
    def words(self) -> str:
        """The state for a tag: `clean`, or the problems."""
        if self.commit is None:
            return "no commit"
        changes = [f"uncommitted: {', '.join(self.changed[:5])}" + ("…" if self.changed[5:] else "")]
        problems = [*(changes if self.changed else ()), *(["not pushed"] if not self.pushed else ())]
        return "; ".join(problems) or CLEAN

    def path_of(self, file: Path) -> str:
        """Returns the path of a file within the repository, else the path as given."""
        absolute = file.resolve()
        inside = self.root is not None and absolute.is_relative_to(self.root)
        return str(absolute.relative_to(self.root)) if inside and self.root is not None else str(file)


def git_state_of(files: Collection[Path], *, but: Path | None = None) -> GitState:
    """Returns the state of the first file's repository, without `but`; files not tracked by git count as changed."""
    first, *_ = files
    root = _git(first.resolve().parent, "rev-parse", "--show-toplevel")
    if root is None:
        return GitState(None, None)
    folder = Path(root).resolve()
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    listed = _git(folder, "status", "--porcelain=v1", "--untracked-files=all", "-z") or ""
    changed = [entry[3:] for entry in listed.split("\0") if entry[2:3] == " "]
    for file in files:  # files that git ignores, or outside of the repository
        if _git(folder, "ls-files", "--error-unmatch", "--", str(file.resolve())) is None:
            changed.append(GitState(folder, None).path_of(file))
    written = GitState(folder, None).path_of(but) if but is not None else None
    pushed = bool(commit and _git(folder, "branch", "--remotes", "--contains", commit))
    return GitState(folder, commit, tuple(dict.fromkeys(name for name in changed if name != written)), pushed)


def require_clean(state: GitState, *, allow_dirty: bool) -> None:
    """Raises BadInput if the files differ from a pushed commit, unless `allow_dirty`."""
    if state.words != CLEAN and not allow_dirty:
        raise BadInput(
            expected="job files that are committed and pushed, so that config_git_sha names what ran",
            found=state.words,
            remedy="commit and push, or let --allow-dirty write this into a tag",
        )


def _git(folder: Path, *arguments: str) -> str | None:
    return git_output(folder, *arguments, timeout_seconds=60)  # git status is slow in a large repository
