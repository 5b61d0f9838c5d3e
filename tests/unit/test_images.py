"""Container images: files that their Dockerfiles copy exist and suffice, and a cluster's rules are met."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest

from resources.environments.environments import ENVIRONMENTS, EnvironmentSpec
from tasks.evaluators.evaluator import harness_environments

ROOT = Path(__file__).parents[2]
IMPORT_COPIED = "import sys; from importlib import import_module; sys.path.append({libraries!r}); {modules}"


@dataclass(frozen=True)
class Image:
    """A Dockerfile: its instructions in order, comments left out and continued lines joined."""

    text: str
    instructions: tuple[tuple[str, str], ...]

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == instruction]

    def copies(self) -> list[tuple[list[str], str]]:
        """Returns sources and destination of each COPY, without the COPY of the code, which is the last."""
        return [(sources, target) for *sources, target in map(str.split, self.all("COPY")) if sources != ["."]]

    def environments(self) -> dict[str, tuple[str, EnvironmentSpec]]:
        """Returns the environments built into the image by name, each with the module that defines it."""
        by_name = {}
        for arguments in re.findall(r"python build\.py (.+)", "\n".join(self.all("RUN"))):
            module, name, *keys = arguments.split()
            spec = getattr(import_module(module), name)
            for key in keys:
                spec = spec[key]
            by_name[spec.name] = module, spec
        return by_name


def _read(path: Path) -> Image:
    text = path.read_text()
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return Image(text, tuple((name, arguments) for name, arguments in lines))


IMAGES = {path.stem: _read(path) for path in sorted((ROOT / "deployments" / "images").glob("*.Dockerfile"))}
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)


def test_images_are_for_the_orchestrator_and_each_engine_with_every_environment():
    assert set(IMAGES) == {"orchestrator", *(name.removeprefix("vllm-") for name in ENVIRONMENTS)}
    built = {name for image in IMAGES.values() for name in image.environments()}
    assert built == set(ENVIRONMENTS | harness_environments())


def test_dockerfiles_have_nothing_that_hadolint_warns_of(tmp_path: Path):
    check = str(Path(sys.executable).with_name("hadolint"))
    files = [str(path) for path in ROOT.glob("deployments/images/*.Dockerfile")]
    done = subprocess.run([check, *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(IMAGES["cpu"].text.replace("RUN apt-get", "RUN sudo apt-get"))
    assert subprocess.run([check, str(wrong)], capture_output=True, timeout=60).returncode == 1


@every_image
def test_image_has_a_named_base_an_unprivileged_user_and_labels(image: Image):
    assert image.all("FROM") == ["${BASE}"] and image.instructions[0][0] == "ARG"
    assert image.all("USER") == ["1000:1000"]
    assert image.all("COPY")[-1] == ". source/" and not any(line.startswith(".") for line in image.all("COPY")[:-1])
    assert "--uid 1000 --home-dir /scratch" in image.all("RUN")[0]
    labels = " ".join(image.all("LABEL"))
    assert 'image.version="${VERSION}"' in labels and 'image.revision="${COMMIT}"' in labels
    assert image.all("ENTRYPOINT") == ['["tini", "--", "assay"]']
    assert "://" not in image.text and "index" not in image.text


@every_image
def test_image_copies_what_exists_is_not_ignored_and_is_every_list_that_it_installs(image: Image):
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    sources = [source for sources, _ in image.copies() for source in sources]
    for source in sources:
        assert (ROOT / source).is_file(), source
        assert f"!{source.partition('/')[0]}" in ignored, source
    installed = re.findall(r"--(?:requirements|constraint) requirements/(\S+)", "\n".join(image.all("RUN")))
    named = {f"resources/environments/requirements/{name}" for name in installed}
    pythons = re.findall(r"uv python install (\S+)", "\n".join(image.all("RUN")))
    for _, spec in image.environments().values():
        named |= {str(path.relative_to(ROOT)) for path in (spec.requirements, spec.overrides) if path is not None}
        assert spec.python is None or [spec.python] == pythons
    assert {source for source in sources if fnmatch(source, "*/requirements/*")} == named


def test_modules_that_build_environments_need_no_other_module_of_ours(tmp_path: Path):
    modules = {"resources.environments.environments"}
    for image in IMAGES.values():
        modules |= {module for module, _ in image.environments().values()}
        for sources, target in image.copies():
            folder = tmp_path / target
            folder.mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(ROOT / source, folder)
    imports = "; ".join(f"import_module({module!r})" for module in sorted(modules))
    program = IMPORT_COPIED.format(libraries=sysconfig.get_path("purelib"), modules=imports)
    # -S: no file of site-packages adds the checkout.
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_ignored_files_are_all_but_what_an_image_is_built_from():
    first, *kept = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert first == "*" and {f"!{name}" for name in packages | {"pyproject.toml", "deployments"}} <= set(kept)
    assert not {"!.git", "!.venv", "!tests"} & set(kept)


def test_environment_variable_of_an_image_names_the_folder_that_it_is_built_in():
    for image in IMAGES.values():
        cache = shlex.split(next(line for line in image.all("ARG") if line.startswith("ASSAY_CACHE_DIR=")))[0]
        ahead = [part for line in image.all("ENV") for part in shlex.split(line) if part.startswith("ASSAY_BUILT")]
        assert ahead == [f"ASSAY_BUILT_ENVIRONMENTS={cache.partition('=')[2]}/environments"]
